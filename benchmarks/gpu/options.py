"""Options of the GPU kernel: small batches beside numpy float64, then what an option costs.

    python -m benchmarks.gpu.options [--out DIR] [--seconds 40] [--only PARTS]

A timed row's `variant` is the option; "off" is the same batch without it. All programs are compiled and checked side by
side first.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks import records
from benchmarks.gpu import cases, check, jobs
from pallas_kernels.algebra.mask import MaskRule

CHECKED = ("mix_whole", "mix_spans", "mix_clamped", "mix_qq", "tree_qq", "dec_qq_fp8", "dec_spans_fp8")
BOUND, LSE_BOUND = 8e-3, 2e-3
BY_NAME = {case.name: case for case in cases.CHECKED + cases.TIMED}
TREES = cases.KernelCase(name="trees_64x16_of_4k", lengths=((16, 4096),) * 64)
TIMED = {  # (case, option) -> fields of the config
    (BY_NAME["pre_1x8k"], "off"): {},
    (BY_NAME["pre_1x8k"], "spans"): dict(mask=MaskRule(spans=True)),
    (BY_NAME["pre_1x8k"], "whole_units"): dict(whole_units=True, any_rows=True),
    (BY_NAME["dec_64x4k"], "off"): {},
    (BY_NAME["dec_64x4k"], "spans"): dict(mask=MaskRule(spans=True)),
    (BY_NAME["dec_64x4k"], "whole_units"): dict(whole_units=True, any_rows=True),
    (TREES, "off"): {},
    (TREES, "qq_bias"): dict(qq_bias=True),
}


def measure(case: cases.KernelCase, fields: dict, timed: bool) -> dict:
    """One row: errors against numpy float64, or microseconds."""
    case = dataclasses.replace(case, options=case.options + tuple(fields.items()))
    args = argparse.Namespace(no_check=timed, samples=8, time=timed, iterations=8)
    row = check.run_case(case, args)
    return row | dict(ok=timed or bool(row["rel_err"] < BOUND and row["lse_err"] < LSE_BOUND and row["same_bits"]))


def jobs_of(pool: ThreadPoolExecutor) -> Iterator[jobs.Job]:
    """The checks, most important first, then the times."""
    asked = [(dict(case=name, variant="checked"), BY_NAME[name], {}) for name in CHECKED]
    asked += [(dict(case=case.name, variant=f"{option} checked"), case, own) for (case, option), own in TIMED.items()]
    for names, found in [(names, pool.submit(measure, case, own, False)) for names, case, own in asked]:
        yield names, found.result
    for (case, option), own in TIMED.items():
        yield dict(case=case.name, variant=option), lambda c=case, o=own: measure(c, o, True)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    args = jobs.parser_of("options", __doc__, seconds=40).parse_args(argv)
    origin = records.provenance()
    print(origin, flush=True)
    with ThreadPoolExecutor(8) as pool:
        failed = jobs.run(jobs_of(pool), args, origin, "options")
        pool.shutdown(cancel_futures=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
