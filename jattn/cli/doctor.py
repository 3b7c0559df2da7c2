"""`jattn doctor`: what JAX finds, which backends work here or why not, and whether their results are correct."""

import argparse
import importlib.metadata
import platform

import jax

import jattn
from jattn import compile_cache
from jattn import demo as self_check
from jattn.cli import screen
from jattn.cli.command import add_command
from jattn.device import detect, devices, keeps_registers
from jattn.engine import sizing

EXTRAS = dict(models=("safetensors", "tokenizers", "jinja2", "rich"), serve=("starlette", "uvicorn"), train=("optax",))


def add(commands) -> None:
    """Add the command to the parser."""
    help = "which devices and backends work here, and why the others do not"
    parser = add_command(commands, "doctor", help, ["jattn doctor"])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if every backend that runs here agrees with numpy."""
    rows = [
        ("jattn", f"{jattn.__version__}, Python {platform.python_version()}, {platform.platform()}"),
        ("jax", f"{jax.__version__}, jaxlib {_version('jaxlib')}, numpy {_version('numpy')}"),
        *((f"device {device.id}", f"{device.platform}, {device.device_kind}") for device in devices()),
        ("memory a cache may take", f"{sizing.free_bytes() / 2**30:.1f} GiB"),
        *((f"extra {extra}", _extra(extra, packages)) for extra, packages in EXTRAS.items()),
        ("native CPU library", _native()),
        ("compiled programs", _programs()),
        *((("GPU kernels", _gpu_kernels()),) if detect().generation == "sm_90" else ()),
    ]
    screen.table(("", ""), rows, plain="\n".join(f"{name}: {value}" for name, value in rows))
    print()
    wrong = self_check.run()
    print(_verdict(wrong))
    return wrong


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
    if not status.available:
        return status.reason
    origin = "prebuilt, from the package" if status.prebuilt else "compiled on this machine"
    return f"{origin}, runs {', '.join(status.isas)} here: {status.path}"


def _gpu_kernels() -> str:
    if keeps_registers():
        return "compiled with the registers that they ask for"
    return (
        f"JAX {jax.__version__} compiles them by nvJitLink, which ignores setmaxnreg: prompts take 1.1 times as long, "
        "2 times with heads above 192 or an 8-bit cache, decodes as long; pip install 'jattn[hopper]' takes a JAX that "
        "compiles by ptxas"
    )


def _programs() -> str:
    found = compile_cache.status()
    if found.reason:
        return f"not kept by jattn: {found.reason}"
    return f"{found.programs} of {found.bytes / 2**20:.1f} MB in {found.folder} (to empty it, remove that folder)"


def _verdict(wrong: int) -> str:
    """Do the native kernels work? wrong: the result of the check, which runs them if JAX computes on a CPU."""
    from pallas_kernels.cpu.native import library

    status = library.status()
    if not status.available:
        return f"native CPU kernels: not available, {status.reason}"
    if jax.default_backend() != "cpu":
        return f"native CPU kernels: not used and not checked, JAX computes on {jax.default_backend()}"
    if wrong:
        return "native CPU kernels: loaded; the table above shows whether their results are correct"
    origin = "prebuilt" if status.prebuilt else "compiled on this machine"
    return f"native CPU kernels: they work ({origin}, instruction set {status.isas[0]}, checked against numpy)"
