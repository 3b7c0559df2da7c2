"""Question: what a layer needs of a backend. reasons_against: every reason why a backend refuses it."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.mla_spec import MLASpec
from jattn.spec import AttentionSpec
from jattn.types import AttentionType, Feature, listed

FLAGS = {f"use_{feature.name.lower()}": feature for feature in Feature} | {
    "has_sink": Feature.SINK,
    "use_batch_invariant": Feature.BATCH_INVARIANCE,
}
"""vLLM's keyword -> the feature that it needs. Every feature also has the keyword use_<its name in lower case>."""

_CACHE_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_per_token_head": "float8_e4m3fn",
    "int8_per_token_head": "int8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What a layer, its cache and the chip need of a backend. Hashable. None: not known, and no reason to refuse."""

    head_size: int  # head_dim
    v_head_size: int | None = None  # v_head_dim
    dtype: str | None = None  # of the queries
    kv_cache_dtype: str | None = None  # "auto": that of the queries
    kv_cache_layout: str | None = None  # "NHD" | "HND" | "HND128"
    quant: str | None = None  # see KVCacheSpec.quant
    block_size: int | None = None  # tokens of a block
    use_mla: bool = False  # the cache is a latent one
    use_sparse: bool = False  # queries attend to listed tokens
    attn_type: AttentionType = AttentionType.DECODER
    device_capability: Chip | None = None  # the chip
    needs: tuple[tuple[Feature, str], ...] = ()  # (feature, the option that needs it), in Feature's order

    def needs_feature(self, feature: Feature) -> bool:
        """Is this feature among the needs? (vLLM's has_sink is needs_feature(Feature.SINK).)"""
        return any(feature is needed for needed, _ in self.needs)

    @classmethod
    def of(
        cls,
        spec: AttentionSpec | MLASpec,
        cache_spec: KVCacheSpec | None = None,
        chip: Chip | None = None,
        needs: tuple[Feature, ...] = (),
    ) -> "Question":
        """From a layer, its cache (None: packed keys), a chip, and features that the spec does not show."""
        mla = isinstance(spec, MLASpec)
        seen = _needed_features(spec, cache_spec) | {feature: "the caller asks for it" for feature in needs}
        question = cls(
            head_size=spec.head_dim,
            v_head_size=None if mla else spec.v_head_dim,
            use_mla=mla,
            attn_type=AttentionType(spec.attn_type),
            device_capability=chip,
            needs=tuple((feature, seen[feature]) for feature in Feature if feature in seen),
        )
        if cache_spec is None:
            return question
        return dataclasses.replace(
            question,
            kv_cache_dtype=cache_spec.dtype,
            kv_cache_layout=cache_spec.physical_layout,
            quant=cache_spec.quant,
            block_size=cache_spec.block_size,
        )

    @classmethod
    def from_flags(
        cls, head_size: int, *, attn_type="decoder", dtype=None, kv_cache_dtype=None, **fields
    ) -> "Question":
        """From vLLM's keywords. has_sink=True, use_mm_prefix=True ... become needs; the others are fields."""
        flags = {name: fields.pop(name) for name in tuple(fields) if name in FLAGS}
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known)
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: not known; use {', '.join(sorted(known | set(FLAGS)))}")
        seen = {FLAGS[name]: f"{name}=True" for name, on in flags.items() if on}
        return cls(
            head_size=head_size,
            attn_type=AttentionType(attn_type),
            dtype=None if dtype is None else jnp.dtype(dtype).name,
            kv_cache_dtype=None if kv_cache_dtype is None else cache_dtype_name(kv_cache_dtype),
            needs=tuple((feature, seen[feature]) for feature in Feature if feature in seen),
            **fields,
        )


def cache_dtype_name(dtype) -> str:
    """The name of a cache dtype, from a dtype or a name; also from vLLM's 'fp8', 'fp8_e5m2' ... 'auto' is unchanged."""
    if dtype == "auto":
        return dtype
    if isinstance(dtype, str) and dtype in _CACHE_DTYPES:
        return _CACHE_DTYPES[dtype]
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """True for the names of fp8, int8, nvfp4 and per-token-head caches; False for e.g. 'auto' and 'bfloat16'."""
    return kv_cache_dtype.startswith(("fp8", "float8", "int8", "nvfp4")) or kv_cache_dtype.endswith("per_token_head")


