"""The decoder: token ids in, caches and logits out; pure, and one function for every family."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.attention import PagedAttention
from jattn.cache import PagedKV
from jattn.metadata import CommonAttentionMetadata
from jattn.models.config import LayerConfig, ModelConfig
from jattn.nn import Angles, Rope
from jattn.nn.call import angles_of
from jattn.nn.layer import run
from jattn.nn.norm import Norm

Batch = CommonAttentionMetadata | Sequence[CommonAttentionMetadata]


def forward(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    caches: Sequence[PagedKV],
    meta: Batch,
    *,
    logits_at: jax.Array | None = None,
    backend: str = "auto",
) -> tuple[tuple[PagedKV, ...], jax.Array]:
    """One step: token_ids i32[T] packed -> (caches, logits f32[T, vocab]).

    meta: one batch, or one for each of config.cache_groups (same tokens, other pages). logits_at i32[L]: the packed
    tokens whose logits are wanted, logits f32[L, vocab]; None: all. What stands in a padding token's row means nothing.
    """
    batches = _batches(config, token_ids, caches, meta)
    first = batches[0]
    positions, steps = first.positions(), _Steps(config, caches, batches, backend)
    x = embed(config, params, jnp.asarray(token_ids), positions)
    new = []
    for index, (layer, weights, cache) in enumerate(zip(config.layers, params["layers"], caches, strict=True)):
        attn, plan = steps.plan(index)
        cache, x = _layer(layer, attn, weights, x, cache, plan, positions, steps.angles(layer.rope))
        new.append(cache)
    if logits_at is not None:
        x = x[jnp.asarray(logits_at)]
    return tuple(new), head(config, params, x)


def embed(config: ModelConfig, params: dict[str, Any], token_ids: jax.Array, positions: jax.Array) -> jax.Array:
    """[T] -> [T, hidden]. An id outside the vocabulary takes its nearest row: padding may hold anything."""
    x = params["embed"].at[token_ids].get(mode="clip")
    if config.embedding_scale != 1.0:
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
    if config.learned_positions:
        x = x + params["positions"].at[positions].get(mode="clip")
    return normed(config.embedding_norm, params, "embedding_norm", x)


def head(config: ModelConfig, params: dict[str, Any], x: jax.Array) -> jax.Array:
    """[L, hidden] -> logits f32[L, vocab]."""
    x = normed(config.final_norm, params, "final_norm", x)
    kernel = params["embed"].T if config.tied_embeddings else params["head"]["kernel"]
    logits = jnp.dot(x, kernel, preferred_element_type=jnp.float32) * config.logits_scale
    if config.head_bias:
        logits = logits + params["head"]["bias"].astype(jnp.float32)[None, :]
    cap = config.logits_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def normed(norm: Norm | None, params: dict[str, Any], name: str, x: jax.Array) -> jax.Array:
    """x through the norm of this name, if the model has it."""
    return x if norm is None else norm(params.get(name, {}), x)


def halves(layer: LayerConfig, weights: dict[str, Any], x: jax.Array, attention) -> tuple[Any, jax.Array]:
    """Both halves of a layer around their residual stream; attention(x) -> (cache, y)."""
    cache, y = attention(normed(layer.attn_norm, weights, "attn_norm", x))
    x = x + normed(layer.attn_norm_after, weights, "attn_norm_after", y)
    y = layer.mlp(weights["mlp"], normed(layer.mlp_norm, weights, "mlp_norm", x))
    return cache, x + normed(layer.mlp_norm_after, weights, "mlp_norm_after", y)


# Equal layers share one trace: their configs are equal, so the second takes the first one's.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(layer: LayerConfig, attn: PagedAttention, weights, x, cache, plan, positions, angles):
    attend = lambda q, k, v, params: attn(q, k, v, cache, plan, params)
    mix = lambda y: run(layer.mixer, weights["attn"], y, attend, positions=positions, angles=angles)
    return halves(layer, weights, x, mix)


class _Steps:
    """What layers of one step share: a plan for each distinct attention and batch, angles for each distinct rope."""

    def __init__(self, config: ModelConfig, caches: Sequence[PagedKV], batches: Sequence, backend: str):
        group = {index: batch for g, batch in zip(config.cache_groups, batches, strict=True) for index in g.layers}
        self.attns = [
            PagedAttention(layer.attention, cache.spec, backend)
            for layer, cache in zip(config.layers, caches, strict=True)
        ]
        self.batches = [group[index] for index in range(len(config.layers))]
        self.plans: dict[tuple, Any] = {}
        self.turns: dict[Rope, Angles] = {}

    def plan(self, index: int) -> tuple[PagedAttention, Any]:
        attn, batch = self.attns[index], self.batches[index]
        key = (attn, id(batch))
        if key not in self.plans:
            self.plans[key] = attn.build(batch)
        return attn, self.plans[key]

    def angles(self, rope: Rope | None) -> Angles | None:
        if rope is None:
            return None
        if rope not in self.turns:
            self.turns[rope] = angles_of(rope, self.batches[0])
        return self.turns[rope]


def _batches(config: ModelConfig, token_ids, caches, meta: Batch) -> tuple[CommonAttentionMetadata, ...]:
    """One batch a cache group, checked against the tokens and the caches."""
    groups = len(config.cache_groups)
    batches = (meta,) * groups if isinstance(meta, CommonAttentionMetadata) else tuple(meta)
    if len(batches) != groups:
        raise ValueError(f"meta has {len(batches)} batches; pass one, or one for each of the {groups} cache groups")
    if len(caches) != len(config.layers):
        raise ValueError(f"{len(caches)=} must be one for each of the {len(config.layers)} layers: config.make_caches")
    for batch in batches:
        if jnp.shape(token_ids) != (batch.num_tokens,):
            raise ValueError(f"{jnp.shape(token_ids)=} must be [T] with the batch's T={batch.num_tokens}")
    return batches
