"""Steps in which the launch for a layer's rest computes the layer's attention too: which they are, and their plan.

One new token for each of at most 8 requests, over a bf16 cache, with or without a window. Queries and keys are rotated,
after their biases and an RMS norm of each head if they have those. Where a request has many keys, the attention kernel
is taken (MOST_TURNS). A program whose requests may have many contains both forms and chooses in each step.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.attention import PagedAttention
from jattn.backends.gpu_plan import PallasGpuMetadata
from jattn.backends.pallas_gpu import PallasGpuBackend
from jattn.backends.parallel import ContextParallel
from jattn.models.config import LayerConfig
from jattn.nn import AttentionConfig
from jattn.nn import layer_tail as op
from jattn.nn.attention_layer import projections, rows_apart
from jattn.spec import AttentionSpec
from pallas_kernels.gpu import tail_attention_sm90 as kernel
from pallas_kernels.gpu.layer_tail_config import ATTENDING_ROWS, SHARES, LayerTailConfig, TailAttention

MOST_TURNS = 8
"""With more turns of a CTA's loop over its keys, the attention kernel and its two small launches are taken instead. For
one request of 4000 keys, 8 turns, a layer of Llama 8B still takes 135.8 us in one launch and 138.8 in four (H200,
2026-11-30); more turns have not been measured."""
KERNELS = "q", "k", "v", "qkv", "o"
NORMS = "q_norm", "k_norm"


@dataclasses.dataclass(frozen=True)
class Attending:
    """The launches of such a step, one a layer, and what their CTAs do."""

    configs: list[LayerTailConfig]
    plans: Callable[[], list[jax.Array]]  # makes the plan of each layer, see kernel.plan; called where they are used
    vectors: list[tuple]  # of each layer: the biases of q, k and v, and the scales of the norms of q and k, if any
    has_few_keys: jax.Array | None  # bool[]: no CTA has more than MOST_TURNS; None: in no batch of this shape


def attending(
    layers: Sequence[LayerConfig], weights: Sequence[dict], configs: Sequence[LayerTailConfig], attns: Sequence,
    arguments: Sequence, weights_of: Callable, formula_of: Callable,
) -> Attending | None:  # fmt: skip
    """None if attention of some layer needs a launch of its own. arguments: of each layer (cache, metadata of
    attention, positions, angles)."""
    found: list[Any] = []
    for i, layer in enumerate(layers):
        attention = _attention_of(layer, weights[i]["attn"], attns[i], *arguments[i], rows=configs[i].rows)
        if attention is None:
            return None
        kernels, scales = weights_of(weights, layers, i)
        config = op.config_of(configs[i].rows, jnp.dtype(jnp.bfloat16), kernels, scales, formula_of(i), attention)
        if config is None:
            return None
        found.append(config)
    if len(layers) > 1:
        splits = [config.products[-1].splits for config in found]
        splits = [splits[max(i - 1, 0)] for i in range(len(found))]
        directly = max(splits) <= SHARES
        found = [_with_sums(c, n, layer, directly) for c, n, layer in zip(found, splits, layers, strict=True)]
    keys = [(config.attention.left, id(m)) for config, (_, m, *_) in zip(found, arguments, strict=True)]
    of_key = {key: (c, m) for key, c, (_, m, *_) in zip(keys, found, arguments, strict=True)}

    def plans() -> list[jax.Array]:
        made = {
            key: kernel.plan(c.attention, c.ctas, *_lengths(m), jnp.asarray(m.slot_mapping))
            for key, (c, m) in of_key.items()
        }
        return [made[key] for key in keys]

    vectors = [_vectors(layer.self_attn, own["attn"]) for layer, own in zip(layers, weights, strict=True)]
    few = None
    # One bound for all layers: the batches of cache groups are the same tokens, with other block tables.
    longest = arguments[0][1].common.max_seq_len
    if any(kernel.most_turns(c.attention, c.ctas, c.rows, longest) > MOST_TURNS for c in found):
        turns = [kernel.most_turns(c.attention, c.ctas, *_live_and_longest(m)) for c, m in of_key.values()]
        few = functools.reduce(jnp.maximum, turns) <= MOST_TURNS
    return Attending(found, plans, vectors, few)


def _lengths(m: PallasGpuMetadata) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(m.common.query_start_loc), jnp.asarray(m.common.seq_lens)


def _live_and_longest(m: PallasGpuMetadata) -> tuple[jax.Array, jax.Array]:
    """i32[] the batch's new tokens, and the tokens of its longest request."""
    query_start_loc, seq_lens = _lengths(m)
    return query_start_loc[-1], jnp.max(seq_lens)


