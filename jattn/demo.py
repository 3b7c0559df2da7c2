"""The demo: every backend that runs on this machine computes a small ragged batch, and numpy checks the results.

Four requests share one pool of blocks: two decode one token, one prefills its prompt, one continues a prefill. The
reference below is plain attention in float64. It shares no code with the backends and has no blocks. Queries, keys and
values are bfloat16. A backend's error may be twice that of the reference with weights and output rounded to bfloat16.
"""

import math
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn.device import devices

QUERY_LENS = (1, 1, 7, 5)
SEQ_LENS = (37, 5, 7, 21)
BLOCK_SIZE = 8
SPEC = jattn.AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64)
CACHE = jattn.KVCacheSpec(num_blocks=16, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=64)
REPEATS = 5


def run() -> int:
    """Print the table. Returns 0 if every backend that accepts the batch agrees with the reference, else 1."""
    rng = np.random.default_rng(0)
    requests = [_random_request(rng, n_q, n) for n_q, n in zip(QUERY_LENS, SEQ_LENS, strict=True)]
    want = np.concatenate([reference(*request) for request in requests])
    naive = np.concatenate([reference(*request, rounded=_to_bfloat16) for request in requests])
    allowed = 2 * np.abs(naive - want).max()

    print(f"One step of paged attention on {devices()[0].device_kind} (jax {jax.__version__}), by every backend.")
    print(f"The batch, in bfloat16, with {SPEC.num_heads} query heads and {SPEC.num_kv_heads} key-value heads:")
    for number, (query_len, seq_len) in enumerate(zip(QUERY_LENS, SEQ_LENS, strict=True), start=1):
        pages = math.ceil(seq_len / BLOCK_SIZE)
        print(f"  request {number}: {query_len} new of {seq_len} tokens; pages of {BLOCK_SIZE} tokens: {pages}")
    print("Each result is compared with plain attention in float64, computed by numpy without pages.")
    if jax.default_backend() == "cpu":
        print("C++ kernels that were never built on this machine are compiled first, which takes about 40 s.")
    print(flush=True)
    rows, wrong = [("backend", "max error", "ms", "result")], 0
    for report in jattn.explain(SPEC, CACHE):
        if not report.supported:
            rows.append((report.name, "-", "-", "does not run: " + "; ".join(report.reasons)))
            continue
        got, milliseconds = _run_backend(report.name, requests)
        error = np.abs(got.astype(np.float64) - want).max()
        good = error <= allowed  # False for NaN
        wrong += not good
        rows.append((report.name, f"{error:.1e}", f"{milliseconds:.2f}", "agrees" if good else "WRONG"))
    _print_table(rows)
    print(f"\nmax error: allowed is {allowed:.1e}, twice what rounding to bfloat16 costs the reference itself")
    print(f"ms: the fastest of {REPEATS} steps, without compiling")
    print(f"\nWRONG: {wrong} backends differ from numpy" if wrong else "\nEvery backend that ran agrees with numpy.")
    return 1 if wrong else 0


def reference(q, k, v, rounded=lambda x: x) -> np.ndarray:
    """Causal attention of one request in float64. q [n_q H D] belongs to the last tokens of k, v [n K D]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for i, head in np.ndindex(q.shape[:2]):
        seen = len(k) - len(q) + i + 1
        kv_head = head * k.shape[1] // q.shape[1]
        logits = k[:seen, kv_head] @ q[i, head] / math.sqrt(q.shape[2])
        weights = np.exp(logits - logits.max())
        out[i, head] = rounded(weights) @ v[:seen, kv_head] / weights.sum()
    return rounded(out)


def _to_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(jnp.bfloat16).astype(np.float64)


def _random_request(rng, query_len: int, seq_len: int):
    """q of the new tokens, k and v of all tokens of one request: N(0, 1) in bfloat16."""
    draw = lambda *shape: rng.standard_normal(shape).astype(jnp.bfloat16)
    heads, kv_heads, dim = SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim
    return draw(query_len, heads, dim), draw(seq_len, kv_heads, dim), draw(seq_len, kv_heads, dim)


def _run_backend(name: str, requests) -> tuple[np.ndarray, float]:
    """(outputs of the new tokens, milliseconds of the fastest of REPEATS steps)."""
    table = _block_table()
    attn = jattn.PagedAttention(SPEC, CACHE, backend=name)
    # Write the tokens of earlier steps: all but the new ones.
    past_lens = np.subtract(SEQ_LENS, QUERY_LENS)
    past = jattn.CommonAttentionMetadata.from_lengths(past_lens, past_lens, table, BLOCK_SIZE)
    k, v = (np.concatenate([r[i][: len(r[i]) - len(r[0])] for r in requests]) for i in (1, 2))
    cache = jattn.write_kv(jattn.empty_cache(CACHE), jnp.asarray(k), jnp.asarray(v), jnp.asarray(past.slot_mapping))
    # Compute the new tokens.
    meta = jattn.CommonAttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, table, BLOCK_SIZE)
    q = jnp.concatenate([r[0] for r in requests])
    k, v = (jnp.concatenate([r[i][-len(r[0]) :] for r in requests]) for i in (1, 2))
    step = jax.jit(lambda q, k, v, cache, meta: attn(q, k, v, cache, attn.build(meta))[1].out)
    out = jax.block_until_ready(step(q, k, v, cache, meta))  # compiles
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        out = jax.block_until_ready(step(q, k, v, cache, meta))
        seconds.append(time.perf_counter() - begin)
    return np.asarray(out), 1e3 * min(seconds)


def _block_table() -> np.ndarray:
    """Block ids in shuffled order, so that a backend that ignores the block table does not agree."""
    pages = iter(np.random.default_rng(1).permutation(CACHE.num_blocks))
    table = np.zeros((len(SEQ_LENS), math.ceil(max(SEQ_LENS) / BLOCK_SIZE)), np.int32)
    for row, seq_len in zip(table, SEQ_LENS, strict=True):
        for column in range(math.ceil(seq_len / BLOCK_SIZE)):
            row[column] = next(pages)
    return table


def _print_table(rows) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, error, milliseconds, verdict in rows:
        numbers = f"{name:<{widths[0]}}  {error:>{widths[1]}}  {milliseconds:>{widths[2]}}  "
        print(textwrap.fill(verdict, 110, initial_indent=numbers, subsequent_indent=" " * len(numbers)))
