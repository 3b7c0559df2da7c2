"""How many blocks fit: from the memory that is free now."""

import os

import jax
import jax.numpy as jnp

from jattn.errors import CacheFullError
from pallas_kernels.algebra.paging import cdiv

CPU_SHARE = 0.25
"""Share of the host's available memory: other programs live there too."""

DEFAULT_MODEL_LEN = 4096
"""Where neither the model nor the user says how long a sequence may be."""


def free_bytes(share: float | None = None) -> int:
    """Bytes that a cache may take: `share` of what the device (on CPU: the host) has free."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return int((stats["bytes_limit"] - stats["bytes_in_use"]) * (0.9 if share is None else share))
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") * (CPU_SHARE if share is None else share))


def blocks_that_fit(bytes_per_block: int, needed: int, useful: int, share: float | None = None) -> int:
    """Blocks of a pool: what memory allows, at least `needed` (one longest sequence), at most `useful`."""
    room = free_bytes(share) // bytes_per_block
    if room < needed:
        raise CacheFullError(
            f"{room} blocks of {bytes_per_block} bytes fit the free memory, a sequence of full length needs {needed}; "
            "lower max_model_len, or give num_blocks and max_model_len"
        )
    return min(room, useful)


def dtype_of(params) -> str:
    """The dtype of a model's weights: its cache's, unless said otherwise."""
    floats = [x.dtype for x in jax.tree.leaves(params) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.dtype(min(floats, key=lambda dtype: dtype.itemsize, default="bfloat16")).name


def pool_of(
    config, dtype: str, num_blocks: int | None, block_size: int, max_num_seqs: int, max_model_len: int | None
) -> tuple[int, int]:
    """(num_blocks, max_model_len): each from the other, the model and the free memory where it is not given.

    One sequence of max_model_len always fits the pool alone, so the oldest request can always finish.
    """
    limit = config.max_positions  # None: positions are unlimited, as with ALiBi
    longest = max_model_len or limit or DEFAULT_MODEL_LEN
    if limit is not None and longest > limit:
        raise ValueError(f"{max_model_len=} is more than the model's {limit} positions")
    if num_blocks is None:
        bytes_per_block = sum(spec.bytes_per_block for spec in config.cache_specs(2, block_size, dtype))
        useful = max_num_seqs * cdiv(longest, block_size) + 1
        needed = 2 if max_model_len is None else cdiv(longest, block_size) + 1
        num_blocks = blocks_that_fit(bytes_per_block, needed, useful)
    capacity = (num_blocks - 1) * block_size
    if max_model_len is None:
        return num_blocks, max(min(longest, capacity), 1)
    if capacity < max_model_len:
        raise ValueError(f"{num_blocks=} of {block_size} tokens hold {capacity}, less than {max_model_len=}")
    return num_blocks, max_model_len
