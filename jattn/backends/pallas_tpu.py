"""`pallas_tpu`: one Mosaic TPU kernel for decode, prefill and mixed batches. The first choice on TPU.

It was never run on a TPU: tests interpret it on CPU and compile it ahead of time for v5e, v5p, v6e and tpu7x. The cache
has the layout HND, so a block of all kv heads is one contiguous copy. Only queries and outputs are copied to another
layout around the kernel. The gradient is that of `sdpa`: the backward pass computes the forward pass again.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jattn.backends.base import AttentionImpl, AttentionMetadataBuilder
from jattn.backends.kernel import PagedKernelBackend
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.write import packed_as_pages, write_by_head
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata.batch import CommonAttentionMetadata, keys_of, queries_of
from jattn.ops.gradient import paged_gradient
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AnyArray, AttentionCGSupport, AttentionType, Feature, MultipleOf, pytree
from pallas_kernels.algebra import quant
from pallas_kernels.tpu.config import TpuKernelConfig
from pallas_kernels.tpu.paged_attention import ragged_paged_attention
from pallas_kernels.tpu.supports import supports, supports_batch
from pallas_kernels.tpu.tile_policy import default_config
from pallas_kernels.tpu.work_list import TpuWorkList, build_work_list

QUERY_DTYPES = ("bfloat16", "float32")


def kernel_config(
    spec: AttentionSpec,
    cache_spec: KVCacheSpec,
    dtype: str = "bfloat16",
    common: CommonAttentionMetadata | None = None,
    params: AttentionParams | None = None,
) -> TpuKernelConfig:
    """The kernel's static arguments, not checked: see supports.py. A work list depends on neither dtype nor params."""
    decoder = spec.attn_type is AttentionType.DECODER
    return default_config(
        longest=None if common is None else queries_of(common, spec.attn_type).max_query_len,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        page_size=cache_spec.block_size,
        dtype=dtype,
        kv_dtype=cache_spec.dtype,
        out_dtype=dtype if spec.output_dtype is None else "float32",
        mask=spec.mask_rule(common is None or common.is_causal),
        logits=spec.logit_rule(),
        has_sinks=spec.has_sinks,
        per_head_q_scale=params is not None and params.q_scale is not None and jnp.ndim(params.q_scale) == 1,
        per_request_causal=decoder and common is not None and common.causal_per_request is not None,
    )


@pytree
class PallasTpuMetadata:
    """The batch, its blocks and slots, and the kernel's list of tiles."""

    common: CommonAttentionMetadata
    block_table: AnyArray | None  # i32[R B] of the keys
    slot_mapping: AnyArray  # i32[T] slots of k and v
    work: TpuWorkList  # tiles of queries and ranges of keys, in order

    @property
    def num_tokens(self) -> int:
        return self.common.num_tokens


@dataclasses.dataclass(frozen=True)
class PallasTpuMetadataBuilder(AttentionMetadataBuilder[PallasTpuMetadata]):
    """Divides the queries into tiles, in a few small XLA kernels and without a host sync."""

    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PallasTpuMetadata:
        """common_prefix_len has no effect: the kernel reads a shared prefix once for each request."""
        common, kind = common_attn_metadata, self.spec.attn_type
        queries, keys = queries_of(common, kind), keys_of(common, kind)
        config = kernel_config(self.spec, self.cache_spec, common=common)
        columns = 1 if keys.block_table is None else keys.block_table.shape[1]
        if reasons := supports_batch(queries.num_tokens, queries.max_num_reqs, columns, config):
            raise UnsupportedError("the TPU kernel does not support this batch", {"pallas_tpu": tuple(reasons)})
        causal = jnp.asarray(common.causal_per_request) if config.per_request_causal else None
        starts, lengths = jnp.asarray(queries.query_start_loc), jnp.asarray(keys.seq_lens)
        work = build_work_list(starts, lengths, queries.num_tokens, config, causal)
        return PallasTpuMetadata(common=common, block_table=keys.block_table, slot_mapping=keys.slot_mapping, work=work)


