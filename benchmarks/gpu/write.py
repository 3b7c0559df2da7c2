"""The KV write on the GPU: every bit compared with XLA's scatter, then both timed by CUPTI.

Numbers of int8 are compared with numpy's instead: XLA divides by a row's scale with an error in the last bits, and
of a million quotients some are then rounded to the other integer.

    python -m benchmarks.gpu.write [--write | --out DIR]

write_8k has a target: 8192 tokens of 8 heads x 128 into random slots at 70 % or more of the rate at which this card
copies memory.
"""

import argparse
import dataclasses
import functools
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

import jattn
from benchmarks import name_lists, records
from benchmarks.gpu.check import ceilings
from jattn.backends import gpu_write
from pallas_kernels.algebra import quant

HEADS, DIM, PAGE, BLOCKS = 8, 128, 16, 8192
REPEATS = 5
CASES = {  # name: tokens, fields of the cache
    "write_8k": (8192, {}),
    "write_64": (64, {}),
    "write_512": (512, {}),
    "write_8k_nhd": (8192, dict(layout="NHD")),
    "write_8k_page128": (8192, dict(block_size=128, num_blocks=1024)),
    "write_8k_fp8": (8192, dict(dtype="float8_e4m3fn", quant="per_tensor")),
    "write_8k_fp8_token": (8192, dict(dtype="float8_e4m3fn", quant="per_token_head")),
    "write_8k_fp8_token_prompt": (8192, dict(dtype="float8_e4m3fn", quant="per_token_head")),
    "write_8k_int8_token": (8192, dict(dtype="int8", quant="per_token_head")),
    "write_64_int8_token": (64, dict(dtype="int8", quant="per_token_head", layout="NHD")),
    "write_1000_d80": (1000, dict(head_dim=80, v_head_dim=48)),
}


def measure(name: str, iterations: int, chunks: int | None = None) -> dict:
    """Compare the bits, then time the backend's write and XLA's scatter; without iterations only compare.

    chunks: of a thread, if not the default.
    """
    if chunks is not None:
        write_rows = functools.partial(gpu_write.write_rows, chunks=chunks)
        with mock.patch.object(gpu_write, "write_rows", write_rows):
            return measure(name, iterations) | dict(variant=f"chunks={chunks}")
    tokens, fields = CASES[name]
    pool = jattn.KVCacheSpec(**(dict(num_blocks=BLOCKS, block_size=PAGE, num_kv_heads=HEADS, head_dim=DIM) | fields))
    spec = jattn.AttentionSpec(num_heads=32, num_kv_heads=HEADS, head_dim=pool.head_dim, v_head_dim=pool.v_head_dim)
    impl = jattn.PagedAttention(spec, pool, backend="pallas_gpu").impl
    rng = np.random.default_rng(0)
    rows = [_rows(rng, i, tokens, pool, in_pages=name.endswith("_prompt")) for i in range(REPEATS)]
    params = jattn.AttentionParams()
    ours = lambda cache, k, v, slots: impl.do_kv_cache_update(
        cache, k, v, argparse.Namespace(slot_mapping=slots), params
    )
    ways = {"pallas_gpu": ours, "xla": lambda cache, k, v, slots: jattn.write_kv(cache, k, v, slots, params)}
    cache = jattn.empty_cache(pool, fill=0.5, platform="gpu")
    written = {way: jax.jit(run)(cache, *rows[0]) for way, run in ways.items()}
    wanted = int8_exactly(cache, *rows[0]) if pool.dtype == "int8" else written["xla"]
    same = all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), written["pallas_gpu"], wanted)))
    changed = int((written["xla"].k != cache.k).any(axis=-1).sum())
    del written
    row = dict(case=name, tokens=tokens, same_bits=same, rows_written=changed, ok=same and changed > 0)
    if not iterations:
        return row
    stored = pool.bytes_per_block // pool.block_size * tokens
    row["bytes"] = stored + tokens * HEADS * (pool.head_dim + pool.v_head_dim) * 2
    for way, run in ways.items():
        row[f"{way}_us"], row[f"{way}_launches"] = time_of(run, cache, rows, iterations)
    row["us"] = row["pallas_gpu_us"]
    row["tb_s"] = row["bytes"] / row["us"] / 1e6
    return row


