"""The launch that chooses the experts of few tokens: each thread, on the PTX model, beside numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.lowering import PALLAS_CALL
from pallas_kernels.gpu import expert_choice_sm80 as kernel
from pallas_kernels.gpu.expert_choice_sm80 import ChoiceConfig, supports
from tests.kernels.gpu.simt import emulated
from tests.kernels.gpu.test_packed_product import Memory


def config(tokens: int, routes: int, top_k: int, **fields) -> ChoiceConfig:
    return ChoiceConfig(**dict(tokens=tokens, routes=routes, top_k=top_k, experts=routes) | fields)


SIGMOID = dict(scores="sigmoid", has_correction=True, least_sum=1e-20)
CASES = {
    "Qwen3": config(4, 128, 8, least_sum=1e-20),
    "Qwen2, DeepSeek V2": config(8, 60, 6, factor=16.0),
    "gpt-oss": config(1, 32, 4, least_sum=1e-20),
    "Kimi K2": config(3, 384, 8, **SIGMOID, factor=2.827),
    "DeepSeek V3": config(5, 256, 8, **SIGMOID, factor=2.5, groups=8, top_groups=4, group_best=2),
    "DeepSeek V2": config(4, 160, 6, factor=16.0, groups=8, top_groups=3),
    "three groups": config(8, 51, 9, groups=3, top_groups=2, group_best=4, least_sum=1e-20),
    "32 groups": config(6, 96, 5, **SIGMOID, groups=32, top_groups=3, group_best=3),
    "of all groups": config(2, 64, 6, groups=16, top_groups=16, has_scale=True),
    "LongCat Flash": config(4, 768, 12, has_correction=True, factor=6.0, experts=512, identity_experts=256),
    "a device's experts of groups": config(7, 256, 8, **SIGMOID, groups=8, top_groups=4, group_best=2, experts=32),
    "a device's experts, others give their input": config(8, 24, 6, experts=5, identity_experts=9),
    "softmax with a correction": config(5, 64, 6, has_correction=True, least_sum=1e-12),
    "one expert": config(2, 1, 1),
    "all experts": config(8, 31, 31, has_scale=True),
    "512 experts": config(7, 512, 22, scores="sigmoid", has_scale=True),
    "a device's experts": config(6, 96, 8, experts=24, least_sum=1e-20),
    "odd": config(8, 33, 3, experts=7),
}


def operands(c: ChoiceConfig, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    live = rng.integers(0, 4, c.tokens).clip(0, 1).astype(np.int32)
    return dict(
        logits=2 * normal(c.tokens, c.routes),
        correction=normal(c.routes) if c.has_correction else None,
        scale=normal(c.routes) if c.has_scale else None,
        live=live,
        first=np.array([rng.integers(0, c.routes - c.identity_experts - c.experts + 1)], np.int32),
    )


def by_threads(c: ChoiceConfig, logits, correction, scale, live, first) -> kernel.ChosenExperts:
    """What the kernel returns, computed thread by thread; all memory holds rubbish before."""
    memory = Memory()
    given = [memory.add(np.asarray(x)) for x in (logits, correction, scale, live, first) if x is not None]
    rubbish = lambda words: memory.add(np.full(4 * words, 0x6B, np.uint8))
    sizes = c.tokens * c.top_k, c.tokens * c.top_k, 3 + 3 * c.tiles, 3 * c.tiles
    results, bits = list(map(rubbish, sizes)), rubbish(kernel.shared_words(c))
    guard = rubbish(16)
    machine = memory.machine(kernel.THREADS)
    every = lambda n, dtype=np.int32: np.full(machine.lane.shape, n, dtype)
    with emulated(kernel, machine), np.errstate(all="ignore"):  # warps without a token compute with infinities
        kernel._choose(c, [every(a, np.int64) for a in (*given, *results)], every(bits), machine.lane)
    assert (machine.memory[guard:] == 0x6B).all(), "a store beyond the end"
    kinds = np.float32, np.int32, np.int32, np.int32
    shapes = (c.tokens, c.top_k), (c.tokens, c.top_k), (1 + c.tiles, 3), (c.tiles, 3)
    read = lambda at, size, kind, shape: machine.memory[at : at + 4 * size].view(kind).copy().reshape(shape)
    return kernel.ChosenExperts(*map(read, results, sizes, kinds, shapes))


def oracle(c: ChoiceConfig, logits, correction, scale, live, first):
    """(the chosen experts, best first, and their scores) in float64."""
    x = logits.astype(np.float64)
    power = np.exp(x - x.max(axis=1, keepdims=True))
    scores = power / power.sum(axis=1, keepdims=True) if c.scores == "softmax_over_all" else 1 / (1 + np.exp(-x))
    ranks = scores + correction if c.has_correction else scores
    if c.groups > 1:
        ranks = within_groups(c, ranks)
    chosen = np.argsort(-ranks, axis=1, kind="stable")[:, : c.top_k]
    top = np.take_along_axis(scores, chosen, axis=1)
    if c.least_sum is not None:
        top = top / np.maximum(top.sum(axis=1, keepdims=True), c.least_sum)
    return chosen, top * c.factor * (scale[chosen] if c.has_scale else 1)


def within_groups(c: ChoiceConfig, ranks):
    """-inf outside the top_groups, in the words of DeepSeek's papers."""
    kept, size = np.full_like(ranks, -np.inf), c.routes // c.groups
    for token, row in enumerate(ranks):
        worth = [sum(sorted(row[g * size : (g + 1) * size])[-c.group_best :]) for g in range(c.groups)]
        for g in sorted(range(c.groups), key=lambda g: -worth[g])[: c.top_groups]:
            kept[token, g * size : (g + 1) * size] = row[g * size : (g + 1) * size]
    return kept


