"""R-38, rotary angles at late positions: every scaling against float64. A float32 product is off by 0.04 radians."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.nn import (
    DynamicNTKRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    Rope,
    RopeScaling,
    YarnRopeScaling,
    rotate,
)
from jattn.nn.phases import phases

DIM, THETA, TRAINED = 64, 500000.0, 4096
DIVISORS = np.linspace(1.0, 40.0, DIM // 2)
SCALINGS = {
    "default": RopeScaling(),
    "linear": LinearRopeScaling(factor=8.0),
    "dynamic": DynamicNTKRopeScaling(factor=2.5, trained_length=TRAINED),
    "llama3": Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, trained_length=8192),
    "yarn": YarnRopeScaling(factor=32.0, trained_length=TRAINED, truncate=False),
    "longrope": LongRopeScaling(short=(1.0,) * (DIM // 2), long=tuple(DIVISORS), trained_length=TRAINED, magnitude=1.2),
}
# The stretch of dynamic NTK is computed on the device, in float32, from a tabulated length nearby.
NEAR = {name: 5e-5 if name == "dynamic" else 4e-7 for name in SCALINGS}


def defined(name: str, length: int) -> np.ndarray:
    """f64[DIM / 2], radians per position, from the formulas, for a request of this length."""
    base = THETA ** (-np.arange(0, DIM, 2) / DIM)
    if name == "linear":
        return base / 8
    if name == "dynamic":
        return (THETA * (2.5 * length / TRAINED - 1.5) ** (DIM / (DIM - 2))) ** (-np.arange(0, DIM, 2) / DIM)
    if name == "llama3":
        smooth = np.clip((8192 * base / (2 * np.pi) - 1) / 3, 0, 1)
        return (1 - smooth) * base / 8 + smooth * base
    if name == "yarn":
        at = lambda turns: DIM * np.log(TRAINED / (turns * 2 * np.pi)) / (2 * np.log(THETA))
        keep = 1 - np.clip((np.arange(DIM // 2) - at(32)) / (at(1) - at(32)), 0, 1)
        return base / 32 * (1 - keep) + base * keep
    return base / DIVISORS if name == "longrope" else base


@pytest.mark.parametrize("position", [131071, 1048575])
@pytest.mark.parametrize("name", SCALINGS)
def test_r38_cos_and_sin_late_in_a_context_are_those_of_float64(name, position):
    scaling = SCALINGS[name]
    positions = position - np.array([0, 1, 2, 4321, position - 7])
    turn = jax.jit(lambda at, lengths: Rope(dim=DIM, theta=THETA, scaling=scaling).angles(at, lengths))
    mine = turn(positions.astype(np.int32), np.full(5, position + 1, np.int32))
    angle, factor = positions[:, None] * defined(name, position + 1)[None], scaling.attention_factor
    assert mine.cos.dtype == jnp.float32
    np.testing.assert_allclose(mine.cos / factor, np.cos(angle), atol=NEAR[name])
    np.testing.assert_allclose(mine.sin / factor, np.sin(angle), atol=NEAR[name])
    naive = np.float32(positions)[:, None] * defined(name, position + 1).astype(np.float32)[None]
    assert np.abs(np.cos(naive) - np.cos(angle)).max() > 4 * NEAR[name], "this test could not see a float32 product"


def test_dynamic_ntk_is_its_formula_at_every_length():
    scaling = SCALINGS["dynamic"]
    lengths = np.concatenate([np.arange(4090, 4110), np.geomspace(4110, 2**23, 300).astype(int)])
    positions = lengths - 1
    mine = Rope(dim=DIM, theta=THETA, scaling=scaling).angles(jnp.asarray(positions), jnp.asarray(lengths))
    wanted = np.stack([p * defined("dynamic", max(n, TRAINED)) for p, n in zip(positions, lengths, strict=True)])
    error = np.abs(np.asarray(mine.cos) - np.cos(wanted)).max(axis=1)
    assert (error <= 2e-6 + 1e-10 * positions).all()


def test_a_row_in_bfloat16_is_turned_as_exactly_as_its_dtype_allows():
    x = np.random.default_rng(0).normal(size=(3, 2, DIM))
    x = jnp.asarray(x, jnp.bfloat16)
    positions = np.array([131071, 1048575, 1048574])
    turned = rotate(x, Rope(dim=DIM, theta=THETA).angles(jnp.asarray(positions)))
    spin = np.exp(1j * positions[:, None] * defined("default", 0)[None])[:, None, :]
    pair = np.asarray(x, np.float64)
    pair = (pair[..., : DIM // 2] + 1j * pair[..., DIM // 2 :]) * spin
    wanted = np.concatenate([pair.real, pair.imag], axis=-1)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(turned, np.float64), wanted, rtol=2.0**-8, atol=2e-6)  # one rounding


def test_phases_of_any_frequency_and_of_negative_positions():
    positions = np.array([-1048575, -7, 0, 1, 2**23 + 1])
    frequencies = np.array([3.0, 1.0, 0.8660254037844386, 1e-3, 1e-9, 0.0])
    angle = positions[:, None] * frequencies[None]
    mine = np.asarray(phases(jnp.asarray(positions), frequencies), np.float64)
    assert np.abs(mine).max() <= np.pi + 1e-6
    np.testing.assert_allclose(np.exp(1j * mine), np.exp(1j * angle), atol=4e-7)
