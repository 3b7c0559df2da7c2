"""Dense attention of one request, and of a ragged batch of requests, in numpy float64.

    x      = (q . k) * scale
    x      = cap * tanh(x / cap)                     soft cap
    x      = x + slope * (kv_pos - q_pos)            ALiBi; or -sqrt(q_pos - kv_pos), keys ahead 0
    x      = x + bias(i, j)                          of new token i on new token j
    x      = x + bias(clip(kv_pos - q_pos, -L, L))   of the distance, per head
    x      = score_fn(x, head, q_pos, kv_pos)
    p      = exp(x) / (exp(sink) + sum of exp(x) over the visible keys)
    out    = sum of p * v                            lse = log of the denominator

It is written to be read, not to be fast: nothing is tiled, nothing is online, every rule has one line.
"""

import numpy as np


def visible_keys(q_pos, kv_pos, *, head=0, causal=True, window=None, chunk_size=None, lookback=0, prefix=0, spans=(),
                 clamp_spans=False, mask_fn=None):  # fmt: skip
    """The 0/1 matrix [Lq, L]: may the query at q_pos[i] look at the key at kv_pos[j]?

    The window hides none of the first `prefix` keys (R-SWA). The tokens of a span (first, last) see one another
    whatever else hides them; with clamp_spans, the window's left edge still does.
    """
    i, j = np.asarray(q_pos)[:, None], np.asarray(kv_pos)[None, :]
    see = np.ones((i.shape[0], j.shape[1]), bool)
    if causal:
        see &= j <= i
    if window is not None:
        left, right = window
        if left >= 0:
            see &= (j >= i - left) | (j < prefix)
        if right >= 0:
            see &= j <= i + right
    if chunk_size is not None:
        see &= np.isin(i // chunk_size - j // chunk_size, range(lookback + 1))
    for first, last in spans:
        together = (i >= first) & (i <= last) & (j >= first) & (j <= last)
        see |= together & (j >= i - window[0]) if clamp_spans else together
    if mask_fn is not None:
        see &= np.asarray(mask_fn(head, i, j), bool)
    return see


def attend_one(
    q,
    k,
    v,
    *,
    q_pos,
    scale,
    causal=True,
    soft_cap=None,
    slopes=None,
    alibi_sqrt=False,
    qq_bias=None,
    distance_bias=None,
    sinks=None,
    score_fn=None,
    **mask,
):
    """One request: q [Lq H D], k [L K D], v [L K V] -> (out [Lq H V], lse [Lq H], natural log).

    Keys sit at positions 0..L-1. Query head h reads kv head h // (H // K). A sink counts in the denominator
    and in the lse; a row that sees no key gives out 0 and lse -inf even with a sink. `mask`: see visible_keys.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (rows, heads, _), (length, kv_heads, _) = q.shape, k.shape
    kv_pos = np.arange(length)
    i, j = np.asarray(q_pos)[:, None], kv_pos[None, :]
    out, lse = np.zeros((rows, heads, v.shape[2])), np.full((rows, heads), -np.inf)
    for h in range(heads):
        kv_head = h // (heads // kv_heads)
        x = (q[:, h] @ k[:, kv_head].T) * scale
        if soft_cap:
            x = soft_cap * np.tanh(x / soft_cap)
        if slopes is not None:
            x = x + float(slopes[h]) * (np.where(j < i, -np.sqrt(np.abs(j - i)), 0) if alibi_sqrt else j - i)
        if qq_bias is not None:
            x = x + among_new(qq_bias, q_pos, kv_pos)
        if distance_bias is not None:
            x = x + by_distance(distance_bias[h], q_pos, kv_pos)
        if score_fn is not None:
            x = np.asarray(score_fn(x, h, i, j), np.float64)
        see = visible_keys(q_pos, kv_pos, head=h, causal=causal, **mask)
        for row in range(rows):
            keys = np.flatnonzero(see[row])
            if len(keys) == 0:
                continue
            column = x[row, keys]
            if sinks is not None:
                column = np.append(column, float(sinks[h]))
            top = column.max()
            weight = np.exp(column - top)
            total = weight.sum()
            out[row, h] = (weight[: len(keys)] / total) @ v[keys, kv_head]
            lse[row, h] = top + np.log(total)
    return out, lse


def among_new(bias, q_pos, kv_pos):
    """[Lq, L] of a square bias [Q, Q] among the new tokens, the first of which stands at q_pos[0]; else 0."""
    out, size = np.zeros((len(q_pos), len(kv_pos))), len(bias)
    for a, i in enumerate(q_pos):
        for b, j in enumerate(kv_pos):
            if q_pos[0] <= j < q_pos[0] + size and i < q_pos[0] + size:
                out[a, b] = bias[i - q_pos[0], j - q_pos[0]]
    return out


def by_distance(bias, q_pos, kv_pos):
    """[Lq, L] of one head's bias of the distances -L .. L; farther keys have that of the nearer end."""
    most = (len(bias) - 1) // 2
    return np.array([[bias[most + max(-most, min(most, j - i))] for j in kv_pos] for i in q_pos], float)


def ragged(
    q,
    keys,
    values,
    query_lens,
    *,
    q_starts=None,
    causal=True,
    num_tokens=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    each=None,
    attend=attend_one,
    **options,
):
    """A batch: packed q [T H D] and one [L K D], [L K V] pair a request -> (out [T H V], lse [T H]).

    Query i of request r has position q_starts[r] + i; the default L - query_len aligns the last query with
    the last key. Rows past the last request (padding) are out 0, lse -inf. Scales: real = stored * scale,
    where a scale is a number or one number a head. each: further options of each request. `attend` judges one request.
    """
    q = np.asarray(q, np.float64)
    heads, v_dim = q.shape[1], values[0].shape[2]
    num_tokens = q.shape[0] if num_tokens is None else num_tokens
    out, lse = np.zeros((num_tokens, heads, v_dim)), np.full((num_tokens, heads), -np.inf)
    start = 0
    for r, n in enumerate(query_lens):
        first = len(keys[r]) - n if q_starts is None else q_starts[r]
        stop = start + n
        out[start:stop], lse[start:stop] = attend(
            scaled(q[start:stop], q_scale),
            scaled(keys[r], k_scale),
            scaled(values[r], v_scale),
            q_pos=first + np.arange(n),
            causal=bool(np.broadcast_to(causal, len(query_lens))[r]),
            **options,
            **(each[r] if each else {}),
        )
        start = stop
    return out, lse


def scaled(stored, scale):
    """The real value of stored [..., heads, dim] under a scale: None, a number, or one number a head."""
    stored = np.asarray(stored, np.float64)
    if scale is None:
        return stored
    return stored * np.broadcast_to(np.asarray(scale, np.float64), stored.shape[-2:-1])[:, None]
