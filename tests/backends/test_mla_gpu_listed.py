"""What the GPU kernel is given of each token's list of keys."""

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import MLAAttention, MLASpec, mla_cache_spec
from jattn.backends.mla_gpu_listed import listed_rows

SPEC = MLASpec(num_heads=4, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=48)


@pytest.mark.parametrize("causal", [True, False])
def test_rows_are_the_visible_keys_of_each_token_once(causal):
    rng, size, queries, totals = np.random.default_rng(0), 16, (3, 1, 0, 2), (70, 33, 5, 2)
    table = rng.permutation(20).reshape(4, 5).astype(np.int32)
    mla = MLAAttention(SPEC, mla_cache_spec(SPEC, 20, size), "mla_sdpa")
    meta = jattn.CommonAttentionMetadata.from_lengths(
        queries, totals, table, size, num_tokens=8, num_reqs=4, causal=causal
    )
    lists = rng.integers(-3, 90, (8, 100)).astype(np.int32)
    rows, counts = (np.asarray(x) for x in listed_rows(mla.build(meta).level, causal, jnp.asarray(lists), size))
    assert rows.shape == (8, 128)
    token = 0
    for r, n in enumerate(queries):
        for i in range(n):
            last = totals[r] - n + i if causal else totals[r] - 1
            keys = sorted({int(p) for p in lists[token] if 0 <= p <= last})
            held = rows[token][rows[token] >= 0]
            assert list(held) == [table[r, p // size] * size + p % size for p in keys]
            assert (rows[token, counts[token] :] == -1).all() and counts[token] >= len(keys)
            token += 1
    assert (rows[token:] == -1).all() and (counts[token:] == 0).all()
