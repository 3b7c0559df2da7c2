"""A mixture of experts on a Hopper card: its products against float64, then their times and a whole layer's.

    python -m benchmarks.gpu.expert_product [--write | --out DIR] [--only TEXT] [--seconds 120]

Rows of `products` are of the launches of one layer, gate and up with their activation and down; `xla_us` is the same by
`jax.lax.ragged_dot`, where its temporary memory (choices times experts times inputs) is at most 8 GB. `floor_us` is the
longer of reading the chosen experts' weights at 4.68 TB/s (3.3 on an H100) and of multiplying at 700 TFLOP/s. `err` is
the largest error over the largest value, of sampled rows. Rows of `packed` are those of `products` with quantised
matrices, without `xla_us`, rows of `layer` of a whole layer with its router, rows of `tune` of other tiles than the
chosen ones. `err` of a layer is of up to two tokens; `ok` also needs equal bits of all tokens in a second run.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import cupti, jobs, packed_product
from jattn import device
from jattn.engine.xla_options import FEW_TOKENS, options_of
from jattn.models.moe import MoE
from jattn.ops.expert_rows import arrange
from jattn.ops.experts import choose_tile_rows, expert_product, silu_expert_product
from jattn.ops.quantised import QuantisedArray
from pallas_kernels.gpu.expert_product_config import ROW_TILES

READ_RATES = {"h200": 4.68e6, "h100": 3.3e6}  # bytes a microsecond
MULTIPLY_RATE = 700e6  # FLOP a microsecond
MOST_TEMPORARY = 8e9  # bytes that XLA's ragged_dot may take
SAMPLED, SAMPLED_PACKED = 16, 4  # rows that are compared
SHAPES = {  # experts, experts of a token, hidden, width
    "qwen3_30b": (128, 8, 2048, 768),
    "mixtral_8x7b": (8, 2, 4096, 14336),
    "gpt_oss_20b": (32, 4, 2880, 2880),
    "deepseek_v2_lite": (64, 6, 2048, 1408),
    "olmoe": (64, 8, 2048, 1024),
    "granite_3b": (40, 8, 1536, 512),
}
TOKENS = (1, 16, 64, 256, 2048, 8192)
PACKED = {  # one of packed_product.FORMS, and a shape
    "qwen3_30b_fp8": ("fp8_g128", SHAPES["qwen3_30b"]),
    "qwen3_30b_nvfp4": ("nvfp4", SHAPES["qwen3_30b"]),
    "gpt_oss_20b_mxfp4": ("mxfp4", SHAPES["gpt_oss_20b"]),
    "mixtral_8x7b_awq": ("awq_g128", SHAPES["mixtral_8x7b"]),
    "deepseek_v3_fp8": ("fp8_g128", (256, 8, 7168, 2048)),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    experts: int
    top: int
    hidden: int
    width: int
    tokens: int
    form: str | None = None  # one of packed_product.FORMS; None: bfloat16

    def draw(self):
        """(x, (gate, up, down), the chosen experts i32[tokens * top]), all experts equally likely."""
        keys = jax.random.split(jax.random.key(self.tokens), 5)
        normal = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
        sizes = (self.hidden, self.width), (self.hidden, self.width), (self.width, self.hidden)
        if self.form is None:
            weights = [
                normal(key, self.experts, *size) * size[0] ** -0.5 for key, size in zip(keys[1:4], sizes, strict=True)
            ]
        else:
            weights = [draw_experts(self.form, *size, self.experts * i, self.experts) for i, size in enumerate(sizes)]
        chosen = jax.lax.top_k(jax.random.uniform(keys[4], (self.tokens, self.experts)), self.top)[1]
        return normal(keys[0], self.tokens, self.hidden), tuple(weights), chosen.reshape(-1)

    def floor(self, weights, chosen) -> float:
        """us: the longer of reading the chosen experts and of multiplying."""
        numbers, size = 3 * self.hidden * self.width, sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        used, kind = len(np.unique(np.asarray(chosen))), "h200" if "H200" in device.card().upper() else "h100"
        return max(size * used / self.experts / READ_RATES[kind], 2 * len(chosen) * numbers / MULTIPLY_RATE)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 4))
def draw_experts(form: str, inner: int, width: int, seed: int, count: int) -> QuantisedArray:
    """A random matrix of each expert, whose numbers are divided by sqrt(inner)."""
    drawn = jax.vmap(lambda seed: packed_product.draw(form, inner, width, seed))(seed + jnp.arange(count))
    if drawn.factor is not None:
        return dataclasses.replace(drawn, factor=drawn.factor * inner**-0.5)
    return dataclasses.replace(drawn, scales=(drawn.scales * inner**-0.5).astype(drawn.scales.dtype))


def products(weights, x, sizes, tile_rows: int):
    """The experts' MLPs of rows, by a launch for gate and up and one for down."""
    return expert_product(silu_expert_product(x, *weights[:2], sizes, tile_rows), weights[2], sizes, tile_rows)


def compiled(f, *args, tokens: int):
    options = options_of(jax.default_backend(), tokens <= FEW_TOKENS)
    return jax.jit(f).lower(*args).compile(compiler_options=options or None)


def exactly(x, weights, expert: int) -> np.ndarray:
    """One row by numpy in float64."""
    if isinstance(weights[0], QuantisedArray):
        each = [jax.tree.map(lambda array: array[expert], w) for w in weights]
        gate, up, down = (packed_product.numbers(w, np.arange(w.shape[1])) for w in each)
    else:
        gate, up, down = (np.asarray(w[expert], np.float64) for w in weights)
    of_gate = x @ gate
    return (of_gate / (1 + np.exp(-of_gate)) * (x @ up)) @ down


