"""Attention over 8-bit caches: small batches beside numpy float64, then times of prefill, mixed batches and decode.

    python -m benchmarks.gpu.eight_bits exact|rounded|scales|all [--write | --out DIR] [--seconds 60] [--only PARTS]

exact: tiles are decoded and multiplied in 16 bits. rounded: compute_dtype, queries and weights of 8 bits; `rel_err` is
beside float64 with the same rounding, `exact_rel_err` beside float64 without. scales: one for each token and head.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks import records
from benchmarks.gpu import cases, check, jobs
from pallas_kernels.gpu.config import FP8

BOUND, LSE_BOUND = 6e-3, 1e-3
ROUNDED_BOUND = 2e-2  # weights near the middle of two values of 8 bits may be rounded to either
BY_NAME = {case.name: case for case in cases.CHECKED + cases.TIMED}
EIGHT = dict(kv_dtype=FP8)
ROUNDED, SCALES = dict(compute_dtype=FP8), dict(token_scales=True)
SMALL = (("window", 300), ("soft_cap", 20.0), ("alibi", True), ("has_sinks", True))


def mix(name: str, **fields) -> cases.KernelCase:
    """A small mixed batch with poisoned pages, padding requests and padding tokens."""
    return cases.KernelCase(name=f"mix_{name}", lengths=cases.MIX, pad_tokens=37, pad_reqs=3, **EIGHT | fields)


def of(name: str, **fields) -> cases.KernelCase:
    """A batch of the benchmark over an 8-bit cache."""
    return dataclasses.replace(BY_NAME[name], name=f"{name}_fp8", **EIGHT | fields)


CHECKED = {
    "exact": [
        (mix("fp8_d256", head_dim=256, v_head_dim=256), {}),
        (mix("int8_all", kv_dtype="int8", options=SMALL), dict(layout="NHD")),
        (mix("e5m2_d64_p64", kv_dtype="float8_e5m2", head_dim=64, v_head_dim=64, page=64), {}),
    ],
    "rounded": [
        (mix("fp8_all", options=SMALL), ROUNDED | dict(layout="NHD")),
        (mix("fp8_d64_p64", head_dim=64, v_head_dim=64, page=64), ROUNDED),
        (cases.KernelCase(name="few_fp8", lengths=((1, 700), (2, 133), (0, 0), (4, 4096)), **EIGHT), ROUNDED),
    ],
    "scales": [(mix("int8_all", kv_dtype="int8", page=64, options=SMALL), SCALES)],
}
TIMED = {
    "exact": [(of("pre_1x8k"), {}), (of("mixed_32d_2p"), {}), (BY_NAME["pre_1x8k"], {})],
    "rounded": [
        (of("pre_1x8k"), ROUNDED), (of("mixed_32d_2p"), ROUNDED), (BY_NAME["dec_16x32k_fp8"], ROUNDED),
    ],
    "scales": [
        (BY_NAME["dec_16x32k_fp8"], {}), (BY_NAME["dec_16x32k_fp8"], SCALES), (of("pre_1x8k"), SCALES),
        (of("mixed_32d_2p"), SCALES),
    ],
}  # fmt: skip


def measure(case: cases.KernelCase, fields: dict, checked: bool, timed: bool) -> dict:
    """One row: errors against numpy float64, or microseconds, or both."""
    args = argparse.Namespace(no_check=not checked, samples=8, time=timed, iterations=8)
    row = check.run_case(case, args, **fields)
    bound = ROUNDED_BOUND if "compute_dtype" in fields else BOUND
    return row | dict(
        ok=not checked or bool(row["rel_err"] < bound and row["lse_err"] < LSE_BOUND and row["same_bits"])
    )


def jobs_of(kind: str, pool: ThreadPoolExecutor) -> Iterator[jobs.Job]:
    """The checks, compiled side by side, then the times: no check runs beside them."""
    names = lambda case, fields, what="": dict(case=case.name, variant=(",".join(fields) or "default") + what)
    every = [(names(c, f, " checked"), pool.submit(measure, c, f, True, False)) for c, f in TIMED[kind] + CHECKED[kind]]
    for label, found in every:
        yield label, found.result
    for case, fields in TIMED[kind]:
        yield names(case, fields), lambda c=case, f=fields: measure(c, f, False, True)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.eight_bits", description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="+", choices=(*CHECKED, "all"))
    jobs.add_options(parser, seconds=60)
    args = parser.parse_args(argv)
    origin, failed = records.provenance(), 0
    print(origin, flush=True)
    for kind in CHECKED if "all" in args.kinds else args.kinds:
        with ThreadPoolExecutor(8) as pool:
            failed += jobs.run(jobs_of(kind, pool), args, origin, "eight_bits")
            pool.shutdown(cancel_futures=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
