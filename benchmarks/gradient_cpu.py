"""Value and gradient of packed attention on the CPU: jattn's backends beside torch, timed in turn.

    PYTHONPATH=. python -m benchmarks.gradient_cpu [--rounds 5] [--only PARTS] [--write | --out DIR]

Causal, 32 query and 8 kv heads of 64; the requests of a batch are packed. Forward and backward together, dq, dk and dv.
torch computes each request by scaled_dot_product_attention (its flash kernel for CPUs) with the kv heads repeated, as
that kernel needs them. Errors are the largest of a row of out, dq, dk and dv, over the largest row of torch's float32
result. `ratio`: torch's time over ours, the median over rounds, so more than 1 is faster than torch.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import name_lists, records, timing

HEADS, KV_HEADS, DIM = 32, 8, 64
BATCHES = {"1x1024": (1024,), "4x256": (256,) * 4, "ragged": (700, 17, 300, 1, 129), "1x2048": (2048,)}
BACKENDS = ("cpu_native", "sdpa")
BOUND = {"float32": 1e-4, "bfloat16": 3e-2}


def inputs_of(lens: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """q, k, v and the cotangent of out, as numpy float32 of numbers that `dtype` holds."""
    rng, tokens = np.random.default_rng(0), sum(lens)
    shapes = [(tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    round_off = lambda x: np.asarray(jnp.asarray(x, dtype), np.float32)
    return [round_off(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes]


def ours(backend: str, lens: tuple[int, ...], dtype: str, arrays):
    """A function without arguments -> (out, dq, dk, dv)."""
    spec = jattn.AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM)
    meta = jattn.CommonAttentionMetadata.from_lengths(lens, lens, None, 16)
    attend = lambda q, k, v: jattn.attention(q, k, v, meta, spec, backend=backend).out

    @jax.jit
    def step(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    given = [jnp.asarray(x, dtype) for x in arrays]
    return lambda: jax.block_until_ready(step(*given))


def by_torch(lens: tuple[int, ...], dtype: str, arrays):
    """The same by torch, with JAX's number of threads left as torch chooses it."""
    import torch

    *given, dout = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays)
    group = HEADS // KV_HEADS

    def step():
        q, k, v = (x.detach().requires_grad_() for x in given)
        parts = []
        for own_q, own_k, own_v in zip(*(x.split(list(lens)) for x in (q, k, v)), strict=True):
            heads_first = [own_q.transpose(0, 1)]
            heads_first += [x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (own_k, own_v)]
            args = [x[None] for x in heads_first]
            parts.append(torch.nn.functional.scaled_dot_product_attention(*args, is_causal=True)[0].transpose(0, 1))
        out = torch.cat(parts)
        out.backward(dout)
        return out.detach(), q.grad, k.grad, v.grad

    return step


def rows_of(x) -> np.ndarray:
    """float64 [T, heads, D] of an array of JAX or torch."""
    return np.asarray(x.float().numpy() if hasattr(x, "float") else x.astype(jnp.float32), np.float64)


def error(got, want) -> float:
    """The largest error of a row, over the largest row."""
    pairs = [(rows_of(a), rows_of(b)) for a, b in zip(got, want, strict=True)]
    norm = lambda x: np.linalg.norm(x, axis=-1).max()
    return max(float(norm(a - b) / norm(b)) for a, b in pairs)


def measure(name: str, dtype: str, rounds: int) -> list[dict]:
    """One row a backend."""
    lens = BATCHES[name]
    arrays = inputs_of(lens, dtype)
    want, peer = by_torch(lens, "float32", arrays)(), by_torch(lens, dtype, arrays)
    calls = {backend: ours(backend, lens, dtype, arrays) for backend in BACKENDS}
    errors = {backend: error(call(), want) for backend, call in calls.items()}
    times = timing.in_turn({"torch": peer, **calls}, rounds)
    rows = []
    for backend in BACKENDS:
        row = dict(case=f"gradient_{name}_{dtype}", backend=backend, ms=times[backend].median * 1e3)
        row |= dict(torch_ms=times["torch"].median * 1e3, ratio=timing.ratio(times, "torch", backend))
        rows.append(row | dict(error=errors[backend], ok=errors[backend] < BOUND[dtype]))
    return rows


def main(argv: list[str] | None = None) -> int:
    """Print and keep the rows; 1 if a gradient was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradient_cpu", description=__doc__.splitlines()[0])
    records.add_options(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="parts of case names, separated by commas")
    args, failed = parser.parse_args(argv), 0
    cases = {f"gradient_{name}_{dtype}": (name, dtype) for dtype in BOUND for name in BATCHES}
    for case in name_lists.matching(parser, "--only", args.only, cases, "case"):
        rows = measure(*cases[case], args.rounds)
        for row in rows:
            cells = (f"{k}={row[k]:.3g}" for k in ("ms", "torch_ms", "ratio", "error"))
            print("ok   " if row["ok"] else "WRONG", row["case"], row["backend"], *cells, flush=True)
            failed += not row["ok"]
        records.write([records.provenance() | row for row in rows], "gradient", records.folder_of(args))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
