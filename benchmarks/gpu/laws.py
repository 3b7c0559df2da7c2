"""What only a large GPU can show: no index overflows, one compile, few launches.

    python -m benchmarks.gpu.laws --out DIR

R-6   pages whose elements lie past 2**31 and 2**32 give the bits of the same pages at the pool's start
step  a decode step whose lengths change every time: compiled once; every launch is listed with its time
"""

import argparse
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

import jattn
from benchmarks.run import provenance

SPEC = jattn.AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128)
PAGE = 16


def pool_of(blocks: int) -> jattn.KVCacheSpec:
    return jattn.KVCacheSpec(num_blocks=blocks, block_size=PAGE, num_kv_heads=8, head_dim=128)


def large_pool() -> list[dict]:
    """R-6: the same tokens written and read at both ends of a pool of 2**32 and more elements."""
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
    return [
        {"case": "decode_step_64x4k", "ok": run._cache_size() == 1, "compiles": run._cache_size(), "launches": launches}
    ]


PARTS = (decode_step, large_pool)


def main(argv: list[str] | None = None) -> int:
    """Run them, print a line each, keep the rows; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.laws", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="benchmarks/results/nvidia_h200")
    parser.add_argument("--only", choices=[part.__name__ for part in PARTS])
    args = parser.parse_args(argv)
    folder = pathlib.Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in PARTS:
        for row in part() if args.only in (None, part.__name__) else ():
            print(row, flush=True)
            with (folder / "laws.jsonl").open("a") as file:
                file.write(json.dumps(row | provenance()) + "\n")
            failed += not row["ok"]
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
