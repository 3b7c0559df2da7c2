"""What `make` runs before a target that needs Python packages: makes the environment, installs the checkout into it.

A line for each stage: its number, what it does, how long it usually takes and, at its end, how long it took. The output
of a command is shown only if the command fails, and then in full. Uses the standard library alone.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NO_VENV = "Python's venv module does not work here. On Debian and Ubuntu: apt-get install python3-venv"
NO_INSTALL = """the packages could not be installed; pip's messages are above. Usual causes:
  no network, or a proxy: set PIP_INDEX_URL or HTTPS_PROXY as pip's documentation says
  no version for this Python: name another, for example `make {target} PYTHON=python3.12 VENV=.venv-312`
  a full disk: the packages need about 1 GB
Then run `make {target}` again."""


def main() -> int:
    """0 when the environment is ready; else the exit code of the command that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--extras", required=True, help="extras of pyproject.toml, separated by commas")
    parser.add_argument("--packages", required=True, help="the packages in words, and the usual time")
    parser.add_argument("--target", required=True, help="the target of make, which is the last stage and make runs")
    parser.add_argument("--about", default="", help="what the target will do")
    parser.add_argument("pins", nargs="*", help="requirements of pip beside the checkout, such as jax==0.11.2")
    args = parser.parse_args()

    python = args.venv / "bin" / "python"
    stages = []
    if not _works(python):  # absent, half made, or moved
        make = [sys.executable, "-m", "venv", "--clear", str(args.venv)]
        stages.append((f"make {args.venv} with Python {platform.python_version()} (about 5 s)", make, NO_VENV))
    # Without --no-compile pip writes bytecode for every module, which takes as long as the rest of the installation;
    # most modules are never imported.
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--no-compile", "--prefer-binary"]
    pip += ["--progress-bar", "off", "--editable", f".[{args.extras}]", *args.pins]
    stages.append((f"install {args.packages}", pip, NO_INSTALL.format(target=args.target)))
    count = len(stages) + 1
    for number, (what, command, way_out) in enumerate(stages, start=1):
        if code := _run(f"[{number}/{count}] {what}", command, way_out):
            return code
    about = f" ({args.about})" if args.about else ""
    print(f"[{count}/{count}] make {args.target}{about}\n", flush=True)
    return 0


def _works(python: Path) -> bool:
    """Is there a Python with pip?"""
    try:
        return subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(title: str, command: list[str], way_out: str) -> int:
    """Run a command behind its title, with ticking seconds on a terminal; its exit code."""
    begin = time.monotonic()
    print(title, end=" ... ", flush=True)
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
        while (code := _wait(process)) is None:
            if sys.stdout.isatty():
                print(f"\r{title} ... {time.monotonic() - begin:.0f} s", end="", flush=True)
        print(f"\r{title} ... " if sys.stdout.isatty() else "", end="")
        print(f"{time.monotonic() - begin:.0f} s" if code == 0 else "failed", flush=True)
        if code:
            said.seek(0)
            print(f"\n{said.read().decode(errors='replace')}\njattn: {way_out}", file=sys.stderr, flush=True)
    return code


def _wait(process: subprocess.Popen) -> int | None:
    """The exit code, or None after a second."""
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("\njattn: interrupted; the next make starts this stage again")
