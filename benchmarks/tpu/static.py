"""Static figures of the TPU kernel on four generations, beside JAX's own kernel compiled in the same run.

    python -m benchmarks.tpu.static --out FILE [--chips v5e,v6e] [--jobs decode,prefill]

32 query and 8 kv heads of 128, bf16, pages of 128. Rows of JSON are appended to FILE. Bundles are what libtpu's
compiler scheduled: a lower bound of cycles, which says nothing of memory, and nothing of time. Needs the libtpu wheel.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile

from benchmarks.tpu import aot, llo

JOBS = ("decode", "prefill", "jax_decode", "jax_prefill")
PEER_PAGES = 8  # of a block of the peer
PEER_QUERIES = {"jax_decode": 8, "jax_prefill": 32}  # of its block: the fewest it takes well, and its default on v5e


def ours(chip: str, job: str):
    """Compiles for `chip`; then what measures the listing."""
    from benchmarks.tpu import measure
    from jattn.backends.pallas_tpu import kernel_config

    function, arguments = aot.call(aot.DECODE if job == "decode" else aot.PREFILL, chip)
    aot.compile_for(chip, function, *arguments)
    _, cache, meta, _ = arguments
    config = kernel_config(aot.layer_of(aot.DECODE), cache.spec, common=meta)
    return lambda program: getattr(measure, job)(program, config)


def theirs(chip: str, job: str):
    """The same of the kernel that comes with JAX."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    from benchmarks.tpu import measure

    reqs, page, queries = 256, 128, PEER_QUERIES[job]
    shape = lambda dims, dtype="int32": jax.ShapeDtypeStruct(dims, jnp.dtype(dtype))
    arguments = (
        shape((reqs if job == "jax_decode" else 4096, 32, 128), "bfloat16"),
        shape((4096, page, 16, 128), "bfloat16"),
        *(shape(dims) for dims in ((reqs,), (reqs, 64), (reqs + 1,), (1,))),
    )

    def attend(*args):
        return ragged_paged_attention(
            *args, num_kv_pages_per_block=PEER_PAGES, num_queries_per_block=queries, vmem_limit_bytes=60 << 20
        )

    aot.compile_for(chip, attend, *arguments)
    return lambda program: measure.peer(program, PEER_PAGES * page, queries) | dict(queries=queries)


def one(chip: str, job: str, folder: str) -> dict:
    """A row, in a process that was started with the flags of the dump."""
    measured = (theirs if job.startswith("jax_") else ours)(chip, job)
    return dict(chip=chip, job=job) | measured(llo.read(folder, "ragged_paged_attention"))


def apart(chip: str, job: str) -> dict:
    """`one` in a process of its own: libtpu reads its flags once."""
    with tempfile.TemporaryDirectory() as folder:
        flags = dict(LIBTPU_INIT_ARGS=llo.FLAGS.format(folder))
        command = [sys.executable, "-m", "benchmarks.tpu.static", "--one", chip, job, folder]
        done = subprocess.run(command, env=os.environ | aot.environment() | flags, capture_output=True, text=True)
    if done.returncode:
        return dict(chip=chip, job=job, error=done.stderr.strip().splitlines()[-1][:300])
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    """Every job on every chip; 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu.static", description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    parser.add_argument("--chips", default=",".join(aot.TOPOLOGIES))
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--one", nargs=3, metavar=("CHIP", "JOB", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(one(*args.one)))
        return 0
    from benchmarks.run import provenance

    where = provenance() | dict(libtpu=importlib.metadata.version("libtpu"), kind="static")
    del where["chip"]  # of this machine
    failed = 0
    for chip in args.chips.split(","):
        for job in args.jobs.split(","):
            row = where | apart(chip, job)
            failed += "error" in row
            print(json.dumps(row), flush=True)
            if args.out:
                with open(args.out, "a") as file:
                    file.write(json.dumps(row) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