def check_rows(c: ChoiceConfig, found: kernel.ChosenExperts, chosen, live, first):
    """Each expert that a live token chose has one tile, in the order of experts; each choice has its place there."""
    own = chosen - first[0]
    has_tile = (live[:, None] > 0) & (own >= 0) & (own < c.experts)
    experts = np.unique(own[has_tile])
    used, tile = len(experts), np.searchsorted(experts, own)
    gives_input = (chosen >= c.routes - c.identity_experts) & (first[0] == 0)
    row = np.where(has_tile, 8 * tile + np.arange(c.tokens)[:, None], 8 * c.tiles + gives_input)
    np.testing.assert_array_equal(found.row, row)
    np.testing.assert_array_equal(found.plain_tiles[0], [used] * 3)
    each, last_live = np.arange(used), max(np.flatnonzero(live) + 1, default=0)
    np.testing.assert_array_equal(found.plain_tiles[1 : 1 + used], np.stack([experts, each, np.ones(used)], axis=1))
    np.testing.assert_array_equal(
        found.packed_tiles[:used], np.stack([experts, 8 * each, np.full(used, last_live)], axis=1)
    )
    assert not found.plain_tiles[1 + used :].any() and not found.packed_tiles[used:].any()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_choices_scores_and_tiles(name, seed):
    c = CASES[name]
    assert not supports(c)
    given = operands(c, seed)
    found = by_threads(c, **given)
    chosen, scores = oracle(c, **given)
    np.testing.assert_allclose(found.scores, scores, rtol=3e-6, atol=1e-9)
    check_rows(c, found, chosen, given["live"], given["first"])


