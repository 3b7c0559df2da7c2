"""Mixtures of experts against their definition, token by token in float64, without transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import models
from jattn.models import MLP, MoE
from jattn.models import moe as moe_module
from jattn.nn.weight_spec import is_weight_spec
from jattn.ops import experts
from tests.models import examples, textbook
from tests.nn import dense
from tests.ops.test_experts import of_16_bits, on_hopper

HIDDEN, ROWS = 12, 30
SIZES = dict(num_experts=5, width=7)
VARIANTS = {
    "softmax": (dict(top_k=2), {}),
    "softmax over one": (dict(top_k=1), {}),
    "softmax over all": (dict(top_k=5), {}),
    "gpt-oss": (
        dict(top_k=3, clamp=(1.7, 0.9), router_bias=True, bias=True),
        dict(clamp=(1.7, 0.9)),
    ),
    "sigmoid, shared": (
        dict(top_k=2, scores="sigmoid_of_input", shared=MLP(width=6)),
        dict(sigmoid=True),
    ),
    "sigmoid of one": (dict(top_k=1, scores="sigmoid_of_input"), dict(sigmoid=True)),
}  # fmt: skip


def doubled(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def drawn(tree, seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: rng.normal(size=w.shape).astype(np.float32) * 0.6, tree, is_leaf=is_weight_spec)


@pytest.mark.parametrize("name", VARIANTS)
def test_each_token_visits_its_own_experts_and_gets_back_its_own_row(name):
    options, rules = VARIANTS[name]
    layer = MoE(**SIZES, **options)
    weights, x = drawn(layer.weight_specs(HIDDEN), 1), np.random.default_rng(2).normal(size=(ROWS, HIDDEN))
    wanted, visited = textbook.moe(doubled(weights), x.astype(np.float32).astype(float), options["top_k"], **rules)
    if options["top_k"] < 5:
        assert len({tuple(sorted(some)) for some in visited.tolist()}) >= 3, "the rows must differ in their experts"
        assert len(np.unique(visited)) == 5, "each expert must be visited"
    mine = np.asarray(jax.jit(layer)(weights, x.astype(np.float32)))
    np.testing.assert_allclose(mine, wanted, atol=2e-5 * wanted.std())
    for row in range(ROWS):  # a row that came back to another token would be seen
        assert np.abs(np.delete(wanted, row, axis=0) - mine[row]).max(axis=1).min() > 0.01


ROUTES = {
    "softmax over all": dict(scores="softmax_over_all"),
    "sigmoid": dict(scores="sigmoid", factor=2.5),
    "normalised sigmoid": dict(scores="sigmoid", normalised=True),
    "corrected softmax": dict(scores="softmax", correction=True),
    "best groups": dict(scores="sigmoid", correction=True, groups=3, top_groups=2, normalised=True, factor=0.5),
    "best expert of a group": dict(scores="softmax_over_all", groups=2, top_groups=1, group_best=1),
    "a gated shared expert": dict(
        scores="softmax_over_all", shared=MLP(width=5), shared_gate=True, float32_router=True
    ),
}


@pytest.mark.parametrize("name", ROUTES)
def test_each_token_is_routed_by_the_definition(name):
    options = ROUTES[name]
    layer = MoE(num_experts=6, top_k=2, width=7, **options)
    weights, x = drawn(layer.weight_specs(HIDDEN), 1), np.random.default_rng(2).normal(size=(ROWS, HIDDEN))
    exact, x = doubled(weights), x.astype(np.float32).astype(float)
    rules = {key: options[key] for key in ("groups", "top_groups") if key in options}
    wanted = np.zeros_like(x)
    for t, row in enumerate(x):
        share = textbook.routed(
            dense.project({"kernel": exact["router"]["kernel"]}, row), options["scores"], 2, **rules,
            correction=exact["router"].get("correction", 0.0), best=options.get("group_best", 2),
        )  # fmt: skip
        total = sum(share.values()) if options.get("normalised") or options["scores"] == "softmax" else 1.0
        for e, weight in share.items():
            wanted[t] += options.get("factor", 1.0) * weight / total * textbook.expert(exact, e, row)
    if "shared" in options:
        up, gate, down = (x @ exact["shared"][n]["kernel"] if n != "down" else exact["shared"][n]["kernel"] for n in
                          ("up", "gate", "down"))  # fmt: skip
        wanted += (textbook.silu(gate) * up) @ down / (1 + np.exp(-x @ exact["shared_gate"]["kernel"]))
    np.testing.assert_allclose(jax.jit(layer)(weights, x.astype(np.float32)), wanted, atol=2e-5 * wanted.std())


@pytest.mark.parametrize(
    "bad",
    [
        dict(groups=4), dict(groups=3, top_groups=4), dict(groups=3, group_best=3), dict(shared_gate=True),
        dict(groups=3, top_k=3), dict(scores="sparsemixer", top_k=3), dict(scores="sparsemixer", factor=2.0),
        dict(jitter=0.1),
    ],
)  # fmt: skip
def test_routes_that_cannot_be_are_refused(bad):
    with pytest.raises(ValueError, match="MoE"):
        MoE(**dict(num_experts=6, top_k=2, width=7) | bad)


def test_a_token_of_nans_spoils_no_other():
    layer = MoE(**SIZES, top_k=2, bias=True, clamp=(1.7, 0.9))
    weights, x = drawn(layer.weight_specs(HIDDEN), 1), np.random.default_rng(2).normal(size=(ROWS, HIDDEN))
    run, poisoned = jax.jit(layer), np.array(x, np.float32)
    poisoned[4] = np.nan
    spoiled = np.asarray(run(weights, poisoned))
    assert np.isnan(spoiled[4]).all()
    np.testing.assert_allclose(np.delete(spoiled, 4, 0), np.delete(run(weights, x.astype(np.float32)), 4, 0), atol=1e-5)


def test_sparsemixer_chooses_an_expert_once_even_by_infinite_logits():
    """`most_rows` says so to kernels, whose tiles would otherwise not be enough for the rows of other tokens."""
    inf, nan = np.inf, np.nan
    logits = [[inf, -inf, -inf], [-inf] * 3, [nan] * 3, [nan, -inf, -inf], [3.0, -inf, -inf], [-inf, 3.0, 2.0]]
    chosen = np.asarray(moe_module._sparsemixer(jnp.array(logits, jnp.float32), 0.01)[0])
    assert (chosen[:, 0] != chosen[:, 1]).all() and chosen[-1].tolist() == [1, 2]


@pytest.mark.parametrize("options", [dict(), dict(identity_experts=2, scores="sigmoid"), dict(bias=True)], ids=str)
def test_no_tokens_give_no_rows(options):
    layer = MoE(**SIZES, top_k=2, **options)
    weights, x = drawn(layer.weight_specs(HIDDEN), 1), np.zeros((0, HIDDEN), np.float32)
    assert layer(weights, x).shape == (0, HIDDEN)
    own = weights | {name: jax.tree.map(lambda w: w[:3], weights[name]) for name in ("gate", "up", "down")}
    assert layer.routed(own, x, 0, 3).shape == (0, HIDDEN)
    assert jax.grad(lambda x: layer(weights, x).sum())(x).shape == (0, HIDDEN)


def test_derivatives_of_tokens_that_are_divided_over_a_mesh():
    """shard_map checks over which axes of the mesh each value varies."""
    layer = MoE(**SIZES, top_k=2, shared=MLP(width=6))
    weights = drawn(layer.weight_specs(HIDDEN), 1)
    x = np.random.default_rng(2).normal(size=(8, HIDDEN)).astype(np.float32)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    divided = jax.shard_map(layer, mesh=mesh, in_specs=(jax.P(), jax.P("x")), out_specs=jax.P("x"))
    derivatives = lambda layer: jax.jit(jax.grad(lambda *args: (layer(*args) ** 2).sum(), argnums=(0, 1)))(weights, x)
    for mine, whole in zip(jax.tree.leaves(derivatives(divided)), jax.tree.leaves(derivatives(layer)), strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-4 * np.abs(whole).max())


DEFAULT = dict(rope_scaling=dict(rope_type="default"))
WHOLE = {
    "mixtral": (examples.DECODERS["mixtral"], [None, None], None),
    "gpt_oss": (examples.DECODERS["gpt_oss"] | DEFAULT, [5, None], (1.702, 7.0)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_decoder_of_experts_is_the_textbook_whole_and_in_chunks(name):
    values, windows, clamp = WHOLE[name]
    config = models.config_of(values)
    params, ids = examples.params_of(config), np.random.default_rng(5).integers(0, 61, 19)
    wanted = textbook.mixture_decoder(values, doubled(params), ids, windows, clamp)
    for chunk in (None, 8):
        mine = models.prompt_logits(config, params, ids, chunk=chunk, backend="sdpa")
        np.testing.assert_allclose(mine, wanted, atol=1e-4 * wanted.std())


@pytest.mark.parametrize(
    "options",
    [
        dict(), dict(scores="sigmoid_of_input"), dict(bias=True, clamp=(1.7, 7.0)), dict(activation="gelu"),
        dict(identity_experts=2, scores="softmax_over_all"), dict(scores="sigmoid", groups=2, top_groups=1),
    ],
    ids=str,
)  # fmt: skip
def test_padded_rows_give_the_same_mixture(monkeypatch, options):
    """On Hopper each expert's rows are padded; whole, and in two ranges of experts as on the devices of a mesh."""
    moe = MoE(num_experts=4, top_k=2, width=128, **options)
    draw = lambda *shape: jnp.asarray(np.random.default_rng(shape).standard_normal(shape), "bfloat16")
    x, weights = draw(9, 64), dict(router=dict(kernel=draw(64, moe.num_routes)))
    for name, matrix in zip(("gate", "up", "down"), of_16_bits(), strict=True):
        weights[name] = dict(kernel=matrix) | ({"bias": draw(4, matrix.shape[2])} if moe.bias else {})
    wanted = np.asarray(moe(weights, x), np.float64)
    seen = on_hopper(monkeypatch)
    found = np.asarray(moe(weights, x), np.float64)
    is_one_launch = not options or "scores" in options
    assert [config.matrices for config in seen] == ([2, 1] if is_one_launch else [1, 1, 1]) and seen[0].tile_rows > 1
    assert np.abs(found - wanted).max() < 0.02 * np.abs(wanted).max()
    parts = 0
    for first, count in ((0, 1), (1, 3)):
        own = {name: {k: w[first : first + count] for k, w in weights[name].items()} for name in ("gate", "up", "down")}
        parts += np.asarray(moe.routed(weights | own, x, first, count), np.float64)
    assert np.abs(parts - wanted).max() < 0.02 * np.abs(wanted).max()


