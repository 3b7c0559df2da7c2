"""Rotary embeddings: rotation against its definition by complex numbers, each scaling against its formula."""

import dataclasses

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
from tests.nn import dense

LENGTH, HEADS, D, DIM, THETA = 9, 2, 10, 6, 100.0
X = np.random.default_rng(0).normal(size=(LENGTH, HEADS, D)).astype(np.float32)
BASE = THETA ** (-np.arange(0, DIM, 2) / DIM)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_multiplication_by_a_unit_complex_number(interleaved):
    rope = Rope(dim=DIM, theta=THETA, interleaved=interleaved)
    mine = rotate(jnp.asarray(X), rope.angles(jnp.arange(LENGTH)))
    wanted = dense.turn(X.astype(np.float64), THETA, DIM, interleaved)
    np.testing.assert_allclose(mine, wanted, atol=2e-6)
    np.testing.assert_array_equal(mine[..., DIM:], X[..., DIM:])  # partial rotation leaves the rest alone


def test_dot_products_depend_on_the_distance_only():
    rope = Rope(dim=D, theta=THETA)
    near, far = (rotate(jnp.asarray(X), rope.angles(jnp.arange(LENGTH) + shift)) for shift in (0, 50))
    dots = [np.einsum("ihd,jhd->hij", x, x) for x in (near, far)]
    np.testing.assert_allclose(*dots, atol=1e-4)


def frequencies(scaling: RopeScaling, length: int = 0) -> np.ndarray:
    return scaling.frequencies(DIM, THETA, length)


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(frequencies(LinearRopeScaling(factor=4.0)), BASE / 4, rtol=1e-6)


def test_dynamic_ntk_grows_theta_past_the_trained_length_only():
    scaling = DynamicNTKRopeScaling(factor=2.0, trained_length=8)
    short, long = frequencies(scaling, 5), frequencies(scaling, 24)
    assert [scaling.variant(n) for n in (5, 8, 9, 24)] == [8, 8, 9, 24]
    theta = THETA * (2.0 * 24 / 8 - 1) ** (DIM / (DIM - 2))
    np.testing.assert_allclose(short, BASE, rtol=1e-6)
    np.testing.assert_allclose(long, theta ** (-np.arange(0, DIM, 2) / DIM), rtol=1e-5)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    scaling = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, trained_length=64)
    wave = 2 * np.pi / BASE
    turns = 64 / wave
    assert (turns > 4).any() and (turns < 1).any() and ((turns > 1) & (turns < 4)).any(), "the three cases are there"
    smooth = (turns - 1) / 3
    blend = (1 - smooth) * BASE / 8 + smooth * BASE
    wanted = np.where(turns > 4, BASE, np.where(turns < 1, BASE / 8, blend))
    np.testing.assert_allclose(frequencies(scaling), wanted, rtol=1e-6)


def test_llama3_with_equal_factors_has_no_ramp():
    """Llama 4 Scout has 1 and 1."""
    scaling = Llama3RopeScaling(factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, trained_length=64)
    turns = 64 * BASE / (2 * np.pi)
    assert (turns > 1).any() and (turns < 1).any()
    np.testing.assert_allclose(frequencies(scaling), np.where(turns < 1, BASE / 16, BASE), rtol=1e-6)


