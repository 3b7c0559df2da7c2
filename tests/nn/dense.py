"""The reference of the layers: textbook attention over one sequence with all of its keys, in float64 numpy."""

import numpy as np


def turn(x: np.ndarray, theta: float, dim: int, interleaved: bool = False) -> np.ndarray:
    """x [L heads D] at positions 0 .. L-1: pairs, as complex numbers, multiplied by exp(i * position * frequency)."""
    angle = np.arange(len(x))[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    spin = np.exp(1j * angle)[:, None, :]
    real, rest = x[..., :dim], x[..., dim:]
    a, b = (real[..., 0::2], real[..., 1::2]) if interleaved else (real[..., : dim // 2], real[..., dim // 2 :])
    pair = (a + 1j * b) * spin
    out = np.stack([pair.real, pair.imag], axis=-1).reshape(real.shape) if interleaved else None
    return np.concatenate([np.concatenate([pair.real, pair.imag], -1) if out is None else out, rest], axis=-1)


def rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def rms_of(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    """x [L heads D] normalised over groups as wide as the scale: one head, or all heads together.

    A scale [heads, D] is one per head.
    """
    if scale.ndim == 2:
        return rms(x, scale, eps)
    return rms(x.reshape(len(x), -1, scale.size), scale, eps).reshape(x.shape)


def project(weights: dict, x: np.ndarray) -> np.ndarray:
    return x @ weights["kernel"] + weights.get("bias", 0.0)


def layer(
    weights, x, heads, kv_heads, *, keys_from=None, seen=None, theta=None, dim=0, eps=None, sinks=None, clip=None
):
    """One sequence x [L hidden] -> [L hidden]. seen bool[L Lk]; None: all keys."""
    source = x if keys_from is None else keys_from
    q = project(weights["q"], x).reshape(len(x), heads, -1)
    k, v = (project(weights[n], source).reshape(len(source), kv_heads, -1) for n in "kv")
    if eps is not None:
        q, k = rms_of(q, weights["q_norm"]["scale"], eps), rms_of(k, weights["k_norm"]["scale"], eps)
    if clip is not None:
        q, k, v = (np.clip(y, -clip, clip) for y in (q, k, v))
    if theta is not None:
        q, k = turn(q, theta, dim), turn(k, theta, dim)
    out = np.zeros((len(x), heads, v.shape[-1]))
    for h in range(heads):
        g = h // (heads // kv_heads)
        logits = q[:, h] @ k[:, g].T / np.sqrt(q.shape[-1])
        logits = logits if seen is None else np.where(seen, logits, -np.inf)
        weight = np.exp(logits)
        out[:, h] = weight @ v[:, g] / (weight.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks[h])))
    return project(weights["o"], out.reshape(len(x), -1))
