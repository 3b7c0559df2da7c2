"""position * frequency modulo 2 pi, to float32 precision, at any position below 2**24.

A float32 product has an error of 0.004 radians at position 131071 and of 0.04 at 1048575, because frequency and product
are both rounded to 24 bits. Here a frequency is a fixed-point number in units of 2**-32 turns. The int32 product wraps,
which drops exactly the whole turns.

    frequency 1 rad = 683565275.58 units     position 131071: 131071 * 683565275 mod 2**32, + 131071 * 0.58
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

UNIT = 2 * math.pi / 2**32  # radians


def phases(positions: jax.Array, frequencies: np.ndarray, row: jax.Array | None = None) -> jax.Array:
    """f32[T, n] in [-pi, pi): positions i32[T] times frequencies f64[n], in radians per position.

    row i32[T]: the row of frequencies f64[rows, n] that each token uses. Positions may be negative; |position| < 2**24.
    """
    units = np.asarray(frequencies, np.float64) / UNIT % 2**32
    whole = np.floor(units)
    high = jnp.asarray(whole.astype(np.uint64).astype(np.uint32).view(np.int32))
    low = jnp.asarray(units - whole, jnp.float32)
    high, low = (x[None] if row is None else x[row] for x in (high, low))
    positions = jnp.asarray(positions, jnp.int32)[:, None]
    part = jnp.round(positions.astype(jnp.float32) * low).astype(jnp.int32)
    return (positions * high + part).astype(jnp.float32) * jnp.float32(UNIT)


def wrapped(angle: jax.Array) -> jax.Array:
    """The angle modulo 2 pi, in [-pi, pi]."""
    turn = jnp.float32(2 * math.pi)
    return angle - jnp.round(angle / turn) * turn
