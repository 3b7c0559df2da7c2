"""vLLM's methods of a backend, a builder and an impl, which the three classes of jattn.backends.base inherit.

They restate in vLLM's names what the class attributes already say, for programs and backends that are ported from it.
jattn calls none of them but the getters of lists, which a ported backend may override.
"""

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


class BackendMethods:
    """Class methods over the lists of an AttentionBackend."""

    supported_dtypes: ClassVar[tuple[str, ...]]
    supported_head_sizes: ClassVar[tuple[int | MultipleOf, ...]]
    supported_block_sizes: ClassVar[tuple[int | MultipleOf, ...]]
    kv_cache_layouts: ClassVar[tuple[str, ...]]
    mla: ClassVar[bool]
    sparse: ClassVar[bool]
    ssm: ClassVar[bool]

    @classmethod
    def supports(cls, feature: Feature) -> bool:
        """See AttentionBackend."""
        raise NotImplementedError

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """See AttentionBackend."""
        raise NotImplementedError

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """See AttentionBackend."""
        raise NotImplementedError

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
    def get_supported_head_sizes(cls) -> tuple[int | MultipleOf, ...]:
        """Numbers, and multiples of numbers."""
        return cls.supported_head_sizes

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
    def get_supported_kernel_block_sizes(cls) -> tuple[int | MultipleOf, ...]:
        """Page sizes that the kernel takes."""
        return cls.supported_block_sizes

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The default where it is supported, else the smallest listed size."""
        if cls.supports_block_size(default_block_size):
            return default_block_size
        return min(bases_of(cls.get_supported_kernel_block_sizes()))

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


class BuilderMethods:
    """Methods of an AttentionMetadataBuilder for captured graphs (here: steps compiled ahead) and ordered batches."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: ClassVar[int | None] = None  # queries up to this go in front; None: any order
    supports_cascade: ClassVar[bool] = False  # common_prefix_len is worth asking for
    supports_spec_as_decode: ClassVar[bool] = False
    supports_dcp_with_varlen: ClassVar[bool] = False

    spec: Any
    cache_spec: Any

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False):
        """See AttentionMetadataBuilder."""
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Shapes and dtypes only, to lower a step ahead of time; arrays or ShapeDtypeStructs go in."""
        return jax.eval_shape(functools.partial(self.build, 0), common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: jax.Array | int) -> Any:
        """The plan of draft step i (i-th chained token, or i-th tree level): quick, and fit for lax.scan."""
        return self.build(0, common_attn_metadata, fast_build=True)

    @classmethod
    def get_cudagraph_support(cls, spec: AttentionSpec, cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Which batches one compiled step covers, for this layer."""
        return cls.cudagraph_support

    def can_run_in_cudagraph(self, common_attn_metadata: CommonAttentionMetadata) -> bool:
        """Does get_cudagraph_support cover this batch? Host only: query lengths are looked at as values."""
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
        """Is a shared prefix worth a pass of its own? Never, unless the backend says that it can be."""
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
        """Longest query of a request that counts as decode; None: this backend does not tell them apart."""
        return decode_threshold(
            self.reorder_batch_threshold,
            num_speculative_tokens,
            dcp_world_size,
            supports_spec_as_decode=self.supports_spec_as_decode,
            supports_dcp_with_varlen=self.supports_dcp_with_varlen,
        )

    def reorder_batch(self, common_attn_metadata: CommonAttentionMetadata) -> tuple[Any, Any]:
        """(permutation of the requests, is it a change): decodes first, or as they are where any order will do."""
        if self.reorder_batch_threshold is None:
            return np.arange(common_attn_metadata.max_num_reqs), False
        return reorder_batch_to_split_decodes_and_prefills(common_attn_metadata, self.reorder_batch_threshold)


class ImplMethods:
    """vLLM's attributes of an impl, read from its spec."""

    can_return_lse_for_decode: ClassVar[bool] = False
    supports_pcp: ClassVar[bool] = False
    supports_mtp_with_cp_non_trivial_interleave_size: ClassVar[bool] = False
    supports_quant_query_input: ClassVar[bool] = False  # then its backend lists the dtypes

    spec: Any
    cache_spec: Any
    parallel: Any

    def fused_output_quant_supported(self, quant_key: str) -> bool:
        """True where the kernel can write its output already quantised to `quant_key`."""
        return False

    @property
    def num_heads(self) -> int:
        """H."""
        return self.spec.num_heads

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.spec.num_kv_heads

    @property
    def num_queries_per_kv(self) -> int:
        """G."""
        return self.spec.group_size

    @property
    def head_size(self) -> int:
        """D."""
        return self.spec.head_dim

    @property
    def scale(self) -> float:
        """Factor on q.k."""
        return self.spec.scale

    @property
    def sliding_window(self) -> Window:
        """(left, right) extra keys, -1 = unlimited."""
        return self.spec.window

    @property
    def logits_soft_cap(self) -> float | None:
        """None is off."""
        return self.spec.logits_soft_cap

    @property
    def attn_type(self) -> AttentionType:
        """Who attends to whom."""
        return self.spec.attn_type

    @property
    def kv_cache_dtype(self) -> str:
        """'auto' where there is no cache."""
        return "auto" if self.cache_spec is None else self.cache_spec.dtype

    @property
    def need_to_return_lse_for_decode(self) -> bool:
        """Ranks that hold parts of a request's keys merge their states, which takes an lse."""
        return self.parallel.dcp_world_size > 1 and self.can_return_lse_for_decode
