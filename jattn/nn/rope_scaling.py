"""How rotary frequencies are stretched for contexts longer than the trained one; one short class a method."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


def base_frequencies(dim: int, theta: float) -> np.ndarray:
    """f32[dim/2]: theta ** (-2 i / dim)."""
    return (1.0 / np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / dim)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """No stretching; the others replace `frequencies`."""

    @property
    def needs_lengths(self) -> bool:
        """Do the frequencies depend on the length of a token's request?"""
        return False

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    def frequencies(self, dim: int, theta: float, lengths: jax.Array | None = None):
        """f32[dim/2], or f32[T, dim/2] where they depend on lengths i32[T]."""
        return base_frequencies(dim, theta)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear(Scaling):
    """Positions divided by `factor`."""

    factor: float

    def frequencies(self, dim, theta, lengths=None):
        return base_frequencies(dim, theta) / np.float32(self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicNTK(Scaling):
    """A larger theta for requests longer than the trained length; shorter ones are exact.

    Past that length, as in every implementation, a cached key keeps the turn it was written with: numbers there
    depend on how a prompt is cut into chunks.
    """

    factor: float
    trained_length: int

    @property
    def needs_lengths(self) -> bool:
        return True

    def frequencies(self, dim, theta, lengths=None):
        length = jnp.maximum(jnp.asarray(lengths), self.trained_length).astype(jnp.float32)
        stretch = self.factor * length / self.trained_length - (self.factor - 1)
        base = theta * stretch ** (dim / (dim - 2))
        return 1.0 / base[:, None] ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)[None, :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3(Scaling):
    """Long wavelengths divided by `factor`, short ones kept, a smooth passage between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_length: int

    def frequencies(self, dim, theta, lengths=None):
        base = base_frequencies(dim, theta)
        turns = self.trained_length * base / (2 * math.pi)  # within the trained length
        smooth = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return ((1 - smooth) * base / self.factor + smooth * base).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn(Scaling):
    """NTK by parts: dimensions with under `beta_slow` turns in the trained length are divided by `factor`, those
    with over `beta_fast` kept, a ramp between; logits are warmed by `magnitude` squared."""

    factor: float
    trained_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # round the ends of the ramp to whole dimensions
    magnitude: float | None = None  # None: 0.1 ln(factor) + 1

    @property
    def attention_factor(self) -> float:
        return yarn_magnitude(self.factor) if self.magnitude is None else self.magnitude

    def frequencies(self, dim, theta, lengths=None):
        low, high = (self._dimension(turns, dim, theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (np.arange(dim // 2) - low) / max(high - low, 0.001)
        keep = 1 - np.clip(ramp, 0, 1)
        base = base_frequencies(dim, theta)
        return (base / self.factor * (1 - keep) + base * keep).astype(np.float32)

    def _dimension(self, turns: float, dim: int, theta: float) -> float:
        """The (fractional) dimension that makes this many turns in the trained length."""
        return dim * math.log(self.trained_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1, and 1 where nothing is stretched."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope(Scaling):
    """A divisor for every dimension: `short` up to the trained length, `long` for requests past it."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    trained_length: int
    magnitude: float = 1.0

    @property
    def needs_lengths(self) -> bool:
        return True

    @property
    def attention_factor(self) -> float:
        return self.magnitude

    def frequencies(self, dim, theta, lengths=None):
        for name in ("short", "long"):
            if len(getattr(self, name)) != dim // 2:
                raise ValueError(f"longrope {name} has {len(getattr(self, name))} divisors but rope turns {dim // 2}")
        base = base_frequencies(dim, theta)
        short, long = (base / np.asarray(divisors, np.float32) for divisors in (self.short, self.long))
        return jnp.where((jnp.asarray(lengths) > self.trained_length)[:, None], long[None], short[None])
