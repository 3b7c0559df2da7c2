"""Rows times plain matrices of their experts: the C++ kernel, XLA's dots of tiles, and its ragged_dot, timed in turn.

    python -m benchmarks.expert_product [--tokens 1 4 16 2048] [--dtype bfloat16] [--rounds 9] [--no-ragged] [--write]

Few tokens: a call multiplies one batch after the other, each with experts of its own, by matrices that together do not
fit the caches (ragged_dot only one of them, because it takes long); the rate is that of reading the matrices of the
experts that have rows. Many tokens: the rate is that of the arithmetic, beside a product of as many rows with one
matrix. Some rows of each way are compared with numpy before it is timed.
"""

import argparse
import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records, run, timing
from jattn.ops import experts
from jattn.ops.product import product

SHAPES = {
    "8x1024x3584": (8, 1024, 3584, 2),
    "32x1440x1440": (32, 1440, 1440, 4),
    "64x1024x704": (64, 1024, 704, 6),
    "128x1024x384": (128, 1024, 384, 8),
}
"""Experts, inputs, outputs, experts of a token."""
WAYS: dict[str, Callable] = {"native": experts._native, "tiles": experts._looped, "ragged_dot": experts._ragged_dot}
UNCACHED_BYTES = 2**28
"""Of matrices that fit no cache."""
FEW_TOKENS = 64
"""Up to so many tokens, matrices are read from memory and the rate is that of reading; above, of the arithmetic."""


def batches(shape: tuple[int, int, int, int], tokens: int, dtype: str) -> tuple[jax.Array, list, list]:
    """(x, kernels, [(number of the kernel, rows of each expert)])"""
    count, inputs, outputs, top = shape
    rng = np.random.default_rng(0)
    draw = lambda *sizes: jnp.asarray(rng.standard_normal(sizes, np.float32), dtype)
    size = count * inputs * outputs * jnp.dtype(dtype).itemsize
    kernels = [draw(count, inputs, outputs) for _ in range(-(-UNCACHED_BYTES // size) if tokens <= FEW_TOKENS else 1)]
    each = max(1, min(16, 2 * count // (tokens * top))) if tokens <= FEW_TOKENS else 1
    chosen = lambda: np.concatenate([rng.permutation(count)[:top] for _ in range(tokens)])
    sizes = lambda: jnp.asarray(np.bincount(chosen(), minlength=count), jnp.int32)
    return draw(tokens * top, inputs), kernels, [(i, sizes()) for _ in range(each) for i in range(len(kernels))]


@functools.partial(jax.jit, static_argnums=(0, 1))
def multiply(way: str, numbers: tuple[int, ...], x: jax.Array, kernels: list, sizes: list) -> jax.Array:
    """x times the experts of each batch, one after the other: each adds 0 times the result before, so that XLA
    computes all of them."""
    y = jnp.zeros((1, 1), x.dtype)
    for number, counts in zip(numbers, sizes, strict=True):
        y = WAYS[way](x + 0 * y[:1, :1], kernels[number], counts)
    return y


def check(way: str, x: jax.Array, kernel: jax.Array, sizes: jax.Array) -> None:
    """AssertionError unless some rows are those of numpy."""
    y, expert = np.asarray(WAYS[way](x, kernel, sizes)), np.repeat(np.arange(len(sizes)), sizes)
    for row in {0, len(expert) // 2, len(expert) - 1}:
        exact = np.asarray(x[row], np.float64) @ np.asarray(kernel[expert[row]], np.float64)
        assert np.abs(y[row].astype(np.float64) - exact).max() < 0.02 * exact.std()


def measure(name: str, tokens: int, dtype: str, ways: list[str], rounds: int) -> list[dict]:
    """The rows of a shape: of each way and, for many tokens, of the product with one matrix."""
    x, kernels, chosen = batches(SHAPES[name], tokens, dtype)
    numbers, sizes = zip(*chosen, strict=True)
    calls: dict[str, Callable] = {}
    count = {way: 1 if way in ("ragged_dot", "dense") else len(sizes) for way in (*ways, "dense")}
    for way in ways:
        check(way, x, kernels[0], sizes[0])
        calls[way] = functools.partial(multiply, way, numbers[: count[way]], x, kernels, list(sizes[: count[way]]))
    if tokens > FEW_TOKENS:
        calls["dense"] = functools.partial(jax.jit(functools.partial(product, dtype=x.dtype)), x, kernels[0][0])
    read = run.read_bandwidth()
    times = timing.in_turn(calls, rounds)
    read = max(read, run.read_bandwidth())
    rows = []
    for way, measured in times.items():
        seconds, matrix = measured.median / count[way], kernels[0][0]
        touched = sum(int((counts > 0).sum()) for counts in sizes[: count[way]]) / count[way]
        row = dict(
            case=f"expert_product_{name}_{tokens}", variant=way, backend=way, tokens=tokens, dtype=dtype,
            rows=x.shape[0], touched_experts=touched, seconds=seconds, best_seconds=measured.best / count[way],
            gb_per_s=touched * matrix.nbytes / seconds / 1e9, read_gb_per_s=read / 1e9,
            gflop_per_s=2 * x.shape[0] * matrix.size / seconds / 1e9,
        )  # fmt: skip
        rows.append(row | records.provenance())
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert_product", description=(__doc__ or "").split(":")[0]
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 2048])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-ragged", action="store_true", help="without ragged_dot, which takes seconds")
    records.add_options(parser)
    args = parser.parse_args()
    ways, rows = [way for way in WAYS if not (args.no_ragged and way == "ragged_dot")], []
    for name in SHAPES:
        for tokens in args.tokens:
            for row in measure(name, tokens, args.dtype, ways, args.rounds):
                rows.append(row)
                named = ("seconds", "best_seconds", "gb_per_s", "read_gb_per_s", "gflop_per_s")
                print(row["case"], row["variant"], ", ".join(f"{key} {row[key]:.4g}" for key in named), flush=True)
    records.write(rows, "expert_product", records.folder_of(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
