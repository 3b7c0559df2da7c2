"""A cascade gives the result of the flat batch, with each mask, bias and sink."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.metadata import CommonAttentionMetadata, cascade_levels
from jattn.metadata.cascade import prefix_levels

TABLE = [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 7, 8, 9], [0, 1, 10, 11, 12]]
REACH = dict(use_alibi_sqrt=True, sliding_window=3, use_rswa=True, use_mm_prefix=True)
LEVELS = [8, [(2, 4), (1, 0), (1, 0)]]  # all share 8 tokens, the first two 4 more


def test_a_cascade_is_the_flat_batch():
    spec = jattn.AttentionSpec(
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        sliding_window=9,
        chunk_size=12,
        logits_soft_cap=3.0,
        has_alibi=True,
        has_sinks=True,
    )
    check(spec)


def test_a_cascade_reaches_as_far_as_the_flat_batch():
    """R-SWA prefixes and spans count positions from the request's first key, in whichever level that key is."""
    check(jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, has_alibi=True, has_sinks=True, **REACH))


def check(spec):
    cache_spec = jattn.KVCacheSpec(num_blocks=16, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    meta = CommonAttentionMetadata.from_lengths(
        [1, 3, 2, 1], [13, 17, 14, 9], TABLE, 4, num_tokens=9, num_reqs=5, max_blocks=5,
        rswa_prefix_lens=[5, 2, 9, 0], mm_prefix_ranges=[[(2, 12)], [(13, 15)], [], [(0, 3), (7, 8)]],
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(0), 5)
    k, v = (jax.random.normal(key, (64, 2, 8)) for key in keys[:2])
    cache = jattn.write_kv(jattn.empty_cache(cache_spec, fill=jnp.nan), k, v, jnp.arange(64))
    params = jattn.AttentionParams(
        alibi_slopes=jax.random.normal(keys[2], (4,)),
        sinks=jax.random.normal(keys[3], (4,)),
    )
    q = jax.random.normal(keys[4], (9, 4, 8))
    flat = jax.jit(lambda: jattn.paged_attention(q, cache, meta, spec, params))()
    ours = jax.jit(lambda: jattn.cascade_attention(q, cache, cascade_levels(meta, LEVELS, 4), spec, params))()
    attn = jattn.PagedAttention(spec, cache_spec, "sdpa")
    hinted = attn.attend(q, cache, attn.build(meta, common_prefix_len=8), params)
    for state in (ours, hinted):
        np.testing.assert_allclose(state.out, flat.out, rtol=2e-5, atol=2e-6)
        np.testing.assert_allclose(state.lse, flat.lse, rtol=2e-5, atol=2e-6)


def test_a_common_prefix_is_read_through_a_request_with_queries():
    """The first request has no new token, so its row of the block table may hold anything."""
    table = [[15, 15, 15, 15, 15], *TABLE[:2]]
    meta = CommonAttentionMetadata.from_lengths([0, 2, 1], [0, 13, 14], table, 4)
    k, q = jax.random.normal(jax.random.key(0), (64, 2, 8)), jax.random.normal(jax.random.key(1), (3, 4, 8))
    cache = jattn.write_kv(jattn.empty_cache(CACHE), k, k, jnp.arange(64))
    attn = jattn.PagedAttention(SPEC, CACHE, "sdpa")
    flat, hinted = (attn.attend(q, cache, attn.build(meta, common_prefix_len=n)) for n in (0, 12))
    np.testing.assert_allclose(hinted.out, flat.out, rtol=2e-5, atol=2e-6)
    cascade = jattn.cascade_attention(q, cache, prefix_levels(meta, 12, 4), SPEC, backend="sdpa")
    np.testing.assert_allclose(cascade.out, flat.out, rtol=2e-5, atol=2e-6)


SPEC = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
CACHE = jattn.KVCacheSpec(num_blocks=16, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
META = CommonAttentionMetadata.from_lengths([1, 3, 2, 1], [13, 17, 14, 9], TABLE, 4)


def test_a_prefix_that_the_requests_do_not_share_is_refused():
    """Every request's keys would be read through the blocks of the first."""
    attn = jattn.PagedAttention(SPEC, CACHE, "sdpa")
    attn.build(META, common_prefix_len=9)  # two whole blocks, which all share
    with pytest.raises(ValueError, match="common_prefix_len=10 is more than the 9 keys of request 3"):
        attn.build(META, common_prefix_len=10)
    longer = META.replace(seq_lens=np.full(4, 17, np.int32))
    with pytest.raises(ValueError, match="common_prefix_len=12: requests 0 and 2 have different blocks"):
        attn.build(longer, common_prefix_len=12)
    ended = longer.replace(query_start_loc=np.array([0, 4, 7, 7, 7], np.int32))  # the last two have no tokens
    attn.build(ended, common_prefix_len=12)


@pytest.mark.parametrize("wrong", [1.5, np.nan, "8", [8], np.array([4, 8]), np.float32(4), True, 2**40], ids=str)
def test_a_batchs_prefix_is_one_integer(wrong):
    for backend in ("sdpa", "pallas_cpu"):  # those that do not read it refuse it, too
        with pytest.raises(ValueError, match="meta.common_prefix_len"):
            jattn.PagedAttention(SPEC, CACHE, backend).build(META.replace(common_prefix_len=wrong))