def _needed_features(spec: AttentionSpec | MLASpec, cache_spec: KVCacheSpec | None) -> dict[Feature, str]:
    """The features that this layer needs -> the option that needs each, for messages."""
    left, right = spec.window
    layer = spec.absorbed if isinstance(spec, MLASpec) else spec
    # A window (W - 1, 0) hides no more keys of a causal decoder than the mask does.
    needs_right = right > 0 if spec.attn_type is AttentionType.DECODER else right >= 0
    rows = (
        (Feature.SINK, spec.has_sinks, "has_sinks=True"),
        (
            Feature.PER_HEAD_QUANT_SCALES,
            cache_spec is not None and cache_spec.quant == "per_head",
            "quant='per_head'",
        ),
        (Feature.SLIDING_WINDOW, spec.sliding_window is not None, f"sliding_window={(left, right)}"),
        (Feature.TWO_SIDED_WINDOW, needs_right, f"sliding_window={(left, right)}"),
        (Feature.CHUNK, spec.chunk_size is not None, f"chunk_size={spec.chunk_size}"),
        (Feature.CHUNK_LOOKBACK, layer.chunk_lookback > 0, f"chunk_lookback={layer.chunk_lookback}"),
        (Feature.ALIBI, spec.has_alibi, "has_alibi=True"),
        (Feature.ALIBI_SQRT, layer.use_alibi_sqrt, "use_alibi_sqrt=True"),
        (Feature.MM_PREFIX, layer.use_mm_prefix, "use_mm_prefix=True"),
        (Feature.QQ_BIAS, layer.use_qq_bias, "use_qq_bias=True"),
        (Feature.DISTANCE_BIAS, layer.use_distance_bias, "use_distance_bias=True"),
        (Feature.RSWA, layer.use_rswa, "use_rswa=True"),
        (Feature.SOFT_CAP, spec.logits_soft_cap is not None, f"logits_soft_cap={spec.logits_soft_cap}"),
        (Feature.MASK_FN, spec.mask_fn is not None, "mask_fn given"),
        (Feature.SCORE_FN, spec.score_fn is not None, "score_fn given"),
        (
            Feature.DIFF_KV,
            spec.v_head_dim != spec.head_dim and not isinstance(spec, MLASpec),
            f"head_dim={spec.head_dim}, v_head_dim={spec.v_head_dim}",
        ),
        (Feature.LSE, True, "every attention state has an lse"),
        (Feature.PACKED, cache_spec is None, "no cache_spec given"),
        (Feature.FUSED_OUTPUT_QUANT, layer.output_dtype is not None, f"output_dtype={layer.output_dtype}"),
        (Feature.EIGHT_BIT_PRODUCTS, layer.compute_dtype is not None, f"compute_dtype={layer.compute_dtype}"),
    )
    return {feature: option for feature, needed, option in rows if needed}


_BEFORE_MLA = (Feature.MM_PREFIX,)
_BEFORE_SPARSE = (Feature.SINK,)
_BEFORE_CHIP = (Feature.PER_HEAD_QUANT_SCALES,)
_AFTER_TYPE = tuple(f for f in Feature if f not in (*_BEFORE_MLA, *_BEFORE_SPARSE, *_BEFORE_CHIP))


def reasons_against(backend, question: Question, own: tuple[str, ...] = ()) -> list[str]:
    """vLLM's reasons in vLLM's order, then jattn's, then the backend's `own`, last that against the combination."""
    found = [*_vllm_reasons(backend, question), *_jattn_reasons(backend, question), *own]
    combination = backend.supports_combination(question)
    return found if combination is None else [*found, combination]


def _vllm_reasons(backend, q: Question) -> Iterator[str]:
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
        yield "MLA not supported" if q.use_mla else "non-MLA not supported: for latent caches (MLA) only"
    yield from _features(backend, q, _BEFORE_SPARSE)
    if q.use_sparse != backend.is_sparse():
        yield "sparse not supported" if q.use_sparse else "non-sparse not supported: for listed tokens only"
    yield from _features(backend, q, _BEFORE_CHIP)
    chip = q.device_capability
    if chip is not None and not backend.supports_compute_capability(chip.compute_capability):
        needed = f"sm_{backend.min_compute_capability} or newer"
        yield f"compute capability not supported: {chip.generation} seen, {needed} supported"
    if not backend.supports_attn_type(q.attn_type):
        yield f"attention type {q.attn_type} not supported: {listed(backend.attn_types)} supported"
    yield from _features(backend, q, _AFTER_TYPE)


def _jattn_reasons(backend, q: Question) -> Iterator[str]:
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
        if feature in among and not supports_feature(backend, feature):
            yield f"{feature} not supported: {seen}"


def supports_feature(backend, feature: Feature) -> bool:
    """Does the backend support the feature? Calls vLLM's method if there is one, which a backend may override."""
    invariant = backend.supports_batch_invariance
    named = {
        Feature.SINK: backend.supports_sink,
        Feature.MM_PREFIX: backend.supports_mm_prefix,
        Feature.NON_CAUSAL: backend.supports_non_causal,
        Feature.PER_HEAD_QUANT_SCALES: backend.supports_per_head_quant_scales,
        Feature.BATCH_INVARIANCE: invariant,
        Feature.DECODE_BATCH_INVARIANCE: lambda: backend.supports(Feature.DECODE_BATCH_INVARIANCE) or invariant(),
    }
    return named[feature]() if feature in named else backend.supports(feature)


def without_refused_options(backend, spec: AttentionSpec) -> AttentionSpec:
    """The layer without options that the backend's list of features refuses, so that the kernel does not refuse them
    a second time.

    Options that are not in the table below are unchanged: the kernel decides about them.
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
        changes |= {} if supports_feature(backend, feature) else fields
    return dataclasses.replace(spec, **changes)


def _unsupported(name: str, seen, supported) -> str:
    return f"{name} not supported: {seen} seen, {listed(supported)} supported"
