"""The forward pass of decoders with a paged cache: `forward`, one step, and `prompt_logits`, one prompt in chunks."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.attention import PagedAttention
from jattn.cache import KVCacheSpec, PagedKV
from jattn.errors.arguments import as_array, check_kind
from jattn.metadata import CommonAttentionMetadata
from jattn.mla import MLAAttention
from jattn.mla_spec import MLASpec
from jattn.models import halves, layer_tail
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.layers import (
    Stream,
    attention_sublayer,
    begin_layer,
    embed_tokens,
    finish_layer,
    first_stream,
    head,
    last_hidden,
    last_x,
    on_one_device,
)
from jattn.models.model_mesh import ModelMesh
from jattn.models.rank_sums import BY_XLA, RankSums
from jattn.models.residual import residual
from jattn.models.sharded_attention import ShardedAttention, ShardedLatentAttention
from jattn.models.without_cache import encode
from jattn.nn import Angles, LatentConfig, Rope
from jattn.nn.apply import angles_of
from jattn.nn.attention_layer import Multiply, multiply, project_and_attend
from jattn.nn.latent_layer import project_and_attend_latent
from jattn.ops.quantised import table_rows
from jattn.spec import AttentionSpec
from pallas_kernels.algebra.paging import cdiv

BatchOrPerGroup = CommonAttentionMetadata | Sequence[CommonAttentionMetadata]
"""One batch for all cache groups, or one per cache group."""


def forward(
    config: ModelConfig,
    params: dict[str, Any],
    token_ids: jax.Array,
    caches: Sequence[PagedKV],
    meta: BatchOrPerGroup,
    *,
    logits_at: jax.Array | None = None,
    encoder_ids: jax.Array | None = None,
    backend: str = "auto",
    model_mesh: ModelMesh | None = None,
) -> tuple[tuple[PagedKV, ...], jax.Array]:
    """One step: packed token_ids i32[T] -> (caches, logits f32[T, vocab]). Rows of padding tokens are undefined.

    meta: one batch, or one for each of config.cache_groups (the same tokens with other block tables).
    logits_at i32[L]: compute logits f32[L, vocab] of these packed tokens alone; None: of all tokens.
    encoder_ids i32[Te]: the packed encoder tokens of `meta.cross`, in the first step of an encoder-decoder's requests;
    None once they are cached.
    model_mesh: inside jit, with params, caches and result distributed as it says; each rank gets the logits of its part
    of the vocabulary.
    """
    args = (config, params, token_ids, caches, meta, logits_at, encoder_ids, backend, model_mesh)
    if model_mesh is None:
        return _forward(*args)
    check_kind("model_mesh", model_mesh, ModelMesh, "make one with ModelMesh.of(config, mesh)")
    with model_mesh.context():
        caches, logits = _forward(*args)
        return model_mesh.kept_caches(caches), model_mesh.over_vocabulary(logits)


def _forward(
    config: ModelConfig, params, token_ids, caches, meta, logits_at, encoder_ids, backend: str,
    model_mesh: ModelMesh | None,
) -> tuple[tuple[PagedKV, ...], jax.Array]:  # fmt: skip
    batches = _batches(config, token_ids, caches, meta, encoder_ids)
    positions, encoded = batches[0].positions(), _encoded(config, params, encoder_ids, batches[0], backend)
    sums, rows_of = BY_XLA, table_rows
    if model_mesh is not None:
        sums = model_mesh.sums(len(token_ids), config.hidden_size)
        rows_of = functools.partial(model_mesh.table_rows, sums)
    x = embed_tokens(config, params, jnp.asarray(token_ids), positions, rows_of=rows_of)
    stream, inputs = first_stream(config, params, jnp.asarray(token_ids), x)
    step = _AttentionPlans(config, caches, batches, backend, x.dtype, model_mesh)
    wanted = None if logits_at is None else as_array("logits_at", logits_at, "integers", (1,))
    wanted = None if _takes_all(wanted, len(token_ids)) else wanted
    tails = layer_tail.configs_of(config, params, x, model_mesh)
    # With AltUp, tokens are not the first axis.
    is_taken_early = wanted is not None and len(wanted) < x.shape[0] and tails is None and config.altup is None
    early = wanted if is_taken_early else None
    if tails is not None:
        attention_of = lambda i: (
            step.attns[i], caches[i], step.plan(i), positions, step.angles(config.layers[i].rope)
        )  # fmt: skip
        caches, x = layer_tail.forward(config, params, x, tails, attention_of, model_mesh)
    elif halves.serves(config, model_mesh, x.shape[0]):
        assert model_mesh is not None
        caches, x = halves.forward(config, params, x, caches, step, model_mesh, early)
    else:
        caches, stream = _each_layer(
            config, params, stream, inputs, caches, step, model_mesh, positions, encoded, early, sums
        )
        x = last_x(config, params, stream)
    if wanted is not None and not is_taken_early:
        x = x[wanted]
    return tuple(caches), head(config, params, last_hidden(config, params, x), model_mesh)


def _takes_all(wanted: Any, num_tokens: int) -> bool:
    """Is it known, before anything is computed, that these are all tokens in their order?"""
    return isinstance(wanted, np.ndarray) and np.array_equal(wanted, np.arange(num_tokens))


def _each_layer(
    config: ModelConfig, params, stream: Stream, inputs, caches, step: "_AttentionPlans", model_mesh: ModelMesh | None,
    positions, encoded, wanted: jax.Array | None, sums: RankSums,
) -> tuple[list[PagedKV], Stream]:  # fmt: skip
    """(caches, the Stream after the last layer). inputs: the per-layer embeddings [T, layers, width], if any.

    wanted: the tokens to return after the last layer; None: all. The others end with its attention, because no key
    depends on what follows.
    """
    caches, count, is_live = list(caches), len(config.layers), step.batches[0].token_is_live()
    for i, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        angles, at = step.angles(layer.rope), config.cache_of(i)
        caches[at], read, x = _self_attention(
            layer, step.attns[i], weights, stream, caches[at], step.plan(i), positions, angles, sums
        )
        if layer.cross_attn is not None:
            j = count + i  # caches of cross attention follow those of self-attention
            caches[j], x = _cross_attention(layer, step.attns[j], weights, x, caches[j], step.plan(j), encoded)
        z = None if layer.layer_input is None else inputs[:, i]
        if wanted is not None and i == count - 1:
            stream, read, x, z, is_live = jax.tree.map(lambda rows: rows[wanted], (stream, read, x, z, is_live))
        stream = _finish_layer(layer, model_mesh, weights, stream, read, x, z, is_live, sums)
    return caches, stream


# jit with a static LayerConfig: layers with equal configs share one trace.


@functools.partial(jax.jit, static_argnums=(0, 1))
def _self_attention(
    layer: LayerConfig, attn: Any, weights, stream: Stream, cache, plan, positions, angles, sums: RankSums
):
    """(cache, what the layer reads, x after attention).

    attn: a PagedAttention or, of a latent layer, an MLAAttention; or the same distributed over a mesh.
    """
    config = layer.self_attn
    by = _multiply_of(attn, sums)

    def attention(y: jax.Array) -> tuple:
        at = dict(positions=positions, angles=angles)
        if isinstance(config, LatentConfig):
            latent = lambda q, kv_c, k_pe, params: attn(q, kv_c, k_pe, cache, plan, params)
            return project_and_attend_latent(config, weights["attn"], y, latent, multiply=by, **at)
        attend = lambda q, k, v, params, angles: attn(q, k, v, cache, plan, params, angles)
        return project_and_attend(config, weights["attn"], y, attend, multiply=by, **at)

    read = begin_layer(layer, weights, stream)
    cache, x = attention_sublayer(layer, weights, read[1], attention)
    return cache, read, x


def _multiply_of(attn: Any, sums: RankSums) -> Multiply:
    """How the products around this attention are computed."""
    if isinstance(attn, ShardedAttention | ShardedLatentAttention):
        return functools.partial(attn.multiply, sums=sums)
    return multiply


@functools.partial(jax.jit, static_argnums=(0, 1))
def _cross_attention(layer: LayerConfig, attn: PagedAttention, weights, x, cache, plan, encoded):
    cross_attn = layer.cross_attn
    assert cross_attn is not None
    attend = lambda q, k, v, params, angles: attn(q, k, v, cache, plan, params, angles)
    attention = lambda y: project_and_attend(cross_attn, weights["cross"], y, attend, keys_from=encoded)
    return residual(layer.cross_norms, "cross", weights, x, attention)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _finish_layer(
    layer: LayerConfig, model_mesh: ModelMesh | None, weights, stream: Stream, read, attended, z, is_live,
    sums: RankSums,
):  # fmt: skip
    if model_mesh is None:
        function_of = functools.partial(on_one_device, is_live=is_live)
    else:
        function_of = functools.partial(model_mesh.mlp, sums=sums, is_live=is_live)
    return finish_layer(layer, weights, stream, read, attended, z, function_of)


class _AttentionPlans:
    """What the layers of one step share: one plan per distinct attention and batch, angles per distinct Rope."""

    def __init__(
        self, config: ModelConfig, caches: Sequence[PagedKV], batches: Sequence, backend: str, dtype,
        model_mesh: ModelMesh | None,
    ):  # fmt: skip
        group = {index: batch for g, batch in zip(config.cache_groups, batches, strict=True) for index in g.layers}
        specs: list[AttentionSpec | MLASpec] = [layer.attention for layer in config.layers]
        specs += [layer.cross_attn.spec for layer in config.layers if layer.cross_attn is not None]
        # Of cache i, by layer and then by cross attention layer. Layers that share a cache have no other.
        count = len(config.layers)
        self.cache_index = [config.cache_of(i) if i < count else i for i in range(len(specs))]
        pairs = [(spec, caches[at].spec) for spec, at in zip(specs, self.cache_index, strict=True)]
        attention = _attention_of if model_mesh is None else model_mesh.attention
        self.attns = [attention(spec, cache_spec, backend, dtype) for spec, cache_spec in pairs]
        # Every batch has the block table of cross attention.
        self.batches = [group.get(at, batches[0]) for at in self.cache_index]
        self.plans: dict[tuple, Any] = {}
        self.angles_by_rope: dict[Rope, Angles] = {}

    def plan(self, index: int) -> Any:
        """The plan of attention `index`, built once for each distinct attention and batch."""
        attn, batch = self.attns[index], self.batches[index]
        key = (attn, id(batch))
        if key not in self.plans:
            self.plans[key] = attn.build(batch)
        return self.plans[key]

    def angles(self, rope: Rope | None) -> Angles | None:
        """The rotary angles of this step's tokens."""
        if rope is None:
            return None
        if rope not in self.angles_by_rope:
            self.angles_by_rope[rope] = angles_of(rope, self.batches[0])
        return self.angles_by_rope[rope]


