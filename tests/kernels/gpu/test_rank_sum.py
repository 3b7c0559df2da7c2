"""Arrays of several ranks added up in one launch: all threads of all ranks on the PTX model, and its lowering."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import rank_sum_sm90 as kernel
from pallas_kernels.gpu.rank_sum_sm90 import RankSum, exchange, sum_ranks
from tests.kernels.gpu.ranks import Ranks
from tests.kernels.gpu.simt import emulated
from tests.kernels.gpu.test_layer_tail_lowering import lowered_on

NAMES = ("x", "received", "so_far", "total")


def summed(machine: Ranks, config: RankSum, dtype: str, pieces: int, each: int) -> None:
    threads = -(-pieces // each // kernel.THREADS) * kernel.THREADS
    refs = [machine.base(name) for name in NAMES]
    table = lambda *_: machine.table("received")
    with emulated(kernel, machine), mock.patch.object(kernel, "Table", table):
        for first in range(0, threads, kernel.THREADS):
            kernel._sum(config, dtype, (pieces, each, threads), np.int32(first), *refs[:3], None, refs[3])


@pytest.mark.parametrize(
    ("ranks", "hops", "dtype", "each"),
    [
        (2, 1, "bfloat16", 1), (3, 1, "float32", 2), (2, 1, "float16", 3), (2, 1, "float32", 1),
        (2, 2, "float32", 1), (3, 2, "bfloat16", 2), (4, 2, "float16", 1), (8, 2, "float32", 2),
    ],
)  # fmt: skip
def test_every_rank_has_the_sum_of_all_and_no_other_byte_changes(ranks, hops, dtype, each):
    largest, rng = 200, np.random.default_rng(ranks)
    config = RankSum(ranks=ranks, pieces=largest)
    kind = jnp.dtype(dtype)
    arrays = [
        dict(
            x=np.zeros(4 * largest, kind), received=np.zeros(kernel._SETS * ranks * largest * kernel._SENT, np.int32),
            so_far=np.zeros(largest, np.int32), total=np.full(4 * largest, 7, kind),
        )
        for _ in range(ranks)
    ]  # fmt: skip
    machine, times = Ranks(kernel.THREADS, arrays), np.zeros(largest, np.int32)
    for pieces in (largest, largest, 77, largest, 77, 77):  # both sets, and sums of fewer pieces between
        xs = rng.normal(size=(ranks, 4 * pieces)).astype(kind)
        xs[:, :4] = -0.0
        xs[-1, 4:8] = np.inf, -np.inf, np.nan, 6e-8  # the last is no normal number of float16
        for rank, x in enumerate(xs):
            machine.read(rank, "x")[: x.size] = x
            machine.read(rank, "total")[:] = 7
        with mock.patch.object(kernel.peer_sums, "hops", lambda *_: hops):
            summed(machine, config, dtype, pieces, each)
        times[:pieces] += 1
        want = xs[0].astype(np.float32)
        for x in xs[1:]:
            want = want + x.astype(np.float32)
        for rank in range(ranks):
            total = machine.read(rank, "total").astype(np.float32)
            np.testing.assert_array_equal(total[: 4 * pieces], want.astype(kind).astype(np.float32))
            np.testing.assert_array_equal(total[4 * pieces :], 7)
            assert np.signbit(total[:4]).all()
            np.testing.assert_array_equal(machine.read(rank, "so_far"), times)
    assert machine.no_other_byte_has_changed()


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_launch_tells_the_addresses_for_all_sums(ranks):
    mesh = jax.make_mesh((ranks,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    config = RankSum(ranks=ranks, pieces=32 * 1024 // 4)

    def on_rank():
        peers, y = exchange(config), jnp.zeros((32, 1024), jnp.bfloat16)
        for _ in range(2):
            y = sum_ranks(config, y, peers)
        return sum_ranks(config, y[:3].astype(jnp.float32), peers)

    text = lowered_on(mesh, on_rank)
    assert text.count("uses_xla_collective_metadata = true") == 1
    launches = [line for line in text.splitlines() if "custom_call @mosaic_gpu_v2" in line]
    (told,) = (line for line in launches if "uses_xla_collective_metadata = true" in line)
    assert told.count("output_operand_alias<") == 2, "arrays that launches write to must be read by nothing else"


def test_arrays_that_a_launch_does_not_serve():
    config = RankSum(ranks=2, pieces=64 * 4096 // 4)
    assert config.serves((64, 4096), jnp.bfloat16) and config.serves((3, 1024), jnp.float32)
    for shape, dtype in (((65, 4096), "bfloat16"), ((1, 7), "float32"), ((0, 8), "float32"), ((4, 8), "int32")):
        assert not config.serves(shape, dtype)


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 256), (4, 128), (8, 64)])
def test_sums_share_at_most_32_mib(ranks, tokens):
    of = lambda tokens: RankSum(ranks=ranks, pieces=tokens * 4096 // 4).serves((tokens, 4096), jnp.bfloat16)
    assert of(tokens) and not of(tokens + 1)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 2**20), ("float16", 2**20), ("float32", 2**19)])
def test_no_thread_has_more_words_than_registers_for_all_to_run_at_once(dtype, most):
    """Four pieces of float32 take 104 registers: 4 CTAs an SM, of the 512 that wait for one another."""
    config = RankSum(ranks=2, pieces=2**18)
    assert config.serves((most,), dtype) and not config.serves((most + 4,), dtype)