@dataclasses.dataclass(frozen=True)
class PallasTpuImpl(AttentionImpl[PallasTpuMetadata]):
    """Gathers the queries, launches the kernel, and gathers the outputs."""

    can_return_lse_for_decode = True

    def do_kv_cache_update(
        self, cache: PagedKV, k: jax.Array, v: jax.Array, m: PallasTpuMetadata, params: AttentionParams
    ) -> PagedKV:
        """The same values as jattn.write_kv; XLA keeps the pool's layout, so nothing is copied before the kernel."""
        return write_by_head(cache, k, v, jnp.asarray(m.slot_mapping), params)

    def forward(self, q, cache: PagedKV, m: PallasTpuMetadata, params: AttentionParams) -> AttentionState:
        return _paged(self, q, cache, m, params)

    def forward_packed(self, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> AttentionState:
        """Copies packed keys to a temporary HND cache; the gradient passes through the copy."""
        keys = keys_of(meta, self.spec.attn_type)
        cache, block_table = packed_as_pages(k, v, jnp.asarray(keys.seq_lens), keys.max_seq_len)
        cache = dataclasses.replace(
            cache,
            k=jnp.swapaxes(cache.k, 1, 2),
            v=jnp.swapaxes(cache.v, 1, 2),
            spec=dataclasses.replace(cache.spec, layout="HND"),
        )
        m = PallasTpuMetadataBuilder(self.spec, cache.spec, self.chip).build(0, meta)
        impl = dataclasses.replace(self, cache_spec=cache.spec)
        return impl.forward(q, cache, dataclasses.replace(m, block_table=block_table), params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _paged(impl: PallasTpuImpl, q, cache: PagedKV, m: PallasTpuMetadata, params: AttentionParams) -> AttentionState:
    spec = impl.spec
    config = kernel_config(spec, cache.spec, q.dtype.name, m.common, params)
    if reasons := supports(config, chip=impl.chip.generation):
        raise UnsupportedError(
            "the TPU kernel does not support these queries; use backend='sdpa'", {"pallas_tpu": tuple(reasons)}
        )
    k, v = (quant.native(pool, cache.spec.dtype) for pool in (cache.k, cache.v))
    out, lse = ragged_paged_attention(
        q, k, v, jnp.asarray(m.block_table), m.work, config,
        alibi_slopes=params.alibi_slopes if spec.has_alibi else None,
        sinks=params.sinks if spec.has_sinks else None,
        q_scale=params.q_scale, k_scale=params.k_scale, v_scale=params.v_scale, chip=impl.chip.generation,
    )  # fmt: skip
    if spec.output_dtype is not None:
        out = quant.to_dtype(out, spec.output_dtype, params.output_scale)
    return AttentionState(out=out, lse=lse)


def _paged_backward(impl: PallasTpuImpl, saved, cotangent):
    q, cache, m, params = saved
    dq, dcache, dparams = paged_gradient(impl.spec, m.common, m.block_table, (q, cache, params), cotangent)
    return dq, dcache, None, dparams


_paged.defvjp(lambda impl, *args: (_paged(impl, *args), args), _paged_backward)


class PallasTpuBackend(PagedKernelBackend):
    """bf16 and f32 queries. pallas_kernels.tpu.supports gives the limits of the kernel."""

    name = "pallas_tpu"
    impl_cls = PallasTpuImpl
    builder_cls = PallasTpuMetadataBuilder
    metadata_cls = PallasTpuMetadata
    supported_dtypes = QUERY_DTYPES
    supported_kv_cache_dtypes = (*QUERY_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
    supported_block_sizes = (MultipleOf(16),)
    kv_cache_layouts = ("HND",)
    attn_types = (
        AttentionType.DECODER,
        AttentionType.ENCODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    quant_modes = ("none", "per_tensor", "per_head")
    platforms = ("tpu",)
    features = frozenset(
        {
            Feature.SINK,
            Feature.PER_HEAD_QUANT_SCALES,
            Feature.SLIDING_WINDOW,
            Feature.NON_CAUSAL,
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

    @classmethod
    def kernel_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec, chip: Chip, dtype: str) -> list[str]:
        generation = chip.generation if chip.platform == "tpu" else ""
        return supports(kernel_config(spec, cache_spec, dtype), chip=generation)

    @classmethod
    def layer_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip) -> tuple[str, ...]:
        own = super().layer_reasons(spec, cache_spec, chip)
        positional = spec.has_alibi or spec.mask_fn is not None or spec.score_fn is not None
        if spec.attn_type is AttentionType.ENCODER_DECODER and positional:
            own += (
                "ALiBi, mask_fn and score_fn not supported across encoder and decoder: the kernel aligns the last "
                "query with the last key",
            )
        return own
