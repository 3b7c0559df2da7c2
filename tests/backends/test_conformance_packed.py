"""Attention without a cache, and the four attention types: each backend gives the oracle's result or refuses."""

import dataclasses

import jax
import numpy as np
import pytest

import jattn
from tests import matrix
from tests.backends.rows import LONG
from tests.backends.test_conformance import LSE_OF_HARDWARE
from tests.cases import CASES, FEATURES, Case, Feature
from tests.oracle import attention
from tests.problem import Problem
from tests.running import same_bits

BACKENDS = jattn.list_backends()
BIDIRECTIONAL = Feature("bidirectional", causal=False)
LEFT_AND_RIGHT = Feature("two_sided", dict(sliding_window=(3, 2)), causal=False)
RICH = dataclasses.replace(FEATURES["cap_alibi_non_causal"], name="cap_alibi")
ROWS = {
    "decoder-plain": ("decoder", Problem(case=CASES["prefill"])),
    "decoder-everything": ("decoder", Problem(case=CASES["prefill"], feature=FEATURES["everything"])),
    "decoder-per_request": ("decoder", Problem(case=CASES["mixed"], feature=FEATURES["per_request_causal"])),
    "decoder-rswa_mm_prefix": ("decoder", Problem(case=CASES["mixed"], feature=FEATURES["rswa_mm_prefix_sqrt"])),
    "decoder-bf16": ("decoder", Problem(case=CASES["mixed"], feature=FEATURES["window_sinks"], dtype="bfloat16")),
    "decoder-longer-queries": ("decoder", Problem(case=Case("r32", (4, 3), (2, 3)), pad_tokens=1)),
    "decoder-more-values": ("decoder", Problem(case=CASES["prefill"], head_dim=24, v_head_dim=8)),
    "encoder_only-plain": ("encoder_only", Problem(case=CASES["prefill"], feature=BIDIRECTIONAL)),
    "encoder_only-two_sided": ("encoder_only", Problem(case=CASES["prefill"], feature=LEFT_AND_RIGHT)),
    "encoder_only-cap_alibi": ("encoder_only", Problem(case=CASES["empty_in_the_middle"], feature=RICH)),
    "encoder-plain": ("encoder", Problem(case=CASES["prefill"], feature=BIDIRECTIONAL)),
    "encoder-f16": ("encoder", Problem(case=CASES["prefill"], feature=LEFT_AND_RIGHT, dtype="float16")),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("attn_type", "problem"), ROWS.values(), ids=ROWS)
def test_packed_attention_agrees_with_the_witness_or_refuses(backend, attn_type, problem):
    """An encoder is never causal: `causal` of the batch has an effect on decoders only."""
    spec = dataclasses.replace(problem.spec, attn_type=attn_type)
    causal = problem.causal if attn_type == "decoder" else True
    meta = jattn.CommonAttentionMetadata.from_lengths(
        problem.case.query_lens, problem.case.seq_lens, None, 1,
        num_tokens=problem.num_tokens, num_reqs=problem.num_reqs, causal=causal,
        **problem.feature.reach_of_batch(problem.lengths),
    )  # fmt: skip
    poison = lambda x: np.concatenate([*x, np.full((5, *x[0].shape[1:]), np.nan, np.float32)])
    k, v = (poison(x).astype(problem.q.dtype) for x in (problem.keys, problem.values))
    report = {r.name: r for r in jattn.explain(spec, None)}[backend]
    try:
        state = jattn.attention(problem.q, k, v, meta, spec, problem.params, backend=backend)
    except jattn.UnsupportedError as refusal:
        matrix.check_refusal(backend, problem, refusal, attn_type, packed=True)
        return
    assert report.supported
    matrix.check_taken(backend, problem, attn_type, packed=True)
    real = (
        [attention.scaled(x, problem.numbers.get(name)) for x in rows]
        for rows, name in ((problem.keys, "k_scale"), (problem.values, "v_scale"))
    )
    answer = problem.answer_over(*real)
    dataclasses.replace(answer, lse_limit=np.maximum(answer.lse_limit, LSE_OF_HARDWARE.get(backend, 0.0))).check(state)