def test_yarn_ramps_between_its_two_numbers_of_turns():
    scaling = YarnRopeScaling(factor=4.0, trained_length=64, beta_fast=4.0, beta_slow=1.0, truncate=False)
    at = lambda turns: DIM * np.log(64 / (turns * 2 * np.pi)) / (2 * np.log(THETA))
    keep = 1 - np.clip((np.arange(DIM // 2) - at(4.0)) / (at(1.0) - at(4.0)), 0, 1)
    np.testing.assert_allclose(frequencies(scaling), BASE / 4 * (1 - keep) + BASE * keep, rtol=1e-6)
    whole = YarnRopeScaling(factor=4.0, trained_length=64, beta_fast=4.0, beta_slow=1.0)
    assert not np.allclose(frequencies(whole), frequencies(scaling))
    assert np.isclose(scaling.attention_factor, 0.1 * np.log(4.0) + 1)


def test_longrope_takes_the_long_divisors_past_the_trained_length():
    scaling = LongRopeScaling(short=(1.0, 2.0, 3.0), long=(4.0, 5.0, 6.0), trained_length=8, magnitude=1.5)
    short, long = frequencies(scaling, 8), frequencies(scaling, 9)
    assert [scaling.variant(n) for n in (5, 8, 9, 24)] == [0, 0, 1, 1]
    np.testing.assert_allclose(short, BASE / [1, 2, 3], rtol=1e-6)
    np.testing.assert_allclose(long, BASE / [4, 5, 6], rtol=1e-6)
    turned = Rope(dim=DIM, theta=THETA, scaling=scaling).angles(jnp.zeros(2, jnp.int32), jnp.asarray([8, 9]))
    np.testing.assert_allclose(turned.cos, 1.5)  # the magnitude warms q and k alike
    two = dataclasses.replace(scaling, long_magnitude=2.5)
    turned = Rope(dim=DIM, theta=THETA, scaling=two).angles(jnp.zeros(2, jnp.int32), jnp.asarray([8, 9]))
    np.testing.assert_allclose(turned.cos, [[1.5] * 3, [2.5] * 3])


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Rope(dim=5),
        lambda: rotate(jnp.asarray(X), Rope(dim=D + 2).angles(jnp.arange(LENGTH))),
        lambda: Rope(dim=DIM, scaling=DynamicNTKRopeScaling(factor=2.0, trained_length=8)).angles(jnp.arange(LENGTH)),
        lambda: LongRopeScaling(short=(1.0,), long=(1.0, 1.0, 1.0), trained_length=8).frequencies(DIM, THETA),
    ],
)
def test_what_cannot_mean_anything_is_refused(bad):
    with pytest.raises(ValueError, match="rope|turns|length"):
        bad()


NUMBERS = {
    LinearRopeScaling: dict(factor=2.0),
    DynamicNTKRopeScaling: dict(factor=2.0, trained_length=8),
    Llama3RopeScaling: dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, trained_length=64),
    YarnRopeScaling: dict(factor=4.0, trained_length=64, beta_fast=32.0, beta_slow=1.0, magnitude=1.0),
    LongRopeScaling: dict(
        short=(1.0, 2.0, 3.0), long=(4.0, 5.0, 6.0), trained_length=8, magnitude=1.5, long_magnitude=2.0
    ),
    Rope: dict(dim=DIM, theta=THETA),
}
OPTIONAL = ((YarnRopeScaling, "magnitude"), (LongRopeScaling, "long_magnitude"))
BAD_NUMBERS = (0.0, -1.0, 1e-320, 1e-30, 1e30, np.nan, np.inf, "2", None, True)


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, fields in NUMBERS.items() for field in fields])
def test_a_number_that_no_frequency_can_be_made_of_is_refused_where_it_is_given(kind, field):
    kind(**NUMBERS[kind])
    for bad in BAD_NUMBERS:
        if bad is None and (kind, field) in OPTIONAL:
            continue
        value = (1.0, bad, 3.0) if field in ("short", "long") else bad
        with pytest.raises(ValueError, match=field):
            kind(**NUMBERS[kind] | {field: value})
    with pytest.raises(ValueError, match="must be at most"):
        Llama3RopeScaling(**NUMBERS[Llama3RopeScaling] | dict(low_freq_factor=4.5))


@pytest.mark.parametrize("kind", [kind for kind in NUMBERS if kind is not Rope])
@pytest.mark.parametrize("extreme", [1e-6, 1e6])
@pytest.mark.parametrize(("theta", "trained"), [(1 + 1e-15, 1), (1e18, 2**31 - 1)])
def test_every_number_that_is_taken_gives_finite_turns(kind, extreme, theta, trained):
    """With all fields at their limits."""
    fields = {name: extreme for name in NUMBERS[kind]} | dict(trained_length=trained)
    fields |= {name: (extreme,) * 3 for name in ("short", "long")}
    fields |= dict(low_freq_factor=extreme / 2, factor=extreme) if extreme > 1 else dict(high_freq_factor=1e6)
    scaling = kind(**{name: fields[name] for name in NUMBERS[kind]})
    at, lengths = jnp.asarray([0, 1, 2**24 - 1]), jnp.asarray([1, 2, 2**24])
    turned = Rope(dim=DIM, theta=theta, scaling=scaling).angles(at, lengths)
    assert np.isfinite(turned.cos).all() and np.isfinite(turned.sin).all()
    for length in (1, 2**24):
        frequencies = scaling.frequencies(DIM, theta, length)
        assert np.isfinite(frequencies).all() and (frequencies > 0).all()


def test_the_turn_is_made_in_float32_and_comes_back_in_the_rows_dtype():
    rope = Rope(dim=D, theta=THETA)
    at = jnp.full(LENGTH, 4095)
    exact = rotate(jnp.asarray(X), rope.angles(at))
    half = rotate(jnp.asarray(X, jnp.bfloat16), rope.angles(at))
    assert half.dtype == jnp.bfloat16
    rounded = jax.lax.reduce_precision(exact, 8, 7)
    assert np.abs(np.asarray(half, np.float32) - rounded).max() < 0.04  # one rounding of the input, one of the output
