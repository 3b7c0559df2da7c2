"""Bugs of other attention kernels with masks, windows, chunks and biases. Tests are named after their rows (R-n)."""

import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.compat.vllm.decodes_and_prefills import apply_permutation, inverse_permutation, token_permutation
from tests.cases import CASES, FEATURES, Case, Feature
from tests.laws.judge import able, judge, single
from tests.problem import Problem

BLOCK, LENGTH = 4, 21


def counting(length: int, heads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Keys with equal logits, and values that are their positions: the result is the mean of the visible positions."""
    return np.zeros((length, heads, 8)), np.arange(length, dtype=float)[:, None, None].repeat(heads, 1).repeat(8, 2)


@pytest.mark.parametrize("window", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, LENGTH, LENGTH + 1])
def test_r10_the_first_visible_key_of_a_window(window):
    """W keys, the query's own among them: positions max(0, p - W + 1) .. p, by decode and by prefill alike."""
    k, v = counting(LENGTH)
    for rows in (1, LENGTH):
        position = np.arange(LENGTH - rows, LENGTH)
        first = np.maximum(0, position - window + 1)
        for backend in able(Problem(feature=Feature("w", dict(sliding_window=window)))):
            state, _ = single(np.ones((rows, 1, 8)), k, v, sliding_window=window, backend=backend, block_size=BLOCK)
            np.testing.assert_allclose(state.out[:, 0, 0], (first + position) / 2, rtol=1e-5)
            np.testing.assert_allclose(state.lse[:, 0], np.log(position - first + 1), rtol=1e-5, atol=1e-6)


def test_r11_a_windowed_and_a_global_layer_share_one_batch():
    window, globally = (Problem(feature=FEATURES[name]) for name in ("window_5", "plain"))
    meta, cache = globally.meta, globally.cache()
    for problem in (window, globally, window):
        problem.answer(cache).check(jattn.paged_attention(problem.q, cache, meta, problem.spec))


@pytest.mark.parametrize("size", [-1e4, -2.45e5])
def test_r12_a_masked_key_never_wins_over_very_negative_logits(size):
    """600 keys that a window hides, then 100 with large negative logits: the result is their mean, not 0 or NaN."""
    k, v = counting(700)
    k[:] = size / 8
    k[:600] = 0
    for backend in able(Problem(feature=FEATURES["window_5"])):
        state, _ = single(np.ones((1, 1, 8)), k, v, sliding_window=100, scale=1.0, backend=backend)
        np.testing.assert_allclose(state.out, np.mean(np.arange(600, 700)), rtol=1e-5)
        np.testing.assert_allclose(state.lse, size + np.log(100), rtol=1e-6)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_r13_a_soft_cap_survives_logits_far_beyond_it(size):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, 2, 8)) for n in (3, 30, 30))
    for backend in able(Problem(feature=FEATURES["soft_cap"])):
        state, answer = single(q * size * 5, k, v, logits_soft_cap=5.0, scale=1.0, backend=backend)
        assert np.abs(np.asarray(state.lse)).max() <= 5 + np.log(30) + 1e-5
        answer.check(state)


def test_r14_alibi_slopes_of_any_head_count_and_any_slice_of_heads():
    """Six heads, then heads 2..3 alone with their slopes (a tensor-parallel rank): the same rows."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, 6, 8)) for n in (2, 40, 40))
    slopes = 2.0 ** -np.arange(1, 7, dtype=np.float32)
    whole, answer = single(q, k, v, has_alibi=True, params=jattn.AttentionParams(alibi_slopes=slopes))
    answer.check(whole)
    part = slice(2, 4)
    rank, _ = single(
        q[:, part], k[:, part], v[:, part], has_alibi=True, params=jattn.AttentionParams(alibi_slopes=slopes[part])
    )
    np.testing.assert_allclose(rank.out, whole.out[:, part], atol=1e-6)
    np.testing.assert_allclose(rank.lse, whole.lse[:, part], atol=1e-6)


def test_r14_alibi_in_bfloat16_past_256_keys_keeps_its_distances():
    """Distances are float32: 256 + 1 is not 256, whatever the queries' dtype."""
    judge(Problem(case=Case("far", (2,), (300,)), feature=FEATURES["alibi"], dtype="bfloat16", block_size=16))


def test_r14_the_lse_and_a_sink_use_the_true_distance():
    """One key at distance 0 and one at -1, all logits 0: lse = log(1 + exp(-slope) + exp(sink))."""
    k, v = counting(2)
    params = jattn.AttentionParams(alibi_slopes=np.float32([0.7]), sinks=np.float32([0.3]))
    state, _ = single(np.ones((1, 1, 8)), k, v, has_alibi=True, has_sinks=True, params=params)
    np.testing.assert_allclose(state.lse, np.log(1 + np.exp(-0.7) + np.exp(0.3)), rtol=1e-6)


