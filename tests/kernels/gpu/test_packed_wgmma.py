"""Products with packed matrices by wgmma: in JAX's interpreter, thread by thread on the PTX model, what is served."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import packed_codes_sm90 as codes
from pallas_kernels.gpu import packed_sums_sm90 as packed_sums
from pallas_kernels.gpu import packed_wgmma_sm90 as kernel
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.packed_wgmma_config import (
    MAX_ROWS,
    SHARED_BYTES,
    SHARED_BYTES_OF_TWO,
    WAYS,
    PackedWgmmaConfig,
    choose,
    cost,
    supports,
    ways,
)
from tests.kernels.gpu.simt import Arith, Fragment, Machine, emulated
from tests.kernels.gpu.test_packed_product import MODELS, NVFP4, Memory
from tests.kernels.gpu.test_warp_mma import place_tile
from tests.ops.test_quantised import drawn

INTERPRETS = tuple(int(n) for n in jax.__version__.split(".")[:2]) >= (0, 11)
CASES = {
    "int4": dict(format="int4", group=64, scale_dtype="bfloat16"),
    "int4, small groups": dict(format="int4", group=32, scale_dtype="float32", rows=9, depth=64, stages=4),
    "AWQ": dict(format="int4", group=128, scale_dtype="float16", has_zeros=True, warpgroups=4, widths=(256, 512)),
    "one group of 4 bits": dict(format="int4", group=512, scale_dtype="bfloat16", has_zeros=True, depth=256),
    "MXFP4": dict(format="fp4", group=32, scale_dtype="bfloat16", rows=70, depth=64, stages=5),
    "int8": dict(format="int8", group=512, scale_dtype="float32", rows=64),
    "GPTQ of 8 bits": dict(
        format="int8", group=64, scale_dtype="bfloat16", has_zeros=True, dtype="bfloat16", widths=(128,)
    ),
    "int4, 100 rows of a CTA": dict(format="int4", group=64, scale_dtype="bfloat16", rows=100, most_rows=128),
    "MXFP4, 200 rows in two wide tiles": dict(
        format="fp4", group=32, scale_dtype="bfloat16", rows=200, most_rows=128, depth=64, stages=5
    ),
    "AWQ of float16": dict(
        format="int4", group=128, scale_dtype="float16", has_zeros=True, dtype="float16", x_dtype="float16"
    ),
    "MXFP4 of float16": dict(format="fp4", group=32, scale_dtype="bfloat16", depth=64, stages=5, x_dtype="float16"),
    "int8 of float16": dict(format="int8", group=512, scale_dtype="float32", rows=64, x_dtype="float16"),
    "fp8 of float16": dict(format="fp8", group=128, scale_dtype="float32", rows=70, most_rows=128, x_dtype="float16"),
    "fp8 blocks": dict(format="fp8", group=256, scale_dtype="float32", rows=33, widths=(512, 256), warpgroups=4),
    "a factor beside one scale": dict(format="int8", group=512, scale_dtype="float32", rows=64, has_factor=True),
    "NVFP4": dict(NVFP4, dtype="bfloat16"),
    "NVFP4 of float16": dict(NVFP4, rows=70, depth=64, stages=5, dtype="float16", x_dtype="float16"),
    "NVFP4, deep stages": dict(NVFP4, rows=32, depth=256, warpgroups=4, widths=(256, 512)),
    "NVFP4, 200 rows in two wide tiles": dict(NVFP4, rows=200, most_rows=128),
}


def config_of(name: str, **fields) -> PackedWgmmaConfig:
    every: dict = dict(rows=21, inner=512, widths=(384, 128), warpgroups=2) | CASES[name] | fields
    config = PackedWgmmaConfig(**every)
    assert not supports(config)
    return config


def drawn_for(config: PackedWgmmaConfig, width: int):
    """A random matrix, and its numbers."""
    how = dict(zeros=config.has_zeros, factor=config.has_factor, scales=config.scale_dtype)
    return drawn(config.format, config.inner, width, config.group, seed=width, **how)


@pytest.mark.skipif(not INTERPRETS, reason="the interpreter of Mosaic GPU kernels needs JAX 0.11")
@pytest.mark.parametrize("name", CASES)
def test_is_the_product(name):
    from tests.kernels.gpu.interpreter import interpreted

    config = config_of(name)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(config.rows, 512)), config.x_dtype)
    matrices, exact = [], []
    for width in config.widths:
        weight, numbers = drawn_for(config, width)
        matrices.append(weight.arrays)
        exact.append(numbers)
    with interpreted():
        found = kernel.packed_product_wgmma(x, tuple(matrices), config)
    for y, numbers in zip(found, exact, strict=True):
        wanted = np.asarray(x, np.float64) @ numbers
        bits = {"bfloat16": 8, "float16": 11}.get(config.dtype)
        rounding = 1e-5 * wanted.std() if bits is None else 2.0**-bits * np.abs(wanted).max()
        assert np.abs(np.asarray(y, np.float64) - wanted).max() <= rounding


def lanes_of(warpgroups: int):
    """(warpgroup, rows of wgmma of a thread's two rows, t) of each thread."""
    lane = np.arange(128 * warpgroups)
    row = lane % 128 // 32 * 16 + lane % 32 // 4
    return lane // 128, np.stack([row, row + 8]), lane % 4


def column_of(row):
    """The column of a warpgroup that is this row of wgmma."""
    return row // 16 * 16 + row % 8 * 2 + row % 16 // 8


def on_model(machine: Machine):
    """The kernel's functions run thread by thread."""
    decode_word = lambda source, target: f"decode {source} {target}"
    return emulated(kernel, machine), mock.patch.multiple(codes, arith=Arith, decode_word=decode_word)


@pytest.mark.parametrize("name", CASES)
def test_every_thread_decodes_its_columns(name):
    config = config_of(name)
    how = dict(zeros=config.has_zeros, scales=config.scale_dtype if config.scales_codes else "float32")
    weight, numbers = drawn(config.format, 512, config.strip, config.group, **how)
    stage = np.asarray(weight.values)[: config.value_rows]
    machine = Machine(128 * config.warpgroups, stage.nbytes + 16 * config.strip)
    if config.scales_codes:
        own = np.asarray(weight.scales)[: config.scale_rows].reshape(-1).view(np.uint8)
        machine.memory[stage.nbytes : stage.nbytes + own.size] = own
    if config.format in ("int4", "fp4"):
        machine.memory[: stage.nbytes] = stage.reshape(-1).view(np.uint8)
    else:
        place_tile(machine.memory, 0, stage)
    wg, row, t = lanes_of(config.warpgroups)
    at = lambda place: np.full(machine.lane.shape, place, np.int32)
    scales = at(stage.nbytes) if config.scales_codes else None
    for span in range(config.depth // config.span):
        group = span * config.span // config.group
        if config.zero_rows:
            zero = np.asarray(weight.zero_points)[group].view(np.uint8)
            machine.memory[stage.nbytes : stage.nbytes + zero.size] = zero
        emulation, arithmetic = on_model(machine)
        with emulation, arithmetic:
            zeros = at(stage.nbytes) if config.zero_rows else None
            found = kernel.decoded_columns(config, at(0), zeros, span, wg.astype(np.int32), scales)
        scale = np.asarray(weight.scales, np.float64)[group]
        scale = (
            np.full_like(scale, codes.unit_of_scaled(config.scale_dtype, config.element))
            if config.scales_codes
            else scale
        )
        places = rows.pair_places(Fragment((64, config.span), kernel._WGMMA))
        for (second, place), word in zip(places, found.registers.flat, strict=True):
            pair = np.ascontiguousarray(word).view(config.element).reshape(-1, 2)
            column = 64 * wg + column_of(row[second])
            for k in range(2):
                wanted = numbers[span * config.span + place + 2 * t + k, column] / scale[column]
                np.testing.assert_allclose(pair[:, k].astype(float), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_thread_reads_the_scales_of_its_columns(dtype):
    config = config_of("int4", scale_dtype=dtype, warpgroups=4, widths=(256,))
    scales = np.random.default_rng(1).uniform(0.5, 1.5, config.strip).astype(dtype)
    machine = Machine(512, scales.nbytes)
    machine.memory[:] = scales.view(np.uint8)
    wg, row, _ = lanes_of(4)
    emulation, arithmetic = on_model(machine)
    with emulation, arithmetic:
        found = kernel.scales_of_columns(config, np.zeros(512, np.int32), wg.astype(np.int32))
    for second, (values,) in enumerate(found.registers.flat):
        np.testing.assert_array_equal(values, scales.astype(np.float32)[64 * wg + column_of(row[second])])


@pytest.mark.parametrize(
    ("splits", "name", "rows_of_x"),
    [
        (1, "int8", 70),
        (3, "int4", 21),
        (2, "one group of 4 bits", 9),
        (2, "int4, 100 rows of a CTA", 100),
        (2, "NVFP4", 40),
        (1, "a factor beside one scale", 64),
    ],  # fmt: skip
)
def test_every_thread_adds_up_and_stores(splits, name, rows_of_x):
    config = config_of(name, splits=splits, rows=rows_of_x, depth=128, stages=3, dtype="float32")
    rng, threads = np.random.default_rng(2), 128 * config.warpgroups
    sums = rng.normal(size=(config.strips, config.tiles, splits, config.strip, config.tile_rows)).astype(np.float32)
    scales = [rng.uniform(0.5, 1.5, (1, width)).astype(config.scale_dtype) for width in config.widths]
    factors = [rng.uniform(0.5, 1.5, (1, width)).astype(np.float32) for width in config.widths if config.has_factor]
    memory, shared = Memory(), -(-config.sum_bytes // 16) * 16
    base = memory.add(np.full(shared * splits, 0xFF, np.uint8))
    places = [memory.add(x) for x in (*scales, *factors)]
    out = memory.add(np.full((rows_of_x, config.joined_width), np.nan, np.float32))
    machine = memory.machine(threads * splits)
    lane = machine.lane
    split, wg = lane // threads, lane % threads // 128
    row = np.stack([lane % 128 // 32 * 16 + lane % 32 // 4 + 8 * second for second in range(2)])
    total = Fragment((64, config.tile_rows), kernel._WGMMA)

    def of_peer(place, rank):
        return base + rank * shared + (place - base) % shared

    every = lambda n: np.full(lane.shape, n, np.int32)
    at_the_end = dict(wait_to_leave=lambda cfg: None, wait_for_all=lambda cfg: None, of_peer=of_peer, arith=Arith)
    emulation, arithmetic = on_model(machine)
    with emulation, arithmetic, mock.patch.multiple(packed_sums, **at_the_end):
        for strip in range(config.strips):
            for tile in range(config.tiles):
                own = sums[strip, tile][split[:, None], (64 * wg + column_of(row)).T]  # [thread, second, row of x]
                for i, (second, place) in enumerate(rows.pair_places(total)):
                    of_pair = [own[lane, second, place + 2 * (lane % 4) + k] for k in range(2)]
                    total.registers.reshape(-1)[i] = tuple(of_pair)
                given = dict(strip=every(strip), tile=every(tile), split=split.astype(np.int32))
                refs = [every(a).astype(np.int64) for a in (*places, out)]
                of_matrices = zip(refs[:2], refs[2:-1] or [None, None], strict=True)
                arrays = [(None, scale, factor)[: 2 + config.has_factor] for scale, factor in of_matrices]
                with mock.patch.object(kernel.lax, "axis_index", given.get):
                    start = (base + split * shared).astype(np.int32)
                    kernel.store_results(config, arrays, refs[-1], start, None, total, wg.astype(np.int32))
    joined = machine.memory[out : out + 4 * rows_of_x * config.joined_width].view(np.float32).reshape(rows_of_x, -1)
    apart = np.split(joined, np.cumsum(config.widths)[:-1], axis=1)
    for i, (y, width) in enumerate(zip(apart, config.widths, strict=True)):
        first, count = config.first_strips[i], -(-width // config.strip)
        wanted = sums[first : first + count].sum(axis=2).transpose(1, 3, 0, 2)
        wanted = wanted.reshape(config.tiles * config.tile_rows, -1)[:rows_of_x, :width]
        wanted = wanted * (scales[i].astype(np.float32) if config.is_whole else 1)
        wanted = wanted * (factors[i] if config.has_factor else 1)
        unit = codes.unit_of_scaled(config.scale_dtype, config.element) if config.scales_codes else 1
        np.testing.assert_allclose(y, wanted * unit, rtol=1e-6)


FORMS = [
    ("int4", 64, "bfloat16"), ("fp4", 32, "float16"), ("fp8", 128, "float32"), ("int8", None, "float32"),
    ("fp4", 16, "float8_e4m3fn"),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_chosen_launch_is_one_that_the_kernel_serves(name, form):
    format, group, scales = form
    for inner, widths in MODELS[name]:
        for n in (17, 33, 64, 65, 200, MAX_ROWS):
            c = choose(132, rows=n, inner=inner, widths=widths, format=format, group=group or inner, scale_dtype=scales)
            if inner % (group or inner) or any(width % 128 for width in widths):
                assert c is None
                continue
            assert c is not None and not supports(c) and cost(c, 132) > 0
            assert (c.most_rows, c.warpgroups, c.depth) in WAYS
            assert c.tile_rows * c.tiles >= n and c.tile_rows <= c.most_rows
            assert c.stages * c.stage_bytes <= SHARED_BYTES
            edges = [i * c.chunks // c.splits for i in range(c.splits + 1)]
            assert min(b - a for a, b in zip(edges, edges[1:], strict=False)) >= 1


def test_codes_are_decoded_once_for_128_rows_where_that_is_faster():
    """On an H100 down of 8B takes 38.9 with 96 rows, in two tiles 48.7; of 256 rows 91 and 73."""
    down = lambda rows, **fields: choose(
        132, rows=rows, inner=14336, widths=(4096,), scale_dtype="bfloat16", **dict(format="int4", group=64) | fields
    )
    assert [down(rows).most_rows for rows in (64, 72, 96, 128, 256)] == [64, 128, 128, 128, 64]
    small_groups = down(96, group=32)
    assert (small_groups.most_rows, small_groups.depth) == (128, 64)
    assert down(192).splits <= 4, "with 7 CTAs of a cluster 102, with 2 72"


def test_a_wide_tile_has_an_sm_for_itself():
    """So it takes its shared memory, and costs the same with less of it; up to 64 rows there is none."""
    sizes: dict = dict(inner=14336, widths=(4096,), format="int4", group=64, scale_dtype="bfloat16")
    wide = choose(132, rows=96, **sizes)
    assert wide is not None and wide.most_rows == 128
    assert wide.stages * wide.stage_bytes > SHARED_BYTES_OF_TWO
    small = dataclasses.replace(wide, stages=3)
    assert small.stages * small.stage_bytes <= SHARED_BYTES_OF_TWO and cost(small, 132) == cost(wide, 132)
    assert {way.most_rows for way in ways(dataclasses.replace(wide, rows=64))} == {64}
    assert {way.most_rows for way in ways(dataclasses.replace(wide, rows=65))} == {64, 128}


WIDE = dict(rows=100, most_rows=128, warpgroups=2)


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(group=48), "groups of 48: wanted multiples of 32"),
        (dict(group=96, inner=768), "groups of 96: a stage of 128 inputs has parts of some"),
        (dict(inner=448), "inner 448: wanted a multiple of 128"),
        (dict(widths=(384,)), "widths (384,): wanted multiples of the 256 columns of a CTA"),
        (dict(widths=(0,)), "widths (0,): wanted multiples"),
        (dict(format="fp4", has_zeros=True), "zero points of fp4: only integers have them"),
        (dict(scale_dtype="uint8"), "scales uint8: wanted floats"),
        (dict(format="fp4", group=32, scale_dtype="float8_e4m3fn"), "or e4m3 of fp4 in groups of 16"),
        (dict(format="fp4", group=16, scale_dtype="bfloat16"), "groups of 16: wanted multiples of 32"),
        (dict(dtype="int8"), "results int8: wanted floats"),
        (dict(splits=5), "5 CTAs of a cluster for 4 stages"),
        (dict(format="int2"), "format int2: wanted one of int8, fp8, int4, fp4"),
        (dict(warpgroups=3), "3 warpgroups: wanted 2 or 4"),
        (dict(stages=2), "2 stages: wanted at least 3"),
        (dict(stages=20), "bytes of shared memory"),
        (dict(rows=40, depth=256), "stages of 256 inputs with 40 rows: wanted at most 128, or 32 rows"),
        (dict(WIDE, group=32), "stages of 128 inputs in groups of 32 with most_rows 128: wanted 64"),
        (dict(WIDE, warpgroups=4), "most_rows 128 with 4 warpgroups: wanted 2, for the registers of a thread"),
        (dict(most_rows=96), "most_rows 96: wanted 64 or 128"),
        (dict(rows=64, stages=3, depth=64), "bytes of sums"),
    ],
)
def test_what_is_not_served_is_refused_with_its_reason(change, reason):
    fields: dict = dict(
        rows=20, inner=512, widths=(256,), format="int4", group=64, scale_dtype="bfloat16", warpgroups=4
    )
    config = PackedWgmmaConfig(**fields | change)
    assert any(reason in found for found in supports(config)), supports(config)
    assert supports(config, chip="sm_80")[0].startswith("chip sm_80")


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_it_lowers_for_cuda(name, splits):
    config = config_of(name, splits=splits)
    matrices = []
    for width in config.widths:
        one, _ = drawn_for(config, width)
        matrices.append(jax.eval_shape(lambda one=one: one.arrays))
    run = jax.jit(lambda x, matrices: kernel.packed_product_wgmma(x, matrices, config))
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    x = jax.ShapeDtypeStruct((config.rows, 512), jnp.dtype(config.x_dtype))
    export = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(x, tuple(matrices))
    assert [y.shape for y in export.out_avals] == [(config.rows, width) for width in config.widths]
    assert "mosaic_gpu_v2" in export.mlir_module()
