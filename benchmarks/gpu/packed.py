"""`jattn.attention` without a cache: checked against numpy float64, and timed with the gather that it needs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

import jattn

RAGGED = ((5, 5), (33, 33), (1, 1), (130, 130), (0, 0), (257, 257), (64, 64))
LONGER = ((5, 50), (33, 133), (1, 700), (130, 131), (0, 0), (64, 64))  # more keys than queries


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCase:
    """(query_len, key_len) of each request, the layer's options, and whether to time it."""

    lengths: tuple
    dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    causal: bool | tuple = True
    dtype: str = "bfloat16"
    timed: bool = False
    spec: dict = dataclasses.field(default_factory=dict)


ENCODER = dict(attn_type="encoder_only")
CASES = {
    "causal": PackedCase(lengths=RAGGED),
    "d64": PackedCase(lengths=RAGGED, dim=64, heads=8),
    "gqa1_f16": PackedCase(lengths=RAGGED, heads=4, kv_heads=4, dtype="float16"),
    "not_causal": PackedCase(lengths=LONGER, causal=False),
    "longer": PackedCase(lengths=LONGER, dim=64, spec=dict(sliding_window=70, has_sinks=True)),
    "per_request": PackedCase(lengths=LONGER, causal=(True, False) * 3),
    "encoder": PackedCase(lengths=RAGGED, dim=64, spec=ENCODER),
    "encoder_window": PackedCase(lengths=RAGGED, spec=ENCODER | dict(sliding_window=(30, 9))),
    "d192_v128": PackedCase(lengths=RAGGED, dim=192, spec=dict(v_head_dim=128)),
    "pre_1x8k": PackedCase(lengths=((8192, 8192),), timed=True),
    "pre_4x4k": PackedCase(lengths=((4096, 4096),) * 4, timed=True),
    "encoder_32x512": PackedCase(lengths=((512, 512),) * 32, timed=True, spec=ENCODER),
}


def run(name: str, iterations: int, samples: int = 60) -> dict:
    """The row of one case: the largest errors over sampled (token, head) pairs, and microseconds if it is timed."""
    row = CASES[name]
    spec = jattn.AttentionSpec(num_heads=row.heads, num_kv_heads=row.kv_heads, head_dim=row.dim, **row.spec)
    q_lens, k_lens = (np.array(x) for x in zip(*row.lengths, strict=True))
    tokens, keys = int(q_lens.sum()), int(k_lens.sum())
    pad_tokens, pad_keys = (0, 0) if row.timed else (9, 13)
    meta = jattn.CommonAttentionMetadata.from_lengths(
        q_lens, k_lens, None, 1, num_tokens=tokens + pad_tokens, num_reqs=len(q_lens) + 2, causal=row.causal
    )
    rng = np.random.default_rng(0)
    draw = lambda n, h, d: rng.normal(size=(n, h, d)).astype(np.float32)
    q, k = draw(tokens + pad_tokens, row.heads, row.dim), draw(keys + pad_keys, row.kv_heads, row.dim)
    v = draw(keys + pad_keys, row.kv_heads, spec.v_head_dim)
    k[keys:], v[keys:] = np.nan, np.nan
    q, k, v = (jnp.asarray(x, row.dtype) for x in (q, k, v))
    sinks = rng.normal(size=row.heads).astype(np.float32)
    params = jattn.AttentionParams(sinks=jnp.asarray(sinks) if spec.has_sinks else None)
    chosen = jattn.backends.resolve(spec, None, dtypes=(q.dtype, k.dtype)).get_name()
    attend = jax.jit(lambda q, k, v: jattn.attention(q, k, v, meta, spec, params, backend="pallas_gpu"))
    state = jax.block_until_ready(attend(q, k, v))
    errors = _errors(row, spec, (q_lens, k_lens), [np.asarray(x, np.float64) for x in (q, k, v)], sinks, state, samples)
    pads = not np.asarray(state.out, np.float32)[tokens:].any() and np.isneginf(np.asarray(state.lse)[tokens:]).all()
    same = bool((np.asarray(attend(q, k, v).out) == np.asarray(state.out)).all())
    ok = bool(errors[0] < 6e-3 and errors[1] < 1e-4 and pads and same and chosen == "pallas_gpu")
    answer = dict(case=f"packed_{name}", rel_err=errors[0], lse_err=errors[1], same_bits=same, auto=chosen, ok=ok)
    if row.timed:
        _, runs = profiler.measure(attend, aggregate=False, iterations=iterations)(q, k, v)
        us = float(np.median([sum(t for _, t in one) for one in runs]) * 1e3)
        pairs = sum(a * b if "attn_type" in row.spec else a * (b - a) + a * (a + 1) // 2 for a, b in row.lengths)
        tflop_s = pairs * row.heads * 2 * (row.dim + spec.v_head_dim) / us / 1e6
        answer |= dict(us=us, tflop_s=tflop_s, parts={name[:40]: round(t * 1e3, 2) for name, t in runs[-1]})
    return answer


def _errors(row: PackedCase, spec, lengths, host, sinks, state, samples: int) -> tuple[float, float]:
    """(worst relative error of an output row, worst |lse - exact|)."""
    (q, k, v), (q_lens, k_lens) = host, lengths
    out, lse = np.asarray(state.out, np.float64), np.asarray(state.lse, np.float64)
    q0, k0 = np.cumsum(q_lens) - q_lens, np.cumsum(k_lens) - k_lens
    rng = np.random.default_rng(1)
    requests = np.flatnonzero(q_lens)
    picks = [(r, i) for r in requests for i in (0, q_lens[r] - 1)]
    picks += [(r, rng.integers(q_lens[r])) for r in rng.choice(requests, samples)]
    worst = [0.0, 0.0]
    left, right = spec.window
    for r, i in picks:
        head = int(rng.integers(row.heads))
        position, key = k_lens[r] - q_lens[r] + i, np.arange(k_lens[r])
        causal = row.causal if isinstance(row.causal, bool) else row.causal[r]
        seen = key <= position if causal and "attn_type" not in row.spec else np.ones(len(key), bool)
        seen &= (key >= position - left) if left >= 0 else True
        seen &= (key <= position + right) if right >= 0 else True
        rows = k0[r] + key[seen]
        x = k[rows, head // spec.group_size] @ q[q0[r] + i, head] * spec.scale
        total = np.exp(x).sum() + (np.exp(float(sinks[head])) if spec.has_sinks else 0.0)
        want = np.exp(x) @ v[rows, head // spec.group_size] / total
        error = np.linalg.norm(out[q0[r] + i, head] - want) / np.linalg.norm(want)
        worst = [
            max(a, np.nan_to_num(b, nan=np.inf))
            for a, b in zip(worst, (error, abs(lse[q0[r] + i, head] - np.log(total))), strict=True)
        ]
    return float(worst[0]), float(worst[1])
