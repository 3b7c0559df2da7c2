"""Draws the rates of the Hopper kernel by size of the batch, below the rates that the card itself reaches.

    python -m benchmarks.plot [--out docs/pictures/gpu_rates.svg]

Drawn from benchmarks/results/nvidia_h200/attention.jsonl: no GPU is needed, nothing is measured. A ceiling is a rate
that the same run measured: reading 4 GiB for decode, an 8192-cubed matrix product for prefill.
"""

import argparse
import pathlib
import sys

from benchmarks import records

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS = records.RESULTS / "nvidia_h200" / "attention.jsonl"
PANELS = (  # title, prefixes of cases, column of x, column of y, column of its ceiling, label of x, unit of y
    ("decode", ("dec_",), "bytes", "tb_s", "ceiling_read_tb_s", "bytes of keys, values, queries and output", "TB/s"),
    ("prefill", ("pre_", "chunk_"), "flop", "tflop_s", "ceiling_mm_tflop_s", "floating-point operations", "TFLOP/s"),
)


def drawable(rows: list[dict]) -> list[dict]:
    """Timed rows with the ceilings of their own run; plain cases only, no added feature."""
    return [row for row in rows if "us" in row and "ceiling_read_tb_s" in row and "+" not in row["case"]]


def draw(rows: list[dict], path: pathlib.Path) -> None:
    """Two panels: bandwidth of decode, rate of prefill; a dash above each point is the ceiling in its run."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "jattn", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, (title, names, size, rate, ceiling, across, unit) in zip(axes, PANELS, strict=True):
        chosen = [row for row in rows if row["case"].startswith(names)]
        sizes, rates = [row[size] for row in chosen], [row[rate] for row in chosen]
        tops = [row[ceiling] for row in chosen]
        axis.plot(sizes, tops, "_", color="tab:red", markersize=16, label=f"ceiling measured in the same run ({unit})")
        axis.plot(sizes, rates, "o", color="tab:blue", label="pallas_gpu")
        for number, row in enumerate(sorted(chosen, key=lambda row: row[rate])):
            side = dict(xytext=(5, -3), ha="left") if number % 2 else dict(xytext=(-5, -3), ha="right")
            axis.annotate(row["case"], (row[size], row[rate]), textcoords="offset points", fontsize=7, **side)
        axis.set(xscale="log", title=title, xlabel=across, ylabel=unit, ylim=(0, 1.1 * max(tops)))
        axis.margins(x=0.25)
        axis.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Write the picture and print its path."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs" / "pictures" / "gpu_rates.svg")
    args = parser.parse_args(argv)
    rows = drawable(records.read(RECORDS))
    draw(rows, args.out)
    print(f"{len(rows)} cases -> {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
