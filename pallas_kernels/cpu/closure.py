"""User functions inside a kernel: what they close over has to come in as inputs."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.core import eval_jaxpr


class Opened(NamedTuple):
    """A function taken apart: call `fn(consts, *args)` with args of the shapes it was opened for."""

    fn: Callable
    consts: list[jax.Array]


def open_closure(fn: Callable | None, *examples: jax.ShapeDtypeStruct) -> Opened | None:
    """fn traced at these shapes, the arrays that it closes over beside it; None stays None."""
    if fn is None:
        return None
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*examples)
    tree = jax.tree.structure(shape)

    def run(consts, *args):
        return jax.tree.unflatten(tree, eval_jaxpr(jaxpr.jaxpr, consts, *args))

    return Opened(run, list(jaxpr.consts))
