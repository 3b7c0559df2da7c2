"""The product with packed matrices: every thread on the PTX model against numpy in float64, and what is served."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jattn.ops.quantised import PLACES
from pallas_kernels.gpu import packed_codes_sm90 as codes
from pallas_kernels.gpu import packed_product_sm90 as kernel
from pallas_kernels.gpu import packed_ring_sm90 as packed_ring
from pallas_kernels.gpu import packed_rows_sm90 as packed_rows
from pallas_kernels.gpu import packed_sums_sm90 as packed_sums
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import queries_sm90 as queries
from pallas_kernels.gpu.packed_product_config import (
    BITS,
    MAX_ROWS,
    PackedProductConfig,
    choose,
    cost,
    supports,
)
from tests.kernels.gpu.simt import Arith, Machine, emulated
from tests.ops.test_quantised import FP4, drawn

NVFP4: dict = dict(format="fp4", group=16, scale_dtype="float8_e4m3fn", has_factor=True)
CASES = {
    "int4": dict(format="int4", group=64, scale_dtype="bfloat16", unroll=2),
    "int4, a group within a step": dict(format="int4", group=32, scale_dtype="float32", unroll=4, across=2, along=2),
    "AWQ": dict(format="int4", group=128, scale_dtype="bfloat16", has_zeros=True, unroll=2, splits=2),
    "MXFP4": dict(format="fp4", group=32, scale_dtype="bfloat16", unroll=1, rows=13, across=1, along=4, splits=2),
    "int8": dict(format="int8", group=256, scale_dtype="float32", unroll=2),
    "GPTQ of 8 bits": dict(format="int8", group=64, scale_dtype="bfloat16", has_zeros=True, splits=4),
    "fp8 blocks": dict(format="fp8", group=128, scale_dtype="float32", unroll=2, rows=11),
    "three tiles of mma": dict(format="int4", group=64, scale_dtype="bfloat16", unroll=2, rows=23),
    "two tiles of 32 rows": dict(format="int4", group=32, scale_dtype="bfloat16", rows=59, splits=2),
    "fp8, two tiles of 24 rows": dict(format="fp8", group=64, scale_dtype="float32", rows=41),
    "one group of 4 bits": dict(format="int4", group=256, scale_dtype="bfloat16", has_zeros=True),
    "AWQ of float16": dict(
        format="int4", group=128, scale_dtype="float16", has_zeros=True, unroll=2, x_dtype="float16"
    ),
    "one group of float16": dict(format="int4", group=256, scale_dtype="float32", x_dtype="float16", splits=2),
    "MXFP4 of float16": dict(format="fp4", group=32, scale_dtype="bfloat16", rows=13, x_dtype="float16"),
    "GPTQ of 8 bits, float16": dict(format="int8", group=64, scale_dtype="float16", has_zeros=True, x_dtype="float16"),
    "int8 of float16": dict(format="int8", group=256, scale_dtype="float32", unroll=2, x_dtype="float16"),
    "fp8 of float16": dict(format="fp8", group=128, scale_dtype="float32", rows=11, x_dtype="float16"),
    "one scale of fp8, float16": dict(format="fp8", group=256, scale_dtype="float32", x_dtype="float16"),
    "parts of 2 and 3 steps": dict(format="int4", group=32, scale_dtype="bfloat16", splits=3, ring=5),
    "parts of 1 and 2 steps of 8 bits": dict(format="fp8", group=32, scale_dtype="float32", splits=5, rows=9),
    "experts": dict(format="int4", group=64, scale_dtype="bfloat16", has_zeros=True, unroll=2, rows=20, experts=3),
    "a factor beside one scale": dict(format="int8", group=256, scale_dtype="float32", has_factor=True, rows=11),
    "NVFP4": dict(NVFP4, unroll=2),
    "NVFP4 of float16": dict(NVFP4, rows=13, across=1, along=4, splits=2, x_dtype="float16"),
    "NVFP4, two tiles of 32 rows": dict(NVFP4, unroll=2, rows=59),
    "NVFP4 without a factor": dict(NVFP4, has_factor=False),
    "parts of 2, 3 and 3 steps": dict(format="int4", group=64, scale_dtype="float32", splits=3),
    "experts of NVFP4": dict(NVFP4, unroll=2, rows=20, experts=3),
}
TILES = [(2, 0, 7), (0, 7, 13), (1, 20, 0)]  # (expert, first row, rows)


class Memory:
    """Arrays one after the other in the machine's memory, with so many bytes between them."""

    def __init__(self, gap: int = 0):
        self.parts, self.size, self.gap = [], 0, gap

    def add(self, array: np.ndarray) -> int:
        at, self.size = self.size, self.size + -(-array.nbytes // 16) * 16 + self.gap
        self.parts.append((at, np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        return at

    def machine(self, threads: int) -> Machine:
        made = Machine(threads, self.size)
        for at, raw in self.parts:
            made.memory[at : at + raw.size] = raw
        return made


def run(cfg: PackedProductConfig, x, weights, tiles=None, copies_late: bool = False) -> list[np.ndarray]:
    """y of each matrix, computed thread by thread. copies_late: what cp.async copies is there only once it was waited
    for, as late as the card may bring it; else at once, as early."""
    memory = Memory(gap=4096)
    shared = 4 * cfg.shared_floats
    base, addresses = memory.add(np.full(shared * cfg.splits, 0xFF, np.uint8)), [memory.add(x)]
    if tiles is not None:
        addresses.append(memory.add(np.array(tiles, np.int32)))
    for weight in weights:
        addresses += [memory.add(np.asarray(y)) for y in weight.arrays if y is not None]
    out = memory.add(np.full((cfg.rows, cfg.joined_width), np.nan, np.float32))
    machine = memory.machine(128 * cfg.warpgroups * cfg.splits)
    machine.copies_late = copies_late
    machine.bounds = [(at, at + raw.size) for at, raw in memory.parts[1:]]  # the first is shared memory
    every = lambda n: np.full(machine.lane.shape, n, np.int32)
    whole = machine.lane // 128

    def of_peer(place, rank):
        return base + rank * shared + (place - base) % shared

    swaps = dict(_hold=lambda: None, _wait_for_rows=lambda: None)
    at_the_end = dict(wait_to_leave=lambda cfg: None, wait_for_all=lambda cfg: None, of_peer=of_peer, arith=Arith)
    with (
        emulated(kernel, machine),
        mock.patch.multiple(kernel, **swaps),
        mock.patch.multiple(packed_sums, **at_the_end),
        mock.patch.multiple(codes, arith=Arith, decode_word=lambda source, target: f"decode {source} {target}"),
        mock.patch.object(packed_rows, "arith", Arith),
        mock.patch.object(packed_ring, "arith", Arith),
        mock.patch.object(queries, "arith", Arith),
    ):
        for strip in range(cfg.strips):
            for tile in range(cfg.tiles) if tiles is None else [i for i, (_, _, count) in enumerate(tiles) if count]:
                split, wg = whole // cfg.warpgroups, whole % cfg.warpgroups
                place, refs = base + split * shared, [every(a).astype(np.int64) for a in (*addresses, out)]
                with mock.patch.object(kernel.lax, "axis_index", dict(split=split, wg=wg).get):
                    kernel._multiply(cfg, refs, place, every(strip), every(tile))
    y = machine.memory[out : out + 4 * cfg.rows * cfg.joined_width].view(np.float32).reshape(cfg.rows, -1)
    return np.split(y, np.cumsum(cfg.widths)[:-1], axis=1)


@pytest.mark.parametrize("group", [64, 256])
def test_rows_of_any_magnitude_times_fp8(group):
    """Rows become float16 by a power of two for each run: large, tiny and mixed ones, and zeros, keep their bits."""
    cfg = PackedProductConfig(rows=7, inner=256, widths=(128,), format="fp8", group=group, scale_dtype="float32")
    x = np.random.default_rng(3).normal(size=(cfg.rows, cfg.inner))
    x[1:6] *= np.array([1e30, 1e-30, 2.0**-110, 3e4, 0.0])[:, None]
    x[4, ::16], x[6, :128] = 1e-4, x[6, :128] * 1e9
    x = x.astype(ml_dtypes.bfloat16)
    weight, numbers = drawn("fp8", 256, 128, group)
    (y,) = run(cfg, x, [weight])
    wanted = np.float64(x) @ numbers
    assert (np.abs(y - wanted).max(axis=1) <= 1e-5 * wanted.std(axis=1)).all()
    assert not y[5].any()


def stacked(weights):
    join = lambda name: None if getattr(weights[0], name) is None else jnp.stack([getattr(w, name) for w in weights])
    return dataclasses.replace(weights[0], **{n: join(n) for n in ("values", "scales", "zero_points", "factor")})


def error_of(name, copies_late: bool = False) -> float:
    """The largest error of a matrix over the spread of its results; NaN where a result is NaN, or was not stored."""
    fields = dict(rows=3, inner=256, widths=(160, 32)) | CASES[name]
    cfg = PackedProductConfig(**fields)
    assert not supports(cfg)
    rng = np.random.default_rng(7)
    x = rng.normal(size=(cfg.rows, cfg.inner)).astype(cfg.x_dtype)
    weights, exact = [], []
    for width in cfg.widths:
        how = dict(zeros=cfg.has_zeros, factor=cfg.has_factor, scales=cfg.scale_dtype)
        some = [drawn(cfg.format, 256, width, cfg.group, seed=width + e, **how) for e in range(max(cfg.experts, 1))]
        weights.append(stacked([w for w, _ in some]) if cfg.experts else some[0][0])
        exact.append([numbers for _, numbers in some])
    found, errors = run(cfg, x, weights, TILES if cfg.experts else None, copies_late), []
    for y, numbers in zip(found, exact, strict=True):
        expert = [e for e, _, count in TILES for _ in range(count)] if cfg.experts else [0] * cfg.rows
        wanted = np.stack([np.float64(row) @ numbers[e] for row, e in zip(x, expert, strict=True)])
        errors.append(np.abs(y - wanted).max() / wanted.std())
    return float(np.max(errors))


@pytest.mark.parametrize("copies_late", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_thread_on_the_model_of_ptx_is_the_product(name, copies_late):
    assert error_of(name, copies_late) < 1e-5


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("form", [("fp4", 32, "bfloat16"), ("int4", 64, "bfloat16"), ("fp8", 128, "float32")])
def test_aligned_tiles_of_few_tokens(form, shared):
    """shared: x is the tokens, which are in every tile; else it has the rows of all tiles. One tile is not used."""
    format, group, scales = form
    cfg = PackedProductConfig(
        rows=24, inner=256, widths=(96, 96), format=format, group=group, scale_dtype=scales, experts=4, most_rows=5,
        has_aligned_tiles=True, tokens=6 if shared else 0, along=2, splits=2,
    )  # fmt: skip
    assert not supports(cfg) and (cfg.tile_rows, cfg.tiles) == (8, 3)
    x = np.random.default_rng(5).normal(size=(cfg.x_rows, cfg.inner)).astype(ml_dtypes.bfloat16)
    drawn_of = lambda width: [drawn(format, 256, width, group, seed=width + e, scales=scales) for e in range(4)]
    matrices = [drawn_of(width) for width in cfg.widths]
    tiles = [(1, 0, 5), (3, 8, 5), (0, 0, 0)]
    found = run(cfg, x, [stacked([w for w, _ in some]) for some in matrices], tiles)
    for y, some in zip(found, matrices, strict=True):
        for expert, first, count in tiles:
            given = np.float64(x[:count] if shared else x[first : first + count])
            wanted = given @ some[expert][1]
            np.testing.assert_allclose(y[first : first + count], wanted, rtol=0, atol=1e-5 * some[0][1].std() * 16)
        assert np.isnan(y[16:]).all() and np.isnan(y[5:8]).all() and np.isnan(y[13:16]).all()


MUTANTS = {
    "scales of other columns": (codes, "scale_pairs", lambda real: lambda *args: real(*args)[::-1]),
    "scales of the first group": (
        packed_ring, "_small_piece", lambda real: lambda cfg, here, column: (
            real(cfg, here, column)[0], 0 * real(cfg, here, column)[1], real(cfg, here, column)[2]
        ),
    ),
    "a step is used before it has arrived": (
        packed_ring.Ring, "wait", lambda real: lambda ring: ptx.asm(f"cp.async.wait_group {ring.cfg.ring - 1};", "")
    ),
    "the slot that is read next is filled": (
        packed_ring.Ring, "copy", lambda real: lambda ring, source, slot, group, is_step: real(
            ring, source, packed_ring.next_slot(ring.cfg, slot), group, is_step
        ),
    ),
    "the factor of another column": (
        packed_sums, "_of_column", lambda real: lambda here, start, dtype, column, is_used: real(
            here, start, dtype, column ^ 1, is_used
        ),
    ),
    "another unit": (packed_sums, "unit_of_scaled", lambda real: lambda dtype, element: 1.0),
}  # fmt: skip


@pytest.mark.parametrize("fault", MUTANTS)
def test_a_mutant_is_caught(fault):
    module, name, change = MUTANTS[fault]
    with mock.patch.object(module, name, change(getattr(module, name))):
        assert not all(error_of("NVFP4", copies_late) < 1e-2 for copies_late in (False, True))


def test_a_copy_beyond_an_array_is_caught():
    real = packed_ring.Ring.of_warp

    def of_warp(*args):
        ring = real(*args)
        return dataclasses.replace(ring, has_codes=np.ones_like(ring.has_codes))

    with mock.patch.object(packed_ring.Ring, "of_warp", of_warp), pytest.raises(AssertionError, match="beyond an arr"):
        error_of("NVFP4")


@pytest.mark.parametrize("used", [0, 1, 3, 5])
@pytest.mark.parametrize("at_once", [1, 4, 7, 0])
def test_each_strip_of_each_tile_with_rows_is_an_item_of_one_cta(at_once, used):
    cfg = PackedProductConfig(
        rows=40, inner=64, widths=(256, 256), format="int4", group=64, scale_dtype="bfloat16", experts=9, most_rows=3,
        has_aligned_tiles=True, at_once=at_once,
    )  # fmt: skip
    assert not supports(cfg) and (cfg.strips, cfg.tiles) == (4, 5)
    tiles, found = jnp.asarray([(e, 8 * e, 3 * (e < used)) for e in range(5)], jnp.int32), []
    for cta in range(cfg.items_at_once):
        with mock.patch.object(kernel.lax, "axis_index", lambda name, cta=cta: jnp.int32(cta)), jax.disable_jit():
            kernel._each_item(cfg, tiles, lambda strip, tile: found.append((int(tile), int(strip))))
    assert sorted(found) == [(tile, strip) for tile in range(used) for strip in range(4)]


def test_tiles_of_experts_are_enough_and_no_longer_than_an_experts_rows():
    rng = np.random.default_rng(2)
    for _ in range(300):
        experts, most = int(rng.integers(1, 12)), int(rng.integers(1, 40))
        sizes = rng.integers(0, most + 1, experts)
        for known in (None, most):
            form = dict(format="fp4", group=32, scale_dtype="bfloat16")
            c = PackedProductConfig(
                rows=max(int(sizes.sum()), 1), inner=64, widths=(128,), experts=experts, most_rows=known, **form
            )
            assert c.tile_rows % 8 == 0 and (-(-sizes // c.tile_rows)).sum() <= c.tiles
        assert c.tile_rows == min(16, 8 * -(-min(most, c.rows) // 8))


MODELS = {  # inputs and outputs of each launch
    "Llama 1B": ((2048, (2048, 512, 512)), (2048, (2048,)), (2048, (8192, 8192)), (8192, (2048,))),
    "Llama 8B": ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,))),
    "gpt-oss experts": ((2880, (2880, 2880)), (2880, (2880,))),
    "Qwen3 0.6B": ((1024, (2048, 1024, 1024)), (2048, (1024,)), (1024, (3072, 3072)), (3072, (1024,))),
}


FORMS = ("int4", 64, "bfloat16"), ("fp4", 32, "float16"), ("fp8", 128, "float32"), ("fp4", 16, "float8_e4m3fn"), None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_chosen_launch_is_one_that_the_kernel_serves(name, form):
    for inner, widths in MODELS[name]:
        format, group, scales = form or ("int8", inner, "float32")
        for rows in (1, 8, 9, 16, 17, 33, MAX_ROWS[BITS[format]]):
            sizes = dict(rows=rows, inner=inner, widths=widths)
            c = choose(132, format=format, group=group, scale_dtype=scales, **sizes)
            if inner % group:
                assert c is None
                continue
            assert c is not None and not supports(c)


@pytest.mark.parametrize("widths", [(2880, 2880), (2880,)])
def test_the_launch_is_the_fastest_for_the_tiles_that_have_rows(widths):
    """By `cost`: with few of many tiles an item is divided over more warps and CTAs than with all of them."""
    sizes = dict(rows=256, inner=2880, widths=widths, experts=32, most_rows=8, has_aligned_tiles=True)
    few, every = (
        choose(132, format="fp4", group=32, scale_dtype="bfloat16", used=used, **sizes) for used in ((4,), ())
    )
    assert few is not None and every is not None and few.tiles == every.tiles == 32
    assert cost(few, 132, 4) < cost(every, 132, 4) and cost(every, 132, 32) < cost(few, 132, 32)


@pytest.mark.parametrize(
    "change, reason",
    [
        (dict(group=48), "groups of 48: wanted multiples of 32"),
        (dict(unroll=4, group=64, inner=448), "inner 448: wanted a multiple of 128"),
        (dict(unroll=2, group=96, inner=192), "groups of 96: a step of 64 inputs has parts of some"),
        (dict(unroll=3, group=96, inner=192), "steps of 3 blocks: wanted one of 1, 2, 4, 8"),
        (dict(unroll=16, group=1024, inner=1024), "steps of 16 blocks: wanted one of 1, 2, 4, 8"),
        (dict(widths=(130,)), "widths (130,): wanted multiples of 8"),
        (dict(format="fp4", has_zeros=True), "zero points of fp4: only integers have them"),
        (dict(scale_dtype="uint8"), "scales uint8: wanted floats"),
        (dict(scale_dtype="float8_e4m3fn"), "or e4m3 of fp4 in groups of 16"),
        (dict(format="fp4", group=32, scale_dtype="float8_e4m3fn"), "or e4m3 of fp4 in groups of 16"),
        (dict(format="fp4", group=16, scale_dtype="float32"), "groups of 16: wanted multiples of 32"),
        (dict(group=16), "groups of 16: wanted multiples of 32"),
        (dict(NVFP4, inner=272), "inner 272: wanted a multiple of 32"),
        (dict(dtype="int8"), "results int8: wanted floats"),
        (dict(x_dtype="float32"), "rows float32: wanted floats of 16 bits"),
        (dict(across=1, along=4, splits=8), "32 parts of 8 steps"),
        (dict(has_aligned_tiles=True), "aligned tiles: only experts"),
        (dict(experts=2, most_rows=0), "at most 0 rows of an expert: wanted 1 or more"),
        (dict(tokens=-1), "-1 tokens of every tile: wanted aligned tiles"),
        (dict(tokens=2), "2 tokens of every tile: wanted aligned tiles"),
        (
            dict(has_aligned_tiles=True, experts=2, rows=12, most_rows=8),
            "12 rows of aligned tiles: wanted a multiple of 8",
        ),
        (dict(has_aligned_tiles=True, experts=2, rows=16, most_rows=8, tokens=9), "9 tokens: wanted at most 8, or 0"),
        (dict(format="int2"), "format int2: wanted one of int8, fp8, int4, fp4"),
    ],
)
def test_what_is_not_served_is_refused_with_its_reason(change, reason):
    config = PackedProductConfig(
        **dict(rows=1, inner=256, widths=(128,), format="int4", group=64, scale_dtype="bfloat16") | change
    )
    assert any(reason in found for found in supports(config))
    assert supports(config, chip="sm_80")[0].startswith("chip sm_80")


def all_codes_and_scales():
    """Of each thread a scale of e4m3 and a code; the threads have all pairs of both that are numbers."""
    codes_, bits = np.meshgrid(np.arange(16, dtype=np.uint32), np.arange(256, dtype=np.uint32))
    is_number = bits.ravel() & 0x7F != 0x7F
    return codes_.ravel()[is_number], bits.ravel()[is_number]


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
def test_a_code_of_fp4_times_its_scale_is_exact(element):
    """Subnormal and the largest scales, negative ones, and both zeros: at each place of a word."""
    code, bits = all_codes_and_scales()
    exact = np.array(FP4)[code] * bits.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    machine = Machine(len(code), 16)
    decode_word = lambda source, target: f"decode {source} {target}"
    with emulated(kernel, machine), mock.patch.multiple(codes, arith=Arith, decode_word=decode_word):
        scales = functools.partial(codes.scale_pairs, "float8_e4m3fn", element=element)
        two_scales = functools.partial(codes.two_scales, "float8_e4m3fn", element=element)
        of_four = [scales(words=[bits << np.uint32(8 * place)])[place] for place in range(4)]
        of_two = [codes.each_twice(two_scales(word=bits << np.uint32(8 * i)))[i] for i in range(2)]
        for i, place in enumerate(PLACES):
            word = code << np.uint32(4 * place)
            pairs = [codes.pairs_of_word("fp4", word, element, scale=scale)[i // 2] for scale in of_four]
            t = np.full(len(code), i // 2, np.int32)
            pairs += [codes.pair_of_word("fp4", word, t, element, scale=scale) for scale in of_two]
            for pair in pairs:
                seen = np.ascontiguousarray(pair).view(element).reshape(-1, 2)[:, i % 2].astype(float)
                np.testing.assert_array_equal(seen * codes.unit_of_scaled("float8_e4m3fn", element), exact)


def test_a_code_of_fp4_times_a_power_of_two_is_exact():
    """As bfloat16, from 2 ** -60 to 2 ** 63, at each place of two words."""
    code, exponent = (x.ravel() for x in np.meshgrid(np.arange(16, dtype=np.uint32), np.arange(-60, 64)))
    exact, bits = np.array(FP4)[code] * 2.0**exponent, (exponent + 127).astype(np.uint32) << np.uint32(7)
    with emulated(kernel, Machine(len(code), 16)), mock.patch.object(codes, "arith", Arith):
        for at in range(4):
            words = [bits << np.uint32(16 * (at % 2)) if at // 2 == w else np.zeros_like(bits) for w in range(2)]
            scale = codes.scale_pairs("bfloat16", words, "bfloat16")[at]
            for i, place in enumerate(PLACES):
                pair = codes.pairs_of_word("fp4", code << np.uint32(4 * place), "bfloat16", scale=scale)[i // 2]
                seen = np.ascontiguousarray(pair).view(ml_dtypes.bfloat16).reshape(-1, 2)[:, i % 2].astype(float)
                np.testing.assert_array_equal(seen * codes.unit_of_scaled("bfloat16", "bfloat16"), exact)


@pytest.mark.parametrize("name", CASES)
def test_it_lowers_for_cuda(name):
    config = PackedProductConfig(**dict(rows=3, inner=256, widths=(160, 32)) | CASES[name])
    x, lead = (
        jax.ShapeDtypeStruct((config.rows, 256), jnp.dtype(config.x_dtype)),
        (config.experts,) if config.experts else (),
    )

    def matrix(width):
        how = dict(zeros=config.has_zeros, factor=config.has_factor, scales=config.scale_dtype)
        one = drawn(config.format, 256, width, config.group, **how)[0]
        return tuple(y if y is None else jax.ShapeDtypeStruct((*lead, *y.shape), y.dtype) for y in one.arrays)

    tiles = jax.ShapeDtypeStruct((config.tiles, 3), jnp.int32) if config.experts else None
    run = jax.jit(lambda x, matrices, tiles: kernel.packed_product(x, matrices, config, tiles))
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    args = x, tuple(map(matrix, config.widths)), tiles
    export = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(*args)
    assert [y.shape for y in export.out_avals] == [(config.rows, width) for width in config.widths]
    assert "mosaic_gpu_v2" in export.mlir_module()
