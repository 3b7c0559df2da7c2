"""Everything that puts keys and values into pages: new tokens into a pool, and packed keys into a pool of their own."""

import jax
import jax.numpy as jnp

from jattn.cache.layout import KVCacheSpec, PagedKV, check_alive, check_scales, encode_rows
from jattn.errors.arguments import as_array, integers
from jattn.spec import AttentionParams, AttentionSpec, with_arrays
from jattn.types import AnyArray
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.paging import cdiv, split_slot

PACKED_PAGE = 16
"""Slots of a page of packed keys."""


def write_kv(
    cache: PagedKV, k: jax.Array, v: jax.Array, slot_mapping: AnyArray, params: AttentionParams | None = None
) -> PagedKV:
    """Store k [T K D], v [T K V] at slots i32[T] and return the new cache; in place when `cache` is donated.

    A slot < 0 or >= N*S writes nothing; a slot_mapping shorter than k leaves the remaining rows unwritten.
    """
    k, v, slot_mapping = check_static(cache, k, v, slot_mapping, params)
    params = params and with_arrays(params)
    spec = cache.spec
    rows = slot_mapping.shape[0]
    block, offset = split_slot(slot_mapping, spec.num_blocks, spec.block_size)
    at = (block, slice(None), offset) if spec.physical_layout == "HND" else (block, offset)
    new = {}
    for name, x, scale in (
        ("k", k, params and params.k_scale),
        ("v", v, params and params.v_scale),
    ):
        pool = getattr(cache, name)
        stored, token_scale = encode_rows(x[:rows], spec, pool.dtype, scale)
        new[name] = pool.at[at].set(stored, mode="drop")
        old_scale = getattr(cache, f"{name}_token_scale")
        new[f"{name}_token_scale"] = None if old_scale is None else old_scale.at[at].set(token_scale, mode="drop")
    return PagedKV(**new, spec=spec)


def write_backward(saved, cotangent):
    """The gradient of a write by another kernel: write_kv's; saved: (cache, k, v, slot_mapping, params)."""
    cache, k, v, slots, params = saved
    call = lambda cache, k, v, params: write_kv(cache, k, v, slots, params)
    dcache, dk, dv, dparams = jax.vjp(call, cache, k, v, params)[1](cotangent)
    return dcache, dk, dv, None, dparams


def check_static(cache: PagedKV, k, v, slot_mapping, params=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """k, v and slot_mapping as arrays, or ValueError where shapes and dtypes tell that the write means nothing."""
    spec = check_alive(cache).spec
    k, v = jnp.asarray(as_array("k", k)), jnp.asarray(as_array("v", v))
    for name, x, dim in (("k", k, spec.head_dim), ("v", v, spec.v_head_dim)):
        if x.ndim != 3 or x.shape[1:] != (spec.num_kv_heads, dim):
            raise ValueError(f"{name}.shape={x.shape} must be [T, {spec.num_kv_heads}, {dim}] for {spec}")
        if x.dtype.name not in quant.FLOATS:
            raise ValueError(
                f"{name}.dtype={x.dtype} must be a float type, one of {', '.join(quant.FLOATS)}; the cache does the "
                "quantising"
            )
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"{k.shape[0]=} and {v.shape[0]=} must be the same number of tokens")
    slots = jnp.asarray(_SLOTS("slot_mapping", slot_mapping))
    if slots.shape[0] > k.shape[0]:
        raise ValueError(f"slot_mapping.shape={slots.shape} must be [T] with at most {k.shape[0]=} rows")
    check_scales(params, spec)
    return k, v, slots


_SLOTS = integers(1)


def packed_as_pages(k: jax.Array, v: jax.Array, kv_lens: jax.Array, max_seq_len: int) -> tuple[PagedKV, jax.Array]:
    """k [Tk K D], v [Tk K V] packed by request, kv_lens i32[R] -> (NHD cache, block table i32[R B]).

    For kernels that read pages only: a cache that is written now and read once. Each request begins on a page of its
    own; slots that no token fills are 0. One gather of each array: every key moves once.
    """
    num_keys, num_reqs = k.shape[0], kv_lens.shape[0]
    pages = cdiv(kv_lens, PACKED_PAGE)
    ends = jnp.cumsum(pages, dtype=jnp.int32)
    first_page, start = ends - pages, jnp.cumsum(kv_lens, dtype=jnp.int32) - kv_lens
    num_pages = num_keys // PACKED_PAGE + num_reqs
    page = jnp.arange(num_pages, dtype=jnp.int32)
    owner = jnp.sum(ends[None, :] <= page[:, None], axis=1, dtype=jnp.int32)
    req = jnp.minimum(owner, num_reqs - 1)
    position = (page - first_page[req])[:, None] * PACKED_PAGE + jnp.arange(PACKED_PAGE, dtype=jnp.int32)[None]
    token = (owner < num_reqs)[:, None] & (position < kv_lens[req][:, None])
    row = jnp.where(token, start[req][:, None] + position, num_keys)

    def pool(x):
        if num_keys == 0:  # nothing to gather from
            return jnp.zeros((*row.shape, *x.shape[1:]), x.dtype)
        return x.at[row].get(mode="fill", fill_value=0)

    spec = KVCacheSpec(
        num_blocks=num_pages, block_size=PACKED_PAGE, num_kv_heads=k.shape[1], head_dim=k.shape[2],
        v_head_dim=v.shape[2], dtype=k.dtype.name, layout="NHD",
    )  # fmt: skip
    width = min(cdiv(max_seq_len, PACKED_PAGE), num_pages)
    block_table = first_page[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    return PagedKV(k=pool(k), v=pool(v), k_token_scale=None, v_token_scale=None, spec=spec), block_table


def packed_page_spec(spec: AttentionSpec) -> KVCacheSpec:
    """A cache of one page that stands for packed keys where a kernel is asked whether it takes a layer."""
    return KVCacheSpec(
        num_blocks=1, block_size=PACKED_PAGE, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
    )  # fmt: skip
