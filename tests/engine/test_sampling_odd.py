"""Sampling at the limits of floats: odd vocabularies, ties, NaN, extreme temperatures and cuts; and its randomness.

R-36 (all samples alike) and R-47 (an id past the vocabulary, a fault on NaN, a top-p that never ends) of the field.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn import models
from jattn.engine import SamplingParams, likeliest, sampling
from jattn.engine.params import MAX_LOGPROBS
from jattn.engine.sampling import BAD_TOKEN
from pallas_kernels.cpu.native import library
from tests.engine.rows import choose_once, penalties_of, sampling_rows
from tests.kernels.cpu.native_setup import needs_library

ALMOST_1 = float(np.nextafter(np.float32(1), np.float32(0)))
SMALL = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64, max_position_embeddings=64,
    rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
SLACK = 1e-4
"""Of a cumulative probability: float32 sums of a vocabulary differ from float64's by less."""


def chosen(logits, rows):
    penalties = penalties_of([], [], [], len(logits), 4)
    return choose_once(logits, rows, penalties, np.full((1, len(logits)), -2, np.int32), False).tokens


def by_xla(logits, rows):
    """As a platform without the C++ function draws."""
    return sampling._sample_by_xla(logits, rows, jax.vmap(sampling._row_key)(rows.seed, rows.position))


def drawn(logits, params, draws=64, seeds=None, positions=None, draw=chosen):
    """i32[draws R] of logits f32[R V]; seeds, positions [draws R] (default: seed r, position i of draw i)."""
    rows = len(params)
    at = np.arange(draws)[:, None] + np.zeros(rows, int)
    seeds = np.zeros_like(at) + np.arange(rows) if seeds is None else np.asarray(seeds)
    positions = at if positions is None else np.asarray(positions)
    rules = sampling_rows(params, [0] * rows, [0] * rows, [1] * rows, [()] * rows, rows)
    words = np.stack([seeds & 0xFFFFFFFF, seeds >> 32], axis=-1).astype(np.uint32)

    @jax.jit
    def every(logits, words, positions):
        def one(seed_and_position):
            seed, position = seed_and_position
            return draw(logits, dataclasses.replace(rules, seed=seed, position=position))

        return jax.lax.map(one, (words, positions))

    return np.asarray(every(np.asarray(logits, np.float32), words, positions.astype(np.int32)))


def allowed(logits, p: SamplingParams, slack: float) -> np.ndarray:
    """bool[V] by the definition, in float64; ties of a kept token are kept. `slack` widens top_p and min_p."""
    x = np.asarray(np.asarray(logits, np.float32), np.float64) / p.temperature
    prob = np.exp(x - x.max())
    prob[prob < p.min_p * (1 - slack)] = 0
    kept = prob > 0
    if p.top_k:
        kept &= prob >= np.sort(prob)[::-1][min(p.top_k, len(prob)) - 1]
    if p.top_p < 1:
        order = np.argsort(-prob, kind="stable")
        inside = np.where(np.arange(len(prob)) < (p.top_k or len(prob)), prob[order], 0)
        before = np.cumsum(inside) / inside.sum() - inside / inside.sum()
        last = max(np.flatnonzero((before < p.top_p + slack) & (inside > 0)), default=0)
        kept &= prob >= prob[order[last]]
    return kept


CUTS = {
    "off": {},
    "top_p almost 1": dict(top_p=ALMOST_1),
    "top_p tiny": dict(top_p=1e-30),
    "top_p below float32": dict(top_p=1e-50),
    "top_p half": dict(top_p=0.5),
    "top_k 1": dict(top_k=1),
    "top_k beyond": dict(top_k=10**6),
    "min_p 1": dict(min_p=1.0),
    "all": dict(top_k=7, top_p=ALMOST_1, min_p=1e-6),
    "hot": dict(temperature=1e6, top_p=0.9),
    "cold": dict(temperature=1e-3, top_p=0.9),
}


@pytest.mark.parametrize("vocab", [1, 2, 3, 127, 1021])
def test_r47_a_drawn_id_is_one_that_its_rules_leave_whatever_the_vocabulary(vocab):
    rng = np.random.default_rng(vocab)
    params = [SamplingParams(**cut) for cut in CUTS.values()]
    logits = rng.normal(size=(len(params), vocab)).astype(np.float32) * 3
    tokens = drawn(logits, params)
    assert tokens.min() >= 0 and tokens.max() < vocab
    for r, (name, p) in enumerate(zip(CUTS, params, strict=True)):
        assert allowed(logits[r], p, SLACK)[tokens[:, r]].all(), name


