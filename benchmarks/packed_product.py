"""Products of few rows with quantised weights, timed in turn with bfloat16's: share of the read bandwidth, and speed.

    python -m benchmarks.packed_product [--rows 1 4 16] [--rounds 15] [--write]

Each call multiplies by several matrices that together do not fit the caches. Every result is compared with that of the
dequantised weight before it is timed.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records, run, timing
from jattn.ops.product import product
from jattn.ops.quantised import plain, quantise

INPUTS, OUTPUTS, MATRICES = 2048, 8192, 10
FORMATS = {"bfloat16": 0, "int8": INPUTS, "int4": 64, "fp8": 128}
"""Format -> inputs of a group."""


def weights(format: str) -> list:
    """Random matrices."""
    rng = np.random.default_rng(0)
    one = lambda: jnp.asarray(rng.standard_normal((INPUTS, OUTPUTS), np.float32), jnp.bfloat16)
    made = lambda x: x if format == "bfloat16" else quantise(x, format, FORMATS[format])
    return [jax.block_until_ready(made(one())) for _ in range(MATRICES)]


@jax.jit
def multiply(x: jax.Array, kernels: list) -> jax.Array:
    """x times each of them, one after the other."""
    total = jnp.zeros((), jnp.float32)
    for kernel in kernels:
        y = product(x + total.astype(x.dtype), kernel)
        total = total + 0 * y[0, 0]
    return y


def check(x: jax.Array, kernel) -> None:
    """AssertionError unless the product is that of the dequantised weight."""
    exact = np.asarray(x, np.float64) @ np.asarray(plain(kernel, jnp.float32), np.float64)
    assert np.abs(np.asarray(product(x, kernel)) - exact).max() < 1e-3 * exact.std()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_product", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=15)
    records.add_options(parser)
    args = parser.parse_args()
    given = {format: weights(format) for format in FORMATS}
    rows = []
    for count in args.rows:
        x = jnp.asarray(np.random.default_rng(1).standard_normal((count, INPUTS)), jnp.bfloat16)
        for kernels in given.values():
            check(x, kernels[0])
        read = run.read_bandwidth()
        times = timing.in_turn({n: functools.partial(multiply, x, k) for n, k in given.items()}, args.rounds)
        read = max(read, run.read_bandwidth())
        for format, kernels in given.items():
            size, seconds = sum(leaf.nbytes for leaf in jax.tree.leaves(kernels)), times[format].median
            row = dict(
                case=f"packed_product_{count}", variant=format, backend="cpu_native", rows=count, weight_bytes=size,
                seconds=seconds, best_seconds=times[format].best, read_gb_per_s=read / 1e9,
                share_of_read_bandwidth=size / seconds / read, speed_over_bf16=times["bfloat16"].median / seconds,
            )  # fmt: skip
            rows.append(row | records.provenance())
            named = ("share_of_read_bandwidth", "speed_over_bf16", "weight_bytes")
            print(row["case"], format, ", ".join(f"{name} {row[name]:.3g}" for name in named), flush=True)
    records.write(rows, "packed_product", records.folder_of(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