def test_r18_chunked_attention_is_plain_attention_over_virtual_batches():
    """The mask, and each aligned chunk as a request of its own, give the same result."""
    problem = Problem(feature=Feature("chunk", dict(chunk_size=8)), case=CASES["mixed_unsorted"])
    cache = problem.cache()
    virtual, _ = jattn.make_local_attention_virtual_batches(8, problem.meta, problem.block_size)
    plain = problem.replace(feature=FEATURES["plain"]).spec
    answer = problem.answer(cache)
    answer.check(jattn.paged_attention(problem.q, cache, virtual, plain))
    answer.check(jattn.paged_attention(problem.q, cache, problem.meta, problem.spec))


@pytest.mark.parametrize("case", ["mixed_unsorted", "speculative", "empty_in_the_middle"])
def test_r19_attending_and_reordering_commute(case):
    problem = Problem(case=CASES[case], feature=FEATURES["per_request_causal"])
    cache, meta = problem.cache(), problem.meta
    perm, _ = jattn.reorder_batch_to_split_decodes_and_prefills(meta, decode_threshold=2)
    tokens = token_permutation(meta, perm)
    moved = jattn.paged_attention(problem.q[tokens], cache, apply_permutation(meta, perm), problem.spec)
    back = inverse_permutation(tokens)
    state = jattn.AttentionState(out=moved.out[back], lse=moved.lse[back])
    problem.answer(cache).check(state)


def test_r24_window_over_context_with_many_new_tokens():
    """Chunked prefill and a sliding window at once, on every backend."""
    case = Case("prefix", (7, 9, 1), (40, 33, 50))
    judge(Problem(case=case, feature=FEATURES["window_5"]))
    judge(Problem(case=case, feature=FEATURES["window_sinks"], block_size=16))


TREE = (-1, 0, 0, 1, 1, 2)  # parent of each drafted token: a root, two branches, three leaves
CONTEXT = 9


def ancestors() -> np.ndarray:
    """bool[6 6]: is token j on the path from the root to token i?"""
    seen = np.eye(len(TREE), dtype=bool)
    for i, parent in enumerate(TREE):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


def tree_mask(head, q_pos, kv_pos):
    """A token sees the context and its own ancestors."""
    table = jnp.asarray(ancestors())
    clip = lambda x: jnp.clip(x - CONTEXT, 0, len(TREE) - 1)
    return (kv_pos < CONTEXT) | table[clip(q_pos), clip(kv_pos)]


def test_r26_a_tree_mask_is_each_path_recomputed():
    """The result of drafted token i is that of the last token of its own path."""
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(CONTEXT + len(TREE), 2, 8)) for _ in range(2))
    q = rng.normal(size=(len(TREE), 2, 8))
    state = _tree(q, k, v)
    for i, row in enumerate(ancestors()):
        path = np.concatenate([np.arange(CONTEXT), CONTEXT + np.flatnonzero(row)])
        alone, _ = single(q[i : i + 1], k[path], v[path], backend="sdpa")
        np.testing.assert_allclose(state.out[i], alone.out[0], atol=1e-6)
        np.testing.assert_allclose(state.lse[i], alone.lse[0], atol=1e-6)


def _tree(q, k, v):
    table = np.arange(4)[None]
    pool = [np.zeros((16, 2, 8), np.float32) for _ in range(2)]
    for mine, x in zip(pool, (k, v), strict=True):
        mine[: len(x)] = x
    spec = jattn.KVCacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
    cache = jattn.PagedKV.from_logical(spec, *(x.reshape(4, 4, 2, 8) for x in pool))
    meta = jattn.CommonAttentionMetadata.from_lengths([len(q)], [len(k)], table, 4)
    layer = jattn.AttentionSpec(num_heads=2, head_dim=8, mask_fn=tree_mask)
    return jattn.paged_attention(q.astype(np.float32), cache, meta, layer, backend="sdpa")


def test_r32_more_queries_than_keys():
    """The last query has the position of the last key. Queries before the first key see none: (0, -inf)."""
    with pytest.raises(ValueError, match="less than query_len"):
        jattn.CommonAttentionMetadata.from_lengths([4], [2], [[0]], 4)
    k, v = counting(4)
    cache_spec = jattn.KVCacheSpec(num_blocks=1, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    cache = jattn.PagedKV.from_logical(cache_spec, k[None], v[None])
    meta = jattn.CommonAttentionMetadata.from_traced(np.int32([0, 4]), np.int32([2]), np.int32([[0]]), 4, num_tokens=4)
    layer = jattn.AttentionSpec(num_heads=1, head_dim=8)
    for backend in able(Problem()):
        state = jattn.paged_attention(np.ones((4, 1, 8), np.float32), cache, meta, layer, backend=backend)
        assert not np.asarray(state.out[:2]).any() and np.isneginf(np.asarray(state.lse[:2])).all(), backend
        np.testing.assert_allclose(state.out[2:, 0, 0], [0, 0.5], atol=1e-6)
