"""Time of a KV write by size of the pool, for every cache dtype. Time that grows with the pool means that it is copied.

python -m benchmarks.write --max-mib 1024 --write
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import records, timing

BENCH = "kv_write"
TOKENS = 64
KINDS = {
    "bf16": ("bfloat16", "none"),
    "f16": ("float16", "none"),
    "f32": ("float32", "none"),
    "fp8_e4m3": ("float8_e4m3fn", "per_tensor"),
    "fp8_e5m2_token": ("float8_e5m2", "per_token_head"),
    "int8_token": ("int8", "per_token_head"),
}


def main(argv: list[str] | None = None) -> int:
    """Print the milliseconds of one write for pools of 16 MiB up to the largest."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.write", description=__doc__.splitlines()[0])
    parser.add_argument("--max-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--backend", default="sdpa", help="whose write; that of sdpa is jattn.write_kv")
    records.add_options(parser)
    args = parser.parse_args(argv)
    rows = table(args.backend, args.max_mib, args.rounds)
    records.write(rows, BENCH, records.folder_of(args))
    return 0


def table(backend: str, max_mib: int, rounds: int) -> list[dict]:
    """One row for each kind of cache and size of pool; prints them."""
    sizes = [mib for mib in (16, 128, 1024) if mib <= max_mib]
    print(f"{TOKENS} tokens of 8 heads x 128 by {backend}, milliseconds (median); temporaries in MiB")
    print(f"{'cache':16}" + "".join(f"{mib:>9} MiB" for mib in sizes) + "   temp")
    rows = []
    for name, (dtype, quant) in KINDS.items():
        line = f"{name:16}"
        for mib in sizes:
            rows.append(measure(name, dtype, quant, mib, rounds, backend))
            line += f"{rows[-1]['ms']:13.3f}"
        print(line + f"{rows[-1]['temp_mib']:7.2f}", flush=True)
    return rows


def measure(name: str, dtype: str, quant: str, mib: int, rounds: int, backend: str = "sdpa") -> dict:
    """Repeated writes into one donated pool: one token for each of TOKENS requests, pages in random order."""
    shape = dict(block_size=16, num_kv_heads=8, head_dim=128, dtype=dtype, quant=quant)
    blocks = mib * 2**20 // jattn.KVCacheSpec(num_blocks=1, **shape).bytes_per_block
    spec = jattn.KVCacheSpec(num_blocks=blocks, **shape)
    attn = jattn.PagedAttention(jattn.AttentionSpec(num_heads=8, num_kv_heads=8, head_dim=128), spec, backend=backend)
    rng = np.random.default_rng(0)
    pages = rng.permutation(blocks)[:TOKENS, None].astype(np.int32)
    meta = jattn.CommonAttentionMetadata.from_lengths([1] * TOKENS, rng.integers(1, 17, TOKENS), pages, 16)
    k = jax.random.normal(jax.random.key(0), (TOKENS, 8, 128)).astype(jnp.bfloat16)
    state, m, params = [jattn.empty_cache(spec)], attn.build(meta), jattn.AttentionParams()
    update = jax.jit(lambda cache, x, m: attn.impl.do_kv_cache_update(cache, x, x, m, params), donate_argnums=0)
    compiled = update.lower(state[0], k, m).compile()

    def call():
        state[0] = compiled(state[0], k, m)
        return state[0]

    times = timing.in_turn({"write": call}, rounds)["write"]
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return {
        "case": f"write_{TOKENS}_{name}_{mib}mib",
        "backend": backend,
        "ms": times.median * 1e3,
        "best_ms": times.best * 1e3,
        "temp_mib": temporaries,
    } | records.provenance()


if __name__ == "__main__":
    sys.exit(main())
