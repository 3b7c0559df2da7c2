"""`split` gives the oracle's result for requests in any order; and its reasons for each half."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.backends import registry, subclass_attention_backend_with_overrides
from jattn.backends.sdpa import SdpaBackend
from jattn.backends.split import SplitBackend, make_split_backend
from jattn.compat.vllm.decodes_and_prefills import apply_permutation, token_permutation
from jattn.device import Chip
from jattn.metadata.subset import subset
from jattn.types import AttentionCGSupport, Feature
from tests.cases import CASES, FEATURES, Case
from tests.oracle import attention, cache
from tests.oracle.grad import attend_one_grad
from tests.problem import Problem
from tests.running import run, same_bits


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
    """A backend with this name, registered inside the block: a class, or a split of two."""
    if backend is None:
        make_split_backend(name, **pair)
    else:
        registry.register_backend(name, backend, **pair)
    try:
        yield registry.load(name)
    finally:
        registry.unregister_backend(name)


@pytest.fixture
def plain():
    """A split of one backend and itself, whose plans can be compared."""
    with registered("plain", decode="sdpa", prefill="sdpa"):
        yield "plain"


@pytest.mark.parametrize(
    ("case", "feature"),
    [
        ("mixed_unsorted", "everything_two_ways"),
        ("empty_in_the_middle", "cap_sinks_window"),
        ("mixed_unsorted", "rswa_mm_prefix_sqrt"),
    ],
)
def test_equals_the_witness_in_any_order_of_requests(case, feature):
    p = Problem(case=CASES[case], feature=FEATURES[feature])
    pages, state = run(p, "split")
    p.answer(pages).check(state)


def test_the_halves_may_differ():
    """int8 pages, three new tokens count as a decode, and each half has its own backend."""
    cached = dict(cache_dtype="int8", quant="per_token_head", v_head_dim=8)
    p = Problem(case=CASES["mixed_unsorted"], dtype="bfloat16", **cached)
    with registered("pair", decode="pallas_cpu", prefill="sdpa", decode_threshold=3):
        attn = jattn.PagedAttention(p.spec, p.cache_spec, "pair")
        halves = jax.jit(attn.build)(p.meta).halves
        assert {name: half.backend for name, half in halves.items()} == dict(decode="pallas_cpu", prefill="sdpa")
        short = sum(n for n in p.case.query_lens if n <= 3)
        tokens = [int(np.sum(np.asarray(half.tokens) < p.num_tokens)) for half in halves.values()]
        assert tokens == [short, p.case.num_tokens - short]
        pages, state = run(p, "pair")
        p.answer(pages).check(state)


def test_a_batch_of_decodes_is_not_taken_apart():
    p = Problem(case=CASES["decode"])
    halves = jattn.PagedAttention(p.spec, p.cache_spec, "split").build(p.meta).halves
    assert list(halves) == ["decode"] and halves["decode"].tokens is None
    encoder = dataclasses.replace(p.spec, attn_type="encoder_only")
    halves = jattn.PagedAttention(encoder, p.cache_spec, "split").build(p.meta).halves
    assert list(halves) == ["prefill"] and halves["prefill"].tokens is None


def test_attend_after_reorder_is_reorder_after_attend():
    """R-19: no function requires an order of requests."""
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


def test_gradient_flows_through_both_halves():
    p = Problem(case=Case("both", (1, 3), (9, 6)), feature=FEATURES["sinks"], pad_tokens=0)
    attn, meta = jattn.PagedAttention(p.spec, p.cache_spec, "split"), p.meta
    weight = p.normal("weight", p.num_tokens, p.heads, p.v_dim)
    loss = lambda q, cache, params: jnp.sum(attn.attend(q, cache, attn.build(meta), params).out * weight)
    dq, dcache, dparams = jax.jit(jax.grad(loss, (0, 1, 2)))(p.q, p.cache(), p.params)
    options = dict(scale=p.head_dim**-0.5, sinks=p.numbers["sinks"])
    sinks, start = 0.0, 0
    for r, (n, length) in enumerate(zip(p.case.query_lens, p.case.seq_lens, strict=True)):
        rows = slice(start, start + n)
        given = (p.q[rows], p.keys[r], p.values[r], weight[rows])
        want = attend_one_grad(*given, q_pos=length - n + np.arange(n), **options)
        mine = [cache.gather(np.asarray(pool), p.block_table[r], length) for pool in dcache.logical()]
        for got, exact in zip((dq[rows], *mine), (want["dq"], want["dk"], want["dv"]), strict=True):
            np.testing.assert_allclose(got, exact, atol=2e-6)
        sinks, start = sinks + want["dsinks"], start + n
    np.testing.assert_allclose(dparams.sinks, sinks, atol=2e-6)


def test_a_shared_prefix_is_told_to_both_halves(plain):
    p = Problem(case=Case("shared", (1, 3, 1), (19, 13, 9)))
    attn = jattn.PagedAttention(p.spec, p.cache_spec, plain)
    whole = SdpaBackend.get_builder_cls()(p.spec, p.cache_spec, attn.impl.chip)
    halves = jax.jit(attn.build, static_argnums=1)(p.meta, 8).halves
    lens = p.meta.query_lens()
    alone = jax.jit(
        lambda meta, keep, n, longest: whole.build(8, subset(meta, keep, n, longest)[0]), static_argnums=(2, 3)
    )
    assert same_bits(halves["decode"].plan, alone(p.meta, lens == 1, p.num_reqs, 1))
    assert same_bits(halves["prefill"].plan, alone(p.meta, lens == 3, p.num_tokens, p.meta.max_query_len))


def test_other_pages_are_those_of_both_halves(plain):
    p = Problem(case=CASES["mixed"])
    attn = jattn.PagedAttention(p.spec, p.cache_spec, plain)
    table, slots = p.meta.block_table[::-1], p.meta.slot_mapping[::-1]
    build, update = jax.jit(attn.build), jax.jit(attn.update_block_table)
    assert same_bits(update(build(p.meta), table, slots), build(p.meta.replace(block_table=table, slot_mapping=slots)))


def test_the_pages_of_a_layer_are_those_of_both_halves(plain):
    p = Problem(case=CASES["mixed"])
    wide = dataclasses.replace(p.cache_spec, num_blocks=2 * p.num_blocks)
    attn = jattn.PagedAttention(p.spec, wide, plain)
    build = jax.jit(attn.build)
    second = jax.jit(attn.for_layer, static_argnums=(1, 2))(build(p.meta), 1, p.num_blocks)
    slots = np.where(p.meta.slot_mapping < 0, -1, p.meta.slot_mapping + p.num_blocks * p.block_size)
    moved = p.meta.replace(block_table=p.meta.block_table + p.num_blocks, slot_mapping=slots)
    assert same_bits(second, build(moved))


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
        assert not pair.reasons(encoder, p.cache_spec, jattn.device.chip_of("cpu")), "encoders have no decode half"
    assert not SplitBackend.supports(Feature.CASCADE) and not SplitBackend.supports(Feature.PCP)


def test_the_default_looks_for_what_the_batch_needs_and_never_splits_again():
    p = Problem(case=CASES["mixed"])
    first = jattn.list_backends()[0]
    with registered("narrow", Narrow, before=first), registered("pair", before="narrow"):
        attn = jattn.PagedAttention(p.spec, p.cache_spec, "split")
        names = lambda meta: {half.backend for half in attn.build(meta).halves.values()}
        assert names(p.meta) == {"narrow"}
        assert "narrow" not in names(p.meta.replace(causal=False))
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
    with pytest.raises(ValueError, match="decode_threshold=0 must be a positive integer"):
        make_split_backend("pair", decode_threshold=0)
    with pytest.raises(ValueError, match="backend 'sdpo' is not known"):
        make_split_backend("pair", prefill="sdpo")
    with pytest.raises(ValueError, match="already registered"):
        make_split_backend("sdpa")


def test_a_half_is_computed_by_the_backend_that_is_registered_under_its_name():
    """A class that was derived from another, and kept its name, is registered under a name of its own."""

    class Doubled(SdpaBackend.get_impl_cls()):
        def forward(self, q, cache, m, params=None):
            state = super().forward(q, cache, m, params)
            return dataclasses.replace(state, out=2 * state.out)

    derived = subclass_attention_backend_with_overrides("Doubled", SdpaBackend, {"impl_cls": Doubled})
    p = Problem(case=CASES["mixed_unsorted"])
    with registered("doubled", derived), registered("pair", decode="doubled", prefill="doubled"):
        outs = {name: np.asarray(run(p, name)[1].out) for name in ("sdpa", "doubled", "pair")}
        names = [jattn.PagedAttention(p.spec, p.cache_spec, name).backend_name for name in outs]
    assert names == ["sdpa", "doubled", "pair"]
    np.testing.assert_allclose(outs["pair"], 2 * outs["sdpa"], rtol=1e-5)


def test_the_lists_of_a_split_restrict_it_as_those_of_any_backend():
    p, cpu = Problem(case=CASES["mixed_unsorted"]), Chip("cpu")
    fewer = subclass_attention_backend_with_overrides("Fewer", SplitBackend, {"supported_head_sizes": (4096,)})
    seen = f"head_size not supported: {p.spec.head_dim} seen, 4096 supported"
    assert seen in fewer.reasons(p.spec, p.cache_spec, cpu)
    assert SplitBackend.reasons(p.spec, p.cache_spec, cpu) == ()
