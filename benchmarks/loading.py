"""Seconds and memory of loading a Llama of 1.3 GB in bfloat16, and seconds of reading its file.

    PYTHONPATH=. python -m benchmarks.loading --write

Reading and loading take turns, each in a new process that has no memory to use again, with the file in the page cache;
the best of the rounds counts, because other programs use the machine. One thread reads: to new memory (numpy.fromfile),
or in parts of 16 MiB, always to the same memory. `cpu_seconds` is the time of all threads, which other programs disturb
less. Anonymous memory is what the process has besides mapped files.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from jattn import models
from jattn.models import checkpoint

CONFIG = dict(
    model_type="llama", vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=12,
    num_attention_heads=16, num_key_value_heads=4, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)  # fmt: skip
PART = 1 << 24
STATUS = pathlib.Path("/proc/self/status")


def write_folder(folder: pathlib.Path) -> None:
    """A folder with random weights."""
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = models.load_config(folder)
    table = models.families.FAMILIES["llama"].tensors(config)
    specs = models.weight_tree.weight_paths(models.weight_specs(config))
    numbers = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(jnp.bfloat16)
    tensors = {}
    for path, spec in specs.items():
        shape = spec.shape[::-1] if path.endswith("kernel") else spec.shape
        tensors[table[path].names[0]] = np.resize(numbers, shape)
    save_file(tensors, folder / checkpoint.SINGLE)


def anonymous_bytes() -> int:
    """Of this process, now."""
    found = re.search(r"RssAnon:\s*(\d+) kB", STATUS.read_text())
    assert found is not None, f"{STATUS} has no RssAnon"
    return int(found.group(1)) * 1024


def calls(folder: pathlib.Path) -> dict:
    """What is measured, by name."""
    file = folder / checkpoint.SINGLE
    return dict(
        read=lambda: np.fromfile(file, np.uint8),
        read_parts=lambda: read_parts(file),
        load=lambda: models.load(folder)[1],
    )


def read_parts(path: pathlib.Path) -> np.ndarray:
    """Read the whole file, part after part; returns the last one."""
    part = np.empty(PART, np.uint8)
    with path.open("rb", buffering=0) as file:
        while file.readinto(part.data):
            pass
    return part


def measured(what: str, folder: pathlib.Path) -> dict[str, float]:
    """Seconds, seconds of all threads, and the most bytes by which anonymous memory grew, read every 5 ms."""
    jax.block_until_ready(jax.device_put(np.zeros(1, jnp.bfloat16)))  # starts JAX
    call, before, seen, done = calls(folder)[what], anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(call())
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
    seen.append(anonymous_bytes())
    done.set()
    watcher.join()
    sizes = [x.nbytes for x in jax.tree.leaves(result)]
    return dict(
        seconds=seconds, cpu_seconds=cpu_seconds, anonymous_bytes=max(seen) - before, bytes=sum(sizes),
        largest=max(sizes),
    )  # fmt: skip


def in_new_process(what: str, folder: pathlib.Path) -> dict[str, float]:
    """`measured` there."""
    command = [sys.executable, "-m", "benchmarks.loading", "--one", what, str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "DIR"), help=argparse.SUPPRESS)
    records.add_options(parser)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measured(args.one[0], pathlib.Path(args.one[1]))))
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_folder(folder)
        rounds = [
            {what: in_new_process(what, folder) for what in ("read", "read_parts", "load")} for _ in range(args.rounds)
        ]
    best = lambda what, figure: min(each[what][figure] for each in rounds)
    row = dict(
        case="load_llama_1b3_bf16", rounds=args.rounds, weight_bytes=rounds[0]["load"]["bytes"],
        largest_weight_bytes=rounds[0]["load"]["largest"],
        seconds=best("load", "seconds"), read_seconds=best("read", "seconds"),
        ratio_to_read=best("load", "seconds") / best("read", "seconds"),
        read_parts_seconds=best("read_parts", "seconds"), cpu_seconds=best("load", "cpu_seconds"),
        read_cpu_seconds=best("read", "cpu_seconds"), read_parts_cpu_seconds=best("read_parts", "cpu_seconds"),
        peak_anonymous_bytes=max(each["load"]["anonymous_bytes"] for each in rounds),
    )  # fmt: skip
    for figure, value in row.items():
        print(f"{figure:24}{value if isinstance(value, (int, str)) else round(value, 3)!s:>24}")
    records.write([row | records.provenance()], "loading", records.folder_of(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
