"""Later bugs of other attention libraries. Each test is named after its row in docs/parity.md (R-n)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jattn
from jattn.parallel import decode_context_parallel, tensor_parallel
from tests.cases import FEATURES, Case, Feature
from tests.laws.judge import able, single
from tests.oracle.mla import latent_attention
from tests.problem import Problem
from tests.running import step

HERE = ("sdpa", "cpu_native", "pallas_cpu")
RANKS = 4
DECODES = Case("uneven", (*[1] * 33, 5, 0, 3), (*[1 + 3 * i % 41 for i in range(33)], 23, 0, 3))
"""More decodes than ranks can share evenly, lengths of all remainders, some too short for every rank to hold a key."""


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:RANKS]), ("ranks",))


# ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [32767, 32768, 32769, 65535, 65536, 65537])
@pytest.mark.parametrize("backend", HERE)
def test_r39_positions_past_16_bits_are_positions(backend, length):
    """A window and a slope at the largest positions: an overflow would hide keys or weight them wrongly."""
    rng = np.random.default_rng(length)
    q, k, v = (rng.normal(size=(n, 1, 8)).astype(np.float32) for n in (2, length, length))
    params = jattn.AttentionParams(alibi_slopes=np.float32([0.1]))
    options = dict(has_alibi=True, sliding_window=7, params=params, backend=backend, block_size=4096)
    state, answer = single(q, k, v, **options)
    answer.check(state)


@pytest.mark.parametrize("backend", HERE)
def test_r39_every_key_of_a_request_past_16_bits_counts(backend):
    length = 65537
    v = np.arange(length, dtype=np.float32)[:, None, None] / length * np.ones((1, 1, 8), np.float32)
    state, _ = single(np.zeros((1, 1, 8)), np.ones((length, 1, 8)), v, backend=backend, block_size=4096)
    np.testing.assert_allclose(state.out, v.mean(dtype=np.float64), atol=1e-5)
    np.testing.assert_allclose(state.lse, np.log(length), rtol=1e-6)


def test_r39_what_the_batch_counts_is_int32():
    meta = jattn.CommonAttentionMetadata.from_lengths([2], [65537], np.arange(17)[None], 4096)
    positions = meta.positions()
    assert positions.dtype == jnp.int32 and positions.tolist() == [65535, 65536]
    assert {x.dtype.name for x in jax.tree.leaves(meta)} == {"int32"}


# ----------------------------------------------------------------------


def unsharded(problem: Problem):
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, "sdpa")
    new = problem.new(problem.keys), problem.new(problem.values)
    return step(attn, problem.cache(new=False), problem.q, *new, problem.meta, problem.params)


def test_r40_r43_heads_over_four_ranks_are_the_heads_of_one():
    problem = Problem(case=DECODES, feature=FEATURES["window_alibi"], heads=8, kv_heads=4, head_dim=8)
    sharded = jax.jit(tensor_parallel(problem.spec, problem.cache_spec, mesh(), "ranks", backend="sdpa"))
    new = problem.new(problem.keys), problem.new(problem.values)
    cache, state = sharded(problem.q, *new, problem.cache(new=False), problem.meta, problem.params)
    problem.answer(cache).check(state)
    same, whole = unsharded(problem)
    np.testing.assert_allclose(state.out, whole.out, atol=2e-6)
    np.testing.assert_allclose(state.lse, whole.lse, atol=2e-6)
    for mine, its in zip(cache.logical(), same.logical(), strict=True):
        np.testing.assert_array_equal(mine, its)


@pytest.mark.parametrize("interleave", [1, 4])
def test_r40_r43_keys_over_four_ranks_are_the_keys_of_one(interleave):
    problem = Problem(case=DECODES, feature=FEATURES["window_alibi"], head_dim=8)
    width = -(-max(problem.case.seq_lens) // (problem.block_size * RANKS))
    rows = len(problem.case.seq_lens)
    table = problem.rng("table").permutation(rows * width).reshape(rows, width)
    spec = dataclasses.replace(problem.cache_spec, num_blocks=rows * width * RANKS)
    sharded = jax.jit(decode_context_parallel(problem.spec, spec, mesh(), "ranks", interleave=interleave))
    size, build = problem.block_size * RANKS, jattn.CommonAttentionMetadata.from_lengths
    cache, done = jattn.empty_cache(spec, float("nan")), problem.case.computed
    past = [np.concatenate([x[:n] for x, n in zip(p, done, strict=True)]) for p in (problem.keys, problem.values)]
    nobody = np.zeros((sum(done), problem.heads, problem.head_dim), np.float32)
    cache, _ = sharded(nobody, *past, cache, build(done, done, table, size), problem.params)
    new = problem.new(problem.keys), problem.new(problem.values)
    meta = build(problem.case.query_lens, problem.case.seq_lens, table, size, num_tokens=problem.num_tokens)
    _, state = sharded(problem.q, *new, cache, meta, problem.params)
    _, whole = unsharded(problem)
    np.testing.assert_allclose(state.out, whole.out, atol=5e-6)
    np.testing.assert_allclose(state.lse, whole.lse, atol=5e-6)


def test_r40_latent_rows_over_four_ranks_are_the_rows_of_one():
    rng, lens = np.random.default_rng(0), [n for n in DECODES.seq_lens if n]
    spec = jattn.MLASpec(num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
    table = rng.permutation(len(lens) * 3).reshape(-1, 3)
    cache_spec = jattn.mla_cache_spec(spec, table.size * RANKS, 4, dtype="float32")
    rows = [[rng.normal(size=(n, d)).astype(np.float32) for n in lens] for d in (8, 4)]
    params = jattn.MLAParams(kv_b_proj=rng.normal(size=(8, 16)).astype(np.float32))
    q = rng.normal(size=(sum(lens), 2, 8)).astype(np.float32)
    meta = jattn.CommonAttentionMetadata.from_lengths(lens, lens, table, 4 * RANKS)
    sharded = jax.jit(decode_context_parallel(spec, cache_spec, mesh(), "ranks"))
    cache, _ = sharded(q, *map(np.concatenate, rows), jattn.empty_cache(cache_spec), meta, params)
    last = np.cumsum(lens) - 1
    decode = jattn.CommonAttentionMetadata.from_lengths([1] * len(lens), lens, table, 4 * RANKS)
    new = (np.concatenate(x)[last] for x in rows)
    _, state = sharded(q[last], *new, cache, decode, params)
    out, lse = latent_attention(q[last], *rows, params.kv_b_proj.reshape(8, 2, 8), [1] * len(lens), nope=4)
    np.testing.assert_allclose(state.out, out, atol=1e-5)
    np.testing.assert_allclose(state.lse, lse, atol=1e-5)


# ----------------------------------------------------------------------

FEW = Case("few", (1, 4), (21, 13))


@pytest.mark.parametrize("backend", (*HERE, "split"))
def test_r44_layers_of_equal_shapes_and_other_numbers_do_not_share_a_program(backend):
    """Static numbers are part of the key of a compiled step: each is used twice, in turn."""
    options = ({}, dict(scale=0.9), dict(logits_soft_cap=1.5), dict(logits_soft_cap=7.0), dict(sliding_window=3))
    features = [Feature(f"{i}", given) for i, given in enumerate(options)]
    problems = [Problem(case=FEW, feature=feature, head_dim=8, pad_reqs=0) for feature in features]
    cache = problems[0].cache()
    outs = []
    for problem in (*problems, *problems):
        attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend)
        new = problem.new(problem.keys), problem.new(problem.values)
        _, state = step(attn, cache, problem.q, *new, problem.meta, problem.params)
        problem.answer(cache).check(state)
        outs.append(np.asarray(state.out))
    for i, out in enumerate(outs[: len(options)]):
        np.testing.assert_array_equal(out, outs[i + len(options)])
    assert len({out.tobytes() for out in outs}) == len(options)


@pytest.mark.parametrize("backend", (*HERE, "split"))
def test_r46_one_to_eight_new_tokens_in_one_to_eight_requests(backend):
    """Speculative decoding: every query length with every number of requests, padded to one static size."""
    cache = None
    for count in range(1, 9):
        for requests in range(1, 9):
            lens = tuple(20 + 3 * i + count for i in range(requests))
            case = Case(f"{count}x{requests}", (count,) * requests, lens)
            problem = Problem(case=case, heads=2, kv_heads=1, head_dim=8, block_size=16, pad_columns=0,
                              pad_tokens=64 - count * requests, pad_reqs=8 - requests)  # fmt: skip
            problem = problem.replace(spare_blocks=32 - sum(problem.pages_of))
            if backend not in able(problem) and cache is None:
                pytest.fail(f"{backend} must take plain attention")
            meta = problem.meta
            table = np.zeros((8, 4), np.int32)
            table[:, : meta.block_table.shape[1]] = meta.block_table
            meta = meta.replace(block_table=table, max_query_len=8, max_seq_len=64)
            attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend)
            cache = problem.cache()
            new = problem.new(problem.keys), problem.new(problem.values)
            _, state = step(attn, cache, problem.q, *new, meta, problem.params)
            problem.answer(cache).check(state)


# ----------------------------------------------------------------------


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(("dtype", "quant"), [("float8_e4m3fn", "per_tensor"), ("int8", "per_token_head")])
def test_r48_eight_bits_are_as_exact_at_128k_as_at_1k(backend, dtype, quant):
    """Compared with float64 over the stored numbers: the error left is that of the kernel's sums, not of 8 bits."""
    rng, dim, errors = np.random.default_rng(0), 8, []
    k, v, q = (rng.normal(size=(n, 1, dim)).astype(np.float32) for n in (131072, 131072, 2))
    scale = np.float32(0.02) if quant == "per_tensor" else None
    params = jattn.AttentionParams(k_scale=scale, v_scale=scale)
    spec = jattn.AttentionSpec(num_heads=1, head_dim=dim)
    for length in (1024, 131072):
        pages = dict(num_blocks=length // 1024, block_size=1024, num_kv_heads=1, head_dim=dim)
        cache_spec = jattn.KVCacheSpec(**pages, dtype=dtype, quant=quant)
        shape = (-1, 1024, 1, dim)
        cache = jattn.PagedKV.from_logical(cache_spec, k[:length].reshape(shape), v[:length].reshape(shape), params)
        stored = [np.asarray(x, np.float64).reshape(length, dim) * (1 if scale is None else scale)
                  for x in cache.logical()]  # fmt: skip
        logits = q[:, 0].astype(np.float64) @ stored[0].T * spec.scale
        logits[0, -1] = -np.inf  # the first of two queries does not see the second's key
        weight = np.exp(logits - logits.max(axis=1, keepdims=True))
        wanted = weight @ stored[1] / weight.sum(axis=1, keepdims=True)
        table = np.arange(length // 1024)[None]
        meta = jattn.CommonAttentionMetadata.from_lengths([2], [length], table, 1024)
        state = jattn.paged_attention(q, cache, meta, spec, params, backend=backend)
        mass = weight @ np.abs(stored[1]) / weight.sum(axis=1, keepdims=True)
        errors.append(float((np.abs(np.asarray(state.out)[:, 0] - wanted) / mass).max()))
    assert max(errors) < 2e-6, errors  # float32's, a thousandth of 8 bits' own 2 ** -4
