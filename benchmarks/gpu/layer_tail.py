"""layer_tail_sm90.py on a Hopper card: numbers against float64, then times beside XLA's own products.

    python -m benchmarks.gpu.layer_tail [--write | --out DIR] [--only TEXT] [--seconds 60]

`us` is one layer after attention with the next layer's q, k and v, the median of a chain of LAYERS of them with weights
of their own, so that no layer's weights are in the L2 cache; `xla_us` the same chain by XLA's products; `floor_us` the
time to read the weights at 4.68 TB/s, the most that this memory gives. `err` is the largest relative error of a token,
`xla_err` that of XLA's bf16 products; `same`: five repeats gave equal bits.
"""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import cupti, jobs
from jattn.engine.xla_options import CUDA_OPTIONS
from jattn.nn import layer_tail as op
from jattn.nn.norm import Norm

LAYERS = 4
READ_RATE = 4.68e6  # bytes a microsecond
SHAPES = {  # hidden, width of the heads, of the MLP, of the next layer's projections
    "llama_1b": (2048, 2048, 8192, (2048, 512, 512)),
    "llama_8b": (4096, 4096, 14336, (4096, 1024, 1024)),
    "qwen3_0.6b": (1024, 2048, 3072, (2048, 1024, 1024)),
    "llama_70b_one_of_8": (8192, 1024, 3584, (1024, 128, 128)),
    "qwen2.5_3b": (2048, 2048, 11008, (2048, 256, 256)),
    "qwen2.5_7b": (3584, 3584, 18944, (3584, 512, 512)),
    "gemma2_9b": (3584, 4096, 14336, (4096, 2048, 2048)),
    "gemma2_9b_one_of_4": (3584, 1024, 3584, (1024, 512, 512)),
    "olmo2_7b": (4096, 4096, 11008, (4096, 4096, 4096)),
    "gemma_2b": (2048, 2048, 16384, (2048, 256, 256)),
    "granite_8b": (4096, 4096, 12800, (4096, 1024, 1024)),
    "granite_3b_code": (2560, 2560, 10240, (2560, 2560, 2560)),
    "all_options_one_of_8": (8192, 1024, 3584, (1024, 128, 128)),
}
ROWS = (1, 8, 32, 64)
NORM, ONE_PLUS = Norm(eps=1e-5), Norm(eps=1e-6, one_plus=True)
FORMULA = op.TailFormula(NORM, NORM)
NORMS_AFTER = op.TailFormula(ONE_PLUS, ONE_PLUS, "gelu_tanh", after=(ONE_PLUS, NORM))
FORMULAS = {
    "gemma_2b": op.TailFormula(ONE_PLUS, ONE_PLUS, "gelu_tanh"),
    "gemma2_9b": NORMS_AFTER,
    "gemma2_9b_one_of_4": NORMS_AFTER,
    "olmo2_7b": op.TailFormula(None, None, after=(NORM, NORM)),
    "granite_8b": op.TailFormula(NORM, NORM, "silu", (0.22, 0.22)),
    "all_options_one_of_8": op.TailFormula(NORM, NORM, "gelu_tanh", (0.22, 0.5), (ONE_PLUS, NORM)),
}
"""The formula of a case; FORMULA where it is not listed."""
BIASED = {"qwen2.5_3b": (3,), "qwen2.5_7b": (3,), "granite_3b_code": (0, 1, 2, 3), "all_options_one_of_8": (0, 1, 2, 3)}
"""The numbers of a case's products that have biases."""


def layer(shape: tuple, seed: int, formula: op.TailFormula = FORMULA) -> tuple:
    """(weights, scales)"""
    hidden, heads, wide, following = shape
    keys = iter(jax.random.split(jax.random.key(seed), 11))

    def normal(rows: int, columns: int) -> jax.Array:
        return (jax.random.normal(next(keys), (rows, columns)) * rows**-0.5).astype(jnp.bfloat16)

    into = lambda *widths: tuple(normal(hidden, width) for width in widths)
    weights = (normal(heads, hidden),), into(wide, wide), (normal(wide, hidden),), into(*following)
    norms = formula.mlp_norm, formula.next_norm, *formula.after
    scales = (normal(1, hidden)[0] * 0.1 + (0 if norm is None or norm.one_plus else 1) for norm in norms)
    scales = (None if norm is None else scale for norm, scale in zip(norms, scales, strict=True))
    return weights, jax.tree.map(lambda scale: scale.astype(jnp.bfloat16), tuple(scales))


def with_biases(weights: tuple, scales: tuple, biased: tuple[int, ...], seed: int) -> tuple:
    """(weights, scales, biases), with biases of the products `biased`; (weights, scales) if those are none."""
    keys = iter(jax.random.split(jax.random.key(seed + 100), 9))
    normal = lambda kernel: jax.random.normal(next(keys), (kernel.shape[1],), jnp.bfloat16)
    biases = tuple(tuple(map(normal, group)) if i in biased else () for i, group in enumerate(weights))
    return (weights, scales, biases) if biased else (weights, scales)


