"""How a number becomes a stored number: the dtypes of a KV cache, their scales, and bit-pattern storage.

    stored = round(real / scale),  real = stored * scale        (scale: per tensor, per head, or per token and head)

DTYPES is the one table of dtypes. A row added there, and its name in a backend's list of supported dtypes, is a new
cache dtype.

Storage is 'native' (the dtype itself) or 'bits' (an unsigned integer of the same width). Bits exist because XLA:CPU
rewrites a scatter or gather on bf16 and fp8 as a conversion of the whole operand to float32; an integer pool is updated
in place. Both hold the same numbers, bit for bit; the array's own dtype says which of the two it is.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


@jax.custom_jvp
def _round_half_away(x: jax.Array) -> jax.Array:
    """f32 integers: 0.5 becomes 1 and -0.5 becomes -1."""
    return jnp.trunc(x + jnp.copysign(jnp.float32(0.5), x))


@_round_half_away.defjvp
def _round_half_away_jvp(primals, tangents):
    raise NotImplementedError(
        "an int8 cache has no gradient: integers have no derivative; make it with dtype float32, bfloat16 or float16 "
        "to differentiate through a write"
    )


def _decode_bfloat16(bits: jax.Array) -> jax.Array:
    """bfloat16 is the upper half of a float32."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def _decode_e5m2(bits: jax.Array) -> jax.Array:
    """e5m2 is the upper byte of a float16."""
    half = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16) << 8, jnp.float16)
    return half.astype(jnp.float32)


def _decode_e4m3fn(bits: jax.Array) -> jax.Array:
    """Place exponent and mantissa into a float16 and rescale its bias: 2**(15-7) exactly, subnormals included.

    The one NaN pattern, S.1111.111, would decode to 480 and is put back. (Through float32 bits, the CPU would flush
    subnormals to zero.)
    """
    low = bits & 0x7F
    half = jax.lax.bitcast_convert_type(
        ((bits & 0x80).astype(jnp.uint16) << 8) | (low.astype(jnp.uint16) << 7), jnp.float16
    )
    return jnp.where(low == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0)


@dataclasses.dataclass(frozen=True)
class CacheDtype:
    """One dtype that a KV cache may have; every property of it that the library uses."""

    name: str  # of the JAX dtype
    largest: float | None = None  # largest magnitude that is stored, beyond which values saturate; None: not quantised
    bits_dtype: str | None = None  # the unsigned integer of 'bits' storage; None: stored as itself in both modes
    decode_bits: Callable[[jax.Array], jax.Array] | None = None  # bit patterns -> f32; None: XLA's own conversion
    round_f32: Callable[[jax.Array], jax.Array] | None = None  # f32 -> f32, before the cast; None: the cast rounds

    @property
    def is_quantised(self) -> bool:
        """Does it need scales?"""
        return self.largest is not None


DTYPES = {
    row.name: row
    for row in (
        CacheDtype("bfloat16", bits_dtype="uint16", decode_bits=_decode_bfloat16),
        CacheDtype("float16"),
        CacheDtype("float32"),
        CacheDtype("float8_e4m3fn", largest=448.0, bits_dtype="uint8", decode_bits=_decode_e4m3fn),
        CacheDtype("float8_e5m2", largest=57344.0, bits_dtype="uint8", decode_bits=_decode_e5m2),
        CacheDtype("int8", largest=127.0, round_f32=_round_half_away),
        CacheDtype("float8_e4m3fnuz", largest=240.0, bits_dtype="uint8"),  # AMD's: no infinity, no negative zero
    )
}
QUANTISED = tuple(name for name, row in DTYPES.items() if row.is_quantised)
FLOATS = tuple(name for name, row in DTYPES.items() if not row.is_quantised)

MIN_TOKEN_SCALE = 1e-6
"""Floor of a per-token-head scale: an all-zero row must not divide by zero."""


def storage_dtype(dtype: str, bits: bool) -> np.dtype:
    """The array dtype that a pool of `dtype` uses."""
    return jnp.dtype(DTYPES[dtype].bits_dtype or dtype) if bits else jnp.dtype(dtype)


def token_head_scale(x: jax.Array, dtype: str) -> jax.Array:
    """f32[..., 1] scale that maps the largest magnitude of each row of x[..., D] to the dtype's maximum."""
    peak = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True)
    largest = DTYPES[dtype].largest
    assert largest is not None, f"{dtype} has no scales"
    return jnp.maximum(peak / largest, MIN_TOKEN_SCALE)


def to_dtype(x: jax.Array, dtype: str, scale=None) -> jax.Array:
    """x / scale rounded to `dtype`, saturating: out-of-range magnitudes become the dtype's maximum, NaN stays NaN."""
    row = DTYPES[dtype]
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if row.round_f32 is not None:
        x = row.round_f32(x.astype(jnp.float32))
    if row.largest is not None:
        x = jnp.clip(x, -row.largest, row.largest)
    return x.astype(dtype)


@jax.custom_jvp
def _as_bits(x: jax.Array) -> jax.Array:
    bits_dtype = DTYPES[x.dtype.name].bits_dtype
    assert bits_dtype is not None, f"{x.dtype.name} is stored as itself"
    return jax.lax.bitcast_convert_type(x, bits_dtype)


@_as_bits.defjvp
def _as_bits_jvp(primals, tangents):
    raise NotImplementedError(
        f"a {primals[0].dtype.name} cache kept as bit patterns has no gradient; "
        "make it with empty_cache(..., storage='native') or with dtype float32 to differentiate through a write"
    )


def encode(x: jax.Array, dtype: str, stored_dtype, scale=None) -> jax.Array:
    """Real numbers -> what the pool holds."""
    y = to_dtype(x, dtype, scale)
    return y if y.dtype == stored_dtype else _as_bits(y)


def native(stored: jax.Array, dtype: str) -> jax.Array:
    """The pool as an array of `dtype` itself, as the chips' kernels read it; a bitcast at most."""
    return stored if stored.dtype == jnp.dtype(dtype) else jax.lax.bitcast_convert_type(stored, dtype)


def decode(stored: jax.Array, dtype: str) -> jax.Array:
    """What the pool holds -> float32, before any scale."""
    decode_bits = DTYPES[dtype].decode_bits
    if decode_bits is None or stored.dtype == jnp.dtype(dtype):
        return native(stored, dtype).astype(jnp.float32)
    return decode_bits(stored)
