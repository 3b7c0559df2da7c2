"""Rows times the matrices of their experts in C++, on every instruction set, against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.native import library, ops
from tests.kernels.cpu.native_setup import ISAS, needs_library
from tests.kernels.cpu.test_native_product import DTYPES, check, draw, wide

pytestmark = needs_library

SIZES = ((64, 64), (33, 70), (1, 1), (127, 33), (130, 1100))  # (inputs, columns)
ROWS = ((2, 0, 1, 14), (0, 0, 195), (5,), (0, 3), (1,) * 9, (7, 0, 0, 400, 31), (0, 0))
"""Rows of each expert: none, one, every register block, several items of rows."""


def call(x, w, sizes, out_dtype="float32", **options) -> np.ndarray:
    return np.asarray(ops.expert_product(x, w, jnp.asarray(sizes, jnp.int32), out_dtype=out_dtype, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(isa, dtype):
    """Rows after the last group are left alone."""
    for i, sizes in enumerate(ROWS):
        for inputs, columns in SIZES if i == 0 else SIZES[i % 3 :: 3]:
            x, w = draw(0, (sum(sizes) + 2, inputs), dtype), draw(1, (len(sizes), inputs, columns), dtype)
            y, begin = call(x, w, sizes, isa=isa), 0
            rows, matrices = np.asarray(x), np.asarray(w)  # JAX would compile a program for each slice
            for e, size in enumerate(sizes):
                own, begin = slice(begin, begin + size), begin + size
                check(y[own], rows[own], matrices[e], inputs)
            for threads in (1, 3):
                assert call(x, w, sizes, isa=isa, threads=threads)[:begin].tobytes() == y[:begin].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_the_bits_of_a_row_depend_on_that_row_only(isa, dtype):
    """They are those of the row alone, whatever the expert's other rows and the other experts hold."""
    x, w = draw(0, (1, 201), dtype), draw(1, (3, 201, 75), dtype)
    alone = np.asarray(ops.product(x, [w[1]], out_dtype="float32", isa=isa)[0])[0]
    w = np.array(w)
    w[::2] = np.nan
    for sizes in ((0, 1, 0), (3, 2, 1), (1, 13, 40), (200, 193, 5), (0, 500, 0)):
        for place in {0, sizes[1] // 2, sizes[1] - 1}:
            others = np.full((sum(sizes), 201), np.nan, x.dtype)
            others[1::2], others[sizes[0] + place] = np.inf, x[0]
            assert call(others, w, sizes, isa=isa)[sizes[0] + place].tobytes() == alone.tobytes()


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_rounded_once(dtype, out_dtype):
    x, w, sizes = draw(0, (5, 70), dtype), draw(1, (2, 70, 45), dtype), (2, 3)
    y = call(x, w, sizes, out_dtype)
    assert y.dtype == jnp.dtype(out_dtype)
    assert y.tobytes() == np.asarray(jnp.asarray(call(x, w, sizes)).astype(out_dtype)).tobytes()


def test_sizes_beyond_the_rows_are_cut():
    x, w = draw(0, (3, 64), "float32"), draw(1, (2, 64, 40), "float32")
    for sizes, experts in (((-4, 9), (1, 1, 1)), ((2, 2**31 - 1), (0, 0, 1)), ((2**31 - 1, 2**31 - 1), (0, 0, 0))):
        y = call(x, w, sizes)
        for row, e in enumerate(experts):
            check(y[row : row + 1], x[row : row + 1], w[e], 64)


@pytest.mark.parametrize("shape", [(0, 3, 8, 8), (3, 0, 8, 8), (3, 2, 0, 8), (3, 2, 8, 0)])
def test_empty_operands(shape):
    rows, experts, inputs, columns = shape
    x, w = jnp.ones((rows, inputs), jnp.bfloat16), jnp.ones((experts, inputs, columns), jnp.bfloat16)
    y = call(x, w, ([1, 2, 0])[:experts])
    assert y.shape == (rows, columns)
    if experts:
        np.testing.assert_array_equal(y, np.zeros((rows, columns), np.float32))


def test_one_call_for_each_element_of_a_batch():
    x, w, sizes = draw(0, (2, 5, 9), "float32"), draw(1, (3, 9, 6), "float32"), jnp.array([[2, 0, 3], [0, 4, 1]])
    y = np.asarray(jax.vmap(lambda x, sizes: ops.expert_product(x, w, sizes, out_dtype="float32"))(x, sizes))
    for one, rows, counts in zip(y, x, sizes, strict=True):
        expert = np.repeat(np.arange(3), counts)
        np.testing.assert_allclose(one, np.einsum("ni,nio->no", wide(rows), wide(w)[expert]), atol=1e-5)


X, W, COUNTS = jnp.zeros((3, 8)), jnp.zeros((2, 8, 5)), jnp.array([1, 2], jnp.int32)
BAD = {
    "x of rank 1": (dict(x=X[0]), "x is .* and must be of rank 2"),
    "integers": (dict(x=X.astype(int), w=W.astype(int)), "x has dtype S32"),
    "another dtype": (dict(w=W.astype(jnp.bfloat16)), "w has dtype BF16 and must have the dtype of x"),
    "another number of inputs": (dict(w=W[:, :7]), r"w is \[2 7 5\] and must be \[2 8 5\]"),
    "w of rank 2": (dict(w=W[0]), "w is .* and must be of rank 3"),
    "sizes of other experts": (dict(sizes=COUNTS[:1]), r"sizes is \[1\] and must be \[2\]"),
    "sizes that are no integers": (dict(sizes=COUNTS.astype(jnp.float32)), "[Ww]rong buffer dtype"),
    "another shape of y": (dict(y=((3, 4), "float32")), r"y is \[3 4\] and must be \[3 5\]"),
    "integers as result": (dict(y=((3, 5), "int32")), "y has dtype S32"),
    "an unknown instruction set": (dict(isa="mmx"), "isa=mmx does not run here"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_buffers_are_refused(case):
    changed, message = BAD[case]
    given = dict(x=X, w=W, sizes=COUNTS, y=((3, 5), "float32"), isa="auto") | changed
    made = jax.ffi.ffi_call(library.EXPERT_PRODUCT, jax.ShapeDtypeStruct(given["y"][0], np.dtype(given["y"][1])))
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(made(given["x"], given["w"], given["sizes"], isa=given["isa"], threads=np.int32(1)))
