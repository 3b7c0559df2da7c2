"""A gated product by pairs of CTAs: all threads of a pair on the PTX model."""

import types
from unittest import mock

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import layer_tail_pairs_sm90 as kernel
from pallas_kernels.gpu import layer_tail_sm90 as layer_tail
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.layer_tail_config import THREADS, choose
from tests.kernels.gpu.simt import Fragment, Machine, emulated
from tests.oracle.gates import activated

SHARED, WIDTH = 2**16, 3584  # bytes of a CTA's shared memory, which lie one after the other before h; columns of h


class Pair(Machine):
    """Two CTAs that run in step: what one waits for has come."""

    def __init__(self, tokens: int):
        super().__init__(2 * THREADS, 2 * SHARED + 2 * tokens * WIDTH)
        self.half, self.arrived = self.lane // THREADS, []

    def append(self, array: np.ndarray) -> np.ndarray:
        """The address of the array, now behind all that was there, for each thread."""
        place = len(self.memory)
        self.memory = np.concatenate([self.memory, array.view(np.uint8)])
        return np.full(2 * THREADS, place, np.int64)

    def run(self, text, *args):
        if text.startswith("mbarrier.arrive"):
            self.arrived.append(args[0])
            return []
        return [] if "try_wait" in text else super().run(text, *args)


def fragment(numbers: np.ndarray) -> Fragment:
    """f32 (64, T8) of each CTA, as the threads of both hold it."""
    found, lane = Fragment(numbers.shape[1:], plgpu.Layout.WGMMA), np.arange(2 * THREADS)
    warp, g, t = lane % THREADS // 32, lane % 32 // 4, lane % 4
    for place, (second, token) in zip(np.ndindex(found.registers.shape), rows.pair_places(found), strict=True):
        row = 16 * warp + 8 * second + g
        found.registers[place] = tuple(numbers[lane // THREADS, row, token + 2 * t + k] for k in range(2))
    return found


@pytest.mark.parametrize(
    ("tokens", "activation", "biased", "is_normed"),
    [(8, "silu", False, True), (24, "silu", True, True), (64, "silu", False, False), (16, "gelu_tanh", True, False)],
)
def test_a_pair_adds_up_both_halves_and_stores_each_column_once(tokens, activation, biased, is_normed):
    config = choose(tokens, 4096, 1024, WIDTH, (), 132, activation=activation)
    assert config is not None and config.in_pairs
    machine, rng, first = Pair(tokens), np.random.default_rng(tokens), 192
    gate, up = rng.normal(size=(2, 2, 64, tokens)).astype(np.float32)
    factors = np.broadcast_to(rng.uniform(0.5, 2, tokens).astype(np.float32), (2, 64, tokens))
    here, column = machine.half * SHARED, np.int32(first)
    biases = rng.normal(size=(2, WIDTH)).astype(ml_dtypes.bfloat16)
    places = tuple(machine.append(bias) for bias in biases) if biased else ()
    refs = types.SimpleNamespace(
        h=np.full(2 * THREADS, 2 * SHARED, np.int64), received=here, barriers=here + 2**15, biases=((), places)
    )
    peer = lambda place, rank: place + (rank - machine.half) * SHARED
    with (
        emulated(kernel, machine), mock.patch.object(kernel, "of_peer", peer),
        mock.patch.object(kernel, "lax", types.SimpleNamespace(axis_index=lambda _: machine.half)),
    ):  # fmt: skip
        kernel.store(config, refs, *map(fragment, (gate, up)), fragment(factors) if is_normed else None, column)
    factor = factors[0] if is_normed else 1
    gate, up = (
        x.astype(np.float64).sum(axis=0) * factor + biased * bias.astype(np.float64)[first : first + 64, None]
        for x, bias in zip((gate, up), biases, strict=True)
    )
    wanted = (activated(activation, gate) * up).T
    found = (
        machine.memory[2 * SHARED :][: 2 * tokens * WIDTH]
        .view(ml_dtypes.bfloat16)
        .reshape(tokens, WIDTH)
        .astype(np.float64)
    )
    np.testing.assert_allclose(found[:, first : first + 64], wanted, rtol=2**-8, atol=1e-6)
    assert not np.delete(found, range(first, first + 64), axis=1).any()
    (barrier,) = machine.arrived  # of the other CTA, behind what it received
    np.testing.assert_array_equal(barrier, (1 - machine.half) * SHARED + 2**15 + 8 * config.ring_barriers)
    assert not machine.memory[: 2 * SHARED].reshape(2, SHARED)[:, 4 * kernel.received_floats(config) :].any()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1e-3, 1, 6, 1e4, 1e19])
def test_both_forms_of_the_gate_are_exact_to_float32(activation, size):
    """Of a pair's threads, and of a whole strip; up to where exp(-10) is left of the gate, and beyond."""
    config = types.SimpleNamespace(activation=activation)
    gate = np.linspace(-size, size, 1024).astype(np.float32)
    up = np.random.default_rng(1).normal(size=1024).astype(np.float32)
    with np.errstate(over="ignore"):
        wanted = activated(activation, gate.astype(np.float64)) * up
    machine = Machine(1024, 256)
    with emulated(kernel, machine), np.errstate(over="ignore"):
        ours = kernel._gated(config, gate, up)
    whole = layer_tail._gated(config, jnp.asarray(gate), jnp.asarray(up), (), 0)
    for found in (ours, np.asarray(whole)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-10)


def test_gate_and_up_of_a_strip_have_their_biases():
    config = types.SimpleNamespace(activation="silu")
    gate, up, of_gate, of_up = np.random.default_rng(2).normal(size=(4, 64, 8)).astype(np.float32)
    with mock.patch.object(layer_tail.bias_of, "of_columns", lambda _, bias, column: bias * (column == 128)):
        found = layer_tail._gated(config, *map(jnp.asarray, (gate, up)), (of_gate, of_up), 128)
    gate, up = (x.astype(np.float64) + bias for x, bias in ((gate, of_gate), (up, of_up)))
    np.testing.assert_allclose(found, activated("silu", gate) * up, rtol=2e-5, atol=1e-6)
