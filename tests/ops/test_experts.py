"""Rows times the matrices of their experts, packed and plain, against numpy in float64."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.device import Chip
from jattn.ops import expert_dots, experts
from jattn.ops.quantised import QuantisedArray
from pallas_kernels.cpu.native import library
from pallas_kernels.gpu import expert_rows_sm80
from pallas_kernels.gpu.packed_product_config import PackedProductConfig
from tests.ops.test_quantised import drawn, wide

SIZES = (3, 0, 17, 1)
PLAIN = ((3, 0, 17, 1), (1,), (0, 1, 0), (0, 0, 0, 2, 0, 0), (0, 400, 0, 3), (60, 0, 68, 1), (0, 0, 700), (1,) * 40)
"""One row, fewer rows than a tile, tiles that end with x, several tiles of an expert, as many experts as rows."""
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def stacked(format, inputs, outputs, group, *, count=4, **how):
    """(the weight with an axis of experts, its numbers [experts, in, out])"""
    each = [drawn(format, inputs, outputs, group, seed=e, **how) for e in range(count)]
    joined = lambda name: [getattr(weight, name) for weight, _ in each]
    arrays = {n: joined(n) for n in ("values", "scales", "zero_points", "factor")}
    arrays = {n: None if x[0] is None else jnp.stack(x) for n, x in arrays.items()}
    return dataclasses.replace(each[0][0], **arrays), np.stack([exact for _, exact in each])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "fp4"])
def test_each_row_is_multiplied_by_its_expert(monkeypatch, format, native):
    if native and not library.status().available:
        pytest.skip("no native library")
    used = []
    monkeypatch.setattr(experts, "_is_native", lambda *args: used.append(native) or native)
    weight, exact = stacked(format, 64, 24, 32, zeros=format.startswith("int"), factor=format.startswith("fp"))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((sum(SIZES) + 2, 64)), jnp.float32)
    y = experts.expert_product(x, weight, jnp.array(SIZES))
    expert = np.repeat(np.arange(len(SIZES)), SIZES)
    wanted = np.einsum("ni,nio->no", wide(x)[: len(expert)], exact[expert])
    assert used == [native] and y.dtype == x.dtype
    assert np.abs(y[: len(expert)] - wanted).max() < 1e-5 * wanted.std()


def drawn_plain(sizes, dtype, *, rows=0, inputs=40, outputs=24):
    """(x with `rows` more rows than have an expert, kernel, sizes, the expert of each row)"""
    rng = np.random.default_rng(len(sizes))
    array = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    expert = np.repeat(np.arange(len(sizes)), sizes)
    return array(len(expert) + rows, inputs), array(len(sizes), inputs, outputs), jnp.array(sizes), expert


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("native", [True, False])
def test_each_row_is_multiplied_by_the_plain_matrix_of_its_expert(monkeypatch, native, dtype):
    if native and not library.status().available:
        pytest.skip("no native library")
    if not native:
        monkeypatch.setattr(experts, "_is_native", lambda *args: False)
    for sizes in PLAIN:
        for rows in (0, 1, 300):
            x, kernel, counts, expert = drawn_plain(sizes, dtype, rows=rows)
            y = jax.jit(lambda *operands: experts.expert_product(*operands))(x, kernel, counts)  # one program
            wanted = np.einsum("ni,nio->no", wide(x)[: len(expert)], wide(kernel)[expert])
            size = np.einsum("ni,nio->no", abs(wide(x))[: len(expert)], abs(wide(kernel))[expert])
            assert y.shape == (x.shape[0], 24) and y.dtype == x.dtype
            found = wide(np.asarray(y)[: len(expert)])  # the other rows hold what was in memory
            assert (np.abs(found - wanted) <= EPSILON[dtype] * np.abs(wanted) + 2.5e-6 * size).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", [expert_dots.looped, expert_dots.batched])
def test_tiles_of_every_length(monkeypatch, form, dtype):
    monkeypatch.setattr(expert_dots, "GATHERED_BYTES", 3 * 40 * 24 * 4)
    for sizes in PLAIN:
        for tile_rows in (2, 16, 256):
            monkeypatch.setattr(expert_dots, "tile_rows_of", lambda rows, experts, tile_rows=tile_rows: tile_rows)
            x, kernel, counts, expert = drawn_plain(sizes, dtype, rows=1)
            y = wide(jax.jit(lambda *operands: form(*operands))(x, kernel, counts))
            wanted = np.einsum("ni,nio->no", wide(x)[: len(expert)], wide(kernel)[expert])
            np.testing.assert_allclose(y[: len(expert)], wanted, rtol=EPSILON[dtype], atol=3e-5)
            assert np.isfinite(y).all()


def test_rows_of_no_expert_reach_no_derivative():
    """They hold what is left in memory where a kernel does not compute them."""
    x, kernel, sizes, expert = drawn_plain((3, 0, 17, 1), "float32", rows=9)
    factor = jnp.asarray(np.random.default_rng(2).standard_normal((len(x), 24)), "float32")
    used = jnp.arange(len(x))[:, None] < len(expert)
    wanted = jax.vjp(lambda x, kernel: expert_dots.batched(x, kernel, sizes), x, kernel)[1](jnp.where(used, factor, 0))
    y, back = jax.vjp(lambda x, kernel: expert_dots.batched(x, kernel, sizes), jnp.where(used, x, jnp.nan), kernel)
    found = back(jnp.where(used, factor, jnp.nan))
    assert not y[len(expert) :].any()
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_sizes_beyond_the_rows_raise_nothing():
    x, kernel, _, _ = drawn_plain((3, 2), "float32")
    for form in (expert_dots.looped, expert_dots.batched):
        y = form(x, kernel, jnp.array((4, 90)))
        np.testing.assert_allclose(y[:4], wide(x)[:4] @ wide(kernel)[0], atol=1e-4)
        np.testing.assert_allclose(y[4:], wide(x)[4:] @ wide(kernel)[1], atol=1e-4)


def test_tiles_are_about_as_long_as_an_expert_has_rows():
    assert [expert_dots.tile_rows_of(rows, 8) for rows in (1, 8, 31, 32, 64, 1 << 20)] == [2, 2, 2, 4, 8, 256]


def test_only_the_matrix_of_a_tile_is_widened():
    """XLA:CPU would convert all bfloat16 matrices in front of the loop."""
    x, kernel, sizes, _ = drawn_plain((1,) * 60, "bfloat16")
    used = jax.jit(expert_dots.looped).lower(x, kernel, sizes).compile().memory_analysis()
    assert used is not None and 0 < used.temp_size_in_bytes < kernel.nbytes / 2


@pytest.mark.parametrize("native", [True, False])
def test_a_batch_of_rows_and_sizes(monkeypatch, native):
    if not native:
        monkeypatch.setattr(experts, "_is_native", lambda *args: False)
    x, kernel, _, _ = drawn_plain((5, 5, 4), "float32")
    x, sizes = x.reshape(2, 7, 40), jnp.array([[2, 0, 5], [0, 6, 1]])
    y = jax.vmap(lambda x, sizes: experts.expert_product(x, kernel, sizes))(x, sizes)
    for one, rows, counts in zip(y, wide(x), sizes, strict=True):
        wanted = np.einsum("ni,nio->no", rows, wide(kernel)[np.repeat(np.arange(3), counts)])
        np.testing.assert_allclose(one, wanted, atol=1e-4)


def no_change(integers) -> np.ndarray:
    return np.zeros(integers.shape, jax.dtypes.float0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("native", [True, False])
def test_derivatives_with_respect_to_rows_and_plain_matrices(monkeypatch, native, dtype):
    """The matrix of an expert with many tiles gets a sum that is rounded once."""
    if not native:
        monkeypatch.setattr(experts, "_is_native", lambda *args: False)
    monkeypatch.setattr(expert_dots, "tile_rows_of", lambda rows, experts: 4)
    for sizes in PLAIN[::2]:
        x, kernel, counts, expert = drawn_plain(sizes, dtype)
        factor = jnp.asarray(np.random.default_rng(1).standard_normal((len(expert), 24)), dtype)

        def derivatives(x, kernel, factor, counts=counts):
            y, back = jax.vjp(lambda *operands: experts.expert_product(*operands, counts), x, kernel)
            return y, *back(factor)

        y, of_x, of_kernel = jax.jit(derivatives)(x, kernel, factor)
        assert (of_x.dtype, of_kernel.dtype) == (x.dtype, x.dtype)
        exact = np.einsum("no,nio->ni", wide(factor), wide(kernel)[expert])
        np.testing.assert_allclose(wide(of_x), exact, rtol=EPSILON[dtype], atol=3e-5)
        exact = np.zeros(kernel.shape)
        np.add.at(exact, expert, np.einsum("ni,no->nio", wide(x), wide(factor)))
        np.testing.assert_allclose(wide(of_kernel), exact, rtol=EPSILON[dtype], atol=1e-4)
        change = jax.jvp(experts.expert_product, (x, kernel, counts), (x, 0 * kernel, no_change(counts)))[1]
        np.testing.assert_allclose(wide(change), wide(y), rtol=2 * EPSILON[dtype], atol=1e-4)


def test_rows_of_each_device_in_shard_map():
    """shard_map checks over which axes of the mesh each value varies."""
    mesh, split, whole = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("x"), jax.P()
    x, kernel, _, _ = drawn_plain((5, 5, 4), "float32")
    sizes = jnp.array([2, 0, 5, 0, 6, 1])
    expert = np.repeat([0, 1, 2, 0, 1, 2], sizes)
    wanted = np.einsum("ni,nio->no", wide(x), wide(kernel)[expert])
    for form in (experts._looped, expert_dots.batched):
        each = jax.shard_map(form, mesh=mesh, in_specs=(split, whole, split), out_specs=split)
        np.testing.assert_allclose(jax.jit(each)(x, kernel, sizes), wanted, atol=1e-4)


def test_derivatives_of_each_device_in_shard_map():
    """shard_map checks over which axes they vary; the result of a custom call varies over none."""
    mesh, split, whole = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("x"), jax.P()
    x, kernel, _, _ = drawn_plain((5, 5, 4), "float32")
    sizes, expert = jnp.array([2, 0, 5, 0, 6, 1]), np.repeat([0, 1, 2, 0, 1, 2], [2, 0, 5, 0, 6, 1])
    each = jax.shard_map(experts.expert_product, mesh=mesh, in_specs=(split, whole, split), out_specs=split)
    of_x, of_kernel = jax.jit(jax.grad(lambda x, kernel: each(x, kernel, sizes).sum(), argnums=(0, 1)))(x, kernel)
    np.testing.assert_allclose(of_x, wide(kernel).sum(axis=2)[expert], atol=1e-4)
    exact = np.zeros(kernel.shape[:2])
    np.add.at(exact, expert, wide(x))
    np.testing.assert_allclose(of_kernel, np.broadcast_to(exact[:, :, None], kernel.shape), atol=1e-4)


def test_the_partitioner_of_a_mesh_gets_a_ragged_dot():
    x, kernel, sizes, _ = drawn_plain((3, 2), "float32")
    traced = lambda: str(jax.make_jaxpr(experts.expert_product)(x, kernel, sizes))
    assert "ragged_dot" not in traced()
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    ):
        assert "ragged_dot" in traced()


def test_other_gpus_multiply_tiles_where_a_ragged_dot_would_copy_much(monkeypatch):
    monkeypatch.setattr(experts.device, "detect", lambda: Chip("gpu", "sm_80"))
    x, kernel, sizes, expert = drawn_plain((3, 0, 17, 1), "bfloat16")
    traced = lambda: str(jax.make_jaxpr(lambda *operands: experts.expert_product(*operands))(x, kernel, sizes))
    assert "ragged_dot" in traced()
    monkeypatch.setattr(experts, "RAGGED_COPY_BYTES", 2 * x.size * kernel.shape[0] - 1)
    assert "ragged_dot" not in traced()
    y = experts.expert_product(x, kernel, sizes)
    wanted = np.einsum("ni,nio->no", wide(x)[: len(expert)], wide(kernel)[expert])
    assert np.abs(wide(y)[: len(expert)] - wanted).max() < 2.0**-7 * np.abs(wanted).max()


@pytest.mark.skipif(not library.status().available, reason="no native library")
def test_what_the_cpp_kernel_takes():
    for dtype in EPSILON:
        assert experts._is_native(*drawn_plain((2, 1), dtype)[:2])
    assert not experts._is_native(*(array.astype(jnp.float8_e4m3fn) for array in drawn_plain((2, 1), "float32")[:2]))
    assert not experts._is_native(jnp.ones((3, 40)), drawn_plain((2, 1), "bfloat16")[1])
    x = jnp.ones((5, 160))
    take = lambda format, group, **how: experts._is_native(x, stacked(format, 160, 8, group, **how)[0])
    assert take("int4", 32) and take("fp4", 32) and take("fp8", 160)
    assert not take("int8", 80) and not take("int8", 160, axis=-1)


def test_the_gradient_of_the_rows():
    weight, exact = stacked("int4", 64, 5, 32, count=2)
    of_x = jax.grad(lambda x: (experts.expert_product(x, weight, jnp.array([1, 2])) ** 2).sum())(jnp.ones((3, 64)))
    for row, e in zip(of_x, (0, 1, 1), strict=True):
        np.testing.assert_allclose(row, 2 * (np.ones(64) @ exact[e]) @ exact[e].T, rtol=1e-4)


@pytest.mark.parametrize("sizes", [(3, 0, 17, 1), (0, 0, 0), (40, 0), (1,) * 9, (16, 32, 15)])
def test_tiles_have_each_row_once(sizes):
    rows = max(sum(sizes), 1)
    config = PackedProductConfig(
        rows=rows, inner=64, widths=(64,), format="int4", group=64, scale_dtype="bfloat16", experts=len(sizes),
    )  # fmt: skip
    expert = np.repeat(np.arange(len(sizes)), sizes)
    seen = []
    for e, first, count in np.asarray(expert_dots.row_tiles(jnp.array(sizes), config.tile_rows, config.tiles)):
        assert count <= config.tile_rows
        assert (expert[first : first + count] == e).all()
        seen += range(first, first + count)
    assert seen == list(range(sum(sizes)))


def test_the_gpu_kernel_takes_few_rows_of_each_expert(monkeypatch):
    monkeypatch.setattr(experts.device, "detect", lambda: Chip("gpu", "sm_90"))
    monkeypatch.setattr(experts.device, "processors", lambda: 132)
    weight = stacked("fp4", 64, 128, 32)[0]
    of_nvfp4 = stacked("fp4", 64, 128, 16, scales="float8_e4m3fn", factor=True)[0]
    config = lambda rows, dtype="bfloat16", of=weight: experts._packed_config(jnp.ones((rows, 64), dtype), (of,))
    chosen, of_small_groups = config(10), config(10, of=of_nvfp4)
    assert of_small_groups is not None and (of_small_groups.group, of_small_groups.has_factor) == (16, True)
    assert chosen is not None and (chosen.experts, chosen.tiles, chosen.widths) == (4, 4, (128,))
    assert config(4 * 128 + 1) is None and config(10, "float32") is None
    of_float16 = config(10, "float16")
    assert of_float16 is not None and of_float16.x_dtype == of_float16.dtype == "float16"


def test_gate_and_up_of_few_rows_are_one_launch(monkeypatch):
    """With at most 8 rows of an expert its tiles have 8 rows. Other forms of gate and up are launches of their own."""
    on_hopper(monkeypatch)
    seen = []

    def packed(x, matrices, config, tiles):
        seen.append(config)
        row, expert, first, count = jnp.arange(x.shape[0])[:, None], tiles[:, 0], tiles[:, 1], tiles[:, 2]
        own = expert[jnp.argmax((row >= first[None]) & (row < (first + count)[None]), axis=1)]
        forms = dict(format=config.format, dtype=np.dtype("bfloat16"))
        weights = [QuantisedArray(values=v, scales=s, zero_points=z, factor=f, **forms) for v, s, z, f in matrices]
        numbers = [weight.dequantise(jnp.float32)[own] for weight in weights]
        return tuple(jnp.einsum("ni,nio->no", x.astype(jnp.float32), each).astype(x.dtype) for each in numbers)

    monkeypatch.setattr(experts.packed_product_sm90, "packed_product", packed)
    gate, of_gate = stacked("fp4", 64, 128, 32)
    up, of_up = jax.tree.map(lambda x: x[::-1], gate), of_gate[::-1]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 64)), "bfloat16")
    sizes, expert = jnp.array([5, 0, 8, 4]), np.repeat(np.arange(4), [5, 0, 8, 4])
    found = experts.expert_products(x, (gate, up), sizes, most_rows=8)
    assert [(config.tile_rows, config.tiles, config.widths) for config in seen] == [(8, 4, (128, 128))]
    for y, matrix in zip(found, (of_gate, of_up), strict=True):
        wanted = np.einsum("ni,nio->no", wide(x)[:17], np.asarray(matrix)[expert])
        assert np.abs(wide(y)[:17] - wanted).max() < 0.02 * np.abs(wanted).max()
    seen.clear()
    experts.expert_products(x, (gate, stacked("int4", 64, 128, 32)[0]), sizes, most_rows=8)
    assert [(config.format, config.widths) for config in seen] == [("fp4", (128,)), ("int4", (128,))]


def test_the_gpu_kernel_is_called_for_each_element_under_vmap_and_refuses_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(experts.device, "detect", lambda: Chip("gpu", "sm_90"))
    monkeypatch.setattr(experts.device, "processors", lambda: 132)
    weight, array = stacked("int4", 64, 128, 32)[0], jax.ShapeDtypeStruct
    of_each = jax.jit(jax.vmap(lambda x, sizes: experts.expert_product(x, weight, sizes)))
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    operands = array((2, 5, 64), jnp.bfloat16), array((2, 4), jnp.int32)
    export = jax.export.export(of_each, platforms=["cuda"], disabled_checks=[check])(*operands)
    assert "stablehlo.while" in export.mlir_module() and "mosaic_gpu_v2" in export.mlir_module()
    for shape, sizes, message in (
        ((5, 32), 4, r"x bfloat16\[5, 32\] must be bfloat16\[5, 64\] in a packed product of 64 inputs"),
        ((5, 64), 3, r"sizes.shape=\(3,\) must be \(4,\): the rows of each expert"),
    ):
        with pytest.raises(ValueError, match=message):
            operands = array(shape, jnp.bfloat16), array((sizes,), jnp.int32)
            jax.eval_shape(lambda x, sizes: experts.expert_product(x, weight, sizes), *operands)


def on_hopper(monkeypatch):
    """A Hopper GPU is found, and the launch is replaced by a formula; the list of its configs."""
    monkeypatch.setattr(experts.device, "detect", lambda: Chip("gpu", "sm_90"))
    monkeypatch.setattr(experts.device, "processors", lambda: 132)
    monkeypatch.setattr(expert_rows_sm80, "serves", lambda *_: False)
    seen = []

    def of_each_row(x, matrix, tiles, config):
        expert = jnp.repeat(tiles[1:, 0], config.tile_rows)
        return jnp.einsum("ni,nio->no", x.astype(jnp.float32), matrix.astype(jnp.float32)[expert])

    def product(x, matrices, tiles, config):
        seen.append(config)
        products = [of_each_row(x, matrix, tiles, config) for matrix in matrices]
        return (jax.nn.silu(products[0]) * products[1] if len(products) == 2 else products[0]).astype(x.dtype)

    def packed(x, matrices, tiles, config):
        form = dict(format=config.format, dtype=np.dtype(jnp.bfloat16))
        weights = [QuantisedArray(values=v, scales=s, zero_points=z, factor=f, **form) for v, s, z, f in matrices]
        return product(x, [weight.dequantise(jnp.float32) for weight in weights], tiles, config)

    monkeypatch.setattr(experts.expert_wgmma, "kernels", types.SimpleNamespace(expert_product=product))
    monkeypatch.setattr(experts.expert_packed, "kernels", types.SimpleNamespace(expert_packed_product=packed))
    return seen


def of_16_bits(count=4, hidden=64, width=128, dtype="bfloat16"):
    rng = np.random.default_rng(1)
    shapes = (count, hidden, width), (count, hidden, width), (count, width, hidden)
    return [jnp.asarray(rng.standard_normal(shape) / shape[1] ** 0.5, dtype) for shape in shapes]


def test_hopper_multiplies_padded_rows_of_16_bits(monkeypatch):
    seen, (gate, up, down) = on_hopper(monkeypatch), of_16_bits()
    tile_rows = experts.choose_tile_rows(20, "bfloat16", [gate, up, down])
    sizes = np.array([tile_rows, 0, 2 * tile_rows, tile_rows])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5 * tile_rows, 64)), "bfloat16")
    expert = np.repeat(np.arange(4), sizes)
    h = experts.silu_expert_product(x, gate, up, jnp.asarray(sizes), tile_rows)
    y = experts.expert_product(h, down, jnp.asarray(sizes), tile_rows)
    assert [config.matrices for config in seen] == [2, 1] and tile_rows > 1
    rows = wide(x)[: len(expert)]
    of_gate, of_up = (np.einsum("ni,nio->no", rows, wide(matrix)[expert]) for matrix in (gate, up))
    wanted = np.einsum("ni,nio->no", of_gate / (1 + np.exp(-of_gate)) * of_up, wide(down)[expert])
    assert np.abs(wide(y)[: len(expert)] - wanted).max() < 0.02 * np.abs(wanted).max()
    both = jax.vmap(lambda x: experts.expert_product(x, down, jnp.asarray(sizes), tile_rows))(jnp.stack([h, 2 * h]))
    np.testing.assert_array_equal(both[0], y)


def test_gate_and_up_are_dequantised_for_one_launch_where_none_takes_them_packed(monkeypatch):
    seen = on_hopper(monkeypatch)
    monkeypatch.setattr(experts.expert_packed, "choose", lambda *_, **__: None)
    (gate, _), (up, _), (few, _) = (stacked(format, 64, 128, 32) for format in ("fp4", "int4", "int4"))
    tile_rows = experts.choose_tile_rows(1024, "bfloat16", [gate, up])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((11 * tile_rows, 64)), "bfloat16")
    sizes = tile_rows * jnp.array([1, 0, 8, 2])
    found = experts.silu_expert_product(x, gate, up, sizes, tile_rows)
    plain = experts.silu_expert_product(x, *(kernel.dequantise("bfloat16") for kernel in (gate, up)), sizes, tile_rows)
    np.testing.assert_array_equal(found, plain)
    assert [config.matrices for config in seen] == [2, 2]
    monkeypatch.setattr(experts, "DEQUANTISED_BYTES", 2 * 2 * 4 * 64 * 128 - 1)
    experts.silu_expert_product(x, gate, up, sizes, tile_rows)
    assert [config.matrices for config in seen[2:]] == [1, 1]
    taken = []

    def packed(x, kernels, *_):
        taken.append(kernels)
        return [x @ jnp.ones((64, 128), x.dtype) for _ in kernels]

    monkeypatch.setattr(experts, "_packed", packed)
    experts.silu_expert_product(x[:8], few, up, jnp.array([8, 0, 0, 0]), 1)
    assert taken == [(few, up)] and len(seen) == 4


def test_gate_and_up_need_the_rows_of_each_expert(monkeypatch):
    on_hopper(monkeypatch)
    gate, up, _ = of_16_bits()
    for tile_rows in (1, 8):
        with pytest.raises(ValueError, match=r"sizes.shape=\(3,\) must be \(4,\): the rows of each expert"):
            experts.silu_expert_product(jnp.ones((16, 64), "bfloat16"), gate, up, jnp.array([8, 0, 8]), tile_rows)


def packed_experts(form, count, hidden, width):
    """gate, up and down without numbers. form: (format, group, dtype of the scales)"""
    format, group, scales = form
    array, four = jax.ShapeDtypeStruct, format in ("int4", "fp4")

    def one(inputs, outputs):
        values = array((count, inputs // 8 if four else inputs, outputs), jnp.uint32 if four else jnp.uint8)
        found = array((count, inputs // (group or inputs), outputs), scales)
        return QuantisedArray(values=values, scales=found, format=format, dtype=np.dtype(jnp.bfloat16))

    return [one(hidden, width), one(hidden, width), one(width, hidden)]


FP8, MXFP4 = ("fp8", 128, "float32"), ("fp4", 32, "bfloat16")


@pytest.mark.parametrize(
    ("form", "shape", "top", "wanted"),
    [(FP8, (128, 2048, 768), 8, {1: 1, 64: 8, 256: 32, 2048: 64, 8192: 128}),
     (FP8, (256, 7168, 2048), 8, {64: 8, 2048: 64}), (MXFP4, (32, 2880, 2880), 4, {1: 1, 64: 1, 256: 64})],
)  # fmt: skip
def test_where_hopper_multiplies_padded_rows_packed(monkeypatch, form, shape, top, wanted):
    """Few rows of few experts are left to the kernel that divides the inner dimension, which pads nothing."""
    on_hopper(monkeypatch)
    matrices = packed_experts(form, *shape)
    assert {n: experts.choose_tile_rows(n * top, jnp.bfloat16, matrices) for n in wanted} == wanted
    many = 65536 * top
    is_packed = experts.expert_packed.choose_tile_rows(many, "bfloat16", matrices) > 1
    assert is_packed == (form == MXFP4)  # its sums are not scaled
    assert experts.choose_tile_rows(many, jnp.bfloat16, matrices) > 1  # those of fp8 are padded and dequantised


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
def test_hopper_multiplies_padded_rows_packed(monkeypatch, format):
    seen = on_hopper(monkeypatch)
    zeros = format == "int4"
    (gate, of_gate), (up, of_up), (down, of_down) = (
        stacked(format, *sizes, 64, zeros=zeros) for sizes in ((128, 256), (128, 256), (256, 128))
    )
    sizes, rng = np.array([8, 0, 16, 8]), np.random.default_rng(0)
    x, expert = jnp.asarray(rng.standard_normal((40, 128)), "bfloat16"), np.repeat(np.arange(4), sizes)
    h = experts.silu_expert_product(x, gate, up, jnp.asarray(sizes), 8)
    y = experts.expert_product(h, down, jnp.asarray(sizes), 8)
    assert [config.matrices for config in seen] == [2, 1] and {config.format for config in seen} == {format}
    rows = wide(x)[: len(expert)]
    of_gate, of_up = (np.einsum("ni,nio->no", rows, numbers[expert]) for numbers in (of_gate, of_up))
    wanted = np.einsum("ni,nio->no", of_gate / (1 + np.exp(-of_gate)) * of_up, of_down[expert])
    assert np.abs(wide(y)[: len(expert)] - wanted).max() < 0.02 * np.abs(wanted).max()
    both = jax.vmap(lambda x: experts.expert_product(x, down, jnp.asarray(sizes), 8))(jnp.stack([h, 2 * h]))
    np.testing.assert_array_equal(both[0], y)
    plain_gate, plain_up = (matrix.dequantise(jnp.bfloat16) for matrix in (gate, up))

    def gradient(*operands):
        total = lambda x: experts.silu_expert_product(x, *operands).astype(jnp.float32)
        return wide(jax.grad(lambda x: (total(x) ** 2).sum())(x[:32]))

    found, wanted = gradient(gate, up, jnp.asarray(sizes), 8), gradient(plain_gate, plain_up, jnp.asarray(sizes))
    assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()
    half = lambda array: None if array is None else array[:, ::2]
    other = dataclasses.replace(up, scales=half(up.scales), zero_points=half(up.zero_points))  # in larger groups
    seen.clear()
    experts.silu_expert_product(x, gate, other, jnp.asarray(sizes), 8)
    assert [config.matrices for config in seen] == [1, 1]  # each in a launch of its own


def test_what_hopper_does_not_take(monkeypatch):
    seen, matrices = on_hopper(monkeypatch), of_16_bits()
    assert experts.choose_tile_rows(20, "float32", matrices) == 1
    assert experts.choose_tile_rows(20, "bfloat16", of_16_bits(width=96)) == 1
    assert experts.choose_tile_rows(20, "bfloat16", [stacked("int4", 64, 128, 32)[0]]) == 1  # multiplied packed
    assert experts.choose_tile_rows(2000, "bfloat16", [stacked("int4", 64, 128, 32)[0]]) > 1  # dequantised
    experts.expert_product(jnp.ones((8, 64), "bfloat16"), matrices[0], jnp.array([3, 0, 5, 0]))  # rows are not padded
    assert not seen
    monkeypatch.setattr(experts.device, "detect", lambda: Chip("gpu", "sm_80"))
    assert experts.choose_tile_rows(20, "bfloat16", matrices) == 1


def test_derivatives_of_padded_rows_are_those_of_the_dots(monkeypatch):
    on_hopper(monkeypatch)
    gate, up, _ = of_16_bits()
    sizes, x = jnp.array([8, 0, 8, 0]), jnp.asarray(np.random.default_rng(0).standard_normal((16, 64)), "bfloat16")
    total = lambda tile_rows: (
        lambda *args: (experts.silu_expert_product(*args, sizes, tile_rows).astype(jnp.float32) ** 2).sum()
    )
    found, wanted = (jax.grad(total(tile_rows), (0, 1, 2))(x, gate, up) for tile_rows in (8, 1))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == jnp.bfloat16 and np.abs(wide(one) - wide(other)).max() <= 0.02 * np.abs(wide(other)).max()