def drawn(seed: int) -> ChoiceConfig:
    """Any config that there is; most have groups."""
    rng = np.random.default_rng(seed)
    groups = int(rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 25, 32]))
    size = int(rng.integers(1, min(24 * (32 >> (groups - 1).bit_length()), 768 // groups) + 1))
    routes, top_groups = groups * size, int(rng.integers(1, groups + 1))
    identity = int(rng.integers(0, routes)) * int(groups == 1 and rng.integers(0, 2))
    return config(
        int(rng.integers(1, 9)), routes, int(rng.integers(1, min(32, top_groups * size) + 1)),
        groups=groups, top_groups=top_groups, group_best=int(rng.integers(1, min(4, size) + 1)),
        identity_experts=identity, experts=int(rng.integers(1, routes - identity + 1)),
        scores=str(rng.choice(kernel.SCORES)), has_correction=bool(rng.integers(0, 2)),
        has_scale=bool(rng.integers(0, 2)), least_sum=[None, 1e-20][rng.integers(0, 2)],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_drawn_configs(seed):
    c = drawn(seed)
    assert not supports(c), c
    given = operands(c, seed)
    found = by_threads(c, **given)
    chosen, scores = oracle(c, **given)
    check_rows(c, found, chosen, given["live"], given["first"])
    np.testing.assert_allclose(found.scores, scores, rtol=3e-6, atol=1e-9)


def test_a_best_group_may_lack_the_best_expert():
    """Sums of two count: of 3 + 0 and 2 + 2 the latter; of one expert each, the former."""
    given = operands(config(1, 8, 2), 0) | dict(live=np.ones(1, np.int32), first=np.zeros(1, np.int32))
    given["logits"] = np.array([[0.0, 3, 0, 0, 2, 0, 2, 0]], np.float32)
    for best, wanted in ((1, {1, 0}), (2, {4, 6})):
        found = by_threads(config(1, 8, 2, scores="sigmoid", groups=2, group_best=best), **given)
        assert {*found.plain_tiles[1:, 0].tolist()} == wanted


def test_among_equals_the_first_is_chosen():
    """As by jax.lax.top_k, by which -0.0 is below 0.0."""
    c = config(2, 70, 5)
    given = operands(c) | dict(live=np.ones(2, np.int32))
    given["logits"][0] = np.arange(70) // 3 % 5
    given["logits"][1] = np.where(np.arange(70) % 20 == 7, 0.0, -0.0)
    _, scores = oracle(c, **given)
    chosen = np.asarray(jax.lax.top_k(jnp.asarray(given["logits"]), 5)[1])
    assert chosen[1].tolist() == [7, 27, 47, 67, 0]
    found = by_threads(c, **given)
    check_rows(c, found, chosen, given["live"], given["first"])
    np.testing.assert_allclose(found.scores, scores, rtol=3e-6)


@pytest.mark.parametrize("groups", [1, 5, 8])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_token_without_numbers_harms_no_other(bad, groups):
    c = config(4, 40, 3, least_sum=1e-20, groups=groups, top_groups=-(-groups // 2), group_best=2)
    given = operands(c) | dict(live=np.ones(4, np.int32))
    chosen, scores = oracle(c, **given)
    given["logits"][2] = bad
    found = by_threads(c, **given)
    others = [0, 1, 3]
    np.testing.assert_allclose(found.scores[others], scores[others], rtol=3e-6)
    assert np.isnan(found.scores[2]).all()
    of_rows = found.row // 8
    np.testing.assert_array_equal(found.plain_tiles[1 + of_rows[others], 0], chosen[others])
    assert ((found.row % 8 == np.arange(4)[:, None]) & (of_rows < found.plain_tiles[0, 0])).all()


def test_a_small_sum_does_not_make_scores_large():
    c = config(2, 40, 3, scores="sigmoid", least_sum=1e-6)
    given = operands(c) | dict(live=np.ones(2, np.int32))
    given["logits"][0] -= 60
    chosen, scores = oracle(c, **given)
    found = by_threads(c, **given)
    assert scores[0].max() < 1e-15 < scores[1].max()
    np.testing.assert_allclose(found.scores, scores, rtol=2e-5)
    check_rows(c, found, chosen, given["live"], given["first"])


def test_what_it_does_not_serve():
    assert supports(config(9, 8, 2)) and supports(config(4, 769, 2)) and supports(config(4, 64, 33))
    assert supports(config(4, 8, 2, scores="sparsemixer")) and supports(config(4, 8, 2, experts=9))
    of_8 = lambda **fields: supports(config(4, 8, 2, **dict(groups=2, top_groups=1) | fields))
    assert not of_8() and not of_8(group_best=4) and not supports(config(4, 768, 2))
    assert of_8(groups=3) == ["8 experts in 3 groups: wanted 1 to 32 equal ones"]
    assert of_8(groups=0) and supports(config(4, 66, 2, groups=33)) and supports(config(4, 0, 1))
    assert of_8(top_groups=0) and of_8(top_groups=3) and of_8(group_best=0) and of_8(group_best=5)
    assert of_8(groups=4, group_best=3) and of_8(groups=8) == ["top_k 2 of 1 experts: wanted 1 to 1"]
    assert supports(config(4, 49 * 17, 2, groups=17)) == ["49 experts of a group: wanted 1 to 24"]
    assert of_8(identity_experts=1, experts=7) == ["identity experts and groups: wanted one of them"]
    assert supports(config(4, 8, 2, identity_experts=1)) == ["tiles of 8 experts: wanted 1 to 7"]
    assert supports(config(4, 8, 2, identity_experts=-1)) == ["-1 identity experts: wanted 0 or more"]
    with pytest.raises(NotImplementedError, match="9 tokens"):
        kernel.choose_experts(None, None, None, None, None, config(9, 8, 2))
    c, x = config(2, 8, 2), lambda *shape: np.zeros(shape, np.float32)
    whole = lambda *shape: np.zeros(shape, np.int32)
    with pytest.raises(ValueError, match=r"logits float32\[2, 9\] must be float32\[2, 8\]"):
        kernel.choose_experts(x(2, 9), None, None, whole(2), whole(1), c)
    with pytest.raises(ValueError, match="live float32"):
        kernel.choose_experts(x(2, 8), None, None, x(2), whole(1), c)


@pytest.mark.parametrize(
    "name", ["Qwen3", "DeepSeek V3", "DeepSeek V2", "three groups", "LongCat Flash", "512 experts"]
)
def test_it_lowers_for_cuda(name):
    c = CASES[name]
    shapes = [x if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands(c).values()]
    check = jax.export.DisabledSafetyCheck.custom_call(PALLAS_CALL)
    run = jax.jit(lambda *given: tuple(kernel.choose_experts(*given, c)))
    export = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(*shapes)
    assert [out.shape for out in export.out_avals] == [
        (c.tokens, c.top_k), (c.tokens, c.top_k), (1 + c.tiles, 3), (c.tiles, 3)
    ]  # fmt: skip
