"""Choosing tokens on a GPU: the floor of top_k and top_p by its launch and by bisection, then each rule.

    python -m benchmarks.gpu.sampling [--write | --out DIR] [--only TEXT] [--seconds 120]

Rows of `floor` compare the launch with XLA's bisection: `us`, `xla_us`, and `differ`, the most tokens of a row that one
keeps and the other does not, which sums in another order may bring. Rows of `choose` are of the whole choice of tokens.
Logits are normal, with a standard deviation of 2.2 and 200 likely tokens (`llm`), or of 1 (`flat`). Nothing is in a
CUDA graph: of a loop in one, CUPTI counts the kernels once.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import cupti, jobs
from jattn.engine.params import SamplingParams
from jattn.engine.rules import penalties, rules_of, rules_of_batch, sampling_rows
from jattn.engine.sampling import Needs, Sampled, _row_key, _sample_by_xla, choose
from jattn.engine.sampling_floor import by_bisection, ordered_bits, sampling_floor

SIZES = ((1, 128256), (64, 128256), (256, 128256), (64, 32000), (64, 50257), (64, 262144))  # rows, vocabulary
CUTS = ((50, 1.0), (0, 0.9), (20, 0.8), (0, 0.99), (0, 0.999), (9000, 1.0))  # top_k, top_p
RULES = {
    "greedy": dict(temperature=0),
    "draw": {},
    "min_p": dict(min_p=0.05),
    "top_k": dict(top_k=50),
    "top_p": dict(top_p=0.9),
    "top_k and top_p": dict(top_k=20, top_p=0.8),
    "logprobs": dict(temperature=0, logprobs=20),
    "penalties": dict(temperature=0, repetition_penalty=1.1),
}
HISTORY = 4096  # earlier tokens, to which penalties apply
OUTSIDE_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
ROUNDING = 1e-3  # of the kept tokens: for a top_p near 1 a sum rounded in another order moves the floor by so many


@dataclasses.dataclass(frozen=True)
class Problem:
    rows: int
    vocab: int
    kind: str = "llm"  # or flat

    def logits(self) -> jax.Array:
        rng = np.random.default_rng(self.vocab)
        x = rng.standard_normal((self.rows, self.vocab), np.float32)
        if self.kind == "llm":
            likely = min(200, self.vocab)
            x *= 2.2
            x[:, :likely] += np.float32(8) * rng.random((self.rows, likely), np.float32) ** 2
        return jnp.asarray(x)


def compiled(f, *args):
    return jax.jit(lambda *args: f(*args)).lower(*args).compile(compiler_options=OUTSIDE_GRAPHS)


def measure_floor(problem: Problem, top_k: int, top_p: float, timed: bool = True) -> dict:
    """The row of a cut that all rows have."""
    x = problem.logits()
    x -= x.max(axis=-1, keepdims=True)
    given = x, jnp.full(problem.rows, top_k, jnp.int32), jnp.full(problem.rows, top_p, jnp.float32)
    ours, theirs = compiled(sampling_floor, *given), compiled(by_bisection, *given)
    kept = [(ordered_bits(x) >= floor(*given)[:, None]).sum(axis=-1) for floor in (ours, theirs)]
    differ, most = int(abs(kept[0] - kept[1]).max()), int(kept[1].max())
    figures = dict(kept=most, differ=differ, ok=differ <= 1 + ROUNDING * most)
    if not timed:
        return figures
    us, xla_us = (cupti.micros(floor, *given)[0] for floor in (ours, theirs))
    return figures | dict(us=us, xla_us=xla_us, ratio=xla_us / us)


def measure_choice(problem: Problem, params: SamplingParams, timed: bool = True) -> dict:
    """The figures of a rule that all rows have. differ: the rows of which XLA alone draws another token. They are few:
    two sums are about equal, or a token is at the edge of a top_p."""
    x, rows = problem.logits(), problem.rows
    rules = rules_of_batch([rules_of(params, seed, (), 10) for seed in range(rows)], rows)
    history = np.random.default_rng(1).integers(0, problem.vocab, (rows, HISTORY), np.int32)
    of_rows = sampling_rows(rules, np.zeros(rows, np.int32), np.full(rows, 9, np.int32))
    needs = Needs(
        draws=jnp.asarray(params.temperature > 0),
        history=jnp.asarray(params.repetition_penalty != 1),
        logprobs=jnp.asarray(params.logprobs is not None),
    )
    before = Sampled.nothing(1, rows, problem.vocab, -2)
    given = x, of_rows, penalties(rules, history), np.full((1, rows), -1, np.int32), before, jnp.int32(0), needs
    run = compiled(choose, *given)
    tokens, differ = np.asarray(run(*given)[0]), 0
    is_right = (tokens >= 0).all() and (tokens < problem.vocab).all()
    if params.repetition_penalty == 1:
        is_drawn, keys = params.temperature > 0, jax.vmap(_row_key)(of_rows.seed, of_rows.position)
        wanted = compiled(_sample_by_xla, x, of_rows, keys)(x, of_rows, keys) if is_drawn else x.argmax(axis=-1)
        differ = int((tokens != np.asarray(wanted)).sum())
        is_right &= differ <= is_drawn * (1 + rows // 100)
    figures = dict(differ=differ, ok=bool(is_right))
    if not timed:
        return figures
    us, parts = cupti.micros(run, *given)
    print("     ", f"{len(parts)} kernels", parts, flush=True)
    return figures | dict(us=us)


def jobs_of():
    for rows, vocab in SIZES:
        for kind in ("llm", "flat"):
            for top_k, top_p in CUTS:
                case = f"floor_{rows}x{vocab}_{kind}_{top_k}_{top_p}"
                work = functools.partial(measure_floor, Problem(rows, vocab, kind), top_k, top_p)
                yield dict(part="floor", case=case, rows=rows), work
    for rows, vocab in SIZES[:4]:
        for name, rule in RULES.items():
            work = functools.partial(measure_choice, Problem(rows, vocab), SamplingParams(**rule))
            yield dict(part="choose", case=f"choose_{rows}x{vocab}_{name}", rows=rows), work


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    return jobs.main("sampling", __doc__, jobs_of, 120, argv)


if __name__ == "__main__":
    sys.exit(main())
