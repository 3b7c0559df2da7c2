"""Who computes which half of a split batch: named, or the best that can; and why nobody can."""

import dataclasses
import functools
from collections.abc import Callable, Iterable

from jattn.backends import registry
from jattn.backends.backend import AttentionBackend
from jattn.backends.feature import Feature
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.spec import AttentionSpec
from jattn.types import AttentionType

Backend = type[AttentionBackend]


@dataclasses.dataclass(frozen=True)
class Halves:
    """Two backends by name; None: the first in order of preference that can, other than a split."""

    decode: str | None = None
    prefill: str | None = None
    threshold: int = 1  # longest query of a decode

    def names(self, attn_type: AttentionType | str, cached: bool = True) -> dict[str, str | None]:
        """The halves of such a layer. Without a cache nothing is decoded, and an encoder never does."""
        decodes = cached and attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        return (dict(decode=self.decode) if decodes else {}) | dict(prefill=self.prefill)

    def choose(
        self, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip, needs: tuple[Feature, ...] = ()
    ) -> dict[str, Backend]:
        """A backend for each half of this layer, or UnsupportedError with every reason."""
        asked = (spec, cache_spec, chip, needs, registry.entries())
        names = self.names(spec.attn_type, cache_spec is not None)
        return {half: _choose(half, name, *asked) for half, name in names.items()}

    def reasons(self, names: dict[str, str | None], ask: Callable[[Backend], Iterable[str]]) -> list[str]:
        """Half by half, why nobody can compute it; `ask` gives one backend's reasons."""
        found = []
        for half, name in names.items():
            answers = {backend.get_name(): list(ask(backend)) for backend in candidates(name)}
            if all(answers.values()):
                found += [f"{half} half ({who}): {why}" for who, reasons in answers.items() for why in reasons]
        return found

    def able(self, ask: Callable[[Backend], bool]) -> bool:
        """Has each half somebody who says yes?"""
        return all(any(map(ask, candidates(name))) for name in (self.decode, self.prefill))


def candidates(name: str | None) -> list[Backend]:
    """The one named, or everybody who does not divide the work in turn."""
    if name is not None:
        return [registry.load(name)]
    return [backend for backend in map(registry.load, registry.list_backends()) if not backend.delegates]


@functools.lru_cache(maxsize=256)
def _choose(half: str, name: str | None, spec, cache_spec, chip: Chip, needs, table) -> Backend:
    """Keyed by the registry's table too, so that registering a backend is seen at once."""
    answers = {}
    for backend in candidates(name):
        answers[backend.get_name()] = reasons = backend.reasons(spec, cache_spec, chip, needs)
        if not reasons:
            return backend
    raise UnsupportedError(f"nobody computes the {half} half of this batch: {spec} over {cache_spec}", answers)