def measure(problem: Problem, tile_rows: int | None = None, timed: bool = True) -> dict:
    """The row of a problem. tile_rows: instead of those that `choose_tile_rows` gives; timed: also the times."""
    x, weights, chosen = problem.draw()
    is_chosen, tile_rows = tile_rows is None, tile_rows or choose_tile_rows(len(chosen), x.dtype, weights)
    rows = arrange(chosen, problem.experts, tile_rows)
    given = x.at[rows.choice // problem.top].get(mode="promise_in_bounds")
    run = compiled(functools.partial(products, tile_rows=tile_rows), weights, given, rows.sizes, tokens=problem.tokens)
    y = np.asarray(run(weights, given, rows.sizes)[rows.row], np.float64)
    picked = np.linspace(0, len(chosen) - 1, SAMPLED if problem.form is None else SAMPLED_PACKED).astype(int)
    every = np.asarray(x, np.float64)
    wanted = np.stack([exactly(every[i // problem.top], weights, int(chosen[i])) for i in picked])
    err = float(np.nan_to_num(np.abs(y[picked] - wanted), nan=np.inf).max() / np.abs(wanted).max())
    if not timed:
        return dict(err=err, ok=err < 0.02)
    us, parts = cupti.micros(run, weights, given, rows.sizes)
    floor = problem.floor(weights, chosen)
    figures = dict(us=us, floor_us=floor, ratio=us / floor, err=err)
    if (
        2 * len(chosen) * problem.experts * max(problem.hidden, problem.width) < MOST_TEMPORARY
        and is_chosen
        and problem.form is None
    ):
        plain = arrange(chosen, problem.experts)
        theirs = compiled(_by_xla, weights, x[plain.choice // problem.top], plain.sizes, tokens=problem.tokens)
        figures["xla_us"] = cupti.micros(theirs, weights, x[plain.choice // problem.top], plain.sizes, iterations=3)[0]
    print("     ", {k: float(f"{v:.4g}") for k, v in figures.items()}, tile_rows, parts, flush=True)
    return figures | dict(tile_rows=tile_rows, ok=err < 0.02)


def _by_xla(weights, x, sizes):
    gate, up = (jax.lax.ragged_dot(x, w, sizes) for w in weights[:2])
    return jax.lax.ragged_dot(jax.nn.silu(gate) * up, weights[2], sizes)


def measure_layer(problem: Problem, timed: bool = True) -> dict:
    """A whole layer: the router, the choice, the products and the sum over a token's experts."""
    x, (gate, up, down), _ = problem.draw()
    moe = MoE(width=problem.width, num_experts=problem.experts, top_k=problem.top)
    router = (
        jax.random.normal(jax.random.key(5), (problem.hidden, problem.experts), jnp.bfloat16) * problem.hidden**-0.5
    )
    weights = dict(router=dict(kernel=router), gate=dict(kernel=gate), up=dict(kernel=up), down=dict(kernel=down))
    run = compiled(lambda weights, x: moe(weights, x), weights, x, tokens=problem.tokens)
    y, again = (np.asarray(run(weights, x), np.float64) for _ in range(2))
    logits = np.asarray(x, np.float64) @ np.asarray(router, np.float64)
    err = _error_of_layer(problem, np.asarray(x, np.float64), (gate, up, down), logits, y)
    figures = dict(err=err, ok=bool(err < 0.03 and (y == again).all()))
    if not timed:
        return figures
    us, parts = cupti.micros(run, weights, x)
    floor = problem.floor((gate, up, down), np.argsort(-logits, axis=1)[:, : problem.top].reshape(-1))
    figures = dict(us=us, floor_us=floor, ratio=us / floor) | figures
    print("     ", {k: float(f"{v:.4g}") for k, v in figures.items()}, f"{len(parts)} kernels", parts, flush=True)
    return figures


def _error_of_layer(problem: Problem, x, weights, logits, y) -> float:
    """The largest error of two tokens over their largest value, by numpy in float64. They are those for which the last
    chosen expert is furthest from the next, as others may be chosen where logits are close."""
    order, top = np.argsort(-logits, axis=1), problem.top
    ranked = np.take_along_axis(logits, order, axis=1)
    tokens = np.argsort(ranked[:, top] - ranked[:, top - 1])[:2]
    wanted = []
    for t in tokens:
        power = np.exp(ranked[t, :top] - ranked[t, 0])
        each = [exactly(x[t], weights, int(expert)) for expert in order[t, :top]]
        wanted.append((power / power.sum()) @ np.stack(each))
    return float(np.nan_to_num(np.abs(y[tokens] - wanted), nan=np.inf).max() / np.abs(wanted).max())


def jobs_of():
    for part, work in (("products", measure), ("layer", measure_layer)):
        for tokens in TOKENS:
            for name, shape in SHAPES.items():
                case = f"{part}_{name}_{tokens}"
                yield dict(part=part, case=case, tokens=tokens), functools.partial(work, Problem(*shape, tokens))
    for tokens in TOKENS:
        for name, (form, shape) in PACKED.items():
            names = dict(part="packed", case=f"packed_{name}_{tokens}", tokens=tokens)
            yield names, functools.partial(measure, Problem(*shape, tokens, form))
    plain = [(name, None, shape) for name, shape in SHAPES.items()]
    packed = [(name, form, shape) for name, (form, shape) in PACKED.items()]
    for tokens, cases in ((4, plain), (8, plain), (1, packed), (4, packed), (8, packed)):  # up to 8: other launches
        for name, form, shape in cases:
            names = dict(part="layer", case=f"layer_{name}_{tokens}", tokens=tokens)
            yield names, functools.partial(measure_layer, Problem(*shape, tokens, form))
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
