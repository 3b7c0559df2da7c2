"""The sizes that an engine chooses: blocks that fit the free memory, tokens of a block, steps of a dispatch."""

import bisect
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jattn import device
from jattn.cache.layout import QUANT_MODES, KVCacheSpec, empty_cache, filled_lanes
from jattn.engine.tables import max_blocks_of_group
from jattn.errors import CacheFullError
from jattn.ops.quantised import is_quantised
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.algebra.quant import QUANTISED

CPU_SHARE = 0.25
"""Share of the host's available memory for the cache; other programs need the rest."""

DEVICE_SHARE = 0.9
"""Share of a device's free memory for the cache; compiled programs need the rest."""

LANE_BACKENDS = ("auto", "pallas_tpu", "pallas_tpu_invariant", "sdpa")
"""Those that read a cache of the layout HND128."""

DEFAULT_MODEL_LEN = 4096
"""The longest sequence if neither the model nor the user limits it."""


def free_bytes(devices: Many[Any] | None = None) -> int:
    """Bytes for the cache on each of the devices (None: JAX's default device): a share of the free memory of the one
    with the least, in any process; on a CPU, of the host's, which they share."""
    devices = jax.local_devices()[:1] if devices is None else devices
    local = [device for device in devices if device.process_index == jax.process_index()]
    stats = [device.memory_stats() or {} for device in local]
    if all("bytes_limit" in each for each in stats):
        free = min(share_for_cache(each["bytes_limit"] - each["bytes_in_use"]) for each in stats)
    else:
        free = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") * CPU_SHARE / len(devices))
    if len(local) == len(devices):
        return free
    # The processes must agree: with other numbers of blocks their schedulers would plan other batches.
    return int(multihost_utils.process_allgather(np.int32(free >> 20)).min()) << 20


def share_for_cache(free: int) -> int:
    """Bytes for the cache of an accelerator's free memory."""
    return int(free * DEVICE_SHARE)


def default_block_size(platform: str | None = None, model_mesh: Any = None) -> int:
    """Tokens of a block, of all context ranks together. platform: None: that of JAX's default device.

    A GPU's kernel copies each block of a head on its own, so large blocks are faster: a decode step of a model of 1e9
    parameters takes 1.29 ms with 64, 1.32 with 16. Small blocks waste less of the pool, and more beginnings are equal.
    """
    of_rank = 16 if (platform or jax.default_backend()) == "cpu" else 64
    return of_rank if model_mesh is None else of_rank * model_mesh.context_ranks


def default_burst(platform: str | None = None) -> int:
    """The most decode steps of a dispatch. platform: None: that of JAX's default device.

    An accelerator's steps are short: 16 take 25 ms for a model of 1e9 parameters on an H200, which hides the host's
    work between dispatches. On a CPU a single step takes as long.
    """
    return 8 if (platform or jax.default_backend()) == "cpu" else 16


def default_waiting_burst() -> int:
    """Decode steps of a dispatch while a sequence waits and a running one ends earlier. See Limits.waiting_burst.

    A row that ends within a dispatch leaves its place empty until the dispatch ends. On a CPU that costs most; on an
    accelerator a step with few prompts does: 512 requests on 256 rows take 2.7 s with 8 steps, 2.6 with 16 (computed
    from the times of the steps on an H200).
    """
    return 1 if jax.default_backend() == "cpu" else default_burst()


