"""Bugs of other libraries with scales, sinks, sizes, states and platforms. Tests are named after their rows (R-n)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.ops.state import log2_lse_to_ln
from tests.cases import CASES, FEATURES, Case, Feature
from tests.laws.judge import able, judge, single
from tests.problem import Problem
from tests.running import run, same_bits

FEW = Problem(case=Case("few", (1, 1), (9, 5)), heads=2, kv_heads=1, pad_reqs=1)


def test_r08_the_lse_is_natural_log_token_major_float32():
    """Five keys that score 0: ln 5, not log2 5; [T H] with T != H; other libraries' units convert exactly."""
    state, _ = single(np.zeros((3, 2, 8)), np.ones((5, 2, 8)), np.ones((5, 2, 8)))
    assert state.lse.shape == (3, 2) and state.lse.dtype == jnp.float32
    np.testing.assert_allclose(state.lse, np.log([[3, 3], [4, 4], [5, 5]]), rtol=1e-6)
    heads_first = jnp.log2(jnp.float32([[3, 4, 5], [3, 4, 5]]))  # vLLM's order and base
    np.testing.assert_allclose(log2_lse_to_ln(heads_first.T), state.lse, rtol=1e-6)


@pytest.mark.parametrize("feature", ["plain", "cap_sinks_window", "chunk_alibi_sinks"])
@pytest.mark.parametrize("prefix", [3, 8, 15])
def test_r09_a_shared_prefix_is_a_hint_that_no_number_shows(feature, prefix):
    """Sixteen common tokens; common_prefix_len is at most that, a whole number of blocks or not."""
    problem = Problem(case=Case("family", (1, 4, 1), (16, 23, 18)), feature=FEATURES[feature], pad_reqs=0)
    table = problem.block_table.copy()
    table[1:, :4] = table[0, :4]
    pool = problem.cache()
    meta = problem.meta.replace(block_table=table)
    for backend in able(problem):
        attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
        flat, shared = (attn.attend(problem.q, pool, attn.build(meta, n), problem.params) for n in (0, prefix))
        np.testing.assert_allclose(shared.out, flat.out, atol=2e-6, err_msg=backend)
        np.testing.assert_allclose(shared.lse, flat.lse, atol=2e-6, err_msg=backend)


@pytest.mark.parametrize("dim", [1, 72, 88, 112, 120, 160, 512, 576])
def test_r15_any_head_size(dim):
    judge(FEW.replace(head_dim=dim, block_size=16))


@pytest.mark.parametrize("block_size", [5, 8, 96, 100, 256])
def test_r16_any_page_size(block_size):
    judge(FEW.replace(block_size=block_size, head_dim=8))


@pytest.mark.parametrize("ratio", [32, 64])
def test_r17_groups_larger_than_any_tile(ratio):
    judge(FEW.replace(heads=ratio, head_dim=8))


def test_r17_heads_that_do_not_divide_raise():
    with pytest.raises(ValueError, match="multiple"):
        jattn.AttentionSpec(num_heads=6, num_kv_heads=4, head_dim=8)


def with_sinks(value: float | None) -> tuple[Problem, jattn.AttentionParams]:
    feature = FEATURES["plain"] if value is None else FEATURES["sinks"]
    sinks = None if value is None else np.full(FEW.heads, value, np.float32)
    return FEW.replace(feature=feature), jattn.AttentionParams(sinks=sinks)


def test_r21_a_sink_of_minus_infinity_is_no_sink_and_a_huge_one_takes_everything():
    for backend in able(FEW.replace(feature=FEATURES["sinks"])):
        got = {}
        for value in (None, -np.inf, 80.0):
            problem, params = with_sinks(value)
            attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
            got[value] = attn.attend(problem.q, FEW.cache(), attn.build(problem.meta), params)
        np.testing.assert_allclose(got[-np.inf].out, got[None].out, atol=1e-6, err_msg=backend)
        np.testing.assert_allclose(got[-np.inf].lse, got[None].lse, atol=1e-6, err_msg=backend)
        live = FEW.case.num_tokens
        assert np.abs(got[80.0].out).max() < 1e-20, backend
        np.testing.assert_allclose(got[80.0].lse[:live], 80.0, rtol=1e-6, err_msg=backend)