def _attention_of(
    spec: AttentionSpec | MLASpec, cache_spec: KVCacheSpec, backend: str, dtype: Any
) -> PagedAttention | MLAAttention:
    """The attention of a layer on one device."""
    if isinstance(spec, MLASpec):
        return MLAAttention(spec, cache_spec, backend)
    return PagedAttention(spec, cache_spec, backend, dtype=dtype)


def _encoded(config: ModelConfig, params, encoder_ids, batch: CommonAttentionMetadata, backend: str):
    """The encoder's hidden states; None if its tokens are cached."""
    if encoder_ids is None:
        return None
    assert config.encoder is not None and batch.cross is not None
    return encode(config.encoder, params["encoder"] | {"embed": params["embed"]}, encoder_ids, batch.cross,
                  backend=backend)  # fmt: skip


def _batches(
    config: ModelConfig, token_ids, caches, meta: BatchOrPerGroup, encoder_ids
) -> tuple[CommonAttentionMetadata, ...]:
    """One batch per cache group, checked against the tokens and the caches."""
    if config.is_encoder:
        raise ValueError(f"{config.family} is an encoder, which has no next token; use jattn.models.encode")
    groups = len(config.cache_groups)
    batches = (meta,) * groups if isinstance(meta, CommonAttentionMetadata) else tuple(meta)
    wanted = config.num_own_caches + sum(layer.cross_attn is not None for layer in config.layers)
    if len(batches) != groups:
        raise ValueError(f"meta has {len(batches)} batches; pass one, or one for each of the {groups} cache groups")
    if len(caches) != wanted:
        raise ValueError(
            f"{len(caches)=} must be {wanted}, one per layer that has a cache; config.make_caches makes them"
        )
    for batch in batches:
        if jnp.shape(token_ids) != (batch.num_tokens,):
            raise ValueError(f"{jnp.shape(token_ids)=} must be [T] with the batch's T={batch.num_tokens}")
    if encoder_ids is not None:
        cross = batches[0].cross
        if config.encoder is None or cross is None:
            raise ValueError("encoder_ids need an encoder-decoder model and a batch made with encoder_seq_lens")
        if jnp.shape(encoder_ids) != (cross.num_tokens,):
            raise ValueError(f"{jnp.shape(encoder_ids)=} must be [Te] with the batch's Te={cross.num_tokens}")
    return batches


