"""Mixtures of up to 8 tokens on a Hopper GPU, their launches replaced by formulas, beside the same mixtures here."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import models
from jattn.device import Chip
from jattn.models import MLP, MoE, mixture_launches
from jattn.models.mixture_launches import MixtureLaunches
from jattn.nn.norm import Norm
from jattn.nn.weight_spec import is_weight_spec
from jattn.ops import mixture_products
from jattn.ops.quantised import QuantisedArray
from pallas_kernels.gpu import expert_product_sm90, packed_sums_sm90
from pallas_kernels.gpu.expert_choice_sm80 import ChoiceConfig, ChosenExperts
from tests.kernels.gpu.test_expert_choice import by_threads
from tests.models.published import PUBLISHED
from tests.ops.test_experts import of_16_bits, stacked

TOKENS, HIDDEN, WIDTH, EXPERTS = 5, 64, 128, 6


def draw(*shape: int, dtype="bfloat16", size=1.0) -> jax.Array:
    return jnp.asarray(size * np.random.default_rng(shape).standard_normal(shape), dtype)


def on_hopper(monkeypatch) -> list:
    """A Hopper GPU is found, and each launch replaced; the list of the configs of products. Results have NaN in tiles
    that are not used, and those of packed matrices in rows after the last live token too."""
    for module in (mixture_launches, mixture_products):
        monkeypatch.setattr(module.device, "detect", lambda: Chip("gpu", "sm_90"))
        monkeypatch.setattr(module.device, "processors", lambda: 132)
    seen = []

    def choose(*given_and_config):
        *given, config = given_and_config
        shapes = (config.tokens, config.top_k), (config.tokens, config.top_k), (1 + config.tiles, 3), (config.tiles, 3)
        kinds = jnp.float32, jnp.int32, jnp.int32, jnp.int32
        out = ChosenExperts(*map(jax.ShapeDtypeStruct, shapes, kinds))
        run = lambda *given: by_threads(config, *(x if x is None else np.asarray(x) for x in given))
        return jax.pure_callback(run, out, *given)

    def product(x, matrices, expert, is_used, config):
        seen.append(config)
        rows = jnp.pad(x, ((0, 8 - len(x)), (0, 0)))[None] if config.tokens else x.reshape(-1, 8, x.shape[1])
        rows = jnp.broadcast_to(rows, (len(expert), *rows.shape[1:])).astype(jnp.float32)
        each = [jnp.einsum("tni,tio->tno", rows, matrix.astype(jnp.float32)[expert]) for matrix in matrices]
        keep = lambda y: jnp.where(is_used, y, jnp.nan).reshape(-1, y.shape[2]).astype(x.dtype)
        return [keep(y) for y in each]

    def plain(x, matrices, tiles, config):
        expert_product_sm90._check(config, x, matrices, tiles)
        is_used = (jnp.arange(config.tiles) < tiles[0, 0])[:, None, None]
        results = product(x, matrices, tiles[1:, 0], is_used, config)
        return jax.nn.silu(results[0]) * results[1] if len(results) == 2 else results[0]

    def packed(x, matrices, config, tiles):
        packed_sums_sm90.check_operands(config, x, matrices, config.experts)
        form = dict(format=config.format, dtype=np.dtype(jnp.bfloat16))
        weights = [QuantisedArray(values=v, scales=s, zero_points=z, factor=f, **form) for v, s, z, f in matrices]
        assert tiles.shape == (config.tiles, 3)
        is_used = jnp.arange(8)[None, :, None] < tiles[:, 2][:, None, None]
        return tuple(product(x, [w.dequantise(jnp.float32) for w in weights], tiles[:, 0], is_used, config))

    monkeypatch.setattr(mixture_products, "expert_choice_sm80", types.SimpleNamespace(choose_experts=choose))
    monkeypatch.setattr(mixture_products, "expert_product_sm90", types.SimpleNamespace(expert_product=plain))
    monkeypatch.setattr(mixture_products, "packed_product_sm90", types.SimpleNamespace(packed_product=packed))
    return seen


OPTIONS = {
    "a norm of the router": dict(router_norm=Norm()),
    "Qwen3": dict(scores="softmax_over_all", normalised=True),
    "Mixtral": dict(),
    "Qwen2": dict(scores="softmax_over_all", shared=MLP(width=64), shared_gate=True),
    "gpt-oss": dict(bias=True, router_bias=True, clamp=(1.7, 7.0)),
    "GLM 4": dict(scores="sigmoid", correction=True, normalised=True, factor=2.5, float32_router=True),
    "Ernie": dict(correction=True, least_sum=1e-12),
    "DeepSeek V3": dict(scores="sigmoid", correction=True, normalised=True, factor=2.5, groups=3, top_groups=2),
    "DeepSeek V2": dict(scores="softmax_over_all", factor=16.0, groups=3, top_groups=2, group_best=1),
    "softmax in groups": dict(groups=2, top_groups=1, least_sum=0.9),
    "LongCat": dict(scores="softmax_over_all", correction=True, factor=6.0, identity_experts=3),
    "Gemma": dict(scores="softmax_over_all", normalised=True, activation="gelu", expert_scale=True),
}
FORMS = {"bfloat16": None, "int4": ("int4", 32), "fp8": ("fp8", 64)}


def mixture(name: str, form: str = "bfloat16") -> tuple[MoE, dict]:
    moe = MoE(num_experts=EXPERTS, top_k=2, width=WIDTH, **OPTIONS[name])
    routes = EXPERTS + moe.identity_experts
    router = dict(kernel=draw(HIDDEN, routes, size=HIDDEN**-0.5))
    router |= {k: draw(routes, dtype="float32") for k in ("bias",) if moe.router_bias}
    router |= {"norm": dict(scale=draw(HIDDEN))} if moe.router_norm is not None else {}
    router |= {"correction": draw(routes, dtype="float32")} if moe.correction else {}
    router |= {"expert_scale": draw(routes, dtype="float32")} if moe.expert_scale else {}
    weights: dict = dict(router=router)
    for part, matrix in zip(("gate", "up", "down"), of_16_bits(EXPERTS, HIDDEN, WIDTH), strict=True):
        if FORMS[form] is not None:
            inner, width = matrix.shape[1:]
            kind, group = FORMS[form]
            matrix, _ = stacked(kind, inner, width, group, count=EXPERTS)
        weights[part] = dict(kernel=matrix) | ({"bias": draw(EXPERTS, matrix.shape[2])} if moe.bias else {})
    if moe.shared is not None:
        widths = dict(gate=(HIDDEN, 64), up=(HIDDEN, 64), down=(64, HIDDEN))
        weights["shared"] = {k: dict(kernel=draw(*shape, size=shape[0] ** -0.5)) for k, shape in widths.items()}
        weights["shared_gate"] = dict(kernel=draw(HIDDEN, 1))
    return moe, weights


def close(found, wanted):
    found, wanted = (np.asarray(x, np.float64) for x in (found, wanted))
    assert found.shape == wanted.shape and np.isfinite(wanted).all() and np.abs(wanted).max() > 0
    assert np.abs(found - wanted).max() < 0.03 * np.abs(wanted).max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_is_the_mixture(monkeypatch, name, form):
    """Some tokens are padding: their results are zeros, or those of the shared expert."""
    (moe, weights), x = mixture(name, form), draw(TOKENS, HIDDEN)
    is_live = jnp.array([True, False, True, True, False])
    run = lambda: jax.jit(lambda weights, x: moe(weights, x, is_live=is_live))(weights, x)
    wanted, seen = run(), on_hopper(monkeypatch)
    close(run(), wanted)
    is_packed = form != "bfloat16"
    matrices = [len(c.widths) if is_packed else c.matrices for c in seen]
    assert matrices == ([2, 1] if is_packed or moe.is_plain_silu else [1, 1, 1])
    assert [c.tokens for c in seen] == [TOKENS] * (len(seen) - 1) + [0]


@pytest.mark.parametrize("name", ["gpt-oss", "DeepSeek V3", "LongCat"])
def test_ranges_of_experts_add_up(monkeypatch, name):
    """As on the devices of a mesh, also with a first expert that is computed."""
    (moe, weights), x = mixture(name), draw(TOKENS, HIDDEN)
    wanted, seen, parts = moe(weights, x), on_hopper(monkeypatch), 0
    run = jax.jit(moe.routed, static_argnums=3)
    for first, count in ((0, 1), (1, 3), (4, 2)):
        own = {name: {k: w[first : first + count] for k, w in weights[name].items()} for name in ("gate", "up", "down")}
        parts += np.asarray(run(weights | own, x, jnp.int32(first), count), np.float64)
    assert len(seen) == (9 if name == "gpt-oss" else 6)
    close(parts, wanted)


def test_experts_that_give_their_input_need_no_tile(monkeypatch):
    """A token that chose only such experts, one that chose both kinds, and one that is padding."""
    moe = MoE(num_experts=EXPERTS, top_k=2, width=WIDTH, identity_experts=2, float32_router=True)
    x, logits = jnp.eye(3, HIDDEN, dtype=jnp.bfloat16), np.zeros((HIDDEN, EXPERTS + 2), np.float32)
    logits[0, [6, 7]], logits[1, [2, 7]], logits[2, [7, 3]] = (9, 8), (9, 8), (9, 8)
    weights = mixture("Mixtral")[1] | {"router": dict(kernel=jnp.asarray(logits))}
    run = lambda: moe(weights, x, is_live=jnp.array([True, True, False]))
    wanted, seen = run(), on_hopper(monkeypatch)
    found = run()
    close(found, wanted)
    assert seen and (found[0] == x[0]).all() and (found[1, 2:] != 0).any()


def test_no_live_token_gives_zeros(monkeypatch):
    (moe, weights), x = mixture("Mixtral"), draw(TOKENS, HIDDEN)
    on_hopper(monkeypatch)
    assert not np.asarray(moe(weights, x, is_live=jnp.zeros(TOKENS, bool)), np.float64).any()


@pytest.mark.parametrize("is_live", [(-1, 0, 2, 0, 1), (0.5, 0.0, -2.0, 0.0, 1.0)], ids=["int32", "float32"])
def test_what_is_not_zero_is_live(monkeypatch, is_live):
    (moe, weights), x = mixture("Mixtral"), draw(TOKENS, HIDDEN)
    run = lambda: moe(weights, x, is_live=jnp.array(is_live))
    wanted, seen = run(), on_hopper(monkeypatch)
    found = run()
    close(found, wanted)
    assert seen and np.asarray(found, bool).any(axis=1).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("experts, routes, top_k", [(4, 256, 8), (1, 512, 1), (5, 5, 5), (3, 128, 4), (128, 128, 8)])
def test_the_tiles_that_launches_are_chosen_for(tokens, experts, routes, top_k):
    """Of an expert-parallel part with few experts there are less than one on average, but no launch has part of one."""
    config = ChoiceConfig(tokens=tokens, routes=routes, top_k=top_k, experts=experts)
    few, most = mixture_launches._used_tiles(config)
    assert 1 <= few <= most <= config.tiles and (top_k < routes or few == experts)


def test_all_experts_begin_at_the_first(monkeypatch):
    """Whatever `first` is: the router's experts are those of the matrices."""
    (moe, weights), x = mixture("Mixtral"), draw(TOKENS, HIDDEN)
    wanted, seen = moe(weights, x), on_hopper(monkeypatch)
    for first, count in ((2, None), (-1, EXPERTS)):
        close(moe.routed(weights, x, first, count), wanted)
    assert len(seen) == 4


