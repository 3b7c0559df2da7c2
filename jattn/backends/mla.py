"""`mla_sdpa`: multi-head latent attention in plain jnp, for any platform."""

import dataclasses

import jax

from jattn.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from jattn.backends.sdpa import fastest_path
from jattn.cache import PagedKV
from jattn.cache.latent import check_latent, write_latent
from jattn.metadata import CommonAttentionMetadata
from jattn.mla_spec import MLAParams, MLASpec, absorb
from jattn.ops.levels import single_level
from jattn.ops.mla import LatentAttention, MLAMetadata
from jattn.ops.parallel import shard_level
from jattn.ops.state import AttentionState
from jattn.types import AttentionCGSupport, Feature, MultipleOf


@dataclasses.dataclass(frozen=True)
class MLAMetadataBuilder(AttentionMetadataBuilder[MLAMetadata]):
    """One level of keys. The impl chooses the form of each request by its query length."""

    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_dcp_with_varlen = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:
        """The whole blocks of a common prefix are read once for the batch, not once for each request."""
        common, size = common_attn_metadata, self.cache_spec.block_size
        level, slots = single_level(common, self.spec.attn_type), common.slot_mapping
        shard = self.parallel.dcp_shard(self.cache_spec)
        if shard is not None:
            level = shard_level(level, shard, common.dcp_local_seq_lens)
            slots = shard.slot_mapping(common, size)
        prefix = 0 if fast_build or shard is not None else common_prefix_len
        return MLAMetadata(
            level=level, slot_mapping=slots, is_causal=common.is_causal, shared_prefix=prefix // size * size
        )

    def update_block_table(self, metadata: MLAMetadata, block_table, slot_mapping) -> MLAMetadata:
        """The same plan with another block table."""
        level = dataclasses.replace(metadata.level, block_table=block_table)
        return dataclasses.replace(metadata, level=level, slot_mapping=slot_mapping)


@dataclasses.dataclass(frozen=True)
class MLAImpl(AttentionImpl[MLAMetadata]):
    """`spec` is an MLASpec and `params` are MLAParams; q is [T H nope+rope]."""

    can_return_lse_for_decode = True
    spec: MLASpec  # pyright: ignore[reportIncompatibleVariableOverride]  MLASpec is no subclass of AttentionSpec

    @property
    def _latent(self) -> LatentAttention:
        return LatentAttention(self.spec, fastest_path(self.chip), self.parallel.combine)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  a latent layer has MLAParams
        self, q, cache, m: MLAMetadata, params: MLAParams
    ) -> AttentionState:
        return self._latent.forward(q, cache, m, params)

    def forward_mqa(self, q, cache, m: MLAMetadata, params: MLAParams) -> AttentionState:
        """The absorbed form for all requests."""
        return self._latent.forward_mqa(q, cache, m, params)

    def forward_listed(self, q, cache, m: MLAMetadata, params: MLAParams, topk_indices) -> AttentionState:
        """The absorbed form over the keys that each token lists, i32[T n]: see jattn.ops.listed."""
        return self._latent.forward_listed(q, cache, m, params, topk_indices)

    def prefill_mha(self, q, cache, m: MLAMetadata, params: MLAParams, kv_c=None, k_pe=None) -> AttentionState:
        """The materialised form for all requests."""
        return self._latent.prefill_mha(q, cache, m, params, kv_c, k_pe)

    def do_kv_cache_update(  # pyright: ignore[reportIncompatibleMethodOverride]  a latent layer has MLAParams
        self, cache: PagedKV, k: jax.Array, v: jax.Array, m: MLAMetadata, params: MLAParams
    ) -> PagedKV:
        """k is the latent kv_c [T L], v the rotated key k_pe [T R]."""
        return write_latent(self.spec, cache, k, v, m.slot_mapping, params)

    def prepare_params(  # pyright: ignore[reportIncompatibleMethodOverride]  a latent layer has MLAParams
        self, params: MLAParams
    ) -> MLAParams:
        """kv_b_proj becomes w_uk and w_uv."""
        return absorb(self.spec, params)


class MLABackend(AttentionBackend):
    """Latent caches only, split or wide (see jattn.cache.latent)."""

    name = "mla_sdpa"
    impl_cls = MLAImpl
    builder_cls = MLAMetadataBuilder
    metadata_cls = MLAMetadata
    mla = True
    supported_dtypes = ("float32", "float16", "bfloat16")
    supported_kv_cache_dtypes = ("auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_block_sizes = (MultipleOf(1),)
    platforms = ("cpu", "gpu", "tpu")
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
    features = frozenset(
        {
            Feature.SINK,
            Feature.PER_HEAD_QUANT_SCALES,
            Feature.SLIDING_WINDOW,
            Feature.NON_CAUSAL,
            Feature.DCP,
            Feature.TWO_SIDED_WINDOW,
            Feature.CHUNK,
            Feature.ALIBI,
            Feature.SOFT_CAP,
            Feature.MASK_FN,
            Feature.SCORE_FN,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.DECODE_BATCH_INVARIANCE,  # in the absorbed form
        }
    )

    @classmethod
    def layer_reasons(cls, spec, cache_spec, chip) -> tuple[str, ...]:
        """The reason why the cache cannot hold this layer's rows, if there is one."""
        if not isinstance(spec, MLASpec) or cache_spec is None:
            return ()
        try:
            check_latent(spec, cache_spec)
        except ValueError as error:
            return (str(error),)
        return ()
