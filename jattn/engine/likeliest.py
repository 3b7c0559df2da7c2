"""The likeliest tokens of each row: lax.top_k, without the sort of the vocabulary that XLA makes of it on a GPU."""

import functools

import jax
import jax.numpy as jnp

from jattn.engine.sampling_floor import ordered_bits

PARTS = 16, 32
"""The sizes of parts: of neighbouring numbers of a row, then of neighbouring maxima of these parts."""


def likeliest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of f32[R vocab], largest first, and their tokens i32, of equal ones the first: lax.top_k.

    On a GPU -0 equals 0, as in an argmax; lax.top_k takes 0 first.
    """
    top_k = lambda x: tuple(jax.lax.top_k(x, count))
    values, tokens = jax.lax.platform_dependent(x, cuda=functools.partial(_by_parts, count), default=top_k)
    return values, tokens


def _by_parts(count: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`likeliest` from the maxima of parts of a row.

    The `count` largest numbers are in the `count` parts with the largest maxima (of equal maxima the first): the maxima
    of these parts precede every number of another part. So the row is read once, and at each level a few hundred
    numbers are compared with each other.
    """
    keys = ordered_bits(x)
    levels = [jnp.pad(keys, ((0, 0), (0, -keys.shape[1] % (PARTS[0] * PARTS[1]))))]  # 0: below every number
    for part in PARTS:
        levels.append(_divided(levels[-1], part).max(axis=-1))
    places = jnp.broadcast_to(jnp.arange(levels[-1].shape[1], dtype=jnp.int32)[None], levels[-1].shape)
    chosen = _largest(count, levels[-1], places)
    for keys, part in zip(levels[-2::-1], PARTS[::-1], strict=True):
        places = chosen[:, :, None] * part + jnp.arange(part, dtype=jnp.int32)[None, None]
        inside = jnp.take_along_axis(_divided(keys, part), chosen[:, :, None], axis=1)
        chosen = _largest(count, inside.reshape(len(x), -1), places.reshape(len(x), -1))
    return jnp.take_along_axis(x, chosen, axis=-1), chosen


def _divided(keys: jax.Array, part: int) -> jax.Array:
    return keys.reshape(len(keys), -1, part)


def _largest(count: int, keys: jax.Array, places: jax.Array) -> jax.Array:
    """The places i32[R min(count, n)] of the largest of keys [R n]; of equal keys the first places."""
    own, others = (slice(None), slice(None), None), (slice(None), None)
    is_before = (keys[others] > keys[own]) | ((keys[others] == keys[own]) & (places[others] < places[own]))
    rank = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
    ranks = jnp.arange(min(count, keys.shape[1]), dtype=jnp.int32)[None, :, None]
    return jnp.sum(jnp.where(rank[others] == ranks, places[others], 0), axis=-1, dtype=jnp.int32)