@pytest.mark.parametrize("vocab", [5, 1021])
def test_r47_ties_stay_in_and_every_one_of_them_is_drawn(vocab):
    """All tokens are equally likely, so each cut keeps all."""
    params = [SamplingParams(**CUTS[name]) for name in ("off", "top_p tiny", "top_k 1", "min_p 1", "all")]
    tokens = drawn(np.full((len(params), vocab), 2.5), params, draws=40 * 5)
    assert tokens.min() >= 0 and tokens.max() < vocab
    for r in range(len(params)):
        assert len(set(tokens[:, r])) >= min(vocab, 100)


def test_r47_a_cut_keeps_exactly_what_the_definition_keeps(draw=chosen):
    """A token too few or too many is seen: each probability is far from the cut and large enough to be drawn."""
    shares = np.array([[0.4, 0.3, 0.2, 0.1]] * 5)
    cuts = [dict(top_p=0.35), dict(top_p=0.65), dict(top_p=0.85), dict(top_k=3), dict(min_p=0.6)]
    tokens = drawn(np.log(shares), [SamplingParams(**cut) for cut in cuts], draws=200, draw=draw)
    assert [len(set(tokens[:, r])) for r in range(5)] == [1, 2, 3, 3, 2]


def test_r47_without_the_library_a_cut_keeps_the_same():
    test_r47_a_cut_keeps_exactly_what_the_definition_keeps(by_xla)


def test_r47_rows_with_bad_logits_end_and_other_rows_are_not_affected():
    params = [SamplingParams(top_p=0.9, top_k=5)] * 6
    logits = np.random.default_rng(0).normal(size=(6, 37)).astype(np.float32)
    whole = drawn(logits, params)
    ruined = logits.copy()
    ruined[1, 36], ruined[2, 0], ruined[3], ruined[4, :36] = np.nan, np.inf, -np.inf, -np.inf
    tokens = drawn(ruined, params)
    assert (tokens[:, 1:4] == BAD_TOKEN).all()
    assert (tokens[:, 4] == 36).all(), "the only token that is left"
    np.testing.assert_array_equal(tokens[:, [0, 5]], whole[:, [0, 5]])


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 1e-44])
def test_r47_a_temperature_near_zero_is_greedy_and_nothing_overflows(temperature):
    logits = np.array([[3.0, 5.0, 4.0, -2.0], [-9.0, -7.0, -8.0, -7.5], [1e30, 3e30, 2e30, 0.0]], np.float32)
    for cut in ({}, dict(top_p=0.9), dict(min_p=0.1), dict(top_k=2)):
        tokens = drawn(logits, [SamplingParams(temperature=temperature, **cut)] * 3, draws=16)
        assert (tokens == 1).all(), cut


def chi_square(seen: np.ndarray, share: np.ndarray) -> float:
    """Standard deviations by which the statistic of these counts is above its mean (Wilson and Hilferty)."""
    wanted, free = share * seen.sum(), share.size - 1
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / np.sqrt(2 / (9 * free))


LOGITS = np.array([0.0, -0.4, 0.7, 0.2, -1.0], np.float32)
SHARE = np.exp(LOGITS.astype(np.float64)) / np.exp(LOGITS.astype(np.float64)).sum()


def chances(tokens) -> dict[str, float]:
    """The deviations of draws [N] from their probabilities, of single draws and of pairs of successive draws."""
    pairs = np.bincount(tokens[:-1] * 5 + tokens[1:], minlength=25)
    return {
        "alone": chi_square(np.bincount(tokens, minlength=5), SHARE),
        "after another": chi_square(pairs, np.outer(SHARE, SHARE).ravel()),
    }


def test_r36_draws_of_one_request_step_after_step_are_independent_and_have_the_softmax_s_shares():
    seeds = np.tile(np.array([0, 1, 2**62 + 3]), (4000, 1))
    tokens = drawn(np.tile(LOGITS, (3, 1)), [SamplingParams()] * 3, draws=4000, seeds=seeds)
    for r in range(3):
        assert all(-4.5 < sigmas < 4.5 for sigmas in chances(tokens[:, r]).values()), chances(tokens[:, r])


