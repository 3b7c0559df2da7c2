"""The registered backends in order of preference, the choice of one, and backends derived from others."""

import dataclasses
import difflib
import functools
import html
import importlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from jattn import device
from jattn.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.errors.arguments import asked, dtype_name, kind, optional, sequence_of, short, takes
from jattn.metadata import CommonAttentionMetadata
from jattn.mla_spec import MLASpec
from jattn.spec import AttentionSpec
from jattn.types import Feature
from pallas_kernels.algebra import quant

Entry = type[AttentionBackend] | str
"""A class, or its import path 'package.module:Class'."""

_TABLE: dict[str, Entry] = {
    "pallas_gpu": "jattn.backends.pallas_gpu:PallasGpuBackend",
    "pallas_gpu_invariant": "jattn.backends.pallas_gpu_invariant:InvariantGpuBackend",
    "pallas_tpu": "jattn.backends.pallas_tpu:PallasTpuBackend",
    "pallas_tpu_invariant": "jattn.backends.pallas_tpu:InvariantTpuBackend",
    "cpu_native": "jattn.backends.cpu_native:CpuNativeBackend",
    "sdpa": "jattn.backends.sdpa:SdpaBackend",
    "split": "jattn.backends.split:SplitBackend",
    "pallas_cpu": "jattn.backends.pallas_cpu:PallasCpuBackend",
    "mla_cpu_native": "jattn.backends.mla_cpu:CpuMLABackend",
    "mla_pallas_gpu": "jattn.backends.mla_pallas_gpu:MLAPallasGpuBackend",
    "mla_pallas_tpu": "jattn.backends.mla_pallas_tpu:MLAPallasTpuBackend",
    "mla_sdpa": "jattn.backends.mla:MLABackend",
}


def list_backends() -> tuple[str, ...]:
    """The names of the backends, in the order in which 'auto' tries them."""
    return tuple(_TABLE)


def entries() -> tuple[tuple[str, Entry], ...]:
    """The registered backends as a hashable value: a cached choice depends on them."""
    return tuple(_TABLE.items())


def load(name: str) -> type[AttentionBackend]:
    """The class of the backend with this name."""
    entry = _entry(name)
    return _imported(name, entry) if isinstance(entry, str) else entry


@functools.cache
def _imported(name: str, entry: str) -> type[AttentionBackend]:
    """The class at an import path, checked once."""
    module, _, attribute = entry.partition(":")
    try:
        backend = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"backend {name!r} was registered as {entry!r}, which cannot be imported: {error}") from error
    return _checked(name, backend)


def name_of(backend: type[AttentionBackend]) -> str:
    """The name under which a class is registered; the class's own name if it is not registered."""
    place = f"{backend.__module__}:{backend.__qualname__}"
    return next((name for name, entry in _TABLE.items() if entry in (backend, place)), backend.get_name())


def register_backend(name: str, backend: Entry | None = None, *, before: str | None = None) -> Callable | Entry:
    """Add a backend: a class, its path 'package.module:Class', or, as a decorator, the class below.

    `before` names the backend that it precedes in the order of preference. None: it is the last one. 'auto' then rarely
    chooses it, because sdpa supports nearly every layer.
    """
    if backend is None:
        return lambda cls: register_backend(name, cls, before=before)
    if not isinstance(name, str) or not name or name == "auto":
        raise ValueError(f"backend name {short(name)} must be a non-empty string other than 'auto'")
    if name in _TABLE:
        raise ValueError(
            f"backend {name!r} is already registered; call unregister_backend first, or choose another name"
        )
    if before is not None and (not isinstance(before, str) or before not in _TABLE):
        raise ValueError(f"before={short(before)} is not known; use one of {', '.join(_TABLE)}")
    if not isinstance(backend, str):
        _checked(name, backend)
    elif not all(backend.partition(":")):
        raise ValueError(f"{backend!r} must read 'package.module:Class'")
    later = list(_TABLE)[list(_TABLE).index(before) :] if before else []
    moved = {other: _TABLE.pop(other) for other in later}
    _TABLE[name] = backend
    _TABLE.update(moved)
    return backend


def unregister_backend(name: str) -> None:
    """Remove a backend."""
    _entry(name)
    del _TABLE[name]


