"""The merge of several ranks' states in one launch: all threads of all ranks on the PTX model, and its lowering."""

import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.ops.state import AttentionState, merge
from pallas_kernels.gpu import rank_merge_sm90 as kernel
from pallas_kernels.gpu.rank_merge_sm90 import RankMerge, exchange, merge_ranks
from tests.kernels.gpu.simt import Machine, emulated
from tests.kernels.gpu.test_layer_tail import lowered_on

NAMES = ("out", "lse", "received", "merges", "merged", "merged_lse")


class Ranks(Machine):
    """Machines that run in step, side by side in one memory: a thread's addresses are those of its rank."""

    def __init__(self, config: RankMerge, arrays: list[dict[str, np.ndarray]]):
        self.config, self.arrays, self.starts, size = config, arrays, [], 1024
        for own in arrays:
            self.starts.append({})
            for name, array in own.items():
                self.starts[-1][name], size = size, size + -(-array.nbytes // 256) * 256
        super().__init__(kernel.THREADS * config.ranks, size)
        self.of_rank = self.lane // kernel.THREADS
        for own, places in zip(arrays, self.starts, strict=True):
            for name, array in own.items():
                self.memory[places[name] : places[name] + array.nbytes] = array.view(np.uint8).ravel()

    def base(self, name: str) -> np.ndarray:
        return np.array([places[name] for places in self.starts], np.int64)[self.of_rank]

    def read(self, rank: int, name: str) -> np.ndarray:
        like, start = self.arrays[rank][name], self.starts[rank][name]
        return self.memory[start : start + like.nbytes].view(like.dtype).reshape(like.shape)

    def load(self, place, kind, mask=None):
        return super().load(place, np.int32 if kind is np.uint32 else kind, mask)

    def _branch(self, text, args):
        """A wait: what it waits for has come, since all threads have sent."""
        count = len(re.findall(r"mov\.f32 \$", text))
        place, *numbers = args[: -count - 1]
        waits, own = args[-count - 1], args[-count:]
        width = 2 * count
        words = [self.load(place + 4 * k, np.uint32, waits != 0) for k in range(width)]
        for k in range(1, width, 2):
            assert (words[k] == numbers[0])[waits != 0].all(), "it would wait for ever"
        return [np.where(waits != 0, words[2 * k].view(np.float32), own[k]) for k in range(count)]

    def merge(self):
        table = lambda *_: mock.Mock(
            rank=self.of_rank, address=lambda rank, _: np.full(self.lane.shape, self.starts[rank]["received"], np.int64)
        )
        refs = [self.base(name) for name in NAMES]
        with emulated(kernel, self), mock.patch.object(kernel, "Table", table):
            for first in range(0, self.config.pieces, kernel.THREADS):
                kernel._merge(self.config, np.int32(first), *refs[:4], None, *refs[4:])


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "bfloat16"), (3, "float32")])
def test_every_rank_has_the_merge_of_all_and_no_other_byte_changes(ranks, dtype):
    config, rng = RankMerge(ranks=ranks, tokens=5, heads=3, dim=48, dtype=dtype), np.random.default_rng(ranks)
    shape = (5, 3)
    lses = rng.normal(size=(ranks, *shape)).astype(np.float32) * 3
    outs = rng.normal(size=(ranks, *shape, 48)).astype(np.float32)
    lses[0, 0, 0], lses[1, 0, 1], lses[:, 0, 2] = -np.inf, np.inf, -np.inf
    outs[0, 0, 0] = np.nan  # of an empty state
    words = kernel._SETS * ranks * config.pieces * kernel._WORDS
    arrays = [
        dict(
            out=outs[r], lse=lses[r], received=np.zeros(words, np.int32), merges=np.zeros(config.pieces, np.int32),
            merged=np.full((*shape, 48), 7, jnp.dtype(dtype)), merged_lse=np.full(shape, 7, np.float32),
        )
        for r in range(ranks)
    ]  # fmt: skip
    machine = Ranks(config, arrays)
    states = [AttentionState(out=jnp.asarray(out), lse=jnp.asarray(lse)) for out, lse in zip(outs, lses, strict=True)]
    want = merge(*states)
    for times in (1, 2, 3):  # both sets, and the first again
        machine.merge()
        for rank in range(ranks):
            seen = machine.read(rank, "merged").astype(np.float32)
            np.testing.assert_allclose(seen, want.out, atol=1e-2 if dtype == "bfloat16" else 1e-6)
            np.testing.assert_allclose(machine.read(rank, "merged_lse"), want.lse, atol=1e-6)
            np.testing.assert_array_equal(machine.read(rank, "merges"), times)
            for name in ("out", "lse"):
                np.testing.assert_array_equal(machine.read(rank, name), arrays[rank][name])
            np.testing.assert_array_equal(machine.read(rank, "merged"), machine.read(0, "merged"))
    ends = [places[name] + arrays[0][name].nbytes for places in machine.starts for name in NAMES]
    assert not any(machine.memory[end : -(-end // 256) * 256].any() for end in ends)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_launch_tells_the_addresses_for_all_merges(ranks):
    mesh = jax.make_mesh((ranks,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    config = RankMerge(ranks=ranks, tokens=3, heads=4, dim=64, dtype="bfloat16")

    def on_rank():
        peers, out, lse = exchange(config), jnp.zeros((3, 4, 64)), jnp.zeros((3, 4))
        for _ in range(2):
            out, lse = merge_ranks(config, out.astype(jnp.float32), lse, peers)
        return out

    text = lowered_on(mesh, on_rank)
    assert text.count("uses_xla_collective_metadata = true") == 1
    assert f'xla_replica_ids = "{",".join(map(str, range(ranks)))}"' in text
    launches = [line for line in text.splitlines() if "custom_call @mosaic_gpu_v2" in line]
    (told,) = (line for line in launches if "uses_xla_collective_metadata = true" in line)
    assert told.count("output_operand_alias<") == 2, "arrays that launches write to must be read by nothing else"


def test_a_launch_whose_threads_do_not_all_run_at_once_is_not_made():
    of = lambda tokens: RankMerge(ranks=2, tokens=tokens, heads=32, dim=128, dtype="bfloat16")
    assert of(64).fits and not of(65).fits and not of(0).fits