def test_r36_first_draws_of_requests_with_seeds_of_every_kind_are_independent():
    """Successive seeds (of n completions), seeds that differ in the upper word only, and random ones."""
    seeds = np.stack(
        [np.arange(4000), np.arange(4000) << 32, np.random.default_rng(0).integers(2**63, size=4000)], axis=1
    )
    tokens = drawn(
        np.tile(LOGITS, (3, 1)), [SamplingParams()] * 3, draws=4000, seeds=seeds, positions=np.zeros_like(seeds)
    )
    for r in range(3):
        assert all(-4.5 < sigmas < 4.5 for sigmas in chances(tokens[:, r]).values()), chances(tokens[:, r])
    rows = np.bincount(tokens[:, 0] * 5 + tokens[:, 2], minlength=25)
    assert -4.5 < chi_square(rows, np.outer(SHARE, SHARE).ravel()) < 4.5


def test_the_chi_square_test_sees_a_key_that_does_not_advance():
    """It rejects 4000 copies of one draw, draws that all occur twice, and uniform probabilities."""
    rng = np.random.default_rng(0)
    fair = rng.choice(5, size=4000, p=SHARE)
    assert all(-4.5 < sigmas < 4.5 for sigmas in chances(fair).values())
    assert chances(np.full(4000, 2))["alone"] > 20
    assert chances(np.repeat(fair[:2000], 2))["after another"] > 20
    assert chances(rng.integers(5, size=4000))["alone"] > 8


@pytest.mark.parametrize(
    ("count", "vocab"), [*((count, vocab) for count in (1, 20) for vocab in (21, 512, 3001)), (1, 1), (7, 7), (19, 19)]
)
def test_the_likeliest_by_parts_are_those_of_a_sort(count, vocab):
    x = np.random.default_rng(3).normal(size=(7, vocab)).astype(np.float32)
    x[1] = np.round(x[1])  # many ties
    x[2, 7:] = -np.inf  # fewer finite numbers than are asked for
    x[3] = 0.0
    x[4, ::2] *= -0.0  # equal to 0
    x[5] = np.sort(x[5])  # all of them in one part
    x[6] = np.where(np.arange(vocab) % 16 == 5, 1.0, x[6] - 9)  # one in each part, all equal
    values, tokens = jax.jit(likeliest._by_parts, static_argnums=0)(count, jnp.asarray(x))
    order = np.argsort(-x, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, axis=-1))
    np.testing.assert_array_equal(tokens, order)


def test_the_order_of_floats_is_that_of_their_bits():
    x = np.array([-np.inf, -1e30, -1.0, -1e-37, 0.0, 1e-37, 2.0, 3e38, np.inf], np.float32)
    keys = np.asarray(sampling.ordered_bits(jnp.asarray(x))).astype(np.int64)
    assert keys[0] > 0
    assert sampling.ordered_bits(jnp.float32(-0.0)) == sampling.ordered_bits(jnp.float32(0.0))
    assert (np.diff(keys) > 0).all()


@needs_library
def test_on_a_cpu_one_call_draws_what_the_noise_of_xla_draws():
    """20000 draws, most cuts. XLA's logarithms may differ in the last bit, so two nearly equal sums may be swapped."""
    logits = np.random.default_rng(0).normal(size=(len(CUTS), 1021)).astype(np.float32) * 3
    logits[:, ::3] = np.round(logits[:, ::3])
    params = [SamplingParams(**cut) for cut in CUTS.values()]
    draws, exact = 20000 // len(CUTS), [p.top_p != ALMOST_1 for p in params]  # its sums differ by rounding
    native, wanted = (drawn(logits, params, draws, draw=draw)[:, exact] for draw in (chosen, by_xla))
    assert np.mean(native == wanted) >= 0.9999
    assert len(set(native.ravel())) > 500, "draws that could not differ"


@needs_library
def test_greedy_rows_on_a_cpu_are_one_call_unless_the_vocabulary_is_distributed():
    """A call on a part of the vocabulary would make XLA gather the rows."""
    program = lambda map_rows: (
        jax.jit(lambda x: sampling._greedy(x, map_rows)).lower(np.zeros((2, 64), np.float32)).compile().as_text()
    )
    assert "jattn_cpu_draw" in program(None) and "jattn_cpu_draw" not in program(lambda *args: args)


