"""The KV write of `pallas_tpu`: both pools in one Mosaic launch where it can write them, else XLA's scatter."""

import functools

import jax
import jax.numpy as jnp

from jattn.cache import KVCacheSpec, PagedKV, write_kv
from jattn.cache.layout import encode_rows
from jattn.cache.write import put_by_head, write_backward, write_by_head
from jattn.device import Chip
from jattn.spec import AttentionParams
from pallas_kernels.tpu.kv_write import KvWriteConfig, supports_write, write_rows


def config_of(spec: KVCacheSpec) -> KvWriteConfig:
    """The kernel's static arguments, not checked."""
    return KvWriteConfig(
        num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, v_head_dim=spec.v_head_dim, page_size=spec.block_size,
        kv_dtype=spec.dtype, layout=spec.physical_layout,
    )  # fmt: skip


def reasons_against(cache: PagedKV, tokens: int, chip: Chip) -> list[str]:
    """Every reason why XLA's scatter writes so many tokens to this cache; an empty list if the kernel does."""
    found = supports_write(config_of(cache.spec), tokens, chip=chip.generation)
    if cache.k.dtype != jnp.dtype(cache.spec.dtype):
        found.append(
            f"values stored as {cache.k.dtype}: wanted {cache.spec.dtype}; make the cache with storage='native'"
        )
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def write_pages(chip: Chip, cache: PagedKV, k, v, slots, params: AttentionParams) -> PagedKV:
    """The same values as jattn.write_kv, in place if the cache is donated; its gradient is that of write_kv.

    Of rows with the same slot the last one is written. XLA quantises the rows, and writes the scales of tokens by its
    scatter, which promises no order: with quant="per_token_head" no two rows may have the same slot.
    """
    spec, slots = cache.spec, jnp.asarray(slots)
    if reasons_against(cache, slots.shape[0], chip):
        write = write_by_head if spec.heads_first else write_kv
        return write(cache, k, v, slots, params)
    tokens = slots.shape[0]
    k, k_scale = encode_rows(k[:tokens], spec, cache.k.dtype, params.k_scale)
    v, v_scale = encode_rows(v[:tokens], spec, cache.v.dtype, params.v_scale)
    new_k, new_v = write_rows((k, v), slots, (cache.k, cache.v), config_of(spec))
    scaled = lambda pool, rows: None if pool is None else put_by_head(pool, rows, slots, spec)
    return PagedKV(
        k=new_k, v=new_v, k_token_scale=scaled(cache.k_token_scale, k_scale),
        v_token_scale=scaled(cache.v_token_scale, v_scale), spec=spec,
    )  # fmt: skip


def _backward(chip: Chip, saved, cotangent):
    return write_backward(saved, cotangent)


write_pages.defvjp(lambda chip, *args: (write_pages(chip, *args), args), _backward)
