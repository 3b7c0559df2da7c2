"""The latent cache of MLA: one row [kv_c | k_pe] for each token, in a PagedKV with one kv head.

    split   head_dim = rope, v_head_dim = kv_lora_rank     k_pe in the key pool, kv_c in the value pool. mla_cache_spec
                                                           makes this form: nothing is stored twice.
    wide    head_dim = kv_lora_rank + rope                 whole rows in the key pool, and their first v_head_dim values
                                                           also in the value pool. Any multi-query kernel can read it;
                                                           it needs twice the memory.

write_kv, copy_blocks and swap_blocks support both.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jattn.cache.layout import KVCacheSpec, PagedKV
from jattn.cache.write import write_kv
from jattn.errors.arguments import kind, takes
from jattn.mla_spec import MLAParams, MLASpec
from jattn.spec import AttentionParams
from jattn.types import AnyArray
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.paging import split_slot


@takes(spec=kind(MLASpec))
def mla_cache_spec(
    spec: MLASpec, num_blocks: int, block_size: int, *, dtype: str = "bfloat16", quant: str = "none", layout="auto"
) -> KVCacheSpec:
    """The cache of a latent attention layer: kv_lora_rank + qk_rope_head_dim values for each token."""
    return KVCacheSpec(
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=1,
        head_dim=spec.qk_rope_head_dim,
        v_head_dim=spec.kv_lora_rank,
        dtype=dtype,
        quant=quant,
        layout=layout,
    )


def is_wide(spec: MLASpec, cache_spec: KVCacheSpec) -> bool:
    """Does the key pool have whole rows?"""
    return cache_spec.head_dim == spec.head_dim


def latent_pages(pool: jax.Array, cache_spec: KVCacheSpec) -> jax.Array:
    """[N S .] of a pool with one kv head, in either order."""
    return quant.native(pool, cache_spec.dtype).reshape(pool.shape[0], cache_spec.block_size, -1)


def row_scales(spec: MLASpec, cache_spec: KVCacheSpec, params: MLAParams) -> tuple[jax.Array, jax.Array]:
    """(f32[] of the latent, f32[L+R] of each number of a row): what stored numbers are multiplied by, 1 for None."""
    scalar = lambda scale: jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(())
    of_latent = scalar(params.kv_c_scale)
    of_rope = of_latent if is_wide(spec, cache_spec) else scalar(params.k_pe_scale)
    sizes = np.array([spec.kv_lora_rank, spec.qk_rope_head_dim])
    return of_latent, jnp.repeat(jnp.stack([of_latent, of_rope]), sizes)


def check_latent(spec: MLASpec, cache_spec: KVCacheSpec, params: MLAParams | None = None) -> None:
    """Raise ValueError unless the cache holds rows of this layer, in either form."""
    rope, latent, row = spec.qk_rope_head_dim, spec.kv_lora_rank, spec.head_dim
    dims = (cache_spec.head_dim, cache_spec.v_head_dim)
    if cache_spec.num_kv_heads != 1 or dims not in ((rope, latent), (row, latent), (row, row)):
        raise ValueError(
            f"{cache_spec} cannot hold rows of {latent} + {rope} values: num_kv_heads must be 1 and (head_dim, "
            f"v_head_dim) one of {(rope, latent)}, {(row, latent)}, {(row, row)}; use jattn.mla_cache_spec(...)"
        )
    if params is not None and is_wide(spec, cache_spec) and params.k_pe_scale is not None:
        raise ValueError(
            "a wide latent cache has one scale: give kv_c_scale without k_pe_scale, or use mla_cache_spec(...)"
        )


def write_latent(
    spec: MLASpec,
    cache: PagedKV,
    kv_c: jax.Array,
    k_pe: jax.Array,
    slot_mapping: AnyArray,
    params: MLAParams,
    write: Callable[..., PagedKV] = write_kv,
) -> PagedKV:
    """Write kv_c [T L] and k_pe [T R] to slots i32[T], by write_kv or a kernel with the same arguments."""
    check_latent(spec, cache.spec, params)
    k, v = k_pe[:, None], kv_c[:, None]
    k_scale, v_scale = params.k_pe_scale, params.kv_c_scale
    if is_wide(spec, cache.spec):
        k = jnp.concatenate([v, k], axis=-1)  # two dtypes are promoted
        v, k_scale = k[..., : cache.spec.v_head_dim], v_scale
    return write(cache, k, v, slot_mapping, AttentionParams(k_scale=k_scale, v_scale=v_scale))


def gather_latent(spec: MLASpec, cache: PagedKV, slots: jax.Array, params: MLAParams) -> tuple[jax.Array, jax.Array]:
    """(kv_c f32[n L], k_pe f32[n R]) of the tokens at slots i32[n], decoded; zeros for a slot outside the pool."""
    c = cache.spec
    block, offset = split_slot(slots, c.num_blocks, c.block_size)
    at = (block, 0, offset) if c.physical_layout == "HND" else (block, offset, 0)

    def rows(pool, token_scale, scale):
        inside = (block < c.num_blocks)[:, None]
        real = quant.decode(pool.at[at].get(mode="clip"), c.dtype)
        if token_scale is not None:
            real = real * token_scale.at[at].get(mode="clip")[:, None]
        if scale is not None:
            real = real * jnp.asarray(scale, jnp.float32).reshape(1, 1)
        return jnp.where(inside, real, 0.0)

    if is_wide(spec, c):
        row = rows(cache.k, cache.k_token_scale, params.kv_c_scale)
        return row[:, : spec.kv_lora_rank], row[:, spec.kv_lora_rank :]
    return (
        rows(cache.v, cache.v_token_scale, params.kv_c_scale),
        rows(cache.k, cache.k_token_scale, params.k_pe_scale),
    )
