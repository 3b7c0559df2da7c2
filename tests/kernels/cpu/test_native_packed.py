"""Products with weights in 4 or 8 bits in C++, on every instruction set, against numpy in float64."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.cpu.native import library, ops
from tests.kernels.cpu.native_setup import ISAS, needs_library

pytestmark = needs_library

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
NUMBERS = {
    "int8": np.arange(256).astype(np.uint8).view(np.int8).astype(float),
    "fp8": np.arange(256).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float),
    "int4": np.arange(16) - 8.0,
    "fp4": np.concatenate([FP4, -FP4]),
}
ROWS = (1, 2, 3, 4, 6, 7, 13, 40, 193)  # every register block, copied tiles, two items of rows
SIZES = (  # inputs, columns, inputs of a group
    (64, 64, 64), (64, 70, 32), (8, 1, 8), (96, 33, 32), (128, 129, 128), (320, 40, 64), (192, 1100, 96), (72, 15, 24),
)  # fmt: skip
EIGHT_BITS = ("int8", "fp8")


class Weight:
    """Random codes as ops.packed_product takes them, and their numbers [in, out] in float64."""

    def __init__(
        self, format, inputs, columns, group, *, zeros=False, factor=False, seed=0, scales="float32", transposed=False
    ):
        rng = np.random.default_rng(seed)
        self.format, numbers = format, NUMBERS[format]
        codes = rng.integers(0, len(numbers), (inputs, columns)).astype(np.uint8)
        codes[np.isnan(numbers)[codes]] = 3
        scale = np.asarray(rng.uniform(-1.5, 1.5, (inputs // group, columns)), scales)
        whole = rng.uniform(0.5, 1.5, (1, columns)).astype(np.float32) if factor else None
        zero = rng.integers(-128, 128, scale.shape).astype(np.int8) if zeros else None
        repeat = lambda x: np.repeat(x.astype(np.float64), group, axis=0)
        self.exact = (numbers[codes] - (0 if zero is None else repeat(zero))) * repeat(scale)
        self.size = (np.abs(numbers[codes]) + (0 if zero is None else np.abs(repeat(zero)))) * np.abs(repeat(scale))
        if whole is not None:
            self.exact, self.size = self.exact * whole, self.size * whole
        turned = (lambda x: np.ascontiguousarray(x.T)) if transposed else (lambda x: x)
        values = codes.view(np.int8) if format == "int8" else codes if format == "fp8" else words_of(codes)
        arrays = (turned(values), turned(scale), zero, None if whole is None else turned(whole))
        self.arrays = tuple(None if x is None else jnp.asarray(x) for x in arrays)


def words_of(codes: np.ndarray) -> np.ndarray:
    """Eight inputs in 32 bits: 0, 2, 4, 6 in the lower half, 1, 3, 5, 7 in the upper one."""
    parts = codes.astype(np.uint32).reshape(-1, 8, codes.shape[1])
    return np.bitwise_or.reduce([parts[:, i] << np.uint32(16 * (i % 2) + 4 * (i // 2)) for i in range(8)])


@pytest.mark.parametrize("format", NUMBERS)
@pytest.mark.parametrize("isa", ISAS)
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(isa, format):
    """Some experts have no rows, one more than an item has; rows after the last group are left alone."""
    for sizes, zeros in (((2, 0, 1, 14), True), ((0, 0, 195), False), ((0, 3), True), ((0, 0), False)):
        for inputs, columns, group in SIZES[1:7]:
            draw = functools.partial(Weight, format, inputs, columns, group, zeros=zeros, factor=columns > 40)
            weights = [draw(seed=e) for e in range(len(sizes))]
            stacked = [None if x[0] is None else np.stack(x) for x in zip(*(w.arrays for w in weights), strict=True)]
            stacked = [None if x is None else jnp.asarray(x) for x in stacked]  # by numpy: no program for each shape
            x = rows_of(0, (sum(sizes) + 2, inputs), "bfloat16")
            each = dict(out_dtype="float32", isa=isa)
            y = np.asarray(ops.packed_expert_product(x, stacked, np.array(sizes), format, **each))
            begin, rows = 0, wide(x)
            for weight, size in zip(weights, sizes, strict=True):
                own, begin = slice(begin, begin + size), begin + size
                limit = 1e-7 * (inputs + 8) * (np.abs(rows[own]) @ weight.size)
                assert (np.abs(y[own] - rows[own] @ weight.exact) <= limit).all()
            again = np.asarray(ops.packed_expert_product(x, stacked, np.array(sizes), format, **each, threads=1))
            np.testing.assert_array_equal(again[:begin], y[:begin])


def test_sizes_beyond_the_rows_are_cut():
    weights = [Weight("int8", 64, 40, 64, seed=e) for e in range(2)]
    arrays = [*(jnp.stack(x) for x in zip(*(w.arrays[:2] for w in weights), strict=True)), None, None]
    x = rows_of(0, (3, 64), "float32")
    for sizes, experts in (((-4, 9), (1, 1, 1)), ((2, 2**31 - 1), (0, 0, 1))):
        y = np.asarray(ops.packed_expert_product(x, arrays, np.array(sizes, np.int32), "int8", out_dtype="float32"))
        for row, e in enumerate(experts):
            np.testing.assert_allclose(y[row], wide(x)[row] @ weights[e].exact, rtol=1e-4, atol=1e-2)


def rows_of(seed: int, shape: tuple[int, int], dtype: str) -> jax.Array:
    return jnp.asarray(np.random.default_rng(100 + seed).standard_normal(shape), dtype)


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def call(x, *weights: Weight, out_dtype="float32", **options) -> list[np.ndarray]:
    given = [weight.arrays for weight in weights]
    return [np.asarray(y) for y in ops.packed_product(x, given, weights[0].format, out_dtype=out_dtype, **options)]


def check(y: np.ndarray, x, weight: Weight, epsilon: float = 0.0) -> None:
    """Rounding of the float32 sums: relative to the sum of absolute products."""
    exact, size = wide(x) @ weight.exact, np.abs(wide(x)) @ weight.size
    assert (np.abs(wide(y) - exact) <= 2.0**-24 * (weight.exact.shape[0] + 8) * size + epsilon * np.abs(exact)).all()


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zero_points"])
@pytest.mark.parametrize("format", NUMBERS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_size_is_right(isa, format, zeros):
    for i, (inputs, columns, group) in enumerate(SIZES):
        weight = Weight(format, inputs, columns, group, zeros=zeros, factor=i % 2 > 0, seed=i)
        for rows in ROWS if i == 1 else ROWS[i % 3 :: 5]:
            x = rows_of(rows, (rows, inputs), ("float32", "bfloat16")[rows % 2])
            check(call(x, weight, isa=isa)[0], x, weight)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format", EIGHT_BITS)
@pytest.mark.parametrize("isa", ISAS)
def test_transposed_matrices(isa, format, dtype):
    for i, (inputs, columns) in enumerate(((64, 64), (33, 70), (1, 1), (130, 1100), (896, 5))):
        weight = Weight(format, inputs, columns, inputs, seed=i, transposed=True, factor=i % 2 > 0)
        for rows in (1, 2, 7, 193)[i % 2 :: 2]:
            x = rows_of(rows, (rows, inputs), dtype)
            check(call(x, weight, transposed=True, isa=isa)[0], x, weight)


@pytest.mark.parametrize("scales", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("format", NUMBERS)
def test_every_dtype_of_rows_scales_and_results(format, dtype, scales):
    weight, x = Weight(format, 128, 45, 64, scales=scales), rows_of(0, (5, 128), dtype)
    check(call(x, weight)[0], x, weight)
    (y,) = call(x, weight, out_dtype=dtype)
    assert y.dtype == jnp.dtype(dtype)
    assert y.tobytes() == np.asarray(jnp.asarray(call(x, weight)[0]).astype(dtype)).tobytes()


@pytest.mark.parametrize("columns", [64, 70])
@pytest.mark.parametrize("isa", ISAS)
def test_every_scale_of_e4m3_and_the_factor(isa, columns):
    """Subnormal and the largest ones, both zeros; x selects one weight a row."""
    bits = np.arange(256, dtype=np.uint8)
    scales = np.where(bits & 127 == 127, 0, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = np.resize(scales, (256, columns))
    codes = np.random.default_rng(0).integers(0, 16, (256 * 16, columns)).astype(np.uint8)
    factor = np.random.default_rng(1).uniform(1e-4, 1, (1, columns)).astype(np.float32)
    given = [tuple(map(jnp.asarray, (words_of(codes), scales))) + (None, jnp.asarray(factor))]
    x, inputs = np.zeros((256, 256 * 16), np.float32), 16 * np.arange(256) + np.arange(256) % 16
    x[np.arange(256), inputs] = 1
    (y,) = ops.packed_product(jnp.asarray(x), given, "fp4", out_dtype="float32", isa=isa)
    numbers = (NUMBERS["fp4"][codes[inputs]] * scales.astype(float)).astype(np.float32)
    np.testing.assert_array_equal(y, numbers * factor)


@pytest.mark.parametrize("format", EIGHT_BITS)
def test_one_scale_for_each_output_of_any_number_of_inputs(format):
    for inputs in (1, 7, 65, 130, 999):
        weight, x = Weight(format, inputs, 9, inputs), rows_of(0, (3, inputs), "float32")
        check(call(x, weight)[0], x, weight)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", NUMBERS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_code_is_its_number_exactly(isa, format, dtype):
    """x selects one weight a row: the largest and smallest magnitudes, -128 and the subnormal numbers of fp8 too."""
    numbers = NUMBERS[format]
    weight = Weight(format, len(numbers), 70, len(numbers))
    codes = np.repeat(np.arange(len(numbers), dtype=np.uint8)[:, None], 70, axis=1)
    codes[np.isnan(numbers)] = 0
    values = codes.view(np.int8) if format == "int8" else codes if format == "fp8" else words_of(codes)
    weight.arrays = (jnp.asarray(values), jnp.ones((1, 70)), None, None)
    for rows in (1, len(numbers)):
        (y,) = call(jnp.eye(len(numbers), dtype=dtype)[-rows:], weight, isa=isa)
        np.testing.assert_array_equal(y, numbers[codes[-rows:]])


@pytest.mark.parametrize("format", EIGHT_BITS)
@pytest.mark.parametrize("isa", ISAS)
def test_chunks_of_an_odd_number_of_inputs(isa, format):
    """Instructions that take two inputs at a time do not serve them."""
    for inputs, group in ((7, 7), (65, 65), (28, 7), (999, 999), (96, 3)):
        weight = Weight(format, inputs, 70, group)
        for rows in (1, 3, 14):
            x = rows_of(rows, (rows, inputs), "bfloat16")
            check(call(x, weight, isa=isa)[0], x, weight)


def test_several_matrices_of_one_x():
    x = rows_of(0, (3, 128), "bfloat16")
    weights = [Weight("int4", 128, width, 64, zeros=True, seed=width) for width in (257, 1, 64, 700)]
    for y, weight in zip(call(x, *weights), weights, strict=True):
        check(y, x, weight)
        assert y.tobytes() == call(x, weight)[0].tobytes()


@pytest.mark.parametrize("transposed", [False, True], ids=["in_out", "out_in"])
@pytest.mark.parametrize("format", NUMBERS)
@pytest.mark.parametrize("isa", ISAS)
def test_the_bits_of_a_row_depend_on_that_row_only(isa, format, transposed):
    """Not on the number of rows, the row's place, the other rows' NaN and infinities, or the number of threads."""
    if transposed and format not in EIGHT_BITS:
        return
    weight = Weight(format, 192, 150, 192 if transposed else 96, zeros=not transposed, transposed=transposed)
    for dtype in ("float32", "bfloat16"):
        x, options = rows_of(0, (193, 192), dtype), dict(transposed=transposed, isa=isa)
        (alone,) = call(x[:1], weight, **options)
        for rows in ROWS:
            (y,) = call(x[:rows], weight, threads=1 + rows % 5, **options)
            assert y[0].tobytes() == alone[0].tobytes()
        for place in (5, 12, 192):
            others = jnp.full_like(x, jnp.nan).at[1::2].set(jnp.inf).at[place].set(x[0])
            (y,) = call(others, weight, **options)
            assert y[place].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("isa", ISAS)
def test_nan_of_fp8_reaches_its_own_results_only(isa):
    weight = Weight("fp8", 64, 70, 32)
    values, scales, *_ = weight.arrays
    weight.arrays = (values.at[33, 66].set(0x7F).at[1, 3].set(0xFF), scales, None, None)
    y = call(rows_of(0, (3, 64), "float32"), weight, isa=isa)[0]
    np.testing.assert_array_equal(np.isnan(y).all(0), np.isin(np.arange(70), (3, 66)))
    assert np.isnan(y).sum() == 6


@pytest.mark.parametrize("shape", [(0, 8, 8), (3, 0, 8), (3, 8, 0)])
def test_empty_operands(shape):
    rows, inputs, columns = shape
    given = (jnp.ones((inputs, columns), jnp.int8), jnp.ones((1, columns)), None, jnp.ones((1, columns)))
    (y,) = ops.packed_product(jnp.ones((rows, inputs)), [given], "int8", out_dtype="float32")
    np.testing.assert_array_equal(y, np.zeros((rows, columns), np.float32))


X, Y = jnp.zeros((3, 16)), ((3, 5), "float32")
NONE = jnp.zeros(0)
INT8 = (jnp.zeros((16, 5), jnp.int8), jnp.zeros((2, 5)), jnp.zeros((0, 0), jnp.int8), NONE)
INT4 = (jnp.zeros((2, 5), jnp.uint32), jnp.zeros((2, 5)), jnp.zeros((2, 5), jnp.int8), NONE)
BAD = {
    "integers": (dict(x=X.astype(int)), "x has dtype S32"),
    "an unknown format": (dict(format=4), "format is 4 and must be 0 to 3"),
    "another format": (dict(format=2), "w has dtype S8 and must have that of its format"),
    "two arrays": (dict(w=INT8[:2]), "four arrays for each result"),
    "another number of inputs": (dict(x=X[:, :8]), r"w is \[16 5\] and must be \[8 5\]"),
    "inputs that fill no word": (dict(x=X[:, :12], w=INT4, format=2), "the number of inputs is 12"),
    "scales of another dtype": (dict(w=(INT8[0], jnp.zeros((2, 5), int), *INT8[2:])), "scales has dtype S32"),
    "scales of e5m2": (
        dict(w=(INT8[0], jnp.zeros((2, 5), jnp.float8_e5m2), *INT8[2:])),
        "scales has dtype .* must have .* or e4m3",
    ),
    "a factor of another dtype": (dict(w=(*INT8[:3], jnp.zeros((1, 5), jnp.bfloat16))), "factor has dtype BF16"),
    "a factor of another shape": (dict(w=(*INT8[:3], jnp.zeros((2, 5)))), r"factor is \[2 5\] and must be \[1 5\]"),
    "scales of another width": (dict(w=(INT8[0], jnp.zeros((2, 4)), *INT8[2:])), r"scales is \[2 4\]"),
    "groups that do not divide": (dict(w=(INT8[0], jnp.zeros((3, 5)), *INT8[2:])), "of the number of groups, 3"),
    "groups that divide no word": (dict(w=(INT4[0], jnp.zeros((4, 5)), *INT8[2:]), format=2), "the inputs of a group"),
    "zero points of another shape": (dict(w=(*INT4[:2], INT4[2][:1], NONE), format=2), r"zero_points is \[1 5\]"),
    "zero points of another dtype": (dict(w=(*INT4[:2], INT4[1], NONE), format=2), "zero_points has dtype F32"),
    "groups of two sizes": (dict(w=(*INT8, INT8[0], INT8[1][:1], *INT8[2:]), y=[Y, Y]), "groups of one size"),
    "transposed 4 bits": (dict(w=INT4, format=2, transposed=True), "format is 2 and must be 0 to 1"),
    "an unknown instruction set": (dict(isa="mmx"), "isa=mmx does not run here"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_buffers_are_refused(case):
    changed, message = BAD[case]
    given = dict(x=X, w=INT8, y=[Y], format=0, transposed=False, isa="auto") | changed
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in given["y"])
    made = jax.ffi.ffi_call(library.PACKED_PRODUCT, shapes)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        options = dict(format=np.int32(given["format"]), transposed=given["transposed"], isa=given["isa"])
        jax.block_until_ready(made(given["x"], *given["w"], **options, threads=np.int32(1)))


def test_groups_of_many_inputs_must_be_multiples_of_32():
    weight = Weight("int8", 160, 5, 80)
    with pytest.raises(jax.errors.JaxRuntimeError, match="groups have less than 64 inputs, or a multiple of 32"):
        call(rows_of(0, (1, 160), "float32"), weight)
