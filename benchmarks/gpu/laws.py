"""Checks that need a large GPU: no index overflows in a large pool, and a decode step compiles once.

    python -m benchmarks.gpu.laws [--write | --out DIR]

large_pool   pages whose elements lie past 2**31 and 2**32 give the same bits as pages at the start of the pool
decode_step  a decode step whose lengths change every time is compiled once; every launch is listed with its time
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

import jattn
from benchmarks import records

SPEC = jattn.AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128)
PAGE = 16
NOT_WORK_LIST = ("write_kv_pages", "ragged_paged_attention", "merge_parts")
"""How the names of a step's other launches begin: the KV write, attention and merge."""


def pool_of(blocks: int) -> jattn.KVCacheSpec:
    return jattn.KVCacheSpec(num_blocks=blocks, block_size=PAGE, num_kv_heads=8, head_dim=128)


def large_pool() -> list[dict]:
    """The same tokens written and read at both ends of a pool of 2**32 and more elements."""
    rows, reqs, pages = [], 4, 8
    elements = PAGE * 8 * 128
    for power in (31, 32):
        spec = pool_of(2**power // elements + 64)
        attn = jattn.PagedAttention(SPEC, spec, backend="pallas_gpu")
        keys = jax.random.split(jax.random.key(power), 3)
        lengths = np.full(reqs, pages * PAGE, np.int32)
        q, k, v = (
            jax.random.normal(key, (reqs * pages * PAGE, heads, 128), jnp.bfloat16)
            for key, heads in zip(keys, (32, 8, 8), strict=True)
        )

        def step(q, k, v, cache, meta, attn=attn):
            return attn(q, k, v, cache, attn.build(meta))

        run, answers = jax.jit(step, donate_argnums=3), []
        cache = jattn.empty_cache(spec)
        for first in (0, spec.num_blocks - reqs * pages):
            table = first + np.arange(reqs * pages, dtype=np.int32).reshape(reqs, pages)
            meta = jattn.CommonAttentionMetadata.from_lengths(lengths, lengths, table, PAGE)
            cache, state = run(q, k, v, cache, meta)
            answers.append((np.asarray(state.out.astype(jnp.float32)), np.asarray(state.lse)))
        same = all(np.array_equal(a, b) for a, b in zip(*answers, strict=True)) and bool(
            np.isfinite(answers[0][0]).all()
        )
        rows.append(
            {"case": f"r06_pool_of_2_{power}_elements", "ok": same, "bytes": int(cache.k.nbytes + cache.v.nbytes)}
        )
        del cache
    return rows


def decode_step(reqs: int = 64, length: int = 4096) -> list[dict]:
    """The launches of one step (plan, write, attention), and how often it is compiled over 20 steps."""
    width = length // PAGE
    spec = pool_of(reqs * width)
    attn = jattn.PagedAttention(SPEC, spec, backend="pallas_gpu")
    table = np.random.default_rng(0).permutation(reqs * width).reshape(reqs, width)
    q, k, v = (
        jax.random.normal(jax.random.key(i), (reqs, heads, 128), jnp.bfloat16) for i, heads in enumerate((32, 8, 8))
    )

    def step(q, k, v, cache, meta):
        return attn(q, k, v, cache, attn.build(meta))

    run = jax.jit(step, donate_argnums=3)
    cache = jattn.empty_cache(spec)
    rng = np.random.default_rng(1)
    for _ in range(20):
        meta = jattn.CommonAttentionMetadata.from_lengths([1] * reqs, rng.integers(1, length, reqs), table, PAGE)
        cache, state = run(q, k, v, cache, meta)
    _, runs = profiler.measure(jax.jit(step), aggregate=False, iterations=3)(
        q, k, v, cache, jax.tree.map(jnp.asarray, meta)
    )
    launches = [(name[:60], round(ms * 1e3, 2)) for name, ms in runs[-1]]
    list_us = sum(us for name, us in launches if not name.startswith(NOT_WORK_LIST))
    row = dict(case="decode_step_64x4k", ok=run._cache_size() == 1, compiles=run._cache_size())
    return [row | dict(launches=launches, list_us=list_us)]


PARTS = {"step_launches": decode_step, "large_pool": large_pool}  # benchmark: what measures it


def main(argv: list[str] | None = None) -> int:
    """Run both, print a line each; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.laws", description=__doc__.splitlines()[0])
    records.add_options(parser)
    parser.add_argument("--only", choices=PARTS)
    args = parser.parse_args(argv)
    failed = 0
    for bench, part in PARTS.items():
        for row in part() if args.only in (None, bench) else ():
            print(row, flush=True)
            records.write([row | dict(backend="pallas_gpu") | records.provenance()], bench, records.folder_of(args))
            failed += not row["ok"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
