"""gated_product_sm90.py on a Hopper card: numbers against float64, then times beside XLA's own products.

    python -m benchmarks.gpu.gated_product [--write | --out DIR] [--only TEXT] [--seconds 60]

`us` is silu(x gate) * (x up), the median of a chain of LAYERS with weights of their own, so that no layer's weights are
in the L2 cache; `xla_us` the same by XLA's products; `floor_us` the longer of reading the weights at 4.68 TB/s and of
multiplying at 700 TFLOP/s, which this card sustains. `err` is the largest error over the largest value of sampled rows.
"""

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.gpu import cupti, jobs
from jattn.engine.xla_options import CUDA_OPTIONS, CUDA_OPTIONS_MANY_TOKENS
from jattn.ops import gated_rows

LAYERS = 4
READ_RATE, MULTIPLY_RATE = 4.68e6, 700e6  # bytes and FLOP a microsecond
SHAPES = {  # hidden, width of the MLP
    "llama_1b": (2048, 8192),
    "llama_8b": (4096, 14336),
    "qwen3_0.6b": (1024, 3072),
    "tinyllama": (2048, 5632),
    "llama_70b_one_of_8": (8192, 3584),
}
ROWS = (100, 128, 256, 384, 512, 1024, 2048, 8192)
SAMPLED = 16  # rows that are compared


def chain(product, x, layers):
    """The result of each layer; the next layer's x depends on it."""
    found = []
    for weights in layers:
        found.append(product(x, *weights))
        x = x + jnp.tile(found[-1], (1, -(-x.shape[1] // found[-1].shape[1])))[:, : x.shape[1]] * 0.01
    return found


def exactly(x, gate, up) -> np.ndarray:
    x, gate, up = (np.asarray(y, np.float64) for y in (x, gate, up))
    of_gate = x @ gate
    return of_gate / (1 + np.exp(-of_gate)) * (x @ up)


def measure(shape: tuple[int, int], rows: int) -> dict:
    inner, width = shape
    keys = iter(jax.random.split(jax.random.key(rows), 2 * LAYERS + 1))
    x = jax.random.normal(next(keys), (rows, inner), jnp.bfloat16)
    weight = lambda: (jax.random.normal(next(keys), shape) * inner**-0.5).astype(jnp.bfloat16)
    layers = [(weight(), weight()) for _ in range(LAYERS)]
    config = gated_rows.config_of(x, *layers[0])
    if config is None:
        return dict(ok=False, error="not served")
    options = CUDA_OPTIONS | CUDA_OPTIONS_MANY_TOKENS
    compiled = lambda f: jax.jit(functools.partial(chain, f)).lower(x, layers).compile(compiler_options=options)
    ours, theirs = compiled(gated_rows.gated_rows), compiled(gated_rows.in_steps)
    picked = np.linspace(0, rows - 1, SAMPLED).astype(int)
    wanted = exactly(x[picked], *layers[0])
    error = lambda f: float(
        np.nan_to_num(np.abs(np.asarray(f(x, layers)[0][picked], np.float64) - wanted), nan=np.inf).max()
        / np.abs(wanted).max()
    )
    err, xla_err = error(ours), error(theirs)
    (us, _), (xla_us, _) = (cupti.micros(f, x, layers) for f in (ours, theirs))
    us, xla_us = us / LAYERS, xla_us / LAYERS
    floor = max(4 * inner * width / READ_RATE, 4 * rows * inner * width / MULTIPLY_RATE)
    numbers = dict(us=us, xla_us=xla_us, floor_us=floor, ratio=us / floor, speed=xla_us / us, err=err, xla_err=xla_err)
    print("     ", {name: float(f"{value:.4g}") for name, value in numbers.items()}, flush=True)
    return numbers | dict(columns=config.columns, ok=err < xla_err + 1e-3)


def jobs_of():
    for rows in ROWS:
        for name, shape in SHAPES.items():
            yield dict(part="gated_product", case=name, rows=rows), functools.partial(measure, shape, rows)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.gated_product", description=(__doc__ or "").splitlines()[0]
    )
    jobs.add_options(parser, seconds=60)
    args = parser.parse_args(argv)
    return int(jobs.run(jobs_of(), args, records.provenance(), "gated_product") > 0)


if __name__ == "__main__":
    sys.exit(main())
