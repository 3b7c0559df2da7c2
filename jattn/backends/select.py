"""Choosing a backend: pure, cached, and explained in full."""

import dataclasses
import functools
import html
import textwrap

import jax.numpy as jnp

from jattn import device
from jattn.backends import registry
from jattn.backends.backend import AttentionBackend
from jattn.backends.feature import Feature
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.spec import AttentionSpec


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


def explain(
    spec: AttentionSpec,
    cache_spec: KVCacheSpec | None,
    platform: "str | Chip | None" = None,
    needs: tuple[Feature, ...] = (),
) -> Explanation:
    """What every backend says to this layer over this cache (None: packed, no cache) on this platform.

    `needs` adds features that only the batch or the caller can know, e.g. Feature.NON_CAUSAL.
    """
    return _explain(spec, cache_spec, device.resolve(platform), tuple(needs), registry.entries())


def resolve(
    spec: AttentionSpec,
    cache_spec: KVCacheSpec | None,
    platform: "str | Chip | None" = None,
    backend: str = "auto",
    needs: tuple[Feature, ...] = (),
    dtypes: tuple[jnp.dtype, ...] = (),
) -> type[AttentionBackend]:
    """The first backend that can ('auto'), or the named one; else UnsupportedError with every reason.

    dtypes: of queries and packed keys, which no spec tells: 'auto' looks for who takes them all; if nobody does, the
    door says so (checks.check_dtype).
    """
    if backend != "auto":
        registry.load(backend)
    reports = explain(spec, cache_spec, platform, needs)
    chosen = [registry.load(r.name) for r in reports if r.supported and backend in ("auto", r.name)]
    if chosen:
        return registry.prefer(chosen, dtypes)
    able = [report.name for report in reports if report.supported]
    who = "no backend takes" if backend == "auto" else f"backend {backend!r} does not take"
    hint = f" ({', '.join(able)} would)" if able else ""
    raise UnsupportedError(
        f"{who} this layer{hint}: {spec} over {cache_spec}",
        {report.name: report.reasons for report in reports if not report.supported},
    )


@functools.lru_cache(maxsize=1024)
def _explain(spec, cache_spec, chip: Chip, needs, table) -> Explanation:
    """Keyed by the table too, so that registering a backend is seen at once."""

    def report(name: str) -> BackendReport:
        reasons = registry.load(name).reasons(spec, cache_spec, chip, needs)
        return BackendReport(name, not reasons, reasons)

    return Explanation(report(name) for name, _ in table)
