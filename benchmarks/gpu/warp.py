"""Checks and times the warp-level kernel, beside the Hopper kernel and FlashAttention-2 on the same card.

    python -m benchmarks.gpu.warp [--chip sm_86] [--write | --out DIR] [--seconds 400] [--only PARTS]

The numbers of each case are checked against numpy float64 before it is timed. The last line is the card's row for the
table of docs/performance/nvidia_attention.md. --chip: the chip whose tile sizes are taken, by default the card's own; a
Hopper card can run those of any chip. Nothing begins in the last 15 of the seconds. FlashAttention-2 is torch's, and is
left out where torch is not installed.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import records
from benchmarks.gpu import cases, check, cupti, flash2, jobs
from benchmarks.gpu.variants import BOUND, LSE_BOUND, few
from jattn import device
from jattn.backends.gpu_kernel import version_reasons
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.config_sm80 import CHIPS

PEER_CASES = (
    "pre_1x8k", "pre_1x8k_d64", "pre_1x8k_d256", "dec_64x4k", "mixed_32d_2p", "pre_1x8k+window1024",
    "dec_64x32k+window1024",
)  # fmt: skip
"""Cases that FlashAttention-2 computes, too."""
TOKENS = dict(token_scales=True)
OPTIONS = (("mask", MaskRule(left=200, chunk=512)), ("soft_cap", 15.0), ("alibi", True), ("has_sinks", True))
MIXED = dict(lengths=cases.MIX, pad_tokens=37, pad_reqs=3)
CHECKED = [
    few("few"),
    few("few_d256", head_dim=256, v_head_dim=256, page=64),
    cases.KernelCase(name="mix", **MIXED),
    cases.KernelCase(name="mix_all", **MIXED, num_heads=24, options=(*OPTIONS, ("layout", "NHD"))),
    cases.KernelCase(name="mix_gqa7", **MIXED, num_heads=14, num_kv_heads=2, page=64),
    cases.KernelCase(name="mix_d192_v128", **MIXED, head_dim=192),
    cases.KernelCase(name="mix_d192", **MIXED, head_dim=192, v_head_dim=192),
    cases.KernelCase(name="mix_d256", **MIXED, head_dim=256, v_head_dim=256),
    cases.KernelCase(name="mix_d64", **MIXED, head_dim=64, v_head_dim=64),
]
SOFTWARE = dict(chip="sm_80")  # float8 without the instruction of sm_89, on any card
CHECKED_8BIT = [
    (cases.KernelCase(name="mix_fp8_all", **MIXED, kv_dtype="float8_e4m3fn", options=OPTIONS), {}),
    (few("few_fp8", kv_dtype="float8_e4m3fn"), SOFTWARE | TOKENS),
    (few("few_int8_mqa16", kv_dtype="int8", num_heads=16, num_kv_heads=2, page=64), dict(layout="NHD") | TOKENS),
    (cases.KernelCase(name="mix_e5m2_f16", **MIXED, kv_dtype="float8_e5m2"), TOKENS | dict(dtype="float16")),
    (cases.KernelCase(name="mix_int8_d192_v128", **MIXED, kv_dtype="int8", head_dim=192), {}),
    (cases.KernelCase(name="mix_fp8_d256", **MIXED, kv_dtype="float8_e4m3fn", head_dim=256, v_head_dim=256), SOFTWARE),
]
BESIDE_HOPPER = ("dec_16x32k_fp8", "mixed_32d_2p")
"""Cases that a Hopper card also computes by the Hopper kernel."""
TABLE = (
    "dec_64x4k", "dec_ragged64", "dec_64x32k+window1024", "dec_16x32k_fp8", "pre_1x8k", "pre_1x8k_d64",
    "pre_1x8k_d256", "pre_1x8k+window1024", "mixed_32d_2p",
)  # fmt: skip
"""Cases of the table in docs/performance/nvidia_attention.md, a column each."""
SM_80 = dict(chip="sm_80")
Timed = tuple[str, dict[str, Any]]
TIMED: tuple[list[Timed], ...] = (
    [
        ("pre_1x8k", {}),
        ("dec_64x4k", {}),
        ("pre_1x8k", dict(tile_halves=2, stages=2, ctas=1)),
        ("pre_1x8k_d64", {}),
        ("pre_1x8k", SM_80),
        ("pre_1x8k_d64", SM_80),
        ("pre_1x8k_d256", {}),
        ("mixed_32d_2p", {}),
        ("pre_1x8k+window1024", {}),
    ],
    [
        ("pre_1x8k_d256", SM_80),
        ("dec_64x4k", SM_80),
        ("dec_16x32k_fp8", {}),
        ("pre_1x8k_fp8", {}),
        ("pre_1x8k_d64", dict(tile_halves=2, stages=3, ctas=1)),
        ("pre_1x8k_fp8", SM_80),
        ("pre_1x8k_fp8", SM_80 | dict(tile_halves=1)),
        ("pre_1x8k", dict(lazy_rescale=False)),
    ],
    [
        ("dec_16x32k_fp8_p64", {}),
        ("dec_64x32k+window1024", {}),
        ("pre_4x4k", {}),
        ("dec_16x4k", {}),
        ("dec_ragged64", {}),
    ],
)
"""(case, options) that are timed, in three rounds: the most important first, since time may run out. ctas: of a
multiprocessor."""


def case_of(name: str) -> cases.KernelCase:
    """The case of this name; `_fp8` at its end changes the cache."""
    plain = name.removesuffix("_fp8") if name.startswith("pre_") else name
    found = flash2.case_of(plain)
    return found if plain == name else dataclasses.replace(found, name=name, kv_dtype="float8_e4m3fn")


def measure(case, options: dict, timed: bool, args: argparse.Namespace) -> dict:
    """One row: errors against numpy float64, then microseconds if timed; `ok` if the numbers are right."""
    kind = dict(no_check=False, samples=args.samples, time=timed, iterations=args.iterations)
    row = check.run_case(case, argparse.Namespace(**kind), **options)
    row = {
        name: value for name, value in row.items() if name not in ("chip", "processors")
    }  # the tiles', not the card's
    row["ok"] = bool(row["rel_err"] < BOUND and row["lse_err"] < LSE_BOUND and row["same_bits"])
    return row


def read_rate() -> dict:
    """TB/s of a kernel that only reads."""
    x = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.float32)
    with cupti.alone():
        us, _ = cupti.micros(jax.jit(jnp.sum), x, iterations=5, pick=min)
    return dict(us=us, tb_s=x.nbytes / us / 1e6, ok=True)


def jobs_of(chip: str, peers: list[dict], args: argparse.Namespace) -> Iterator[jobs.Job]:
    """The jobs, most important first."""
    processors = device.processors() or CHIPS[chip].processors
    own = dict(chip=chip, processors=processors)
    on_hopper = device.detect().generation == "sm_90"
    yield dict(case="read_4g"), read_rate
    for row in peers:
        case = next((case_of(name) for name in PEER_CASES if name == row["case"]), None)
        rate = dict(tflop_s=case.flops() / row["us"] / 1e6) if case and "us" in row else {}
        yield dict(case=row["case"], variant="flash2"), lambda r=row | rate: dict(ok="us" in r) | r
    label = lambda options: ",".join(f"{k}={v}" for k, v in options.items()) or "default"
    of_16_bits = [(case, {}) for case in CHECKED]
    checks = (CHECKED_8BIT[:1], CHECKED_8BIT[1:3] + of_16_bits[:3], CHECKED_8BIT[3:] + of_16_bits[3:])
    for checked, timed in zip(checks, TIMED, strict=True):
        for case, options in checked:
            yield (
                dict(case=case.name, variant=label(options)),
                lambda c=case, o=options: measure(c, own | o, False, args),
            )
        for name, options in timed:
            case = case_of(name)
            tiles = options | dict(num_ctas=options["ctas"] * processors) if "ctas" in options else dict(options)
            tiles.pop("ctas", None)
            yield dict(case=name, variant=label(options)), lambda c=case, o=tiles: measure(c, own | o, True, args)
            if on_hopper and not options and name in BESIDE_HOPPER:
                yield dict(case=name, variant="hopper"), lambda c=case: measure(c, {}, True, args)


def table_row(card: str, rows: list[dict]) -> str:
    """Microseconds of each case of TABLE; of decode, the share of the read rate; FlashAttention-2's time over ours."""
    found = {(row["case"], row.get("variant")): row for row in rows if row["ok"] and "us" in row}
    read, cells = found.get(("read_4g", None)), []
    for case in TABLE:
        own, peer = found.get((case, "default")), found.get((case, "flash2"))
        parts = [f"{own['us']:.0f}"] if own else []
        if own and read and case.startswith("dec_"):
            parts.append(f"{own['tb_s'] / read['tb_s']:.0%}".replace("%", " %"))
        if own and peer:
            parts.append(f"x{peer['us'] / own['us']:.2f}")
        cells.append(", ".join(parts))
    return f"| {' | '.join((card, *cells))} |"


