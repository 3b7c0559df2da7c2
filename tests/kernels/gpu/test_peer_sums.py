"""Sums over ranks that run at their own speeds: the launches' code on the PTX model, a thread of each rank."""

import itertools
import random
import threading
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import layer_tail_ranks_sm90 as layer_tail
from pallas_kernels.gpu import peer_sums_sm90 as peer_sums
from pallas_kernels.gpu import peer_words_sm90 as peer_words
from pallas_kernels.gpu import rank_sum_sm90 as rank_sum
from pallas_kernels.gpu.layer_tail_config import MAX_CTAS, THREADS, choose
from pallas_kernels.gpu.token_share_sm90 import TokenShare
from tests.kernels.gpu.ranks import Ranks
from tests.kernels.gpu.simt import emulated

LANE, PIECES = 40, 200  # the thread, which has the pieces 40 and 168 of the largest array
HIDDEN = 896


class Race(Ranks):
    """One rank runs until it sends or receives; then a random one goes on, some of them less often than others."""

    def __init__(self, arrays: list[dict[str, np.ndarray]], seed: int):
        super().__init__(1, arrays)
        self.lane, self.random, self.unread = np.array([LANE], np.int32), random.Random(seed), set()
        self.weights = [self.random.choice((1, 4, 40)) for _ in arrays]
        self.waiting, self.ended, self.failure, self.hops = set(), set(), None, [1] * len(arrays)
        self.gates = [threading.Semaphore(0) for _ in arrays]

    @property
    def rank(self) -> int:
        return int(self.of_rank[0])

    def go_on(self, rank: int) -> None:
        self.of_rank = np.array([rank], np.int32)
        self.gates[rank].release()

    def next_rank(self):
        able = [rank for rank in range(len(self.gates)) if rank not in self.waiting | self.ended]
        if not able and len(self.ended) < len(self.gates):
            self.failure = self.failure or AssertionError(f"ranks {self.waiting - self.ended} wait for ever")
            able = [rank for rank in self.waiting if rank not in self.ended]
        return self.random.choices(able, [self.weights[rank] for rank in able])[0] if able else None

    def pause(self) -> None:
        rank, outputs = self.rank, self.outputs
        self.go_on(self.next_rank())
        self.gates[rank].acquire()
        self.outputs = outputs
        if self.failure:
            raise self.failure

    def run(self, text, *args):
        if "st.volatile" in text:
            self.pause()
            place, sends = int(args[0][0]), args[1][0]
            assert not sends or place not in self.unread, "overwritten before it was read"
            self.unread |= {place} if sends else set()
            self.waiting.clear()
        return super().run(text, *args)

    def _branch(self, text, args):
        count = text.count("ld.volatile")
        places, numbers, waits = (args[i * count : (i + 1) * count] for i in range(3))
        wanted = [(int(p[0]), int(n[0])) for p, n, waits in zip(places, numbers, waits, strict=True) if waits[0]]
        self.pause()
        while any(self.memory[p + 4 : p + 8].view(np.int32)[0] != number for p, number in wanted):
            self.waiting.add(self.rank)
            self.pause()
        self.unread -= {place for place, _ in wanted}
        return super()._branch(text, args)

    def run_all(self, launches) -> None:
        """launches(rank), of every rank, each in a thread; AssertionError where one fails."""

        def of_rank(rank):
            self.gates[rank].acquire()
            try:
                assert self.failure is None
                launches(rank)
            except Exception as error:
                self.failure = self.failure or error
            self.ended.add(rank)
            self.waiting = set() if self.failure else self.waiting
            if (following := self.next_rank()) is not None:
                self.go_on(following)

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(len(self.gates))]
        for thread in threads:
            thread.start()
        with (
            emulated(rank_sum, self), mock.patch.object(peer_sums, "hops", lambda *_: self.hops[self.rank]),
            mock.patch.object(rank_sum, "Table", lambda *_: self.table("received")),
            mock.patch.object(layer_tail, "Table", lambda *_: self.table("received")),
        ):  # fmt: skip
            self.go_on(self.random.randrange(len(threads)))
            for thread in threads:
                thread.join()
        if self.failure:
            raise self.failure


