"""Spans whose tokens see each other in both directions."""

import jax
import numpy as np
import pytest

from jattn.metadata import compute_mm_prefix_range_tensor, fill_mm_prefix_query_ranges
from tests.metadata.batches import plain


def test_ranges_are_padded_with_invalid_pairs():
    ranges = compute_mm_prefix_range_tensor([[(0, 3), (5, 8)], []], num_reqs=3, max_ranges=2)
    assert ranges.tolist() == [[[0, 3], [5, 8]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]] and ranges.dtype == np.int32
    assert compute_mm_prefix_range_tensor([[], []]).shape == (2, 0, 2)


def test_every_token_gets_the_range_that_holds_its_position():
    meta = plain([4, 3], [8, 3], num_tokens=9, num_reqs=3)  # positions 4 5 6 7 | 0 1 2 | padding
    ranges = compute_mm_prefix_range_tensor([[(0, 2), (5, 6)], [(1, 2)]], num_reqs=3)
    wanted = [[-1, -1], [5, 6], [5, 6], [-1, -1], [-1, -1], [1, 2], [1, 2], [-1, -1], [-1, -1]]
    assert fill_mm_prefix_query_ranges(meta, ranges).tolist() == wanted
    assert jax.jit(fill_mm_prefix_query_ranges)(meta, ranges).tolist() == wanted
    none = compute_mm_prefix_range_tensor([], num_reqs=3)
    assert (fill_mm_prefix_query_ranges(meta, none) == -1).all()


def test_bad_ranges_are_refused():
    with pytest.raises(ValueError, match=r"request 1: range \(4, 2\) must be 0 <= first <= last"):
        compute_mm_prefix_range_tensor([[], [(4, 2)]])
    with pytest.raises(ValueError, match=r"request 0: ranges \[\(1, 4\), \(4, 6\)\] overlap"):
        compute_mm_prefix_range_tensor([[(4, 6), (1, 4)]])
    with pytest.raises(ValueError, match=r"do not fit \[1, 1, 2\]"):
        compute_mm_prefix_range_tensor([[(0, 1), (2, 3)]], max_ranges=1)


def test_an_array_of_ranges_is_held_to_the_same():
    """Of two spans of one token the second was ignored; the same ranges in lists were refused."""
    build = lambda ranges: plain([2], [9], mm_prefix_ranges=ranges).mm_prefix_ranges.tolist()
    for array in (np.array([[[1, 4], [0, 0]]]), jax.numpy.array([[[1, 4], [3, 2]]])):
        assert build(array) == array.tolist()
    for array, words in (
        (np.array([[[0, 4], [4, 8]]]), r"request 0: ranges \[\(0, 4\), \(4, 8\)\] overlap"),
        (np.array([[[-3, 5]]]), r"range \(-3, 5\) must be 0 <= first"),
        (np.zeros((1, 2, 3), int), r"must be \[1, n, 2\]"),
        (np.zeros((1, 2), int), "must have 3 axes of integers"),
        (np.zeros((1, 2, 2)), "must be an integer type"),
    ):
        with pytest.raises(ValueError, match=words):
            build(array)
