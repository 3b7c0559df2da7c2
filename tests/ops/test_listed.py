"""Sparse latent attention: each token names its keys. The witness masks dense attention in numpy float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import jattn
from jattn import MLAAttention, MLASpec
from jattn.backends import ContextParallel
from tests.ops.latent import FEATURES, PLAIN, QUERIES, SIZES, TOTALS, Case, S, check, normal
from tests.oracle.mla import latent_attention

WIDTH = 11


def lists(seed: int = 0) -> np.ndarray:
    """A list for each token, padding included: few keys or many, in any order, some twice, some that are no keys."""
    rng, rows = np.random.default_rng(seed), []
    for queries, total in zip(QUERIES, TOTALS, strict=True):
        for _ in range(queries):
            named = rng.permutation(total + 6)[: rng.integers(1, WIDTH + 1)]  # also behind the last key
            named = np.concatenate([named, named[:3]])[:WIDTH]
            row = np.concatenate([named, np.full(WIDTH - len(named), -1)])
            rows.append(rng.permutation(row))
    rows[2][:] = -1
    rows[3][:] = [2**31 - 1, -(2**31), *[4] * (WIDTH - 2)]
    rows[9][:] = 29  # a key of this request that is behind the causal limit of this token
    return np.concatenate([rows, rng.integers(-1, 9, size=(21 - len(rows), WIDTH))]).astype(np.int32)


def wanted(case: Case, listed: np.ndarray, causal=True):
    """Dense attention with a mask: key j of token i is visible if it is in the token's list."""
    spec, outs, lses, first = case.spec, [], [], 0
    for r, (queries, total) in enumerate(zip(QUERIES, TOTALS, strict=True)):
        is_listed = np.zeros((total, max(total, 1)), bool)  # by position of the query, position of the key
        for i in range(queries):
            named = listed[first + i]
            is_listed[total - queries + i, named[(named >= 0) & (named < total)]] = True

        def mask_fn(h, i, j, is_listed=is_listed):
            return is_listed[i, j] & (True if spec.mask_fn is None else spec.mask_fn(h, i, j))

        out, lse = latent_attention(
            case.q[first : first + queries], [case.rows[0][r]], [case.rows[1][r]], case.params.kv_b_proj, [queries],
            nope=spec.qk_nope_head_dim, scale=spec.scale, chunk_size=spec.chunk_size, window=spec.sliding_window,
            soft_cap=spec.logits_soft_cap, slopes=case.params.alibi_slopes, sinks=case.params.sinks, causal=causal,
            mask_fn=mask_fn, score_fn=spec.score_fn,
        )  # fmt: skip
        outs, lses, first = [*outs, out], [*lses, lse], first + queries
    padding = len(case.q) - first
    outs.append(np.zeros((padding, *outs[0].shape[1:]))), lses.append(np.full((padding, spec.num_heads), -np.inf))
    return np.concatenate(outs), np.concatenate(lses)


@functools.partial(jax.jit, static_argnums=0)
def attend(mla, q, cache, m, params, listed):
    return mla.attend(q, cache, m, params, topk_indices=listed)


def listed_state(case: Case, listed: np.ndarray, **options):
    meta = case.meta(**{name: value for name, value in options.items() if name != "common_prefix_len"})
    m = case.mla.build(meta, common_prefix_len=options.get("common_prefix_len", 0))
    return attend(case.mla, case.q, case.cache, m, case.params, listed)


@pytest.mark.parametrize("name", ["plain", *FEATURES])
def test_attention_to_listed_keys_is_dense_attention_with_a_mask(name):
    case = PLAIN if name == "plain" else Case(MLASpec(**SIZES, **FEATURES[name]))
    state, answer = listed_state(case, lists()), wanted(case, lists())
    check(state, answer)
    assert (np.asarray(state.out)[[2, 9]] == 0).all() and np.isneginf(np.asarray(state.lse)[[2, 9]]).all()


def test_without_causality_a_list_may_name_later_keys():
    state = listed_state(PLAIN, lists(), causal=False)
    check(state, wanted(PLAIN, lists(), causal=False))
    assert np.isfinite(np.asarray(state.lse)[9]).all()


def test_neither_order_nor_repetition_changes_what_a_list_means():
    listed = lists()
    base = listed_state(PLAIN, listed)
    shuffled = np.stack([np.random.default_rng(i).permutation(row) for i, row in enumerate(listed)])
    np.testing.assert_array_equal(listed_state(PLAIN, shuffled).out, base.out)
    twice = np.concatenate([listed, listed[:, ::-1]], axis=1)
    check(listed_state(PLAIN, twice), (np.asarray(base.out), np.asarray(base.lse)), atol=1e-6)


def test_a_list_of_all_keys_is_dense_attention_and_an_empty_list_is_none():
    everything = np.broadcast_to(np.arange(36, dtype=np.int32), (21, 36))
    check(listed_state(PLAIN, everything), PLAIN.wanted())
    state = listed_state(PLAIN, np.zeros((21, 0), np.int32))
    assert not np.asarray(state.out).any() and np.isneginf(np.asarray(state.lse)).all()


def test_tokens_are_read_in_groups_of_bounded_size(monkeypatch):
    monkeypatch.setattr("jattn.ops.listed.KEYS_AT_ONCE", 4 * WIDTH)
    case = Case(MLASpec(**SIZES, scale=0.25))
    check(listed_state(case, lists()), wanted(case, lists()))


