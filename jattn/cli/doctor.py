"""`jattn doctor`: what JAX sees, which backends work here and why not, and whether they compute what they should."""

import argparse
import importlib.metadata
import platform

import jax

import jattn
from jattn import demo as self_check
from jattn.engine import sizing

EXTRAS = dict(models=("safetensors", "tokenizers", "jinja2", "rich"), serve=("starlette", "uvicorn"), train=("optax",))


def add(commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("doctor", help="what works here, and why the rest does not")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 where every backend that runs here agrees with numpy."""
    print(f"jattn {jattn.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"jax {jax.__version__}, jaxlib {importlib.metadata.version('jaxlib')}, numpy {_version('numpy')}")
    for device in jax.devices():
        print(f"device {device.id}: {device.platform}, {device.device_kind}")
    print(f"memory a cache may take: {sizing.free_bytes() / 2**30:.1f} GiB")
    for extra, packages in EXTRAS.items():
        found = [f"{name} {_version(name) or 'missing'}" for name in packages]
        hint = "" if all(map(_version, packages)) else f"   (pip install 'jattn[{extra}]')"
        print(f"extra {extra}: {', '.join(found)}{hint}")
    print(f"native CPU library: {_native()}\n")
    return self_check.run()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native() -> str:
    from pallas_kernels.cpu.native import library

    status = library.status()
    return f"works, with {', '.join(status.isas)}" if status.available else status.reason
