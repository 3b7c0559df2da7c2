"""The sums over ranks inside the launch for a layer's rest: all threads of all ranks of one CTA on the PTX model."""

from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import layer_tail_ranks_sm90 as kernel
from pallas_kernels.gpu.layer_tail_config import MAX_CTAS, THREADS, choose
from pallas_kernels.gpu.token_share_sm90 import TokenShare
from tests.kernels.gpu.ranks import Ranks
from tests.kernels.gpu.simt import emulated

HIDDEN, ROW, CTA = 896, 3, 5  # 224 fours: the last of a thread's two are not there for 32 of 128 threads
NAMES = ("received", "so_far")


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_has_the_sums_of_all_and_no_other_byte_changes(ranks):
    config = choose(64, HIDDEN, 896, 4864, (), 132, ranks=ranks)
    assert config is not None
    words = kernel._PRODUCTS * ranks * config.rows8 * HIDDEN
    arrays = [
        dict(received=np.zeros(words, np.int32), so_far=np.zeros(2 * MAX_CTAS * THREADS, np.int32))
        for _ in range(ranks)
    ]
    machine, rng = Ranks(THREADS, arrays), np.random.default_rng(ranks)
    refs = (*(machine.base(name) for name in NAMES), None)
    table = lambda *_: machine.table("received")
    written: dict[int, set] = {0: set(), 2: set()}
    with emulated(kernel, machine), mock.patch.object(kernel, "Table", table):
        share = TokenShare(np.full(THREADS * ranks, ROW, np.int32), np.zeros(THREADS * ranks, np.int32), HIDDEN, 1)
        inside = np.stack([ok for _, ok in share.quads]) != 0
        for times, product in ((1, 0), (1, 2), (2, 0), (2, 2)):
            own = rng.normal(size=(len(inside), 4, THREADS * ranks)).astype(np.float32)
            found = kernel.sum_over_ranks(config, product, share, refs, np.int32(CTA), [list(four) for four in own])
            parts = rounded(own).reshape(len(inside), 4, ranks, THREADS)
            total = parts[:, :, 0]
            for rank in range(1, ranks):
                total = total + parts[:, :, rank]
            live = inside.reshape(len(inside), 1, ranks, THREADS)
            seen = np.stack(found).reshape(parts.shape)
            np.testing.assert_array_equal(seen * live, rounded(total)[:, :, None] * live)
            for rank in range(ranks):
                counted = machine.read(rank, "so_far").reshape(2, MAX_CTAS, THREADS)
                np.testing.assert_array_equal(counted[product // 2, CTA], times)
                rows = machine.read(rank, "received").reshape(2, ranks, config.rows8, HIDDEN)
                written[product] = {tuple(place) for place in np.argwhere(rows.any(axis=3))}
                assert {row for _, _, row in written[product]} == {ROW} and not rows[:, rank].any()
    assert machine.no_other_byte_has_changed()


def test_a_rank_that_does_not_send_is_seen():
    config = choose(8, HIDDEN, 896, 4864, (), 132, ranks=2)
    assert config is not None
    size = kernel._PRODUCTS * 2 * config.rows8 * HIDDEN
    arrays = [
        dict(received=np.zeros(size, np.int32), so_far=np.zeros(2 * MAX_CTAS * THREADS, np.int32)) for _ in range(2)
    ]
    machine = Ranks(THREADS, arrays)
    silent = lambda place, words, number, sends: send(place, words, number, sends * (machine.of_rank == 0))
    send = kernel.peer_words.send
    refs = (*(machine.base(name) for name in NAMES), None)
    with (
        emulated(kernel, machine), mock.patch.object(kernel, "Table", lambda *_: machine.table("received")),
        mock.patch.object(kernel.peer_words, "send", silent), pytest.raises(AssertionError, match="wait for ever"),
    ):  # fmt: skip
        share = TokenShare(np.full(2 * THREADS, ROW, np.int32), np.zeros(2 * THREADS, np.int32), HIDDEN, 1)
        fours = [[np.ones(2 * THREADS, np.float32)] * 4 for _ in share.quads]
        kernel.sum_over_ranks(config, 0, share, refs, np.int32(CTA), fours)