def test_scores_of_chosen_logits_have_no_least_sum(monkeypatch):
    """They add up to 1; over all logits they may not."""
    _, weights = mixture("Mixtral")
    x, options = draw(TOKENS, HIDDEN), dict(num_experts=EXPERTS, top_k=1, width=WIDTH, least_sum=1.0)
    ways = [MoE(**options), MoE(**options, normalised=True), MoE(**options, scores="sigmoid", normalised=True)]
    ways += [MoE(**options, groups=2, group_best=1)]  # over all logits
    wanted, seen = [moe(weights, x) for moe in ways], on_hopper(monkeypatch)
    for moe, y in zip(ways, wanted, strict=True):
        close(moe(weights, x), y)
    assert len(seen) == 8


@pytest.mark.parametrize("scores", ["sigmoid", "softmax_over_all"])
def test_the_largest_logits_are_chosen_where_scores_are_equal(monkeypatch, scores):
    """Scores are numbers of float32: sigmoids of 20 and 30 are 1, and shares of -200 and -300 are 0."""
    moe = MoE(num_experts=EXPERTS, top_k=3, width=WIDTH, scores=scores, router_bias=True, float32_router=True)
    bias = jnp.array([20.0, 30, 10, 40, 50, 25] if scores == "sigmoid" else [0.0, -300, -200, -400, -150, -250])
    router, (_, weights), x = dict(kernel=jnp.zeros((HIDDEN, EXPERTS)), bias=bias), mixture("Mixtral"), draw(2, HIDDEN)
    weights |= {"router": router}
    wanted = [[4, 3, 1] if scores == "sigmoid" else [0, 4, 2]] * 2
    assert np.asarray(moe._route(router, x)[0]).tolist() == wanted
    y, seen = moe(weights, x), on_hopper(monkeypatch)
    close(moe(weights, x), y)
    assert seen


