"""The launch that finds the floor of top_k and top_p: each thread, on the PTX model, against numpy in float64."""

import contextlib
from unittest import mock

import jax
import numpy as np
import pytest

from benchmarks.gpu.lowering import PALLAS_CALL
from jattn import device
from jattn.engine import sampling_floor as floors
from pallas_kernels.gpu import logit_row_sm80 as logit_row
from pallas_kernels.gpu import sampling_floor_sm80 as kernel
from tests.kernels.cpu.test_native_draw import check, ordered, random_rows
from tests.kernels.gpu.simt import Arith, Machine, emulated
from tests.kernels.gpu.test_packed_product import Memory


def floor_of(x, top_k, top_p, scaling=None, **sizes) -> np.ndarray:
    """u32[R] the floors of f32[R vocab], computed thread by thread. scaling: (largest, temperature, least) of all rows;
    None: x is scaled. sizes: constants of the kernel to replace."""
    memory, (rows, vocab) = Memory(), x.shape
    sizes = dict(LISTED=kernel.LISTED) | sizes  # patch.multiple refuses no names
    with mock.patch.multiple(kernel, **sizes):
        shared = [memory.add(np.full(4 * n, 0xFF, np.uint8)) for n in kernel.shared_words()]
    scaling = (np.full(rows, each, np.float32) for each in (scaling or (0, 1, -np.inf)))
    cuts = np.int32(top_k), np.float32(top_p)
    given = [memory.add(np.asarray(a)) for a in (x, *scaling, *cuts, np.zeros(rows, np.uint32))]
    machine = memory.machine(kernel.THREADS)
    every = lambda n, dtype=np.int32: np.full(machine.lane.shape, n, dtype)
    with _on_the_model(machine), mock.patch.multiple(kernel, **sizes):
        for row in range(rows):
            axes = dict(row=every(row), wg=machine.lane // 128)
            with mock.patch.object(kernel.lax, "axis_index", axes.get):
                kernel._warpgroup(vocab, [every(a, np.int64) for a in given], *map(every, shared))
    return machine.memory[given[-1] :][: 4 * rows].view(np.uint32)


@contextlib.contextmanager
def _on_the_model(machine: Machine):
    swaps = dict(
        _is_float=lambda x: x.dtype == np.float32,
        _address_of_shared=lambda place: place.astype(np.int64),
    )  # fmt: skip
    with emulated(kernel, machine), mock.patch.object(logit_row, "arith", Arith), mock.patch.multiple(kernel, **swaps):
        yield


@pytest.mark.parametrize("vocab", [1, 33, 1021, 9000])
def test_the_kept_tokens_are_those_of_the_definition(vocab):
    x, top_k, top_p = random_rows(vocab, 12, vocab)
    check(x, top_k, top_p, floor_of(x, top_k, top_p))


CUTS = [(0, 0.9), (50, 1.0), (20, 0.8), (3000, 0.5), (0, 0.999), (0, 1.0)]


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_cuts_of_logits_of_every_spread(scale):
    x = np.random.default_rng(1).normal(size=(len(CUTS), 4000)).astype(np.float32) * np.float32(scale)
    x -= x.max(axis=1, keepdims=True)
    top_k, top_p = zip(*CUTS, strict=True)
    check(x, top_k, top_p, floor_of(x, top_k, top_p))


def uneven_rows():
    x = np.random.default_rng(2).normal(size=(len(CUTS), 3000)).astype(np.float32)
    x[:, ::3] = np.round(x[:, ::3])
    return x - x.max(axis=1, keepdims=True), *zip(*CUTS, strict=True)


def test_a_range_of_bins_with_too_many_logits_is_halved():
    x, top_k, top_p = uneven_rows()
    with mock.patch.object(kernel, "_bin", wraps=kernel._bin) as read:
        plain = floor_of(x, top_k, top_p)
        before = read.call_count
        halved = floor_of(x, top_k, top_p, MOST_CANDIDATES=16)
    check(x, top_k, top_p, halved)
    check(x, top_k, top_p, plain)
    assert read.call_count - before > before, "the row is read again for each time"


def test_a_list_that_is_too_short_is_replaced_by_the_row():
    x, top_k, top_p = uneven_rows()
    with mock.patch.object(kernel, "_candidates", wraps=kernel._candidates) as made:
        check(x, top_k, top_p, floor_of(x, top_k, top_p, LISTED=4, MOST_CANDIDATES=10**6))
    assert sum(bool(np.all(call.args[1])) for call in made.mock_calls if call.args) >= 3, "the row, not the lists"


@pytest.mark.parametrize("sizes", [{}, dict(LISTED=4, MOST_CANDIDATES=10**6)], ids=["lists", "the row"])
def test_the_floor_is_that_of_the_scaled_logits(sizes):
    """Also where a list is too short, and the row is read again."""
    x, top_k, top_p = uneven_rows()
    x += np.float32(3.25)
    scaling = largest, temperature, least = np.float32(3.25), np.float32(0.7), np.float32(-6.0)
    scaled = (x - largest) / temperature
    scaled = np.where(scaled < least, -np.inf, scaled).astype(np.float32)
    check(scaled, top_k, top_p, floor_of(x, top_k, top_p, scaling, **sizes))


def test_rows_that_nobody_draws_from_end_and_change_no_other():
    """NaN, infinite numbers and none that is finite."""
    x, top_k, top_p = random_rows(700, 8, 5)
    wanted = floor_of(x, top_k, top_p)
    x[0, 3], x[1], x[2], x[3, 5], x[4, ::2] = np.nan, -np.inf, np.nan, np.inf, -np.nan
    top_k[:5], top_p[:5] = [5, 0, 7, 0, 5], [1.0, 0.9, 0.5, 0.9, 0.5]
    np.testing.assert_array_equal(floor_of(x, top_k, top_p)[5:], wanted[5:])


def test_a_small_sum_before_a_large_one_is_not_lost():
    """1.99 of the first thread, then 250000.25: their sum is a multiple of 1 / 64."""
    memory = Memory()
    sums = memory.add(np.zeros(2 * kernel.WARPS, np.int32))
    machine = memory.machine(kernel.THREADS)
    every = lambda n: np.full(machine.lane.shape, n, np.int32)
    count, mass = every(3), np.resize(np.float32([1.9922, 250000.25, 3e-5, 7.0]), kernel.THREADS)
    row = kernel._Row(*[None] * 6, sums=every(sums), thread=machine.lane)
    with _on_the_model(machine):
        found = kernel._sums_before(row, count, mass)
    np.testing.assert_array_equal(found[0], 3 * machine.lane)
    np.testing.assert_allclose(found[1], np.cumsum(mass, dtype=np.float64) - mass, rtol=1e-6)


def test_what_lies_below_all_bins_does_not_empty_the_bins():
    """Four warps have 2**-24 each: added to 1 it is lost, unless a little below the bins is added to it first. top_p is
    then of a sum that the bins do not reach."""
    x = np.full((34, kernel.WARPS, 128), -np.inf, np.float32)  # 128 neighbours at a time are of one warp
    x[33, 0, 0], x[:33, 0, 1:] = 0, -31.25  # too many for the lists
    x[33, 1:5, 0], x[33, 1:5, 1:40] = -24 * np.log(2), -32.5
    x, top_p = x.reshape(1, -1), [1 - 2.0**-24]
    check(x, [0], top_p, floor_of(x, [0], top_p))


def test_the_largest_logit_is_kept_whatever_the_sums_are(monkeypatch):
    """If no sum of the bins reached top_p, nothing would be listed."""
    fill = kernel._fill_bins
    more = lambda row: (lambda finite, total: (finite, total * np.float32(1.1)))(*fill(row))
    monkeypatch.setattr(kernel, "_fill_bins", more)
    x, top_k, top_p = random_rows(300, 1, 3)
    assert (ordered(x[0]) >= floor_of(x, [0], [0.999])[0]).any()


def test_a_floor_does_not_depend_on_the_other_rows():
    x, top_k, top_p = random_rows(2000, 6, 3)
    together = floor_of(x, top_k, top_p)
    for i in range(len(x)):
        assert floor_of(x[i : i + 1], top_k[i : i + 1], top_p[i : i + 1]) == together[i]


@pytest.mark.parametrize(
    "generation, version, is_served",
    [
        ("sm_90", (0, 10, 2), True), ("sm_80", (0, 12, 0), True), ("sm_120", (0, 12, 0), True),
        ("sm_80", (0, 11, 2), False), ("sm_75", (0, 12, 0), False), ("sm_130", (0, 12, 0), False),
        ("", (0, 12, 0), False),
    ],
)  # fmt: skip
def test_which_chips_and_versions_have_the_kernel(generation, version, is_served, monkeypatch):
    monkeypatch.setattr(device, "detect", lambda: device.Chip("gpu", generation))
    monkeypatch.setattr(jax, "__version_info__", version)
    x = np.zeros((2, 100), np.float32)
    traced = lambda *args: floors.sampling_floor(*args)  # JAX caches traces by function
    jaxpr = str(jax.make_jaxpr(traced)(x, np.int32([1, 2]), np.float32([1, 1])))
    assert ("platform_index" in jaxpr) == is_served


def test_a_draw_on_hopper_has_the_launch(monkeypatch):
    monkeypatch.setattr(device, "detect", lambda: device.Chip("gpu", "sm_90"))
    draw = jax.jit(lambda *args: floors.sampling_floor(*args))
    checks = [jax.export.DisabledSafetyCheck.custom_call(PALLAS_CALL)]
    args = np.zeros((2, 1000), np.float32), np.int32([1, 2]), np.float32([1, 1])
    module = jax.export.export(draw, platforms=["cuda"], disabled_checks=checks)(*args).mlir_module()
    assert PALLAS_CALL in module and "stablehlo.while" not in module


def test_the_ordered_bits_of_the_model_are_those_of_the_witness():
    x = np.float32([-np.inf, -1.5, -1e-40, -0.0, 0.0])
    machine = Machine(128, 64)
    with _on_the_model(machine), mock.patch.object(kernel, "arith", Arith):
        wide = np.resize(x, machine.lane.shape).astype(np.float32)
        bits = kernel.ordered_bits(wide)
        assert (bits.view(np.uint32)[: len(x)] == ordered(x)).all()
        assert (kernel.words.float_of_ordered(bits)[: len(x)] == x).all()
