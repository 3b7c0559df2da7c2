"""Products in C++: y = x w for few rows, on every instruction set, against numpy in float64."""

import pathlib
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.native import library, ops, toolchain
from tests.kernels.cpu.native_setup import ISAS, needs_library

pytestmark = needs_library

DTYPES = ("float32", "float16", "bfloat16")
ROWS = (*range(1, 15), 16, 24, 25, 31, 64, 70, 97, 193)  # every register block, several blocks, two items of rows
SIZES = ((64, 64), (33, 70), (1, 1), (2, 31), (127, 33), (300, 129), (129, 1100))  # (inputs, columns)
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def draw(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def call(x, *matrices, out_dtype="float32", **options) -> list[np.ndarray]:
    return [np.asarray(y) for y in ops.product(x, matrices, out_dtype=out_dtype, **options)]


def check(y: np.ndarray, x, w, inputs: int, out_dtype: str = "float32") -> None:
    """Rounding of `inputs` float32 sums, and of the result: relative to the sum of absolute products."""
    exact, size = wide(x) @ wide(w), np.abs(wide(x)) @ np.abs(wide(w))
    limit = 2.0**-24 * (inputs + 2) * size + EPSILON[out_dtype] * np.abs(exact) * (out_dtype != "float32")
    assert (np.abs(wide(y) - exact) <= limit).all()


@pytest.mark.parametrize("transposed", [False, True], ids=["in_out", "out_in"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_size_is_right(isa, dtype, transposed):
    for i, (inputs, columns) in enumerate(SIZES):
        w = draw(i, (inputs, columns), dtype)
        stored = w.T if transposed else w
        for rows in ROWS if i in (1, 5) else ROWS[::5]:
            x = draw(100 + rows, (rows, inputs), dtype)
            check(call(x, stored, transposed=transposed, isa=isa)[0], x, w, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_each_head_has_its_own_matrix(isa, dtype):
    for heads, rows, inputs, columns in (
        (1, 1, 64, 96),
        (5, 3, 33, 70),
        (3, 200, 20, 31),
        (2, 1, 7, 1100),
        (2, 0, 4, 4),
    ):
        x, w = draw(0, (rows, heads, inputs), dtype), draw(1, (heads, inputs, columns), dtype)
        y = np.asarray(ops.head_product(x, w, out_dtype="float32", isa=isa))
        assert y.shape == (rows, heads, columns)
        for h in range(heads):
            check(y[:, h], x[:, h], w[h], inputs)
        for threads in (1, 3):
            again = ops.head_product(x, w, out_dtype="float32", isa=isa, threads=threads)
            np.testing.assert_array_equal(again, y)


def test_head_products_of_wrong_shapes_are_refused():
    x, w = draw(0, (3, 2, 5), "float32"), draw(1, (2, 6, 4), "float32")
    for matrices, sentence in ((w, "w is"), (w.astype("float16"), "w has dtype"), (w[0], "w is .* rank 3")):
        made = jax.ffi.ffi_call(library.HEAD_PRODUCT, jax.ShapeDtypeStruct((2, 3, 4), np.dtype("float32")))
        with pytest.raises(jax.errors.JaxRuntimeError, match=sentence):
            jax.block_until_ready(made(jnp.swapaxes(x, 0, 1), matrices, isa="auto", threads=np.int32(1)))


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_rounded_once(dtype, out_dtype):
    x, w = draw(0, (5, 70), dtype), draw(1, (70, 45), dtype)
    (y,) = call(x, w, out_dtype=out_dtype)
    assert y.dtype == jnp.dtype(out_dtype)
    check(y, x, w, 70, out_dtype)
    (exact,) = call(x, w)
    assert y.tobytes() == np.asarray(jnp.asarray(exact).astype(out_dtype)).tobytes()


def test_several_matrices_of_one_x():
    x, widths = draw(0, (3, 130), "bfloat16"), (257, 1, 64, 700)
    matrices = [draw(1 + i, (130, width), "bfloat16") for i, width in enumerate(widths)]
    for y, w in zip(call(x, *matrices), matrices, strict=True):
        check(y, x, w, 130)
        assert y.tobytes() == call(x, w)[0].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_the_gated_unit_is_silu_of_one_product_times_the_other(isa, dtype):
    """Both products are rounded to the dtype of the result, which magnifies an error by at most 1.1 |up|."""
    for inputs, columns in SIZES[1:6]:
        gate, up = (draw(seed, (inputs, columns), dtype) / 4 for seed in (1, 2))
        for rows in (1, 5, 14, 31):
            x = draw(rows, (rows, inputs), dtype)
            y = np.asarray(ops.silu_product(x, gate, up, out_dtype=dtype, isa=isa, threads=3))
            g, u = wide(x) @ wide(gate), wide(x) @ wide(up)
            size = 1 + np.abs(g) + np.abs(u)
            assert (np.abs(wide(y) - g / (1 + np.exp(-g)) * u) <= (4 * EPSILON[dtype] + 1e-5) * size**2).all()
            alone = np.asarray(ops.silu_product(x[:1], gate, up, out_dtype=dtype, isa=isa, threads=1))
            assert y[0].tobytes() == alone[0].tobytes()


def test_the_gated_unit_at_extreme_values():
    gate = jnp.array([[0.0, 100.0, -100.0, 3e38, -3e38, jnp.inf, jnp.nan]])
    y = np.asarray(ops.silu_product(jnp.ones((1, 1)), gate, jnp.full((1, 7), 2.0), out_dtype="float32"))
    np.testing.assert_allclose(y[0], [0, 200, 0, np.inf, 0, np.inf, np.nan], atol=1e-30)


@pytest.mark.parametrize("transposed", [False, True], ids=["in_out", "out_in"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_the_bits_of_a_row_depend_on_that_row_only(isa, dtype, transposed):
    """Not on the number of rows, the row's place, the other rows' NaN and infinities, or the number of threads."""
    x, w = draw(0, (193, 201), dtype), draw(1, (75, 201) if transposed else (201, 75), dtype)
    options, x = dict(transposed=transposed, isa=isa), np.asarray(x)
    (alone,) = call(x[:1], w, **options)
    for rows in ROWS:
        for threads in (1, 2, 5):
            (y,) = call(x[:rows], w, threads=threads, **options)
            assert y[0].tobytes() == alone[0].tobytes()
    for place in (0, 5, 11, 12, 64, 192):
        others = np.full_like(x, np.nan)
        others[1::2], others[place] = np.inf, x[0]
        (y,) = call(others, w, **options)
        assert y[place].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_the_bits_of_a_column_depend_on_that_column_only(isa, dtype):
    """Not on the width of the matrix, by which the inputs are divided into groups."""
    columns = 1 << 16
    w = jnp.zeros((201, columns), dtype).at[:, :70].set(draw(1, (201, 70), dtype))
    for rows in (1, 4, 8, 16, 32):
        x = draw(rows, (rows, 201), dtype)
        (y,), (narrow,) = call(x, w, isa=isa), call(x, w[:, :70], isa=isa)
        assert y[:, :70].tobytes() == narrow.tobytes()
        assert not y[:, 70:].any()


def test_rows_of_weights_that_share_the_sets_of_a_cache_are_in_short_groups(tmp_path):
    """The same columns of all inputs of a group fit into 1 MiB of cache, whose lines are chosen by their address."""
    source, program = pathlib.Path(__file__).with_name("product_group_driver.cc"), tmp_path / "driver"
    build = [*toolchain.compiler(), *toolchain.BASE_FLAGS, f"-I{toolchain.SOURCES}", str(source), "-o", str(program)]
    subprocess.run(build, check=True)
    strides = dict.fromkeys((2 * 131072, 4 * 131072, 2 * 65536, 2 * 163840), 16)
    strides |= {2 * 16384: 32, 2 * 8192: 64, 4 * 4096: 64, 2 * 28672: 128}
    found = subprocess.run([program, *map(str, strides)], check=True, capture_output=True, text=True).stdout.split()
    assert list(map(int, found)) == list(strides.values())
    others = [2 * 128256, 2 * 151936, 2 * 4864, 2 * 33, 4]  # the longest group has 256 inputs
    found = subprocess.run([program, *map(str, others)], check=True, capture_output=True, text=True).stdout.split()
    assert min(map(int, found)) >= 256


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_infinity_reach_their_own_results_only(isa, dtype):
    x, w = draw(0, (14, 67), dtype), draw(1, (67, 40), dtype)
    x, w = x.at[3, 66].set(jnp.nan).at[5, 0].set(jnp.inf), w.at[66, 39].set(jnp.inf)
    for transposed in (False, True):
        (y,) = call(x, w.T if transposed else w, transposed=transposed, isa=isa)
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(np.isfinite(y), np.isfinite(wide(x) @ wide(w)))


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
@pytest.mark.parametrize("transposed", [False, True], ids=["in_out", "out_in"])
def test_empty_operands(shape, transposed):
    rows, inputs, columns = shape
    w = jnp.ones((columns, inputs) if transposed else (inputs, columns), jnp.bfloat16)
    (y,) = call(jnp.ones((rows, inputs), jnp.bfloat16), w, transposed=transposed)
    np.testing.assert_array_equal(y, np.zeros((rows, columns), np.float32))


X, W, Y = jnp.zeros((3, 8)), jnp.zeros((8, 5)), ((3, 5), "float32")
BAD = {
    "x of rank 1": (dict(x=X[0]), "x is .* and must be of rank 2"),
    "integers": (dict(x=X.astype(int), w=[W.astype(int)]), "x has dtype S32"),
    "another dtype": (dict(w=[W.astype(jnp.bfloat16)]), "w has dtype BF16 and must have the dtype of x"),
    "another number of inputs": (dict(w=[W[:7]]), r"w is \[7 5\] and must be \[8 5\]"),
    "not transposed": (dict(transposed=True), r"w is \[8 5\] and must be \[8 8\]"),
    "w of rank 3": (dict(w=[W[None]]), "w is .* and must be of rank 2"),
    "another shape of y": (dict(y=[((3, 4), "float32")]), r"y is \[3 4\] and must be \[3 5\]"),
    "integers as result": (dict(y=[((3, 5), "int32")]), "y has dtype S32"),
    "results of two dtypes": (dict(w=[W, W], y=[Y, ((3, 5), "float16")]), "y has dtype F16"),
    "fewer results": (dict(w=[W, W]), "one result for each matrix"),
    "silu of three": (dict(w=[W, W, W], silu=True), "silu takes two matrices, not transposed, and makes one result"),
    "silu of transposed ones": (dict(w=[W, W], silu=True, transposed=True), "silu takes two matrices, not transposed"),
    "silu of two widths": (dict(w=[W, W[:, :4]], silu=True), r"y is \[3 5\] and must be \[3 4\]"),
    "an unknown instruction set": (dict(isa="mmx"), "isa=mmx does not run here"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_buffers_are_refused(case):
    changed, message = BAD[case]
    given = dict(x=X, w=[W], y=[Y], transposed=False, silu=False, isa="auto") | changed
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in given["y"])
    made = jax.ffi.ffi_call(library.PRODUCT, shapes)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        options = {name: given[name] for name in ("transposed", "silu", "isa")} | dict(threads=np.int32(1))
        jax.block_until_ready(made(given["x"], *given["w"], **options))
