"""The operations of one layer on logits and results: its static rules and its traced parameters, ready to broadcast.

Logits of every path have the shape [K M G C]: kv heads, queries, query heads of a kv head, keys.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.ops.ragged import QueryRows
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import pytree, static
from pallas_kernels.algebra import mask, quant, rounding, softmax
from pallas_kernels.algebra.logits import LogitRule, shape_logits
from pallas_kernels.algebra.mask import MaskRule

einsum = jax.tree_util.Partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
"""jnp.einsum with float32 products on every chip, where the default precision may be lower."""


@pytree
class LayerTerms:
    """The values of a layer that attention needs, besides queries and keys. None: the layer does not use it."""

    head: jax.Array  # i32[K 1 G 1]
    alibi_slopes: jax.Array | None  # f32[K 1 G 1]
    sinks: jax.Array | None  # f32[K 1 G 1]
    k_scale: jax.Array | None  # f32[K 1 1 1]
    v_scale: jax.Array | None  # f32[K 1 1 1]
    qq_bias: jax.Array | None  # f32[Q Q]
    distance_bias: jax.Array | None  # f32[K G 2L+1]
    output_scale: jax.Array | None  # f32[]
    mask_rule: MaskRule = static()
    logit_rule: LogitRule = static()
    compute_dtype: str | None = static(default=None)

    def of_kv_heads(self, part: slice) -> "LayerTerms":
        """The terms of some of the kv heads."""
        names = ("head", "alibi_slopes", "sinks", "k_scale", "v_scale", "distance_bias")
        cut = {name: None if getattr(self, name) is None else getattr(self, name)[part] for name in names}
        return dataclasses.replace(self, **cut)


def layer_terms(spec: AttentionSpec, is_causal: bool, params: AttentionParams) -> LayerTerms:
    """The terms of this layer in a batch that is causal, or not. Parameters that the spec does not use become None."""
    kv, group = spec.num_kv_heads, spec.group_size

    def per_head(x):
        return jnp.asarray(x, jnp.float32).reshape(kv, 1, group, 1)

    def per_kv_head(x):
        return None if x is None else jnp.broadcast_to(jnp.asarray(x, jnp.float32), (kv,)).reshape(kv, 1, 1, 1)

    return LayerTerms(
        head=jnp.arange(spec.num_heads, dtype=jnp.int32).reshape(kv, 1, group, 1),
        alibi_slopes=per_head(params.alibi_slopes) if spec.has_alibi else None,
        sinks=per_head(params.sinks) if spec.has_sinks else None,
        k_scale=per_kv_head(params.k_scale),
        v_scale=per_kv_head(params.v_scale),
        qq_bias=jnp.asarray(params.qq_bias, jnp.float32) if spec.use_qq_bias else None,
        distance_bias=jnp.asarray(params.distance_bias, jnp.float32).reshape(kv, group, -1)
        if spec.use_distance_bias
        else None,
        output_scale=jnp.asarray(params.output_scale, jnp.float32) if spec.output_dtype else None,
        mask_rule=spec.mask_rule(is_causal),
        logit_rule=spec.logit_rule(),
        compute_dtype=spec.compute_dtype,
    )


def visible(terms: LayerTerms, rows: QueryRows, kv_pos: jax.Array, inside: jax.Array) -> jax.Array:
    """bool, broadcasts to [K M G C]: which of the queries `rows` see which of the keys at positions kv_pos i32[C].

    A key where inside bool[C] is False is of another request, or is counted in another step.
    """
    causal = None if rows.causal is None else _per_row(rows.causal)
    prefix = None if rows.prefix is None else _per_row(rows.prefix)
    span = None if rows.span is None else (_per_row(rows.span[0]), _per_row(rows.span[1]))
    position = _per_row(rows.position)
    seen = mask.visible(terms.mask_rule, terms.head, position, _per_key(kv_pos), causal, prefix, span)
    return seen & _per_key(inside)


def logits(terms: LayerTerms, dots: jax.Array, rows: QueryRows, kv_pos: jax.Array) -> jax.Array:
    """f32[K M G C] logits from the products q . k: all steps before the mask."""
    if terms.k_scale is not None:
        dots = dots * terms.k_scale
    bias, more = _new_token_bias(terms.qq_bias, rows, kv_pos), _distance_bias(terms.distance_bias, rows, kv_pos)
    bias = more if bias is None else bias if more is None else bias + more
    position = _per_row(rows.position)
    return shape_logits(terms.logit_rule, dots, terms.head, position, _per_key(kv_pos), terms.alibi_slopes, bias)


def weights(terms: LayerTerms, p: jax.Array, m: jax.Array) -> jax.Array:
    """The weights p = exp(logits - m) as they multiply values: rounded, if the layer has a compute_dtype."""
    return p if terms.compute_dtype is None else rounding.round_weights(p, softmax.finite_max(m), terms.compute_dtype)


def finish(terms: LayerTerms, m: jax.Array, l: jax.Array, acc: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: E741
    """(out f32[M H V], lse f32[M H]) from the state f32[K M G *] of an online softmax, sinks included."""
    out, lse = softmax.finish(m, l, acc, sink=terms.sinks)
    if terms.v_scale is not None:
        out = out * terms.v_scale
    rows = out.shape[1]
    out = out.transpose(1, 0, 2, 3).reshape(rows, -1, out.shape[-1])
    return out, lse.transpose(1, 0, 2).reshape(rows, -1)


def output_dtype(q_dtype, spec: AttentionSpec | None = None) -> str:
    """spec.output_dtype; if it is None, the dtype of the queries, or bfloat16 for quantised queries."""
    if spec is not None and spec.output_dtype is not None:
        return spec.output_dtype
    name = jnp.dtype(q_dtype).name
    return name if name in quant.FLOATS else "bfloat16"


def _per_row(x: jax.Array) -> jax.Array:
    return x[None, :, None, None]


def _per_key(x: jax.Array) -> jax.Array:
    return x[None, None, None]


def _new_token_bias(qq_bias: jax.Array | None, rows: QueryRows, kv_pos: jax.Array) -> jax.Array | None:
    """f32[1 M 1 C] the bias between new queries and new keys; 0 elsewhere."""
    if qq_bias is None:
        return None
    assert rows.context is not None  # only a decoder's layer has a qq_bias
    size = qq_bias.shape[0]
    i, j = (rows.position - rows.context)[:, None], kv_pos[None] - rows.context[:, None]
    both = (i < size) & (j >= 0) & (j < size)
    found = qq_bias[jnp.clip(i, 0, size - 1), jnp.clip(j, 0, size - 1)]
    return jnp.where(both, found, 0.0)[None, :, None]


def _distance_bias(table: jax.Array | None, rows: QueryRows, kv_pos: jax.Array) -> jax.Array | None:
    """f32[K M G C] the bias of each distance; distances beyond the table have the bias of its first or last entry."""
    if table is None:
        return None
    most = table.shape[-1] // 2
    at = jnp.clip(kv_pos[None] - rows.position[:, None], -most, most) + most
    return table[:, :, at].transpose(0, 2, 1, 3)
