"""Which backends there are, in order of preference; their modules are imported when first asked for."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from jattn.backends.backend import AttentionBackend
from jattn.backends.impl import AttentionImpl
from jattn.errors.arguments import short

Entry = type[AttentionBackend] | str
"""A class, or where to find it: 'package.module:Class'."""

_TABLE: dict[str, Entry] = {
    "pallas_gpu": "jattn.backends.pallas_gpu:PallasGpuBackend",
    "pallas_tpu": "jattn.backends.pallas_tpu:PallasTpuBackend",
    "cpu_native": "jattn.backends.cpu_native:CpuNativeBackend",
    "sdpa": "jattn.backends.sdpa:SdpaBackend",
    "split": "jattn.backends.split:SplitBackend",
    "pallas_cpu": "jattn.backends.pallas_cpu:PallasCpuBackend",
    "mla_sdpa": "jattn.backends.mla:MLABackend",
}


def list_backends() -> tuple[str, ...]:
    """Names in the order in which 'auto' tries them."""
    return tuple(_TABLE)


def entries() -> tuple[tuple[str, Entry], ...]:
    """The table as a value: what a cached choice depends on."""
    return tuple(_TABLE.items())


def load(name: str) -> type[AttentionBackend]:
    """The backend of this name."""
    entry = _entry(name)
    if not isinstance(entry, str):
        return entry
    module, _, attribute = entry.partition(":")
    return _checked(name, getattr(importlib.import_module(module), attribute))


def register_backend(name: str, backend: Entry | None = None, *, before: str | None = None) -> Callable | Entry:
    """Add a backend of your own: a class, 'package.module:Class', or as a decorator of the class.

    It goes `before` another, or to the end, where 'auto' hardly ever comes (sdpa takes nearly everything).
    """
    if backend is None:
        return lambda cls: register_backend(name, cls, before=before)
    if not isinstance(name, str) or not name or name == "auto":
        raise ValueError(f"backend name {short(name)} must be a non-empty string other than 'auto'")
    if name in _TABLE:
        raise ValueError(f"backend {name!r} is already registered; unregister_backend it first or choose another name")
    if before is not None and (not isinstance(before, str) or before not in _TABLE):
        raise ValueError(f"before={short(before)} is not known; use one of {', '.join(_TABLE)}")
    if not isinstance(backend, str):
        _checked(name, backend)
    elif not all(backend.partition(":")):
        raise ValueError(f"{backend!r} must read 'package.module:Class'")
    behind = list(_TABLE)[list(_TABLE).index(before) :] if before else []
    moved = {other: _TABLE.pop(other) for other in behind}
    _TABLE[name] = backend
    _TABLE.update(moved)
    return backend


def unregister_backend(name: str) -> None:
    """Take a backend off the table."""
    _entry(name)
    del _TABLE[name]


def _entry(name: str) -> Entry:
    if not isinstance(name, str) or name not in _TABLE:
        close = difflib.get_close_matches(name, _TABLE, 1) if isinstance(name, str) else None
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"backend {short(name)} is not known{hint}; use 'auto' or one of {', '.join(_TABLE)}")
    return _TABLE[name]


def _checked(name: str, backend: Any) -> type[AttentionBackend]:
    """Whole, or an error that says what is missing: better here than in the middle of a trace."""
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise TypeError(f"backend {name!r}: {backend!r} must be a subclass of jattn.backends.AttentionBackend")
    missing = sorted(backend.__abstractmethods__)
    if missing:
        raise TypeError(f"backend {name!r}: {backend.__name__} lacks {', '.join(missing)}")
    impl = backend.get_impl_cls()
    if not issubclass(impl, AttentionImpl) or impl.__abstractmethods__:
        raise TypeError(f"backend {name!r}: {impl.__name__} must be an AttentionImpl with forward")
    return backend