def _vectors(config: Any, weights: dict) -> tuple:
    """See Attending."""
    biases = tuple(weights[name]["bias"] for name in projections(config)) if config.qkv_bias else ()
    biases = rows_apart(config, *biases) if len(biases) == 1 else biases
    return *biases, *(weights[name]["scale"] for name in NORMS if name in weights)


def _with_sums(config: LayerTailConfig, splits: int, layer: LayerConfig, directly: bool) -> LayerTailConfig:
    """The launch whose queries, keys and values are still sums of `splits` CTAs of the launch before.

    directly: see LayerTailConfig.adds_directly.
    """
    norm = layer.attn_norms.before
    assert norm is not None and config.attention is not None
    shares = SHARES if directly else config.shares
    attention = dataclasses.replace(config.attention, sums=splits, eps=norm.eps, shares=shares)
    return dataclasses.replace(config, attention=attention, adds_directly=directly and len(config.products) == 4)


def _attention_of(
    layer: LayerConfig, weights: dict, attn: Any, cache: Any, m: Any, positions, angles, *, rows: int
) -> TailAttention | None:
    """The sizes of a layer's attention; None if the launch cannot compute it."""
    config = layer.self_attn
    if rows > ATTENDING_ROWS or not isinstance(attn, PagedAttention) or attn.chosen is not PallasGpuBackend:
        return None
    assert isinstance(config, AttentionConfig) and isinstance(m, PallasGpuMetadata)
    spec, cache_spec, common = attn.spec, cache.spec, m.common
    plain = AttentionSpec(
        num_heads=spec.num_heads, head_dim=spec.head_dim, num_kv_heads=spec.num_kv_heads, scale=spec.scale,
        sliding_window=spec.sliding_window,
    )  # fmt: skip
    is_plain = spec == plain
    is_plain = is_plain and set(weights) <= {*KERNELS, *NORMS} and attn.parallel == ContextParallel()
    is_plain = is_plain and _has_plain_norms(config, weights)
    is_plain = is_plain and all(vector.dtype == jnp.bfloat16 for vector in _vectors(config, weights))
    between = config.v_norm, config.clip_qkv
    rotates = config.rotates_last and angles is not None and not angles.interleaved and angles.dim == spec.head_dim
    is_plain = is_plain and rotates and not any(x is not None for x in between) and not config.k_is_v
    is_bf16 = cache.k.dtype == cache.v.dtype == jnp.bfloat16 and not cache_spec.is_quantized
    is_decode = common.max_query_len == 1 and common.is_causal and common.causal_per_request is None
    assert m.block_table is not None
    is_one_level = not m.shared and m.shard is None and m.prefix is None
    if not (is_plain and is_bf16 and is_decode and is_one_level) or m.slot_mapping.shape[0] != rows:
        return None
    return TailAttention(
        heads=spec.num_heads, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, scale=spec.scale,
        blocks=cache_spec.num_blocks, page=cache_spec.block_size, columns=m.block_table.shape[1],
        heads_first=cache_spec.physical_layout == "HND", left=spec.mask_rule(True).left,
        norm_eps=None if config.qk_norm is None else config.qk_norm.eps,
        norm_one_plus=config.qk_norm is not None and config.qk_norm.one_plus, has_bias=config.qkv_bias,
    )  # fmt: skip


def _has_plain_norms(config: AttentionConfig, weights: dict) -> bool:
    """Queries and keys have no norm, or an RMS norm of each head before the rotation."""
    norm = config.qk_norm
    if norm is None:
        return True
    is_plain = norm.kind == "rms" and norm.has_scale and not norm.has_bias
    of_head = not (config.qk_norm_all_heads or config.qk_norm_scale_per_head or config.qk_norm_after_rope)
    return is_plain and of_head
