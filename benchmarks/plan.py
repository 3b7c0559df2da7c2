"""Host time of planning one step: the batch metadata and the work list, in microseconds.

python -m benchmarks.plan --reqs 256 --write
"""

import argparse
import sys

import numpy as np

import jattn
from benchmarks import records, timing


def main(argv: list[str] | None = None) -> int:
    """Print best and median of each part, for a decode step and for a step of short prompts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__.splitlines()[0])
    parser.add_argument("--reqs", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=200)
    records.add_options(parser)
    args = parser.parse_args(argv)
    spec = jattn.AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128)
    table = np.arange(args.reqs * 256, dtype=np.int32).reshape(args.reqs, 256)
    lengths = np.random.default_rng(0).integers(64, 4000, args.reqs).astype(np.int32)
    rows = []
    for step, query in (("decode", 1), ("prefill_32", 32)):
        queries = np.full(args.reqs, query, np.int32)
        meta = jattn.CommonAttentionMetadata.from_lengths(queries, lengths, table, 16)
        parts = {
            "from_lengths": lambda q=queries: jattn.CommonAttentionMetadata.from_lengths(q, lengths, table, 16),
            "work_list": lambda m=meta: jattn.get_scheduler_metadata(m, spec, num_workers=64),
        }
        for name, times in timing.in_turn(parts, args.rounds).items():
            print(f"{step:10} {name:14} best {times.best * 1e6:6.0f} us   median {times.median * 1e6:6.0f} us")
            rows.append(
                {"case": f"plan_{step}_{args.reqs}_{name}", "us": times.median * 1e6, "best_us": times.best * 1e6}
                | records.provenance()
            )
    records.write(rows, "plan", records.folder_of(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
