"""Attention of a ragged batch over any source of keys, by the path that the backend chose; its gradient."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp

from jattn.ops import reference
from jattn.ops.cpu_loop import cpu_loop
from jattn.ops.keys import KeySource, PackedKeys
from jattn.ops.layer import layer_terms, output_dtype
from jattn.ops.ragged import RaggedBatch
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from pallas_kernels.algebra import quant, rounding

Path = Literal["dense", "chunked", "cpu_loop"]
"""The two forms of the reference (jattn.ops.reference), and the loop tuned for CPUs (jattn.ops.cpu_loop)."""


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The static arguments of one call."""

    spec: AttentionSpec
    is_causal: bool
    max_query_len: int  # upper bound of the queries of a request
    path: Path
    out_dtype: str | None = None  # None: see layer.output_dtype
    in_order: bool = True  # the queries of a request have consecutive positions; not so in the levels of a cascade


def attend_packed(
    call: AttentionCall, q: jax.Array, k: jax.Array, v: jax.Array, batch: RaggedBatch, params: AttentionParams | None,
    max_seq_len: int | None = None,
) -> AttentionState:  # fmt: skip
    """Queries [T H D] against keys [Tk K D] and values [Tk K V] packed by request, each at most max_seq_len."""
    keys = PackedKeys.of(jnp.asarray(k), jnp.asarray(v), jnp.asarray(batch.seq_lens), max_seq_len)
    return attend(call, q, keys, batch, params)


def attend(
    call: AttentionCall, q: jax.Array, keys: KeySource, batch: RaggedBatch, params: AttentionParams | None
) -> AttentionState:
    """Queries [T H D] against any source of keys."""
    return _attend(call, q, *jax.tree.map(jnp.asarray, (keys, batch, params or AttentionParams())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    call: AttentionCall, q: jax.Array, keys: KeySource, batch: RaggedBatch, params: AttentionParams
) -> AttentionState:
    terms = layer_terms(call.spec, call.is_causal, params)
    q_dtype, q = q.dtype, _real_queries(q, params)
    if call.spec.compute_dtype is not None:
        q = rounding.round_rows(q, call.spec.compute_dtype)
    dtype = call.out_dtype or output_dtype(q_dtype, call.spec)
    match call.path:
        case "cpu_loop":
            return cpu_loop(terms, q, keys, batch, call.max_query_len, dtype)
        case "chunked":
            state = reference.chunked(terms, q, keys, batch, call.max_query_len)
        case "dense":
            state = reference.dense(terms, q, keys, batch)
    return dataclasses.replace(state, out=quant.to_dtype(state.out, dtype, terms.output_scale))


def differentiable(
    call: AttentionCall, q: jax.Array, keys: KeySource, batch: RaggedBatch, params: AttentionParams
) -> AttentionState:
    """attend by the chunked reference for any call.path. The backward pass holds the logits of one chunk at a time."""
    terms = layer_terms(call.spec, call.is_causal, params)
    dtype = call.out_dtype or output_dtype(q.dtype, call.spec)
    state = reference.chunked(
        terms, _real_queries(q, params), keys, batch, call.max_query_len, differentiable=True, in_order=call.in_order
    )
    return dataclasses.replace(state, out=quant.to_dtype(state.out, dtype, terms.output_scale))


def _forward_with_residuals(call, q, keys, batch, params):
    return _attend(call, q, keys, batch, params), (q, keys, batch, params)


def _backward(call, residuals, cotangent):
    q, keys, batch, params = jax.tree.map(jnp.asarray, residuals)  # a trace returns its constants as numpy arrays
    _, pullback = jax.vjp(lambda q, keys, params: differentiable(call, q, keys, batch, params), q, keys, params)
    dq, dkeys, dparams = pullback(cotangent)
    return dq, dkeys, None, dparams


_attend.defvjp(_forward_with_residuals, _backward)


def _real_queries(q: jax.Array, params: AttentionParams) -> jax.Array:
    """Queries times q_scale, in float32; without q_scale the queries unchanged."""
    if params.q_scale is None:
        return q
    scale = jnp.asarray(params.q_scale, jnp.float32)
    return q.astype(jnp.float32) * (scale if scale.ndim == 0 else scale[None, :, None])