@pytest.mark.parametrize("tile_rows", [1, 8])
def test_products_know_the_most_rows_of_an_expert(monkeypatch, tile_rows):
    """All nine tokens choose expert 2, and others besides: it has nine rows, or two tiles of eight."""
    moe, seen, real = MoE(num_experts=4, top_k=2, width=128), [], experts.expert_product
    draw = lambda *shape: jnp.asarray(np.random.default_rng(shape).standard_normal(shape), "float32")
    router = draw(64, 4).at[:, 2].set(0.3)
    weights = dict(
        zip(("gate", "up", "down"), (dict(kernel=draw(*matrix.shape)) for matrix in of_16_bits()), strict=True)
    )

    def product(x, kernel, sizes, tile_rows, tiles, most_rows):
        seen.append((int(sizes.max()), most_rows))
        return real(x, kernel, sizes, tile_rows, tiles, most_rows)

    monkeypatch.setattr(moe_module, "choose_tile_rows", lambda *args, **share: tile_rows)
    monkeypatch.setattr(moe_module, "expert_product", product)
    moe(weights | dict(router=dict(kernel=router)), jnp.abs(draw(9, 64)))
    assert seen == [(9, 9) if tile_rows == 1 else (16, 16)]


@pytest.mark.parametrize(
    "options", [dict(), dict(bias=True, clamp=(1.7, 7.0)), dict(activation="gelu", bias=True)], ids=str
)
def test_what_a_kernel_leaves_in_rows_of_no_expert_reaches_no_gradient(monkeypatch, options):
    """As on a device of a mesh that has some of the experts."""
    moe = MoE(num_experts=4, top_k=2, width=128, **options)
    draw = lambda *shape: jnp.asarray(np.random.default_rng(shape).standard_normal(shape), "float32")
    x, weights = draw(9, 64), dict(router=dict(kernel=draw(64, 4)))
    for name, matrix in zip(("gate", "up", "down"), of_16_bits(count=2, dtype="float32"), strict=True):
        weights[name] = dict(kernel=matrix) | ({"bias": draw(2, matrix.shape[2])} if moe.bias else {})
    gradient = lambda: jax.grad(lambda weights, x: moe.routed(weights, x, 1, 2).sum(), (0, 1))(weights, x)
    wanted, native = gradient(), experts._native

    def with_rubbish(x, kernel, sizes):
        return jnp.where(jnp.arange(len(x))[:, None] < sizes.sum(), native(x, kernel, sizes), jnp.nan)

    monkeypatch.setattr(experts, "_is_native", lambda *args: True)
    monkeypatch.setattr(experts, "_native", with_rubbish)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradient(), wanted)
