"""A compilation in a process of its own, because libtpu reads its environment and its flags once."""

import json
import os
import subprocess
import sys
import tempfile

from benchmarks.tpu import aot, llo


def row(module: str, *arguments: str) -> dict:
    """The row printed by `python -m module --one ARGUMENTS`; only `error` if it fails."""
    return _run(module, arguments, {})


def row_of_dump(module: str, *arguments: str) -> dict:
    """The same where libtpu dumps its listings to a folder, which is the last argument."""
    with tempfile.TemporaryDirectory() as folder:
        return _run(module, (*arguments, folder), dict(LIBTPU_INIT_ARGS=llo.FLAGS.format(folder)))


def _run(module: str, arguments: tuple[str, ...], flags: dict[str, str]) -> dict:
    command = [sys.executable, "-m", module, "--one", *arguments]
    done = subprocess.run(command, env=os.environ | aot.environment() | flags, capture_output=True, text=True)
    if done.returncode:
        return dict(error=(done.stderr.strip() or "no message").splitlines()[-1][:300])
    return json.loads(done.stdout.splitlines()[-1])
