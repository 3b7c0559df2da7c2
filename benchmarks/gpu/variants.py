"""Compares variants of the Hopper kernel in one run: each is checked, then timed beside the default.

    python -m benchmarks.gpu.variants [--write | --out DIR] [--seconds 240] [--only PARTS]

A variant is a case and the fields of GpuKernelConfig that differ from the default; docs/notebook/nvidia_h200.md has the
decisions that follow from these figures. A variant that fails is reported and the others go on; no variant is started
in the last 15 seconds.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks import records
from benchmarks.gpu import cases, check, jobs, packed
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.work_list import build_work_list

BY_NAME = {case.name: case for case in cases.TIMED}
FEW = ((1, 700), (2, 133), (1, 1), (2, 515), (0, 0), (1, 2000), (2, 129), (1, 4096), (1, 128), (0, 0))
DECODE = dict(flat_list=False)
BOUND = 6e-3  # relative error of a row: a few roundings of bfloat16
LSE_BOUND = 1e-4  # near 1e-6, and 1e-5 where tanh.approx serves a cap of 2


def few(name, **options):
    """A small decode batch with poisoned pages, padding requests and more padding tokens than one tile holds."""
    return cases.KernelCase(name=name, lengths=FEW, pad_tokens=70, pad_reqs=3, **options)


FEATURES = (("window", 300), ("soft_cap", 20.0), ("alibi", True), ("has_sinks", True))
ONE_A_REQUEST = few("few_padded")
SMALL = [
    (few("few_fp8", kv_dtype="float8_e4m3fn"), {}),
    (ONE_A_REQUEST, DECODE),
    (ONE_A_REQUEST, {}),
    (few("few_fp8_all", kv_dtype="float8_e4m3fn", options=FEATURES), {}),
    (few("few_int8_mqa16", kv_dtype="int8", num_heads=16, num_kv_heads=2, page=64), {}),
    (few("few_e5m2_d192", kv_dtype="float8_e5m2", head_dim=192, v_head_dim=128), dict(layout="NHD")),
    (few("few_f16_fp8", kv_dtype="float8_e4m3fn"), dict(dtype="float16")),
    (few("few_cap20", options=(("soft_cap", 20.0),)), {}),
    (cases.KernelCase(name="few_cap2_mixed", lengths=cases.MIX, pad_tokens=37, options=(("soft_cap", 2.0),)), {}),
    *(
        (cases.KernelCase(name="few_sets_mixed", lengths=cases.MIX, pad_tokens=37), dict(heads_together=n))
        for n in (1, 2)
    ),
]
TOKENS = dict(token_scales=True)
SMALL += [
    (few("few_tokens_fp8", kv_dtype="float8_e4m3fn"), TOKENS),
    (few("few_tokens_int8_all", kv_dtype="int8", page=64, options=FEATURES), TOKENS | dict(layout="NHD")),
    (few("few_tokens_e5m2_mqa16", kv_dtype="float8_e5m2", num_heads=16, num_kv_heads=2, page=256), TOKENS),
    (few("few_tokens_f16", kv_dtype="float8_e4m3fn"), TOKENS | dict(dtype="float16")),
    *(
        (
            cases.KernelCase(name=f"mix_tokens_{name}", lengths=cases.MIX, pad_tokens=37, pad_reqs=3, **case),
            TOKENS | options,
        )
        for name, case, options in (
            ("fp8", dict(kv_dtype="float8_e4m3fn"), {}),
            ("int8_gqa7", dict(kv_dtype="int8", num_heads=14, num_kv_heads=2, page=64), dict(layout="NHD")),
            ("all", dict(kv_dtype="float8_e4m3fn", options=FEATURES), {}),
            ("f16", dict(kv_dtype="float8_e5m2"), dict(dtype="float16")),
            ("d64", dict(kv_dtype="float8_e5m2", head_dim=64, v_head_dim=64, page=8), dict(block_kv=128)),
        )
    ),
]
TWO, INSIDE = dict(pipelines=2), dict(merges_inside=True)
F16 = dict(dtype="float16", kv_dtype="float16")
SMALL += [
    (few("few_padded"), TWO),
    (few("few_padded"), TWO | INSIDE),
    (few("few_padded"), INSIDE),
    (few("few_mqa16", num_heads=16, num_kv_heads=2, page=64), TWO),
    (few("few_mqa16", num_heads=16, num_kv_heads=2, page=64), TWO | INSIDE),
    (few("few_all", options=FEATURES), TWO),
    (few("few_fp8", kv_dtype="float8_e4m3fn"), TWO),
    (few("few_fp8", kv_dtype="float8_e4m3fn"), TWO | INSIDE),
    (few("few_fp8_all", kv_dtype="float8_e4m3fn", options=FEATURES), TWO | dict(layout="NHD")),
    (few("few_int8_mqa16", kv_dtype="int8", num_heads=16, num_kv_heads=2, page=64), TWO),
    (few("few_f16", page=128), TWO | F16),
    (few("few_d256", head_dim=256, v_head_dim=256), TWO | dict(narrow_rows=8)),
    (few("few_d192", head_dim=192, v_head_dim=128), TWO),
    (few("few_d64", head_dim=64, v_head_dim=64, page=8), TWO),
    (few("few_d112", head_dim=112, v_head_dim=112, page=48), TWO),
    *(
        (cases.KernelCase(name=f"mix_{name}", lengths=cases.MIX, pad_tokens=37, pad_reqs=3, **case), TWO)
        for name, case in (
            ("plain", {}),
            ("all", dict(options=FEATURES)),
            ("d64_window", dict(num_heads=64, head_dim=64, v_head_dim=64, options=(("window", 128),))),
            ("d96_mha", dict(num_heads=8, head_dim=96, v_head_dim=96, page=64)),
        )
    ),
]
FIRST, THREE = dict(weights_first=True), dict(computing=3, block_kv=64)
E4M3 = dict(kv_dtype="float8_e4m3fn")
SMALL += [
    (cases.KernelCase(name=f"mix_{name}", lengths=cases.MIX, pad_tokens=37, pad_reqs=3, **case), options)
    for name, case, options in (
        ("plain", {}, FIRST),
        ("all", dict(options=FEATURES), FIRST | dict(layout="NHD")),
        ("f16_gqa7", dict(num_heads=14, num_kv_heads=2, page=64), FIRST | F16),
        ("d192", dict(head_dim=192), FIRST),
        ("d64", dict(head_dim=64, v_head_dim=64), FIRST | dict(computing=3)),
        (
            "d64_gqa5",
            dict(head_dim=64, v_head_dim=64, num_heads=10, num_kv_heads=2, page=8),
            THREE | dict(layout="NHD"),
        ),
        ("d64_all", dict(head_dim=64, v_head_dim=64, options=FEATURES), THREE | FIRST),
        ("fp8", E4M3, THREE | dict(q_buffers=1)),
        ("int8_all", dict(kv_dtype="int8", page=64, options=FEATURES), THREE | dict(q_buffers=1)),
    )
]
PREFILLS = ("pre_1x32k", "chunk_2k_of_32k", "pre_4x4k", "pre_1x8k", "mixed_32d_2p")
TIMED = [(BY_NAME[name], dict(heads_together=n)) for name in PREFILLS for n in (0, 8, 1)]
EIGHT = (
    dataclasses.replace(BY_NAME["pre_1x8k"], name="pre_1x8k_fp8", kv_dtype="float8_e4m3fn"),
    BY_NAME["dec_16x32k_fp8"],
)
TIMED += [(case, tokens) for case in EIGHT for tokens in ({}, TOKENS)]


def measure(case, options, timed: bool, iterations: int) -> dict:
    """One row: errors against numpy float64 first, then microseconds; `ok` says whether to believe it."""
    args = argparse.Namespace(no_check=False, samples=12, time=timed, iterations=iterations)
    row = check.run_case(case, args, **options)
    row["ok"] = bool(row["rel_err"] < BOUND and row["lse_err"] < LSE_BOUND and row["same_bits"])
    return row


SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64, 66, 96, 128, 132, 192, 256, 257, 320, 384, 511, 512)


def batch_sizes(length: int = 1024) -> dict:
    """R-27: decodes of one length padded to 512 requests; the largest time over the line from 1 to 512 requests."""
    most, page = 512, 16
    case = cases.KernelCase(name="sweep", lengths=((1, length),) * most)
    config = check.config_of(case)
    q, k, v, table, starts, _ = check.make_inputs(case, config, poison=False)
    plan = jax.jit(lambda starts, seqs: build_work_list(starts, seqs, most, config))
    attend = jax.jit(lambda q, k, v, t, w: ragged_paged_attention(q, k, v, t, w, config))
    times = []
    for reqs in SIZES:
        seqs = jnp.where(jnp.arange(most) < reqs, length, 0)
        work = plan(jnp.minimum(starts, reqs), seqs)
        attend(q, k, v, table, work)[0].block_until_ready()
        _, runs = profiler.measure(attend, aggregate=False, iterations=3)(q, k, v, table, work)
        times.append(float(np.median([sum(t for _, t in one) for one in runs]) * 1e3))
    sizes, us = np.array(SIZES), np.array(times)
    slope = (us[-1] - us[0]) / (sizes[-1] - sizes[0])
    steps = us[1:] / np.maximum(us[:-1], us[0]) / ((us[0] + slope * sizes[1:]) / (us[0] + slope * sizes[:-1]))
    row = dict(case=f"sweep_1_to_{most}_x{length}", us=dict(zip(SIZES, times, strict=True)), page=page)
    return row | dict(largest_step_over_line=float(steps.max()), ok=bool(steps.max() < 1.3))


def jobs_of(iterations: int) -> Iterator[jobs.Job]:
    """The jobs, most important first."""
    name = lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default"
    for timed, several in ((False, SMALL), (True, TIMED)):
        for case, options in several:
            names = dict(case=case.name, variant=name(options))
            yield names, lambda c=case, o=options, t=timed: measure(c, o, t, iterations)
    for name_of_case in packed.CASES:
        yield dict(case=f"packed_{name_of_case}"), lambda n=name_of_case: packed.run(n, iterations)
    yield dict(case="batch_sizes"), batch_sizes


def main(argv: list[str] | None = None) -> int:
    """Run what the budget allows; 1 if a result was wrong."""
    parser = jobs.parser_of("variants", __doc__, seconds=240)
    parser.add_argument("--iterations", type=int, default=8)
    args = parser.parse_args(argv)
    origin = records.provenance()
    print(origin, flush=True)
    return int(jobs.run(jobs_of(args.iterations), args, origin, "variants") > 0)


if __name__ == "__main__":
    sys.exit(main())
