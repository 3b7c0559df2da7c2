"""`split` against the witness, whatever order the requests stand in, and what it says of its halves."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.backends import registry
from jattn.backends.feature import Feature
from jattn.backends.sdpa import SdpaBackend
from jattn.backends.split import SplitBackend, make_split_backend
from jattn.metadata.reorder import apply_permutation, token_permutation
from jattn.types import AttentionCGSupport
from tests.cases import CASES, FEATURES, Case
from tests.oracle import attention
from tests.problem import Problem, run, same_bits


class Narrow(SdpaBackend):
    """A causal decoder's backend that lacks most features."""

    attn_types = (jattn.AttentionType.DECODER,)
    quant_modes = ("none",)
    features = frozenset({Feature.LSE, Feature.SOFT_CAP})

    @classmethod
    def get_name(cls) -> str:
        return "narrow"


@contextlib.contextmanager
def registered(name, backend=None, **pair):
    """A backend of this name while the block lasts: a class, or a split of a pair."""
    if backend is None:
        make_split_backend(name, **pair)
    else:
        registry.register_backend(name, backend, **pair)
    try:
        yield registry.load(name)
    finally:
        registry.unregister_backend(name)


@pytest.mark.parametrize(
    ("case", "feature"), [("mixed_unsorted", "everything_two_ways"), ("empty_in_the_middle", "cap_sinks_window")]
)
def test_equals_the_witness_in_any_order_of_requests(case, feature):
    p = Problem(case=CASES[case], feature=FEATURES[feature])
    cache, state = run(p, "split")
    p.answer(cache).check(state)


@pytest.mark.parametrize("threshold", [1, 3])
def test_the_halves_may_differ(threshold):
    p = Problem(
        case=CASES["mixed_unsorted"], dtype="bfloat16", cache_dtype="int8", quant="per_token_head", v_head_dim=8
    )
    with registered("pair", decode="pallas_cpu", prefill="sdpa", decode_threshold=threshold):
        attn = jattn.PagedAttention(p.spec, p.cache_spec, "pair")
        m = attn.build(p.meta)
        assert {half: part.backend for half, part in m.halves.items()} == dict(decode="pallas_cpu", prefill="sdpa")
        decodes = [int(np.sum(np.asarray(half.tokens) < p.num_tokens)) for half in m.halves.values()]
        small = [n for n in p.case.query_lens if n <= threshold]
        assert decodes == [sum(small), p.case.num_tokens - sum(small)]
        cache, state = run(p, "pair")
        p.answer(cache).check(state)


def test_a_batch_of_decodes_is_not_taken_apart():
    p = Problem(case=CASES["decode"])
    halves = jattn.PagedAttention(p.spec, p.cache_spec, "split").build(p.meta).halves
    assert list(halves) == ["decode"] and halves["decode"].tokens is None
    encoder = dataclasses.replace(p.spec, attn_type="encoder_only")
    halves = jattn.PagedAttention(encoder, p.cache_spec, "split").build(p.meta).halves
    assert list(halves) == ["prefill"] and halves["prefill"].tokens is None


def test_attend_after_reorder_is_reorder_after_attend():
    """R-19: order is the caller's business nowhere."""
    p = Problem(case=CASES["mixed_unsorted"], feature=FEATURES["window_sinks"])
    cache, there = run(p, "split")
    perm = np.array([3, 1, 4, 0, 2, 5, 6])
    tokens = token_permutation(p.meta, perm)
    attn = jattn.PagedAttention(p.spec, p.cache_spec, "split")
    moved = apply_permutation(p.meta, perm)
    back = attn.attend(p.q[tokens], cache, jax.jit(attn.build)(moved), p.params)
    assert same_bits(back, jax.tree.map(lambda x: x[tokens], there))


def test_keys_are_written_once_for_both_halves():
    p = Problem(case=CASES["mixed"])
    cache, _ = run(p, "split")
    alone = jattn.write_kv(p.cache(new=False), p.new(p.keys), p.new(p.values), p.meta.slot_mapping)
    assert same_bits(cache, alone)


