"""QuantisedArray: what its codes stand for, how it is made, and products with it, against numpy in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jattn.device import Chip
from jattn.ops import product as product_ops
from jattn.ops.product import gated_product, product, products
from jattn.ops.quantised import QuantisedArray, packed, plain, quantise
from pallas_kernels.cpu.native import library

FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
FORMATS = ("int8", "fp8", "int4", "fp4")


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def drawn(
    format: str,
    inputs: int,
    outputs: int,
    group: int,
    *,
    zeros=False,
    factor=False,
    axis=-2,
    seed=0,
    scales="float32",
) -> tuple[QuantisedArray, np.ndarray]:
    """A random weight, and its numbers [in, out] computed by numpy from their definition."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16 if format in ("int4", "fp4") else 256, (inputs, outputs)).astype(np.uint8)
    if format == "fp8":
        codes[codes & 0x7F == 0x7F] = 0  # the only NaN
    numbers = {
        "int8": lambda: codes.view(np.int8), "fp8": lambda: codes.view(ml_dtypes.float8_e4m3fn),
        "int4": lambda: codes.astype(int) - 8, "fp4": lambda: np.array(FP4)[codes],
    }[format]().astype(np.float64)  # fmt: skip
    scale = (rng.uniform(0.5, 1.5, (inputs // group, outputs)) / np.abs(numbers).max()).astype(scales)
    if (format, group, np.dtype(scales).name) == ("fp4", 32, "bfloat16"):  # MXFP4
        scale = (2.0 ** rng.integers(-4, 2, scale.shape)).astype(scales)
    if scales == "float8_e4m3fn":  # any but the two NaN
        bits = rng.integers(0, 256, scale.shape).astype(np.uint8)
        scale = np.where(bits & 0x7F == 0x7F, 0, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    zero = rng.integers(-8, 9, scale.shape).astype(np.int8) if zeros else None
    exact = numbers - (0 if zero is None else np.repeat(zero.astype(float), group, axis=0))
    exact = exact * np.repeat(scale.astype(np.float64), group, axis=0)
    of_outputs = rng.uniform(0.5, 1.5, (1, outputs)).astype(np.float32) if factor else None
    exact = exact if of_outputs is None else exact * of_outputs
    turned = lambda x: x if axis == -2 else np.ascontiguousarray(x.T)
    values = codes.view(np.int8) if format == "int8" else codes
    values = jnp.asarray(turned(values))
    weight = QuantisedArray(
        values=packed(values, axis) if format in ("int4", "fp4") else values, scales=jnp.asarray(turned(scale)),
        zero_points=None if zero is None else jnp.asarray(turned(zero)), format=format, axis=axis,
        factor=None if of_outputs is None else jnp.asarray(turned(of_outputs)), dtype=np.dtype("float32"),
    )  # fmt: skip
    return weight, exact


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_the_numbers_of_the_codes(format, zeros, axis):
    weight, exact = drawn(format, 64, 5, 32, zeros=zeros, axis=axis, factor=zeros)
    wanted = exact if axis == -2 else exact.T
    assert (weight.shape, weight.ndim, weight.group_size) == (wanted.shape, 2, 32)
    assert weight.dequantise().dtype == "float32" and weight.dequantise("bfloat16").dtype == jnp.bfloat16
    np.testing.assert_allclose(weight.dequantise(), wanted, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(weight.with_groups_of(16).dequantise(), weight.dequantise())


@pytest.mark.parametrize("format", ["int4", "fp4"])
def test_codes_of_4_bits_need_no_table(format):
    weight = drawn(format, 64, 5, 32)[0]
    assert "gather" not in str(jax.make_jaxpr(lambda weight: weight.dequantise())(weight))


@pytest.mark.parametrize("lead", [(), (3,)], ids=str)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_on_a_gpu_a_matrix_is_dequantised_in_parts_to_the_same_bits(format, zeros, lead, monkeypatch):
    monkeypatch.setattr(product_ops.device, "detect", lambda: Chip("gpu", "sm_80"))
    one = drawn(format, 96, 12, 24, zeros=zeros, factor=not zeros, scales="bfloat16")[0]
    weight = jax.tree.map(lambda x: jnp.broadcast_to(x, (*lead, *x.shape)) if lead else x, one)
    for dtype in ("float32", "bfloat16"):
        found = jax.jit(plain, static_argnums=1)(weight, dtype)
        assert found.dtype == dtype and found.shape == (*lead, 96, 12)
        wanted = np.asarray(jax.jit(QuantisedArray.dequantise, static_argnums=1)(weight, dtype))
        np.testing.assert_array_equal(np.asarray(found).view(np.uint8), wanted.view(np.uint8))
    joined = lambda weight: "concatenate" in str(jax.make_jaxpr(plain)(weight))
    assert joined(weight) and not joined(drawn(format, 96, 12, 12 if format in ("int4", "fp4") else 6)[0])
    assert not joined(drawn(format, 96, 12, 24, axis=-1)[0])
    scales = jax.grad(lambda scales: (plain(dataclasses.replace(weight, scales=scales), "float32") ** 2).sum())
    of_dequantise = lambda scales: (dataclasses.replace(weight, scales=scales).dequantise("float32") ** 2).sum()
    given = weight.scales.astype(jnp.float32)
    np.testing.assert_allclose(jax.jit(scales)(given), jax.jit(jax.grad(of_dequantise))(given), rtol=1e-5)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert not joined(weight)  # a group may be divided


def test_eight_codes_are_one_word_with_even_inputs_in_its_lower_half():
    word = packed(jnp.arange(1, 9, dtype=jnp.uint8)[:, None], -2)
    assert word.shape == (1, 1) and hex(int(word[0, 0])) == "0x86427531"


@pytest.mark.parametrize("axis", [-2, -1])
@pytest.mark.parametrize("format, group, step", [("int8", 96, 1 / 254), ("int4", 32, 1 / 8), ("fp8", 32, 1 / 28)])
def test_quantising_takes_the_nearest_code(format, group, step, axis):
    """The error is at most half a step of the group's largest number; of int4, a whole one on its positive end."""
    x = np.random.default_rng(0).standard_normal((2, 96, 7)).astype(np.float32)
    x[0, :, 3] = 0
    given = x if axis == -2 else np.ascontiguousarray(x.swapaxes(1, 2))
    made = quantise(jnp.asarray(given), format, group, axis)
    seen = wide(made.dequantise())
    seen = seen if axis == -2 else seen.swapaxes(1, 2)
    largest = np.repeat(np.abs(x).reshape(2, -1, group, 7).max(axis=2), group, axis=1)
    assert made.dtype == "float32" and made.shape == given.shape and made.group_size == group
    assert (np.abs(seen - x) <= largest * step * 1.01).all()
    assert np.abs(seen - x).mean() < 0.52 * (largest * step).mean()
    np.testing.assert_array_equal(seen[0, :, 3], 0)


def test_int4_uses_its_sixteen_codes():
    x = jnp.linspace(-1, 0.875, 32)[:, None]
    np.testing.assert_array_equal(np.unique(quantise(x, "int4", 32).dequantise()), np.arange(-8, 8) / 8)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_products_are_those_of_the_dequantised_weight(format, dtype, transposed):
    axis = -1 if transposed else -2
    draw = lambda n: drawn(format, 64, n, 32, zeros=n == 7, factor=n == 7, axis=axis, seed=n)
    (a, of_a), (b, of_b) = draw(33), draw(7)
    for rows in (1, 2, 9):
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, 64)), dtype)
        for y, exact in zip(products(x, (a, b), transposed=transposed), (of_a, of_b), strict=True):
            limit = (2.0**-8 if dtype == "bfloat16" else 1e-6) * (np.abs(wide(x)) @ np.abs(exact))
            assert y.dtype == jnp.float32 and (np.abs(wide(y) - wide(x) @ exact) <= limit).all()


def test_a_plain_matrix_beside_quantised_ones_and_groups_along_the_outputs():
    x, plain = jnp.ones((2, 32)), jnp.eye(32)
    other, exact = drawn("int8", 8, 32, 8, axis=-1)  # [32, 8] as it is stored
    turned, numbers = drawn("int4", 32, 5, 32)
    y = products(x, (plain, other, turned))
    np.testing.assert_allclose(y[0], np.ones((2, 32)))
    np.testing.assert_allclose(y[1], np.ones((2, 32)) @ exact.T, rtol=1e-5)
    np.testing.assert_allclose(y[2], np.ones((2, 32)) @ numbers, rtol=1e-5, atol=1e-5)


def test_the_gated_unit():
    (gate, of_gate), (up, of_up) = (drawn("int4", 32, 6, 32, seed=seed) for seed in (1, 2))
    x = jnp.asarray(np.random.default_rng(3).standard_normal((3, 32)), jnp.float32)
    g = wide(x) @ of_gate
    np.testing.assert_allclose(gated_product(x, gate, up), g / (1 + np.exp(-g)) * (wide(x) @ of_up), atol=1e-5)


@pytest.mark.skipif(not library.status().available, reason="no native library")
def test_matrices_that_the_cpp_kernel_takes():
    """Others go to the dot: groups of 80 inputs, transposed 4 bits or groups, and arrays with leading axes."""
    chosen = lambda rows, *kernels: next(
        way.name
        for way in product_ops.IMPLEMENTATIONS
        if way.supports("cpu", jnp.ones((rows, 160)), kernels, jnp.dtype("float32"))
    )
    made = lambda format, group, axis=-2: drawn(format, 160, 8, group, axis=axis)[0]
    taken = made("int8", 160), made("int8", 32), made("fp8", 10), made("int4", 40), made("int8", 160, -1)
    for kernel in taken:
        assert chosen(3, kernel) == "cpu_packed"
    assert chosen(product_ops.NATIVE_MAX_ROWS + 1, taken[0]) == "dot"
    assert chosen(3, jax.tree.map(lambda x: x[None], taken[0])) == "dot"
    for kernel in (made("int8", 80), made("fp4", 160, -1), made("int8", 32, -1)):
        assert chosen(3, kernel) == "dot"
        x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 160)), jnp.float32)
        y = product(x, kernel, transposed=kernel.axis == -1)
        exact = wide(kernel.dequantise())
        np.testing.assert_allclose(y, wide(x) @ (exact if kernel.axis == -2 else exact.T), atol=2e-5)


