"""Bundles of the write of keys and values on a TPU: the kernel's, and those of the loop of XLA's scatter.

    python -m benchmarks.tpu.kv_write [--write | --out DIR] [--chips v5e,v6e]

256 new tokens, 8 kv heads of 128, bf16, pages of 128. `alone` is what a token takes whose pack has no other new token,
as in a batch of decodes; `whole` is at most what a pack takes that 16 tokens of a prompt fill. `memory_us` is what
fetching and writing the packs of 256 such tokens takes by data sheets. `scatter_loop` is one trip of the loop of XLA's
scatter, which on v6e takes 16 rows of a head: one token's. Nothing was timed.
"""

import argparse
import json
import os
import sys
from typing import Any

from benchmarks.tpu import aot, command, llo, own_process
from benchmarks.tpu.limits import CHIPS

TOKENS = 256
JOBS = ("kernel", "scatter")


def compiled(chip: str, job: str):
    """The write compiled with donated pools; the pools as shapes."""
    import jax
    import jax.numpy as jnp

    import jattn
    from jattn.backends.tpu_write import write_pages
    from jattn.cache.write import write_by_head
    from jattn.device import Chip

    spec = jattn.KVCacheSpec(num_blocks=4096, block_size=128, num_kv_heads=8, head_dim=128)
    cache = jax.eval_shape(lambda: jattn.empty_cache(spec, storage="native"))
    new = jax.ShapeDtypeStruct((TOKENS, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)

    def write(cache, k, v, slots):
        if job == "scatter":
            return write_by_head(cache, k, v, slots)
        return write_pages(Chip("tpu", chip), cache, k, v, slots, jattn.AttentionParams())

    return aot.compile_for(chip, write, cache, new, new, slots, donated=(0,)), cache


def kernel_bundles(program: llo.Program) -> dict:
    """`alone` and `whole` from the kernel's listing."""
    step = max((s for s in program.loops if program.count(s, "dma.vmem_to_hbm")), key=lambda s: s.size)
    alone = whole = step.size
    of_rows = program.inside(step, program.loops)
    assert len(of_rows) == 2, "the loops over the rows of a group, in the fetch and in the merge, were not found"
    for loop in of_rows:
        # around such a loop: whether it runs at all, whether the group is no whole pack, whether it has several rows
        around = sorted((s for s in program.skipped if s.holds(loop) and step.holds(s)), key=lambda s: s.size)
        alone, whole = alone - around[2].size, whole - around[1].size
    return dict(alone=alone, whole=whole)


def one(chip: str, job: str, folder: str) -> dict:
    """The row of one job, in a process that was started with the flags of the dump."""
    program, cache = compiled(chip, job)
    memory: Any = program.memory_analysis()
    pool_bytes = 2 * cache.k.size * cache.k.dtype.itemsize
    row = dict(
        chip=chip, case=job, temporary_bytes=memory.temp_size_in_bytes,
        donated=memory.alias_size_in_bytes == pool_bytes,
    )  # fmt: skip
    if job == "scatter":
        listing = llo.read(folder, "scatter")
        return row | dict(scatter_loop=max(s.size for s in listing.loops if listing.depths[s.first] == 2))
    moved = TOKENS * 2 * 2 * 8 * 16 * 128 * 2
    found = kernel_bundles(llo.read(folder, "write_keys_and_values"))
    us = found["alone"] * TOKENS / CHIPS[chip].clock * 1e6
    return row | found | dict(us=round(us, 1), memory_us=round(moved / CHIPS[chip].hbm * 1e6, 1))


def main(argv: list[str] | None = None) -> int:
    """Both jobs on every chip; 1 if one failed."""
    parser = command.parser("benchmarks.tpu.kv_write", str(__doc__))
    parser.add_argument("--one", nargs=3, metavar=("CHIP", "JOB", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        os.environ.update(aot.environment())
        print(json.dumps(one(*args.one)))
        return 0
    found = (
        dict(chip=chip, case=job) | own_process.row_of_dump("benchmarks.tpu.kv_write", chip, job)
        for chip, job in command.each(args.chips, ",".join(JOBS))
    )
    return command.exit_code(command.print_and_keep("kv_write", args, found))


if __name__ == "__main__":
    sys.exit(main())