@pytest.mark.parametrize("options", [dict(layout="NHD"), dict(wide=32, dtype="bfloat16"), dict(dtype="float16")])
def test_every_cache_of_mla_is_read(options):
    case = Case(options=tuple(options.items()))
    rounded = dataclasses.replace(case)
    dtype = options.get("dtype", "float32")
    rounded.__dict__["rows"] = tuple(
        [np.asarray(jnp.asarray(x, dtype), np.float32) for x in part] for part in case.rows
    )
    check(listed_state(case, lists()), wanted(rounded, lists()), atol=2e-5)


def test_a_shared_prefix_changes_nothing_and_a_call_writes_first():
    one = Case(MLASpec(**SIZES, scale=0.3))
    meta = jattn.CommonAttentionMetadata.from_lengths([3, 2], [11, 11], np.repeat(one.table()[3:4], 2, axis=0), S)
    listed = lists()[:5]
    states = [
        one.mla.attend(one.q[:5], one.cache, one.mla.build(meta, common_prefix_len=n), one.params, listed)
        for n in (0, 8)
    ]
    np.testing.assert_array_equal(states[0].out, states[1].out)
    empty, m = (
        one.mla.empty_cache(float("nan")),
        one.mla.build(jattn.CommonAttentionMetadata.from_lengths([1], [1], [[7]], S, num_tokens=21)),
    )
    kv_c, k_pe = (np.repeat(part[4], 21, axis=0) for part in one.rows)
    _, state = one.mla(one.q, kv_c, k_pe, empty, m, one.params, topk_indices=np.zeros((21, 1), np.int32))
    np.testing.assert_allclose(state.out[0], np.einsum("l,lhv->hv", kv_c[0], one.params.kv_b_proj[..., 12:]), atol=1e-5)


@pytest.mark.parametrize(("world", "interleave"), [(2, 1), (3, 2)])
def test_keys_over_ranks_are_listed_by_their_global_position(world, interleave):
    spec, size = MLASpec(**SIZES, has_sinks=True), 4
    parallel = ContextParallel(dcp_axis="ranks", dcp_world_size=world, interleave=interleave)
    mla = MLAAttention(spec, jattn.mla_cache_spec(spec, 8, size, dtype="float32"), parallel=parallel)
    case = Case(MLASpec(**SIZES, has_sinks=True))
    table = np.random.default_rng(1).permutation(8)[:4][None]
    rows = [np.asarray(part[3], np.float32) for part in case.rows]  # 30 keys, 11 of them new
    first, listed = sum(QUERIES[:3]), lists()
    meta = jattn.CommonAttentionMetadata.from_lengths([30], [30], table, size * world)
    step = jattn.CommonAttentionMetadata.from_lengths([11], [30], table, size * world)

    def body(q, listed):
        cache = mla.write(*rows, mla.empty_cache(float("nan")), mla.build(meta), case.params)
        return mla.attend(q, cache, mla.build(step), case.params, listed)

    mesh, everywhere = Mesh(np.array(jax.devices()[:world]), ("ranks",)), PartitionSpec()
    mapped = jax.shard_map(body, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    mine = slice(first, first + 11)
    answer = tuple(x[mine] for x in wanted(case, listed))
    check(jax.jit(mapped)(case.q[mine], listed[mine]), answer)


def test_the_gradient_is_that_of_dense_attention_and_nothing_flows_to_unlisted_keys():
    mla, q = PLAIN.mla, normal(34, 5, 3, 20)
    logical = (normal(31, 32, S, 1, 8), normal(32, 32, S, 1, 24))
    cache = jattn.PagedKV.from_logical(mla.cache_spec, *logical, storage="native")
    m = mla.build(jattn.CommonAttentionMetadata.from_lengths([1, 4], [6, 9], PLAIN.table()[:2], S))
    everything = np.broadcast_to(np.arange(9, dtype=np.int32), (5, 9))

    def loss(q, cache, params, listed=None):
        state = mla.attend(q, cache, m, params, listed) if listed is not None else mla.forward_mqa(q, cache, m, params)
        return jnp.sum(jnp.sin(state.out)) + jnp.sum(state.lse)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    dense, sparse = grad(q, cache, PLAIN.params), grad(q, cache, PLAIN.params, everything)
    for a, b in zip(jax.tree.leaves(dense), jax.tree.leaves(sparse), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    few = grad(q, cache, PLAIN.params, np.full((5, 9), 5, np.int32))[1]
    touched = np.flatnonzero(np.abs(np.asarray(few.v)).sum(axis=(1, 2, 3)))
    assert sorted(touched) == sorted(PLAIN.table()[:2, 1])  # position 5 is on the second page of both


def test_refusals_say_what_was_wanted():
    m = PLAIN.mla.build(PLAIN.meta())
    for bad, match in (
        (np.zeros(21, np.int32), "2 axes"),
        (np.zeros((20, 3), np.int32), r"T=21"),
        (np.zeros((21, 3), np.float32), "integer"),
    ):
        with pytest.raises(ValueError, match=f"topk_indices.*{match}"):
            PLAIN.mla.attend(PLAIN.q, PLAIN.cache, m, PLAIN.params, bad)
