"""Time of a KV write against the size of the pool, for every cache dtype: flat, or somebody copies the pool.

python -m benchmarks.write --max-mib 1024 --write
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp

import jattn
from benchmarks import timing
from benchmarks.run import append, provenance

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
    """Print milliseconds a write for pools of 16 MiB up to the largest."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.write", description=__doc__.splitlines()[0])
    parser.add_argument("--max-mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--write", action="store_true", help="append the rows to benchmarks/results/<chip>/write.jsonl")
    args = parser.parse_args(argv)
    sizes = [mib for mib in (16, 128, 1024) if mib <= args.max_mib]
    print(f"{TOKENS} tokens of 8 heads x 128, milliseconds (median); temporaries in MiB")
    print(f"{'cache':16}" + "".join(f"{mib:>9} MiB" for mib in sizes) + "   temp")
    rows = []
    for name, (dtype, quant) in KINDS.items():
        line = f"{name:16}"
        for mib in sizes:
            row = measure(name, dtype, quant, mib, args.rounds)
            rows.append(row)
            line += f"{row['ms']:13.3f}"
        print(line + f"{rows[-1]['temp_mib']:7.2f}")
    if args.write:
        print(f"appended to {append(rows, 'write')}")
    return 0


def measure(name: str, dtype: str, quant: str, mib: int, rounds: int) -> dict:
    """One pool, written again and again under donation."""
    shape = dict(block_size=16, num_kv_heads=8, head_dim=128, dtype=dtype, quant=quant)
    blocks = mib * 2**20 // jattn.KVCacheSpec(num_blocks=1, **shape).bytes_per_block
    spec = jattn.KVCacheSpec(num_blocks=blocks, **shape)
    k = jax.random.normal(jax.random.key(0), (TOKENS, 8, 128)).astype(jnp.bfloat16)
    slots = jax.random.permutation(jax.random.key(1), spec.capacity_tokens)[:TOKENS].astype(jnp.int32)
    state = [jattn.empty_cache(spec)]
    compiled = jax.jit(jattn.write_kv, donate_argnums=0).lower(state[0], k, k, slots).compile()

    def call():
        state[0] = compiled(state[0], k, k, slots)
        return state[0]

    times = timing.in_turn({"write": functools.partial(call)}, rounds)["write"]
    temporaries = compiled.memory_analysis().temp_size_in_bytes / 2**20
    return {
        "case": f"write_{TOKENS}_{name}_{mib}mib",
        "ms": times.median * 1e3,
        "best_ms": times.best * 1e3,
        "temp_mib": temporaries,
    } | provenance()


if __name__ == "__main__":
    sys.exit(main())
