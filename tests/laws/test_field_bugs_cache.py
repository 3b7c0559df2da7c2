"""Bugs of other paged caches: slots, blocks, NaN, sizes. Each test is named after its row in docs/parity.md (R-n)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.compat.vllm.pages import split_block_table
from pallas_kernels.algebra.paging import split_slot
from tests.cases import CASES, FEATURES, Case
from tests.laws.judge import able, judge
from tests.oracle import cache as pages
from tests.problem import Problem
from tests.running import run, same_bits

SPEC = jattn.KVCacheSpec(num_blocks=3, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")


def rows(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(n, 2, 8)).astype(np.float32) for _ in range(2))


def full(seed: int = 9) -> jattn.PagedKV:
    """A cache with something in every slot."""
    return jattn.write_kv(jattn.empty_cache(SPEC), *rows(12, seed), np.arange(12, dtype=np.int32))


@pytest.mark.parametrize("dtype", [np.int32, np.int16])
@pytest.mark.parametrize("nowhere", [[-1, -1, -1], [-12, -2, -13], [12, 13, 2**15 - 1]])
def test_r01_negative_slot_never_wraps(nowhere, dtype):
    """A slot of -1 or after the end of the pool is not written. (-1 is not the last slot.)"""
    before = full()
    assert same_bits(jattn.write_kv(before, *rows(3), np.array(nowhere, dtype)), before)


def test_r01_among_live_slots_only_the_live_ones_are_written():
    slots, (k, v) = np.array([-1, 11, 12, 0, -12], np.int32), rows(5)
    got = jattn.write_kv(full(), k, v, slots).logical()
    for mine, old, new in zip(got, full().logical(), (k, v), strict=True):
        np.testing.assert_array_equal(mine, pages.write(np.asarray(old), new, slots))


def test_r01_the_largest_slots_do_not_overflow_their_way_back():
    before = full()
    for slot in (2**31 - 1, -(2**31), 2**31 - 12):
        assert same_bits(jattn.write_kv(before, *rows(1), np.array([slot], np.int32)), before)


def test_r02_more_rows_than_slots_write_no_tail():
    k, v = rows(6)
    k[2:], v[2:] = np.nan, np.nan
    got = jattn.write_kv(full(), k, v, np.array([3, 7], np.int32))
    assert all(np.isfinite(x).all() for x in got.logical())
    with pytest.raises(ValueError, match="slot_mapping"):
        jattn.write_kv(full(), *rows(2), np.arange(3, dtype=np.int32))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30])
def test_r03_r04_a_poisoned_null_block_and_stale_tails_are_never_context(poison):
    """NaN in each block that is not referenced (also in block 0, the null block) and in the unused slots of others."""
    problem = Problem(case=Case("tails", (1, 3), (5, 7)), poison=poison)
    assert 0 not in problem.block_table[0, :2] and 0 not in problem.block_table[1, :2]
    for backend in able(problem):
        clean, dirty = (run(problem.replace(poison=x), backend)[1] for x in (0.0, poison))
        assert same_bits(clean, dirty), backend


@pytest.mark.parametrize("case", ["empty_in_the_middle", "cached_but_idle"])
def test_r05_requests_without_tokens_and_padding_are_zero_and_minus_infinity(case):
    """Also in a batch that is not causal, where a padding key would be visible."""
    judge(Problem(case=CASES[case], pad_reqs=4, pad_tokens=9))
    judge(Problem(case=CASES[case], pad_reqs=4, pad_tokens=9, feature=FEATURES["non_causal"]))


def test_r05_an_entirely_empty_batch_is_nothing():
    problem = Problem(case=Case("nobody", (0, 0), (0, 0)), pad_tokens=4)
    for backend in able(problem):
        before = problem.cache(new=False)
        after, state = run(problem, backend, before)
        assert not np.asarray(state.out).any() and np.isneginf(np.asarray(state.lse)).all(), backend
        assert same_bits(after, before), backend


def test_r05_token_scales_ignore_padding():
    """Each quantised row has its own scale: a NaN in a padding row has no effect."""
    spec = jattn.KVCacheSpec(
        num_blocks=2, block_size=4, num_kv_heads=2, head_dim=8, dtype="float8_e4m3fn", quant="per_token_head"
    )
    k, v = rows(3)
    alone = jattn.write_kv(jattn.empty_cache(spec), k[:2], v[:2], np.array([0, 5], np.int32))
    k[2], v[2] = np.nan, np.nan
    assert same_bits(alone, jattn.write_kv(jattn.empty_cache(spec), k, v, np.array([0, 5, -1], np.int32)))


def test_r06_slot_arithmetic_is_exact_to_the_end_of_int32():
    """Blocks and offsets, never element indices: 2**31 - 1 slots of any width are addressable."""
    blocks, size = 2**27, 16
    slots = np.array([0, 2**31 - 1 - size, 2**31 - 1, -1, -(2**31)], np.int32)
    block, offset = split_slot(jnp.asarray(slots), blocks - 1, size)
    assert block.tolist() == [0, blocks - 2, blocks - 1, blocks - 1, blocks - 1]
    assert offset.tolist() == [0, 15, 0, 0, 0]
    with pytest.raises(ValueError, match="below 2\\*\\*31"):
        jattn.KVCacheSpec(num_blocks=2**27, block_size=16, num_kv_heads=1, head_dim=1)


def test_r06_a_pool_of_more_than_2_to_the_32_elements_traces():
    """No array of the program is indexed by element: the step over 2**37 elements has a jaxpr."""
    spec = jattn.KVCacheSpec(num_blocks=2**19, block_size=256, num_kv_heads=8, head_dim=128)
    attn = jattn.PagedAttention(jattn.AttentionSpec(num_heads=8, head_dim=128), spec, backend="sdpa")
    meta = jattn.CommonAttentionMetadata.from_lengths([1], [300], [[2**19 - 1, 0]], 256)
    shape = jax.ShapeDtypeStruct
    pool = shape(spec.shape, jnp.bfloat16)
    cache = jattn.PagedKV(k=pool, v=pool, k_token_scale=None, v_token_scale=None, spec=spec)
    q = shape((1, 8, 128), jnp.bfloat16)
    state = jax.eval_shape(lambda cache, q: attn(q, q, q, cache, attn.build(meta))[1], cache, q)
    assert state.out.shape == (1, 8, 128)
    assert meta.slot_mapping.tolist() == [299 - 256]


def test_r16_a_kernel_block_may_be_a_part_of_a_managers_block():
    """Split tables: each block of 12 tokens read as three of 4; the results are the same."""
    problem = Problem(block_size=12, case=CASES["mixed"])
    cache = problem.cache()
    small = jattn.KVCacheSpec(
        num_blocks=problem.num_blocks * 3, block_size=4, num_kv_heads=2, head_dim=16, dtype="float32"
    )
    split = jattn.PagedKV.from_logical(small, *(np.asarray(x).reshape(-1, 4, *x.shape[2:]) for x in cache.logical()))
    live = len(problem.case.query_lens)
    table = split_block_table(np.maximum(problem.block_table[:live], 0) % problem.num_blocks, 3)
    meta = jattn.CommonAttentionMetadata.from_lengths(
        problem.case.query_lens, problem.case.seq_lens, table, 4, num_tokens=problem.num_tokens
    )
    problem.answer(cache).check(jattn.paged_attention(problem.q, split, meta, problem.spec))


def test_r20_requests_that_share_pages_agree_with_requests_that_do_not():
    """Prefix caching: two requests have the same first blocks and different last ones."""
    problem = Problem(case=Case("twins", (1, 1), (14, 14)), pad_reqs=0, pad_tokens=0)
    own, theirs = problem.block_table.copy(), problem.block_table.copy()
    theirs[1, :3] = own[0, :3]
    pool = [np.asarray(x).copy() for x in problem.cache().logical()]
    for x in pool:
        x[own[1, :3]] = x[own[0, :3]]  # copies in other blocks of the second request
    cache = jattn.PagedKV.from_logical(problem.cache_spec, *pool)
    for backend in able(problem):
        attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
        states = [attn.attend(problem.q, cache, attn.build(problem.meta.replace(block_table=t))) for t in (own, theirs)]
        assert same_bits(*states), backend


def test_r31_overlapping_copies_read_old_values():
    got = jattn.copy_blocks(full(), np.array([[0, 1], [1, 2]], np.int32)).logical()
    for mine, old in zip(got, full().logical(), strict=True):
        np.testing.assert_array_equal(mine, pages.copy(np.asarray(old), [(0, 1), (1, 2)]))
