"""The key of a compiled dispatch: a hash of everything that its machine code depends on.

A program with a known key is neither traced nor lowered, so the key cannot have the program itself, as that of JAX's
compilation cache has. It has jattn's source code and all that a trace reads: the model, the form and place of every
argument, the versions, the device, the settings of JAX and of XLA. What is not in the lists of this file has no key.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import pallas_kernels
from jattn import device
from jattn.backends import registry
from pallas_kernels.cpu.native import library

FORMAT = 2
"""Of the files in which programs are kept."""

SOURCES = (".py", ".json", ".cc", ".h")
"""The files of jattn and pallas_kernels that a program may depend on."""

ABOVE = ("__main__.py", "cli", "serve", "demo", "demo.py", "embedded")
"""The packages and modules above the engine, which it cannot import."""

CODE = ("jattn", "pallas_kernels", "jax", "jaxlib", "numpy", "ml_dtypes", "builtins")
"""Packages whose code is in the key: the first two by their files, the others by their versions."""

PACKAGES = ("jax", "nvidia_", "libtpu", "numpy", "ml_dtypes")
"""Beginnings of the names of installed packages whose versions are in the key."""

VARIABLES = ("XLA_", "TF_", "JAX_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_", "MOSAIC_", "JATTN_NATIVE")
"""Beginnings of the names of environment variables that are in the key."""

PATHS = frozenset({"JAX_COMPILATION_CACHE_DIR", "jax_compilation_cache_dir"})
"""Settings that say where programs are kept, not what they are."""

_IMPORTED_AT = time.time()


class NoKey(Exception):
    """Why a program has no key, and so is not kept."""


def key_of(model: Any, args: tuple, options: dict[str, Any]) -> str:
    """The key of dispatch(model, *args), compiled with these options; NoKey if something cannot be described."""
    leaves, structure = jax.tree.flatten(args)
    described = FORMAT, _process(), plain(model), plain(structure), [_form(leaf) for leaf in leaves], plain(options)
    return hashlib.sha256(repr(described).encode()).hexdigest()


def plain(value: Any) -> Any:
    """The value in tuples of numbers and strings, which differ where values differ; NoKey for an unknown kind."""
    for kinds, describe in _KINDS:
        if isinstance(value, kinds):
            return type(value).__name__, describe(value)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return _named(type(value)), tuple((name, plain(getattr(value, name))) for name in names)
    raise NoKey(f"a {type(value).__name__} is not described in a key")


def _named(value: Any) -> str:
    """'module:name' of a class or function of one of the packages CODE."""
    if value is type(None):  # builtins has no name for it
        return "None"
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    found = importlib.import_module(module) if module.split(".")[0] in CODE else None
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is not value:
        raise NoKey(f"{module}:{name} is not code of {', '.join(CODE)}")
    return f"{module}:{name}"


def _tree(structure: Any) -> Any:
    """A PyTreeDef: the kind of each node and what it holds besides its children."""
    node = structure.node_data()
    kind = "leaf" if node is None else (_named(node[0]), plain(node[1]))
    return structure.num_leaves, kind, tuple(map(_tree, structure.children()))


def _array(value: np.ndarray) -> Any:
    if value.dtype.hasobject:
        raise NoKey("an array of Python objects")
    return value.dtype.name, value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()


_KINDS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (enum.Enum, lambda value: (_named(type(value)), value.name)),
    ((type(None), bool, int, float, str, bytes), repr),
    (type(jax.tree.structure(0)), _tree),
    ((tuple, list), lambda value: tuple(map(plain, value))),
    (dict, lambda value: tuple((plain(key), plain(each)) for key, each in value.items())),
    ((set, frozenset), lambda value: tuple(sorted(repr(plain(each)) for each in value))),
    (np.dtype, lambda value: value.name),
    ((np.ndarray, np.generic), lambda value: _array(np.asarray(value))),
    (functools.partial, lambda value: (plain(value.func), plain(value.args), plain(value.keywords))),
    ((type, type(plain)), _named),
)
"""Kinds of values -> their descriptions. The first kind that fits is used: a StrEnum is a str too."""


def _form(leaf: Any) -> Any:
    """What a program is compiled for: an argument's shape, dtype and place."""
    if not isinstance(leaf, jax.Array):
        return np.shape(leaf), np.asarray(leaf).dtype.name
    place = leaf.sharding
    if not isinstance(place, SingleDeviceSharding):
        raise NoKey("programs for several devices are not kept")
    (where,) = place.device_set
    layout = str(leaf.format.layout)  # pyright: ignore[reportAttributeAccessIssue]
    return leaf.shape, leaf.dtype.name, leaf.weak_type, leaf.committed, where.id, place.memory_kind, layout


def _process() -> Any:
    """What all programs of this process depend on."""
    if jax.process_count() != 1:
        raise NoKey("programs for several processes are not kept")
    if unknown := [entry for _, entry in registry.entries() if not str(entry).startswith("jattn.")]:
        raise NoKey(f"a backend that is not jattn's is registered: {unknown[0]}")
    settings = tuple((name, str(jax.config.values[name])) for name in _setting_names())
    return sources(), _machine(), registry.entries(), settings


@functools.cache
def _setting_names() -> tuple[str, ...]:
    """JAX's settings, as they were before the first trace: tracing imports modules that register more."""
    return tuple(sorted(name for name in jax.config.values if name not in PATHS))


@functools.cache
def _machine() -> Any:
    """Versions, devices, processors and the environment."""
    client = jax.devices()[0].client
    devices = [(d.platform, d.device_kind, d.id) for d in jax.devices()]
    cores = os.cpu_count(), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    native = library.status() if device.detect().platform == "cpu" else library.LibraryStatus()
    native = dataclasses.replace(native, path=os.path.basename(native.path))  # the name has a hash of the content
    python = sys.version, platform.machine()
    registers = device.detect().platform == "gpu" and device.keeps_registers()  # by a library of no package, too
    chip = client.platform_version, repr(device.detect()), device.processors(), registers
    variables = sorted((n, v) for n, v in os.environ.items() if n.startswith(VARIABLES) and n not in PATHS)
    return _versions(), jax.__version__, python, chip, devices, cores, repr(native), variables


def _versions() -> list[str]:
    """'name-version.dist-info' of the installed PACKAGES: reading the names alone is fast."""
    places = [place for place in sys.path if os.path.isdir(place)]
    names = {name for place in places for name in os.listdir(place) if name.endswith((".dist-info", ".egg-info"))}
    return sorted(name for name in names if name.lower().replace("-", "_").startswith(PACKAGES))


@functools.cache
def sources() -> str:
    """A hash of the source code; NoKey if a file changed after this process read it."""
    digest = hashlib.sha256()
    for package in (pathlib.Path(__file__).parents[1], pathlib.Path(pallas_kernels.__file__).parent):
        for path in sorted(package.rglob("*")):
            if path.suffix in SOURCES and path.relative_to(package).parts[0] not in ABOVE:
                if path.stat().st_mtime > _IMPORTED_AT:
                    raise NoKey(f"{path} changed after this process started")
                content = path.read_bytes()
                digest.update(f"{path.relative_to(package.parent)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