def test_the_gradient_of_the_rows():
    weight, exact = drawn("int8", 32, 5, 32, factor=True)
    of_x = jax.grad(lambda x: (product(x, weight) ** 2).sum())(jnp.ones((2, 32)))
    np.testing.assert_allclose(of_x, 2 * (np.ones((2, 32)) @ exact) @ exact.T, rtol=1e-4)


def test_it_is_a_pytree_whose_form_is_static():
    weight = drawn("int4", 64, 5, 32)[0]
    again = jax.jit(lambda w: jax.tree.map(lambda x: x, w))(weight)
    assert jax.tree.structure(again) == jax.tree.structure(weight)
    assert jax.eval_shape(lambda w: w.dequantise(), weight).shape == (64, 5)
    assert jax.tree.map(lambda _: "name", weight).values == "name"


def test_unknown_formats_are_refused():
    with pytest.raises(ValueError, match="format='fp4' must be int8, fp8 or int4"):
        quantise(jnp.ones((32, 2)), "fp4", 32)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(product_ops.device, "detect", lambda: Chip("gpu", "sm_90"))
    monkeypatch.setattr(product_ops.device, "processors", lambda: 132)


def test_matrices_that_the_gpu_kernel_takes(monkeypatch, on_hopper):
    """On Hopper, up to 256 rows of 16 bits, or 128 of 4-bit codes and 64 of 8; everything else goes to the dot."""
    made = lambda format, group, axis=-2, **how: drawn(format, 256, 128, group, axis=axis, **how)[0]

    def chosen(rows, *kernels, dtype="bfloat16"):
        x = jnp.ones((rows, kernels[0].shape[kernels[0].axis]), dtype)
        return product_ops._choose(x, kernels, jnp.dtype("float32")).name

    odd = lambda format, group, width: (drawn(format, 256, width, group)[0], 128 if format == "int4" else 64)
    for kernel, most in (
        (made("int4", 64, zeros=True), 256),
        (made("fp4", 32, scales="bfloat16"), 256),
        (made("fp4", 16, scales="float8_e4m3fn", factor=True), 256),
        (made("int8", 256), 256),
        (made("fp8", 128), 256),
        odd("int4", 64, 120),
        odd("int8", 256, 144),
    ):
        assert [chosen(rows, kernel) for rows in (1, most, most + 1)] == ["gpu_packed", "gpu_packed", "dot"]
        assert chosen(3, kernel, kernel) == "gpu_packed"
        assert [chosen(3, kernel, dtype=dtype) for dtype in ("float16", "float32")] == ["gpu_packed", "dot"]
        assert chosen(3, jax.tree.map(lambda x: x[None], kernel)) == "dot"
    of_fp4 = made("fp4", 16), made("fp4", 32, scales="float8_e4m3fn")
    for kernel in (made("int8", 16), made("int8", 256, -1), drawn("int8", 256, 100, 256)[0], *of_fp4):
        assert chosen(3, kernel) == "dot"
    monkeypatch.setattr(product_ops.device, "detect", lambda: Chip("gpu", "sm_80"))
    assert chosen(3, made("int4", 64)) == "dot"


