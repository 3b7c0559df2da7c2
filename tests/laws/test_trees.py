"""R-26: attention over a tree of drafted tokens, as a mask_fn, is that along each token's own path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from tests import tolerances
from tests.oracle import attention as witness

HEADS, KV_HEADS, DIM, CONTEXT = 4, 2, 8, 9


def random_tree(rng, size):
    """bool[size size]: does token i see drafted token j (its ancestors and itself)?"""
    sees = np.eye(size, dtype=bool)
    for i in range(1, size):
        sees[i] |= sees[rng.integers(0, i)]
    return sees


def attend(q, cache, meta, tree, backend):
    """Drafted tokens see the whole context and their own path. The tree is traced: one program serves all trees."""
    size = tree.shape[0]

    def on_path(head, q_pos, kv_pos):
        i, j = jnp.clip(q_pos - CONTEXT, 0, size - 1), jnp.clip(kv_pos - CONTEXT, 0, size - 1)
        return (kv_pos < CONTEXT) | tree[i, j]

    spec = jattn.AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, mask_fn=on_path)
    return jattn.paged_attention(q, cache, meta, spec, backend=backend)


@pytest.mark.parametrize("backend", ["sdpa", "pallas_cpu"])
def test_r26_a_tree_mask_is_causal_attention_along_every_path(backend):
    rng = np.random.default_rng(0)
    size, page = 7, 4
    spec = jattn.KVCacheSpec(num_blocks=8, block_size=page, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float32")
    meta = jattn.CommonAttentionMetadata.from_lengths([size], [CONTEXT + size], [rng.permutation(8)[:4]], page)
    step = jax.jit(lambda *batch: attend(*batch, backend))
    for _ in range(5):
        tree = random_tree(rng, size)
        k, v = (rng.normal(size=(CONTEXT + size, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
        q = rng.normal(size=(size, HEADS, DIM)).astype(np.float32)
        slots = meta.block_table[0][np.arange(CONTEXT + size) // page] * page + np.arange(CONTEXT + size) % page
        cache = jattn.write_kv(jattn.empty_cache(spec, np.nan), jnp.asarray(k), jnp.asarray(v), slots)
        state = step(q, cache, meta, jnp.asarray(tree))
        for i in range(size):
            path = [*range(CONTEXT), *(CONTEXT + np.flatnonzero(tree[i]))]
            out, lse = witness.attend_one(
                q[i : i + 1], k[path], v[path], q_pos=np.array([len(path) - 1]), scale=DIM**-0.5, causal=True
            )
            tolerances.assert_within(np.asarray(state.out[i : i + 1]), out, 1e-6)
            tolerances.assert_within(np.asarray(state.lse[i : i + 1]), lse, 2e-6, "lse")
    assert step._cache_size() == 1
