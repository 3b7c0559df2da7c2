"""The KV write of the GPU backends: both pools, and token scales, in one launch."""

import jax
import jax.numpy as jnp

from jattn.cache import PagedKV
from jattn.cache.layout import encode_rows
from jattn.cache.write import write_backward
from jattn.spec import AttentionParams
from pallas_kernels.gpu.config import KV_DTYPES_8BIT
from pallas_kernels.gpu.write_sm90 import SOURCES, write_rows


@jax.custom_vjp
def write_pages(cache: PagedKV, k, v, slots, params: AttentionParams) -> PagedKV:
    """The same values as jattn.write_kv, in place if the cache is donated; its gradient is that of write_kv.

    The kernel quantises rows of 16 bits by a scale for each tensor or head, or by one for each token and head, which it
    computes. Rows of float32, and both kinds of scales at once, are quantised by XLA before.
    """
    spec, tokens = cache.spec, slots.shape[0]
    k, v, scales, divisors = k[:tokens], v[:tokens], (), ()
    quantises = spec.dtype in KV_DTYPES_8BIT and cache.k.dtype == jnp.dtype(spec.dtype)
    quantises = quantises and {k.dtype.name, v.dtype.name} <= set(SOURCES)
    scale_pools = (cache.k_token_scale, cache.v_token_scale) if spec.quant == "per_token_head" else ()
    if quantises and scale_pools and params.k_scale is None and params.v_scale is None:
        pass  # the kernel computes the scales of the rows
    elif quantises and not scale_pools:
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


def _per_head(scale, heads: int) -> jax.Array:
    """f32[K] of a scale of any shape that AttentionParams takes; None is 1."""
    return jnp.broadcast_to(jnp.asarray(1.0 if scale is None else scale, jnp.float32), (heads,))


write_pages.defvjp(lambda *args: (write_pages(*args), args), write_backward)
