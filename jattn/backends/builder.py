"""AttentionMetadataBuilder: turns a batch's common metadata into the backend's own pytree, once a step."""

import abc
import dataclasses
import functools
from typing import Any, ClassVar, Generic

import jax
import jax.numpy as jnp
import numpy as np

from jattn.backends.metadata import M
from jattn.backends.parallel import ContextParallel
from jattn.cache import KVCacheSpec
from jattn.compat.vllm import can_run_in_cudagraph, decode_threshold, reorder_batch_to_split_decodes_and_prefills
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata import CommonAttentionMetadata, use_cascade_attention
from jattn.spec import AttentionSpec
from jattn.types import PAD_SLOT_ID, AttentionCGSupport


@dataclasses.dataclass(frozen=True)
class AttentionMetadataBuilder(abc.ABC, Generic[M]):
    """Holds no state: build is pure and may run on the host or inside jit."""

    cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    reorder_batch_threshold: ClassVar[int | None] = None  # queries up to this go in front; None: any order
    supports_update_block_table: ClassVar[bool] = False  # of M's fields block_table and slot_mapping, or its own way
    supports_cascade: ClassVar[bool] = False  # common_prefix_len is worth asking for
    supports_spec_as_decode: ClassVar[bool] = False
    supports_dcp_with_varlen: ClassVar[bool] = False

    spec: AttentionSpec
    cache_spec: KVCacheSpec  # packed attention needs no plan
    chip: Chip
    parallel: ContextParallel = ContextParallel()
    dtype: str | None = None  # of the queries, where it decides who computes; None: not known

    @abc.abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """The plan of this batch; fast_build favours a quick plan over a fast kernel.

        Every request's first common_prefix_len keys are the same pages: a hint, results do not depend on it.
        """

    def update_block_table(self, metadata: M, blk_table: jax.Array, slot_mapping: jax.Array) -> M:
        """The same plan over other pages: for layers that share lengths but not pages."""
        if not self.supports_update_block_table:
            raise UnsupportedError(f"{type(self).__name__} cannot exchange the block table of a plan; build it anew")
        fields = {"block_table": blk_table, "slot_mapping": slot_mapping}
        return dataclasses.replace(metadata, **fields)  # pyright: ignore[reportArgumentType]

    def for_layer(self, metadata: M, layer: jax.Array | int, blocks_per_layer: int) -> M:
        """The plan of layer l where layers share one pool: its pages begin at l * blocks_per_layer."""
        table = jnp.asarray(metadata.block_table) + layer * blocks_per_layer
        return self.update_block_table(metadata, table, self.slots_of_layer(metadata, layer, blocks_per_layer))

    def slots_of_layer(self, metadata: M, layer: jax.Array | int, blocks_per_layer: int) -> jax.Array:
        """The slots of for_layer; one that lies outside a layer's own pages still writes nowhere."""
        slots, per_layer = jnp.asarray(metadata.slot_mapping), blocks_per_layer * self.cache_spec.block_size
        return jnp.where((slots >= 0) & (slots < per_layer), slots + layer * per_layer, PAD_SLOT_ID)

    def build_cascade(self, levels: tuple[CommonAttentionMetadata, ...]) -> M:
        """The plan of queries whose keys come in levels, each level's requests within one of the level before."""
        raise UnsupportedError(f"{type(self).__name__} has no cascade; use backend='sdpa'")

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> M:
        """Shapes and dtypes only, to lower a step ahead of time; arrays or ShapeDtypeStructs go in."""
        return jax.eval_shape(functools.partial(self.build, 0), common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: jax.Array | int) -> M:
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


def fits(program: CommonAttentionMetadata, batch: CommonAttentionMetadata) -> bool:
    """Would `batch` run on the step compiled for `program` (arrays or ShapeDtypeStructs)? Same trace key."""
    key = lambda meta: [(x.shape, x.dtype) for x in jax.tree.leaves(meta)]  # noqa: E731
    return jax.tree.structure(program) == jax.tree.structure(batch) and key(program) == key(batch)
