"""Execute notebooks from top to bottom and say for each: passed or failed, where, and why.

    python notebooks/run.py                 every notebook beside this file
    python notebooks/run.py 01*.ipynb       these
    python notebooks/run.py --write         and keep the outputs in the files

Each runs in a fresh kernel of this Python, with this folder as its working directory. A cell that raises
fails it: a notebook ends in an equality with the dense reference, so running it is testing it.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HERE = Path(__file__).resolve().parent
CELL_SECONDS = 300


def execute(path: Path, write: bool, sockets: Path) -> str | None:
    """Run one notebook; None, or the error as text."""
    book = nbformat.read(path, as_version=4)
    kernel = AsyncKernelManager(kernel_name="python3")
    if os.name == "posix":  # sockets in a folder of our own: nobody else on the machine can talk to the kernel
        kernel.transport, kernel.ip = "ipc", str(sockets / "kernel")
    place = {"metadata": {"path": str(path.parent)}}
    client = NotebookClient(book, km=kernel, timeout=CELL_SECONDS, resources=place)
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        return str(error)
    if write:
        for cell in book.cells:
            cell.metadata.pop("execution", None)  # wall-clock stamps: a diff on every run
        nbformat.write(book, path)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute notebooks.")
    parser.add_argument("paths", nargs="*", type=Path, help="notebooks (default: all beside this file)")
    parser.add_argument("--write", action="store_true", help="keep the outputs in the files")
    args = parser.parse_args()

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    paths = args.paths or sorted(HERE.glob("*.ipynb"))
    if not paths:
        parser.error(f"there is no notebook beside {Path(__file__).name}")
    failed = 0
    for path in paths:
        begin = time.perf_counter()
        print(f"{path.name:<40} ", end="", flush=True)
        with tempfile.TemporaryDirectory() as sockets:
            error = execute(path, args.write, Path(sockets))
        failed += error is not None
        print(f"{'failed' if error else 'passed'} {time.perf_counter() - begin:6.1f} s", flush=True)
        if error:
            print(error, file=sys.stderr)
    print(f"{len(paths) - failed} of {len(paths)} notebooks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
