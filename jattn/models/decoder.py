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
from jattn.models.parts import around, embed, head
from jattn.models.uncached import encode
from jattn.nn import Angles, Rope
from jattn.nn.call import angles_of
from jattn.nn.layer import run

Batch = CommonAttentionMetadata | Sequence[CommonAttentionMetadata]


def forward(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    caches: Sequence[PagedKV],
    meta: Batch,
    *,
    logits_at: jax.Array | None = None,
    encoder_ids: jax.Array | None = None,
    backend: str = "auto",
) -> tuple[tuple[PagedKV, ...], jax.Array]:
    """One step: token_ids i32[T] packed -> (caches, logits f32[T, vocab]).

    meta: one batch, or one for each of config.cache_groups (same tokens, other pages). logits_at i32[L]: the packed
    tokens whose logits are wanted, logits f32[L, vocab]; None: all. What stands in a padding token's row means
    nothing. encoder_ids i32[Te]: the packed tokens of `meta.cross`, on the first step of an encoder-decoder's
    requests; None once they are cached.
    """
    batches = _batches(config, token_ids, caches, meta, encoder_ids)
    positions, encoded = batches[0].positions(), _encoded(config, params, encoder_ids, batches[0], backend)
    x = embed(config, params, jnp.asarray(token_ids), positions)
    step, count = _Step(config, caches, batches, backend, x.dtype), len(config.layers)
    own, cross = [], []
    for index, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        at = index + count
        angles = step.angles(layer.rope)
        cache, x = _attend(layer, step.attns[index], weights, x, caches[index], step.plan(index), positions, angles)
        own.append(cache)
        if layer.cross is not None:
            cache, x = _cross(layer, step.attns[at], weights, x, caches[at], step.plan(at), encoded)
            cross.append(cache)
        x = _mlp(layer, weights, x)
    if logits_at is not None:
        x = x[jnp.asarray(logits_at)]
    return (*own, *cross), head(config, params, x)


# Equal layers share one trace: their configs are equal, so the second takes the first one's.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend(layer: LayerConfig, attn: PagedAttention, weights, x, cache, plan, positions, angles):
    attend = lambda q, k, v, params: attn(q, k, v, cache, plan, params)
    mix = lambda y: run(layer.mixer, weights["attn"], y, attend, positions=positions, angles=angles)
    return around(layer, weights, "attn", x, mix)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _cross(layer: LayerConfig, attn: PagedAttention, weights, x, cache, plan, encoded):
    attend = lambda q, k, v, params: attn(q, k, v, cache, plan, params)
    return around(
        layer, weights, "cross", x, lambda y: run(layer.cross, weights["cross"], y, attend, keys_from=encoded)
    )


@functools.partial(jax.jit, static_argnums=0)
def _mlp(layer: LayerConfig, weights, x):
    return around(layer, weights, "mlp", x, lambda y: (None, layer.mlp(weights["mlp"], y)))[1]


class _Step:
    """What the layers of one step share: a plan for each distinct attention and batch, angles for each rope."""

    def __init__(self, config: ModelConfig, caches: Sequence[PagedKV], batches: Sequence, backend: str, dtype):
        group = {index: batch for g, batch in zip(config.cache_groups, batches, strict=True) for index in g.layers}
        specs = [layer.attention for layer in config.layers] + [l.cross.spec for l in config.layers if l.cross]
        pools = [cache.spec for cache in caches]
        self.attns = [PagedAttention(*of, backend, dtype=dtype) for of in zip(specs, pools, strict=True)]
        self.batches = [group.get(index, batches[0]) for index in range(len(specs))]  # cross pages: in any batch
        self.plans: dict[tuple, Any] = {}
        self.turns: dict[Rope, Angles] = {}

    def plan(self, index: int) -> Any:
        """The plan of cache `index`, built when its attention and batch are first met."""
        attn, batch = self.attns[index], self.batches[index]
        key = (attn, id(batch))
        if key not in self.plans:
            self.plans[key] = attn.build(batch)
        return self.plans[key]

    def angles(self, rope: Rope | None) -> Angles | None:
        """The turns of this step's tokens."""
        if rope is None:
            return None
        if rope not in self.turns:
            self.turns[rope] = angles_of(rope, self.batches[0])
        return self.turns[rope]


def _encoded(config: ModelConfig, params, encoder_ids, batch: CommonAttentionMetadata, backend: str):
    """The encoder's hidden states, where its tokens are given."""
    if encoder_ids is None:
        return None
    return encode(config.encoder, params["encoder"] | {"embed": params["embed"]}, encoder_ids, batch.cross,
                  backend=backend)  # fmt: skip


def _batches(config: ModelConfig, token_ids, caches, meta: Batch, encoder_ids) -> tuple[CommonAttentionMetadata, ...]:
    """One batch a cache group, checked against the tokens and the caches."""
    if config.is_encoder:
        raise ValueError(f"{config.family} is an encoder and has no next token: use jattn.models.encode")
    groups = len(config.cache_groups)
    batches = (meta,) * groups if isinstance(meta, CommonAttentionMetadata) else tuple(meta)
    wanted = len(config.layers) + sum(layer.cross is not None for layer in config.layers)
    if len(batches) != groups:
        raise ValueError(f"meta has {len(batches)} batches; pass one, or one for each of the {groups} cache groups")
    if len(caches) != wanted:
        raise ValueError(f"{len(caches)=} must be {wanted}, as config.make_caches makes them")
    for batch in batches:
        if jnp.shape(token_ids) != (batch.num_tokens,):
            raise ValueError(f"{jnp.shape(token_ids)=} must be [T] with the batch's T={batch.num_tokens}")
    cross = batches[0].cross
    if encoder_ids is not None and (config.encoder is None or cross is None):
        raise ValueError("encoder_ids are for encoder-decoder models and batches with encoder_seq_lens")
    if encoder_ids is not None and jnp.shape(encoder_ids) != (cross.num_tokens,):
        raise ValueError(f"{jnp.shape(encoder_ids)=} must be [Te] with the batch's Te={cross.num_tokens}")
    return batches