TIED = {
    "sigmoid, two best": dict(scores="sigmoid", correction=True, groups=4, top_groups=2),
    "sigmoid, one group": dict(scores="sigmoid", correction=True, groups=4, top_groups=1),
    "sigmoid, one best": dict(scores="sigmoid", groups=6, top_groups=3, group_best=1),
    "softmax, three best": dict(scores="softmax_over_all", groups=3, top_groups=2, group_best=3),
    "softmax with a correction": dict(scores="softmax_over_all", correction=True, groups=2, group_best=4),
    "without groups": dict(scores="sigmoid", correction=True, identity_experts=5),
}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("seed", range(8))
def test_ties_are_decided_as_without_launches(monkeypatch, name, seed):
    """Between experts, between groups, and with experts outside the best groups where a rank in them is -inf.

    Scores are 0, 0.5 and 1, or 0 and a share, corrections 0, 0.25 and -inf: sums are exact."""
    rng, options = np.random.default_rng(seed), dict(num_experts=24, top_k=4, width=WIDTH, float32_router=True)
    moe = MoE(**options | TIED[name])
    values = [0, 100, -200] if moe.scores == "sigmoid" else [0, -200]
    router = dict(kernel=jnp.asarray(rng.choice(values, (8, moe.num_routes)), jnp.float32))
    if moe.correction:
        share = [0.4, 0.1, 0.5] if seed % 2 else [0.2, 0.1, 0.7]  # of 0, 0.25 and -inf
        correction = rng.choice([0, 0.25, -np.inf], moe.num_routes, p=share)
        router["correction"] = jnp.asarray(correction, jnp.float32)
    x = jnp.eye(8)
    wanted, scores = (np.asarray(y) for y in moe._route(router, x))
    on_hopper(monkeypatch)
    config = mixture_launches._choice_config(moe, 8, moe.num_experts)
    assert config is not None
    correction = np.asarray(router["correction"]) if moe.correction else None
    found = by_threads(
        config, np.asarray(moe.logits(router, x)), correction, None, np.ones(8, np.int32), np.zeros(1, np.int32)
    )
    has_tile = wanted < moe.num_experts
    assert ((found.row < 8 * config.tiles) == has_tile).all()
    of_tile = np.where(has_tile, found.row // 8, 0)
    np.testing.assert_array_equal(found.plain_tiles[1 + of_tile, 0][has_tile], wanted[has_tile])
    np.testing.assert_allclose(found.scores, scores, rtol=1e-6)


def test_a_batch_of_mixtures_and_what_the_router_reads(monkeypatch):
    (moe, weights), xs, by = mixture("Qwen3"), draw(3, TOKENS, HIDDEN), draw(TOKENS, HIDDEN, size=2.0)
    run = lambda: jax.vmap(lambda x: moe(weights, x, routed_by=by))(xs)
    wanted, seen = run(), on_hopper(monkeypatch)
    close(run(), wanted)
    assert seen


@pytest.mark.parametrize("order", [1, 2])
def test_derivatives_are_those_of_rows_brought_together(monkeypatch, order):
    (moe, weights), x = mixture("Mixtral"), draw(TOKENS, HIDDEN)
    loss = lambda weights, x: (moe(weights, x).astype(jnp.float32) ** 2).sum()
    slope = lambda weights, x: (jax.grad(loss, 1)(weights, x).astype(jnp.float32) ** 2).sum()
    run = lambda: jax.grad(loss if order == 1 else slope, (0, 1))(weights, x)
    wanted, plain = run(), MixtureLaunches.of
    seen = on_hopper(monkeypatch)

    def of(*args):
        """The general way goes on as on this machine."""
        found = plain(*args)
        monkeypatch.setattr(mixture_launches.device, "detect", lambda: Chip("cpu"))
        return found

    monkeypatch.setattr(MixtureLaunches, "of", of)
    for found, one in zip(jax.tree.leaves(run()), jax.tree.leaves(wanted), strict=True):
        assert np.abs(np.float32(found) - np.float32(one)).max() <= 0.05 * np.abs(np.float32(one)).max()
    assert seen


@pytest.mark.parametrize(
    "change",
    [
        dict(scores="sigmoid_of_input"), dict(scores="sparsemixer"), dict(groups=2, num_experts=10, group_best=5),
        dict(groups=33, num_experts=66, top_groups=9), dict(num_experts=800), dict(identity_experts=800),
        dict(width=100),
    ],
    ids=str,
)  # fmt: skip
def test_other_mixtures_have_no_such_launches(monkeypatch, change):
    on_hopper(monkeypatch)
    moe = MoE(**dict(num_experts=EXPERTS, top_k=2, width=WIDTH) | change)
    shapes = moe.weight_specs(HIDDEN)
    weights = {
        k: dict(kernel=jax.ShapeDtypeStruct(shapes[k]["kernel"].shape, jnp.bfloat16)) for k in ("gate", "up", "down")
    }
    x = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.bfloat16)
    assert MixtureLaunches.of(moe, weights, x, moe.num_experts) is None
    plain = MoE(num_experts=EXPERTS, top_k=2, width=WIDTH)
    weights = {name: dict(kernel=draw(*plain.weight_specs(HIDDEN)[name]["kernel"].shape)) for name in weights}
    assert MixtureLaunches.of(plain, weights, x, EXPERTS) is not None


