"""The door of latent attention: writes, weights, the cache, what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import MLAAttention, MLAParams, MLASpec, mla_cache_spec
from tests.ops.latent import PLAIN, SIZES, SPEC, Case, S, check, normal
from tests.oracle.mla import latent_attention


def test_write_then_attend_in_one_call_decodes_token_by_token():
    spec, case = SPEC, PLAIN
    mla, cache = case.mla, case.mla.empty_cache(float("nan"))
    kv_c, k_pe, q = normal(5, 6, spec.kv_lora_rank), normal(6, 6, spec.qk_rope_head_dim), normal(7, 6, 3, 20)
    table = [[7, 2]]
    step = jax.jit(mla, donate_argnums=3)
    params = mla.prepare_params(case.params)
    for i in range(6):
        m = mla.build(jattn.CommonAttentionMetadata.from_lengths([1], [i + 1], table, S))
        cache, state = step(q[i : i + 1], kv_c[i : i + 1], k_pe[i : i + 1, None], cache, m, params)
        wanted = latent_attention(
            q[i : i + 1], [kv_c[: i + 1]], [k_pe[: i + 1]], case.params.kv_b_proj, [1], nope=spec.qk_nope_head_dim
        )
        check(state, wanted)


def test_blocks_of_latents_move_like_any_blocks():
    case = PLAIN
    k, v = case.cache.logical()
    pairs = jnp.array([[0, 31], [1, 0]])
    moved_k, moved_v = jattn.copy_blocks(case.cache, pairs).logical()
    for old, new in ((k, moved_k), (v, moved_v)):
        np.testing.assert_array_equal(new[31], old[0])
        np.testing.assert_array_equal(new[0], old[1])
    swapped = jattn.swap_blocks(case.cache, case.mla.empty_cache(storage="native"), pairs)
    np.testing.assert_array_equal(swapped.logical()[1][31], v[0])


def test_a_shared_prefix_changes_nothing():
    mla = PLAIN.mla
    table = np.array([[3, 9, 1, 0], [3, 9, 7, 5]])
    rows = normal(8, 2, 13, SPEC.kv_lora_rank), normal(9, 2, 13, SPEC.qk_rope_head_dim)
    for x in rows:
        x[1, :8] = x[0, :8]
    cache = mla.empty_cache()
    for r in range(2):
        m = mla.build(jattn.CommonAttentionMetadata.from_lengths([13], [13], table[r : r + 1], S))
        cache = mla.write(rows[0][r], rows[1][r], cache, m)
    meta = jattn.CommonAttentionMetadata.from_lengths([2, 3], [13, 13], table, S)
    shared = jax.jit(mla.attend)(PLAIN.q[:5], cache, mla.build(meta, common_prefix_len=9), PLAIN.params)
    wanted = latent_attention(PLAIN.q[:5], *rows, PLAIN.params.kv_b_proj, [2, 3], nope=SPEC.qk_nope_head_dim)
    check(shared, wanted)


def test_prepared_params_are_the_same_layer():
    case = Case()
    prepared = case.mla.prepare_params(case.params)
    assert prepared.kv_b_proj is None and prepared.w_uk.shape == (3, 12, 24) and prepared.w_uv.shape == (3, 24, 10)
    flat = dataclasses.replace(case.params, kv_b_proj=case.params.kv_b_proj.reshape(24, -1))
    for params in (flat, prepared):
        for a, b in zip(jax.tree.leaves(case.mla.prepare_params(params)), jax.tree.leaves(prepared), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_threshold_is_where_the_multiplications_meet():
    deepseek = MLASpec(
        num_heads=128, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    n = deepseek.mha_threshold
    absorbed, materialised = 512 * 2 + 64, 128 + 64 + 128
    assert n * absorbed <= n * materialised + 512 * 256 < (n + 1) * (absorbed - materialised) + (n + 1) * materialised
    assert deepseek.scale == 192**-0.5 and deepseek.head_dim == 576
    assert mla_cache_spec(deepseek, 10, 16).bytes_per_block == 16 * 576 * 2


def test_explain_sends_latent_layers_to_latent_backends():
    cache_spec = mla_cache_spec(SPEC, 8, S)
    reports = {report.name: report for report in jattn.explain(SPEC, cache_spec)}
    assert reports["mla_sdpa"].supported and not reports["sdpa"].supported
    assert any("MLA" in why for why in reports["sdpa"].reasons)
    ordinary = jattn.AttentionSpec(num_heads=2, head_dim=8)
    reports = jattn.explain(ordinary, jattn.KVCacheSpec(num_blocks=8, block_size=S, num_kv_heads=2, head_dim=8))
    assert any("non-MLA" in why for report in reports if report.name == "mla_sdpa" for why in report.reasons)
    with pytest.raises(jattn.UnsupportedError, match="MLA not supported"):
        MLAAttention(SPEC, cache_spec, backend="sdpa")


@pytest.mark.parametrize("reading", ["attend", "forward_mqa", "prefill_mha"])
def test_refusals_say_what_was_wanted(reading):
    case = Case()
    mla, m = case.mla, case.mla.build(case.meta())
    read = getattr(mla, reading)
    with pytest.raises(ValueError, match=r"q.*\[T, 3, 20\]"):
        read(case.q[..., :-1], case.cache, m, case.params)
    with pytest.raises(ValueError, match="either kv_b_proj"):
        read(case.q, case.cache, m, MLAParams())
    with pytest.raises(ValueError, match="sinks"):
        read(case.q, case.cache, m, dataclasses.replace(case.params, sinks=np.zeros(3, np.float32)))
    with pytest.raises(TypeError, match="MLAParams"):
        read(case.q, case.cache, m, jattn.AttentionParams())
    with pytest.raises(ValueError, match="kv_c.shape"):
        mla(case.q, case.new_rows()[0][:, :-1], case.new_rows()[1], case.cache, m, case.params)
    with pytest.raises(ValueError, match="cannot hold rows"):
        MLAAttention(SPEC, jattn.KVCacheSpec(num_blocks=8, block_size=S, num_kv_heads=1, head_dim=16))


@pytest.mark.parametrize(
    "bad", [dict(kv_lora_rank=0), dict(qk_rope_head_dim=1.5), dict(q_lora_rank=-1), dict(sliding_window=0)]
)
def test_a_spec_is_checked_and_its_spellings_are_one(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        MLASpec(**(SIZES | bad))
    assert MLASpec(**SIZES, sliding_window=4, logits_soft_cap=0) == MLASpec(**SIZES, sliding_window=(3, 0))
    assert hash(MLASpec(**SIZES)) == hash(dataclasses.replace(SPEC))


@pytest.mark.parametrize("reading", ["forward_mqa", "prefill_mha", "listed"])
def test_padding_that_is_nan_has_no_part_in_the_gradient_of_the_weights(reading):
    meta = jattn.CommonAttentionMetadata.from_lengths([1, 1], [9, 5], PLAIN.table()[:2, :3], S, num_tokens=4)
    m, topk, cache = PLAIN.mla.build(meta), np.zeros((4, 1), np.int32), PLAIN.cache

    @jax.jit
    @jax.grad
    def grad(w, q, kv_c, k_pe):
        extra = dict(forward_mqa=(), prefill_mha=(kv_c, k_pe), listed=(topk,))[reading]
        params = dataclasses.replace(PLAIN.params, kv_b_proj=w)
        state = getattr(PLAIN.mla, reading.replace("listed", "attend"))(q, cache, m, params, *extra)
        return jnp.sum(jnp.sin(state.out))

    def padded_with(padding):
        rows = [x[:4].copy() for x in (PLAIN.q, PLAIN.rows[0][3], PLAIN.rows[1][3])]
        for x in rows:
            x[2:] = padding
        return rows

    found, wanted = (grad(PLAIN.params.kv_b_proj, *padded_with(x)) for x in (np.nan, 0.0))
    assert np.isfinite(found).all() and np.asarray(wanted).any()
    np.testing.assert_array_equal(found, wanted)
