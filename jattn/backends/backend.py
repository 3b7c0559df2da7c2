"""AttentionBackend: says what it can do and hands out the classes that do it. Never instantiated."""

import abc
from typing import ClassVar

import jax.numpy as jnp

from jattn.backends.builder import AttentionMetadataBuilder
from jattn.backends.feature import Feature
from jattn.backends.impl import AttentionImpl
from jattn.backends.metadata import AttentionMetadata
from jattn.backends.question import Question, cache_dtype_name
from jattn.backends.reasons import listed, reasons_against
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.spec import AttentionSpec
from jattn.types import AttentionType, MultipleOf


class AttentionBackend(abc.ABC):
    """Capability is data: a backend sets the class attributes below, and overrides a method only for a rule.

    Every attribute lists what is supported; an empty list supports nothing. What a backend does not list it refuses, so
    a feature, a dtype or a layout added later is refused by every older backend.
    """

    supported_dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")  # of the query
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto", "float16", "bfloat16")
    supported_head_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(1),)
    supported_block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(1),)
    attn_types: ClassVar[tuple[AttentionType, ...]] = (AttentionType.DECODER,)
    kv_cache_layouts: ClassVar[tuple[str, ...]] = ("NHD", "HND")
    quant_modes: ClassVar[tuple[str, ...]] = ("none",)
    platforms: ClassVar[tuple[str, ...]] = ("cpu", "gpu", "tpu")
    min_compute_capability: ClassVar[int] = 0  # 90 for sm_90; only GPUs have one
    features: ClassVar[frozenset[Feature]] = frozenset()
    mla: ClassVar[bool] = False  # latent caches only
    sparse: ClassVar[bool] = False  # attends to listed tokens only
    ssm: ClassVar[bool] = False  # a state, not a cache

    def __new__(cls, *args, **kwargs):
        raise TypeError(f"{cls.__name__} is never instantiated: it only hands out get_impl_cls() and get_builder_cls()")

    @classmethod
    @abc.abstractmethod
    def get_name(cls) -> str:
        """The name under which it is registered."""

    @classmethod
    @abc.abstractmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """What computes."""

    @classmethod
    @abc.abstractmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        """What turns common metadata into the backend's own."""

    @classmethod
    @abc.abstractmethod
    def get_metadata_cls(cls) -> type[AttentionMetadata]:
        """The pytree that the builder makes and the impl takes."""

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Logical shape [N S K D] of the key pool; values have a pool of their own: no axis of two."""
        return (num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Permutation from the logical shape to the stored one, e.g. (0, 2, 1, 3): [N S K D] -> [N K S D].

        With the layers dimension, logical [L N S K D]: layers stay outermost, as a pool of L*N blocks.
        """
        order = (0, 2, 1, 3) if cls.get_preferred_kv_cache_layout() == "HND" else (0, 1, 2, 3)
        return (0, *(axis + 1 for axis in order)) if include_num_layers_dimension else order

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """(module, qualified name)."""
        return cls.__module__, cls.__qualname__

    @classmethod
    def get_supported_dtypes(cls) -> tuple[str, ...]:
        """Names of the query dtypes."""
        return cls.supported_dtypes

    @classmethod
    def supports_dtype(cls, dtype) -> bool:
        """By name or by dtype object."""
        return jnp.dtype(dtype).name in cls.supported_dtypes

    @classmethod
    def get_supported_head_sizes(cls) -> tuple[int | MultipleOf, ...]:
        """Numbers, and multiples of numbers."""
        return cls.supported_head_sizes

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """True where the list holds it, or a number that it is declared a multiple of."""
        return any(
            head_size % size.base == 0 if isinstance(size, MultipleOf) else head_size == size
            for size in cls.get_supported_head_sizes()
        )

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Raise ValueError, naming what is supported and where any size is."""
        if not cls.supports_head_size(head_size):
            raise ValueError(
                f"Head size {head_size} is not supported by {cls.__name__.removesuffix('Backend')}. "
                f"Supported head sizes are: [{listed(cls.get_supported_head_sizes())}]. "
                "Use backend='sdpa', which supports all head sizes."
            )

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """None: not asked; else membership, after vLLM's spellings are made ours."""
        return kv_cache_dtype is None or cache_dtype_name(kv_cache_dtype) in cls.supported_kv_cache_dtypes

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> tuple[int | MultipleOf, ...]:
        """Page sizes that the kernel takes."""
        return cls.supported_block_sizes

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """None: not asked; else some listed size divides it, as pages can be split."""
        bases = _bases(cls.get_supported_kernel_block_sizes())
        return block_size is None or any(block_size % base == 0 for base in bases)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The default where it is supported, else the smallest listed size."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        return min(_bases(cls.get_supported_kernel_block_sizes()))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[str, ...]:
        """Physical orders, of 'NHD' and 'HND'."""
        return cls.kv_cache_layouts

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """The one layout it takes, or None where there is a choice."""
        layouts = cls.supported_kv_cache_layouts()
        return layouts[0] if len(layouts) == 1 else None

    @classmethod
    def get_preferred_kv_cache_layout(cls) -> str:
        """The required layout, else what KVCacheSpec(layout='auto') means."""
        return cls.get_required_kv_cache_layout() or "HND"

    @classmethod
    def is_mla(cls) -> bool:
        """True: takes latent caches, and nothing else."""
        return cls.mla

    @classmethod
    def is_sparse(cls) -> bool:
        """True: attends to listed tokens, and nothing else."""
        return cls.sparse

    @classmethod
    def is_ssm(cls) -> bool:
        """True: keeps a state instead of a cache."""
        return cls.ssm

    @classmethod
    def supports(cls, feature: Feature) -> bool:
        """The one place where a feature is looked up."""
        return feature in cls.features

    @classmethod
    def supports_sink(cls) -> bool:
        """One more logit per head in the denominator."""
        return cls.supports(Feature.SINK)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Bidirectional ranges in a causal prompt."""
        return cls.supports(Feature.MM_PREFIX)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """A decoder's batch with causal=False."""
        return cls.supports(Feature.NON_CAUSAL)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """k_scale, v_scale of shape [K]."""
        return cls.supports(Feature.PER_HEAD_QUANT_SCALES)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A request's bits do not depend on its company."""
        return cls.supports(Feature.BATCH_INVARIANCE)

    @classmethod
    def supports_attn_type(cls, attn_type: AttentionType | str) -> bool:
        """Decoders, unless more is declared."""
        return attn_type in cls.attn_types

    @classmethod
    def supports_platform(cls, platform: str, generation: str = "") -> bool:
        """'cpu', 'gpu' or 'tpu', and where it matters a generation."""
        return platform in cls.platforms

    @classmethod
    def supports_compute_capability(cls, capability: int) -> bool:
        """90 for sm_90; 0 where it is unknown, which is no reason to refuse."""
        return not capability or capability >= cls.min_compute_capability

    @classmethod
    def supports_combination(cls, question: Question) -> str | None:
        """A reason where each part is supported but not all together."""
        return None

    @classmethod
    def layer_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip) -> tuple[str, ...]:
        """Further reasons that only this backend has: alignments, sizes, a library that is not there."""
        return ()

    @classmethod
    def query_reasons(
        cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip, dtype: str, keys: str | None = None
    ) -> tuple[str, ...]:
        """Why not queries of this dtype over this cache, or (cache_spec None) over packed keys of dtype `keys`."""
        reasons = []
        if not cls.supports_dtype(dtype):
            known = ", ".join(cls.get_supported_dtypes())
            reasons.append(f"dtype not supported: {dtype} seen, {known} supported")
        if keys is not None and not cls.supports_kv_cache_dtype(keys):
            known = ", ".join(cls.supported_kv_cache_dtypes)
            reasons.append(f"dtype of packed keys not supported: {keys} seen, {known} supported")
        return tuple(reasons)

    @classmethod
    def validate_configuration(cls, head_size: int, **asked) -> list[str]:
        """Every reason against, in a fixed order. Keywords are vLLM's: see Question.from_flags."""
        return reasons_against(cls, Question.from_flags(head_size, **asked))

    @classmethod
    def reasons(
        cls,
        spec: AttentionSpec,
        cache_spec: KVCacheSpec | None,
        chip: Chip,
        needs: tuple[Feature, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> tuple[str, ...]:
        """Every reason against this layer over this cache (None: packed) on this chip; empty: it runs.

        dtypes: of the queries and, where there is no cache, of the packed keys; (): not asked.
        """
        own = cls.layer_reasons(spec, cache_spec, chip)
        own += cls.query_reasons(spec, cache_spec, chip, *dtypes) if dtypes else ()
        return tuple(reasons_against(cls, Question.of(spec, cache_spec, chip, needs), own))


def _bases(sizes) -> tuple[int, ...]:
    return tuple(size.base if isinstance(size, MultipleOf) else size for size in sizes)
