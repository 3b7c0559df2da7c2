"""Conversion between vLLM's cache and the pair (k, v) of shape [N S K D].

vLLM's cache is one array [2, N, S * K * D]. With x = the elements in 16 bytes:

    keys     [N K D/x S x]: x neighbouring elements of a slot, then those of the next slot
    values   [N K D S]

Import a cache by `PagedKV.from_logical(cache_spec, *split_kv_cache(...))`; export by `join_kv_cache(*cache.logical())`.
"""

import jax
import jax.numpy as jnp

from jattn.errors.arguments import integer, reals, takes

VECTOR_BYTES = 16
"""The bytes that a CUDA thread loads at once."""


@takes(kv_cache=reals(3), num_kv_heads=integer(1), head_size=integer(1))
def split_kv_cache(kv_cache: jax.Array, num_kv_heads: int, head_size: int) -> tuple[jax.Array, jax.Array]:
    """(k, v), [N S K D] each, of a cache [2, N, S * K * D]. Stored values of any dtype are not changed."""
    kv_cache = jnp.asarray(kv_cache)
    x = _vector(kv_cache.dtype, head_size)
    if kv_cache.ndim != 3 or kv_cache.shape[0] != 2 or kv_cache.shape[2] % (num_kv_heads * head_size):
        raise ValueError(
            f"{kv_cache.shape=} must be [2, N, a multiple of {num_kv_heads} x {head_size}], num_kv_heads x head_size: "
            "keys, then values, a block in each row"
        )
    blocks = kv_cache.shape[1]
    k = kv_cache[0].reshape(blocks, num_kv_heads, head_size // x, -1, x)
    v = kv_cache[1].reshape(blocks, num_kv_heads, head_size, -1)
    return k.transpose(0, 3, 1, 2, 4).reshape(blocks, -1, num_kv_heads, head_size), v.transpose(0, 3, 1, 2)


@takes(k=reals(4), v=reals(4))
def join_kv_cache(k: jax.Array, v: jax.Array) -> jax.Array:
    """The cache [2, N, S * K * D] of k and v, [N S K D] each: the inverse of split_kv_cache."""
    k, v = jnp.asarray(k), jnp.asarray(v)
    if k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
        raise ValueError(f"k {k.dtype}{k.shape} and v {v.dtype}{v.shape} must both be [N S K D]: one array holds them")
    blocks, slots, heads, dim = k.shape
    x = _vector(k.dtype, dim)
    keys = k.reshape(blocks, slots, heads, dim // x, x).transpose(0, 2, 3, 1, 4)
    return jnp.stack([keys.reshape(blocks, -1), v.transpose(0, 2, 3, 1).reshape(blocks, -1)])


def _vector(dtype, head_size: int) -> int:
    x = VECTOR_BYTES // jnp.dtype(dtype).itemsize
    if head_size % x:
        raise ValueError(f"{head_size=} must be a multiple of {x}, {VECTOR_BYTES} bytes of {jnp.dtype(dtype)}")
    return x
