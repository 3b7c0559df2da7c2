"""The derivative of `attend_one`, written out by hand.

    delta  = sum over keys of p * (dout . v)                     (the sink column has value 0)
    dx     = p * (dout . v - delta + dlse)        dsink = p_sink * (dlse - delta)
    dslope = sum of dx * (kv_pos - q_pos)         dx0   = dx * (1 - tanh(x0 / cap)^2)
    dq     = scale * dx0 @ k      dk = scale * dx0^T @ q      dv = p^T @ dout

A row that sees no key has no derivative at all: zeros everywhere.
"""

import numpy as np

from tests.oracle.attention import among_new, by_distance, visible_keys


def attend_one_grad(
    q,
    k,
    v,
    dout,
    dlse=None,
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
    **mask,
):
    """One request: cotangents dout [Lq H V], dlse [Lq H] -> dict of dq, dk, dv, dslopes [H], dsinks [H]."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    heads, kv_heads = q.shape[1], k.shape[1]
    dlse = np.zeros(q.shape[:2]) if dlse is None else np.asarray(dlse, np.float64)
    g = dict(
        dq=np.zeros_like(q),
        dk=np.zeros_like(k),
        dv=np.zeros_like(v),
        dslopes=np.zeros(heads),
        dsinks=np.zeros(heads),
        ddistance_bias=np.zeros_like(np.asarray(0.0 if distance_bias is None else distance_bias, np.float64)),
        dqq_bias=np.zeros_like(np.asarray(0.0 if qq_bias is None else qq_bias, np.float64)),
    )
    kv_pos = np.arange(k.shape[0])
    distance = kv_pos[None, :] - np.asarray(q_pos)[:, None]
    if alibi_sqrt:
        distance = np.where(distance < 0, -np.sqrt(np.abs(distance)), 0)
    for h in range(heads):
        kv_head = h // (heads // kv_heads)
        x0 = (q[:, h] @ k[:, kv_head].T) * scale
        x = soft_cap * np.tanh(x0 / soft_cap) if soft_cap else x0
        if slopes is not None:
            x = x + float(slopes[h]) * distance
        if qq_bias is not None:
            x = x + among_new(qq_bias, q_pos, kv_pos)
        if distance_bias is not None:
            x = x + by_distance(distance_bias[h], q_pos, kv_pos)
        see = visible_keys(q_pos, kv_pos, head=h, causal=causal, **mask)
        alive = see.any(axis=1)
        x = np.where(see, x, -np.inf)
        sink = np.full(len(x), -np.inf if sinks is None else float(sinks[h]))
        top = np.where(alive, np.maximum(x.max(axis=1, initial=-np.inf), sink), 0.0)
        weight, sink_weight = np.exp(x - top[:, None]), np.exp(sink - top)
        total = np.where(alive, weight.sum(axis=1) + sink_weight, 1.0)
        p, p_sink = weight / total[:, None] * alive[:, None], sink_weight / total * alive
        dp = dout[:, h] @ v[:, kv_head].T
        delta = (p * dp).sum(axis=1)
        row = np.where(alive, dlse[:, h], 0.0) - delta
        dx = p * (dp + row[:, None])
        g["dsinks"][h] = (p_sink * row).sum()
        if distance_bias is not None:
            most = len(distance_bias[h]) // 2
            for i, row_of_dx in zip(q_pos, dx, strict=True):
                for j, one in zip(kv_pos, row_of_dx, strict=True):
                    g["ddistance_bias"][h, most + max(-most, min(most, j - i))] += one
        if qq_bias is not None:
            own = np.arange(len(qq_bias)) + np.asarray(q_pos)[0]
            size = min(len(own), len(q_pos))
            g["dqq_bias"][:size, :size] += dx[:size, own[:size]]
        g["dslopes"][h] = (dx * distance).sum()
        dx0 = dx * (1 - np.tanh(x0 / soft_cap) ** 2) if soft_cap else dx
        g["dq"][:, h] = scale * dx0 @ k[:, kv_head]
        g["dk"][:, kv_head] += scale * dx0.T @ q[:, h]
        g["dv"][:, kv_head] += p.T @ dout[:, h]
    return g
