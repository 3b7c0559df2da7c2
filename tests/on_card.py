"""The conformance suite's problems on this machine's GPU, without pytest: every feature, batch and page size.

    python -m tests.on_card [--backends pallas_gpu,...] [--only TEXT] [--processes 8] [--seconds 100]
    python -m tests.on_card --drawn 300 [--seed 0]      # problems that are drawn at random instead, of tests/drawn.py

A line for each that is not right; exit code 1 if one is wrong, 2 if the time is over. A refusal is no error and is
printed: docs/support_matrix.md is the list of what must be taken. Programs are compiled by processes side by side, each
with a part of the GPU's memory.
"""

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jattn
from tests.cases import CASES, FEATURES
from tests.drawn import fields_of
from tests.problem import Problem
from tests.running import conform

LSE_FLOOR = 2.0**-15  # the error of approximate functions
CAPPED_LSE_FLOOR = 2.0**-9  # the same of tanh with a cap of any size: 2 ** -11 of a logit, which may be as large as 4
DRAWN = "drawn "
SIZES: dict[str, Any] = dict(heads=4, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")
BATCHES = {  # features that need a batch of their own
    "mm_prefix": "chunked_prefill",
    "mm_prefix_clamped": "decode",
    "mm_prefix_chunk_mask_fn": "mixed",
    "chunk_lookback_non_causal": "decode",
    "rswa_per_request": "long_and_short",
    "qq_bias": "speculative",
    "qq_bias_alibi_score_fn": "decode",
    "output_int8": "decode",
}
PAGES = (1, 3, 5, 7, 8, 12, 24, 32, 48, 56, 64, 128)
CACHES = (("float8_e4m3fn", "per_tensor"), ("int8", "per_head"), ("float8_e5m2", "per_token_head"))


def problems() -> dict[str, dict]:
    """Label -> the fields of a Problem; what has never run on a card first."""
    found: dict[str, dict[str, Any]] = {
        f"head_dim {dim}": dict(head_dim=dim, case=CASES["two_tiles"]) for dim in (256, 128, 80, 112)
    }
    found |= {f"batch {name}": dict(case=case) for name, case in CASES.items()}
    for name, feature in sorted(FEATURES.items(), key=lambda pair: pair[0] not in BATCHES):
        found[f"feature {name}"] = dict(case=CASES[BATCHES.get(name, "mixed_unsorted")], feature=feature)
    for size in (3, 48):
        for dtype, quant in CACHES:
            found[f"page {size} {dtype} {quant}"] = dict(block_size=size, cache_dtype=dtype, quant=quant)
        found[f"page {size} NHD"] = dict(block_size=size, layout="NHD")
    for size in PAGES:
        found[f"page {size}"] = dict(block_size=size, case=CASES["mixed_unsorted"])
        found[f"page {size} decode"] = dict(block_size=size, case=CASES["decode"])
    return found


def problem_of(label: str) -> tuple[Problem, float]:
    """(the problem, the error of its log-sum-exp that the chip's approximate functions may cause)"""
    if not label.startswith(DRAWN):
        return Problem(**(SIZES | problems()[label])), LSE_FLOOR
    problem = Problem(**fields_of(int(label.removeprefix(DRAWN))))
    return problem, CAPPED_LSE_FLOOR if problem.spec.logits_soft_cap else LSE_FLOOR


def judge(label: str, backend: str) -> str:
    """ "ok", "refused: ..." or what is wrong."""
    try:
        problem, floor = problem_of(label)
        conform(problem, backend, floor)
    except jattn.UnsupportedError as refusal:
        return f"refused: {refusal}"
    except Exception as error:
        return f"WRONG {type(error).__name__}: {error}"
    return "ok"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.on_card", description="The conformance suite on a GPU.")
    parser.add_argument("--backends", default="pallas_gpu,pallas_gpu_invariant")
    parser.add_argument("--only", default="", help="a part of the labels")
    parser.add_argument("--drawn", type=int, default=0, help="so many problems that are drawn at random instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=100, help="then it ends")
    args = parser.parse_args(argv)
    labels = [f"{DRAWN}{seed}" for seed in range(args.seed, args.seed + args.drawn)] or list(problems())
    if not any(args.only in label for label in labels):
        parser.error(f"--only: no label has {args.only!r}; there are {', '.join(labels)}")
    begin, counts = time.time(), {"ok": 0, "refused": 0, "wrong": 0}
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    asked = [(label, name) for label in labels for name in args.backends.split(",") if args.only in label]
    with ProcessPoolExecutor(args.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [(*one, pool.submit(judge, *one)) for one in asked]
        for label, name, future in found:
            try:
                verdict = future.result(timeout=max(args.seconds - (time.time() - begin), 0.1))
            except TimeoutError:
                print(f"out of time at {label} {name}", counts, flush=True)
                for process in multiprocessing.active_children():  # a kernel that waits for ever cannot be stopped
                    process.kill()
                os._exit(2)
            kind = verdict.split(":")[0] if verdict.startswith(("ok", "refused")) else "wrong"
            counts[kind] += 1
            if kind != "ok":
                print(f"{name}: {label}: {' '.join(verdict.split())[:300]}", flush=True)
    print(counts, f"{time.time() - begin:.0f} s", flush=True)
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
