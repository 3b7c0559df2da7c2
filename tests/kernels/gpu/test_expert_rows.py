"""The launch that brings the rows of each expert together: each thread, on the PTX model, against XLA's steps."""

import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu.lowering import PALLAS_CALL
from jattn.device import Chip
from jattn.ops import expert_rows
from jattn.ops.expert_rows import arrange, arrange_in_steps, padded_count
from jattn.ops.expert_wgmma import tiles_of
from pallas_kernels.gpu import expert_rows_sm80 as kernel
from tests.kernels.gpu.simt import emulated
from tests.kernels.gpu.test_packed_product import Memory

CASES = [  # choices, experts, tile_rows
    (1, 1, 8), (8, 128, 8), (32, 128, 16), (33, 8, 8), (512, 128, 8), (600, 5, 64), (1000, 16, 96), (7, 300, 1),
    (512, 7, 192), (96, 513, 32),
]  # fmt: skip


def by_threads(expert: np.ndarray, experts: int, tile_rows: int) -> list[np.ndarray]:
    """What `kernel.arrange` returns, computed thread by thread; all memory holds rubbish before."""
    memory, choices = Memory(), len(expert)
    rows = padded_count(choices, experts, tile_rows)
    sizes = choices, rows, choices, rows, experts, 3 * (1 + rows // tile_rows)
    rubbish = lambda words: memory.add(np.full(4 * words, 0x6B, np.uint8))
    shared = list(map(rubbish, kernel.shared_words(choices, experts)))
    given = [memory.add(expert), *map(rubbish, sizes[1:])]
    machine = memory.machine(kernel.THREADS)
    every = lambda n, dtype=np.int32: np.full(machine.lane.shape, n, dtype)
    refs = [types.SimpleNamespace(shape=(size,)) for size in sizes]
    with emulated(kernel, machine), mock.patch.object(kernel.lax, "axis_index", lambda _: machine.lane // 128):
        places = [every(a, np.int64) for a in given]
        kernel._arrange(
            experts, tile_rows, [ref.shape[0] for ref in refs], places, list(map(every, shared)), machine.lane
        )
    read = lambda at, words: machine.memory[at : at + 4 * words].view(np.int32).copy()
    *found, tiles = (read(at, size) for at, size in zip(given[1:], sizes[1:], strict=True))
    return [*found, tiles.reshape(-1, 3)]


@pytest.mark.parametrize(("choices", "experts", "tile_rows"), CASES)
@pytest.mark.parametrize("few", [False, True])
def test_rows_and_tiles_are_those_of_the_steps(choices, experts, tile_rows, few):
    """few: most choices are of no expert, as those of padding."""
    rng = np.random.default_rng(choices)
    expert = rng.integers(0, experts + 1, choices).astype(np.int32)
    if few:
        expert[min(3, choices - 1) :] = experts
    assert kernel.serves(choices, experts)
    *found, tiles = by_threads(expert, experts, tile_rows)
    wanted = jax.jit(arrange_in_steps, static_argnums=(1, 2))(expert, experts, tile_rows)
    for one, other in zip(found, (wanted.choice, wanted.row, wanted.expert, wanted.sizes), strict=True):
        np.testing.assert_array_equal(one, other)
    used = int(np.asarray(wanted.sizes).sum()) // tile_rows
    config = types.SimpleNamespace(tile_rows=tile_rows, tiles=len(found[0]) // tile_rows)
    by_steps = np.asarray(jax.jit(lambda sizes: tiles_of(sizes, config))(wanted.sizes))
    np.testing.assert_array_equal(tiles[: 1 + used], by_steps[: 1 + used])
    assert not tiles[1 + used :].any()


def test_a_group_of_one_expert_and_rows_of_each():
    """All choices of one expert, then each expert once."""
    for expert in (np.full(64, 3, np.int32), np.arange(64, dtype=np.int32)[::-1].copy()):
        *found, _ = by_threads(expert, 64, 8)
        wanted = arrange_in_steps(expert, 64, 8)
        np.testing.assert_array_equal(found[1], wanted.row)


def test_what_has_no_room_is_left_to_xla():
    assert not kernel.serves(0, 8) and not kernel.serves(8192 * 8, 128) and not kernel.serves(8, 4096)
    assert kernel.serves(64 * 8, 256) and kernel.serves(64 * 8, 384)


@pytest.mark.parametrize("chip", ["sm_90", "sm_80", None])
def test_hopper_takes_it(chip, monkeypatch):
    made = []
    monkeypatch.setattr(expert_rows.device, "detect", lambda: Chip("gpu", chip) if chip else Chip("cpu"))

    def launch(expert, experts, tile_rows, rows):
        made.append((expert.shape, experts, tile_rows, rows))
        sizes = (rows,), expert.shape, (rows,), (experts,), (1 + rows // tile_rows, 3)
        shapes = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
        return jax.pure_callback(lambda e: by_threads(np.asarray(e), experts, tile_rows), shapes, expert)

    monkeypatch.setattr(kernel, "arrange", launch)
    expert = np.random.default_rng(0).integers(0, 5, 40).astype(np.int32)
    found = arrange(jnp.asarray(expert), 4, 8)
    assert bool(made) == (chip == "sm_90") == (found.tiles is not None)
    assert found.row.tolist() == arrange_in_steps(expert, 4, 8).row.tolist()
    assert arrange(jnp.asarray(expert), 4, 1).tiles is None, "rows that are not padded have no tiles"


@pytest.mark.parametrize(("choices", "experts", "tile_rows"), [(32, 128, 8), (1024, 384, 16)])
def test_it_lowers_for_cuda(choices, experts, tile_rows):
    rows = padded_count(choices, experts, tile_rows)
    run = jax.jit(lambda expert: kernel.arrange(expert, experts, tile_rows, rows))
    shape = jax.ShapeDtypeStruct((choices,), jnp.int32)
    check = jax.export.DisabledSafetyCheck.custom_call(PALLAS_CALL)
    export = jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(shape)
    assert [out.shape for out in export.out_avals] == [
        (rows,), (choices,), (rows,), (experts,), (1 + rows // tile_rows, 3)
    ]  # fmt: skip
