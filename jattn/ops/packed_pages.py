"""Packed keys as pages: a cache that is written just now and read once, for kernels that know pages only."""

import jax
import jax.numpy as jnp

from jattn.cache import KVCacheSpec, PagedKV
from jattn.spec import AttentionSpec
from pallas_kernels.algebra.paging import cdiv

PAGE = 16


def page_spec(spec: AttentionSpec) -> KVCacheSpec:
    """A cache of one page that stands for packed keys where a kernel is asked whether it takes a layer."""
    return KVCacheSpec(
        num_blocks=1, block_size=PAGE, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
    )  # fmt: skip


def paged(k: jax.Array, v: jax.Array, lens: jax.Array, max_seq_len: int) -> tuple[PagedKV, jax.Array]:
    """k [Tk K D], v [Tk K V] of requests of lens i32[R] -> (NHD cache, block table i32[R B]).

    Each request begins on a page of its own; what no token fills is 0. A gather each: every key moves once.
    """
    num_keys, num_reqs = k.shape[0], lens.shape[0]
    pages = cdiv(lens, PAGE)
    ends = jnp.cumsum(pages, dtype=jnp.int32)
    first_page, start = ends - pages, jnp.cumsum(lens, dtype=jnp.int32) - lens
    num_pages = num_keys // PAGE + num_reqs
    page = jnp.arange(num_pages, dtype=jnp.int32)
    owner = jnp.sum(ends[None, :] <= page[:, None], axis=1, dtype=jnp.int32)
    req = jnp.minimum(owner, num_reqs - 1)
    position = (page - first_page[req])[:, None] * PAGE + jnp.arange(PAGE, dtype=jnp.int32)[None]
    token = (owner < num_reqs)[:, None] & (position < lens[req][:, None])
    row = jnp.where(token, start[req][:, None] + position, num_keys)

    def pool(x):
        if num_keys == 0:  # nothing to gather from
            return jnp.zeros((*row.shape, *x.shape[1:]), x.dtype)
        return x.at[row].get(mode="fill", fill_value=0)

    spec = KVCacheSpec(
        num_blocks=num_pages, block_size=PAGE, num_kv_heads=k.shape[1], head_dim=k.shape[2], v_head_dim=v.shape[2],
        dtype=k.dtype.name, layout="NHD",
    )  # fmt: skip
    width = min(cdiv(max_seq_len, PAGE), num_pages)
    table = first_page[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return PagedKV(k=pool(k), v=pool(v), k_token_scale=None, v_token_scale=None, spec=spec), table
