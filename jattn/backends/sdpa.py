"""`sdpa`: plain jnp for any platform and any shape; the baseline for the speed of other backends."""

import dataclasses

from jattn.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from jattn.backends.capability import Question, cache_dtype_name
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.ops.attend import AttentionCall, Path, attend_packed
from jattn.ops.gradient import forward_only
from jattn.ops.levels import Level, attend_levels, batch_of, levels_of_cascade, shared_prefix, single_level
from jattn.ops.parallel import shard_level
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from jattn.types import AnyArray, AttentionCGSupport, AttentionType, Feature, MultipleOf, pytree, static
from pallas_kernels.algebra import quant, rounding


@pytree
class SdpaMetadata:
    """The levels of keys (a plain batch has one level) and the slots of the new tokens."""

    levels: tuple[Level, ...]
    slot_mapping: AnyArray  # i32[T] slots of k and v
    is_causal: bool = static()  # see CommonAttentionMetadata

    @property
    def num_tokens(self) -> int:
        return self.levels[0].batch.num_tokens

    @property
    def block_table(self) -> AnyArray:
        """The block table of the last level."""
        return self.levels[-1].block_table


@dataclasses.dataclass(frozen=True)
class SdpaMetadataBuilder(AttentionMetadataBuilder[SdpaMetadata]):
    """Positions and lengths, computed once per step for all layers of the spec."""

    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SdpaMetadata:
        """The whole blocks of a common prefix are read once for the batch, not once for each request."""
        common = common_attn_metadata
        level, size = single_level(common, self.spec.attn_type), self.cache_spec.block_size
        written, shard = keys_of(common, self.spec.attn_type), self.parallel.dcp_shard(self.cache_spec)
        levels, slots = (level,), written.slot_mapping
        if shard is not None:
            lens = common.dcp_local_seq_lens if written is common else None
            levels, slots = (shard_level(level, shard, lens),), shard.slot_mapping(written, size)
        elif common_prefix_len and not fast_build:
            levels = shared_prefix(level, common_prefix_len, size)
        return SdpaMetadata(levels=levels, slot_mapping=slots, is_causal=common.is_causal)

    def build_cascade(self, levels: tuple[CommonAttentionMetadata, ...]) -> SdpaMetadata:
        """The plan of a cascade. New keys are written to the slots of the last level."""
        if self.parallel.dcp_world_size > 1:
            raise UnsupportedError("a cascade does not support dcp_world_size > 1: use one batch, or dcp_world_size=1")
        return SdpaMetadata(
            levels=levels_of_cascade(tuple(levels)),
            slot_mapping=levels[-1].slot_mapping,
            is_causal=levels[-1].is_causal,
        )

    def update_block_table(self, metadata: SdpaMetadata, block_table, slot_mapping) -> SdpaMetadata:
        """The same plan with another block table; ValueError for a cascade, which has one for each level."""
        first, *others = metadata.levels
        if others:
            raise ValueError("a cascade has a block table for each level: build a new plan")
        level = dataclasses.replace(first, block_table=block_table)
        return dataclasses.replace(metadata, levels=(level,), slot_mapping=slot_mapping)

    def for_layer(self, metadata: SdpaMetadata, layer, blocks_per_layer: int) -> SdpaMetadata:
        """Adds the offset of the layer to the block table of each level."""
        levels = tuple(
            dataclasses.replace(level, block_table=level.block_table + layer * blocks_per_layer)
            for level in metadata.levels
        )
        slots = self.slots_of_layer(metadata, layer, blocks_per_layer)
        return dataclasses.replace(metadata, levels=levels, slot_mapping=slots)


def fastest_path(chip: Chip) -> Path:
    """The path of the forward pass on this chip. The gradient is always that of the chunked reference.

    The path depends on the platform only. If it depended on the size of the batch, the last bits of a request's result
    would too. On a CPU the loop is the fastest path for small batches as well.
    """
    return "cpu_loop" if chip.platform == "cpu" else "chunked"


