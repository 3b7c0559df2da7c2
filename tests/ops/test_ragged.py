"""Tiles of a ragged batch: every query lies in one."""

import dataclasses

import numpy as np

from jattn.ops.ragged import TILE_CLASSES, classes_for, index_tiles


def test_the_classes_of_tiles_split_all_query_lengths_between_them():
    for length in range(1, 200):
        assert sum(kind.shortest <= length <= kind.longest for kind in TILE_CLASSES) == 1
    assert [kind.rows for kind in classes_for(1)] == [1]
    assert classes_for(10**6) == TILE_CLASSES


def test_tiles_cover_every_query_once_and_never_exceed_their_capacity():
    rng = np.random.default_rng(0)
    for _ in range(20):
        query_lens = rng.choice([0, 1, 2, 7, 8, 9, 64, 65, 200], size=rng.integers(1, 12))
        start = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        covered = np.zeros(start[-1], int)
        batch = _Lengths(query_lens=np.diff(start))
        for kind in TILE_CLASSES:
            index = index_tiles(batch, kind)
            assert int(index.total) <= kind.capacity(int(start[-1]), len(query_lens))
            for t in range(int(index.total)):
                req, number = (int(x) for x in index.locate(t))
                first = number * kind.rows
                covered[start[req] + first : start[req] + min(first + kind.rows, query_lens[req])] += 1
        assert (covered == 1).all()


@dataclasses.dataclass
class _Lengths:
    query_lens: np.ndarray
