"""Rotary position embeddings: Rope, a static description that computes the angles, and rotate, which applies them."""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.errors.arguments import (
    boolean,
    check_fields,
    integer,
    integers,
    is_float,
    kind,
    number,
    optional,
    reals,
    takes,
)
from jattn.nn.rope_scaling import MAX_THETA, RopeScaling
from jattn.types import pytree, static


@pytree
class Angles:
    """cos and sin of every token, computed once per step for all layers with the same Rope."""

    cos: jax.Array  # f32[T, dim // 2]
    sin: jax.Array
    interleaved: bool = static()


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
        factor = self.scaling.attention_factor
        return Angles(cos=jnp.cos(angle) * factor, sin=jnp.sin(angle) * factor, interleaved=self.interleaved)


def _floats(name: str, x):
    x = jnp.asarray(reals(3)(name, x))
    if not is_float(x.dtype):
        raise ValueError(f"{name}.dtype={x.dtype} must be a float type")
    return x


@takes(x=_floats, angles=kind(Angles))
def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """x [T, heads, D] with the first dimensions of each head rotated; computed in float32, returned in x's dtype."""
    cos, sin = angles.cos[:, None, :], angles.sin[:, None, :]
    dim = 2 * cos.shape[-1]
    if dim > x.shape[-1]:
        raise ValueError(f"rope angles rotate {dim} dimensions, but a head of x has {x.shape[-1]}")
    if x.shape[0] != cos.shape[0]:
        raise ValueError(f"{x.shape=} must have the T={cos.shape[0]} rows of angles")
    rotated, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    if angles.interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    else:
        a, b = jnp.split(rotated, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