@dataclasses.dataclass(frozen=True)
class SdpaImpl(AttentionImpl[SdpaMetadata]):
    """Calls the reference of jattn.ops, or on a CPU the tuned jattn.ops.cpu_loop."""

    can_return_lse_for_decode = True
    supports_quant_query_input = True
    path: Path | None = None  # None: fastest_path of the chip

    def forward(self, q, cache, m: SdpaMetadata, params=None) -> AttentionState:
        q, cache, params = self._without_gradient_if_quantised((q, cache, params))
        path, combine = self._path, self.parallel.combine
        return attend_levels(self.spec, path, m.is_causal, q, cache, m.levels, params, combine=combine)

    def forward_packed(self, q, k, v, meta: CommonAttentionMetadata, params=None) -> AttentionState:
        q, k, v, params = self._without_gradient_if_quantised((q, k, v, params))
        max_query_len = queries_of(meta, self.spec.attn_type).max_query_len
        call = AttentionCall(self.spec, meta.is_causal, max_query_len, self._path)
        batch, longest = batch_of(meta, self.spec.attn_type), keys_of(meta, self.spec.attn_type).max_seq_len
        return attend_packed(call, q, k, v, batch, params, longest)

    def fused_output_quant_supported(self, quant_key: str) -> bool:
        return cache_dtype_name(quant_key) in quant.QUANTISED

    @property
    def _path(self) -> Path:
        """The loop for CPUs rounds nothing to 8 bits."""
        return self.path or ("chunked" if self.spec.compute_dtype else fastest_path(self.chip))

    def _without_gradient_if_quantised(self, inputs):
        """The inputs. If numbers are rounded to 8 bits, a gradient raises; without this it would be 0."""
        return without_gradient_if_quantised(self.spec, inputs)


def without_gradient_if_quantised(spec: AttentionSpec, inputs):
    """The inputs. If the layer rounds its result, or queries and weights, a gradient raises."""
    for name in ("output_dtype", "compute_dtype"):
        if (dtype := getattr(spec, name)) is not None:
            inputs = forward_only(inputs, f"{name}={dtype!r}", "leave it None to differentiate")
    return inputs


def cache_of_eight_bit_products(question: Question) -> str | None:
    """The reason against this cache of a layer with compute_dtype, if there is one."""
    if not question.needs_feature(Feature.EIGHT_BIT_PRODUCTS) or question.kv_cache_dtype == rounding.FP8:
        return None
    seen = "no cache" if question.kv_cache_dtype in (None, "auto") else f"a {question.kv_cache_dtype} cache"
    return f"{Feature.EIGHT_BIT_PRODUCTS} not supported with {seen}: {rounding.FP8} supported"


class SdpaBackend(AttentionBackend):
    """Any head size, any block size, and every option of AttentionSpec."""

    name = "sdpa"
    impl_cls = SdpaImpl
    builder_cls = SdpaMetadataBuilder
    metadata_cls = SdpaMetadata
    supported_dtypes = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_kv_cache_dtypes = (
        *("auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "float8_e4m3fnuz"),
    )
    supported_block_sizes = (MultipleOf(1),)
    attn_types = (
        AttentionType.DECODER,
        AttentionType.ENCODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    kv_cache_layouts = ("NHD", "HND", "HND128")
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
            Feature.DCP,
            Feature.TWO_SIDED_WINDOW,
            Feature.CHUNK,
            Feature.CHUNK_LOOKBACK,
            Feature.ALIBI,
            Feature.ALIBI_SQRT,
            Feature.SOFT_CAP,
            Feature.MASK_FN,
            Feature.SCORE_FN,
            Feature.QQ_BIAS,
            Feature.DISTANCE_BIAS,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.PACKED,
            Feature.CASCADE,
            Feature.FUSED_OUTPUT_QUANT,
            Feature.EIGHT_BIT_PRODUCTS,
        }
    )

    @classmethod
    def supports_combination(cls, question: Question) -> str | None:
        return cache_of_eight_bit_products(question)