def _entry(name: str) -> Entry:
    if not isinstance(name, str) or name not in _TABLE:
        close = difflib.get_close_matches(name, _TABLE, 1) if isinstance(name, str) else None
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"backend {short(name)} is not known{hint}; use 'auto' or one of {', '.join(_TABLE)}")
    return _TABLE[name]


def _checked(name: str, backend: Any) -> type[AttentionBackend]:
    """The class itself; TypeError if an attribute is missing, rather than an error in the middle of a trace."""
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise TypeError(f"backend {name!r}: {backend!r} must be a subclass of jattn.backends.AttentionBackend")
    missing = []
    for attribute in ("name", "impl_cls", "builder_cls", "metadata_cls"):
        try:
            getattr(backend, f"get_{attribute}")()
        except AttributeError:
            missing.append(attribute)
    if missing:
        raise TypeError(f"backend {name!r}: {backend.__name__} lacks {', '.join(missing)}")
    impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    for cls, base, method in ((impl, AttentionImpl, "forward"), (builder, AttentionMetadataBuilder, "build")):
        if not (isinstance(cls, type) and issubclass(cls, base)) or cls.__abstractmethods__:
            seen = getattr(cls, "__name__", short(cls))
            raise TypeError(f"backend {name!r}: {seen} must be an {base.__name__} with {method}")
    if not isinstance(backend.get_metadata_cls(), type):
        raise TypeError(f"backend {name!r}: metadata_cls={short(backend.get_metadata_cls())} must be a class")
    return backend


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """Whether one backend supports a layer; why not, or by which kernel; and what computes its gradient."""

    name: str  # of the backend
    supported: bool
    reasons: tuple[str, ...] = ()  # every reason against; empty if it is supported
    kernel: str = ""  # which of the backend's kernels computes a supported layer; empty if it has only one
    gradient: str = ""  # what computes the gradient, and why; empty if the backend has one way only

    @property
    def notes(self) -> tuple[str, ...]:
        """The last column of the table: the reasons, or the kernel and how the gradient is taken."""
        known = (("by", self.kernel), ("gradient:", self.gradient))
        return self.reasons or tuple(f"{what} {value}" for what, value in known if value)


