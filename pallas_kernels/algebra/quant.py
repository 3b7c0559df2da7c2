"""How a number becomes a stored number: dtypes of a KV cache, their scales, and bit-pattern storage.

    stored = round(real / scale),  real = stored * scale        (scale: per tensor, per head, or per token and head)

Storage may be 'native' (the dtype itself) or 'bits' (an unsigned integer of the same width). Bits exist because
XLA:CPU rewrites a scatter or gather on bf16 and fp8 as a conversion of the whole operand to float32; an integer
pool is updated in place. Both hold the same numbers, bit for bit, and the stored dtype tells them apart.
"""

import jax
import jax.numpy as jnp
import numpy as np

QUANTISED = ("float8_e4m3fn", "float8_e5m2", "int8")
FLOATS = ("bfloat16", "float16", "float32")
_MAX = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
_BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}

MIN_TOKEN_SCALE = 1e-6
"""Floor of a per-token-head scale: an all-zero row must not divide by zero."""


def storage_dtype(dtype: str, bits: bool) -> np.dtype:
    """The array dtype that a pool of `dtype` uses."""
    return jnp.dtype(_BITS.get(dtype, dtype)) if bits else jnp.dtype(dtype)


def token_head_scale(x: jax.Array, dtype: str) -> jax.Array:
    """f32[..., 1] scale that maps the largest magnitude of each row of x[..., D] to the dtype's maximum."""
    peak = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return jnp.maximum(peak / _MAX[dtype], MIN_TOKEN_SCALE)


def to_dtype(x: jax.Array, dtype: str, scale=None) -> jax.Array:
    """x / scale rounded to `dtype`, saturating: out-of-range magnitudes become the dtype's maximum, NaN stays NaN."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if dtype == "int8":  # round half away from zero
        x = x.astype(jnp.float32)
        x = jnp.trunc(x + jnp.copysign(jnp.float32(0.5), x))
    if dtype in _MAX:
        x = jnp.clip(x, -_MAX[dtype], _MAX[dtype])
    return x.astype(dtype)


@jax.custom_jvp
def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, _BITS[x.dtype.name])


@_bits.defjvp
def _bits_jvp(primals, tangents):
    raise NotImplementedError(
        f"a {primals[0].dtype.name} cache kept as bit patterns has no gradient; "
        "make it with empty_cache(..., storage='native') or with dtype float32 to differentiate through a write"
    )


def encode(x: jax.Array, dtype: str, stored_dtype, scale=None) -> jax.Array:
    """Real numbers -> what the pool holds."""
    y = to_dtype(x, dtype, scale)
    return y if y.dtype == stored_dtype else _bits(y)


def native(stored: jax.Array, dtype: str) -> jax.Array:
    """The pool as an array of `dtype` itself, for kernels that read it so; free where it is stored that way."""
    return stored if stored.dtype == jnp.dtype(dtype) else jax.lax.bitcast_convert_type(stored, dtype)


def decode(stored: jax.Array, dtype: str) -> jax.Array:
    """What the pool holds -> float32, before any scale."""
    if stored.dtype == jnp.dtype(dtype):
        return stored.astype(jnp.float32)
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return _FLOAT8[dtype](stored)


def _decode_e5m2(stored: jax.Array) -> jax.Array:
    """e5m2 is the upper byte of a float16."""
    half = jax.lax.bitcast_convert_type(stored.astype(jnp.uint16) << 8, jnp.float16)
    return half.astype(jnp.float32)


def _decode_e4m3fn(stored: jax.Array) -> jax.Array:
    """Place exponent and mantissa into a float16 and rescale its bias: 2**(15-7) exactly, subnormals included.

    The one NaN pattern, S.1111.111, would decode to 480 and is put back. (Through float32 bits, subnormals would
    be flushed to zero by the CPU.)
    """
    low = stored & 0x7F
    half = jax.lax.bitcast_convert_type(
        ((stored & 0x80).astype(jnp.uint16) << 8) | (low.astype(jnp.uint16) << 7), jnp.float16
    )
    return jnp.where(low == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0)


_FLOAT8 = {"float8_e4m3fn": _decode_e4m3fn, "float8_e5m2": _decode_e5m2}
