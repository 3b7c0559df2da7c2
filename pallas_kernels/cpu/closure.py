"""Closure conversion: a kernel takes the arrays that a user's function closes over as inputs."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.core import eval_jaxpr


class ConvertedClosure(NamedTuple):
    """Call fn(consts, *args), with arguments of the shapes for which it was converted."""

    fn: Callable
    consts: list[jax.Array]


def convert_closure(fn: Callable | None, *args: jax.ShapeDtypeStruct) -> ConvertedClosure | None:
    """fn traced with arguments of these shapes, and the arrays that it closes over; None for None."""
    if fn is None:
        return None
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    tree = jax.tree.structure(shape)

    def run(consts, *args):
        return jax.tree.unflatten(tree, eval_jaxpr(jaxpr.jaxpr, consts, *args))

    return ConvertedClosure(run, list(jaxpr.consts))
