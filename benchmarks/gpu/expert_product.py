"""A mixture of experts on a Hopper card: expert_product_sm90.py against float64, then its times and a whole layer's.

    python -m benchmarks.gpu.expert_product [--write | --out DIR] [--only TEXT] [--seconds 120]

Rows of `products` are of the launches of one layer, gate and up with their activation and down; `xla_us` is the same by
`jax.lax.ragged_dot`, where its temporary memory (choices times experts times inputs) is at most 8 GB. `floor_us` is the
longer of reading the chosen experts' weights at 4.68 TB/s (3.3 on an H100) and of multiplying at 700 TFLOP/s. `err` is
the largest error over the largest value, of sampled rows. Rows of `layer` are of a whole layer with its router, rows of
`tune` of other tiles than the chosen ones.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import cupti, jobs
from jattn import device
from jattn.engine.xla_options import CUDA_OPTIONS, CUDA_OPTIONS_MANY_TOKENS
from jattn.models.moe import MoE
from jattn.ops.expert_rows import arrange
from jattn.ops.experts import expert_product, row_multiple, silu_expert_product
from pallas_kernels.gpu.expert_product_config import ROW_TILES

READ_RATES = {"h200": 4.68e6, "h100": 3.3e6}  # bytes a microsecond
MULTIPLY_RATE = 700e6  # FLOP a microsecond
MOST_TEMPORARY = 8e9  # bytes that XLA's ragged_dot may take
SAMPLED = 16  # rows that are compared
SHAPES = {  # experts, experts of a token, hidden, width
    "qwen3_30b": (128, 8, 2048, 768),
    "mixtral_8x7b": (8, 2, 4096, 14336),
    "gpt_oss_20b": (32, 4, 2880, 2880),
    "deepseek_v2_lite": (64, 6, 2048, 1408),
    "olmoe": (64, 8, 2048, 1024),
    "granite_3b": (40, 8, 1536, 512),
}
TOKENS = (1, 16, 64, 256, 2048, 8192)


@dataclasses.dataclass(frozen=True)
class Problem:
    experts: int
    top: int
    hidden: int
    width: int
    tokens: int

    def draw(self):
        """(x, (gate, up, down), the chosen experts i32[tokens * top]), all experts equally likely."""
        keys = jax.random.split(jax.random.key(self.tokens), 5)
        normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
        up = (self.experts, self.hidden, self.width)
        gate, up = (normal(key, *up) * self.hidden**-0.5 for key in keys[1:3])
        down = normal(keys[3], self.experts, self.width, self.hidden) * self.width**-0.5
        chosen = jax.lax.top_k(jax.random.uniform(keys[4], (self.tokens, self.experts)), self.top)[1]
        return normal(keys[0], self.tokens, self.hidden), (gate, up, down), chosen.reshape(-1)

    def floor(self, chosen) -> float:
        """us: the longer of reading the chosen experts and of multiplying."""
        numbers = 3 * self.hidden * self.width
        used, kind = len(np.unique(np.asarray(chosen))), "h200" if "H200" in device.card().upper() else "h100"
        return max(2 * used * numbers / READ_RATES[kind], 2 * len(chosen) * numbers / MULTIPLY_RATE)


def products(weights, x, sizes, multiple: int):
    """The experts' MLPs of rows, by a launch for gate and up and one for down."""
    return expert_product(silu_expert_product(x, *weights[:2], sizes, multiple), weights[2], sizes, multiple)


def compiled(f, *args, tokens: int):
    options = CUDA_OPTIONS | (CUDA_OPTIONS_MANY_TOKENS if tokens > 64 else {})
    return jax.jit(f).lower(*args).compile(compiler_options=options)


def exactly(x, weights, expert: int) -> np.ndarray:
    """One row by numpy in float64."""
    gate, up, down = (np.asarray(w[expert], np.float64) for w in weights)
    of_gate = x @ gate
    return (of_gate / (1 + np.exp(-of_gate)) * (x @ up)) @ down


