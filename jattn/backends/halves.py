"""Choosing the backends of a split batch's two halves, decodes and prefills; or every reason why none can."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import ClassVar

from jattn.backends import registry
from jattn.backends.backend import AttentionBackend
from jattn.backends.feature import Feature
from jattn.backends.question import Question
from jattn.backends.reasons import supports
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.errors.arguments import dtype_name
from jattn.spec import AttentionSpec
from jattn.types import AttentionType, MultipleOf

Backend = type[AttentionBackend]


@dataclasses.dataclass(frozen=True)
class Halves:
    """Two backends by name; None: the first in order of preference that can, other than a split."""

    decode: str | None = None
    prefill: str | None = None
    threshold: int = 1  # longest query of a decode

    def names(self, attn_type: AttentionType | str, cached: bool = True) -> dict[str, str | None]:
        """The halves that a layer needs: only 'prefill' without a cache and for encoders."""
        decodes = cached and attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        return (dict(decode=self.decode) if decodes else {}) | dict(prefill=self.prefill)

    def choose(
        self,
        spec: AttentionSpec,
        cache_spec: KVCacheSpec | None,
        chip: Chip,
        needs: tuple[Feature, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> dict[str, Backend]:
        """A backend for each half of this layer, or UnsupportedError with every reason.

        dtypes: of queries and packed keys; a backend that takes them is preferred; if none does, the call refuses.
        """
        dtypes = tuple(dtype_name("dtypes", dtype) for dtype in dtypes)
        asked = (spec, cache_spec, chip, needs, dtypes, registry.entries())
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
        """True if `ask` is true for some backend of each half."""
        return all(any(map(ask, candidates(name))) for name in (self.decode, self.prefill))


def candidates(name: str | None) -> list[Backend]:
    """The named backend, or all that are not split backends themselves and not for latent caches."""
    if name is not None:
        return [registry.load(name)]
    everybody = map(registry.load, registry.list_backends())
    return [b for b in everybody if not issubclass(b, DividedBackend) and not b.is_mla()]


class DividedBackend(AttentionBackend):
    """Gives each half of a batch to another backend, and is never a half itself.

    It supports what both halves support, and only what the class attributes below list.
    """

    halves: ClassVar[Halves] = Halves()
    supported_dtypes = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_kv_cache_dtypes = ("auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_block_sizes = (MultipleOf(1),)
    attn_types = (
        AttentionType.DECODER,
        AttentionType.ENCODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    platforms = ("cpu", "gpu", "tpu")
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
    features = frozenset(
        {
            Feature.MM_PREFIX,
            Feature.SINK,
            Feature.PER_HEAD_QUANT_SCALES,
            Feature.SLIDING_WINDOW,
            Feature.RSWA,
            Feature.NON_CAUSAL,
            Feature.BATCH_INVARIANCE,
            Feature.TWO_SIDED_WINDOW,
            Feature.CHUNK,
            Feature.CHUNK_LOOKBACK,
            Feature.ALIBI,
            Feature.ALIBI_SQRT,
            Feature.SOFT_CAP,
            Feature.MASK_FN,
            Feature.SCORE_FN,
            Feature.QQ_BIAS,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.PACKED,
            Feature.FUSED_OUTPUT_QUANT,
        }
    )

    @classmethod
    def supports(cls, feature: Feature) -> bool:
        return super().supports(feature) and cls.halves.able(lambda backend: supports(backend, feature))

    @classmethod
    def supports_dtype(cls, dtype) -> bool:
        return super().supports_dtype(dtype) and cls.halves.able(lambda backend: backend.supports_dtype(dtype))

    @classmethod
    def supports_platform(cls, platform: str, generation: str = "") -> bool:
        able = cls.halves.able(lambda backend: backend.supports_platform(platform, generation))
        return super().supports_platform(platform, generation) and able

    @classmethod
    def validate_configuration(cls, head_size: int, **asked) -> list[str]:
        names = cls.halves.names(asked.get("attn_type", AttentionType.DECODER))
        halves = cls.halves.reasons(names, lambda backend: backend.validate_configuration(head_size, **asked))
        return [*cls._beyond(Question.from_flags(head_size, **asked)), *halves]

    @classmethod
    def reasons(cls, spec, cache_spec, chip, needs=(), dtypes=()) -> tuple[str, ...]:
        names = cls.halves.names(spec.attn_type, cache_spec is not None)
        asked = (spec, cache_spec, chip, needs, dtypes)
        halves = cls.halves.reasons(names, lambda backend: backend.reasons(*asked))
        return (*cls._beyond(Question.of(spec, cache_spec, chip, needs)), *halves)

    @classmethod
    def _beyond(cls, question: Question) -> list[str]:
        """Features that the split itself lacks, whatever its halves can."""
        return [f"{feature} not supported: {seen}" for feature, seen in question.needs if feature not in cls.features]


@functools.lru_cache(maxsize=256)
def _choose(half: str, name: str | None, spec, cache_spec, chip: Chip, needs, dtypes, table) -> Backend:
    """Keyed by the registry's table too, so that registering a backend is seen at once."""
    answers: dict[Backend, tuple[str, ...]] = {}
    for wished in dict.fromkeys((dtypes, ())):
        answers = {backend: backend.reasons(spec, cache_spec, chip, needs, wished) for backend in candidates(name)}
        chosen = [backend for backend, reasons in answers.items() if not reasons]
        if chosen:
            return chosen[0]
    raise UnsupportedError(
        f"nobody computes the {half} half of this batch: {spec} over {cache_spec}",
        {b.get_name(): x for b, x in answers.items()},
    )