def total_of(parts: np.ndarray) -> np.ndarray:
    """In the order of ranks, rounded once."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return total.astype(parts.dtype)


def race_of_sums(ranks: int, seed: int, hops: tuple[int, ...] = (1, 2), sums: int = 8) -> None:
    """Sums of random sizes and dtypes that share one memory."""
    config, rng = rank_sum.RankSum(ranks=ranks, pieces=PIECES), np.random.default_rng(seed)
    arrays = [
        dict(
            x=np.zeros(4 * PIECES, np.float32), received=np.zeros(config.received, np.int32),
            so_far=np.zeros(PIECES, np.int32), total=np.zeros(4 * PIECES, np.float32),
        )
        for _ in range(ranks)
    ]  # fmt: skip
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
    choices = list(kinds), (1, 100, PIECES), hops
    plan = [tuple(rng.choice(some).item() for some in choices) for _ in range(sums)]
    given = [rng.normal(size=(ranks, 4 * pieces)).astype(kinds[dtype]) for dtype, pieces, _ in plan]
    race = Race(arrays, seed)

    def launches(rank):
        refs = [race.base(name) for name in ("x", "received", "so_far", "total")]
        for (dtype, pieces, hop), xs in zip(plan, given, strict=True):
            race.read(rank, "x").view(xs.dtype)[: 4 * pieces] = xs[rank]
            race.hops[rank] = hop
            rank_sum._sum(config, dtype, (pieces, 2, THREADS), np.int32(0), *refs[:3], None, refs[3])
            found, want = race.read(rank, "total").view(xs.dtype), total_of(xs)
            for piece in range(LANE, pieces, THREADS):
                np.testing.assert_array_equal(found[4 * piece : 4 * piece + 4], want[4 * piece : 4 * piece + 4])

    race.run_all(launches)
    assert not race.unread and race.no_other_byte_has_changed()


def race_of_layers(ranks: int, seed: int, hops: int, layers: int = 4) -> None:
    """The sums of o and down of several layers, of which the thread's second four is not there."""
    config, rng = choose(13, HIDDEN, 896, 4864, (), 132, ranks=ranks), np.random.default_rng(seed)
    assert config is not None
    received = layer_tail._PRODUCTS * ranks * config.rows8 * HIDDEN
    arrays = [
        dict(received=np.zeros(received, np.int32), so_far=np.zeros(2 * MAX_CTAS * THREADS, np.int32))
        for _ in range(ranks)
    ]
    race = Race(arrays, seed)
    race.hops = [hops] * ranks
    given = rng.normal(size=(layers, 2, ranks, 4)).astype(ml_dtypes.bfloat16)

    def launches(rank):
        refs = (race.base("received"), race.base("so_far"), None)
        share = TokenShare(np.array([12], np.int32), np.array([1], np.int32), HIDDEN, 2)
        for layer in given:
            for product, parts in zip((0, 2), layer, strict=True):
                fours = [[np.array([value], np.float32) for value in parts[rank]] for _ in share.quads]
                found = layer_tail.sum_over_ranks(config, product, share, refs, np.int32(5), fours)
                np.testing.assert_array_equal(np.stack(found[0])[:, 0], total_of(parts).astype(np.float32))

    race.run_all(launches)
    assert not race.unread and race.no_other_byte_has_changed()


@pytest.mark.parametrize(("ranks", "seeds"), [(2, 10), (3, 10), (5, 3), (6, 2), (7, 2), (8, 2)])
def test_no_word_is_overwritten_before_it_was_read_and_no_rank_waits_for_ever(ranks, seeds):
    for seed in range(seeds):
        race_of_sums(ranks, seed)
        race_of_layers(ranks, seed, hops=1 + seed % 2)


def test_words_that_would_be_overwritten_are_seen(monkeypatch):
    """As with one set of words instead of two that take turns."""
    right = peer_words.next_number
    monkeypatch.setattr(peer_words, "next_number", lambda *args: 2 * right(*args))
    with pytest.raises(AssertionError, match="overwritten"):
        for seed in range(9):
            race_of_sums(3, seed, hops=(1,))


@pytest.mark.parametrize(("hops", "skipped"), [((1,), 0), ((2,), 0), ((2,), 3)])
def test_a_word_that_is_not_sent_is_seen(hops, skipped, monkeypatch):
    right, sent = peer_words.send, itertools.count()

    def send(place, words, number, sends, kind="r"):
        right(place, words, number, sends * (not sends[0] or next(sent) != skipped), kind)

    monkeypatch.setattr(peer_words, "send", send)
    with pytest.raises(AssertionError, match="wait for ever"):
        race_of_sums(3, 0, hops, sums=2)
