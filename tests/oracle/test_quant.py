"""Storage formats against numbers from their published tables."""

import numpy as np
import pytest

from tests.oracle import quant


@pytest.mark.parametrize(
    ("name", "code", "value"),
    [
        ("float8_e4m3fn", 0b0_1111_110, 448.0),
        ("float8_e4m3fn", 0b0_0000_001, 2.0**-9),
        ("float8_e4m3fn", 0b0_0001_000, 2.0**-6),
        ("float8_e4m3fn", 0b1_0111_000, -1.0),
        ("float8_e5m2", 0b0_11110_11, 57344.0),
        ("float8_e5m2", 0b0_00000_01, 2.0**-16),
        ("float8_e5m2", 0b0_00001_00, 2.0**-14),
        ("float8_e5m2", 0b1_11111_00, -np.inf),
        ("float8_e4m3fnuz", 0b0_1111_111, 240.0),
        ("float8_e4m3fnuz", 0b0_0000_001, 2.0**-10),
        ("float8_e4m3fnuz", 0b1_0000_001, -(2.0**-10)),
    ],
)
def test_codes_stand_for_these_numbers(name, code, value):
    assert quant.decode_byte(code, name) == value


@pytest.mark.parametrize("name", list(quant.FORMATS))
def test_representable_numbers_are_fixed_points_and_midpoints_go_to_even(name):
    values = quant.table(name)
    np.testing.assert_array_equal(quant.round_fp8(values, name), values)
    np.testing.assert_array_equal(quant.round_fp8(-values, name), -values)
    middle = (values[1:] + values[:-1]) / 2
    even = np.where(np.arange(len(middle)) % 2 == 0, values[:-1], values[1:])
    np.testing.assert_array_equal(quant.round_fp8(middle, name), even)
    assert quant.round_fp8(1e9, name) == quant.LARGEST[name] and quant.round_fp8(-np.inf, name) == -quant.LARGEST[name]
    assert np.isnan(quant.round_fp8(np.nan, name))


def test_int8_rounds_half_away_from_zero_and_clips():
    np.testing.assert_array_equal(
        quant.round_int8([0.5, -0.5, 1.4, 2.5, -2.5, 126.6, 500, -500]), [1, -1, 1, 3, -3, 127, 127, -127]
    )


def test_scales_are_taken_over_the_right_axes():
    x = np.array([[[1.0, -2.0], [3.0, 4.0]], [[0.0, 0.0], [-8.0, 1.0]]])  # [tokens, heads, dim]
    np.testing.assert_allclose(quant.scale_of(x, "int8", "per_tensor") * 127, 8)
    np.testing.assert_allclose(quant.scale_of(x, "int8", "per_head") * 127, [2, 8])
    np.testing.assert_allclose(quant.scale_of(x, "int8", "per_token_head"), [[2 / 127, 4 / 127], [1e-6, 8 / 127]])


@pytest.mark.parametrize("name", list(quant.LARGEST))
@pytest.mark.parametrize("per", ["per_tensor", "per_head", "per_token_head"])
def test_a_round_trip_loses_at_most_half_a_step(name, per):
    x = np.random.default_rng(0).normal(size=(50, 3, 16))
    error = np.abs(quant.round_trip(x, name, per) - x)
    scale = np.broadcast_to(quant.spread(quant.scale_of(x, name, per), per), x.shape)
    half = {
        "int8": 0.5 * scale,
        "float8_e4m3fn": np.abs(x) / 16 + scale * 2.0**-10,
        "float8_e5m2": np.abs(x) / 8 + scale * 2.0**-17,
        "float8_e4m3fnuz": np.abs(x) / 16 + scale * 2.0**-11,
    }[name]
    assert (error <= half * (1 + 1e-9)).all()
    assert quant.is_nearest(quant.round_to(x / scale, name), x / scale, name).all()
    assert not quant.is_nearest(-quant.round_to(x / scale, name), x / scale, name).all()