def test_cross_attention_from_cached_encoder_keys():
    p = Problem(case=CASES["mixed"])
    spec = dataclasses.replace(p.spec, attn_type="encoder_decoder")
    lens = (7, 1, 9, 4, 6)
    normal = lambda name, n: p.rng(f"{name}{n}").normal(size=(n, p.kv_heads, p.head_dim)).astype(np.float32)
    keys, values = ([normal(name, n) for n in lens] for name in ("ek", "ev"))
    meta = jattn.CommonAttentionMetadata.from_lengths(
        p.case.query_lens, p.case.seq_lens, None, p.block_size, num_tokens=p.num_tokens, num_reqs=p.num_reqs,
        encoder_seq_lens=lens, cross_block_table=np.arange(15).reshape(5, 3),
    )  # fmt: skip
    attn = jattn.PagedAttention(spec, dataclasses.replace(p.cache_spec, num_blocks=15), "split")

    @jax.jit
    def steps(q, k, v, meta):
        m = attn.build(meta)
        cache, first = attn(q, k, v, jattn.empty_cache(attn.cache_spec, fill=np.nan), m)
        return first, attn(q, None, None, cache, m)[1]

    first, again = steps(p.q, np.concatenate(keys), np.concatenate(values), meta)
    out, lse = attention.ragged(
        p.q[: p.case.num_tokens], keys, values, p.case.query_lens, num_tokens=p.num_tokens, causal=False,
        scale=p.head_dim**-0.5,
    )  # fmt: skip
    np.testing.assert_allclose(first.out, out, atol=2e-6)
    np.testing.assert_allclose(first.lse, lse, atol=2e-6)
    assert same_bits(first, again)


def test_packed_attention_is_all_prefill():
    p = Problem(case=CASES["long_and_short"], feature=FEATURES["alibi"])
    k, v = np.concatenate(p.keys), np.concatenate(p.values)
    state = jattn.attention(p.q, k, v, p.meta, p.spec, p.params, backend="split")
    p.answer_over(p.keys, p.values).check(state)


def test_gradient_is_that_of_the_whole():
    p = Problem(case=CASES["mixed"], feature=FEATURES["sinks"], pad_tokens=0)
    cache, weight = p.cache(), p.normal("weight", p.num_tokens, p.heads, p.v_dim)
    cache = jax.tree.map(jnp.nan_to_num, cache)

    def gradients(backend):
        attn = jattn.PagedAttention(p.spec, p.cache_spec, backend)
        loss = lambda q, cache, params: jnp.sum(attn.attend(q, cache, attn.build(p.meta), params).out * weight)
        return jax.jit(jax.grad(loss, (0, 1, 2)))(p.q, cache, p.params)

    for mine, whole in zip(jax.tree.leaves(gradients("split")), jax.tree.leaves(gradients("sdpa")), strict=True):
        np.testing.assert_allclose(mine, whole, atol=2e-5)


def test_a_shared_prefix_and_other_pages_change_nothing():
    """The hint reaches both halves, and tables and slots are exchanged in both."""
    p = Problem(case=Case("shared", (1, 5, 1), (19, 13, 9)))
    attn = jattn.PagedAttention(p.spec, p.cache_spec, "split")
    cache, meta, table = p.cache(), p.meta, p.block_table.copy()
    table[:3, :2] = table[:1, :2]
    over = meta.replace(block_table=table)
    attend = jax.jit(lambda m: attn.attend(p.q, cache, m))
    plain, shared = attend(attn.build(over)), attend(attn.build(over, common_prefix_len=8))
    np.testing.assert_allclose(shared.out, plain.out, atol=2e-6)
    np.testing.assert_allclose(shared.lse, plain.lse, atol=2e-6)
    assert same_bits(attn.update_block_table(attn.build(meta), jnp.asarray(table), meta.slot_mapping), attn.build(over))


