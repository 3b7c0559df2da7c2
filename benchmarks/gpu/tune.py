"""Measures the best block of keys and number of stages for every shape on this card, and writes the table of tiles.

    python -m jattn bench --tune [--out FILE]
    python -m benchmarks.gpu.tune --chip sm_86    # the warp-level kernel on a Hopper card, to try the command

Every candidate that fits is checked against numpy float64 and timed. It replaces the choice of
`tile_policy.largest_tiles` only if it is at least 1 % faster. About three minutes. Each Hopper card has a table of its
own, as pallas_kernels/tuning/nvidia_h200.json; a card without one takes the H200's. On a card without wgmma the table
is that of the warp-level kernel (tile_policy_sm80.py) for the card's chip, pallas_kernels/tuning/sm_86.json; about ten
minutes.
"""

import argparse
import json
import pathlib
import sys
import tempfile
from typing import Any

from benchmarks import records
from benchmarks.gpu import cases, check
from jattn import device
from jattn.backends.gpu_kernel import config_reasons, version_reasons
from pallas_kernels.gpu import tile_policy, tile_policy_sm80
from pallas_kernels.gpu.config_sm80 import CHIPS
from pallas_kernels.tuning import table_path

DIMS = ((64, 64), (128, 128), (256, 256))
LENGTHS = {"few": ((4, 4096),) * 64, "narrow": ((1, 4096),) * 64, "long": ((4096, 4096),)}
WARP_LENGTHS = {"few": ((1, 4096),) * 64, "long": ((4096, 4096),)}
KINDS = {"bfloat16": ("few", "narrow", "long"), "float8_e4m3fn": ("narrow", "long")}
WARP_KINDS = {"bfloat16": ("few", "long"), "float8_e4m3fn": ("few", "long")}
MOST_OF_RULE = 0.99  # a candidate replaces the rule's choice below this share of its time


def shapes(kernel: "Hopper | Warps") -> list[tuple[cases.KernelCase, str]]:
    """(case, kind) of every shape that is tuned."""
    of_kind = kernel.lengths
    return [
        (cases.KernelCase(name=f"tune_{kind}", lengths=of_kind[kind], head_dim=d, v_head_dim=v, kv_dtype=dtype), kind)
        for dtype, of_dtype in kernel.kinds.items()
        for d, v in DIMS
        for kind in of_dtype
    ]


class Hopper:
    """block_kv and stages of the Hopper kernel."""

    kinds, lengths = KINDS, LENGTHS
    note = "block_kv and stages by measurement; gpu/tile_policy.py has a rule for other shapes"

    def __init__(self):
        self.path = table_path(device.card())

    def rule(self, case: cases.KernelCase) -> dict[str, int]:
        """The tiles for shapes that the table lacks."""
        config = check.config_of(case, **self.fields({}))
        return tile_policy.largest_tiles(tile_policy.TileRequest(config, rows=None, decided=frozenset()))

    def every(self, case: cases.KernelCase, kind: str) -> list[dict[str, int]]:
        """What is tried, of which the kernel may refuse some."""
        blocks = (128,) if kind == "narrow" else (64, 128)
        return [dict(block_kv=block, stages=stages) for block in blocks for stages in range(2, 7)]

    def fields(self, tiles: dict[str, int]) -> dict[str, Any]:
        """The config's fields for these tiles. The table is of one pipeline and of two warpgroups that compute: others
        have blocks and stages by a rule."""
        return tiles | dict(pipelines=1, computing=2)


class Warps:
    """Halves of a tile, stages and CTAs of a multiprocessor of the warp-level kernel, for one chip."""

    kinds, lengths = WARP_KINDS, WARP_LENGTHS
    note = "tile_halves, stages and ctas by measurement; gpu/tile_policy_sm80.py has a rule for other shapes"

    def __init__(self, chip: str):
        self.chip, self.path = chip, table_path(chip)
        self.processors = device.processors() or CHIPS[chip].processors

    def _config(self, case: cases.KernelCase, **fields):
        return check.config_of(case, chip=self.chip, processors=self.processors, **fields)

    def rule(self, case: cases.KernelCase) -> dict[str, int]:
        return tile_policy_sm80.largest_tiles(self._config(case))

    def every(self, case: cases.KernelCase, kind: str) -> list[dict[str, int]]:
        every = ((2, 2), (2, 1), (1, 2), (1, 1))
        layouts = [layout for layout in every if kind == "long" or layout[0] == 1]
        most = {
            (halves, ctas): tile_policy_sm80.stages_that_fit(self._config(case, tile_halves=halves), ctas)
            for halves, ctas in layouts
        }
        return [
            dict(tile_halves=halves, stages=stages, ctas=ctas)
            for (halves, ctas), count in most.items()
            for stages in range(1, count + 1)
        ]

    def fields(self, tiles: dict[str, int]) -> dict[str, Any]:
        own = dict(chip=self.chip, processors=self.processors, num_ctas=tiles["ctas"] * self.processors)
        return own | {name: tiles[name] for name in ("tile_halves", "stages")}


