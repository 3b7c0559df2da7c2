"""Which mask_fn and score_fn the TPU kernel can compute: elementwise ones that read no array of their own."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

PRIMITIVES = frozenset(
    "abs add and broadcast_in_dim clamp convert_element_type div eq exp exp2 ge gt integer_pow le log logistic lt max "
    "min mul ne neg not or pow rem rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sqrt "
    "square sub tanh xor".split()
)
"""Of jaxprs; a call of a nested jaxpr is looked into."""


def function_reasons(name: str, function: Callable | None, *, scored: bool) -> list[str]:
    """Why the kernel cannot compute this function of (score if `scored`, head, q_pos, kv_pos)."""
    if function is None:
        return []
    tile = (8, 128)
    arguments = [jax.ShapeDtypeStruct(tile, jnp.float32)] * scored + [jax.ShapeDtypeStruct(tile, jnp.int32)] * 3
    try:
        closed = jax.make_jaxpr(function)(*arguments)
    except Exception:  # any error of a user's function: the layer reports it when it is called
        return []
    found = [f"{name} reads an array of its own: not in this kernel"] if closed.consts else []
    unknown = sorted({eqn.primitive.name for eqn in _equations(closed.jaxpr)} - PRIMITIVES)
    return found + [f"{name} uses {', '.join(unknown)}: not in this kernel"] * bool(unknown)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Equations that are no call, those of nested jaxprs included."""
    for eqn in jaxpr.eqns:
        nested = [value.jaxpr for value in eqn.params.values() if isinstance(value, ClosedJaxpr)]
        if not nested:
            yield eqn
        for inner in nested:
            yield from _equations(inner)
