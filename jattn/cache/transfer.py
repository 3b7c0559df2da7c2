"""Copies whole blocks within a cache and between caches."""

import jax
import jax.numpy as jnp
import numpy as np

from jattn.cache.layout import PagedKV, check_alive
from jattn.device import spec_of, with_auto_axes
from jattn.errors.arguments import integers, takes


def _alive(name: str, cache: PagedKV) -> PagedKV:
    return check_alive(cache, name)


_PAIRS = integers(2)


def _pairs(name: str, pairs):
    """i32[n, 2]; an empty list has no pairs."""
    return _PAIRS(name, np.zeros((0, 2), np.int32) if isinstance(pairs, (list, tuple)) and not pairs else pairs)


@takes(cache=_alive, src_dst=_pairs)
def copy_blocks(cache: PagedKV, src_dst: jax.Array) -> PagedKV:
    """Copy block src to block dst for each pair (src, dst) of i32[n, 2]. All pairs read the old values.

    A pair with an id outside the pool copies nothing.
    """
    return swap_blocks(cache, cache, src_dst)


@takes(src_cache=_alive, dst_cache=_alive, src_dst=_pairs)
def swap_blocks(src_cache: PagedKV, dst_cache: PagedKV, src_dst: jax.Array) -> PagedKV:
    """Copy blocks of src_cache to dst_cache and return the new dst_cache. The specs may differ in num_blocks only."""
    if src_dst.shape[1] != 2:
        raise ValueError(f"{src_dst.shape=} must be integer [n, 2] pairs (source block, target block)")
    src_dst = jnp.asarray(src_dst)
    a, b = src_cache.spec, dst_cache.spec
    same = ("block_size", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "physical_layout", "quant")
    different = [name for name in same if getattr(a, name) != getattr(b, name)]
    if different:
        raise ValueError(f"the caches differ in {', '.join(different)}: {a} and {b}; they must be equal")
    return with_auto_axes(_copy, lambda: jax.tree.map(spec_of, dst_cache), src_cache, dst_cache, src_dst)


def _copy(src_cache: PagedKV, dst_cache: PagedKV, src_dst: jax.Array) -> PagedKV:
    a, b = src_cache.spec, dst_cache.spec
    src, dst = src_dst[:, 0], src_dst[:, 1]
    inside = (src >= 0) & (src < a.num_blocks) & (dst >= 0) & (dst < b.num_blocks)
    src, dst = jnp.where(inside, src, 0), jnp.where(inside, dst, b.num_blocks)

    def move(source, target):
        if source.dtype != target.dtype:
            raise ValueError(f"storage {source.dtype} and {target.dtype} differ; make both caches with one `storage`")
        return target.at[dst].set(source.at[src].get(mode="promise_in_bounds"), mode="drop")

    moved = [move(x, y) for x, y in zip(jax.tree.leaves(src_cache), jax.tree.leaves(dst_cache), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(dst_cache), moved)
