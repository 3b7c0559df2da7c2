"""Rows of experts with packed matrices by wgmma: numbers in JAX's interpreter, what is served, and that it lowers."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.expert_product import PACKED
from jattn.ops.expert_rows import padded_count
from jattn.ops.expert_wgmma import tiles_of
from pallas_kernels.gpu import expert_packed_sm90 as kernel
from pallas_kernels.gpu import packed_sums_sm90 as packed_sums
from pallas_kernels.gpu import packed_wgmma_sm90 as packed
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.expert_packed_config import (
    ROW_TILES,
    SHARED_BYTES,
    ExpertPackedConfig,
    choose,
    cost,
    supports,
    tile_rows_of,
)
from tests.kernels.gpu.simt import Arith, Fragment, emulated
from tests.kernels.gpu.test_expert_product import SHAPES
from tests.kernels.gpu.test_packed_product import Memory
from tests.kernels.gpu.test_packed_wgmma import column_of, lanes_of
from tests.ops.test_quantised import drawn

INTERPRETS = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)
FORMS = {
    "int4": dict(format="int4", group=64, scale_dtype="bfloat16"),
    "AWQ": dict(format="int4", group=128, scale_dtype="float16", has_zeros=True),
    "AWQ of 64": dict(format="int4", group=64, scale_dtype="float16", has_zeros=True),
    "int4 of 32": dict(format="int4", group=32, scale_dtype="bfloat16"),
    "MXFP4": dict(format="fp4", group=32, scale_dtype="bfloat16"),
    "NVFP4": dict(format="fp4", group=16, scale_dtype="float8_e4m3fn", has_factor=True),
    "fp8 blocks": dict(format="fp8", group=128, scale_dtype="float32"),
    "int8": dict(format="int8", group=0, scale_dtype="float32"),
    "fp8 of outputs": dict(format="fp8", group=0, scale_dtype="bfloat16"),
}


def case(form: str, tile_rows: int, warpgroups: int, matrices: int, inner: int, width: int, **fields):
    """(config, x, matrices, tiles, the numbers of the matrices, the expert of each row that is used)"""
    sizes = np.array([3, 0, tile_rows + 1, tile_rows, 0])
    padded = -(-sizes // tile_rows) * tile_rows
    form = FORMS[form] | dict(group=FORMS[form]["group"] or inner)
    config = ExpertPackedConfig(
        rows=padded_count(int(sizes.sum()), len(sizes), tile_rows), inner=inner, widths=(width,) * matrices,
        experts=len(sizes), tile_rows=tile_rows, warpgroups=warpgroups, ctas=3, dtype="bfloat16", **form, **fields,
    )  # fmt: skip
    rng, zeros = np.random.default_rng(tile_rows), config.has_zeros
    how = dict(scales=config.scale_dtype, factor=config.has_factor)
    x = rng.standard_normal((config.rows, inner))
    x[padded.sum() :] = np.nan  # rows of no tile
    flat, numbers = [], []
    for m in range(matrices):
        each = [
            drawn(form["format"], inner, width, config.group, seed=10 * m + e, zeros=zeros, **how)
            for e in range(len(sizes))
        ]
        stacked = [[getattr(w, n) for w, _ in each] for n in ("values", "scales", "zero_points", "factor")]
        stacked = [None if arrays[0] is None else np.stack(arrays) for arrays in stacked]
        stacked[1] = np.where((padded > 0)[:, None, None], stacked[1], np.nan).astype(stacked[1].dtype)
        flat.append(tuple(None if array is None else jnp.asarray(array) for array in stacked))
        numbers.append(np.stack([exact for _, exact in each]))
    tiles = tiles_of(jnp.asarray(padded), config)
    return config, jnp.asarray(x, config.x_dtype), flat, tiles, numbers, np.repeat(np.arange(len(sizes)), padded)


@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
@pytest.mark.parametrize(
    "shape",
    [
        ("int4", 8, 2, 1, 256, 256), ("AWQ", 16, 2, 2, 256, 128), ("int4 of 32", 64, 1, 1, 192, 128, 64),
        ("MXFP4", 32, 3, 2, 192, 192, 64), ("fp8 blocks", 8, 4, 2, 256, 256), ("fp8 blocks", 128, 2, 1, 256, 128),
        ("NVFP4", 8, 2, 2, 256, 256), ("NVFP4", 128, 1, 1, 192, 128, 64), ("int8", 64, 2, 1, 256, 128),
        ("fp8 of outputs", 16, 2, 2, 256, 128),
    ],
)  # fmt: skip
def test_is_the_product_of_each_row_and_its_expert(shape):
    """Rows and experts that are not used are NaN. CTAs have more steps than stages, or fewer; many items, or none."""
    from tests.kernels.gpu.interpreter import interpreted

    *shape, depth = shape if len(shape) == 7 else (*shape, 128)
    config, x, matrices, tiles, numbers, expert = case(*shape, depth=depth)
    assert not supports(config)
    with interpreted(detect_races=True):
        found = kernel.expert_packed_product(x, tuple(matrices), tiles, config)
    found, used = np.asarray(found, np.float64)[: len(expert)], np.asarray(x, np.float64)[: len(expert)]
    products = [np.einsum("ni,nio->no", used, w[expert]) for w in numbers]
    wanted = (
        products[0] / (1 + np.exp(-np.maximum(products[0], -700))) * products[1]
        if config.matrices == 2
        else products[0]
    )
    assert (np.abs(found - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-5 * wanted.std()).all()


@pytest.mark.parametrize(("tile_rows", "warpgroups"), [(8, 4), (64, 2)])
def test_every_thread_stores_its_columns(tile_rows, warpgroups):
    config = case("fp8 blocks", tile_rows, warpgroups, 1, 128, 64 * warpgroups * 2)[0]
    rng = np.random.default_rng(0)
    memory, y = Memory(), rng.normal(size=(config.rows, config.width)).astype(np.float32)
    out = memory.add(np.zeros((config.rows, config.width), jnp.bfloat16))
    machine = memory.machine(128 * warpgroups)
    wg, row_of, t = lanes_of(warpgroups)
    every = lambda n: np.full(machine.lane.shape, n, np.int32)
    for row in range(0, config.rows, tile_rows):
        for column in range(0, config.width, config.strip):
            total = Fragment((64, tile_rows), packed._WGMMA)
            for i, (second, place) in enumerate(rows.pair_places(total)):
                at = column + 64 * wg + column_of(row_of[second])
                pair = [y[row + place + 2 * t + k, at] for k in range(2)]
                total.registers.reshape(-1)[i] = tuple(pair)
            ours, theirs = emulated(kernel, machine), emulated(packed, machine)
            with ours, theirs, mock.patch.object(packed_sums, "arith", Arith):
                places = every(out).astype(np.int64)
                kernel.store_pairs(config, places, total, wg.astype(np.int32), every(row), every(column))
    found = machine.memory[out : out + 2 * y.size].view(jnp.bfloat16).reshape(y.shape)
    np.testing.assert_array_equal(found, y.astype(jnp.bfloat16))


@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_warpgroups_ask_for_no_more_registers_than_the_cta_has(warpgroups):
    """setmaxnreg waits for ever for registers that the CTA did not have at its start."""
    at_start = min(65536 // (128 * (warpgroups + 1)) // 8 * 8, 248)
    asked = warpgroups * kernel.COMPUTING_REGISTERS[warpgroups] + kernel.LOADING_REGISTERS[warpgroups]
    assert asked <= (warpgroups + 1) * at_start
    for registers in (kernel.COMPUTING_REGISTERS[warpgroups], kernel.LOADING_REGISTERS[warpgroups]):
        assert registers % 8 == 0 and 24 <= registers <= 256


MODELS = {name: SHAPES[name] for name in ("qwen3_30b", "gpt_oss_20b", "mixtral_8x7b", "olmoe", "hidden 320")} | {
    "deepseek_v3": PACKED["deepseek_v3_fp8"][1],
    "hidden 640": (4, 2, 640, 896),
}


def chosen(model: str, tokens: int, form: str, down: bool, matrices: int = 1) -> ExpertPackedConfig | None:
    experts, top, hidden, width = MODELS[model]
    inner, width = (width, hidden) if down else (hidden, width)
    form = FORMS[form] | dict(group=FORMS[form]["group"] or inner)
    sums = ExpertPackedConfig(rows=8, inner=inner, widths=(width,), experts=1, **form).scales_sums
    tile_rows = tile_rows_of(tokens * top, experts, width, form["format"], sums)
    padded = padded_count(tokens * top, experts, tile_rows)
    return choose(
        132, width=width, matrices=matrices, rows=padded, inner=inner, experts=experts, tile_rows=tile_rows,
        dtype="bfloat16", **form,
    )  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", MODELS)
def test_every_chosen_launch_is_one_that_the_kernel_serves(model, form):
    found = [chosen(model, tokens, form, down) for tokens in (1, 64, 2048) for down in (False, True)]
    inner_widths = MODELS[model][2:]
    is_served = all(n % (128 if FORMS[form]["format"] in ("int8", "fp8") else 64) == 0 for n in inner_widths)
    for config in found:
        if config is not None:
            assert not supports(config) and cost(config) > 0
            assert config.stages >= 3 and config.stages * config.stage_bytes <= SHARED_BYTES
            assert config.ctas <= 132 and cost(config, 1) <= cost(config)
            for stage in packed.matrix_stages(config).values():  # a copy by TMA has a multiple of 128 bytes
                assert np.prod(stage.shape[1:]) * stage.dtype.itemsize % 128 == 0
    group, has_zeros = FORMS[form]["group"], "has_zeros" in FORMS[form]
    is_served &= not has_zeros or all(n % 128 == 0 for n in inner_widths)
    if is_served and all(n % max(group, 64) == 0 for n in inner_widths):
        assert None not in found


def test_tiles_grow_with_the_rows_of_an_expert():
    tiles = [tile_rows_of(n, 8, 256, "fp4", False) for n in (1, 8, 64, 256, 1024, 4096)]
    assert tiles == sorted(tiles) and tiles[0] == 8 and tiles[-1] in ROW_TILES[-3:]
    assert tile_rows_of(4096, 8, 256, "fp8", True) == 128  # sums of a group have registers of their own
    assert tile_rows_of(65536, 8, 2880, "fp4", False) == 128  # three warpgroups have no registers for more


def test_refuses_with_every_reason():
    config, x, matrices, tiles, *_ = case("fp8 blocks", 8, 2, 1, 256, 256)
    bad = dataclasses.replace(config, inner=320, widths=(320,), dtype="float32", has_zeros=True, rows=7)
    reasons = supports(bad)
    for part in ("results float32", "zero points of fp8", "inner 320", "width 320", "7 rows"):
        assert any(part in reason for reason in reasons), reasons
    fields = dict(
        warpgroups=5, tile_rows=12, depth=32, experts=0, ctas=0, format="int5", widths=(256, 128), group=16, stages=2,
    )  # fmt: skip
    for field, value in fields.items():
        assert len(supports(dataclasses.replace(config, **{field: value}))) == 1, field
    (reason,) = supports(dataclasses.replace(config, warpgroups=1, widths=(64,)))
    assert reason == "64 columns of a CTA: wanted a multiple of 128"
    of_zeros = dict(format="int4", group=128, has_zeros=True, widths=(192,), warpgroups=3)
    (reason,) = supports(dataclasses.replace(config, **of_zeros))
    assert reason == "192 zero points of a stage: wanted a multiple of 128"
    (reason,) = supports(dataclasses.replace(config, tile_rows=128, rows=128, widths=(256, 256)))
    assert reason == "sums of 128 rows, 2 matrices: wanted 128"
    of_32 = case("int4 of 32", 64, 2, 1, 256, 128, depth=128)[0]
    assert supports(of_32) == ["stages of 128 inputs in groups of 32 with 64 rows: wanted 64"]
    (reason,) = supports(dataclasses.replace(config, stages=13))
    assert "bytes of shared memory: too many" in reason
    assert "chip sm_100" in supports(config, chip="sm_100")[0]
    with pytest.raises(NotImplementedError, match="inner 320"):
        kernel.expert_packed_product(x, tuple(matrices), tiles, bad)
    with pytest.raises(ValueError, match=r"x bfloat16\[8, 256\] must be bfloat16\[\d+, 256\]"):
        kernel.expert_packed_product(x[:8], tuple(matrices), tiles, config)
    with pytest.raises(ValueError, match=r"tiles int32\[1, 3\] must be int32\[\d+, 3\]"):
        kernel.expert_packed_product(x, tuple(matrices), tiles[:1], config)


@pytest.mark.parametrize(
    ("model", "form", "matrices", "tokens"),
    [("qwen3_30b", "fp8 blocks", 2, 64), ("gpt_oss_20b", "MXFP4", 1, 256), ("mixtral_8x7b", "AWQ", 1, 2048),
     ("deepseek_v3", "int8", 2, 2048), ("olmoe", "int4 of 32", 2, 300), ("olmoe", "NVFP4", 2, 300),
     ("olmoe", "AWQ", 1, 1)],
)  # fmt: skip
def test_it_lowers_for_cuda(model, form, matrices, tokens):
    config = chosen(model, tokens, form, False, matrices)
    assert config is not None
    four, array = config.format in ("int4", "fp4"), jax.ShapeDtypeStruct
    e, i, w = config.experts, config.inner, config.width
    codes = {"int8": jnp.int8, "fp8": jnp.uint8}.get(config.format, jnp.uint32)
    matrix = array((e, i // 8 if four else i, w), codes), array((e, i // config.group, w), config.scale_dtype)
    matrix += (array((e, i // config.group, w), jnp.int8) if config.has_zeros else None,)
    matrix += (array((e, 1, w), jnp.float32) if config.has_factor else None,)
    run = lambda x, tiles, matrices: kernel.expert_packed_product(x, matrices, tiles, config)
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    export = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=[check])(
        array((config.rows, i), jnp.bfloat16), array((1 + config.tiles, 3), jnp.int32), (matrix,) * matrices
    )
    assert export.out_avals[0].shape == (config.rows, w) and "mosaic_gpu_v2" in export.mlir_module()


def test_a_gate_and_up_of_many_rows_are_two_launches():
    assert chosen("mixtral_8x7b", 2048, "AWQ", False, 2) is None and chosen("mixtral_8x7b", 2048, "AWQ", False)