def int8_exactly(cache, k, v, slots):
    """The cache of int8 with a scale for each token and head, after the write, by numpy."""
    spec, slots, pools = cache.spec, np.asarray(slots), {}
    used = (slots >= 0) & (slots < spec.capacity_tokens)
    block, offset = np.divmod(slots[used], spec.block_size)
    at = (block, slice(None), offset) if spec.heads_first else (block, offset)
    for name, x in (("k", k), ("v", v)):
        x = np.asarray(x, np.float32)[used]
        largest = abs(x).max(axis=-1, keepdims=True) * (np.float32(1) / np.float32(127))
        scale = np.maximum(largest, np.float32(quant.MIN_TOKEN_SCALE))
        x = x / scale
        codes = np.trunc(x + np.copysign(np.float32(0.5), x))
        for field, new in ((name, codes), (f"{name}_token_scale", scale[..., 0])):
            pools[field] = np.array(getattr(cache, field))
            pools[field][at] = new
    return dataclasses.replace(cache, **pools)


def _rows(rng, seed: int, tokens: int, pool, in_pages: bool = False):
    """New keys and values, and their slots: some are padding, some lie past the end of the pool.

    in_pages: as those of a prompt, which fills page after page; else each token's slot is drawn.
    """
    keys = jax.random.split(jax.random.key(seed), 2)
    k, v = (
        jax.random.normal(key, (tokens, HEADS, dim), jnp.bfloat16)
        for key, dim in zip(keys, (pool.head_dim, pool.v_head_dim), strict=True)
    )
    size = pool.block_size if in_pages else 1
    first = rng.permutation(pool.capacity_tokens // size)[: -(-tokens // size)] * size
    slots = (first[:, None] + np.arange(size)).reshape(-1)[:tokens].astype(np.int32)
    slots[0], slots[tokens // 2], slots[-1] = -1, pool.capacity_tokens, 2**31 - 1
    return k, v, jnp.asarray(slots)


def time_of(run, cache, rows, iterations: int) -> tuple[float, dict]:
    """Microseconds of one write: what REPEATS of them in a row launch, less what one does with its copy of the pool."""

    def repeat(cache, rows):
        for new in rows:
            cache = run(cache, *new)
        return cache

    totals, launches = [], {}
    for few in (rows[:1], rows):
        _, found = profiler.measure(jax.jit(repeat), aggregate=False, iterations=iterations)(cache, few)
        totals.append(np.median([sum(ms for _, ms in one) for one in found]) * 1e3)
        launches = {kernel[:40]: round(ms * 1e3, 2) for kernel, ms in found[-1]}
    return float(totals[1] - totals[0]) / (REPEATS - 1), launches


def main(argv: list[str] | None = None) -> int:
    """Run, print a line each; 1 if a bit differed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.write", description=__doc__.splitlines()[0])
    records.add_options(parser)
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--chunks", type=int, nargs="*", help="times variants, too, with so many chunks a thread")
    args = parser.parse_args(argv)
    wanted = name_lists.matching(parser, "--only", args.only, CASES, "case")
    base = dict(backend="pallas_gpu") | records.provenance() | ceilings()
    print(base, flush=True)
    failed = 0
    for name in wanted:
        for chunks in (None, *(args.chunks or ())):
            row = measure(name, args.iterations, chunks)
            row["share_of_copy"] = row["tb_s"] / base["ceiling_copy_tb_s"]
            failed += not row["ok"]
            print(row, flush=True)
            records.write([base | row], "kv_write", records.folder_of(args))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