PROMPT_BLOCK_SIZE = 16  # of the caches of prompt_logits

_jitted_forward = functools.partial(jax.jit, static_argnames=("config", "backend"), donate_argnames="caches")(forward)


def prompt_logits(
    config: ModelConfig, params: dict[str, Any], token_ids: Any, *, chunk: int | None = None, backend: str = "auto"
) -> jax.Array:
    """f32[len, vocab] of one prompt through a new paged cache, `chunk` tokens a step (None: all in one step)."""
    ids = np.asarray(token_ids, np.int32)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"{ids.shape=} must be [len]: one prompt of at least one token")
    if config.max_positions is not None and len(ids) > config.max_positions:
        raise ValueError(f"a prompt of {len(ids)} tokens is longer than the model's {config.max_positions=}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"{chunk=} must be >= 1, or None for the whole prompt at once")
    size, blocks = min(chunk or len(ids), len(ids)), cdiv(len(ids), PROMPT_BLOCK_SIZE)
    caches = config.make_caches(blocks, PROMPT_BLOCK_SIZE, params["embed"].dtype)
    block_table, logits = np.arange(blocks, dtype=np.int32)[None], []
    for first in range(0, len(ids), size):
        new = ids[first : first + size]
        meta = CommonAttentionMetadata.from_lengths(
            [len(new)], [first + len(new)], block_table, PROMPT_BLOCK_SIZE, num_tokens=size, final_seq_lens=[len(ids)]
        )
        padded = np.pad(new, (0, size - len(new)))
        caches, rows = _jitted_forward(config, params, padded, caches, meta, backend=backend)
        logits.append(rows[: len(new)])
    return jnp.concatenate(logits)
