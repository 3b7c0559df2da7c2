"""AttentionState, the result of attention, and merge, which combines states of disjoint sets of keys."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jattn.device import spec_of
from jattn.errors.arguments import check_kind, dtype_name, integer, is_float, reals, takes
from jattn.types import pytree
from pallas_kernels.algebra import quant


def _out_dtype(name: str, value) -> str:
    found = dtype_name(name, value)
    if found not in (*quant.FLOATS, *quant.QUANTISED):
        raise ValueError(f"{name}={found} must be one of {', '.join((*quant.FLOATS, *quant.QUANTISED))}")
    return found


@pytree
class AttentionState:
    """out [T H V]; lse f32[T H], natural log of the softmax denominator, sinks included. (0, -inf): no visible key.

    With spec.output_dtype, real out = stored out * params.output_scale.
    """

    out: jax.Array
    lse: jax.Array

    @classmethod
    @takes(num_tokens=integer(0), num_heads=integer(1), v_head_dim=integer(1), dtype=_out_dtype)
    def empty(cls, num_tokens: int, num_heads: int, v_head_dim: int, dtype=jnp.float32) -> "AttentionState":
        """The identity of `merge`."""
        return cls(
            out=jnp.zeros((num_tokens, num_heads, v_head_dim), dtype),
            lse=jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32),
        )


def specs_of_state(q: jax.Array) -> AttentionState:
    """How the state of queries [T H D] is divided over Explicit axes of a mesh: as the tokens and heads of q are."""
    tokens, heads, _ = spec_of(q)
    return AttentionState(out=PartitionSpec(tokens, heads), lse=PartitionSpec(tokens, heads))  # pyright: ignore[reportArgumentType]


def merge(*states: AttentionState) -> AttentionState:
    """Attention over the union of the states' disjoint key sets; associative, commutative, `empty` is its identity.

        lse = log sum_i exp(lse_i)        out = sum_i exp(lse_i - lse) out_i

    A row whose lse is -inf (or +inf, as some kernels write) is empty: its out, even NaN, does not count. The dtype of
    the result is the promotion of those of all outs. At most one state may include the sinks; with_sinks adds them
    afterwards.
    """
    if not states:
        raise ValueError("merge needs at least one state; use AttentionState.empty(...) for none")
    for i, s in enumerate(states):
        _check_state(f"states[{i}]", s)
    shapes = {(s.out.shape, s.lse.shape) for s in states}
    if len(shapes) > 1:
        raise ValueError(f"states to merge must have one shape, got {sorted(shapes)}")
    dtype = jnp.result_type(*(s.out for s in states))
    if len(states) == 1:
        return _with_empty_rows(states[0])
    lses = [jnp.where(jnp.isposinf(s.lse), -jnp.inf, s.lse) for s in states]
    top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, lses))
    shift = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = [jnp.exp(lse - shift) for lse in lses]  # one by one, so that XLA fuses them with the sum of outs
    total = functools.reduce(jnp.add, weights)
    nothing = total == 0
    safe = jnp.where(nothing, 1.0, total)
    parts = (
        jnp.where((w == 0)[..., None], 0.0, s.out.astype(jnp.float32) * (w / safe)[..., None])
        for w, s in zip(weights, states, strict=True)
    )
    out = functools.reduce(jnp.add, parts)
    return AttentionState(
        out=out.astype(dtype),
        lse=jnp.where(nothing, -jnp.inf, shift + jnp.log(safe)),
    )


def _check_state(name: str, state: AttentionState) -> None:
    """out [T H V] of real numbers beside lse f32[T H]."""
    check_kind(name, state, AttentionState)
    out, lse = _OUT(f"{name}.out", state.out), _LSE(f"{name}.lse", state.lse)
    if out.dtype.name in quant.QUANTISED:
        raise ValueError(
            f"{name}: out of {out.dtype} is quantised: merge states before quantisation (spec.output_dtype=None)"
        )
    if not is_float(out.dtype) or lse.dtype.name != "float32" or lse.shape != out.shape[:2]:
        raise ValueError(
            f"{name}: out {out.dtype}{list(out.shape)} and lse {lse.dtype}{list(lse.shape)} must be floats [T H V] and "
            "float32 [T H]"
        )


_OUT, _LSE = reals(3), reals(2)


def _with_empty_rows(state: AttentionState) -> AttentionState:
    """The same state with (0, -inf) in its empty rows."""
    empty = jnp.isinf(state.lse)
    return AttentionState(
        out=jnp.where(empty[..., None], jnp.zeros((), state.out.dtype), state.out),
        lse=jnp.where(empty, -jnp.inf, state.lse),
    )


def with_sinks(state: AttentionState, sinks: jax.Array) -> AttentionState:
    """The state with the logits sinks f32[H] added to the denominators. Rows without a visible key remain (0, -inf)."""
    empty = jnp.isneginf(state.lse)
    seen = jnp.where(empty, 0.0, state.lse)
    lse = jnp.logaddexp(seen, jnp.asarray(sinks, jnp.float32)[None])
    out = state.out * jnp.where(empty, 0.0, jnp.exp(seen - lse))[..., None].astype(state.out.dtype)
    return AttentionState(out=out, lse=jnp.where(empty, -jnp.inf, lse))


def log2_lse_to_ln(lse: jax.Array) -> jax.Array:
    """An lse in base 2 as a natural log: x * ln 2; -inf remains -inf."""
    return lse.astype(jnp.float32) * math.log(2.0)
