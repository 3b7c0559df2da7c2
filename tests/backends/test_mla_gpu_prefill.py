"""Long prompts over latents: their pages, and a layer with numpy's attention in the place of the paged kernel."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import MLAAttention, MLAParams, MLASpec, mla_cache_spec
from jattn.backends import mla_gpu_prefill, mla_gpu_prompts
from jattn.backends.gpu_kernel import HOPPER
from jattn.backends.mla_gpu_prefill import projected_prefill
from jattn.backends.mla_gpu_prompts import pages_of, prompt_plan
from tests.backends.paged_oracle import by_numpy
from tests.conftest import count_compiles
from tests.ops.latent import normal, poisoned_table
from tests.oracle.mla import latent_attention

SPEC = MLASpec(num_heads=4, kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=48)
QUERIES, TOTALS = (30, 1, 0, 12, 9, 20), (700, 400, 5, 12, 300, 28)
CASES = {  # cache pages, bytes of a window, pages of a small one, the rotated part by the product, rows of new tokens
    "one window": (16, 2**30, 32, True, False),
    "small windows after large ones": (64, 700_000, 1, True, False),
    "small windows only": (64, 2**30, 2, True, False),
    "concatenated, new rows given": (16, 700_000, 2, False, True),
}


def test_pages_are_those_of_the_requests_end_to_end():
    counts, page, found = jnp.array([5, 0, 8, 1, 9]), 4, {r: [] for r in range(5)}
    for low in (0, 3, 6):  # 8 pages: 2, 0, 2, 1, 3
        pages = pages_of(counts, jnp.int32(low), 3, page, 12)
        for r, n in enumerate(np.asarray(pages.lens)):
            held = np.asarray(pages.table)[r, : -(-n // page)]
            assert (np.asarray(pages.request)[held] == r).all()
            positions, live = (np.asarray(x)[held].reshape(-1) for x in (pages.position, pages.live))
            assert live[:n].all() and not live[n:].any()
            found[r] += list(positions[:n])
    assert [found[r] for r in range(5)] == [list(range(n)) for n in np.asarray(counts)]


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "by itself"])
@pytest.mark.parametrize("name", CASES)
def test_a_long_prompt_is_attention_by_its_definition(name, planned):
    size, window, small, joined, given = CASES[name]
    table = poisoned_table(TOTALS, size, 200, 60)
    written = MLAAttention(SPEC, mla_cache_spec(SPEC, 200, size), "mla_sdpa")
    params = written.prepare_params(MLAParams(kv_b_proj=normal(1, 128, 4, 80) / 12, kv_c_scale=0.5))
    kv_c, k_pe = (np.asarray(jnp.asarray(normal(s, 1445, d), jnp.bfloat16), np.float32) for s, d in ((2, 128), (3, 64)))
    plan = written.build(jattn.CommonAttentionMetadata.from_lengths(TOTALS, TOTALS, table, size))
    cache = written.write(kv_c, k_pe, written.empty_cache(float("nan")), plan, MLAParams())
    count = sum(QUERIES)
    options = dict(num_tokens=count + 5, num_reqs=8)
    m = written.build(jattn.CommonAttentionMetadata.from_lengths(QUERIES, TOTALS, table, size, **options))
    q = normal(4, count + 5, 4, 96).astype(jnp.bfloat16)
    ends, rows = np.cumsum(TOTALS), None
    if given:
        new = np.concatenate([np.arange(e - n, e) for e, n in zip(ends, QUERIES, strict=True)])
        rows = tuple(jnp.asarray(np.pad(x[new], ((0, 5), (0, 0)), constant_values=np.nan)) for x in (kv_c * 0.5, k_pe))
    with by_numpy(WINDOW_BYTES=window, SMALL_WINDOW=small, joined=joined):
        plan = prompt_plan(SPEC, q.dtype.name, m, size) if planned else None
        step = jax.jit(lambda *operands: projected_prefill(written.impl._latent, *operands))
        state = step(jnp.asarray(q), cache, m, params, rows, plan)
    out, lse = np.asarray(state.out, np.float64), np.asarray(state.lse)
    split = np.split(kv_c * 0.5, ends[:-1]), np.split(k_pe, ends[:-1])
    proj = normal(1, 128, 4, 80) / 12
    want, want_lse = latent_attention(np.asarray(q, np.float64)[:count], *split, proj, QUERIES, nope=32)
    np.testing.assert_allclose(out[:count], want, atol=2e-2)
    np.testing.assert_allclose(lse[:count], want_lse, atol=2e-2)
    assert state.out.dtype == q.dtype and (out[count:] == 0).all() and np.isneginf(lse[count:]).all()


@pytest.mark.parametrize("earlier, projected", [(0, 0), (1, 2), (5, 6), (8, 8), (9, 16), (17, 18), (37, 38), (41, 48)])
def test_little_more_is_projected_than_the_earlier_tokens(earlier, projected):
    """Pages of a table with room for many more, as an engine's has. A large window has 16 pages, a small one 2."""
    size, queries, seen = mla_gpu_prompts.PAGE, 20, []
    plain = MLAAttention(SPEC, mla_cache_spec(SPEC, 200, size), "mla_sdpa")
    params = plain.prepare_params(MLAParams(kv_b_proj=normal(1, 128, 4, 80)))
    meta = jattn.CommonAttentionMetadata.from_lengths([queries], [queries + earlier * size], np.arange(200)[None], size)
    project = mla_gpu_prefill._project

    def counted(spec, rows, weights):
        jax.debug.callback(lambda: seen.append(rows.shape[0]))
        return project(spec, rows, weights)

    q = jnp.zeros((queries, 4, 96), jnp.bfloat16)
    with by_numpy(LARGE_WINDOW=16, SMALL_WINDOW=2), mock.patch.object(mla_gpu_prefill, "_project", counted):
        step = jax.jit(
            lambda q, cache, meta: projected_prefill(plain.impl._latent, q, cache, plain.build(meta), params)
        )
        state = step(q, plain.empty_cache(), meta)
        jax.block_until_ready(state)
        jax.effects_barrier()
    assert sum(rows for rows in seen if rows >= size) == projected * size, "new tokens have small pages of their own"


