"""Writes keys and values to blocks: new tokens to a cache, and packed keys to a temporary cache."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn.cache.layout import KVCacheSpec, PagedKV, by_token, check_alive, check_scales, encode_rows
from jattn.device import spec_of, with_auto_axes
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
    """Write k [T K D], v [T K V] to slots i32[T] and return the new cache; in place if `cache` is donated.

    A slot < 0 or >= N*S is not written, nor are rows of k and v past the end of slot_mapping.
    """
    return _written(_put, cache, k, v, slot_mapping, params)


def write_by_head(
    cache: PagedKV, k: jax.Array, v: jax.Array, slot_mapping: AnyArray, params: AttentionParams | None = None
) -> PagedKV:
    """The same for a cache of the layout HND or HND128, which XLA then keeps as it is on a TPU.

    XLA lays an operand out for its scatter, with the scattered axes first. If a token's heads are written together that
    is not HND, and XLA copied every pool to HND for the kernel, in each layer and step.
    """
    return _written(put_by_head, cache, k, v, slot_mapping, params)


def _written(put: Callable, cache: PagedKV, k, v, slot_mapping, params) -> PagedKV:
    """put(pool, rows, slots, spec) is the pool with the rows [T K ..] at slots i32[T]."""
    k, v, slots = check_static(cache, k, v, slot_mapping, params)
    params = AttentionParams() if params is None else with_arrays(params)
    result = lambda: jax.tree.map(spec_of, cache)
    return with_auto_axes(functools.partial(_write, put), result, cache, k, v, slots, scales_of(params))


def _write(put: Callable, cache: PagedKV, k, v, slots, params: AttentionParams) -> PagedKV:
    spec = cache.spec
    new = {}
    for name, x, scale in (
        ("k", k, params.k_scale),
        ("v", v, params.v_scale),
    ):
        pool = getattr(cache, name)
        stored, token_scale = encode_rows(x[: slots.shape[0]], spec, pool.dtype, scale)
        new[name] = put(pool, stored, slots, spec)
        old_scale = getattr(cache, f"{name}_token_scale")
        new[f"{name}_token_scale"] = None if old_scale is None else put(old_scale, token_scale, slots, spec)
    return PagedKV(**new, spec=spec)


def _put(pool: jax.Array, rows: jax.Array, slots: jax.Array, spec: KVCacheSpec) -> jax.Array:
    block, offset = split_slot(slots, spec.num_blocks, spec.block_size)
    at = (block, slice(None), offset) if spec.heads_first else (block, offset)
    return by_token(pool, spec).at[at].set(rows, mode="drop").reshape(pool.shape)


def put_by_head(pool: jax.Array, rows: jax.Array, slots: jax.Array, spec: KVCacheSpec) -> jax.Array:
    """As `_put`, into a pool that is taken for one list of rows: [N * K * S ..], of HND128 [N * K * S*D/128, 128]."""
    assert spec.heads_first
    block, offset = split_slot(slots, spec.num_blocks, spec.block_size)  # block N is past the end of the list, too
    heads = jnp.arange(spec.num_kv_heads)[None]
    at = (block[:, None] * spec.num_kv_heads + heads) * spec.block_size + offset[:, None]
    as_list = pool.reshape(-1, *pool.shape[3:])
    if pool.ndim == 4 and spec.physical_layout == "HND128":
        return _put_in_lanes(as_list, rows.reshape(-1, rows.shape[-1]), at.reshape(-1)).reshape(pool.shape)
    return as_list.at[at.reshape(-1)].set(rows.reshape(-1, *rows.shape[2:]), mode="drop").reshape(pool.shape)


def _put_in_lanes(as_list: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    """as_list [rows, 128] with rows [T D] at places i32[T] of the list [.., D] that has the same numbers in order."""
    beside = as_list.shape[1] // rows.shape[1]
    place = jnp.stack([at // beside, at % beside * rows.shape[1]], axis=1)
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return jax.lax.scatter(as_list, place, rows, numbers, mode=jax.lax.GatherScatterMode.FILL_OR_DROP)


def scales_of(params: AttentionParams) -> AttentionParams:
    """What a write reads of params. A write with a gradient of its own takes no others: where only they are
    differentiated it would be too, and a pool without a gradient would raise."""
    return AttentionParams(k_scale=params.k_scale, v_scale=params.v_scale)


def write_backward(saved, cotangent):
    """The gradient of a write by another kernel: that of write_kv. saved: (cache, k, v, slot_mapping, params)."""
    cache, k, v, slots, params = saved
    call = lambda cache, k, v, params: write_kv(cache, k, v, slots, params)
    dcache, dk, dv, dparams = jax.vjp(call, cache, k, v, params)[1](cotangent)
    return dcache, dk, dv, None, dparams


def check_static(cache: PagedKV, k, v, slot_mapping, params=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """k, v and slot_mapping as arrays; ValueError if their shapes or dtypes do not fit the cache."""
    spec = check_alive(cache).spec
    k, v = jnp.asarray(as_array("k", k)), jnp.asarray(as_array("v", v))
    for name, x, dim in (("k", k, spec.head_dim), ("v", v, spec.v_head_dim)):
        if x.ndim != 3 or x.shape[1:] != (spec.num_kv_heads, dim):
            raise ValueError(f"{name}.shape={x.shape} must be [T, {spec.num_kv_heads}, {dim}] for {spec}")
        if x.dtype.name not in quant.FLOATS:
            raise ValueError(
                f"{name}.dtype={x.dtype} must be a float type, one of {', '.join(quant.FLOATS)}; write_kv "
                "quantises them"
            )
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"{k.shape[0]=} and {v.shape[0]=} must be the same number of tokens")
    slots = jnp.asarray(_SLOTS("slot_mapping", slot_mapping))
    if slots.shape[0] > k.shape[0]:
        raise ValueError(f"slot_mapping.shape={slots.shape} must be [T] with at most {k.shape[0]=} rows")
    check_scales(params, spec)
    return k, v, slots


_SLOTS = integers(1)


def packed_as_pages(k: jax.Array, v: jax.Array, seq_lens: jax.Array, max_seq_len: int) -> tuple[PagedKV, jax.Array]:
    """k [Tk K D], v [Tk K V] packed by request, seq_lens i32[R] -> (NHD cache, block table i32[R B]).

    For kernels that read only pages. Each request begins on a new page; slots without a token are 0. k and v are each
    copied by one gather.
    """
    num_keys, num_reqs = k.shape[0], seq_lens.shape[0]
    pages = cdiv(seq_lens, PACKED_PAGE)
    ends = jnp.cumsum(pages, dtype=jnp.int32)
    first_page, start = ends - pages, jnp.cumsum(seq_lens, dtype=jnp.int32) - seq_lens
    num_pages = num_keys // PACKED_PAGE + num_reqs
    page = jnp.arange(num_pages, dtype=jnp.int32)
    owner = jnp.sum(ends[None, :] <= page[:, None], axis=1, dtype=jnp.int32)
    req = jnp.minimum(owner, num_reqs - 1)
    position = (page - first_page[req])[:, None] * PACKED_PAGE + jnp.arange(PACKED_PAGE, dtype=jnp.int32)[None]
    token = (owner < num_reqs)[:, None] & (position < seq_lens[req][:, None])
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
    """The spec of such a cache, to check whether a kernel supports a layer with packed keys."""
    return KVCacheSpec(
        num_blocks=1, block_size=PACKED_PAGE, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
    )  # fmt: skip
