"""Draws the roofline of a CPU: GFLOP/s reached in each case by its FLOP a byte of keys and values.

    PYTHONPATH=. python -m benchmarks.roofline        # writes docs/pictures/roofline_cpu.svg; needs jattn[plot]

Drawn from benchmarks/results/amd_zen5/attention.jsonl, rows by wall clock only. The slanted line is the highest read
bandwidth that the runs measured, the flat one the best prefill: no peak is taken from a data sheet.
"""

import argparse
import pathlib
import sys

from benchmarks import records

PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "pictures" / "roofline_cpu.svg"
COLOURS = {"cpu_native": "tab:blue", "vllm": "tab:orange", "sdpa": "tab:green", "naive": "tab:grey"}


def main(argv: list[str] | None = None) -> int:
    """Draw; 1 if there is nothing to draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=pathlib.Path, default=records.RESULTS / "amd_zen5" / "attention.jsonl")
    parser.add_argument("--out", type=pathlib.Path, default=PICTURE)
    args = parser.parse_args(argv)
    rows = drawable(records.read(args.rows))
    if not rows:
        print(f"no rows by wall clock in {args.rows}: run benchmarks.cpu --peers --slow --write first")
        return 1
    draw(rows, args.out)
    print(f"{len(rows)} rows drawn to {args.out}")
    return 0


def drawable(rows: list[dict]) -> list[dict]:
    """The newest row of each case and backend that was timed by wall clock."""
    return [row for row in records.newest(rows) if row.get("clock") == "wall" and "cost" not in row]


def point(row: dict) -> tuple[float, float]:
    """(FLOP a byte, GFLOP/s) of the best run."""
    return row["flop"] / row["bytes"], row["flop"] / row["best_ms"] / 1e6


def kinds_at(rows: list[dict]) -> dict[float, list[str]]:
    """The kinds of cases, such as 'dec f32', by their FLOP a byte; each prefill has its own."""
    found: dict[float, list[str]] = {}
    for row in rows:
        first, *middle, last = row["case"].split("_")
        kind = " ".join([first, *(middle[:1] if first == "pre" else ()), last])
        names = found.setdefault(point(row)[0], [])
        if kind not in names:
            names.append(kind)
    return found


def draw(rows: list[dict], out: pathlib.Path) -> None:
    """One point a case and backend, below the two limits."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "jattn"  # the same records give the same file
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for number, backend in enumerate(sorted({row["backend"] for row in rows}, key=list(COLOURS).index)):
        mine = [point(row) for row in rows if row["backend"] == backend]
        beside = 1.1 ** (1.5 - number)  # backends side by side: cases of one dtype lie at the same x
        axes.scatter([x * beside for x, _ in mine], [y for _, y in mine], s=22, label=backend, color=COLOURS[backend])
    for number, (x, kinds) in enumerate(sorted(kinds_at(rows).items())):
        low = min(point(row)[1] for row in rows if point(row)[0] == x)
        below = -16 - 12 * (number % 2)  # on one line the names would overlap
        axes.annotate("\n".join(kinds), (x, low), (0, below), textcoords="offset points", ha="center", fontsize=8)
    bandwidth = max(row["read_gb_s"] for row in rows)
    top = max(point(row)[1] for row in rows)
    left = min(point(row)[0] for row in rows) / 2
    axes.plot([left, top / bandwidth], [left * bandwidth, top], "k-", lw=1, label=f"reads, {bandwidth:.0f} GB/s")
    axes.plot([top / bandwidth, 2 * max(point(row)[0] for row in rows)], [top, top], "k--", lw=1, label="best prefill")
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte of keys and values", ylabel="GFLOP/s")
    axes.set_title(f"{rows[-1]['chip']}, {rows[-1]['date']}")
    axes.set_ylim(bottom=2, top=2 * top)
    axes.legend(loc="lower right")
    axes.grid(which="both", alpha=0.2)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
