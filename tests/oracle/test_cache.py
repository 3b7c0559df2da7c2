"""Pages by hand: where a token goes, what a copy keeps, what never moves."""

import numpy as np

from tests.oracle import cache


def test_write_goes_to_block_and_offset_and_nowhere_else():
    pages = np.zeros((3, 2), int)
    got = cache.write(pages, [1, 2, 3, 4, 5], [0, 3, -1, 6, 4])
    assert got.tolist() == [[1, 0], [0, 2], [5, 0]] and not pages.any()
    assert not cache.write(pages, [1, 2, 3], [-1, -6, 10**9]).any()


def test_gather_follows_the_table():
    pages = np.arange(12).reshape(4, 3)
    assert cache.gather(pages, [2, 0, -7], 5).tolist() == [6, 7, 8, 0, 1]
    assert cache.gather(pages, [-1], 0).shape == (0,)


def test_a_chain_of_copies_reads_old_values():
    assert cache.copy(np.array([[1], [2], [3]]), [(0, 1), (1, 2)]).tolist() == [[1], [1], [2]]


def test_slots_of_a_request_cross_pages():
    assert cache.slots_of([5, 2], 2, 3, 3) == [17, 6, 7]
