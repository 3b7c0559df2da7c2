"""Why a backend refuses: every reason, in a fixed order, each with what was seen and what is supported."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jattn.backends.feature import Feature
from jattn.backends.question import Question
from jattn.spec import AttentionSpec
from jattn.types import AttentionType, MultipleOf

if TYPE_CHECKING:
    from jattn.backends.backend import AttentionBackend

_BEFORE_MLA = (Feature.MM_PREFIX,)
_BEFORE_SPARSE = (Feature.SINK,)
_BEFORE_CHIP = (Feature.PER_HEAD_QUANT_SCALES,)
_AFTER_TYPE = tuple(f for f in Feature if f not in (*_BEFORE_MLA, *_BEFORE_SPARSE, *_BEFORE_CHIP))


def reasons_against(backend: "type[AttentionBackend]", question: Question, own: tuple[str, ...] = ()) -> list[str]:
    """vLLM's reasons in vLLM's order, then ours, then the backend's `own`, and the combination's last."""
    found = [*_vllm(backend, question), *_ours(backend, question), *own]
    combination = backend.supports_combination(question)
    return found if combination is None else [*found, combination]


def _vllm(backend, q: Question) -> Iterator[str]:
    for head_size in dict.fromkeys((q.head_size, q.v_head_size or q.head_size)):
        if not backend.supports_head_size(head_size):
            yield _unsupported("head_size", head_size, backend.get_supported_head_sizes())
    if q.dtype is not None and not backend.supports_dtype(q.dtype):
        yield _unsupported("dtype", q.dtype, backend.get_supported_dtypes())
    if not backend.supports_kv_cache_dtype(q.kv_cache_dtype):
        yield _unsupported("kv_cache_dtype", q.kv_cache_dtype, backend.supported_kv_cache_dtypes)
    if not backend.supports_block_size(q.block_size):
        yield _unsupported("block_size", q.block_size, backend.get_supported_kernel_block_sizes())
    yield from _features(backend, q, _BEFORE_MLA)
    if q.use_mla != backend.is_mla():
        yield "MLA not supported" if q.use_mla else "non-MLA not supported: it takes latent caches only"
    yield from _features(backend, q, _BEFORE_SPARSE)
    if q.use_sparse != backend.is_sparse():
        yield ("sparse not supported" if q.use_sparse else "non-sparse not supported: it attends to listed tokens only")
    yield from _features(backend, q, _BEFORE_CHIP)
    chip = q.device_capability
    if chip is not None and not backend.supports_compute_capability(chip.compute_capability):
        needed = f"sm_{backend.min_compute_capability} or newer"
        yield f"compute capability not supported: {chip.generation} seen, {needed} supported"
    if not backend.supports_attn_type(q.attn_type):
        yield f"attention type {q.attn_type} not supported: {listed(backend.attn_types)} supported"
    yield from _features(backend, q, _AFTER_TYPE)


def _ours(backend, q: Question) -> Iterator[str]:
    layouts = backend.supported_kv_cache_layouts()
    if q.kv_cache_layout is not None and q.kv_cache_layout not in layouts:
        yield _unsupported("kv_cache_layout", q.kv_cache_layout, layouts)
    if q.quant is not None and q.quant not in backend.quant_modes:
        yield _unsupported("quant", repr(q.quant), [repr(mode) for mode in backend.quant_modes])
    chip = q.device_capability
    if chip is not None and not backend.supports_platform(chip.platform, chip.generation):
        yield _unsupported("platform", f"{chip.platform} {chip.generation}".strip(), backend.platforms)


def _features(backend, q: Question, among: tuple[Feature, ...]) -> Iterator[str]:
    for feature, seen in q.needs:
        if feature in among and not supports(backend, feature):
            yield f"{feature} not supported: {seen}"


def supports(backend, feature: Feature) -> bool:
    """Through vLLM's own method where it has one, so that a backend may override either."""
    named = {
        Feature.SINK: backend.supports_sink,
        Feature.MM_PREFIX: backend.supports_mm_prefix,
        Feature.NON_CAUSAL: backend.supports_non_causal,
        Feature.PER_HEAD_QUANT_SCALES: backend.supports_per_head_quant_scales,
        Feature.BATCH_INVARIANCE: backend.supports_batch_invariance,
    }
    return named[feature]() if feature in named else backend.supports(feature)


def without_refused(backend, spec: AttentionSpec) -> AttentionSpec:
    """The layer without the options that the backend's features refuse already, so that a kernel does not repeat them.

    An option that is not in the table stays, and the kernel decides about it.
    """
    table = {
        Feature.CHUNK_LOOKBACK: dict(chunk_lookback=0),
        Feature.RSWA: dict(use_rswa=False),
        Feature.MM_PREFIX: dict(use_mm_prefix=False, mm_prefix_clamp_sliding_window=False),
        Feature.ALIBI_SQRT: dict(use_alibi_sqrt=False),
        Feature.MASK_FN: dict(mask_fn=None),
        Feature.SCORE_FN: dict(score_fn=None),
    }
    changes: dict[str, Any] = {}
    for feature, fields in table.items():
        changes |= {} if supports(backend, feature) else fields
    return dataclasses.replace(spec, **changes)


def _unsupported(what: str, seen, supported) -> str:
    return f"{what} not supported: {seen} seen, {listed(supported)} supported"


def listed(values) -> str:
    """'16, 32' or 'multiples of 8': how a sentence names what is supported."""
    words = {MultipleOf: lambda v: f"multiples of {v.base}", AttentionType: lambda v: v.value}
    return ", ".join(words.get(type(v), str)(v) for v in values) or "none"
