"""A naive implementation to compare with: gather every page of every request, then one einsum. Causal decode only."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import jattn
from benchmarks.inputs import Inputs
from pallas_kernels.algebra import quant


def attention(q: jax.Array, cache: jattn.PagedKV, meta: jattn.CommonAttentionMetadata, scale: float) -> jax.Array:
    """q [R H D], one query a request -> [R H V]; temporaries as large as all keys and values in float32."""
    if meta.max_query_len != 1:
        raise ValueError(f"{meta.max_query_len=} must be 1: the naive gather is for decode")
    reqs, heads, dim = q.shape
    kv, size = cache.spec.num_kv_heads, cache.spec.block_size
    k, v = (quant.decode(pool[meta.block_table], cache.spec.dtype) for pool in (cache.k, cache.v))  # [R B K S D]
    grouped = q.astype(jnp.float32).reshape(reqs, kv, heads // kv, dim)
    logits = jnp.einsum("rkgd,rbksd->rkgbs", grouped, k) * scale
    flat = logits.reshape(reqs, kv, heads // kv, -1)
    seen = jnp.arange(flat.shape[-1])[None] < meta.seq_lens[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], flat, -jnp.inf))
    weights = weights.reshape(*logits.shape[:3], -1, size)
    return jnp.einsum("rkgbs,rbksd->rkgd", weights, v).reshape(reqs, heads, -1).astype(q.dtype)


def caller(given: Inputs) -> Callable[[], jax.Array]:
    """The compiled call on these inputs."""
    compiled = jax.jit(attention, static_argnums=3)
    return lambda: compiled(given.q, given.cache, given.meta, given.spec.scale)
