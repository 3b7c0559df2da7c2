"""The launch that draws tokens on a GPU: each thread, on the PTX model, against JAX's noise in numpy."""

import contextlib
from unittest import mock

import jax
import numpy as np
import pytest

from benchmarks.gpu.lowering import PALLAS_CALL
from jattn import device
from jattn.engine import SamplingParams, sampling, sampling_floor
from pallas_kernels.gpu import draw_sm80 as kernel
from pallas_kernels.gpu import logit_row_sm80 as logit_row
from tests.engine.rows import sampling_rows
from tests.kernels.cpu.test_native_draw import check_tokens, ordered, random_keys, uniform
from tests.kernels.gpu.simt import Arith, Machine, emulated
from tests.kernels.gpu.test_packed_product import Memory

NOTHING = (0.0, 1.0, -np.inf)  # the Scaling of scaled logits


@contextlib.contextmanager
def on_the_model(machine: Machine):
    with emulated(kernel, machine), mock.patch.object(logit_row, "arith", Arith):
        yield


def draw(x, keys, floors=None, scaling=NOTHING, ctas=kernel.CTAS) -> np.ndarray:
    """i32[R] the tokens of f32[R vocab], computed thread by thread."""
    memory, (rows, vocab) = Memory(), x.shape
    with mock.patch.object(kernel, "CTAS", ctas):
        parts, size = kernel.parts_of(rows, vocab)
    shared = memory.add(np.full(8 * kernel.WARPS, 0xFF, np.uint8))
    floors = np.zeros(rows, np.uint32) if floors is None else floors.astype(np.uint32)
    of_rows = [np.broadcast_to(np.float32(each), rows) for each in scaling]
    out = np.full((rows, parts), np.nan, np.float32), np.full((rows, parts), -9, np.int32)
    places = [memory.add(a) for a in (x, *of_rows, floors, keys, *out)]
    machine = memory.machine(kernel.THREADS)
    machine.bounds = [(at, at + raw.size) for at, raw in memory.parts[1:]]
    every = lambda n, dtype=np.int32: np.full(machine.lane.shape, n, dtype)
    with on_the_model(machine):
        for row, part in np.ndindex(rows, parts):
            with mock.patch.object(kernel.lax, "axis_index", dict(row=every(row), part=every(part)).get):
                kernel._part(vocab, parts, size, [every(a, np.int64) for a in places], every(shared))
    sums, tokens = (machine.memory[at:][: 4 * rows * parts].reshape(-1, 4) for at in places[-2:])
    sums, tokens = sums.copy().view(np.float32), tokens.copy().view(np.int32)
    best = sums.reshape(rows, parts).argmax(axis=1)
    return tokens.reshape(rows, parts)[np.arange(rows), best]


def problem(rows: int, vocab: int, seed: int = 0):
    x = np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 3
    return x - x.max(axis=1, keepdims=True), random_keys(rows, seed)


@pytest.mark.parametrize("vocab", [1, 5, 33, 1021, 1024, 5000])
@pytest.mark.parametrize("ctas", [1, 16])
def test_a_token_is_that_with_the_largest_sum(vocab, ctas):
    x, keys = problem(4, vocab)
    every = np.full(4, -np.inf)
    check_tokens(x, every, keys, draw(x, keys, ctas=ctas))


def test_only_kept_tokens_are_drawn():
    x, keys = problem(8, 3000)
    floors = np.sort(x, axis=1)[:, [-1, -2, -3, -10, -100, -1000, -2000, 0]].diagonal()
    check_tokens(x, floors, keys, draw(x, keys, ordered(floors)))
    flat = np.where(np.arange(3000) % 7 == 3, np.float32(0), np.float32(-1e-3)) + np.zeros((4, 1), np.float32)
    assert (draw(flat, random_keys(4, 1), ordered(np.zeros(4))) % 7 == 3).all()


