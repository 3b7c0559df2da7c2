"""A whole prompt through the paged cache: for tests, notebooks and scoring."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.metadata import CommonAttentionMetadata
from jattn.models.config import ModelConfig
from jattn.models.decoder import forward
from pallas_kernels.algebra.paging import cdiv

BLOCK_SIZE = 16

step = functools.partial(jax.jit, static_argnames=("config", "backend"), donate_argnames="caches")(forward)


def prompt_logits(
    config: ModelConfig, params: dict[str, Any], token_ids: Any, *, chunk: int | None = None, backend: str = "auto"
) -> jax.Array:
    """f32[len, vocab] of one prompt, written to fresh pages `chunk` tokens at a time (None: all at once)."""
    ids = np.asarray(token_ids, np.int32)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"{ids.shape=} must be [len] with at least one token: one prompt")
    if config.max_positions is not None and len(ids) > config.max_positions:
        raise ValueError(f"a prompt of {len(ids)} tokens is longer than the model's {config.max_positions=}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"{chunk=} must be >= 1, or None for the whole prompt at once")
    size, blocks = min(chunk or len(ids), len(ids)), cdiv(len(ids), BLOCK_SIZE)
    caches = config.make_caches(blocks, BLOCK_SIZE, params["embed"].dtype)
    table, logits = np.arange(blocks, dtype=np.int32)[None], []
    for first in range(0, len(ids), size):
        new = ids[first : first + size]
        meta = CommonAttentionMetadata.from_lengths(
            [len(new)], [first + len(new)], table, BLOCK_SIZE, num_tokens=size, final_seq_lens=[len(ids)]
        )
        padded = np.pad(new, (0, size - len(new)))
        caches, rows = step(config, params, padded, caches, meta, backend=backend)
        logits.append(rows[: len(new)])
    return jnp.concatenate(logits)
