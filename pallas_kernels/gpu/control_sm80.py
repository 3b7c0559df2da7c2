"""Loops and branches inside inlined code of a Mosaic GPU kernel, where a value is one number of each thread."""

import jax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import scf
from jax.experimental.mosaic.gpu import utils


def loop(count, carry, step):
    """carry = step(i, carry) for i < count."""
    return utils.fori(count, (carry,))(lambda i, carry: (step(i, *carry),)).results[0]


def repeat(condition, step, *carry):
    """carry = step(*carry) as long as condition(*carry) holds. Threads that meet in either must have the same one."""
    op = scf.WhileOp([x.type for x in carry], list(carry))
    before, after = (region.blocks.append(*(x.type for x in carry)) for region in (op.before, op.after))
    with ir.InsertionPoint(before):
        scf.condition(condition(*before.arguments), list(before.arguments))
    with ir.InsertionPoint(after):
        scf.yield_(list(step(*after.arguments)))
    return tuple(op.results)


def where(condition, compute, otherwise):
    """compute() where the condition holds, else the values. Threads that meet in compute, at a barrier or in a vote,
    must have the same condition."""
    values, tree = jax.tree.flatten(otherwise)
    branch = scf.IfOp(condition, [value.type for value in values], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_(jax.tree.leaves(compute()))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(values)
    return jax.tree.unflatten(tree, list(branch.results))
