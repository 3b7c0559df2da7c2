"""Stored numbers against the witness's own bit tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.algebra import quant
from tests.oracle import quant as witness

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz")


@pytest.mark.parametrize("name", FLOAT8)
def test_every_byte_decodes_to_the_number_of_its_bits(name):
    codes = np.arange(256, dtype=np.uint8)
    expected = np.array([witness.decode_byte(int(code), name) for code in codes])
    np.testing.assert_array_equal(np.asarray(jax.jit(quant.decode, static_argnums=1)(codes, name)), expected)


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("name", quant.QUANTISED)
def test_rounding_is_the_witness_rounding(name, bits):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal(4000) * 40, [0.0, -0.0, 0.5, 1.5, 2.5, -2.5, 448, 465, 1e9, -1e9]])
    x = x.astype(np.float32)
    stored = quant.encode(jnp.asarray(x), name, quant.storage_dtype(name, bits))
    np.testing.assert_array_equal(np.asarray(quant.decode(stored, name)), witness.round_to(x, name))


@pytest.mark.parametrize("name", [*quant.FLOATS, *quant.QUANTISED])
def test_bits_and_native_storage_hold_the_same_numbers(name):
    x = jnp.asarray(np.random.default_rng(1).standard_normal(1000), jnp.float32)
    native, bits = (quant.encode(x, name, quant.storage_dtype(name, b)) for b in (False, True))
    np.testing.assert_array_equal(np.asarray(native).view(np.uint8), np.asarray(bits).view(np.uint8))
    np.testing.assert_array_equal(quant.decode(native, name), quant.decode(bits, name))


@pytest.mark.parametrize("bits", [False, True])
def test_a_new_dtype_is_one_row_of_the_table(bits, monkeypatch):
    """float8_e4m3b11fnuz: no infinity, one NaN, a bias of 11; XLA's own conversion decodes it."""
    name = "float8_e4m3b11fnuz"
    monkeypatch.setitem(quant.DTYPES, name, quant.CacheDtype(name, largest=30.0, bits_dtype="uint8"))
    codes = np.arange(256, dtype=np.uint8)
    numbers = codes.view(jnp.dtype(name)).astype(np.float32)
    pool = quant.storage_dtype(name, bits)
    np.testing.assert_array_equal(np.asarray(quant.decode(jnp.asarray(codes.view(pool)), name)), numbers)
    stored = np.asarray(quant.encode(jnp.asarray(numbers), name, pool))
    np.testing.assert_array_equal(stored.view(np.uint8), codes)
    np.testing.assert_array_equal(quant.decode(quant.encode(jnp.array([1e9, -1e9]), name, pool), name), [30, -30])


def test_the_table_says_what_a_dtype_is():
    dtypes = {name: quant.storage_dtype(name, bits=False) for name in quant.DTYPES}
    kinds = {name: (dtype.itemsize * 8, jnp.issubdtype(dtype, jnp.integer)) for name, dtype in dtypes.items()}
    assert [kinds[name] for name in quant.FLOATS] == [(16, False), (16, False), (32, False)]
    assert [kinds[name] for name in quant.QUANTISED] == [(8, False), (8, False), (8, True), (8, False)]


def test_a_token_scale_maps_the_largest_magnitude_to_the_largest_code():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((5, 16)), jnp.float32)
    for name in quant.QUANTISED:
        scale = quant.token_head_scale(x, name)
        stored = quant.decode(quant.encode(x, name, quant.storage_dtype(name, True), scale), name)
        np.testing.assert_allclose(jnp.abs(stored).max(-1), witness.LARGEST[name], rtol=1e-6)


def test_a_row_of_zeros_keeps_a_positive_scale():
    assert (quant.token_head_scale(jnp.zeros((3, 8)), "int8") == quant.MIN_TOKEN_SCALE).all()


def test_bits_refuse_a_gradient_instead_of_giving_zero():
    with pytest.raises(NotImplementedError, match="storage='native'"):
        jax.grad(lambda x: quant.encode(x, "bfloat16", jnp.dtype("uint16")).astype(jnp.float32).sum())(jnp.ones(3))