@pytest.mark.parametrize("length", [40, 600, 1300])
def test_r21_a_sink_counts_once_however_many_splits_the_keys_have(length):
    """Long rows are computed in pieces, but the sink counts once in each row."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, 2, 8)) for n in (1, length, length))
    params = jattn.AttentionParams(sinks=np.float32([3.0, -1.0]))
    for backend in able(FEW.replace(feature=FEATURES["sinks"])):
        state, answer = single(q, k, v, has_sinks=True, params=params, backend=backend)
        answer.check(state)


def test_r22_scales_multiply_exactly_what_they_name_and_none_is_one():
    problem = FEW
    cache, meta, live = problem.cache(), problem.meta, FEW.case.num_tokens
    for backend in able(FEW):
        attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
        m = attn.build(meta)

        def attend(q=problem.q, attn=attn, m=m, **scales):
            state = attn.attend(q, cache, m, jattn.AttentionParams(**scales))
            return np.asarray(state.out)[:live], np.asarray(state.lse)[:live]

        plain = attend()
        assert same_bits(plain, attend(q_scale=1.0, k_scale=1.0, v_scale=1.0)), backend
        np.testing.assert_allclose(attend(v_scale=2.0)[0], 2 * plain[0], rtol=1e-6, err_msg=backend)
        doubled = attend(q=problem.q * 2)
        for name in ("q_scale", "k_scale"):  # powers of two: exact in float32
            for mine, wanted in zip(attend(**{name: 2.0}), doubled, strict=True):
                np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-6, err_msg=f"{backend} {name}")


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
def test_r22_a_scale_that_cannot_be_is_refused_on_the_host(name, bad):
    with pytest.raises(ValueError, match=name):
        jattn.paged_attention(FEW.q, FEW.cache(), FEW.meta, FEW.spec, jattn.AttentionParams(**{name: bad}))


def test_r22_layers_with_different_scales_share_one_trace(compiles):
    attn = jattn.PagedAttention(FEW.spec, FEW.cache_spec)

    @jax.jit
    def scaled(cache, params):
        return attn.attend(FEW.q, cache, attn.build(FEW.meta), params).out

    cache = FEW.cache()
    with compiles() as seen:
        outs = [scaled(cache, jattn.AttentionParams(v_scale=jnp.float32(x))) for x in (0.5, 1.0, 3.0)]
    assert seen.of("scaled") == 1
    assert not same_bits(outs[0], outs[2])


def test_r23_the_encoder_s_lengths_are_not_the_decoder_s():
    """`meta.cross` has its own lengths, slots and pages; the decoder's are untouched."""
    meta = jattn.CommonAttentionMetadata.from_lengths(
        [1, 2], [4, 2], [[0, 1], [2, 3]], 4, encoder_seq_lens=[7, 3], cross_block_table=[[5, 4], [6, 7]]
    )
    assert meta.seq_lens.tolist() == [4, 2] and meta.cross.seq_lens.tolist() == [7, 3]
    assert meta.slot_mapping.tolist() == [3, 8, 9]
    assert meta.cross.slot_mapping.tolist() == [20, 21, 22, 23, 16, 17, 18, 24, 25, 26]


@pytest.mark.parametrize("interleave", [1, 4])
def test_r25_ranks_hold_every_key_once_even_when_a_rank_holds_none(interleave):
    lens = np.arange(40, dtype=np.int32)
    for world in (1, 2, 3, 8):
        local = np.asarray(jattn.get_dcp_local_seq_lens(lens, world, interleave=interleave))
        held = [[sum(p // interleave % world == r for p in range(n)) for r in range(world)] for n in lens]
        np.testing.assert_array_equal(local, held)


def test_r33_zero_keys_and_values_give_exactly_zero():
    for backend in able(FEW):
        zero = jattn.PagedKV.from_logical(FEW.cache_spec, *(np.zeros_like(x) for x in FEW.cache().logical()))
        attn = jattn.PagedAttention(FEW.spec, FEW.cache_spec, backend=backend)
        state = attn.attend(FEW.q, zero, attn.build(FEW.meta))
        assert not np.asarray(state.out).any(), backend
        np.testing.assert_allclose(state.lse[:2, 0], np.log([9, 5]), rtol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_r34_one_api_on_every_platform(platform):
    """The layer is supported by one backend on each platform, and the others give reasons."""
    reports = jattn.explain(FEW.spec, FEW.cache_spec, platform=platform)
    assert [r.name for r in reports] == list(jattn.list_backends())
    assert any(r.supported for r in reports)
    assert all(r.supported or r.reasons for r in reports)
    assert jattn.PagedAttention(FEW.spec, FEW.cache_spec, platform=platform).backend_name in jattn.list_backends()


def test_a_group_of_one_feature_is_not_another():
    """The helpers of this file can fail: the results of a backend differ between features."""
    plain, capped = (run(FEW.replace(feature=f))[1] for f in (FEATURES["plain"], Feature("c", dict(scale=2.0))))
    assert not same_bits(plain, capped)
    assert CASES["decode"].num_tokens == 4