SERVED = {
    "num_experts", "top_k", "width", "activation", "clamp", "scores", "correction", "groups", "top_groups",
    "group_best", "normalised", "least_sum", "factor", "expert_scale", "identity_experts", "float32_router",
    "router_norm", "router_bias", "bias",
}  # fmt: skip
REFUSED = {"jitter"}
BESIDE = {"shared", "shared_gate"}  # not of the routed experts


def test_every_option_of_a_mixture_is_served_or_refused():
    """Who adds one decides in `MixtureLaunches.of`, and tests it here."""
    assert {field.name for field in dataclasses.fields(MoE)} == SERVED | REFUSED | BESIDE


DEEPSEEK = dict(
    moe_layer_freq=1, n_group=8, n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, topk_group=3,
    topk_method="group_limited_greedy", routed_scaling_factor=16.0,
)  # fmt: skip
FAMILIES = {  # name -> keys beside those of the published config, groups, experts and routes of the launch
    "deepseek_v3": ({}, 8, 256, 256),
    "deepseek_v2": (DEEPSEEK, 8, 160, 160),
    "kimi_k2": ({}, 1, 384, 384),
    "glm4_moe": ({}, 1, 128, 128),
    "dots1": ({}, 1, 128, 128),
    "longcat_flash": ({}, 1, 512, 768),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_published_mixtures_have_such_launches(monkeypatch, name):
    """In bfloat16."""
    keys, groups, experts, routes = FAMILIES[name]
    published = {k: v for k, v in PUBLISHED[name].items() if k != "quantization_config"}
    config = models.config_of(published | keys)
    (moe,) = {layer.moe for layer in config.layers if layer.moe is not None}
    shape = lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.bfloat16)
    weights = jax.tree.map(shape, moe.weight_specs(config.hidden_size), is_leaf=is_weight_spec)
    x, seen = jax.ShapeDtypeStruct((4, config.hidden_size), jnp.bfloat16), on_hopper(monkeypatch)
    launches = MixtureLaunches.of(moe, weights, x, experts)
    assert launches is not None
    choice = launches.choice_config
    assert (choice.groups, choice.experts, choice.routes) == (groups, experts, routes)
    y = jax.eval_shape(lambda weights, x: moe(weights, x), weights, x)
    assert y.shape == x.shape and [c.matrices for c in seen] == [2, 1]


