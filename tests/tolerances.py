"""How wrong a result may be: twice as wrong as the naive computation in the same precision.

    allowed = 2 * max|naive - exact| + eps(dtype) * max|exact| + eps(float32) * (1 + logit) * max(sum of p * |v|)

`exact` is the float64 witness; `naive` is textbook attention in float32 whose operands, probabilities and
result are rounded to the dtype. Both are measured on the very data of the test, so no tolerance is a guess; and on
each request by itself, because a short request's large numbers would hide an error in a long one's small ones.
The other terms, a unit in the last place of the result, of what was summed to get it and of what a logit was summed
from (scale * max(sum of |q| * |k|)), cover rows on which the naive computation happens to be exact.
"""

import ml_dtypes
import numpy as np

from tests.oracle.attention import among_new, by_distance, visible_keys

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def eps(dtype: str) -> float:
    """The distance from 1 to the next number."""
    return float(ml_dtypes.finfo(DTYPES[dtype]).eps)


def rounded(x, dtype: str) -> np.ndarray:
    """x as the dtype would hold it, in float32."""
    return np.asarray(x).astype(DTYPES[dtype]).astype(np.float32)


def naive_one(q, k, v, dtype, *, q_pos, scale, causal=True, soft_cap=None, slopes=None, alibi_sqrt=False, qq_bias=None,
              distance_bias=None, sinks=None, score_fn=None, **mask):  # fmt: skip
    """`oracle.attend_one` in float32 with operands, probabilities and result rounded to `dtype`."""
    q, k, v = (rounded(x, dtype) for x in (q, k, v))
    heads, kv_heads = q.shape[1], k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[2]), np.float32)
    lse = np.full(q.shape[:2], -np.inf, np.float32)
    if not q.shape[0] or not k.shape[0]:
        return out, lse
    i, j = np.asarray(q_pos)[:, None], np.arange(k.shape[0])[None, :]
    distance = np.where(j < i, -np.sqrt(np.abs(j - i)), 0) if alibi_sqrt else j - i
    for h in range(heads):
        g = h // (heads // kv_heads)
        x = (q[:, h] @ k[:, g].T) * np.float32(scale)
        if soft_cap:
            x = np.float32(soft_cap) * np.tanh(x / np.float32(soft_cap))
        if slopes is not None:
            x = x + np.float32(slopes[h]) * distance.astype(np.float32)
        if qq_bias is not None:
            x = x + among_new(qq_bias, q_pos, j[0]).astype(np.float32)
        if distance_bias is not None:
            x = x + by_distance(distance_bias[h], q_pos, j[0]).astype(np.float32)
        if score_fn is not None:
            x = np.asarray(score_fn(x, h, i, j), np.float32)
        see = visible_keys(q_pos, j[0], head=h, causal=causal, **mask)
        alive = see.any(axis=1)
        x = np.where(see, x, np.float32(-np.inf))
        sink = np.full((len(x), 1), -np.inf if sinks is None else sinks[h], np.float32)
        top = np.where(alive[:, None], np.maximum(x.max(axis=1, keepdims=True), sink), np.float32(0))
        weight = np.exp(x - top)
        total = np.where(alive[:, None], weight.sum(axis=1, keepdims=True) + np.exp(sink - top), np.float32(1))
        out[:, h] = rounded((rounded(weight, dtype) @ v[:, g]) / total, dtype)
        lse[:, h] = np.where(alive, (top + np.log(total))[:, 0], -np.inf)
    return out, lse


def largest_logit(q, k, scale: float) -> float:
    """max |q| . |k| * scale, what a logit is summed from, over one request's queries [Lq H D] and keys [L K D]."""
    if not len(q) or not len(k):
        return 0.0
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    return float(np.einsum("tkgd,lkd->tkgl", np.abs(grouped), np.abs(k)).max() * scale)


def allowed(naive, exact, dtype: str, mass=0.0, logit: float = 0.0) -> float:
    """The largest error of one request that passes; `mass` is the sum of p * |v|, which a cancelling sum is made of.

    For an lse it is 1, the sum of p: a logit wrong by its last place moves it by no more.
    """
    fine = np.isfinite(exact)
    if not fine.any():
        return 0.0
    wrong = np.abs(np.asarray(naive, np.float64)[fine] - exact[fine]).max()
    last_place = eps(dtype) * np.abs(exact[fine]).max() + eps("float32") * (1 + logit) * np.max(mass, initial=0.0)
    return float(2 * wrong + last_place)


def allowed_each(naive, exact, query_lens, dtype: str, mass, logits) -> np.ndarray:
    """`allowed` of each request of a packed batch, one number a row: [T 1 ..], 0 for padding. logits: one a request."""
    limits, start = np.zeros((len(exact), *[1] * (exact.ndim - 1))), 0
    for count, logit in zip(query_lens, logits, strict=True):
        rows, start = slice(start, start + count), start + count
        limits[rows] = allowed(naive[rows], exact[rows], dtype, mass[rows], logit)
    return limits


def assert_within(got, exact, limit, what: str = "out") -> None:
    """Same shape, same infinities, no NaN, no element further from `exact` than `limit`: one for all, or one a row."""
    got = np.asarray(got, np.float64)
    assert got.shape == exact.shape, f"{what}: {got.shape=} must be {exact.shape}"
    assert not np.isnan(got).any(), f"{what}: {np.isnan(got).sum()} NaN of {got.size}"
    np.testing.assert_array_equal(np.isinf(got), np.isinf(exact), err_msg=f"{what}: infinities differ")
    fine = np.isfinite(exact)
    error = np.where(fine, np.abs(np.where(fine, got, 0) - np.where(fine, exact, 0)), 0)
    over = error > limit
    if over.any():
        worst = np.unravel_index(np.argmax(np.where(over, error, 0)), error.shape)
        allowed_there = np.broadcast_to(limit, error.shape)[worst]
        raise AssertionError(
            f"{what}: {error[worst]:.3g} at {tuple(map(int, worst))} is over {allowed_there:.3g}, "
            f"and {over.mean():.1%} of elements are over theirs"
        )
