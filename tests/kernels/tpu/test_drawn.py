"""Problems drawn at random, over tiles and blocks of drawn sizes: the kernel agrees with the witness, or gives reasons.

Blocks of the default sizes hold all keys of a batch that the interpreter computes in seconds; small ones are walked.
"""

import dataclasses
import random

import jax
import pytest

import jattn
from jattn.backends import pallas_tpu
from jattn.device import Chip
from pallas_kernels.tpu.supports import VMEM
from tests.cases import Case
from tests.drawn import fields_of
from tests.kernels.tpu.interpreted import judge
from tests.problem import Problem
from tests.running import run

KEYS, WORK = 300, 60_000
QUICK = (0, 1, 4, 5, 22)
SLOW = sorted({*range(24)} - {*QUICK})


def problem_of(seed: int) -> Problem:
    """With pages and head dims rounded up to what the kernel takes, so that few are refused."""
    problem = Problem(**fields_of(seed, WORK))
    up = lambda number, most: min(-(-number // 16) * 16, most)
    seq_lens = tuple(min(n, KEYS) for n in problem.case.seq_lens)
    query_lens = tuple(map(min, problem.case.query_lens, seq_lens))
    storage = {} if problem.cache_dtype or problem.dtype != "float16" else dict(cache_dtype="bfloat16")
    return problem.replace(
        case=Case(problem.case.name, query_lens, seq_lens), head_dim=up(problem.head_dim, 256),
        block_size=up(problem.block_size, 256), **storage,
    )  # fmt: skip


def sizes_of(rng: random.Random) -> dict[str, int]:
    """Fields of TpuKernelConfig."""
    part, chunk, behind = rng.choice((16, 32, 64, 128)), rng.choice((16, 32, 48, 64)), rng.choice((0, 1, 2, 3))
    return dict(
        part_kv=part, block_kv=part * rng.choice((1, 2, 3)), step_kv=part * rng.choice((1, 2)), chunk_rows=chunk,
        tile_rows=chunk * rng.choice((1, 2, 3)), short_heads=rng.choice((1, 2, 8)), long_heads=rng.choice((1, 2, 3, 8)),
        values_behind=behind, early_heads=rng.choice((0, 1)) if behind else 0,
    )  # fmt: skip


def check(seed: int, monkeypatch) -> bool:
    """Is the problem of this seed taken?"""
    rng, problem, default = random.Random(seed), problem_of(seed), pallas_tpu.default_config
    sizes = sizes_of(rng)

    def small(**fields):
        config = default(**fields)
        decodes = ("tile_rows", "chunk_rows") if not config.long_tiles else ()  # tiles of one token
        return dataclasses.replace(config, **{name: n for name, n in sizes.items() if name not in decodes})

    monkeypatch.setattr(pallas_tpu, "default_config", small)
    chip = Chip("tpu", rng.choice(list(VMEM)))
    monkeypatch.setattr(jattn.device, "detect", lambda: chip)
    try:
        jax.eval_shape(lambda: run(problem, "pallas_tpu"))
    except jattn.UnsupportedError as refusal:
        reasons = refusal.reasons["pallas_tpu"]
        assert reasons and all(reasons)
        return False
    judge(problem, rng.choice(("on_wait", "eager")))
    return True


@pytest.mark.parametrize("seed", QUICK)
def test_a_drawn_problem_agrees(seed, monkeypatch):
    assert check(seed, monkeypatch), "refused: these seeds are chosen to be taken"


@pytest.mark.slow
@pytest.mark.parametrize("seed", SLOW)
def test_another_drawn_problem_agrees_or_is_refused_with_reasons(seed, monkeypatch):
    check(seed, monkeypatch)
