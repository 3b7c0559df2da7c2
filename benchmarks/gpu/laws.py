"""What only a large GPU can show: no index overflows, no cliff between batch sizes, one compile, few launches.

    python -m benchmarks.gpu.laws --out DIR

R-6   pages whose elements lie past 2**31 and 2**32 give the bits of the same pages at the pool's start
R-27  kernel time over batch sizes 1 .. 512 (all up to 40, then both sides of every multiple of 16) never jumps by
      more than 1.3 between neighbours
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


def sweep(largest: int = 512, length: int = 1024) -> list[dict]:
    """R-27: one compiled step, live requests 1 .. largest."""
    width = length // PAGE
    spec = pool_of(largest * width)
    attn = jattn.PagedAttention(SPEC, spec, backend="pallas_gpu")
    q = jax.random.normal(jax.random.key(0), (largest, 32, 128), jnp.bfloat16)
    cache = jattn.empty_cache(spec, 0.5)
    table = np.random.default_rng(0).permutation(largest * width).reshape(largest, width)
    attend = jax.jit(lambda q, cache, m: attn.attend(q, cache, m).out)
    build = jax.jit(attn.build)
    sizes = sorted(
        {*range(1, 41), *(16 * i + side for i in range(3, largest // 16 + 1) for side in (0, 1))} - {largest + 1}
    )
    times = []
    for reqs in sizes:
        meta = jattn.CommonAttentionMetadata.from_lengths(
            [1] * reqs, [length] * reqs, table[:reqs], PAGE, num_tokens=largest, num_reqs=largest
        )
        m = build(meta)
        times.append(np.median(profiler.measure(attend, iterations=3)(q, cache, m)[1]) * 1e3)
    times = np.array(times)
    jumps = times[1:] / times[:-1]
    worst = int(np.argmax(jumps))
    return [
        {
            "case": f"r27_sweep_1_to_{largest}_x{length}",
            "ok": bool(jumps.max() <= 1.3 and attend._cache_size() == 1),
            "worst_jump": float(jumps.max()),
            "at": sizes[worst],
            "us": {size: round(float(t), 2) for size, t in zip(sizes, times, strict=True)},
        }
    ]


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


def main(argv: list[str] | None = None) -> int:
    """Run all three, print a line each, keep the rows; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.laws", description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="benchmarks/results/nvidia_h200")
    args = parser.parse_args(argv)
    rows = []
    for part in (decode_step, large_pool, sweep):
        for row in part():
            rows.append(row | provenance())
            print({name: value for name, value in row.items() if name != "us"}, flush=True)
    folder = pathlib.Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "laws.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
