"""A layer over a batch: with a paged cache (serving), or without one (training, encoders). The Flax twins call this."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.attention import PagedAttention, attention
from jattn.cache import PagedKV
from jattn.errors.arguments import as_array, check_kind, kind, takes
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.batch import BATCH, keys_of, queries_of
from jattn.nn.layer import Attend, AttentionLayer, run
from jattn.nn.rope import Angles, Rope
from jattn.nn.weights import attention_weights
from jattn.spec import AttentionSpec
from pallas_kernels.algebra import quant


@takes(layer=kind(AttentionLayer), weights=kind(dict), meta=BATCH)
def call(
    layer: AttentionLayer,
    weights: dict[str, Any],
    x: jax.Array,
    meta: CommonAttentionMetadata,
    cache: PagedKV | None = None,
    *,
    plan: Any = None,
    keys_from: jax.Array | None = None,
    backend: str = "auto",
) -> tuple[PagedKV | None, jax.Array]:
    """x [T, hidden] of the batch's packed tokens -> (cache, [T, hidden]).

    cache None: nothing is kept, all keys are in x (or in keys_from), and the result can be differentiated where the
    backend can. plan: jattn.PagedAttention(spec, cache.spec).build(meta), made once for layers that share it.
    keys_from [Te, hidden]: the encoder's packed tokens, for a cross layer's first step.
    """
    batch = queries_of(meta, layer.spec.attn_type)
    attend = attend_over(layer.spec, meta, cache, plan, backend, x)
    if layer.is_cross and cache is None and keys_from is None:
        raise ValueError("a cross layer without a cache needs the encoder's tokens on every call: pass keys_from=")
    if keys_from is not None and not layer.is_cross:
        raise ValueError(f"keys_from is for cross layers (attn_type 'encoder_decoder'), not {layer.spec.attn_type}")
    _check_weights(layer, weights)
    _check_tokens("x", x, layer.hidden_size, batch.num_tokens)
    if keys_from is not None:
        _check_tokens("keys_from", keys_from, layer.hidden_size, keys_of(meta, layer.spec.attn_type).num_tokens)
    return run(
        layer, weights, x, attend, positions=batch.positions(), angles=angles_of(layer.rope, batch),
        keys_from=keys_from,
    )  # fmt: skip


def _check_weights(layer: AttentionLayer, weights: dict) -> None:
    """The tree that attention_weights describes."""
    missing = [name for name in attention_weights(layer) if name not in weights]
    if missing:
        raise ValueError(f"weights lacks {', '.join(missing)}; see jattn.nn.weights.attention_weights(layer)")


def _check_tokens(name: str, x, hidden: int, tokens: int) -> None:
    """x [tokens, hidden] of floats."""
    _float_of(name, x)
    if x.shape != (tokens, hidden):
        raise ValueError(f"{name}.shape={x.shape} must be [T, hidden] = {(tokens, hidden)}")


def _float_of(name: str, x) -> Any:
    """The dtype of an array of floats."""
    check_kind(name, x, (jax.Array, np.ndarray))
    if as_array(name, x).dtype.name not in quant.FLOATS:
        raise ValueError(f"{name}.dtype={x.dtype} must be one of {', '.join(quant.FLOATS)}")
    return x.dtype


def attend_over(
    spec: AttentionSpec, meta: CommonAttentionMetadata, cache, plan: Any, backend: str, x: jax.Array
) -> Attend:
    """Where this layer's keys live: in pages, or nowhere beyond the call. The queries have the dtype of x."""
    if cache is None:
        if plan is not None:
            raise ValueError("a plan is of a cache's pages: pass the cache too, or no plan")
        return lambda q, k, v, params: (None, attention(q, k, v, meta, spec, params, backend=backend))
    attn = PagedAttention(spec, check_kind("cache", cache, PagedKV).spec, backend, dtype=_float_of("x", x))
    plan = attn.build(meta) if plan is None else plan
    return lambda q, k, v, params: attn(q, k, v, cache, plan, params)


def angles_of(rope: Rope | None, batch: CommonAttentionMetadata) -> Angles | None:
    """The turns of a batch's tokens: a function of each token's position and its request's final length alone."""
    if rope is None:
        return None
    lengths = jnp.asarray(batch.final_lens())[batch.token_to_req()] if rope.scaling.needs_lengths else None
    return rope.angles(batch.positions(), lengths)