def test_the_pages_of_a_layer_are_those_of_both_halves():
    p = Problem(case=CASES["mixed"])
    wide = dataclasses.replace(p.cache_spec, num_blocks=2 * p.num_blocks)
    attn = jattn.PagedAttention(p.spec, wide, "split")
    second = attn.for_layer(attn.build(p.meta), 1, p.num_blocks)
    slots = np.where(p.meta.slot_mapping < 0, -1, p.meta.slot_mapping + p.num_blocks * p.block_size)
    moved = p.meta.replace(block_table=p.meta.block_table + p.num_blocks, slot_mapping=slots)
    assert same_bits(second, attn.build(moved))


def test_reasons_are_the_halves_own():
    p = Problem(case=CASES["decode"], feature=FEATURES["sinks"], cache_dtype="int8", quant="per_tensor")
    with registered("narrow", Narrow), registered("pair", decode="narrow", prefill="sdpa") as pair:
        report = {r.name: r for r in jattn.explain(p.spec, p.cache_spec)}["pair"]
        assert report.reasons == (
            "decode half (narrow): attention sinks not supported: has_sinks=True",
            "decode half (narrow): quant not supported: 'per_tensor' seen, 'none' supported",
        )
        assert pair.validate_configuration(16, has_sink=True) == [
            "decode half (narrow): attention sinks not supported: has_sink=True"
        ]
        assert not pair.supports_sink() and SplitBackend.supports_sink()
        encoder = dataclasses.replace(p.spec, attn_type="encoder")
        assert not pair.reasons(encoder, p.cache_spec, jattn.device.resolve("cpu")), "encoders have no decode half"
    assert not SplitBackend.supports(Feature.CASCADE) and not SplitBackend.supports(Feature.MM_PREFIX)


def test_the_default_looks_for_what_the_batch_needs_and_never_splits_again():
    p = Problem(case=CASES["mixed"])
    with registered("narrow", Narrow, before="sdpa"), registered("pair", before="narrow"):
        attn = jattn.PagedAttention(p.spec, p.cache_spec, "split")
        names = lambda meta: {half.backend for half in attn.build(meta).halves.values()}
        assert names(p.meta) == {"narrow"}
        assert names(p.meta.replace(causal=False)) == {"sdpa"}
    with registered("narrow", Narrow), registered("pair", prefill="narrow"):
        attn = jattn.PagedAttention(p.spec, p.cache_spec, "pair")
        with pytest.raises(jattn.UnsupportedError, match="pair: non-causal attention not supported: causal=False"):
            attn.build(p.meta.replace(causal=False))


def test_one_compiled_step_covers_what_the_halves_cover():
    p = Problem()

    def support(decode, prefill, threshold=1):
        made = {}
        for name, level in (("d", decode), ("p", prefill)):
            builder = type(f"B{name}", (SdpaBackend.get_builder_cls(),), dict(cudagraph_support=level))
            methods = dict(get_name=classmethod(lambda cls, name=name: name))
            made[name] = type(name, (SdpaBackend,), methods | dict(get_builder_cls=classmethod(lambda c, b=builder: b)))
        pair = dict(decode="d", prefill="p", decode_threshold=threshold)
        with registered("d", made["d"]), registered("p", made["p"]), registered("pair", **pair) as backend:
            return backend.get_builder_cls().get_cudagraph_support(p.spec, p.cache_spec)

    level = AttentionCGSupport
    assert support(level.UNIFORM_SINGLE_TOKEN_DECODE, level.ALWAYS) is level.ALWAYS
    assert support(level.UNIFORM_BATCH, level.ALWAYS, 2) is level.UNIFORM_SINGLE_TOKEN_DECODE
    assert support(level.ALWAYS, level.NEVER) is level.UNIFORM_SINGLE_TOKEN_DECODE
    assert support(level.NEVER, level.ALWAYS) is level.NEVER


def test_bad_pairs_are_refused():
    with pytest.raises(ValueError, match="'split' is itself a split"):
        make_split_backend("pair", decode="split")
    with pytest.raises(ValueError, match="decode_threshold=0 must be at least 1"):
        make_split_backend("pair", decode_threshold=0)
    with pytest.raises(ValueError, match="backend 'sdpo' is not known"):
        make_split_backend("pair", prefill="sdpo")
    with pytest.raises(ValueError, match="already registered"):
        make_split_backend("sdpa")
