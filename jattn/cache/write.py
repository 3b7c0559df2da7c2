"""The one place where the pool is written."""

import jax
import jax.numpy as jnp

from jattn.cache.layout import PagedKV, encode_rows
from jattn.spec import AttentionParams
from pallas_kernels.algebra.paging import split_slot


def write_kv(
    cache: PagedKV, k: jax.Array, v: jax.Array, slot_mapping: jax.Array, params: AttentionParams | None = None
) -> PagedKV:
    """Store k [T K D], v [T K V] at slots i32[T] and return the new cache; in place when `cache` is donated.

    A slot < 0 or >= N*S writes nothing; a slot_mapping shorter than k leaves the remaining rows unwritten.
    """
    check_static(cache, k, v, slot_mapping, params)
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


def check_static(cache: PagedKV, k, v, slot_mapping, params=None) -> None:
    """Raise ValueError where shapes and dtypes already tell that the write cannot mean anything."""
    spec = cache.spec
    for name, x, dim in (("k", k, spec.head_dim), ("v", v, spec.v_head_dim)):
        if jnp.ndim(x) != 3 or x.shape[1:] != (spec.num_kv_heads, dim):
            raise ValueError(f"{name}.shape={jnp.shape(x)} must be [T, {spec.num_kv_heads}, {dim}] for {spec}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name}.dtype={x.dtype} must be a float type; the cache does the quantising")
    if k.shape[0] != v.shape[0]:
        raise ValueError(f"{k.shape[0]=} and {v.shape[0]=} must be the same number of tokens")
    if jnp.ndim(slot_mapping) != 1 or slot_mapping.shape[0] > k.shape[0]:
        raise ValueError(f"{jnp.shape(slot_mapping)=} must be [T] with at most {k.shape[0]=} rows")
    if not jnp.issubdtype(slot_mapping.dtype, jnp.integer):
        raise ValueError(f"{slot_mapping.dtype=} must be an integer type")
    check_scales(params, spec)


def check_scales(params: AttentionParams | None, spec) -> None:
    """k_scale and v_scale: None, a scalar, or one a kv head; one a head needs a cache that is quantised so."""
    for name in ("k_scale", "v_scale"):
        scale = None if params is None else getattr(params, name)
        if scale is None or jnp.ndim(scale) == 0:
            continue
        if jnp.shape(scale) != (spec.num_kv_heads,):
            raise ValueError(f"{name}.shape={jnp.shape(scale)} must be () or ({spec.num_kv_heads},)")
        if spec.quant == "per_tensor":
            raise ValueError(f"{name} has one scale a head but {spec.quant=}; use quant='per_head' or a scalar")