class Explanation(tuple[BackendReport, ...]):
    """The reports of all backends, in order of preference. Prints as a table, also in notebooks."""

    __slots__ = ()

    def __str__(self) -> str:
        width = max([len("backend"), *(len(report.name) for report in self)])
        rows = [f"{'backend':{width}}  runs  how, or why not"]
        for report in self:
            lines = [line for note in report.notes for line in textwrap.wrap(note, 88, subsequent_indent="  ")] or [""]
            rows.append(f"{report.name:{width}}  {'yes' if report.supported else 'no':4}  {lines[0]}".rstrip())
            rows += [f"{'':{width}}        {line}" for line in lines[1:]]
        return "\n".join(rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = lambda text: f"<td style='text-align:left'>{text}</td>"  # noqa: E731
        rows = (
            cell(html.escape(report.name))
            + cell("yes" if report.supported else "no")
            + cell("<br>".join(map(html.escape, report.notes)))
            for report in self
        )
        head = "<tr><th>backend</th><th>runs</th><th>how, or why not</th></tr>"
        return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def query_dtype_rule(name: str, value) -> str:
    """The name of a dtype that queries may have."""
    found = dtype_name(name, value)
    if found not in (*quant.FLOATS, *quant.QUANTISED):
        raise ValueError(f"{name}={short(value)} must be one of {', '.join((*quant.FLOATS, *quant.QUANTISED))}")
    return found


_NEEDS = sequence_of(kind(Feature))
_LAYER = dict(spec=kind(AttentionSpec, MLASpec), cache_spec=optional(kind(KVCacheSpec)), needs=_NEEDS)


@takes(dtype=optional(query_dtype_rule), **_LAYER)
def explain(
    spec: AttentionSpec | MLASpec,
    cache_spec: KVCacheSpec | None,
    platform: "str | Chip | None" = None,
    needs: tuple[Feature, ...] = (),
    dtype: Any = None,
) -> Explanation:
    """Every backend's report on this layer with this cache (None: packed keys) on this platform.

    needs: features that batches will need and that the spec does not show, e.g. Feature.NON_CAUSAL. dtype: of the
    queries; None: it is not checked.
    """
    return _reports(spec, cache_spec, device.chip_of(platform), needs, () if dtype is None else (dtype,))


@takes(dtypes=sequence_of(query_dtype_rule), preferred_dtypes=sequence_of(query_dtype_rule), **_LAYER)
def resolve(
    spec: AttentionSpec | MLASpec,
    cache_spec: KVCacheSpec | None,
    backend: str = "auto",
    platform: "str | Chip | None" = None,
    needs: tuple[Feature, ...] = (),
    dtypes: tuple[str, ...] = (),
    preferred_dtypes: tuple[str, ...] = (),
) -> type[AttentionBackend]:
    """The first backend that supports the layer ('auto'), or the named one; else UnsupportedError with every reason.

    dtypes: of the queries and of packed keys, if known. preferred_dtypes: the likely ones, if they are not known: a
    backend that supports them is preferred to one that does not.
    """
    if not isinstance(backend, str) or backend != "auto":
        load(backend)
    reports = Explanation()
    for candidate in dict.fromkeys((dtypes or preferred_dtypes, dtypes)):
        reports = _reports(spec, cache_spec, device.chip_of(platform), needs, candidate)
        for report in reports:
            if report.supported and backend in ("auto", report.name):
                return load(report.name)
    able = [report.name for report in reports if report.supported]
    subject = "no backend supports" if backend == "auto" else f"backend {backend!r} does not support"
    hint = f" (supported by {', '.join(able)})" if able else ""
    queries = f", queries and keys of {', '.join(dtypes)}" if dtypes else ""
    raise UnsupportedError(
        f"{subject} this layer{hint}: {layer_text(spec, cache_spec)}{queries}",
        {report.name: report.reasons for report in reports if not report.supported},
    )


def layer_text(spec, cache_spec: KVCacheSpec | None) -> str:
    """A layer in an error message."""
    return f"{asked(spec)} {'without a cache' if cache_spec is None else f'over {asked(cache_spec)}'}"


def _reports(spec, cache_spec, chip: Chip, needs: tuple[Feature, ...], dtypes: tuple[str, ...]) -> Explanation:
    try:
        return _cached_reports(spec, cache_spec, chip, needs, dtypes, entries())
    except TypeError:
        for name in ("mask_fn", "score_fn"):
            if getattr(type(getattr(spec, name)), "__hash__", None) is None:
                raise TypeError(f"spec.{name} must be hashable: jit finds a layer's program by it") from None
        raise


@functools.lru_cache(maxsize=1024)
def _cached_reports(spec, cache_spec, chip: Chip, needs, dtypes, table) -> Explanation:
    """`table` is part of the key, so a newly registered backend is found."""

    def report(name: str) -> BackendReport:
        backend = load(name)
        reasons = backend.reasons(spec, cache_spec, chip, needs, dtypes)
        gradient = "" if reasons else backend.gradient_by(spec, cache_spec, chip, dtypes)
        kernel = "" if reasons else backend.kernel_name(chip, cache_spec)
        return BackendReport(name, not reasons, reasons, kernel, gradient)

    return Explanation(report(name) for name, _ in table)


def subclass_attention_backend(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    builder_cls: type[AttentionMetadataBuilder],
) -> type[AttentionBackend]:
    """The same backend with another builder. The name of the class is name_prefix + its name."""
    return subclass_attention_backend_with_overrides(
        name_prefix, attention_backend_cls, {"get_builder_cls": classmethod(lambda cls: builder_cls)}
    )


def subclass_attention_backend_with_overrides(
    name_prefix: str, attention_backend_cls: type[AttentionBackend], overrides: Mapping[str, Any]
) -> type[AttentionBackend]:
    """The same backend with other attributes or class methods; ValueError for a name that it does not have."""
    unknown = [name for name in overrides if name not in dir(attention_backend_cls)]
    if unknown:
        raise ValueError(f"{attention_backend_cls.__name__} has no {', '.join(unknown)} to override")
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), dict(overrides))


def subclass_attention_metadata_builder(
    name_prefix: str,
    builder_cls: type[AttentionMetadataBuilder],
    build_preprocess_fn: Callable[[CommonAttentionMetadata], CommonAttentionMetadata],
) -> type[AttentionMetadataBuilder]:
    """The same builder, given build_preprocess_fn(batch) instead of the batch, e.g. chunks as requests."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return builder_cls.build(self, common_prefix_len, build_preprocess_fn(common_attn_metadata), fast_build)

    return type(name_prefix + builder_cls.__name__, (builder_cls,), {"build": build})
