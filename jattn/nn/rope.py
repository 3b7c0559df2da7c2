"""Rotary position embeddings: Rope, a static description that computes the angles; `rotate` applies them."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.errors.arguments import (
    boolean,
    check_fields,
    integer,
    integers,
    kind,
    number,
    optional,
    takes,
)
from jattn.nn.rope_scaling import MAX_THETA, RopeScaling
from jattn.ops.rotation import Angles, rotate

__all__ = ["Angles", "Rope", "rotate"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotates the first `dim` dimensions of a head in pairs, by position * theta ** (-2 i / dim), i = 0 .. dim/2 - 1.

    interleaved: pairs are (2i, 2i+1); otherwise (i, i + dim/2). dim < head_dim: partial rotation.
    """

    dim: int
    theta: float = 10000.0
    scaling: RopeScaling = RopeScaling()
    interleaved: bool = False

    def __post_init__(self):
        check_fields(
            self, dim=integer(), theta=number(above=1, most=MAX_THETA), scaling=kind(RopeScaling), interleaved=boolean
        )
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"rope dim={self.dim!r} must be even and at least 2: dimensions are rotated in pairs")

    @takes(positions=integers(1), lengths=optional(integers(1)))
    def angles(self, positions: jax.Array, lengths: jax.Array | None = None) -> Angles:
        """Of positions i32[T]; lengths i32[T]: the final length of each token's request, if scaling.needs_lengths."""
        if self.scaling.needs_lengths and lengths is None:
            raise ValueError(f"{type(self.scaling).__name__} depends on each request's final length: pass lengths=")
        if lengths is not None and lengths.shape != positions.shape:
            raise ValueError(f"lengths.shape={lengths.shape} must be that of positions, {positions.shape}")
        angle = self.scaling.angles(self.dim, self.theta, positions, lengths)
        factor = self.scaling.magnitudes(lengths)
        return Angles(cos=jnp.cos(angle) * factor, sin=jnp.sin(angle) * factor, interleaved=self.interleaved)