def chain(config, a, x, layers, formula=FORMULA):
    """(x, rows) after each layer, whose a is a part of the rows of the layer before; config None: XLA's products."""
    found, counters = [], op.new_counters()
    for weights, scales, *biases in layers:
        if config is None:
            x, rows = op.in_steps(a, x, weights, scales, formula, *biases)
        else:
            results: Any = op.layer_tail(formula, config, a, x, weights, scales, counters, *biases)
            x, rows, counters = results
        found.append((x, rows))
        a = jnp.tile(rows, (1, -(-a.shape[1] // rows.shape[1])))[:, : a.shape[1]]
    return found


def exactly(a, x, weights, scales, biases=(), formula=FORMULA) -> tuple[np.ndarray, np.ndarray]:
    """float64 (x2, rows) of one layer."""
    given = a, x, weights, scales, biases or ((),) * 4
    a, x, weights, scales, biases = jax.tree.map(lambda y: np.asarray(y, np.float64), given)
    norms = formula.mlp_norm, formula.next_norm, *formula.after

    def normed(i: int, y: np.ndarray) -> np.ndarray:
        if (norm := norms[i]) is None:
            return y
        return y / np.sqrt((y**2).mean(1, keepdims=True) + norm.eps) * (scales[i] + norm.one_plus)

    def products(y, i):
        added = biases[i] or (0.0,) * len(weights[i])
        return [y @ kernel + bias for kernel, bias in zip(weights[i], added, strict=True)]

    x = x + formula.factors[0] * normed(2, products(a, 0)[0])
    gate, up = products(normed(0, x), 1)
    if formula.activation == "silu":
        gate = gate / (1 + np.exp(-gate))
    else:
        gate = gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    x = x + formula.factors[1] * normed(3, products(gate * up, 2)[0])
    return x, np.concatenate(products(normed(1, x), 3), axis=1)


def furthest(found, wanted) -> float:
    """The largest relative error of a token, NaN as infinity."""
    errors = [
        np.linalg.norm(np.asarray(y, np.float64) - z, axis=1) / np.linalg.norm(z, axis=1)
        for y, z in zip(found, wanted, strict=True)
    ]
    return float(np.nan_to_num(np.concatenate(errors), nan=np.inf).max())


def measure(name: str, rows: int) -> dict:
    shape, formula = SHAPES[name], FORMULAS.get(name, FORMULA)
    hidden, heads, *_ = shape
    layers = [with_biases(*layer(shape, seed, formula), BIASED.get(name, ()), seed) for seed in range(LAYERS)]
    keys = jax.random.split(jax.random.key(8))
    a, x = (jax.random.normal(key, (rows, n), jnp.bfloat16) for key, n in zip(keys, (heads, hidden), strict=True))
    config = op.config_of(a.shape[0], a.dtype, *layers[0][:2], formula)
    if config is None:
        return dict(ok=False, error="not served")
    compiled = lambda f: jax.jit(f).lower(a, x, layers).compile(compiler_options=CUDA_OPTIONS)
    ours, theirs = (compiled(functools.partial(chain, which, formula=formula)) for which in (config, None))
    found, wanted = ours(a, x, layers), exactly(a, x, *layers[0], formula=formula)
    err, xla_err = furthest(found[0], wanted), furthest(theirs(a, x, layers)[0], wanted)
    equal = lambda other: jax.tree.all(jax.tree.map(lambda y, z: bool(jnp.array_equal(y, z)), other, found))
    same = all([equal(ours(a, x, layers)) for _ in range(5)])
    (us, _), (xla_us, _) = (cupti.micros(f, a, x, layers) for f in (ours, theirs))
    floor = sum(w.nbytes for w in jax.tree.leaves(layers[0])) / READ_RATE
    us, xla_us = us / LAYERS, xla_us / LAYERS
    tiles = [(p.pieces, p.splits) for p in config.products]
    numbers = dict(us=us, xla_us=xla_us, floor_us=floor, ratio=us / floor, err=err, xla_err=xla_err)
    print("     ", {name: float(f"{value:.4g}") for name, value in numbers.items()}, tiles, flush=True)
    return numbers | dict(same=same, tiles=tiles, ok=same and err < 1.5 * xla_err + 1e-3)


def jobs_of():
    for name in SHAPES:
        for rows in ROWS:
            names = dict(part="layer_tail", case=f"{name}_{rows}", rows=rows)
            yield names, functools.partial(measure, name, rows)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    return jobs.main("layer_tail", __doc__, jobs_of, 60, argv)


if __name__ == "__main__":
    sys.exit(main())