def program_of_a_draw() -> str:
    rows = sampling_rows([SamplingParams(top_p=0.9)], [1], [0], [1], [()], 1)
    sample = lambda logits, rows: sampling._sample(logits, rows)  # JAX caches traces by function
    return jax.jit(sample).lower(np.zeros((1, 64), np.float32), rows).compile().as_text()


@needs_library
def test_a_draw_on_a_cpu_is_one_call_unless_jax_has_other_noise(monkeypatch):
    """The C++ function has the noise of JAX's default settings; with others, and without it, XLA computes the noise."""
    text = program_of_a_draw()
    assert "jattn_cpu_draw" in text and "f32[1,64]{1,0} fusion" not in text
    for setting, value in (
        ("jax_threefry_partitionable", False), ("jax_default_prng_impl", "rbg"), ("jax_high_dynamic_range_gumbel", True)
    ):  # fmt: skip
        before = getattr(jax.config, setting)
        jax.config.update(setting, value)
        try:
            assert "jattn_cpu_draw" not in program_of_a_draw(), setting
        finally:
            jax.config.update(setting, before)
    monkeypatch.setattr(library, "status", lambda: library.LibraryStatus(reason="none"))
    assert "jattn_cpu_draw" not in program_of_a_draw()


@needs_library
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_each_device_draws_some_rows_of_a_distributed_vocabulary(num_rows):
    """The logits are exchanged: no device has them all, and each draws for its rows by the C++ function."""
    config = models.config_of(dict(model_type="llama", num_attention_heads=2, num_key_value_heads=2, **SMALL))
    mesh = models.ModelMesh.of(config, Mesh(np.array(jax.devices("cpu")[:2]), ("tensor",)))
    each = [SamplingParams(top_p=0.9), SamplingParams(top_k=5), SamplingParams(temperature=0), SamplingParams()]
    params = [each[i % 4] for i in range(num_rows)]
    logits = np.random.default_rng(0).normal(size=(num_rows, 64)).astype(np.float32) * 3
    rows = sampling_rows(params, range(num_rows), [0] * num_rows, [1] * num_rows, [()] * num_rows, num_rows)
    sampled = np.full((1, num_rows), -1, np.int32)
    arguments = rows, penalties_of([], [], [], num_rows, 4), sampled, np.bool_(False)
    placed = jax.device_put(logits, NamedSharding(mesh.mesh, PartitionSpec(None, mesh.axes)))
    compiled = jax.jit(lambda *args: choose_once(*args, map_rows=mesh.map_rows)).lower(placed, *arguments).compile()
    text = compiled.as_text()
    assert "jattn_cpu_draw" in text and "all-to-all" in text
    shapes = [
        shape for line in re.findall(r"= (.*?) all-gather\(", text) for shape in re.findall(r"\[([\d,]*)\]", line)
    ]
    sizes = [np.prod([int(n) for n in shape.split(",") if n]) for shape in shapes]
    assert sizes and max(sizes) <= MAX_LOGPROBS * (num_rows + 1), "the likeliest tokens of each row, not its logits"
    alone = jax.jit(lambda *args: choose_once(*args)).lower(logits, *arguments).compile()
    assert compiled(placed, *arguments).tokens.tolist() == alone(logits, *arguments).tokens.tolist()


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_exported_for_another_platform_a_draw_has_no_call_of_the_cpu(platform):
    rows = sampling_rows([SamplingParams(top_p=0.9)], [1], [0], [1], [()], 1)
    arguments = np.zeros((1, 64), np.float32), rows, penalties_of([], [], [], 1, 4), np.zeros((1, 1), np.int32)
    exported = jax.export.export(jax.jit(choose_once), platforms=[platform])(*arguments, np.bool_(False))
    assert "jattn_cpu" not in exported.mlir_module()


def test_a_restricted_draw_is_the_same_without_jit():
    """jax_disable_jit, with which a model is debugged, makes a loop's index an int."""
    logits, params = jnp.asarray([[1.0, 3.0, 2.0, -1.0]] * 4), SamplingParams(temperature=1.0, top_k=3, top_p=0.9)
    rows = sampling_rows([params] * 4, [1, 2, 3, 4], [0] * 4, [1] * 4, [()] * 4, 4)
    arguments = logits, rows, penalties_of([], [], [], 4, 4), jnp.full((1, 4), -1), jnp.bool_(False)
    with jax.disable_jit():
        plain = choose_once(*arguments).tokens
    assert plain.tolist() == jax.jit(choose_once)(*arguments).tokens.tolist()