def measure(problem: Problem, tile_rows: int | None = None, timed: bool = True) -> dict:
    """The row of a problem. tile_rows: instead of those that `row_multiple` gives; timed: also the times."""
    x, weights, chosen = problem.draw()
    multiple = tile_rows or row_multiple(len(chosen), x.dtype, weights)
    rows = arrange(chosen, problem.experts, multiple)
    given = x.at[rows.choice // problem.top].get(mode="promise_in_bounds")
    run = compiled(functools.partial(products, multiple=multiple), weights, given, rows.sizes, tokens=problem.tokens)
    y = np.asarray(run(weights, given, rows.sizes)[rows.row], np.float64)
    picked = np.linspace(0, len(chosen) - 1, SAMPLED).astype(int)
    every = np.asarray(x, np.float64)
    wanted = np.stack([exactly(every[i // problem.top], weights, int(chosen[i])) for i in picked])
    err = float(np.nan_to_num(np.abs(y[picked] - wanted), nan=np.inf).max() / np.abs(wanted).max())
    if not timed:
        return dict(err=err, ok=err < 0.02)
    us, parts = cupti.micros(run, weights, given, rows.sizes)
    floor = problem.floor(chosen)
    figures = dict(us=us, floor_us=floor, ratio=us / floor, err=err)
    if 2 * len(chosen) * problem.experts * max(problem.hidden, problem.width) < MOST_TEMPORARY and tile_rows is None:
        plain = arrange(chosen, problem.experts)
        theirs = compiled(_by_xla, weights, x[plain.choice // problem.top], plain.sizes, tokens=problem.tokens)
        figures["xla_us"] = cupti.micros(theirs, weights, x[plain.choice // problem.top], plain.sizes, iterations=3)[0]
    print("     ", {k: float(f"{v:.4g}") for k, v in figures.items()}, multiple, parts, flush=True)
    return figures | dict(tile_rows=multiple, ok=err < 0.02)


def _by_xla(weights, x, sizes):
    gate, up = (jax.lax.ragged_dot(x, w, sizes) for w in weights[:2])
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, weights[2], sizes)


def measure_layer(problem: Problem) -> dict:
    """The router, the order of the rows, the products and the sum over a token's experts."""
    x, (gate, up, down), _ = problem.draw()
    moe = MoE(width=problem.width, num_experts=problem.experts, top_k=problem.top)
    router = (
        jax.random.normal(jax.random.key(5), (problem.hidden, problem.experts), jnp.bfloat16) * problem.hidden**-0.5
    )
    weights = dict(router=dict(kernel=router), gate=dict(kernel=gate), up=dict(kernel=up), down=dict(kernel=down))
    run = compiled(lambda weights, x: moe(weights, x), weights, x, tokens=problem.tokens)
    y = run(weights, x)
    us, parts = cupti.micros(run, weights, x)
    chosen = jax.lax.top_k(x.astype(jnp.float32) @ router.astype(jnp.float32), problem.top)[1]
    floor = problem.floor(chosen.reshape(-1))
    print("     ", f"{len(parts)} kernels", parts, flush=True)
    return dict(us=us, floor_us=floor, ratio=us / floor, ok=bool(jnp.isfinite(y).all()))


def jobs_of():
    for part, work in (("products", measure), ("layer", measure_layer)):
        for tokens in TOKENS:
            for name, shape in SHAPES.items():
                case = f"{part}_{name}_{tokens}"
                yield dict(part=part, case=case, tokens=tokens), functools.partial(work, Problem(*shape, tokens))
    for tokens in TOKENS[2:]:
        for name, shape in SHAPES.items():
            for tile_rows in ROW_TILES:
                names = dict(part="tune", case=f"tune_{name}_{tokens}_{tile_rows}", tokens=tokens)
                yield names, functools.partial(measure, Problem(*shape, tokens), tile_rows)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    return jobs.main("expert_product", __doc__, jobs_of, 120, argv)


if __name__ == "__main__":
    sys.exit(main())
