"""`jattn doctor`: what JAX sees, which backends work here and why not, and whether they compute what they should."""

import argparse
import importlib.metadata
import platform

import jax

import jattn
from jattn import demo as self_check
from jattn.cli import screen
from jattn.device import devices
from jattn.engine import sizing

EXTRAS = dict(models=("safetensors", "tokenizers", "jinja2", "rich"), serve=("starlette", "uvicorn"), train=("optax",))


def add(commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="what works here, and why the rest does not")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 where every backend that runs here agrees with numpy."""
    rows = [
        ("jattn", f"{jattn.__version__}, Python {platform.python_version()}, {platform.platform()}"),
        ("jax", f"{jax.__version__}, jaxlib {_version('jaxlib')}, numpy {_version('numpy')}"),
        *((f"device {device.id}", f"{device.platform}, {device.device_kind}") for device in devices()),
        ("memory a cache may take", f"{sizing.free_bytes() / 2**30:.1f} GiB"),
        *((f"extra {extra}", _extra(extra, packages)) for extra, packages in EXTRAS.items()),
        ("native CPU library", _native()),
    ]
    screen.table(("", ""), rows, plain="\n".join(f"{name}: {value}" for name, value in rows))
    print()
    return self_check.run()


def _extra(extra: str, packages: tuple[str, ...]) -> str:
    found = ", ".join(f"{name} {_version(name) or 'missing'}" for name in packages)
    return found if all(map(_version, packages)) else f"{found}   (pip install 'jattn[{extra}]')"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native() -> str:
    from pallas_kernels.cpu.native import library

    status = library.status()
    return f"works, with {', '.join(status.isas)}" if status.available else status.reason