CHIP = Problem(case=LONG, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16")
CHIP_ROWS = {
    "causal": ("decoder", CHIP),
    "everything-f16": ("decoder", CHIP.replace(feature=FEATURES["everything"], dtype="float16")),
    "per_request-d128": ("decoder", CHIP.replace(feature=FEATURES["per_request_causal_window"], head_dim=128)),
    "encoder": ("encoder_only", CHIP.replace(feature=LEFT_AND_RIGHT, head_dim=96)),
    "page_edges": ("encoder_only", CHIP.replace(case=CASES["page_edges"], feature=BIDIRECTIONAL)),
}


@pytest.mark.parametrize(("attn_type", "problem"), CHIP_ROWS.values(), ids=CHIP_ROWS)
def test_packed_attention_in_the_sizes_that_chips_are_made_for(attn_type, problem):
    """By the first choice of this platform, on a GPU its kernel."""
    spec = dataclasses.replace(problem.spec, attn_type=attn_type)
    first = jattn.backends.resolve(spec, None, dtypes=(problem.q.dtype,)).get_name()
    test_packed_attention_agrees_with_the_witness_or_refuses(first, attn_type, problem)


ENCODER_LENS = (11, 5, 8)
CROSS = Problem(case=Case("cross", (1, 4, 2), (6, 4, 9)), pad_tokens=2, pad_reqs=1)
CROSS_ROWS = {
    "plain": CROSS,
    "sinks": CROSS.replace(feature=FEATURES["sinks"]),
    "cap_alibi_bf16": CROSS.replace(feature=RICH, dtype="bfloat16"),
    "mask_fn": CROSS.replace(feature=FEATURES["mask_fn"]),
}


def encoder_of(problem: Problem) -> Problem:
    """The encoder's tokens: prompts of other lengths, in other blocks."""
    return problem.replace(case=Case("encoder", ENCODER_LENS, ENCODER_LENS), seed=problem.seed + 1)


def cross_answer(problem: Problem, encoder: Problem):
    """Decoder queries at their own positions over every token of the encoder."""
    bidirectional = dataclasses.replace(problem.feature, causal=False)
    judge = problem.replace(feature=bidirectional)
    return judge.answer_over(encoder.keys, encoder.values, q_starts=problem.case.computed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CROSS_ROWS)
def test_r23_cross_attention_writes_once_and_reads_ever_after(backend, name):
    """Encoder and decoder lengths differ. k = v = None reads what the first step wrote, and writes nothing."""
    problem = CROSS_ROWS[name]
    encoder = encoder_of(problem)
    spec = dataclasses.replace(problem.spec, attn_type="encoder_decoder")
    live = len(ENCODER_LENS)
    meta = jattn.CommonAttentionMetadata.from_lengths(
        problem.case.query_lens, problem.case.seq_lens, problem.block_table[:live], problem.block_size,
        num_tokens=problem.num_tokens, num_reqs=problem.num_reqs, encoder_seq_lens=ENCODER_LENS,
        cross_block_table=encoder.block_table[:live], num_encoder_tokens=encoder.num_tokens,
    )  # fmt: skip
    try:
        attn = jattn.PagedAttention(spec, encoder.cache_spec, backend=backend)
    except jattn.UnsupportedError as refusal:
        matrix.check_refusal(backend, problem, refusal, "encoder_decoder")
        return
    matrix.check_taken(backend, problem, "encoder_decoder")
    new = encoder.new(encoder.keys), encoder.new(encoder.values)
    cache, first = attn(problem.q, *new, encoder.cache(new=False), attn.build(meta), problem.params)
    encoder.stored(cache)
    again, second = attn(problem.q, None, None, cache, attn.build(meta), problem.params)
    answer = cross_answer(problem, encoder)
    answer.check(first)
    answer.check(second)
    assert same_bits(again, cache)
    packed = [np.concatenate(x).astype(problem.q.dtype) for x in (encoder.keys, encoder.values)]
    answer.check(jattn.attention(problem.q, *packed, meta, spec, problem.params))


@pytest.mark.parametrize("backend", ["auto", "sdpa", "split", "pallas_cpu"])
def test_traced_lengths_that_count_keys_that_are_not_there_give_nan(backend):
    """A decode batch without its cache, inside jit: backends read other requests' keys, each its own."""
    spec = jattn.AttentionSpec(num_heads=2, head_dim=8)
    q, k = (
        jax.random.normal(key, (n, 2, 8)) for key, n in zip(jax.random.split(jax.random.key(0)), (5, 8), strict=True)
    )
    call = jax.jit(lambda meta: jattn.attention(q, k, k, meta, spec, backend=backend))
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 1, 1], [3, 5, 9], [[0], [1], [2]], 16, num_tokens=5)
    state = call(meta)
    for x in (state.out, state.lse):
        assert np.isnan(x[2]).all() and not np.isnan(x[:2]).any() and not np.isnan(x[3:]).any()
    whole = jattn.CommonAttentionMetadata.from_lengths([1, 1, 0], [3, 5, 0], [[0], [1], [2]], 16, num_tokens=5)
    np.testing.assert_array_equal(state.out[:2], call(whole).out[:2])
    assert not any(np.isnan(x).any() for x in jax.tree.leaves(call(whole)))
