"""The plan of `pallas_gpu`: the work list of a batch, and of the levels or ranks among which its keys are divided."""

import dataclasses

import jax.numpy as jnp

from jattn.backends import gpu_kernel
from jattn.backends.base import AttentionMetadataBuilder
from jattn.backends.capability import Question
from jattn.backends.gpu_ranks import peers_of
from jattn.backends.rswa import launches_of
from jattn.errors import UnsupportedError
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.metadata.cascade import prefix_levels
from jattn.metadata.mm_prefix import fill_mm_prefix_query_ranges
from jattn.metadata.parallel import KeyShard
from jattn.ops.rank_launches import Peers
from jattn.types import AnyArray, AttentionCGSupport, AttentionType, Feature, pytree
from pallas_kernels.algebra.token_ranges import token_ranges
from pallas_kernels.gpu.work_list import GpuWorkList, build_work_list

IN_LEVELS = (
    *(Feature.SINK, Feature.PER_HEAD_QUANT_SCALES, Feature.NON_CAUSAL, Feature.SOFT_CAP, Feature.PER_REQUEST_CAUSAL),
    *(Feature.DIFF_KV, Feature.LSE, Feature.FUSED_OUTPUT_QUANT, Feature.EIGHT_BIT_PRODUCTS),
)
"""Features that a layer may need beside levels of keys: they do not depend on the positions of queries and keys."""

IN_SHARDS = (*IN_LEVELS, Feature.SLIDING_WINDOW, Feature.TWO_SIDED_WINDOW, Feature.CHUNK, Feature.CHUNK_LOOKBACK)
"""Features that a layer may need beside DCP: a range of positions is a range of one rank's keys."""


def against_levels(question: Question) -> list[str]:
    """The options of a layer with which the kernel cannot attend to keys in levels."""
    return _beyond(question, (*IN_LEVELS, Feature.CASCADE))


def against_shards(question: Question) -> list[str]:
    """The options of a layer whose keys cannot be on several ranks."""
    return _beyond(question, (*IN_SHARDS, Feature.DCP))


def _beyond(question: Question, allowed: tuple[Feature, ...]) -> list[str]:
    found = [option for feature, option in question.needs if feature not in allowed]
    kind = question.attn_type
    return found if kind is AttentionType.DECODER else [*found, f"attn_type={kind.value}"]


@pytree
class PallasGpuMetadata:
    """The batch, its blocks and slots, and the work list of the CTAs; of a cascade, those of the last level."""

    common: CommonAttentionMetadata
    block_table: AnyArray | None  # i32[R B] of the keys
    slot_mapping: AnyArray  # i32[T] slots of k and v
    work: GpuWorkList  # pieces of queries and keys, divided among the CTAs
    shared: tuple["PallasGpuMetadata", ...] = ()  # of a cascade: the plans of the levels before
    shard: KeyShard | None = None  # the keys of this rank, if several have them
    peers: Peers | None = None  # by which the ranks' states are merged, never copied; None: by collectives
    prefix: GpuWorkList | None = None  # with use_rswa: of the keys that are visible before the window

    @property
    def num_tokens(self) -> int:
        return self.common.num_tokens


@dataclasses.dataclass(frozen=True)
class PallasGpuMetadataBuilder(AttentionMetadataBuilder[PallasGpuMetadata]):
    """Divides the batch into pieces of equal cost, in a few small XLA kernels and without a host sync."""

    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_cascade = True
    invariant: bool = False  # see kernel_config

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PallasGpuMetadata:
        """The whole blocks of a common prefix are read once for the batch, where the layer allows levels of keys.

        common_prefix_len: if it is 0, that of the batch, which may be traced.
        """
        common, size = common_attn_metadata, self.cache_spec.block_size
        prefix = common_prefix_len or common.common_prefix_len
        if prefix is not None and not fast_build and self.shares_prefixes:
            return self.build_cascade(prefix_levels(common, prefix, size))
        return self._level(common)

    @property
    def shares_prefixes(self) -> bool:
        """The layer's options allow levels of keys."""
        if self.parallel.dcp_world_size > 1 or self.invariant:
            return False
        return not against_levels(Question.of(self.spec, self.cache_spec))

    def build_cascade(self, levels: tuple[CommonAttentionMetadata, ...]) -> PallasGpuMetadata:
        """The plan of a cascade. All queries see all keys of the levels before the last."""
        if self.parallel.dcp_world_size > 1:
            raise UnsupportedError("a cascade does not support dcp_world_size > 1: use one batch, or dcp_world_size=1")
        if self.invariant:
            raise UnsupportedError("a cascade is not batch-invariant: use one batch, or backend='pallas_gpu'")
        *shared, last = levels
        plans = (self._level(level.replace(causal=False)) for level in shared)
        return dataclasses.replace(self._level(last), shared=tuple(plans))

    def update_block_table(self, metadata: PallasGpuMetadata, block_table, slot_mapping) -> PallasGpuMetadata:
        """The same plan with another block table; ValueError for a cascade, which has one for each level."""
        if metadata.shared:
            raise ValueError("a cascade has a block table for each level: build a new plan")
        return super().update_block_table(metadata, block_table, slot_mapping)

    def for_layer(self, metadata: PallasGpuMetadata, layer, blocks_per_layer: int) -> PallasGpuMetadata:
        """Adds the offset of the layer to the block table of each level."""
        shared = tuple(self.for_layer(level, layer, blocks_per_layer) for level in metadata.shared)
        last = super().for_layer(dataclasses.replace(metadata, shared=()), layer, blocks_per_layer)
        return dataclasses.replace(last, shared=shared)

    def _level(self, common: CommonAttentionMetadata) -> PallasGpuMetadata:
        kind = self.spec.attn_type
        queries, keys = queries_of(common, kind), keys_of(common, kind)
        causal = common.causal_per_request if kind is AttentionType.DECODER else None
        dtype = gpu_kernel.usual_query_dtype(self.cache_spec)
        config_of = lambda spec: gpu_kernel.kernel_config(
            spec, self.cache_spec, dtype, common, self.chip, None, self.parallel, self.invariant
        )
        config = config_of(self.spec)
        shard, slots, own, peers = self.parallel.dcp_shard(self.cache_spec), keys.slot_mapping, {}, None
        if shard is not None:
            slots = shard.slot_mapping(keys, self.cache_spec.block_size)
            own = dict(rank=shard.rank, local_lens=shard.local_lens(keys))
            peers = peers_of(self.spec, queries.num_tokens, self.parallel, self.chip)
        causal = None if causal is None else jnp.asarray(causal)
        lengths = jnp.asarray(queries.query_start_loc), jnp.asarray(keys.seq_lens), queries.num_tokens
        rule, prefix = config.mask, None
        spans = fill_mm_prefix_query_ranges(common, common.mm_prefix_ranges) if rule.spans else None
        if rule.spans:
            own["ranges"] = token_ranges(*lengths, rule, causal, spans)
        if self.spec.use_rswa:
            lens = jnp.asarray(common.rswa_prefix_lens, jnp.int32)
            before = token_ranges(*lengths, rule, causal, spans, lens)
            prefix = build_work_list(*lengths, config_of(launches_of(self.spec)[0]), causal, ranges=before)
        work = build_work_list(*lengths, config, causal, **own)
        return PallasGpuMetadata(
            common=common,
            block_table=keys.block_table,
            slot_mapping=slots,
            work=work,
            shard=shard,
            peers=peers,
            prefix=prefix,
        )
