"""The whole question that a backend is asked: can you run this layer, over this cache, on this chip?"""

import dataclasses

import jax.numpy as jnp

from jattn.backends.feature import Feature
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.mla_spec import MLASpec
from jattn.spec import AttentionSpec
from jattn.types import AttentionType

FLAGS = {f"use_{feature.name.lower()}": feature for feature in Feature} | {
    "has_sink": Feature.SINK,
    "use_batch_invariant": Feature.BATCH_INVARIANCE,
}
"""vLLM's keyword -> the feature it asks for; every feature also answers to use_<its name>."""

_CACHE_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_per_token_head": "float8_e4m3fn",
    "int8_per_token_head": "int8",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """Hashable. None means 'not asked' and is never a reason to refuse."""

    head_size: int
    v_head_size: int | None = None
    dtype: str | None = None  # the query's
    kv_cache_dtype: str | None = None  # "auto": the query's
    kv_cache_layout: str | None = None  # "NHD" | "HND"
    quant: str | None = None
    block_size: int | None = None
    use_mla: bool = False
    use_sparse: bool = False
    attn_type: AttentionType = AttentionType.DECODER
    device_capability: Chip | None = None
    needs: tuple[tuple[Feature, str], ...] = ()  # (feature, what was seen), in Feature's order

    def asks(self, feature: Feature) -> bool:
        """Is this feature among the needs? (vLLM's has_sink is asks(Feature.SINK).)"""
        return any(feature is needed for needed, _ in self.needs)

    @classmethod
    def of(
        cls,
        spec: AttentionSpec | MLASpec,
        cache_spec: KVCacheSpec | None = None,
        chip: Chip | None = None,
        needs: tuple[Feature, ...] = (),
    ) -> "Question":
        """From a layer, its cache (None: packed), a chip, and features that no spec can tell."""
        mla = isinstance(spec, MLASpec)
        seen = _seen(spec, cache_spec) | {feature: "asked for" for feature in needs}
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
        """From vLLM's keywords: has_sink=True, use_mm_prefix=True ... become needs; the rest stay."""
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
    """The canonical name of a cache dtype; vLLM's 'fp8', 'fp8_e5m2' ... are understood, 'auto' stays."""
    if dtype == "auto":
        return dtype
    if isinstance(dtype, str) and dtype in _CACHE_DTYPES:
        return _CACHE_DTYPES[dtype]
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        return str(dtype)


def is_quantized_kv_cache(kv_cache_dtype: str) -> bool:
    """True for fp8, int8, nvfp4 and per-token-head caches; 'auto' and 'bfloat16' are not quantised."""
    return kv_cache_dtype.startswith(("fp8", "float8", "int8", "nvfp4")) or kv_cache_dtype.endswith("per_token_head")


def _seen(spec: AttentionSpec | MLASpec, cache_spec: KVCacheSpec | None) -> dict[Feature, str]:
    """What this layer needs, and the words to say so; an lse is always needed, since a state has one."""
    left, right = spec.window
    layer = spec.absorbed if isinstance(spec, MLASpec) else spec
    # a decoder that is causal anyway loses nothing to the right by a window (W - 1, 0)
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
        (Feature.RSWA, layer.use_rswa, "use_rswa=True"),
        (Feature.SOFT_CAP, spec.logits_soft_cap is not None, f"logits_soft_cap={spec.logits_soft_cap}"),
        (Feature.MASK_FN, spec.mask_fn is not None, "mask_fn given"),
        (Feature.SCORE_FN, spec.score_fn is not None, "score_fn given"),
        (
            Feature.DIFF_KV,
            spec.v_head_dim != spec.head_dim and not isinstance(spec, MLASpec),
            f"head_dim={spec.head_dim}, v_head_dim={spec.v_head_dim}",
        ),
        (Feature.LSE, True, "every attention state carries its lse"),
        (Feature.PACKED, cache_spec is None, "no cache_spec given"),
        (Feature.FUSED_OUTPUT_QUANT, layer.output_dtype is not None, f"output_dtype={layer.output_dtype}"),
    )
    return {feature: words for feature, needed, words in rows if needed}
