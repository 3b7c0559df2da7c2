"""A request's result does not depend on how its tokens are divided into steps; a step has no callback to the host."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import jattn
from tests.cases import FEATURES, Case
from tests.laws.judge import able
from tests.laws.serving import serve, whole
from tests.problem import Problem
from tests.running import step, takes

ONE_STEP = [name for name, f in FEATURES.items() if f.spec.get("use_mm_prefix") or f.spec.get("use_qq_bias")]
"""They speak of the tokens of one step: spans look ahead, a bias counts new tokens."""
CAUSAL = [name for name, f in FEATURES.items() if f.causal is True and f.name not in ONE_STEP]
BASE = Problem(case=Case("two", (9, 6), (9, 6)), heads=2, kv_heads=1, head_dim=8, block_size=4)
ABLE = able(BASE)


def held(problem: Problem) -> jattn.PagedKV:
    """The cache after everything was written."""
    return problem.cache(new=True)


@pytest.mark.parametrize("backend", ABLE)
@pytest.mark.parametrize("name", CAUSAL)
def test_decode_is_prefill_one_token_at_a_time(backend, name):
    problem = BASE.replace(feature=FEATURES[name])
    if not takes(backend, problem):
        with pytest.raises(jattn.UnsupportedError):
            serve(problem, [problem.case.query_lens], backend, num_tokens=16)
        return
    pieces = [(1, int(i < 6)) for i in range(9)]
    state = serve(problem, pieces, backend, num_tokens=4)
    problem.answer(held(problem)).check(state)


@pytest.mark.parametrize("backend", ABLE)
@hypothesis.settings(max_examples=12)
@hypothesis.given(cuts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 13)), max_size=5))
def test_any_chunking_is_the_one_shot(backend, cuts):
    """Chunked prefill with windows, chunks, sinks and soft caps: the result is the same for each cut."""
    problem = whole(BASE.replace(case=Case("prompts", (20, 13), (20, 13)), feature=FEATURES["cap_sinks_window"]))
    edges = np.sort(np.array([(0, 0), *cuts, (20, 13)]), axis=0)
    pieces = [tuple(map(int, piece)) for piece in np.diff(edges, axis=0) if piece.any()]
    state = serve(problem, pieces, backend, num_tokens=36)
    problem.answer(held(problem)).check(state)


@pytest.mark.parametrize("backend", ABLE)
def test_r28_a_serving_trace_compiles_once_a_bucket(backend, compiles):
    """200 random steps: requests come, prefill in chunks, decode and leave; every size is a bucket's."""
    rng = np.random.default_rng(0)
    buckets = jattn.Buckets(tokens=(4, 16), reqs=(4,), blocks=(4, 8))
    cache_spec = jattn.KVCacheSpec(num_blocks=32, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    attn = jattn.PagedAttention(jattn.AttentionSpec(num_heads=1, head_dim=8), cache_spec, backend=backend)

    chex.clear_trace_counter()  # traces are counted by name, and the steps of other backends have the same one

    @jax.jit
    @chex.assert_max_traces(n=buckets.budget)
    def served(cache, q, meta):
        return attn(q, q, q, cache, attn.build(meta))

    cache, sizes, running = jattn.empty_cache(cache_spec), set(), []
    with compiles() as seen:
        for _ in range(200):
            while len(running) < 4 and (not running or rng.random() < 0.3):
                running.append(dict(left=int(rng.integers(1, 32)), done=0, row=len(running)))
            chunk = [min(int(rng.integers(1, 6)) if r["done"] == 0 else 1, r["left"]) for r in running]
            for r, n in zip(running, chunk, strict=True):
                r["done"], r["left"] = r["done"] + n, r["left"] - n
            lens = chunk, [r["done"] for r in running]
            size = buckets.sizes_for(*lens, 4)
            table = np.arange(32, dtype=np.int32).reshape(4, 8)[: len(running)]
            meta = jattn.CommonAttentionMetadata.from_lengths(*lens, table, 4, **size)
            q = rng.normal(size=(size["num_tokens"], 1, 8)).astype(np.float32)
            cache, state = served(cache, q, meta)
            sizes.add((*size.values(), meta.max_query_len))
            running = [r for r in running if r["left"]]
    assert np.isfinite(np.asarray(state.out)).all()
    assert len(sizes) >= 4, "the trace must meet several buckets"
    assert seen.of("served") <= len(sizes) <= buckets.budget


@pytest.mark.parametrize("backend", ABLE)
def test_r29_a_step_has_no_way_back_to_the_host(backend):
    """The step can be traced without values, and has no callback and no transfer between devices."""
    problem = BASE.replace(feature=FEATURES["everything"])
    problem = problem if takes(backend, problem) else BASE
    attn = jattn.PagedAttention(problem.spec, problem.cache_spec, backend=backend)
    new = problem.new(problem.keys), problem.new(problem.values)
    args = jax.device_put((problem.cache(new=False), problem.q, *new, problem.meta, problem.params))
    program = str(jax.make_jaxpr(lambda *args: step(attn, *args))(*args))
    assert "callback" not in program
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(step(attn, *args))
