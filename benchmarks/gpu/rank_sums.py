"""Sums of one array of every card (rank_sum_sm90.py) beside XLA's all-reduces, by NCCL, and by NCCL in CUDA graphs.

    python -m benchmarks.gpu.rank_sums [--ranks 2] [--write | --out DIR] [--small]

Each case is a chain of sums in one program. The numbers are checked against numpy, and all repeats and all ranks must
have equal bits.
"""

import argparse
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import records
from jattn.engine.xla_options import COMMAND_BUFFERS, CUDA_OPTIONS
from jattn.models.rank_sums import BY_XLA, rank_sums

CASES = (
    (1, 4096, "bfloat16"), (8, 4096, "bfloat16"), (64, 4096, "bfloat16"), (64, 8192, "bfloat16"),
    (256, 4096, "bfloat16"), (64, 4096, "float32"), (5, 896, "float16"),
)  # fmt: skip
SUMS = 32  # in a program
REPEATS = 30  # whose bits are compared
IN_GRAPHS = {"xla_gpu_enable_command_buffer": COMMAND_BUFFERS + ",COLLECTIVES"}
WAYS: dict[str, tuple[bool, dict]] = {"launch": (True, {}), "nccl": (False, {}), "nccl, graph": (False, IN_GRAPHS)}


def chain(by_launch: bool, ranks: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x of this rank, SUMS times replaced by the mean of all ranks plus the rank's number; and the last sum."""
    sums = rank_sums(ranks, *x.shape) if by_launch else BY_XLA
    own = jax.lax.axis_index("x").astype(x.dtype)
    total = x
    for _ in range(SUMS):
        total = sums(x, ("x",))
        x = total * jnp.asarray(1 / ranks, x.dtype) + own
    return x, total


def exactly(x: np.ndarray) -> np.ndarray:
    """`chain` of x [ranks, ..], rounded as each rank rounds."""
    own = np.arange(len(x)).reshape(-1, 1, 1).astype(np.float32)
    rounded = lambda y: y.astype(x.dtype).astype(np.float32)
    y = x.astype(np.float32)
    for _ in range(SUMS):
        y = rounded(rounded(rounded(y.sum(axis=0)) * np.float32(1 / len(x)))[None] + own)
    return y


def measured(mesh: Mesh, shape: tuple[int, int], dtype: str, by_launch: bool, options: dict) -> dict[str, Any]:
    place = NamedSharding(mesh, PartitionSpec("x"))
    numbers = np.random.default_rng(0).normal(size=(mesh.size, *shape)).astype(jnp.dtype(dtype))
    x = jax.device_put(numbers.reshape(-1, shape[1]), place)
    body = functools.partial(chain, by_launch, mesh.size)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=place.spec, out_specs=(place.spec,) * 2, check_vma=False)
    run = jax.jit(mapped).lower(x).compile(compiler_options=options or None)
    results = lambda: [np.asarray(y).reshape(numbers.shape) for y in run(x)]
    found, totals = results()
    wanted = exactly(numbers)
    err = float(np.abs(found.astype(np.float32) - wanted).max() / np.abs(wanted).max())
    same = all(np.array_equal(again, found) for again, _ in (results() for _ in range(REPEATS)))
    alike = all(np.array_equal(total, totals[0]) for total in totals)
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        for _ in range(10):
            y, _ = run(x)
        y.block_until_ready()
        times.append((time.perf_counter() - begin) / 10 / SUMS * 1e6)
    return dict(us=min(times), err=err, same=same, ranks_equal=alike, ok=err < 0.02 and same and alike)


def run(ranks: int, small: bool = False) -> list[dict]:
    mesh = jax.make_mesh((ranks,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
    rows = []
    for (tokens, hidden, dtype), (name, (by_launch, options)) in (
        (case, way) for case in (CASES[:1] if small else CASES) for way in WAYS.items()
    ):
        if small and name != "nccl":
            continue
        row: dict[str, Any] = dict(case=f"sum_{tokens}x{hidden}_{dtype}", variant=f"{ranks} devices, {name}")
        try:
            row |= measured(mesh, (tokens, hidden), dtype, by_launch, {} if small else CUDA_OPTIONS | options)
        except Exception as error:
            row |= dict(ok=False, error=str(error)[:300])
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """The number of cases that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.rank_sums", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--ranks", type=int, default=2, help="cards (default: 2)")
    parser.add_argument("--small", action="store_true", help="one case by collectives, for a CPU")
    records.add_options(parser)
    args = parser.parse_args(argv)
    rows = run(args.ranks, args.small)
    records.write([row | records.provenance() for row in rows], "rank_sums", records.folder_of(args))
    return sum(not row["ok"] for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
