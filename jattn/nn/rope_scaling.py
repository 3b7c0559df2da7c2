"""Rope scalings: methods that change rotary frequencies for contexts longer than the trained one. One class per method.

`frequencies` is the definition of a method, on the host in float64. `angles` computes a step's angles from it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import boolean, check_fields, integer, number, optional, sequence_of
from jattn.nn.phases import phases, wrapped

FACTORS = (1e-6, 1e6)
"""Limits of a factor, divisor or number of turns. Published values lie between 0.5 and 128. Within these limits every
frequency is finite and not zero, and float32 angles keep their precision."""
MAX_THETA = 1e18
"""Upper limit of theta. Published values reach 1e9."""

_factor = number(least=FACTORS[0], most=FACTORS[1])
_length = integer(1)


def base_frequencies(dim: int, theta: float) -> np.ndarray:
    """f64[dim/2]: theta ** (-2 i / dim)."""
    return float(theta) ** (-np.arange(0, dim, 2) / dim)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """No scaling. Subclasses override `frequencies`."""

    @property
    def needs_lengths(self) -> bool:
        """True if the frequencies depend on the final length of a token's request."""
        return False

    @property
    def attention_factor(self) -> float:
        """Multiplies cos and sin, so it multiplies attention logits by its square."""
        return 1.0

    def magnitudes(self, lengths: jax.Array | None) -> "float | jax.Array":
        """What multiplies cos and sin: `attention_factor`, or f32[T, 1] if it depends on the final lengths i32[T]."""
        return self.attention_factor

    def variant(self, length: int) -> int:
        """Final lengths with equal variants give equal angles, so such requests can share cached keys."""
        return 0

    def frequencies(self, dim: int, theta: float, length: int = 0) -> np.ndarray:
        """f64[dim/2], in radians per position, for a request with the final length `length`."""
        return base_frequencies(dim, theta)

    def angles(self, dim: int, theta: float, positions: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        """f32[T, dim/2] of positions i32[T]; lengths i32[T]: the final length of each token's request."""
        return phases(positions, self.frequencies(dim, theta))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRopeScaling(RopeScaling):
    """Positions divided by `factor`."""

    factor: float

    def __post_init__(self):
        check_fields(self, factor=_factor)

    def frequencies(self, dim, theta, length=0):
        return base_frequencies(dim, theta) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalRopeScaling(RopeScaling):
    """Only the first `rotated` pairs are rotated, by the frequencies that they have among all; then as `linear`."""

    rotated: int
    factor: float = 1.0

    def __post_init__(self):
        check_fields(self, rotated=integer(0), factor=_factor)

    def frequencies(self, dim, theta, length=0):
        return np.where(np.arange(dim // 2) < self.rotated, base_frequencies(dim, theta) / self.factor, 0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicNTKRopeScaling(RopeScaling):
    """A larger theta for requests longer than the trained length; shorter ones are exact.

    theta * s ** (dim / (dim - 2))    s = factor * length / trained_length - (factor - 1)
    """

    factor: float
    trained_length: int

    def __post_init__(self):
        check_fields(self, factor=_factor, trained_length=_length)

    @property
    def needs_lengths(self) -> bool:
        return True

    def variant(self, length):
        return max(length, self.trained_length)

    def frequencies(self, dim, theta, length=0):
        return base_frequencies(dim, theta) * self._stretch(length) ** -_exponents(dim)

    def _stretch(self, length: int) -> float:
        """s, in a form without cancellation: exactly 1 up to the trained length."""
        return 1 + self.factor * (max(length - self.trained_length, 0) / self.trained_length)

    def angles(self, dim, theta, positions, lengths=None):
        """The exact angle at the next lower tabulated length, minus a small float32 correction for the difference."""
        nodes = self._nodes()
        lengths = jnp.asarray(lengths, jnp.int32)
        at = jnp.maximum(jnp.searchsorted(jnp.asarray(nodes, jnp.int32), lengths, side="right") - 1, 0)
        near = np.stack([self.frequencies(dim, theta, node) for node in nodes])
        growth = np.asarray([self.factor / self.trained_length / self._stretch(node) for node in nodes], np.float32)
        beyond = jnp.maximum(lengths - jnp.asarray(nodes, jnp.int32)[at], 0).astype(jnp.float32)
        log_ratio = jnp.log1p(beyond * jnp.asarray(growth)[at])  # log(stretch at this length / stretch at its node)
        less = -jnp.expm1(-log_ratio[:, None] * jnp.asarray(_exponents(dim), jnp.float32)[None, :])
        rest = positions.astype(jnp.float32)[:, None] * jnp.asarray(near, jnp.float32)[at] * less
        return wrapped(phases(positions, near, at) - rest)

    def _nodes(self) -> list[int]:
        """Tabulated lengths, up to 2**24. The stretch grows by 1/64 from one to the next, the length by at least 1."""
        nodes = [self.trained_length]
        while nodes[-1] < 2**24 and len(nodes) < 2048:
            step = self._stretch(nodes[-1]) * self.trained_length / self.factor / 64
            nodes.append(min(nodes[-1] + max(int(step), 1), 2**24))
        return nodes


def _exponents(dim: int) -> np.ndarray:
    """f64[dim/2]: frequency i is multiplied by stretch ** -exponent[i]."""
    return np.arange(0, dim, 2) / max(dim - 2, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling(RopeScaling):
    """Frequencies with long wavelengths are divided by `factor`, short ones are kept, with a linear ramp between.

    Equal factors (Llama 4 Scout) leave no ramp.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_length: int

    def __post_init__(self):
        factors = dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _factor)
        check_fields(self, **factors, trained_length=_length)
        if self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be at most high_freq_factor={self.high_freq_factor}"
            )

    def frequencies(self, dim, theta, length=0):
        base = base_frequencies(dim, theta)
        turns = self.trained_length * base / (2 * math.pi)  # within the trained length
        ramp = self.high_freq_factor - self.low_freq_factor
        smooth = np.clip((turns - self.low_freq_factor) / ramp, 0.0, 1.0) if ramp else turns >= self.low_freq_factor
        return (1 - smooth) * base / self.factor + smooth * base


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRopeScaling(RopeScaling):
    """NTK by parts: frequencies with fewer than `beta_slow` turns in the trained length are divided by `factor`, those
    with more than `beta_fast` turns are kept, with a linear ramp between. cos and sin are multiplied by `magnitude`."""

    factor: float
    trained_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round both ends of the ramp to integer dimensions
    magnitude: float | None = None  # None: 0.1 ln(factor) + 1

    def __post_init__(self):
        factors = dict.fromkeys(("factor", "beta_fast", "beta_slow"), _factor)
        check_fields(self, **factors, trained_length=_length, truncate=boolean, magnitude=optional(_factor))

    @property
    def attention_factor(self) -> float:
        return yarn_magnitude(self.factor) if self.magnitude is None else self.magnitude

    def frequencies(self, dim, theta, length=0):
        low, high = (self._dimension(turns, dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (np.arange(dim // 2) - low) / (high - low or 0.001)  # negative if it was trained on few positions
        keep = 1 - np.clip(ramp, 0, 1)
        base = base_frequencies(dim, theta)
        return base / self.factor * (1 - keep) + base * keep

    def _dimension(self, turns: float, dim: int, theta: float) -> float:
        """The (fractional) dimension that makes this number of turns in the trained length."""
        return dim * math.log(self.trained_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """0.1 * weight * ln(factor) + 1; 1 for factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling(RopeScaling):
    """One divisor per frequency: `short` for requests up to the trained length, `long` for longer ones.

    cos and sin are multiplied by `magnitude`, or by `long_magnitude` for longer requests.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_length: int
    magnitude: float = 1.0
    long_magnitude: float | None = None  # None: magnitude

    def __post_init__(self):
        divisors = dict.fromkeys(("short", "long"), sequence_of(_factor))
        check_fields(self, **divisors, trained_length=_length, magnitude=_factor, long_magnitude=optional(_factor))

    @property
    def needs_lengths(self) -> bool:
        return True

    @property
    def attention_factor(self) -> float:
        return self.magnitude

    def magnitudes(self, lengths):
        if self.long_magnitude is None or self.long_magnitude == self.magnitude:
            return self.magnitude
        is_long = jnp.asarray(lengths) > self.trained_length
        return jnp.where(is_long, jnp.float32(self.long_magnitude), jnp.float32(self.magnitude))[:, None]

    def variant(self, length):
        return int(length > self.trained_length)

    def frequencies(self, dim, theta, length=0):
        for name in ("short", "long"):
            if len(getattr(self, name)) != dim // 2:
                raise ValueError(
                    f"longrope {name} has {len(getattr(self, name))} divisors; the rope dim={dim} needs {dim // 2}"
                )
        return base_frequencies(dim, theta) / np.asarray(self.long if self.variant(length) else self.short, float)

    def angles(self, dim, theta, positions, lengths=None):
        both = np.stack([self.frequencies(dim, theta, length) for length in (0, self.trained_length + 1)])
        return phases(positions, both, (jnp.asarray(lengths) > self.trained_length).astype(jnp.int32))
