"""The oracle against literal 0/1 matrices and numbers computed by hand."""

import numpy as np
import pytest

from tests.oracle.attention import attend_one, ragged, visible_keys

SIX = np.arange(6)


@pytest.mark.parametrize(
    ("options", "queries", "wanted"),
    [
        (dict(causal=True), [0, 1, 2, 3, 4, 5], ["100000", "110000", "111000", "111100", "111110", "111111"]),
        (dict(causal=True), [3, 4, 5], ["111100", "111110", "111111"]),
        (dict(causal=True), [-2, -1, 0], ["000000", "000000", "100000"]),
        (dict(causal=False), [4, 5], ["111111", "111111"]),
        (dict(causal=True, window=(0, 0)), [2, 5], ["001000", "000001"]),
        (dict(causal=True, window=(2, -1)), [1, 4], ["110000", "001110"]),
        (dict(causal=False, window=(1, 2)), [0, 3], ["111000", "001111"]),
        (dict(causal=False, window=(-1, 0)), [0, 3], ["100000", "111100"]),
        (dict(causal=True, chunk_size=2), [1, 2, 5], ["110000", "001000", "000011"]),
        (dict(causal=False, chunk_size=4), [1, 5], ["111100", "000011"]),
        (dict(causal=True, chunk_size=4, window=(1, 0)), [4, 5], ["000010", "000011"]),
        (dict(causal=True, mask_fn=lambda h, i, j: (i - j) % 2 == h), [4, 5], ["101010", "010101"]),
    ],
)
def test_masks_are_these_literal_matrices(options, queries, wanted):
    got = visible_keys(np.array(queries), SIX, **options)
    assert ["".join(map(str, row)) for row in got.astype(int)] == wanted


def one(x):
    """Numbers as a [tokens, 1 head, 1 dim] tensor."""
    return np.array(x, float).reshape(-1, 1, 1)


def run(q, k, v, **options):
    out, lse = attend_one(one(q), one(k), one(v), **{"scale": 1.0, "q_pos": [len(k) - 1], **options})
    return out.ravel(), lse.ravel()


LN2, LN3 = np.log(2.0), np.log(3.0)


def test_two_keys_by_hand():
    out, lse = run([1], [0, LN3], [10, 20])
    np.testing.assert_allclose(out, [17.5])  # weights 1/4 and 3/4
    np.testing.assert_allclose(lse, [np.log(4)])


def test_scale_multiplies_the_product():
    np.testing.assert_allclose(run([2], [0, LN3], [10, 20], scale=0.5)[0], [17.5])


def test_a_sink_takes_its_share_and_gives_nothing():
    out, lse = run([1], [0, LN3], [10, 20], sinks=[np.log(4)])
    np.testing.assert_allclose(out, [8.75])  # weights 1/8 and 3/8, the sink has 4/8
    np.testing.assert_allclose(lse, [np.log(8)])
    np.testing.assert_array_equal(run([1], [0, LN3], [10, 20], sinks=[-np.inf])[0], run([1], [0, LN3], [10, 20])[0])


def test_alibi_is_slope_times_key_minus_query():
    out, lse = run([0], [5, 5], [10, 20], slopes=[LN3])  # distances -1 and 0: weights 1/4 and 3/4
    np.testing.assert_allclose(out, [17.5])
    np.testing.assert_allclose(lse, [np.log(4 / 3)])


def test_soft_cap_comes_before_alibi():
    _, lse = run([1e30], [1], [10], soft_cap=LN2)
    np.testing.assert_allclose(lse, [LN2])
    out, _ = run([1e30], [1, 1], [10, 20], soft_cap=2.0, slopes=[LN3])
    np.testing.assert_allclose(out, [17.5])


def test_score_fn_sees_the_biased_score_and_the_positions():
    seen = {}

    def score_fn(score, head, i, j):
        seen.update(score=np.array(score), head=head, i=np.array(i), j=np.array(j))
        return score * 0

    out, _ = run([1], [0, LN3], [10, 20], slopes=[1.0], score_fn=score_fn)
    np.testing.assert_allclose(out, [15.0])
    np.testing.assert_allclose(seen["score"], [[-1, LN3]])
    assert seen["head"] == 0 and seen["i"].tolist() == [[1]] and seen["j"].tolist() == [[0, 1]]


@pytest.mark.parametrize("sinks", [None, [3.0]])
def test_a_row_without_keys_is_zero_and_minus_infinity(sinks):
    out, lse = run([1, 1], [7], [9], q_pos=[-1, 0], sinks=sinks)
    assert out[0] == 0 and lse[0] == -np.inf
    assert np.isfinite(lse[1]) and out[1] != 0
    out, lse = attend_one(one([1]), np.zeros((0, 1, 1)), np.zeros((0, 1, 1)), q_pos=[0], scale=1.0, sinks=sinks)
    assert out == 0 and lse == -np.inf


def test_query_heads_share_kv_heads_in_runs():
    q, k = np.ones((1, 6, 1)), np.ones((1, 2, 1))
    out, _ = attend_one(q, k, np.array([[[1.0], [2.0]]]), q_pos=[0], scale=1.0)
    assert out.ravel().tolist() == [1, 1, 1, 2, 2, 2]


def test_ragged_is_each_request_alone_and_zero_behind():
    rng = np.random.default_rng(0)
    lengths, keys_lens = [2, 0, 1, 3], [5, 0, 4, 3]
    q = rng.normal(size=(8, 2, 4))
    keys, values = ([rng.normal(size=(n, 1, d)) for n in keys_lens] for d in (4, 3))
    causal = [True, True, False, False]
    out, lse = ragged(q, keys, values, lengths, causal=causal, scale=0.5, q_scale=2.0, k_scale=[3.0], v_scale=0.5)
    start = 0
    for r, n in enumerate(lengths):
        rows = slice(start, start + n)
        wanted = attend_one(
            q[rows],
            keys[r],
            values[r],
            q_pos=np.arange(keys_lens[r] - n, keys_lens[r]),
            scale=3.0,
            causal=causal[r],
        )
        np.testing.assert_allclose(out[rows], wanted[0] * 0.5, rtol=1e-12)
        np.testing.assert_allclose(lse[rows], wanted[1], rtol=1e-12)
        start += n
    assert (out[start:] == 0).all() and (lse[start:] == -np.inf).all()
