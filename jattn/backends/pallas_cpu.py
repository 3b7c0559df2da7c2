"""`pallas_cpu`: the portable Pallas kernel in Pallas's interpreter: a slow reference for every platform.

Packed keys are first copied to a temporary cache.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from jattn.backends.kernel import as_arrays
from jattn.cache import PagedKV
from jattn.cache.write import packed_as_pages
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.ops.gradient import forward_only
from jattn.ops.layer import output_dtype
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AttentionCGSupport, AttentionType, Feature, MultipleOf, pytree, static
from pallas_kernels.algebra import quant
from pallas_kernels.cpu import tiles
from pallas_kernels.cpu.paged_attention import KernelConfig, KernelParams, PagedBatch, PagePool, paged_attention

TILE_ROWS = 8
"""Queries of one Pallas program. It is the same for every batch, so a request's result has the same bits in each."""


@pytree
class PallasCpuMetadata:
    """The kernel's batch and tiles, and where new tokens are written."""

    batch: PagedBatch  # lengths, block table and causality
    tiles: tiles.QueryTiles  # which queries each program computes
    slot_mapping: jax.Array  # i32[T] slots of k and v
    num_tokens: int = static()  # T
    is_causal: bool = static()  # see CommonAttentionMetadata

    @property
    def block_table(self) -> jax.Array:
        return self.batch.block_table


@dataclasses.dataclass(frozen=True)
class PallasCpuMetadataBuilder(AttentionMetadataBuilder[PallasCpuMetadata]):
    """Computes the tiles and lengths."""

    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PallasCpuMetadata:
        """common_prefix_len has no effect: the kernel reads a shared prefix once for each request."""
        return _metadata(common_attn_metadata, self.spec.attn_type)

    def update_block_table(self, metadata: PallasCpuMetadata, block_table, slot_mapping) -> PallasCpuMetadata:
        batch = metadata.batch._replace(block_table=jnp.asarray(block_table))
        return dataclasses.replace(metadata, batch=batch, slot_mapping=slot_mapping)


@dataclasses.dataclass(frozen=True)
class PallasCpuImpl(AttentionImpl[PallasCpuMetadata]):
    """One kernel call."""

    can_return_lse_for_decode = True
    supports_quant_query_input = True

    def forward(self, q, cache: PagedKV, m: PallasCpuMetadata, params: AttentionParams) -> AttentionState:
        quantised = self.spec.output_dtype
        config = KernelConfig(
            mask=self.spec.mask_rule(m.is_causal),
            logits=self.spec.logit_rule(),
            kv_dtype=cache.spec.dtype,
            out_dtype="float32" if quantised else output_dtype(q.dtype),
            layout=cache.spec.physical_layout,
        )
        pool = PagePool(cache.k, cache.v, cache.k_token_scale, cache.v_token_scale)
        q, pool, kernel_params = forward_only((q, pool, _kernel_params(self.spec, params)), "pallas_cpu")
        out, lse = paged_attention(q, pool, m.batch, m.tiles, kernel_params, config=config, interpret=True)
        out = quant.to_dtype(out, quantised, params.output_scale) if quantised else out
        return AttentionState(out=out, lse=lse)

    def forward_packed(self, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> AttentionState:
        m = _metadata(meta, self.spec.attn_type)
        cache, block_table = packed_as_pages(k, v, m.batch.seq_lens, keys_of(meta, self.spec.attn_type).max_seq_len)
        return self.forward(q, cache, dataclasses.replace(m, batch=m.batch._replace(block_table=block_table)), params)


class PallasCpuBackend(AttentionBackend):
    """Any head size, block size and platform; no gradient, context parallelism or cascade."""

    name = "pallas_cpu"
    impl_cls = PallasCpuImpl
    builder_cls = PallasCpuMetadataBuilder
    metadata_cls = PallasCpuMetadata
    supported_dtypes = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_kv_cache_dtypes = ("auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_block_sizes = (MultipleOf(1),)
    attn_types = (
        AttentionType.DECODER,
        AttentionType.ENCODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    platforms = ("cpu", "gpu", "tpu")
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
    features = frozenset(
        {
            Feature.SINK,
            Feature.PER_HEAD_QUANT_SCALES,
            Feature.SLIDING_WINDOW,
            Feature.NON_CAUSAL,
            Feature.BATCH_INVARIANCE,
            Feature.TWO_SIDED_WINDOW,
            Feature.CHUNK,
            Feature.CHUNK_LOOKBACK,
            Feature.ALIBI,
            Feature.ALIBI_SQRT,
            Feature.SOFT_CAP,
            Feature.MASK_FN,
            Feature.SCORE_FN,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.PACKED,
            Feature.FUSED_OUTPUT_QUANT,
        }
    )


def _metadata(common: CommonAttentionMetadata, attn_type: AttentionType) -> PallasCpuMetadata:
    """The plan of a batch. Only a decoder's layer is ever causal. forward_packed replaces the block table."""
    queries, keys = queries_of(common, attn_type), keys_of(common, attn_type)
    causal = common.causal_per_request if attn_type is AttentionType.DECODER else None
    table = jnp.zeros((queries.max_num_reqs, 1), jnp.int32) if keys.block_table is None else keys.block_table
    batch = PagedBatch(
        query_lens=queries.query_lens(),
        seq_lens=jnp.asarray(keys.seq_lens),
        num_computed_tokens=queries.num_computed_tokens(),
        block_table=jnp.asarray(table),
        causal=None if causal is None else jnp.asarray(causal),
    )
    return PallasCpuMetadata(
        batch=batch,
        tiles=tiles.make_tiles(jnp.asarray(queries.query_start_loc), queries.num_tokens, TILE_ROWS),
        slot_mapping=jnp.asarray(keys.slot_mapping),
        num_tokens=queries.num_tokens,
        is_causal=common.is_causal,
    )


def _kernel_params(spec: AttentionSpec, params: AttentionParams) -> KernelParams:
    """The kernel's traced parameters, without those that the spec does not use."""
    q_scale, k_scale, v_scale = as_arrays(params.q_scale, params.k_scale, params.v_scale)
    return KernelParams(
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        alibi_slopes=params.alibi_slopes if spec.has_alibi else None,
        sinks=params.sinks if spec.has_sinks else None,
    )
