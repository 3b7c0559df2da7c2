"""The KV write of the GPU backends: both pools, and token scales, in one launch."""

import functools

import jax
import jax.numpy as jnp

from jattn.cache import PagedKV
from jattn.cache.layout import encode_rows
from jattn.cache.write import write_backward
from jattn.device import Chip
from jattn.spec import AttentionParams
from pallas_kernels.gpu.config import KV_DTYPES_8BIT
from pallas_kernels.gpu.write_sm90 import PAIRED_MAXIMA_SINCE, quantises, write_rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def write_pages(chip: Chip, cache: PagedKV, k, v, slots, params: AttentionParams) -> PagedKV:
    """The same values as jattn.write_kv, in place if the cache is donated; its gradient is that of write_kv.

    The kernel quantises rows of 16 bits by a scale for each tensor or head, or by one for each token and head, which it
    computes, where the chip has the instructions. Other rows, and those of float32 or with both kinds of scales at
    once, are quantised by XLA before.
    """
    spec, tokens = cache.spec, slots.shape[0]
    k, v, scales, divisors = k[:tokens], v[:tokens], (), ()
    scale_pools = (cache.k_token_scale, cache.v_token_scale) if spec.quant == "per_token_head" else ()
    if _by_kernel(chip, cache, (k, v), params):
        if not scale_pools:
            divisors = tuple(_per_head(scale, spec.num_kv_heads) for scale in (params.k_scale, params.v_scale))
    else:
        k, k_scale = encode_rows(k, spec, cache.k.dtype, params.k_scale)
        v, v_scale = encode_rows(v, spec, cache.v.dtype, params.v_scale)
        scales = (k_scale, v_scale) if scale_pools else ()
    new, new_scales = write_rows(
        (k, v), scales, jnp.asarray(slots, jnp.int32),
        (cache.k, cache.v), scale_pools,
        page_size=spec.block_size, heads_first=spec.physical_layout == "HND", divisors=divisors,
    )  # fmt: skip
    k_scale, v_scale = new_scales or (None, None)
    return PagedKV(k=new[0], v=new[1], k_token_scale=k_scale, v_token_scale=v_scale, spec=spec)


def _by_kernel(chip: Chip, cache: PagedKV, rows, params: AttentionParams) -> bool:
    """Does the kernel quantise these rows, of keys and of values?"""
    spec, own_scales = cache.spec, cache.spec.quant == "per_token_head"
    if spec.dtype not in KV_DTYPES_8BIT or cache.k.dtype != jnp.dtype(spec.dtype):
        return False
    if own_scales and not (params.k_scale is None and params.v_scale is None):
        return False
    capability = chip.compute_capability or PAIRED_MAXIMA_SINCE  # an unknown GPU is taken for Hopper
    return all(quantises(capability, x.dtype.name, spec.dtype, own_scales=own_scales) for x in rows)


def _per_head(scale, heads: int) -> jax.Array:
    """f32[K] of a scale of any shape that AttentionParams takes; None is 1."""
    return jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), (heads,))


def _write_backward(chip: Chip, saved, cotangent):
    return write_backward(saved, cotangent)


write_pages.defvjp(lambda *args: (write_pages(*args), args[1:]), _write_backward)