def candidates(kernel: Hopper | Warps, case: cases.KernelCase, kind: str) -> list[dict[str, int]]:
    """The rule's choice, then every other one that the kernel supports; empty if it refuses this shape or kind."""

    def refused(tiles: dict[str, int]) -> bool:
        config = check.config_of(case, **kernel.fields(tiles))
        return (kind == "narrow" and config.has_short_tiles) or bool(config_reasons(config))

    first = kernel.rule(case)
    every = [tiles for tiles in kernel.every(case, kind) if tiles != first and not refused(tiles)]
    return [] if refused(first) else [first, *every]


def tune(kernel: Hopper | Warps, case: cases.KernelCase, kind: str, report) -> dict:
    """The row of one shape."""
    args = argparse.Namespace(no_check=False, samples=4, time=True, iterations=8)
    timed = []
    for tiles in candidates(kernel, case, kind):
        report(tiles)
        row = check.run_case(case, args, **kernel.fields(tiles))
        if row["rel_err"] < 6e-3:
            timed.append((row["us"], tiles))
    if not timed:
        raise RuntimeError(f"{case.name}, D {case.head_dim}, {case.kv_dtype}: wrong numbers with every choice of tiles")
    first, best = timed[0], min(timed, key=lambda pair: pair[0])
    us, tiles = best if best[0] < MOST_OF_RULE * first[0] else first
    shape = dict(head_dim=case.head_dim, v_head_dim=case.v_head_dim, kv_dtype=case.kv_dtype, kind=kind)
    return shape | tiles | dict(us=round(us, 1), rule=first[1], rule_us=round(first[0], 1), tried=len(timed))


def check_place(chip: str, path: pathlib.Path) -> None:
    """ValueError or OSError before minutes of measuring: without a GPU, for a chip without a kernel, or for a file that
    cannot be kept."""
    if (here := device.detect()).platform != "gpu":
        raise ValueError(f"it needs a GPU; this process runs on {here.platform}")
    reasons = [] if chip in CHIPS else [f"chip {chip or 'unknown'}: wanted one of {', '.join(CHIPS)}"]
    if reasons := reasons or version_reasons(device.Chip("gpu", chip)):
        raise ValueError(f"there is no kernel to tune here: {'; '.join(reasons)}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    tempfile.TemporaryFile(dir=path.parent).close()


def write_table(path: pathlib.Path, table: dict[str, Any]) -> None:
    """The whole file or none of it: a broken one is refused where a kernel is chosen."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Tune, show how far it is, write the file; 1 if the kernel refused every shape."""
    parser = argparse.ArgumentParser(prog="python -m jattn bench --tune", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the file; None: the one in the package")
    parser.add_argument("--chip", choices=CHIPS, help="whose tiles of the warp-level kernel; None: the card's kernel's")
    args = parser.parse_args(argv)
    generation = args.chip or device.detect().generation
    check_place(generation, args.out or table_path(generation))
    kernel = Hopper() if args.chip is None and generation == "sm_90" else Warps(generation)
    todo, rows, path = shapes(kernel), [], args.out or kernel.path
    for number, (case, kind) in enumerate(todo, 1):
        what = f"[{number}/{len(todo)}] D {case.head_dim} {case.kv_dtype} {kind}"
        report = lambda tiles, what=what: print(f"{what}: {tiles}".ljust(90), end="\r", file=sys.stderr, flush=True)
        if not candidates(kernel, case, kind):
            print(f"{what}: refused")
            continue
        rows.append(tune(kernel, case, kind, report))
        print(rows[-1], flush=True)
        write_table(path, records.provenance() | dict(note=kernel.note, rows=rows))  # what is measured stays
    print(f"wrote {path}" if rows else "the kernel refused every shape: nothing was written")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