def test_logits_are_scaled():
    x, keys = problem(4, 900)
    largest, temperature, least = scaling = np.float32([[3, -2, 0, 9], [0.3, 1, 2, 30], [-2, -np.inf, -0.5, -3]])
    scaled = (x + largest[:, None] - largest[:, None]) / temperature[:, None]
    wanted = np.where(scaled < least[:, None], -np.inf, scaled)
    check_tokens(wanted, np.full(4, -np.inf), keys, draw(x + largest[:, None], keys, scaling=scaling))


def test_a_row_draws_the_same_whoever_else_draws_and_however_it_is_divided():
    x, keys = problem(6, 4100)
    together = draw(x, keys)
    assert (together == draw(x, keys, ctas=1)).all()
    assert [draw(x[i : i + 1], keys[i : i + 1])[0] for i in range(6)] == together.tolist()


def test_rows_of_no_use_end_and_of_equal_sums_the_first_token_is_drawn():
    x, keys = problem(4, 2000)
    x[0], x[1, 5], x[2] = -np.inf, np.nan, np.nan
    tokens = draw(x, keys)
    assert ((tokens >= 0) & (tokens < 2000)).all()
    with mock.patch.object(kernel, "gumbel", lambda key, number: np.zeros(number.shape, np.float32)):
        ties = np.full((2, 5000), -1, np.float32)
        ties[0, [4999, 1700, 3400]], ties[1, [300, 301]] = 0, 0
        assert draw(ties, keys[:2], ctas=8).tolist() == [1700, 300]


def test_the_noise_is_jax_s():
    """Its words are those of jax.random.bits; its logarithms have a relative error of about an ulp."""
    machine, keys = Machine(4096, 64), random_keys(2, 3)
    numbers = np.arange(4096, dtype=np.int32)
    for key in keys:
        words = [np.full(4096, word, np.uint32).view(np.int32) for word in key]
        with on_the_model(machine):
            bits, noise = kernel.threefry(words, numbers), kernel.gumbel(words, numbers)
        of_key = jax.random.wrap_key_data(key)
        np.testing.assert_array_equal(bits.view(np.uint32), jax.random.bits(of_key, 4096))
        exact = -np.log(-np.log(uniform(key[None], 4096)[0]))
        np.testing.assert_allclose(noise, exact, rtol=3e-7, atol=3e-7)
        np.testing.assert_allclose(noise, jax.random.gumbel(of_key, 4096), rtol=5e-7, atol=5e-7)


def test_logarithms_of_every_size():
    tiny = np.float32(np.finfo(np.float32).tiny)
    ends = [tiny, 2 * tiny, 1 - 2.0**-24, 1 - 2.0**-23, 1, 1 + 2.0**-23, 2 / 3, 4 / 3, 87.3, 2.0**-23]
    x = np.concatenate([ends, np.exp(np.random.default_rng(0).uniform(-87, 88, 4086))]).astype(np.float32)
    machine = Machine(4096, 64)
    with on_the_model(machine):
        found = kernel.log(x)
    np.testing.assert_allclose(found, np.log(x.astype(np.float64)), rtol=1.4 * 2.0**-24)


@pytest.mark.parametrize("changed", [None, ("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False)])
def test_a_draw_on_hopper_is_two_launches_if_its_noise_is_the_default(changed):
    before = changed and getattr(jax.config, changed[0])
    try:
        if changed:
            jax.config.update(*changed)
        assert launches_of_a_draw_on_hopper() == (1 if changed else 2)
    finally:
        if changed:
            jax.config.update(changed[0], before)


def launches_of_a_draw_on_hopper() -> int:
    rows = sampling_rows([SamplingParams(top_p=0.9)] * 2, [1, 2], [0, 0], [1, 1], [(), ()], 2)
    with mock.patch.object(device, "detect", lambda: device.Chip("gpu", "sm_90")):
        assert sampling_floor.has_kernels()
        run = jax.jit(lambda logits: sampling._sample(logits, rows))
        checks = [jax.export.DisabledSafetyCheck.custom_call(PALLAS_CALL)]
        module = jax.export.export(run, platforms=["cuda"], disabled_checks=checks)(np.zeros((2, 1000), np.float32))
    return module.mlir_module().count(f"@{PALLAS_CALL}(")
