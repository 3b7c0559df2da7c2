"""many_rows_sm90.py on a Hopper card: numbers against float64, then times beside XLA's own products.

    python -m benchmarks.gpu.many_rows [--write | --out DIR] [--only TEXT] [--seconds 60]

`us` is silu(x gate) * (x up), or q, k and v side by side: the median of a chain of LAYERS with weights of their own, so
that no layer's weights are in the L2 cache; `xla_us` the same by XLA's products; `floor_us` the longer of reading the
weights at 4.68 TB/s and of multiplying at 700 TFLOP/s, which this card sustains. `err` is the largest error over the
largest value of sampled rows.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import cupti, jobs
from jattn.engine.xla_options import CUDA_OPTIONS, CUDA_OPTIONS_MANY_TOKENS
from jattn.ops import many_rows

LAYERS = 4
READ_RATE, MULTIPLY_RATE = 4.68e6, 700e6  # bytes and FLOP a microsecond
SHAPES = {  # hidden, widths, gated
    "llama_1b_mlp": (2048, (8192, 8192), True),
    "llama_1b_qkv": (2048, (2048, 512, 512), False),
    "llama_8b_mlp": (4096, (14336, 14336), True),
    "llama_8b_qkv": (4096, (4096, 1024, 1024), False),
    "qwen3_0.6b_mlp": (1024, (3072, 3072), True),
    "qwen3_0.6b_qkv": (1024, (2048, 1024, 1024), False),
    "llama_70b_one_of_8_mlp": (8192, (3584, 3584), True),
    "llama_70b_one_of_8_qkv": (8192, (1024, 128, 128), False),
}
ROWS = (256, 2048, 8192, 100, 512, 1024)
SAMPLED = 16  # rows that are compared


def chain(product, x, layers):
    """The result of each layer; the next layer's x depends on it."""
    found = []
    for weights in layers:
        found.append(product(x, weights))
        x = x + jnp.tile(found[-1], (1, -(-x.shape[1] // found[-1].shape[1])))[:, : x.shape[1]] * 0.01
    return found


def exactly(x, weights, gated: bool) -> np.ndarray:
    x, *weights = (np.asarray(y, np.float64) for y in (x, *weights))
    products = [x @ w for w in weights]
    if not gated:
        return np.concatenate(products, axis=1)
    return products[0] / (1 + np.exp(-products[0])) * products[1]


def measure(shape: tuple, rows: int) -> dict:
    inner, widths, gated = shape
    keys = iter(jax.random.split(jax.random.key(rows), len(widths) * LAYERS + 1))
    x = jax.random.normal(next(keys), (rows, inner), jnp.bfloat16)
    weight = lambda width: (jax.random.normal(next(keys), (inner, width)) * inner**-0.5).astype(jnp.bfloat16)
    layers = [tuple(weight(width) for width in widths) for _ in range(LAYERS)]
    config = many_rows.config_of(x, layers[0], together=gated)
    if config is None:
        return dict(ok=False, error="not served")
    side_by_side = lambda x, weights: jnp.concatenate(many_rows.in_steps(x, weights), axis=1)
    pair = (
        (lambda x, weights: many_rows.gated(x, *weights), lambda x, weights: many_rows.gated_in_steps(x, *weights))
        if gated
        else (many_rows.joined, side_by_side)
    )
    options = CUDA_OPTIONS | CUDA_OPTIONS_MANY_TOKENS
    ours, theirs = (
        jax.jit(functools.partial(chain, f)).lower(x, layers).compile(compiler_options=options) for f in pair
    )
    picked = np.linspace(0, rows - 1, SAMPLED).astype(int)
    wanted = exactly(x[picked], layers[0], gated)

    def error(f) -> float:
        away = np.abs(np.asarray(f(x, layers)[0][picked], np.float64) - wanted)
        return float(np.nan_to_num(away, nan=np.inf).max() / np.abs(wanted).max())

    err, xla_err = error(ours), error(theirs)
    (us, _), (xla_us, _) = (cupti.micros(f, x, layers) for f in (ours, theirs))
    us, xla_us, columns = us / LAYERS, xla_us / LAYERS, sum(widths)
    floor = max(2 * inner * columns / READ_RATE, 2 * rows * inner * columns / MULTIPLY_RATE)
    numbers = dict(us=us, xla_us=xla_us, floor_us=floor, ratio=us / floor, speed=xla_us / us, err=err, xla_err=xla_err)
    print("     ", {name: float(f"{value:.4g}") for name, value in numbers.items()}, flush=True)
    return numbers | dict(columns=config.columns, ok=err < xla_err + 1e-3)


def jobs_of():
    for rows in ROWS:
        for name, shape in SHAPES.items():
            yield dict(part="many_rows", case=name, rows=rows), functools.partial(measure, shape, rows)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    return jobs.main("many_rows", __doc__, jobs_of, 60, argv)


if __name__ == "__main__":
    sys.exit(main())