def dtype_of(params) -> str:
    """The default dtype of the cache: the smallest floating dtype of the weights, before they were quantised."""
    floats = [x.dtype for x in jax.tree.leaves(params, is_leaf=is_quantised) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.dtype(min(floats, key=lambda dtype: dtype.itemsize, default="bfloat16")).name


def storage_of(dtype: str, quant: str | None, has_scales: bool = False) -> dict[str, str]:
    """The dtype of the cache and, if it has 8 bits, where its scales belong: arguments of config.make_caches.

    has_scales: the model may have scales per tensor or head. Those of jattn.models have none, which means 1.
    """
    if dtype not in QUANTISED:
        if quant not in (None, "none"):
            raise ValueError(f"cache_quant={quant!r} needs a cache_dtype of 8 bits, one of {', '.join(QUANTISED)}")
        return dict(dtype=dtype)
    if quant not in (None, *QUANT_MODES[1:]):
        raise ValueError(f"cache_quant={quant!r} must be one of {', '.join(QUANT_MODES[1:])}")
    if dtype == "int8" and quant not in (None, "per_token_head") and not has_scales:
        raise ValueError(
            f"cache_quant={quant!r} with cache_dtype='int8': the weights have no scales of keys and values, which "
            "would be rounded to integers; use cache_quant='per_token_head'"
        )
    return dict(dtype=dtype, quant=quant or "per_token_head")


def cache_maker(
    config: Any, num_blocks: Any, block_size: int, storage: dict[str, str], model_mesh: Any, backend: str
) -> Callable[[], Any]:
    """A function that makes the empty caches of an engine: on a TPU, narrow heads have the layout HND128."""
    fills = device.detect().platform == "tpu" and backend in LANE_BACKENDS
    if model_mesh is None and not fills:
        return functools.partial(config.make_caches, num_blocks, block_size, **storage)
    specs = config.cache_specs(num_blocks, block_size, **storage)
    if fills:
        specs = lane_specs(specs, model_mesh)
    if model_mesh is not None:
        return functools.partial(_caches_on, model_mesh, specs)
    return lambda: tuple(empty_cache(spec) for spec in specs)


def _caches_on(model_mesh: Any, specs: Iterable[KVCacheSpec]) -> Any:
    """model_mesh.empty_caches, also where the caller has called jax.set_mesh: shard_map takes no mesh but that one."""
    is_set = not jax.sharding.get_abstract_mesh().empty  # else this may be traced, where no mesh can be set
    with jax.set_mesh(model_mesh.mesh) if is_set else contextlib.nullcontext():
        return model_mesh.empty_caches(specs)


def lane_specs(specs: Iterable[KVCacheSpec], model_mesh: Any) -> tuple[KVCacheSpec, ...]:
    """Each spec with filled_lanes, if each rank's part has the layout, too."""
    part = (lambda spec: spec) if model_mesh is None else model_mesh.rank_cache_spec
    return tuple(filled_lanes(spec) if filled_lanes(part(spec)) != part(spec) else spec for spec in specs)


@dataclasses.dataclass(frozen=True)
class CacheSizing:
    """What decides the size of an engine's cache; an engine and its plan ask the same one."""

    config: Any
    storage: dict[str, str]  # see `storage_of`
    block_size: int
    max_num_batched_tokens: int
    max_burst: int
    prefix_caching: bool
    model_mesh: Any = None

    def pools(
        self, max_num_seqs: int, max_model_len: int | None, num_blocks: int | None = None, memory: int | None = None
    ) -> tuple[tuple[int, ...], int]:
        """(blocks of each cache group's pool, max_model_len). num_blocks and max_model_len, if None, are computed from
        the model and the free memory.

        memory: bytes for the cache on each device; None: measured, see `free_bytes`. A group without a limit of blocks
        has `num_blocks` blocks, the others at most as many. A sequence of max_model_len tokens fits the empty pools, so
        the oldest sequence can always finish.
        """
        positions, block_limits = self.config.max_positions, self.block_limits(max_num_seqs)
        longest = max_model_len or positions or DEFAULT_MODEL_LEN  # None: positions are unlimited, as with ALiBi
        if positions is not None and longest > positions:
            raise ValueError(f"{max_model_len=} is more than the model's {positions} positions")
        if num_blocks is None:
            if memory is None:
                memory = free_bytes() if self.model_mesh is None else free_bytes(self.model_mesh.devices)
            useful = max_num_seqs * cdiv(longest, self.block_size) + 1
            needed = 2 if max_model_len is None else cdiv(longest, self.block_size) + 1
            num_blocks = blocks_that_fit(self.block_bytes, block_limits, needed, useful, memory)
        pools = _pools(num_blocks, block_limits)
        # If each group has all blocks that its window or chunk can use, the pools limit no sequence's length.
        is_bound = any(limit is None or limit >= num_blocks for limit in block_limits)
        capacity = (num_blocks - 1) * self.block_size if is_bound else longest
        if max_model_len is None:
            return pools, max(min(longest, capacity), 1)
        if capacity < max_model_len:
            raise ValueError(f"{num_blocks=} of {self.block_size} tokens hold {capacity}, less than {max_model_len=}")
        return pools, max_model_len

    def block_limits(self, num_seqs: int) -> list[int | None]:
        """The most blocks that each group uses for so many sequences, without the null block; None: no limit."""
        reserved = 2 * self.max_burst  # a sequence may hold blocks for two dispatches
        step = self.block_size, num_seqs, self.max_num_batched_tokens, reserved
        return [max_blocks_of_group(group, *step, self.prefix_caching) for group in self.config.cache_groups]

    @functools.cached_property
    def block_bytes(self) -> list[int]:
        """Bytes of a block of each group, in all of its layers; on each device."""
        specs = self.config.cache_specs(2, self.block_size, **self.storage)
        if self.model_mesh is not None:
            specs = [self.model_mesh.rank_cache_spec(spec) for spec in specs]
        return [sum(specs[layer].bytes_per_block for layer in group.layers) for group in self.config.cache_groups]

    def bytes_for(self, num_seqs: int, length: int) -> int:
        """Bytes of pools that hold so many sequences of this length; on each device."""
        blocks = num_seqs * cdiv(length, self.block_size) + 1
        return bytes_of_pools(blocks, self.block_bytes, self.block_limits(num_seqs))


def bytes_of_pools(num_blocks: int, block_bytes: Many[int], block_limits: Many[int | None]) -> int:
    """Bytes of the pools of all groups; a group with a limit has no more blocks than that, and the null block."""
    return sum(n * blocks for n, blocks in zip(block_bytes, _pools(num_blocks, block_limits), strict=True))


def blocks_that_fit(
    block_bytes: Many[int], block_limits: Many[int | None], needed: int, useful: int, memory: int
) -> int:
    """The largest num_blocks that fits the memory, at most `useful`; CacheFullError if less than `needed`."""
    size = lambda num_blocks: bytes_of_pools(num_blocks, block_bytes, block_limits)
    count = bisect.bisect_right(range(useful + 1), memory, key=size) - 1
    if count < needed:
        raise CacheFullError(
            f"{count} blocks of {size(1)} bytes fit the free memory, a sequence of full length needs {needed}; "
            "lower max_model_len, or give num_blocks and max_model_len"
        )
    return count


def _pools(num_blocks: int, block_limits: Many[int | None]) -> tuple[int, ...]:
    return tuple(num_blocks if limit is None else min(num_blocks, limit + 1) for limit in block_limits)
