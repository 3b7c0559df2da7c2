"""`pallas_cpu` through the public functions: what the kernel's own tests do not cover, and what it refuses.

The conformance tests cover each feature, dtype and size of each backend.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.types import Feature
from tests.cases import CASES, FEATURES
from tests.oracle import attention
from tests.problem import Problem
from tests.running import run, same_bits

BACKEND = "pallas_cpu"


def test_equals_the_witness():
    p = Problem(case=CASES["empty_in_the_middle"], feature=FEATURES["everything_two_ways"], dtype="bfloat16")
    cache, state = run(p, BACKEND)
    p.answer(cache).check(state)


@pytest.mark.parametrize("attn_type", ["decoder", "encoder_only"])
def test_packed_keys_are_a_cache_written_just_now(attn_type):
    p = Problem(case=CASES["long_and_short"], feature=FEATURES["window_two_sided"])
    spec = dataclasses.replace(p.spec, attn_type=attn_type)
    k, v = (np.concatenate([*rows, np.full_like(rows[0][:5], np.nan)]) for rows in (p.keys, p.values))
    state = jattn.attention(p.q, k, v, p.meta, spec, backend=BACKEND)
    p.answer_over(p.keys, p.values).check(state)


def test_decoder_queries_see_every_encoder_token():
    p = Problem(case=CASES["mixed"])
    spec = dataclasses.replace(p.spec, attn_type="encoder_decoder")
    lens = (7, 1, 9, 4, 6)
    normal = lambda name, n: p.rng(f"{name}{n}").normal(size=(n, p.kv_heads, p.head_dim)).astype(np.float32)
    keys, values = ([normal(name, n) for n in lens] for name in ("ek", "ev"))
    meta = jattn.CommonAttentionMetadata.from_lengths(
        p.case.query_lens, p.case.seq_lens, None, p.block_size, num_tokens=p.num_tokens, num_reqs=p.num_reqs,
        encoder_seq_lens=lens, cross_block_table=np.arange(15).reshape(5, 3),
    )  # fmt: skip
    attn = jattn.PagedAttention(spec, dataclasses.replace(p.cache_spec, num_blocks=15), BACKEND)
    cache = jattn.empty_cache(attn.cache_spec, fill=np.nan)
    packed = [np.concatenate(rows) for rows in (keys, values)]
    m = attn.build(meta)
    cache, first = attn(p.q, *packed, cache, m)
    cache, again = attn(p.q, None, None, cache, m)
    out, lse = attention.ragged(
        p.q[: p.case.num_tokens], keys, values, p.case.query_lens, num_tokens=p.num_tokens, causal=False,
        scale=p.head_dim**-0.5,
    )  # fmt: skip
    np.testing.assert_allclose(first.out, out, atol=2e-6)
    np.testing.assert_allclose(first.lse, lse, atol=2e-6)
    assert same_bits(first, again)


def test_a_request_computes_the_same_bits_in_any_company():
    """Alone, first of many, padded wider, with a larger static bound on the query length."""
    p = Problem(case=CASES["mixed"])
    cache, many = run(p, BACKEND)
    start, n = 2, p.case.query_lens[2]  # six new tokens after two decodes
    attn = jattn.PagedAttention(p.spec, p.cache_spec, BACKEND)
    attend = jax.jit(lambda q, cache, meta: attn.attend(q, cache, attn.build(meta)))
    for more in (0, 9):
        alone = p.alone(2).replace(pad_tokens=more, pad_reqs=more)
        meta = alone.meta.replace(block_table=np.resize(p.block_table[2], (1 + more, p.block_table.shape[1])))
        meta = dataclasses.replace(meta, max_query_len=meta.max_query_len * (1 + more))
        q = np.resize(p.q[start : start + n], alone.q.shape)
        one = attend(q, cache, meta)
        assert same_bits(jax.tree.map(lambda x: x[:n], one), jax.tree.map(lambda x: x[start : start + n], many))


def test_a_quantised_query_is_scaled():
    p = Problem(feature=FEATURES["head_scales"], case=CASES["decode"])
    stored = np.clip(np.round(np.nan_to_num(p.q) * 20), -127, 127).astype(np.int8)
    attn = jattn.PagedAttention(p.spec, p.cache_spec, BACKEND)
    cache, m = p.cache(), attn.build(p.meta)
    state = attn.attend(stored, cache, m, p.params)
    same = attn.attend(stored.astype(np.float32), cache, m, p.params)
    assert state.out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(state.lse, same.lse)


def test_refusals_are_sentences():
    p = Problem(case=CASES["single_token"])
    needs = (Feature.CASCADE, Feature.DCP, Feature.MM_PREFIX)
    reports = {r.name: r for r in jattn.explain(p.spec, p.cache_spec, needs=needs)}
    assert not reports[BACKEND].supported
    assert [why.split(" not supported")[0] for why in reports[BACKEND].reasons] == [
        f.value for f in Feature if f in needs
    ]
    attn = jattn.PagedAttention(p.spec, p.cache_spec, BACKEND)
    cache, m = p.cache(), attn.build(p.meta)
    with pytest.raises(jattn.UnsupportedError, match="pallas_cpu computes forward only; use backend='sdpa'"):
        jax.grad(lambda q: attn.attend(q, cache, m).out.sum())(p.q)


def test_it_is_the_last_resort():
    p = Problem()
    assert [r.name for r in jattn.explain(p.spec, p.cache_spec) if r.supported][-1] == BACKEND
