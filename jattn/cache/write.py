"""The one place where the pool is written."""

import jax
import jax.numpy as jnp

from jattn.cache.layout import PagedKV, check_alive, check_scales, encode_rows
from jattn.errors.arguments import as_array, integers
from jattn.spec import AttentionParams, with_arrays
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.paging import split_slot


def write_kv(
    cache: PagedKV, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, params: AttentionParams | None = None
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