def test_where_there_are_such_launches(monkeypatch):
    moe, weights = mixture("Mixtral")
    plan = lambda weights, x: MixtureLaunches.of(moe, weights, x, EXPERTS)
    of = lambda tokens, dtype="bfloat16": plan(weights, draw(tokens, HIDDEN, dtype=dtype))
    assert of(8) is None
    on_hopper(monkeypatch)
    assert of(1) is not None and of(8) is not None and of(9) is None and of(0) is None
    assert of(8, "float32") is None and of(8, "float16") is None
    for name, down in (("gate", False), ("down", True)):  # one of them quantised
        mixed = weights | {name: mixture("Mixtral", "int4")[1][name]}
        found = plan(mixed, draw(4, HIDDEN))
        assert found is not None and len(found.gate_up) == (1 if down else 2)
    assert MixtureLaunches.of(moe, weights, draw(4, HIDDEN), 3) is None  # the general way says what is wrong
    for dtype in ("float32", "float16"):  # of a bias, so that sums are of float32
        biased = mixture("gpt-oss")
        biased[1]["up"]["bias"] = biased[1]["up"]["bias"].astype(dtype)
        assert MixtureLaunches.of(*biased, draw(4, HIDDEN), EXPERTS) is None
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert of(4) is None


def test_the_expected_number_of_tiles_is_that_of_random_choices():
    """Of a device with half of the experts, where each token chooses 3 of 12: of one in four tokens, and of all."""
    rng, config = np.random.default_rng(3), ChoiceConfig(tokens=6, routes=12, top_k=3, experts=6)
    draws = [[set(rng.choice(12, 3, replace=False)) for _ in range(6)] for _ in range(4000)]
    of = lambda tokens: np.mean([len(set().union(*draw[:tokens]) & set(range(6))) for draw in draws])
    np.testing.assert_allclose(mixture_launches._used_tiles(config), (of(2), of(6)), rtol=0.02)
