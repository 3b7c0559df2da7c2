"""The sums over ranks inside the launch for a layer's rest: all threads of all ranks of one CTA on the PTX model."""

import itertools
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


def in_hops(hops: int):
    return mock.patch.object(kernel.peer_sums, "hops", lambda *_: hops)


def fours_received(rank: int, ranks: int, hops: int) -> int:
    """The pieces of ROW that come to a rank: in two hops its own from each other rank, and sums of all others."""
    if hops == 1:
        return (ranks - 1) * HIDDEN // 4
    own = sum((four // 32 + ROW) % ranks == rank for four in range(HIDDEN // 4))
    return (ranks - 1) * own + HIDDEN // 4 - own


def rounded(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize(("ranks", "hops"), [(2, 1), (3, 1), (2, 2), (3, 2), (8, 2)])
def test_every_rank_has_the_sums_of_all_and_no_other_byte_changes(ranks, hops):
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
    with emulated(kernel, machine), mock.patch.object(kernel, "Table", table), in_hops(hops):
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
                sent = np.count_nonzero(rows[product // 2].reshape(ranks, config.rows8, -1, 4).any(axis=3))
                assert sent == fours_received(rank, ranks, hops)
    assert machine.no_other_byte_has_changed()


@pytest.mark.parametrize(("hops", "skipped"), [(1, 0), (1, 1), (2, 0), (2, 2)])
def test_a_rank_that_does_not_send_is_seen(hops, skipped):
    """It leaves out one of its stores: in two hops the first are to owners, then come the sums to all ranks."""
    config = choose(8, HIDDEN, 896, 4864, (), 132, ranks=2)
    assert config is not None
    size = kernel._PRODUCTS * 2 * config.rows8 * HIDDEN
    arrays = [
        dict(received=np.zeros(size, np.int32), so_far=np.zeros(2 * MAX_CTAS * THREADS, np.int32)) for _ in range(2)
    ]
    machine, calls, send = Ranks(THREADS, arrays), itertools.count(), kernel.peer_words.send

    def silent(place, words, number, sends, kind):
        speaks = (machine.of_rank == 0) | (next(calls) != skipped)
        send(place, words, number, sends * speaks, kind)

    refs = (*(machine.base(name) for name in NAMES), None)
    with (
        emulated(kernel, machine), mock.patch.object(kernel, "Table", lambda *_: machine.table("received")),
        mock.patch.object(kernel.peer_words, "send", silent), pytest.raises(AssertionError, match="wait for ever"),
        in_hops(hops),
    ):  # fmt: skip
        share = TokenShare(np.full(2 * THREADS, ROW, np.int32), np.zeros(2 * THREADS, np.int32), HIDDEN, 1)
        fours = [[np.ones(2 * THREADS, np.float32)] * 4 for _ in share.quads]
        kernel.sum_over_ranks(config, 0, share, refs, np.int32(CTA), fours)


def test_two_hops_only_where_they_send_so_much_less_that_it_pays_for_the_second():
    of = lambda ranks, rows: kernel.peer_sums.hops(ranks, rows * 4096 * 4)
    assert [of(2, rows) for rows in (1, 64, 4096)] == [1, 1, 1]
    assert [of(4, rows) for rows in (1, 16, 64)] == [1, 1, 2]
    assert [of(8, rows) for rows in (1, 4, 16, 64)] == [1, 1, 2, 2]