def test_a_layer_makes_no_plan_of_its_own_unless_its_queries_have_another_dtype():
    """A list is 20 kernels; in each of 27 layers they were most of the program, and of the time to compile it."""
    mla = MLAAttention(SPEC, mla_cache_spec(SPEC, 40, 16), "mla_pallas_gpu", HOPPER)
    params = mla.prepare_params(MLAParams(kv_b_proj=normal(1, 128, 4, 80)))
    meta = jattn.CommonAttentionMetadata.from_lengths([20, 1], [300, 40], poisoned_table([300, 40], 16, 40, 20), 16)
    with by_numpy(), mock.patch.object(mla_gpu_prefill, "prompt_plan", wraps=prompt_plan) as made:
        m, cache = mla.build(meta), jax.eval_shape(mla.empty_cache)
        for dtype, plans in (("bfloat16", 0), ("float16", 1)):
            jax.eval_shape(mla.attend, jax.ShapeDtypeStruct((21, 4, 96), dtype), cache, m, params)
            assert made.call_count == plans


def test_a_further_plan_outside_jit_compiles_nothing():
    """A loop with a body of its own in each call was compiled again by each build: 2 s, instead of 0.03."""
    mla = MLAAttention(SPEC, mla_cache_spec(SPEC, 40, 16), "mla_pallas_gpu", HOPPER)
    table = poisoned_table([300, 40], 16, 40, 20)
    for queries in (20, 21):
        meta = jattn.CommonAttentionMetadata.from_lengths([queries, 1], [300, 40], table, 16, num_tokens=32)
        with count_compiles() as seen:
            mla.build(meta)
    assert seen.total == 0, seen.names