@pytest.mark.parametrize("rows", [3, 40])
def test_under_vmap_the_gpu_kernel_is_called_for_each_element(on_hopper, rows):
    """The kernels have no batching rule of JAX. With 3 rows it is the kernel of few rows."""
    kernel = drawn("int4", 256, 128, 64)[0]
    x = jax.ShapeDtypeStruct((2, rows, 256), jnp.bfloat16)
    of_rows = jax.jit(jax.vmap(lambda x: product(x, kernel)))
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    export = jax.export.export(of_rows, platforms=["cuda"], disabled_checks=[check])(x)
    assert export.out_avals[0].shape == (2, rows, 128)
    assert "stablehlo.while" in export.mlir_module() and "mosaic_gpu_v2" in export.mlir_module()


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(values=(64, 128), scales=(8, 128)), r"values uint32\[64, 128\] must be uint32\[32, 128\]"),
        (dict(values=(32, 256)), r"scales float32\[4, 128\] must be float32\[4, 256\]"),
        (dict(scales=(4, 64)), r"scales float32\[4, 64\] must be float32\[4, 128\]"),
        (dict(zero_points=(1, 128)), r"zero_points int8\[1, 128\] must be int8\[4, 128\]"),
        (dict(zero_points="float32"), r"zero_points float32\[4, 128\] must be int8"),
        (dict(factor=(1, 64)), r"factor float32\[1, 64\] must be float32\[1, 128\]"),
    ],
    ids=["more inputs", "scales too narrow", "scales of fewer outputs", "one row of zero points", "floats", "factor"],
)
def test_the_gpu_kernel_refuses_arrays_that_do_not_fit(on_hopper, rows, change, message):
    """It would read beyond their ends, where the CPU and XLA's dot raise an error."""
    kernel = drawn("int4", 256, 128, 64, zeros=True, factor=True)[0]
    other = lambda x, to: x.astype(to) if isinstance(to, str) else jnp.resize(x, to)
    second = dataclasses.replace(kernel, **{name: other(getattr(kernel, name), to) for name, to in change.items()})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda x: products(x, (kernel, second)), jnp.ones((rows, 256), jnp.bfloat16))
