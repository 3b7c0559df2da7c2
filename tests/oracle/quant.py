"""Low-precision storage from the bit definitions: fp8 e4m3fn, e5m2 and e4m3fnuz, and int8.

    stored = round(real / scale)        real = stored * scale

fp8 rounds to the nearest value (ties to the even code) and saturates at the largest finite one; int8 rounds
half away from zero and clips to +-127. No dtype library is used: the 256 codes are spelled out.
"""

import numpy as np

TINY_SCALE = 1e-6
FORMATS = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e5m2": (5, 2, 15),
    "float8_e4m3fnuz": (4, 3, 8),
}  # exponent bits, mantissa bits, bias
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "float8_e4m3fnuz": 240.0, "int8": 127.0}


def decode_byte(code, name):
    """The number of one fp8 code: (-1)^s * 1.m * 2^(e - bias), or 0.m * 2^(1 - bias) when e is 0."""
    exponent_bits, mantissa_bits, bias = FORMATS[name]
    sign = -1.0 if code >> 7 else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if name == "float8_e4m3fn" and exponent == 15 and mantissa == 7:
        return np.nan
    if name == "float8_e4m3fnuz" and code == 0x80:
        return np.nan
    if name == "float8_e5m2" and exponent == 31:
        return sign * np.inf if mantissa == 0 else np.nan
    if exponent == 0:
        return sign * mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def table(name):
    """All finite non-negative values, ascending; the index is the code."""
    values = np.array([decode_byte(code, name) for code in range(128)])
    return values[np.isfinite(values)]


def round_fp8(x, name):
    """The nearest representable value to each number; ties to the even code; saturating; NaN stays NaN."""
    x, values = np.asarray(x, np.float64), table(name)
    size = np.minimum(np.abs(x), values[-1])
    above = np.searchsorted(values, np.nan_to_num(size)).clip(1, len(values) - 1)
    below = above - 1
    to_below, to_above = np.nan_to_num(size) - values[below], values[above] - np.nan_to_num(size)
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.where(np.isnan(x), np.nan, np.copysign(np.where(up, values[above], values[below]), x))


def round_int8(x):
    """Round half away from zero, then clip to +-127."""
    x = np.asarray(x, np.float64)
    return np.clip(np.copysign(np.floor(np.abs(x) + 0.5), x), -127, 127)


def round_to(x, name):
    """`round_fp8` or `round_int8` by the name of the storage type."""
    return round_int8(x) if name == "int8" else round_fp8(x, name)


def scale_of(x, name, per):
    """The scale of real x [..., heads, dim]: one number, one a head, or one a token and head."""
    axes = {
        "per_tensor": None,
        "per_head": tuple(a for a in range(x.ndim) if a != x.ndim - 2),
        "per_token_head": -1,
    }
    return np.maximum(np.abs(np.asarray(x, np.float64)).max(axis=axes[per]) / LARGEST[name], TINY_SCALE)


def spread(scale, per):
    """A scale of `scale_of` shaped so that it multiplies [..., heads, dim]."""
    scale = np.asarray(scale, np.float64)
    return scale[..., None] if per in ("per_head", "per_token_head") else scale


def round_trip(x, name, per, scale=None):
    """What comes back from storage: round(x / scale) * scale."""
    scale = spread(scale_of(x, name, per) if scale is None else scale, per)
    return round_to(np.asarray(x, np.float64) / scale, name) * scale


def is_nearest(stored, wanted, name, slack=1e-5):
    """True where `stored` is a value nearest to `wanted`, up to a tie decided by float32 noise."""
    best = np.abs(round_to(wanted, name) - np.clip(wanted, -LARGEST[name], LARGEST[name]))
    return np.abs(stored - np.clip(wanted, -LARGEST[name], LARGEST[name])) <= best + slack * np.abs(wanted) + 1e-12