def _noting(todo: Iterator[jobs.Job], rows: list[dict]) -> Iterator[jobs.Job]:
    """The same jobs; what they return is added to `rows`."""

    def noted(names, work):
        row = work()
        rows.append(names | row)
        return row

    for names, work in todo:
        yield names, functools.partial(noted, names, work)


def main(argv: list[str] | None = None) -> int:
    """Run what the budget allows; 1 if a result was wrong."""
    parser = jobs.parser_of("warp", __doc__, seconds=400)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--samples", type=int, default=12, help="rows of a batch that are compared with float64")
    parser.add_argument("--chip", choices=CHIPS, help="whose tiles; None: the card's")
    args, here = parser.parse_args(argv), device.detect()
    chip = args.chip or here.generation
    if here.platform != "gpu":
        parser.error(f"it needs a GPU; this process runs on {here.platform}")
    if chip not in CHIPS:
        parser.error(f"no kernel for {chip or 'this GPU'}; --chip takes one of {', '.join(CHIPS)}")
    if reasons := version_reasons(device.Chip("gpu", chip)):
        parser.error("; ".join(reasons))
    wanted = [name for name in PEER_CASES if jobs.is_wanted(f"{name} flash2", args)]
    peers = flash2.measure(wanted) if wanted else []
    origin = records.provenance()
    print(origin, chip, flush=True)
    rows: list[dict] = []
    wrong = jobs.run(_noting(jobs_of(chip, peers, args), rows), args, origin | dict(tiles_of=chip), "warp")
    print(table_row(f"{origin['chip']}, tiles of {chip}", rows), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
