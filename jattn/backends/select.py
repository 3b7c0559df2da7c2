"""Choosing a backend: pure, cached, and explained in full."""

import dataclasses
import functools
import html
import textwrap
from typing import Any

from jattn import device
from jattn.backends import registry
from jattn.backends.backend import AttentionBackend
from jattn.backends.feature import Feature
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.errors.arguments import dtype_name, kind, optional, sequence_of, short, takes
from jattn.mla_spec import MLASpec
from jattn.spec import AttentionSpec
from pallas_kernels.algebra import quant


@dataclasses.dataclass(frozen=True)
class BackendReport:
    """One backend's answer."""

    name: str
    supported: bool
    reasons: tuple[str, ...] = ()


class Explanation(tuple[BackendReport, ...]):
    """Every backend's answer, in order of preference; prints as a table, in notebooks too."""

    __slots__ = ()

    def __str__(self) -> str:
        width = max([len("backend"), *(len(report.name) for report in self)])
        rows = [f"{'backend':{width}}  runs  why not"]
        for report in self:
            lines = [line for why in report.reasons for line in textwrap.wrap(why, 88, subsequent_indent="  ")] or [""]
            rows.append(f"{report.name:{width}}  {'yes' if report.supported else 'no':4}  {lines[0]}".rstrip())
            rows += [f"{'':{width}}        {line}" for line in lines[1:]]
        return "\n".join(rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = lambda text: f"<td style='text-align:left'>{text}</td>"  # noqa: E731
        rows = (
            cell(html.escape(report.name))
            + cell("yes" if report.supported else "no")
            + cell("<br>".join(map(html.escape, report.reasons)))
            for report in self
        )
        head = "<tr><th>backend</th><th>runs</th><th>why not</th></tr>"
        return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def query_dtype(name: str, value) -> str:
    """The name of a dtype that queries may have."""
    found = dtype_name(name, value)
    if found not in (*quant.FLOATS, *quant.QUANTISED):
        raise ValueError(f"{name}={short(value)} must be one of {', '.join((*quant.FLOATS, *quant.QUANTISED))}")
    return found


_NEEDS = sequence_of(kind(Feature))
_ASKED = dict(spec=kind(AttentionSpec, MLASpec), cache_spec=optional(kind(KVCacheSpec)), needs=_NEEDS)


@takes(dtype=optional(query_dtype), **_ASKED)
def explain(
    spec: AttentionSpec,
    cache_spec: KVCacheSpec | None,
    platform: "str | Chip | None" = None,
    needs: tuple[Feature, ...] = (),
    dtype: Any = None,
) -> Explanation:
    """Every backend's report on this layer with this cache (None: packed, no cache) on this platform.

    `needs` adds features that only the batch or the caller can know, e.g. Feature.NON_CAUSAL; `dtype` is that of the
    queries (None: not asked).
    """
    return _ask(spec, cache_spec, device.resolve(platform), needs, () if dtype is None else (dtype,))


@takes(dtypes=sequence_of(query_dtype), wished=sequence_of(query_dtype), **_ASKED)
def resolve(
    spec: AttentionSpec,
    cache_spec: KVCacheSpec | None,
    platform: "str | Chip | None" = None,
    backend: str = "auto",
    needs: tuple[Feature, ...] = (),
    dtypes: tuple[str, ...] = (),
    wished: tuple[str, ...] = (),
) -> type[AttentionBackend]:
    """The first backend that can ('auto'), or the named one; else UnsupportedError with every reason.

    dtypes: of the queries and of packed keys, if known. wished: a guess of them: a backend that takes them is
    preferred; if there is none, they are not asked for.
    """
    if not isinstance(backend, str) or backend != "auto":
        registry.load(backend)
    reports = Explanation()
    for asked in dict.fromkeys((dtypes or wished, dtypes)):
        reports = _ask(spec, cache_spec, device.resolve(platform), needs, asked)
        for report in reports:
            if report.supported and backend in ("auto", report.name):
                return registry.load(report.name)
    able = [report.name for report in reports if report.supported]
    who = "no backend takes" if backend == "auto" else f"backend {backend!r} does not take"
    hint = f" ({', '.join(able)} would)" if able else ""
    queries = f", queries and keys of {', '.join(dtypes)}" if dtypes else ""
    raise UnsupportedError(
        f"{who} this layer{hint}: {spec} over {cache_spec}{queries}",
        {report.name: report.reasons for report in reports if not report.supported},
    )


def _ask(spec, cache_spec, chip: Chip, needs: tuple[Feature, ...], dtypes: tuple[str, ...]) -> Explanation:
    try:
        return _explain(spec, cache_spec, chip, needs, dtypes, registry.entries())
    except TypeError:
        for name in ("mask_fn", "score_fn"):
            if getattr(type(getattr(spec, name)), "__hash__", None) is None:
                raise TypeError(f"spec.{name} must be hashable: an equal layer is found by it") from None
        raise


@functools.lru_cache(maxsize=1024)
def _explain(spec, cache_spec, chip: Chip, needs, dtypes, table) -> Explanation:
    """Keyed by the table too, so that registering a backend is seen at once."""

    def report(name: str) -> BackendReport:
        reasons = registry.load(name).reasons(spec, cache_spec, chip, needs, dtypes)
        return BackendReport(name, not reasons, reasons)

    return Explanation(report(name) for name, _ in table)
