"""Ragged attention in plain jnp: chooses how to visit the tiles, and knows its own gradient.

The choice is by platform alone. A choice by size (dense for small problems) would change a request's last bits when
its batch grows; on CPU the loop over tiles is as fast from the smallest batch on.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jattn.cache.layout import PagedKV
from jattn.ops import drive
from jattn.ops.keys import Keys, PackedKeys, PagedKeys
from jattn.ops.ragged import RaggedBatch
from jattn.ops.state import AttentionState
from jattn.ops.tile import Numbers, Rules
from jattn.spec import AttentionParams, AttentionSpec
from pallas_kernels.algebra import quant


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about one call."""

    spec: AttentionSpec
    is_causal: bool
    max_query_len: int
    max_seq_len: int
    on_cpu: bool
    out_dtype: str | None = None  # None: the queries' own

    @property
    def rules(self) -> Rules:
        return Rules(self.spec.mask_rule(self.is_causal), self.spec.logit_rule())


def attend_paged(
    plan: Plan, q: jax.Array, cache: PagedKV, block_table: jax.Array, batch: RaggedBatch, params: AttentionParams | None
) -> AttentionState:
    """Queries [T H D] against the pages that `block_table` names."""
    return attend_keys(plan, q, PagedKeys.of(cache, block_table), batch, params)


def attend_packed(
    plan: Plan, q: jax.Array, k: jax.Array, v: jax.Array, batch: RaggedBatch, params: AttentionParams | None
) -> AttentionState:
    """Queries [T H D] against keys [Tk K D] and values [Tk K V] packed by request."""
    return _attend(plan, q, *jax.tree.map(jnp.asarray, ((k, v), batch, params or AttentionParams())))


def attend_keys(
    plan: Plan, q: jax.Array, keys: Keys, batch: RaggedBatch, params: AttentionParams | None
) -> AttentionState:
    """Queries [T H D] against any source of keys."""
    return _attend(plan, q, *jax.tree.map(jnp.asarray, (keys, batch, params or AttentionParams())))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q, source, batch: RaggedBatch, params: AttentionParams) -> AttentionState:
    return _forward(plan, q, source, batch, params, differentiable=False)


def _forward(plan: Plan, q, source, batch, params, differentiable: bool) -> AttentionState:
    spec = plan.spec
    bits = plan.on_cpu and not differentiable
    keys = PackedKeys.of(source[0], source[1], batch.kv_len, bits) if isinstance(source, tuple) else source
    q_real = q if params.q_scale is None else _scaled(q, params.q_scale)
    shape = drive.OutShape(plan.max_query_len, spec.v_head_dim, plan.out_dtype or output_dtype(q.dtype, spec))
    if bits:
        keys = keys.beside(q_real.dtype.name)
    args = (q_real, batch, keys, plan.rules, numbers(spec, params), shape)
    if plan.on_cpu and not differentiable:
        return drive.one_by_one(*args, bits)
    return drive.all_at_once(*args, static_trips=differentiable)


def _vjp_forward(plan, q, source, batch, params):
    return _attend(plan, q, source, batch, params), (q, source, batch, params)


def _vjp_backward(plan, saved, cotangent):
    """Differentiate the vectorised form, recomputing chunk by chunk: O(chunk) logits are alive at a time."""
    q, source, batch, params = jax.tree.map(jnp.asarray, saved)  # constants of a trace come back as numpy
    _, pullback = jax.vjp(
        lambda q, source, params: _forward(plan, q, source, batch, params, differentiable=True), q, source, params
    )
    dq, dsource, dparams = pullback(cotangent)
    return dq, dsource, None, dparams


_attend.defvjp(_vjp_forward, _vjp_backward)


def numbers(spec: AttentionSpec, params: AttentionParams) -> Numbers:
    """The traced numbers in the shapes that a tile broadcasts with; what the spec does not use stays out."""
    kv, group = spec.num_kv_heads, spec.group_size
    per_head = lambda x: None if x is None else jnp.asarray(x, jnp.float32).reshape(kv, 1, group, 1)  # noqa: E731

    def per_kv_head(x):
        return None if x is None else jnp.broadcast_to(jnp.asarray(x, jnp.float32), (kv,)).reshape(kv, 1, 1, 1)

    return Numbers(
        slope=per_head(params.alibi_slopes) if spec.has_alibi else None,
        sink=per_head(params.sinks) if spec.has_sinks else None,
        k_scale=per_kv_head(params.k_scale),
        v_scale=per_kv_head(params.v_scale),
        qq_bias=jnp.asarray(params.qq_bias, jnp.float32) if spec.use_qq_bias else None,
        output_scale=jnp.asarray(params.output_scale, jnp.float32) if spec.output_dtype else None,
    )


def output_dtype(q_dtype, spec: AttentionSpec | None = None) -> str:
    """What a layer asks for, or the queries' own float type; bfloat16 for quantised queries."""
    if spec is not None and spec.output_dtype is not None:
        return spec.output_dtype
    name = jnp.dtype(q_dtype).name
    return name if name in quant.FLOATS else "bfloat16"


def _scaled(q: jax.Array, scale) -> jax.Array:
    """Real queries from stored ones, in float32."""
    scale = jnp.asarray(scale, jnp.float32)
    return q.astype(jnp.float32) * (scale if scale.ndim == 0 else scale[None, :, None])
