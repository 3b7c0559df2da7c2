"""Keys that are visible in spite of causality and window: prefixes (R-SWA) and spans (images in a prompt)."""

import dataclasses

import jax
import numpy as np
import pytest

import jattn
from tests.cases import CASES, FEATURES, Case
from tests.laws.judge import able
from tests.oracle.attention import visible_keys
from tests.problem import Problem
from tests.running import run, same_bits

WINDOWED = Problem(case=CASES["mixed_unsorted"], feature=FEATURES["window_5"])


def test_what_lies_between_prefix_and_window_is_neither_read_nor_needed():
    """A cache that frees these blocks, as vLLM's manager does, may write other values into them."""
    problem = Problem(case=Case("long", (1, 2), (700, 540)), feature=FEATURES["rswa"], pad_reqs=0)
    _, wanted = run(problem, "sdpa")
    cache, rows = problem.cache(), problem.feature.reach(problem.lengths)
    hidden = []
    for r, n in enumerate(problem.case.seq_lens):
        first_query = n - problem.case.query_lens[r]
        hidden += problem.slots(r)[rows[r]["prefix"] : first_query - 3]  # a window of 4 includes the query
    ruined = [np.array(pool).reshape(-1, *pool.shape[2:]) for pool in cache.logical()]
    for pool in ruined:
        pool[hidden] = np.nan
    pools = [pool.reshape(x.shape) for pool, x in zip(ruined, cache.logical(), strict=True)]
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, "sdpa")
    state = attn.attend(problem.q, jattn.PagedKV.from_logical(problem.cache_spec, *pools), attn.build(problem.meta))
    assert len(hidden) > 1000 and same_bits(state, wanted)


@pytest.mark.parametrize("backend", able(WINDOWED))
def test_a_layer_that_does_not_ask_does_not_look(backend):
    """Hybrid models: one batch for layers with a prefix and layers without."""
    plain = WINDOWED
    attn = jattn.PagedAttention(plain.spec, plain.cache_spec, backend)
    said = plain.meta.replace(
        mm_prefix_ranges=np.tile(np.int32([0, 40]), (plain.num_reqs, 1, 1)),
        rswa_prefix_lens=np.full(plain.num_reqs, 40, np.int32),
    )
    call = lambda meta: attn.attend(plain.q, plain.cache(), attn.build(meta))
    assert same_bits(call(said), call(plain.meta))


def test_a_span_over_the_prompt_is_a_prefix_language_model():
    """Prompt tokens see the whole prompt, and generated tokens are causal: with the span (0, P - 1)."""
    case = Case("prompts", (7, 5), (7, 5))
    problem = Problem(case=case, feature=FEATURES["mm_prefix"], pad_reqs=0)
    both_ways = Problem(case=case, feature=FEATURES["non_causal"], pad_reqs=0)
    meta = problem.meta.replace(mm_prefix_ranges=np.int32([[[0, 6]], [[0, 4]]]))
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec)
    state = attn.attend(problem.q, problem.cache(), attn.build(meta))
    both_ways.answer(both_ways.cache()).check(state)


def test_a_request_alone_and_wider_tables_of_spans_are_the_same_bits():
    problem = Problem(case=CASES["mixed_unsorted"], feature=FEATURES["rswa_mm_prefix_sqrt"])
    _, together = run(problem, "sdpa")
    for r, start in ((0, 0), (3, 15)):  # six new tokens, and a single token: two kinds of tile
        _, state = run(problem.alone(r), "sdpa")
        own = lambda x, first, n=problem.case.query_lens[r]: np.asarray(x)[first : first + n]
        assert same_bits((own(state.out, 0), own(state.lse, 0)), (own(together.out, start), own(together.lse, start)))
    wide = problem.meta.replace(mm_prefix_ranges=np.pad(problem.meta.mm_prefix_ranges, ((0, 0), (0, 3), (0, 0))))
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, "sdpa")
    assert same_bits(attn.attend(problem.q, problem.cache(), attn.build(wide), problem.params), together)


def test_prefixes_and_spans_are_traced_and_may_be_mapped_over():
    """Other spans need no compilation; under vmap each element has its own."""
    problem = Problem(feature=FEATURES["rswa_mm_prefix_sqrt"])
    attn, cache = jattn.PagedAttention(problem.spec, problem.cache_spec, "sdpa"), problem.cache()
    call = lambda meta: attn.attend(problem.q, cache, attn.build(meta), problem.params)
    one, other = problem.meta, problem.meta.replace(rswa_prefix_lens=problem.meta.rswa_prefix_lens + 1)
    ranges = np.stack([one.mm_prefix_ranges, np.zeros_like(one.mm_prefix_ranges)])
    lens = np.stack([one.rswa_prefix_lens, other.rswa_prefix_lens])
    mapped = jax.vmap(lambda r, n: call(dataclasses.replace(one, mm_prefix_ranges=r, rswa_prefix_lens=n)))(ranges, lens)
    jitted = jax.jit(call)
    for i in range(2):
        alone = jitted(one.replace(mm_prefix_ranges=ranges[i], rswa_prefix_lens=lens[i]))
        np.testing.assert_allclose(mapped.out[i], alone.out, atol=1e-6)
    assert jitted._cache_size() == 1
    problem.answer(cache).check(jitted(one))


@pytest.mark.parametrize("name", [name for name, f in FEATURES.items() if f.causal is True])
def test_keys_past_the_retention_are_never_seen(name):
    """The keys that an engine may free are hidden by the oracle's mask. None: early keys are visible."""
    problem = Problem(case=Case("long", (40,), (40,)), feature=FEATURES[name])
    tokens, chunk = problem.spec.retention
    (each,) = problem.feature.reach(problem.lengths)
    window, position = problem.spec.sliding_window, np.arange(40)
    see = visible_keys(
        position, position, window=window, chunk_size=problem.spec.chunk_size, lookback=problem.spec.chunk_lookback,
        clamp_spans=problem.spec.mm_prefix_clamp_sliding_window, mask_fn=problem.spec.mask_fn, **each,
    )  # fmt: skip
    back = (position[:, None] - position)[see].max()
    assert back < (tokens or 40)
    if chunk is not None:
        assert not (see & (position[:, None] // chunk != position // chunk)).any()
    if (tokens, chunk) == (None, None):
        assert back >= 7, "everything is kept, though nothing far back is seen"
