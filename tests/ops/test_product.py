"""products: every implementation against numpy in float64; the choice; gradients, vmap and jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jattn.device import Chip
from jattn.ops import product as product_ops
from jattn.ops.product import gated_product, product, products
from jattn.ops.quantised import QuantisedArray
from pallas_kernels.gpu.packed_product_config import PackedProductConfig
from pallas_kernels.gpu.packed_wgmma_config import PackedWgmmaConfig

PACKED = ("cpu_packed", "gpu_packed")  # they take quantised matrices only
BY_NAME = {way.name: way for way in product_ops.IMPLEMENTATIONS if way.name not in PACKED}


def draw(seed: int, shape: tuple[int, ...], dtype="float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def chosen(x, *kernels, platform="cpu", dtype="float32") -> str:
    dtype = jnp.dtype(dtype)
    return next(way.name for way in product_ops.IMPLEMENTATIONS if way.supports(platform, x, kernels, dtype))


def only(monkeypatch, name: str) -> None:
    """Skips where the platform has no such implementation."""
    if not BY_NAME[name].supports("cpu", draw(0, (1, 1)), (draw(0, (1, 1)),), jnp.dtype("float32")):
        pytest.skip(f"{name} is not available here")
    monkeypatch.setattr(product_ops, "IMPLEMENTATIONS", (BY_NAME[name],))
    monkeypatch.setattr(product_ops, "NATIVE_MAX_ROWS_WITH_AMX", product_ops.NATIVE_MAX_ROWS)


LAUNCHES = {  # rows, inner, width, format, group: the launch on a Hopper GPU
    (16, 4096, 4096, "int4", 64): PackedProductConfig,
    (16, 4096, 28672, "fp8", 128): PackedProductConfig,
    (17, 4096, 4096, "int4", 64): PackedWgmmaConfig,
    (17, 4096, 4128, "int4", 64): PackedProductConfig,  # columns that wgmma's CTAs do not divide
    (16, 53248, 16384, "fp8", 128): PackedWgmmaConfig,  # Llama 405B: 16 rows of so many inputs fit nowhere else
    (64, 18176, 4544, "fp8", 64): PackedProductConfig,  # Falcon 7B, by CTAs of few warps
    (64, 4096, 28672, "int8", 4096): PackedWgmmaConfig,
    (257, 4096, 4096, "int4", 64): None,
}


@pytest.mark.parametrize("case", LAUNCHES, ids=str)
def test_which_launch_multiplies_packed_rows_on_hopper(case, monkeypatch):
    rows, inner, width, format, group = case
    monkeypatch.setattr(product_ops.device, "processors", lambda: 132)
    monkeypatch.setattr(product_ops.device, "detect", lambda: Chip("gpu", "sm_90"))
    item, codes = (8, "uint32") if format == "int4" else (1, "int8" if format == "int8" else "uint8")
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes[:-1], sizes[-1])
    weight = QuantisedArray(
        values=shape(inner // item, width, codes), scales=shape(inner // group, width, "float32"), zero_points=None,
        factor=None, format=format, dtype=jnp.dtype("bfloat16"),
    )  # fmt: skip
    config = product_ops._gpu_config(shape(rows, inner, "bfloat16"), (weight,), "bfloat16")
    assert type(config) is (LAUNCHES[case] or type(None))


PARTS = {  # rows, inner, width: parts of the inner dimension on a GPU
    (4, 10944, 2048): 18,  # down of DeepSeek V2 Lite
    (64, 10944, 2048): 18,
    (65, 10944, 2048): 1,  # many rows
    (4, 10944, 4096): 1,  # columns for all processors
    (4, 2880, 32): 30,  # router of gpt-oss
    (1, 2880, 32): 30,
    (4, 4096, 64): 1,  # a power of two of parts needs no padding
    (4, 2888, 32): 1,  # no other parts either
    (4, 60, 2056): 1,  # columns for all processors, and inputs that 8 does not divide
    (4, 4096, 8): 32,  # router of Mixtral, which XLA does not divide
    (1, 1536, 40): 32,  # of a Granite mixture
    (64, 4096, 8): 1,  # with more rows it does
    (4, 1024, 8): 1,  # few inputs
    (4, 2736, 1): 1,  # a gate
    (0, 10944, 2048): 1,  # no rows
    (4, 10944, 0): 1,  # no columns
}


@pytest.mark.parametrize("shape", PARTS, ids=str)
def test_few_columns_on_a_gpu_have_parts(shape, monkeypatch):
    rows, inner, width = shape
    x, kernel = draw(rows, (rows, inner), "bfloat16"), draw(1, (inner, width), "bfloat16")
    monkeypatch.setattr(product_ops.device, "detect", lambda: Chip("gpu", "sm_90"))
    monkeypatch.setattr(product_ops, "IMPLEMENTATIONS", (BY_NAME["dot"],))
    traced, parts = str(jax.make_jaxpr(product)(x, kernel)), PARTS[shape]
    assert (f"bf16[{parts},{inner // parts},{width}]" in traced) == (parts > 1)
    assert parts == 1 or f"[{parts},1," not in traced, "XLA:GPU computes a batch of vectors by a reduction"
    wanted = wide(x) @ wide(kernel)
    assert np.abs(wide(product(x, kernel)) - wanted).max(initial=0) < 1e-5 * inner**0.5


def test_operands_divided_over_an_explicit_mesh_that_is_not_set_have_no_parts(monkeypatch):
    """JAX refuses to divide an axis of Explicit sharding further. `is_partitioned` knows of meshes that are set."""
    monkeypatch.setattr(product_ops.device, "detect", lambda: Chip("gpu", "sm_90"))
    monkeypatch.setattr(product_ops, "IMPLEMENTATIONS", (BY_NAME["dot"],))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = lambda array, *axes: jax.device_put(array, jax.NamedSharding(mesh, PartitionSpec(*axes)))
    x, kernel = draw(0, (4, 2736), "bfloat16"), draw(1, (2736, 64), "bfloat16")
    found = jax.jit(product)(place(x), place(kernel, "x", None))
    assert np.abs(wide(found) - wide(x) @ wide(kernel)).max() < 1e-3


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("shape", [(2736,), (2, 3, 2736)], ids=str)
def test_rows_may_have_other_axes(shape, platform, monkeypatch):
    monkeypatch.setattr(product_ops.device, "detect", lambda: Chip(platform))
    x, kernel = draw(0, shape, "bfloat16"), draw(1, (2736, 64), "bfloat16")
    np.testing.assert_allclose(product(x, kernel), wide(x) @ wide(kernel), atol=1e-3)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_implementation_is_right(name, dtype, monkeypatch):
    only(monkeypatch, name)
    for rows in (1, 2, 9, 40):
        x, kernels = draw(rows, (rows, 65), dtype), (draw(1, (65, 33), dtype), draw(2, (65, 7), dtype))
        for transposed in (False, True):
            given = tuple(k.T for k in kernels) if transposed else kernels
            for y, kernel in zip(products(x, given, transposed=transposed), kernels, strict=True):
                assert y.dtype == jnp.float32
                np.testing.assert_allclose(wide(y), wide(x) @ wide(kernel), atol=2e-5)
        low = product(x, kernels[0], dtype=dtype)
        assert low.dtype == dtype
        np.testing.assert_allclose(wide(low), wide(x) @ wide(kernels[0]), atol=2e-5, rtol=2.0**-8)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("transposed", [False, True])
def test_derivatives_are_those_of_the_product(name, transposed, monkeypatch):
    only(monkeypatch, name)
    x, w, dx, dw, dy = draw(0, (4, 6)), draw(1, (6, 5)), draw(2, (4, 6)), draw(3, (6, 5)), draw(4, (4, 5))
    turn = (lambda k: k.T) if transposed else (lambda k: k)
    f = lambda x, w: product(x, turn(w), transposed=transposed)
    tangent = jax.jvp(f, (x, w), (dx, dw))[1]
    np.testing.assert_allclose(tangent, wide(dx) @ wide(w) + wide(x) @ wide(dw), atol=1e-5)
    of_x, of_w = jax.jit(lambda x, w: jax.vjp(f, x, w)[1](dy))(x, w)
    np.testing.assert_allclose(of_x, wide(dy) @ wide(w).T, atol=1e-5)
    np.testing.assert_allclose(of_w, wide(x).T @ wide(dy), atol=1e-5)


@pytest.mark.parametrize("name", BY_NAME)
def test_the_gated_unit_and_its_gradient(name, monkeypatch):
    only(monkeypatch, name)
    x, gate, up, dy = draw(0, (4, 6)), draw(1, (6, 5)), draw(2, (6, 5)), draw(3, (4, 5))
    g, u = wide(x) @ wide(gate), wide(x) @ wide(up)
    s = 1 / (1 + np.exp(-g))
    y, pull = jax.vjp(gated_product, x, gate, up)
    np.testing.assert_allclose(y, g * s * u, atol=1e-5)
    dg, du = wide(dy) * u * s * (1 + g * (1 - s)), wide(dy) * g * s
    wanted = dg @ wide(gate).T + du @ wide(up).T, wide(x).T @ dg, wide(x).T @ du
    for seen, expected in zip(pull(dy), wanted, strict=True):
        np.testing.assert_allclose(seen, expected, atol=2e-5)


@pytest.mark.parametrize("name", BY_NAME)
def test_under_vmap_each_element_has_its_own_product(name, monkeypatch):
    only(monkeypatch, name)
    x, w = draw(0, (3, 4, 6)), draw(1, (3, 6, 5))
    np.testing.assert_allclose(jax.vmap(product)(x, w), np.einsum("bti,bio->bto", wide(x), wide(w)), atol=1e-5)
    shared = jax.jit(jax.vmap(product, in_axes=(0, None)))(x, w[0])
    np.testing.assert_allclose(shared, np.einsum("bti,io->bto", wide(x), wide(w[0])), atol=1e-5)


def test_operands_that_the_cpp_kernel_does_not_take_go_to_the_dot():
    few, many = draw(0, (3, 6)), draw(0, (product_ops.NATIVE_MAX_ROWS + 1, 6))
    w = draw(1, (6, 5))
    for x, kernels, platform in (
        (many, (w,), "cpu"), (few, (w,), "gpu"), (few, (w, w.astype(jnp.bfloat16)), "cpu"),
        (few.astype(jnp.float16), (w,), "cpu"), (few.astype(jnp.int32), (w.astype(jnp.int32),), "cpu"),
    ):  # fmt: skip
        assert chosen(x, *kernels, platform=platform) == "dot"
    np.testing.assert_allclose(product(many, w), wide(many) @ wide(w), atol=1e-5)
    np.testing.assert_allclose(product(few.astype(jnp.float16), w), wide(few.astype(jnp.float16)) @ wide(w), atol=1e-5)


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn"])
def test_a_result_that_the_cpp_kernel_does_not_write_is_the_dots(dtype):
    x, w = jnp.arange(12.0).reshape(3, 4) % 5, jnp.eye(4)
    assert chosen(x, w, dtype=dtype) == "dot"
    y = product(x, w, dtype=dtype)
    assert y.dtype == dtype
    np.testing.assert_array_equal(wide(y), wide(x))


def test_with_amx_many_bf16_rows_go_to_the_dot(monkeypatch):
    status = product_ops.library.LibraryStatus(isas=("amx_bf16", "avx512"))
    monkeypatch.setattr(product_ops.library, "status", lambda: status)
    for dtype, name in (("bfloat16", "dot"), ("float32", "cpu_native")):
        w = draw(1, (6, 5), dtype)
        assert chosen(draw(0, (product_ops.NATIVE_MAX_ROWS_WITH_AMX, 6), dtype), w) == "cpu_native"
        assert chosen(draw(0, (product_ops.NATIVE_MAX_ROWS_WITH_AMX + 1, 6), dtype), w) == name


def test_without_the_library_the_dot_remains(monkeypatch):
    monkeypatch.setattr(product_ops.library, "status", lambda: product_ops.library.LibraryStatus(reason="switched off"))
    assert chosen(draw(0, (3, 6)), draw(1, (6, 5))) == "dot"


def test_under_a_mesh_xla_can_divide_the_product_and_partial_sums_have_the_results_dtype():
    """In shard_map each device computes on its own, as without a mesh."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    x, w = draw(0, (4, 6), "bfloat16"), draw(1, (6, 8), "bfloat16")
    f = lambda x, w: product(x, w, dtype="bfloat16")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        divided = str(jax.make_jaxpr(f)(x, w))
        columns = PartitionSpec(None, "x")
        alone = jax.make_jaxpr(jax.shard_map(f, in_specs=(PartitionSpec(), columns), out_specs=columns))(x, w)
    assert "ffi_call" not in divided and "preferred_element_type=bfloat16" in divided
    native = BY_NAME["cpu_native"].supports("cpu", x, (w,), x.dtype)
    assert ("ffi_call" in str(alone)) == native == ("ffi_call" in str(jax.make_jaxpr(f)(x, w)))
