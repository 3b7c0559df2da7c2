"""Embeddings: one vector for each request, pooled from the last hidden states of an encoder or a decoder."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import boolean, sequence_of, takes
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.buckets import power_of_two
from jattn.models.config import ModelConfig
from jattn.models.dense import DenseLayer, dense_layer
from jattn.models.without_cache import hidden_states

POOLINGS = ("mean", "cls", "last", "max", "weighted_mean", "mean_sqrt_len")
"""mean: of all tokens. cls: the first token. last: the last token, as decoders need. max: of each dimension.
weighted_mean: token i has the weight i + 1. mean_sqrt_len: the sum of n tokens, divided by the square root of n."""
MIN_TOKENS = 16
"""Packed tokens of the smallest program."""


@takes(normalize=boolean, dense=sequence_of(dense_layer))
def embed(
    config: ModelConfig,
    params: dict[str, Any],
    ids: Any,
    lengths: Sequence[int],
    pooling: str = "mean",
    *,
    normalize: bool = False,
    dim: int | None = None,
    token_types: Any = None,
    dense: Sequence[DenseLayer] = (),
    backend: str = "auto",
) -> jax.Array:
    """f32[R, dim]: the embedding of each request, in one ragged batch.

    ids: the tokens of all requests one after another, i32[sum(lengths)], or rows i32[R, L] of which request r has the
    first lengths[r]. normalize: to length 1. dim: keep the first so many dimensions (Matryoshka), before that.
    token_types: packed or in rows, like ids. dense: layers between pooling and `dim`. The batch is padded, so that few
    sizes are compiled: see `batch_of`.
    """
    if config.encoder is not None:
        raise ValueError(f"{config.family} is an encoder-decoder; embeddings need an encoder or a decoder")
    if pooling not in POOLINGS:
        raise ValueError(f"{pooling=} must be one of {', '.join(POOLINGS)}")
    check_dim(dim, output_size(config, dense))
    lengths = np.asarray(lengths).tolist()
    meta = batch_of(config, lengths)
    tokens = _packed("ids", ids, lengths, meta.num_tokens, config.vocab_size)
    types = None
    if token_types is not None:
        types = _packed("token_types", token_types, lengths, meta.num_tokens, config.token_types)
    rows = _embeddings(config, params, tokens, meta, types, dense, pooling, normalize, dim, backend)
    return rows[: len(lengths)]


def output_size(config: ModelConfig, dense: Sequence[DenseLayer] = ()) -> int:
    """The dimensions of an embedding, after these layers; ValueError unless each fits the one before."""
    size = config.hidden_size
    for index, layer in enumerate(dense):
        if layer.in_features != size:
            raise ValueError(f"dense[{index}] reads {layer.in_features} dimensions, but it gets {size}")
        size = layer.out_features
    return size


def check_dim(dim: int | None, size: int) -> None:
    """ValueError unless an embedding of `size` dimensions can be cut to `dim`."""
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int | np.integer) or not 1 <= dim <= size):
        raise ValueError(f"{dim=} must be an integer from 1 to {size}, the model's number of dimensions")


def batch_of(config: ModelConfig, lengths: Sequence[int]) -> CommonAttentionMetadata:
    """The batch of whole requests.

    Tokens are padded to a power of 2, the number of requests and max_seq_len to a power of 4.
    """
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or not len(sizes) or not np.issubdtype(sizes.dtype, np.integer) or (sizes < 1).any():
        raise ValueError(f"{lengths=} must be the lengths of at least one request, each at least 1")
    most, longest = config.max_positions, int(sizes.max())
    if most is not None and longest > most:
        raise ValueError(f"a request of {longest} tokens is longer than the model's {config.max_positions=}")
    tokens = max(power_of_two(int(sizes.sum())), MIN_TOKENS)
    meta = CommonAttentionMetadata.from_lengths(
        sizes, sizes, None, 1, num_tokens=tokens, num_reqs=_power_of_four(len(sizes))
    )
    return meta.replace(max_query_len=tokens, max_seq_len=min(max(_power_of_four(longest), MIN_TOKENS), tokens))


def _power_of_four(n: int) -> int:
    found = power_of_two(n)
    return found if found.bit_length() % 2 else 2 * found


def _packed(name: str, values: Any, lengths: Sequence[int], num_tokens: int, count: int) -> np.ndarray:
    """i32[num_tokens]: the tokens of all requests, padded with 0; ValueError unless they are 0 to count - 1."""
    rows, total = np.asarray(values), sum(lengths)
    if rows.ndim == 2 and len(rows) == len(lengths) and max(lengths) <= rows.shape[1]:
        rows = np.concatenate([row[:length] for row, length in zip(rows, lengths, strict=True)])
    if rows.shape != (total,) or not np.issubdtype(rows.dtype, np.integer):
        wanted = f"integers [{total}], the sum of lengths, or rows [{len(lengths)}, {max(lengths)} or more]"
        raise ValueError(f"{name} is {rows.dtype}{list(rows.shape)}; it must be {wanted}")
    if total and not 0 <= rows.min() <= rows.max() < count:
        raise ValueError(f"{name} from {rows.min()} to {rows.max()} must be from 0 to {count - 1}")
    return np.pad(rows.astype(np.int32), (0, num_tokens - total))


@functools.partial(jax.jit, static_argnums=(0, 6, 7, 8, 9))
def _embeddings(
    config: ModelConfig, params, tokens, meta: CommonAttentionMetadata, token_types, dense: Sequence[DenseLayer],
    pooling: str, normalize: bool, dim: int | None, backend: str,
) -> jax.Array:  # fmt: skip
    hidden = hidden_states(config, params, tokens, meta, token_types, backend)
    rows = pooled(hidden, meta, pooling)
    for layer in dense:
        rows = layer(rows)
    rows = rows[:, :dim]
    return normalized(rows) if normalize else rows


def pooled(hidden: jax.Array, meta: CommonAttentionMetadata, pooling: str) -> jax.Array:
    """Hidden states [T, hidden] -> f32[R, hidden]. Rows of padding requests have no meaning."""
    if pooling in ("cls", "last"):
        at = meta.logits_at_last_token() if pooling == "last" else jnp.asarray(meta.query_start_loc)[:-1]
        return hidden.at[at].get(mode="clip").astype(jnp.float32)
    hidden, live = hidden.astype(jnp.float32), meta.token_is_live()[:, None]
    if pooling == "max":
        return jax.ops.segment_max(jnp.where(live, hidden, -jnp.inf), meta.token_to_req(), meta.max_num_reqs)
    weights = meta.positions()[:, None] + 1.0 if pooling == "weighted_mean" else jnp.float32(1.0)
    sums = jax.ops.segment_sum(jnp.where(live, hidden * weights, 0.0), meta.token_to_req(), meta.max_num_reqs)
    count = jnp.maximum(meta.query_lens(), 1).astype(jnp.float32)
    total = {"mean": count, "weighted_mean": count * (count + 1) / 2, "mean_sqrt_len": jnp.sqrt(count)}[pooling]
    return sums / total[:, None]


def normalized(rows: jax.Array) -> jax.Array:
    """Each row divided by its length; a row of zeros stays as it is."""
    return rows / jnp.maximum(jnp.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)
