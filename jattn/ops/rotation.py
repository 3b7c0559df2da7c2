"""The rotation of queries and keys by rotary angles: Angles and rotate. jattn.nn.Rope computes the angles."""

import jax
import jax.numpy as jnp

from jattn.errors.arguments import is_float, kind, reals, takes
from jattn.types import pytree, static


@pytree
class Angles:
    """cos and sin of every token, computed once per step for all layers with the same Rope."""

    cos: jax.Array  # f32[T, dim // 2]
    sin: jax.Array
    interleaved: bool = static()

    @property
    def dim(self) -> int:
        """The dimensions of a head that are rotated."""
        return 2 * self.cos.shape[-1]


def check_angles(angles: Angles, *rows: jax.Array) -> None:
    """ValueError if the angles do not fit an array [T, heads, D] of `rows`."""
    for x in rows:
        if angles.dim > x.shape[-1]:
            raise ValueError(f"rope angles rotate {angles.dim} dimensions, but a head of x has {x.shape[-1]}")
        if x.shape[0] != angles.cos.shape[0]:
            raise ValueError(f"{x.shape=} must have the T={angles.cos.shape[0]} rows of angles")


def _floats(name: str, x):
    x = jnp.asarray(reals(3)(name, x))
    if not is_float(x.dtype):
        raise ValueError(f"{name}.dtype={x.dtype} must be a float type")
    return x


@takes(x=_floats, angles=kind(Angles))
def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """x [T, heads, D] with the first dimensions of each head rotated; computed in float32, returned in x's dtype."""
    check_angles(angles, x)
    cos, sin = angles.cos[:, None, :], angles.sin[:, None, :]
    dim = angles.dim
    rotated, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    if angles.interleaved:
        a, b = rotated[..., 0::2], rotated[..., 1::2]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(rotated.shape)
    else:
        a, b = jnp.split(rotated, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)
