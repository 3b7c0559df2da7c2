"""vLLM's methods of a backend, a builder and an impl, which the three classes of jattn.backends.base inherit.

They give the class attributes of a backend under vLLM's names, for programs and backends that are ported from vLLM.
jattn itself calls only the getters of lists and supports_sink and the like, which a ported backend may override. The
abstract methods are those of jattn.backends.base that the others call.
"""

import abc
import functools
from typing import Any, ClassVar

import jax
import numpy as np

from jattn.cache import KVCacheSpec
from jattn.compat.vllm.decodes_and_prefills import decode_threshold, reorder_batch_to_split_decodes_and_prefills
from jattn.compat.vllm.graphs import can_run_in_cudagraph
from jattn.metadata import CommonAttentionMetadata, use_cascade_attention
from jattn.spec import AttentionSpec, Window
from jattn.types import AttentionCGSupport, AttentionType, Feature, MultipleOf, bases_of, listed


class BackendMethods(abc.ABC):
    """Class methods of an AttentionBackend."""

    supported_dtypes: ClassVar[tuple[str, ...]]
    supported_head_sizes: ClassVar[tuple[int | MultipleOf, ...]]
    supported_block_sizes: ClassVar[tuple[int | MultipleOf, ...]]
    kv_cache_layouts: ClassVar[tuple[str, ...]]
    mla: ClassVar[bool]
    sparse: ClassVar[bool]
    ssm: ClassVar[bool]

    @classmethod
    @abc.abstractmethod
    def supports(cls, feature: Feature) -> bool:
        """See AttentionBackend."""

    @classmethod
    @abc.abstractmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """See AttentionBackend."""

    @classmethod
    @abc.abstractmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """See AttentionBackend."""

    @classmethod
    def get_kv_cache_shape(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Logical shape [N S K D] of the pool of keys. Values have a pool of their own: no axis of size 2."""
        return (num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The permutation from the logical to the stored shape, e.g. (0, 2, 1, 3) for [N S K D] -> [N K S D].

        With the layers dimension the logical shape is [L N S K D]. The axis of layers stays first.
        """
        order = (0, 2, 1, 3) if cls.get_preferred_kv_cache_layout() == "HND" else (0, 1, 2, 3)
        return (0, *(axis + 1 for axis in order)) if include_num_layers_dimension else order

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """(module, qualified name) of the class."""
        return cls.__module__, cls.__qualname__

    @classmethod
    def get_supported_dtypes(cls) -> tuple[str, ...]:
        """Names of the supported dtypes of queries."""
        return cls.supported_dtypes

    @classmethod
    def get_supported_head_sizes(cls) -> tuple[int | MultipleOf, ...]:
        """Supported values of head_dim and v_head_dim."""
        return cls.supported_head_sizes

    @classmethod
    def validate_head_size(cls, head_size: int) -> None:
        """Raise ValueError for a head size that is not supported."""
        if not cls.supports_head_size(head_size):
            raise ValueError(
                f"Head size {head_size} is not supported by {cls.__name__.removesuffix('Backend')}. "
                f"Supported head sizes are: [{listed(cls.get_supported_head_sizes())}]. "
                "Use backend='sdpa', which supports all head sizes."
            )

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> tuple[int | MultipleOf, ...]:
        """Supported tokens of a block."""
        return cls.supported_block_sizes

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """`default_block_size` if it is supported, else the smallest supported size."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        return min(bases_of(cls.get_supported_kernel_block_sizes()))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[str, ...]:
        """Supported layouts, of 'NHD' and 'HND'."""
        return cls.kv_cache_layouts

    @classmethod
    def get_required_kv_cache_layout(cls) -> str | None:
        """The only supported layout; None if there are several."""
        layouts = cls.supported_kv_cache_layouts()
        return layouts[0] if len(layouts) == 1 else None

    @classmethod
    def get_preferred_kv_cache_layout(cls) -> str:
        """The required layout, or else that of KVCacheSpec(layout='auto')."""
        return cls.get_required_kv_cache_layout() or "HND"

    @classmethod
    def is_mla(cls) -> bool:
        """True: it supports latent caches and no other."""
        return cls.mla

    @classmethod
    def is_sparse(cls) -> bool:
        """True: it attends to listed tokens only."""
        return cls.sparse

    @classmethod
    def is_ssm(cls) -> bool:
        """True: it has a recurrent state instead of a cache."""
        return cls.ssm

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks: one more logit per head in the softmax's denominator."""
        return cls.supports(Feature.SINK)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Spans of a causal prompt whose tokens see each other in both directions."""
        return cls.supports(Feature.MM_PREFIX)

    @classmethod
    def supports_non_causal(cls) -> bool:
        """A batch of a decoder with causal=False."""
        return cls.supports(Feature.NON_CAUSAL)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """k_scale and v_scale of shape [K]."""
        return cls.supports(Feature.PER_HEAD_QUANT_SCALES)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A request's result has the same bits in every batch."""
        return cls.supports(Feature.BATCH_INVARIANCE)


class BuilderMethods(abc.ABC):
    """Methods of an AttentionMetadataBuilder for captured graphs (in JAX: compiled steps) and for ordered batches."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: ClassVar[int | None] = None  # requests with up to this many new tokens come first
    supports_cascade: ClassVar[bool] = False  # a plan with a common_prefix_len can be faster
    supports_spec_as_decode: ClassVar[bool] = False  # a request with drafted tokens counts as a decode
    supports_dcp_with_varlen: ClassVar[bool] = False  # context parallelism with several new tokens in a request

    spec: Any
    cache_spec: Any

    @abc.abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """See AttentionMetadataBuilder."""

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """The shapes and dtypes of the plan, to compile a step ahead of time; takes arrays or ShapeDtypeStructs."""
        return jax.eval_shape(functools.partial(self.build, 0), common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: jax.Array | int) -> Any:
        """The plan of draft step `draft_index` (of a chain: the token; of a tree: the level), built quickly."""
        return self.build(0, common_attn_metadata, fast_build=True)

    @classmethod
    def get_cudagraph_support(cls, spec: AttentionSpec, cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Which batches one compiled step covers, for this layer."""
        return cls.cudagraph_support

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Does get_cudagraph_support cover this batch? Host only: it reads the query lengths."""
        return can_run_in_cudagraph(common_attn_metadata, self.get_cudagraph_support(self.spec, self.cache_spec))

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: np.ndarray,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int = 1,
    ) -> bool:
        """Is it faster to read a shared prefix in a pass of its own? See jattn.metadata.use_cascade_attention."""
        return self.supports_cascade and use_cascade_attention(
            common_prefix_len,
            query_lens,
            num_query_heads,
            num_kv_heads,
            use_alibi,
            use_sliding_window,
            use_local_attention,
            num_sms,
            dcp_world_size,
        )

    def decode_threshold(self, num_speculative_tokens: int | None = None, dcp_world_size: int = 1) -> int | None:
        """The most new tokens of a request that counts as a decode; None: the backend treats all requests alike."""
        return decode_threshold(
            self.reorder_batch_threshold,
            num_speculative_tokens,
            dcp_world_size,
            supports_spec_as_decode=self.supports_spec_as_decode,
            supports_dcp_with_varlen=self.supports_dcp_with_varlen,
        )

    def reorder_batch(self, common_attn_metadata: CommonAttentionMetadata) -> tuple[Any, Any]:
        """(permutation with decodes first, does it change the order?). Without a threshold the order is unchanged."""
        if self.reorder_batch_threshold is None:
            return np.arange(common_attn_metadata.max_num_reqs), False
        return reorder_batch_to_split_decodes_and_prefills(common_attn_metadata, self.reorder_batch_threshold)


class ImplMethods:
    """vLLM's attributes of an AttentionImpl, read from its spec."""

    can_return_lse_for_decode: ClassVar[bool] = False
    supports_pcp: ClassVar[bool] = False  # prefill context parallelism
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = False
    supports_quant_query_input: ClassVar[bool] = False  # quantised queries; the backend lists their dtypes

    spec: Any
    cache_spec: Any
    parallel: Any

    def fused_output_quant_supported(self, quant_key: str) -> bool:
        """Can the kernel write its output quantised to `quant_key`?"""
        return False

    @property
    def num_heads(self) -> int:
        """H, query heads."""
        return self.spec.num_heads

    @property
    def num_kv_heads(self) -> int:
        """K, key/value heads."""
        return self.spec.num_kv_heads

    @property
    def num_queries_per_kv(self) -> int:
        """G, query heads of one kv head."""
        return self.spec.group_size

    @property
    def head_size(self) -> int:
        """D, elements of a query or key of one head."""
        return self.spec.head_dim

    @property
    def scale(self) -> float:
        """Factor on q.k."""
        return self.spec.scale

    @property
    def sliding_window(self) -> Window:
        """(left, right): how many keys before and after the query's own are visible; -1: all."""
        return self.spec.window

    @property
    def logits_soft_cap(self) -> float | None:
        """Cap of cap * tanh(logit / cap); None: off."""
        return self.spec.logits_soft_cap

    @property
    def attn_type(self) -> AttentionType:
        """Which tokens are queries and which are keys."""
        return self.spec.attn_type

    @property
    def kv_cache_dtype(self) -> str:
        """The cache's dtype; 'auto' without a cache."""
        return "auto" if self.cache_spec is None else self.cache_spec.dtype

    @property
    def need_to_return_lse_for_decode(self) -> bool:
        """Is the lse needed to merge the states of several ranks, each with a part of a request's keys?"""
        return self.parallel.dcp_world_size > 1 and self.can_return_lse_for_decode
