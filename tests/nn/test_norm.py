"""Norms: every kind and option against its formula in float64, and a new kind is a row of one table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.nn import AttentionConfig, Norm, norm
from tests.nn.test_layer import LENGTHS, SPEC, batch, run, tokens, weights_of

X = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32) + 0.5
WEIGHTS = {name: np.random.default_rng(i).normal(size=8).astype(np.float32) for i, name in enumerate(("scale", "bias"))}


def centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean(-1, keepdims=True)


FORMULAS = {
    "rms": lambda x, eps: x / np.sqrt((x**2).mean(-1, keepdims=True) + eps),
    "layer": lambda x, eps: centred(x) / np.sqrt((centred(x) ** 2).mean(-1, keepdims=True) + eps),
}


@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("names", [(), ("scale",), ("scale", "bias")], ids=str)
@pytest.mark.parametrize("kind", FORMULAS)
def test_every_kind_and_option_is_its_formula(kind, names, one_plus):
    made = Norm(kind=kind, eps=0.1, one_plus=one_plus, has_scale="scale" in names, has_bias="bias" in names)
    assert tuple(made.weight_specs(8)) == names
    wanted = FORMULAS[kind](X.astype(np.float64), 0.1)
    wanted = wanted * (WEIGHTS["scale"] + np.float64(one_plus)) if "scale" in names else wanted
    wanted = wanted + WEIGHTS["bias"] if "bias" in names else wanted
    mine = jax.jit(made)({name: WEIGHTS[name] for name in names}, X)
    np.testing.assert_allclose(mine, wanted, atol=2e-6)


def test_every_kind_has_its_formula_here():
    assert FORMULAS.keys() == norm.FORMULAS.keys()


def test_initial_weights_leave_the_normalised_values_unchanged():
    for made in (Norm(has_bias=True), Norm(one_plus=True, has_bias=True)):
        weights = {name: spec.draw(jax.random.key(0)) for name, spec in made.weight_specs(8).items()}
        np.testing.assert_array_equal(made(weights, X), Norm(has_scale=False)({}, X))


def test_a_new_kind_is_a_row_of_one_table(monkeypatch):
    with pytest.raises(ValueError, match="not known; use one of rms, layer"):
        Norm(kind="max")
    monkeypatch.setitem(norm.FORMULAS, "max", lambda x, eps: x / (jnp.abs(x).max(axis=-1, keepdims=True) + eps))
    layers = [AttentionConfig(spec=SPEC, hidden_size=12, qk_norm=Norm(kind=kind)) for kind in ("rms", "max")]
    x, meta = np.concatenate(tokens(*LENGTHS)), batch(LENGTHS, table=None)
    rms, largest = (run(layer, weights_of(layer), x, meta)[1] for layer in layers)
    assert np.abs(rms - largest).max() > 1e-3
