"""Inputs of a case: N(0, 1) data, pages in random order, one key per tensor."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.cases import Case


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of one attention call."""

    spec: jattn.AttentionSpec
    q: jax.Array
    cache: jattn.PagedKV
    meta: jattn.CommonAttentionMetadata
    params: jattn.AttentionParams


def make(case: Case, seed: int = 0, spec_options: dict | None = None) -> Inputs:
    """Random inputs of this case, on the default device."""
    spec = jattn.AttentionSpec(
        num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, **(spec_options or {})
    )
    blocks = [-(-length // case.page) for length in case.seq_lens]
    order = np.random.default_rng(seed).permutation(sum(blocks)).astype(np.int32)
    table = np.zeros((len(blocks), max(blocks)), np.int32)
    for r, (row, end) in enumerate(zip(blocks, np.cumsum(blocks), strict=True)):
        table[r, :row] = order[end - row : end]
    quantised = case.cache_dtype is not None
    cache_spec = jattn.KVCacheSpec(
        num_blocks=sum(blocks),
        block_size=case.page,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        dtype=case.cache_dtype or case.dtype,
        quant="per_tensor" if quantised else "none",
    )
    keys = _keys(seed)
    cache = _fill(jattn.empty_cache(cache_spec), lambda shape: jax.random.normal(next(keys), shape))
    meta = jattn.CommonAttentionMetadata.from_lengths(case.query_lens, case.seq_lens, table, case.page)
    q = jax.random.normal(next(keys), (case.num_tokens, case.num_heads, case.head_dim)).astype(case.dtype)
    scale = jnp.float32(1.0) if quantised else None
    params = jattn.AttentionParams(
        k_scale=scale,
        v_scale=scale,
        sinks=jax.random.normal(next(keys), (case.num_heads,)) if spec.has_sinks else None,
        alibi_slopes=jnp.exp2(-8 * jnp.arange(1, case.num_heads + 1) / case.num_heads) if spec.has_alibi else None,
    )
    return Inputs(spec, q, cache, jax.tree.map(jnp.asarray, meta), params)


def _keys(seed: int):
    """Endless independent keys."""
    count = 0
    while True:
        yield jax.random.fold_in(jax.random.key(seed), count)
        count += 1


def _fill(cache: jattn.PagedKV, normal) -> jattn.PagedKV:
    """The cache with every slot written by `jattn.write_kv`, in slices that fit in memory."""
    spec = cache.spec
    write = jax.jit(jattn.write_kv, donate_argnums=0)
    step = max(1, min(spec.capacity_tokens, 2**24 // (spec.num_kv_heads * spec.head_dim)))
    for first in range(0, spec.capacity_tokens, step):
        slots = jnp.arange(first, first + step, dtype=jnp.int32)
        k = normal((step, spec.num_kv_heads, spec.head_dim))
        cache = write(cache, k, normal((step, spec.num_kv_heads, spec.v_head_dim)), slots)
    return cache
