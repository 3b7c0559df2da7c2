"""The merge of several ranks' states in one launch: all threads of all ranks on the PTX model, and its lowering."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.ops.state import AttentionState, merge
from pallas_kernels.gpu import rank_merge_sm90 as kernel
from pallas_kernels.gpu.rank_merge_sm90 import RankMerge, exchange, merge_ranks
from tests.kernels.gpu.ranks import Ranks
from tests.kernels.gpu.simt import emulated
from tests.kernels.gpu.test_layer_tail_lowering import lowered_on

NAMES = ("out", "lse", "received", "merges", "merged", "merged_lse")


def merged(machine: Ranks, config: RankMerge) -> None:
    refs = [machine.base(name) for name in NAMES]
    table = lambda *_: machine.table("received")
    with emulated(kernel, machine), mock.patch.object(kernel, "Table", table):
        for first in range(0, config.pieces, kernel.THREADS):
            kernel._merge(config, np.int32(first), *refs[:4], None, *refs[4:])


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
    machine = Ranks(kernel.THREADS, arrays)
    states = [AttentionState(out=jnp.asarray(out), lse=jnp.asarray(lse)) for out, lse in zip(outs, lses, strict=True)]
    want = merge(*states)
    for times in (1, 2, 3):  # both sets, and the first again
        merged(machine, config)
        for rank in range(ranks):
            seen = machine.read(rank, "merged").astype(np.float32)
            np.testing.assert_allclose(seen, want.out, atol=1e-2 if dtype == "bfloat16" else 1e-6)
            np.testing.assert_allclose(machine.read(rank, "merged_lse"), want.lse, atol=1e-6)
            np.testing.assert_array_equal(machine.read(rank, "merges"), times)
            for name in ("out", "lse"):
                np.testing.assert_array_equal(machine.read(rank, name), arrays[rank][name])
            np.testing.assert_array_equal(machine.read(rank, "merged"), machine.read(0, "merged"))
    assert machine.no_other_byte_has_changed()


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
