"""`pallas_tpu`: one Mosaic TPU kernel for decode, prefill and mixed batches. The first choice on TPU.

It was never run on a TPU: tests interpret it on CPU and compile it ahead of time for v5e, v5p, v6e and tpu7x. A block
of all kv heads is one contiguous copy; one in the layout NHD is put into the order HND in VMEM. Queries and outputs are
copied as the layer has them, and put into the order of the products in VMEM. Queries in float16 are multiplied in
float32. A float16 cache is refused: Mosaic loads no float16, and to read a pool as integers XLA copies it whole in each
call.
The gradient is that of `sdpa`: the backward pass computes the forward pass again.

A tile of queries is of one request and walks over all its keys, so the bits of a request with one new token are the
same in every batch. Those of a longer one depend on the sizes of tiles, which follow the longest request of the batch:
`pallas_tpu_invariant` has one set of sizes for all batches. With needs=(Feature.BATCH_INVARIANCE,) it is chosen.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jattn.backends.base import AttentionImpl, AttentionMetadataBuilder
from jattn.backends.capability import Question
from jattn.backends.kernel import PagedKernelBackend
from jattn.backends.parallel import ContextParallel
from jattn.backends.rswa import launches_of
from jattn.backends.tpu_write import write_pages
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.write import packed_as_pages, scales_of
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.metadata.mm_prefix import fill_mm_prefix_query_ranges
from jattn.metadata.parallel import KeyShard
from jattn.ops.gradient import forward_only, paged_gradient
from jattn.ops.state import AttentionState, merge, with_sinks
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AnyArray, AttentionCGSupport, AttentionType, Feature, MultipleOf, pytree
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.shards import ShardRule
from pallas_kernels.algebra.token_ranges import token_ranges
from pallas_kernels.tpu.config import TpuKernelConfig
from pallas_kernels.tpu.paged_attention import ragged_paged_attention
from pallas_kernels.tpu.supports import supports, supports_batch
from pallas_kernels.tpu.tile_policy import default_config
from pallas_kernels.tpu.work_list import TpuWorkList, build_work_list, ranges_of_rank

QUERY_DTYPES = ("bfloat16", "float16", "float32")
ONE_RANK = ContextParallel()


def kernel_config(
    spec: AttentionSpec,
    cache_spec: KVCacheSpec,
    dtype: str = "bfloat16",
    common: CommonAttentionMetadata | None = None,
    params: AttentionParams | None = None,
    *,
    parallel: ContextParallel = ONE_RANK,
    invariant: bool = False,
    chip: str = "",
) -> TpuKernelConfig:
    """The kernel's static arguments, not checked: see supports.py. A work list depends on neither dtype nor params.

    invariant: the sizes for batches of any lengths. chip: the generation, whose sizes are taken.
    """
    decoder, ranks = spec.attn_type is AttentionType.DECODER, parallel.dcp_world_size
    dtype = "float32" if dtype == "float16" else dtype
    return default_config(
        chip=chip,
        longest=None if common is None or invariant else queries_of(common, spec.attn_type).max_query_len,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        page_size=cache_spec.block_size,
        dtype=dtype,
        kv_dtype=cache_spec.dtype,
        out_dtype=dtype if spec.output_dtype is None else "float32",
        layout=cache_spec.physical_layout,
        token_scales=cache_spec.quant == "per_token_head",
        # a prefix has a launch of its own
        mask=dataclasses.replace(spec.mask_rule(common is None or common.is_causal), prefix=False),
        logits=spec.logit_rule(),
        has_sinks=spec.has_sinks,
        per_head_q_scale=params is not None and params.q_scale is not None and jnp.ndim(params.q_scale) == 1,
        per_request_causal=decoder and common is not None and common.causal_per_request is not None,
        qq_bias=spec.use_qq_bias,
        shards=ShardRule(ranks, parallel.interleave if ranks > 1 else 1),
    )


@pytree
class PallasTpuMetadata:
    """The batch, its blocks and slots, and the kernel's list of tiles."""

    common: CommonAttentionMetadata
    block_table: AnyArray | None  # i32[R B] of the keys
    slot_mapping: AnyArray  # i32[T] slots of k and v
    work: TpuWorkList  # tiles of queries and ranges of keys, in order
    shard: KeyShard | None = None  # the keys of this rank, if several have them
    prefix: TpuWorkList | None = None  # with use_rswa: of the keys that are visible before the window

    @property
    def num_tokens(self) -> int:
        return self.common.num_tokens


@dataclasses.dataclass(frozen=True)
class PallasTpuMetadataBuilder(AttentionMetadataBuilder[PallasTpuMetadata]):
    """Divides the queries into tiles, in a few small XLA kernels and without a host sync."""

    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    invariant: bool = False  # see kernel_config

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PallasTpuMetadata:
        """common_prefix_len has no effect: the kernel reads a shared prefix once for each request."""
        common, kind = common_attn_metadata, self.spec.attn_type
        queries, keys = queries_of(common, kind), keys_of(common, kind)
        config = kernel_config(
            self.spec, self.cache_spec, common=common, parallel=self.parallel, invariant=self.invariant,
            chip=self.chip.generation,
        )  # fmt: skip
        columns = 1 if keys.block_table is None else keys.block_table.shape[1]
        if reasons := supports_batch(queries.num_tokens, queries.max_num_reqs, columns, config):
            raise UnsupportedError("the TPU kernel does not support this batch", {"pallas_tpu": tuple(reasons)})
        causal = jnp.asarray(common.causal_per_request) if config.per_request_causal else None
        lengths = jnp.asarray(queries.query_start_loc), jnp.asarray(keys.seq_lens), queries.num_tokens
        shard, slots, rule = self.parallel.dcp_shard(self.cache_spec), keys.slot_mapping, config.mask
        if shard is not None:
            slots = shard.slot_mapping(keys, self.cache_spec.block_size)
        spans = fill_mm_prefix_query_ranges(common, common.mm_prefix_ranges) if rule.spans else None

        def work_of(config: TpuKernelConfig, prefix_lens=None) -> TpuWorkList:
            if not config.has_ranges:
                return build_work_list(*lengths, config, causal)
            ranges = token_ranges(*lengths, rule, causal, spans, prefix_lens)
            if shard is None:
                return build_work_list(*lengths, config, causal, ranges)
            ranges = ranges_of_rank(ranges, lengths[0], shard.local_lens(keys), config, shard.rank)
            return build_work_list(*lengths, config, causal, ranges, shard.rank)

        prefix = None
        if self.spec.use_rswa:
            by_token = dataclasses.replace(config, mask=dataclasses.replace(rule, spans=True))
            prefix = work_of(by_token, jnp.asarray(common.rswa_prefix_lens, jnp.int32))
        return PallasTpuMetadata(
            common=common, block_table=keys.block_table, slot_mapping=slots, work=work_of(config), shard=shard,
            prefix=prefix,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PallasTpuImpl(AttentionImpl[PallasTpuMetadata]):
    """Launches the kernel, which takes and gives [T H D] as they are."""

    can_return_lse_for_decode = True
    invariant: bool = False  # see kernel_config
    out_dtype: str | None = None  # of the output before it is quantised; None: that of the queries

    def do_kv_cache_update(
        self, cache: PagedKV, k: jax.Array, v: jax.Array, m: PallasTpuMetadata, params: AttentionParams
    ) -> PagedKV:
        """The same values as jattn.write_kv. tpu_write.reasons_against says where XLA's scatter writes them."""
        return write_pages(self.chip, cache, k, v, m.slot_mapping, scales_of(params))

    def forward(self, q, cache: PagedKV, m: PallasTpuMetadata, params: AttentionParams) -> AttentionState:
        if m.shard is None:
            return _paged(self, q, cache, m, params)
        spec, combine = self.spec, self.parallel.combine
        assert combine is not None
        if spec.output_dtype is not None:
            no_gradient = f"output_dtype={spec.output_dtype!r}", "leave it None to differentiate"
            q, cache, params = forward_only((q, cache, params), *no_gradient)
        own = dataclasses.replace(spec, has_sinks=False, output_dtype=None)
        state = combine(_paged(dataclasses.replace(self, spec=own, out_dtype="float32"), q, cache, m, params))
        return _finished(spec, state, q.dtype, params)

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
        m = PallasTpuMetadataBuilder(self.spec, cache.spec, self.chip, invariant=self.invariant).build(0, meta)
        impl = dataclasses.replace(self, cache_spec=cache.spec)
        return impl.forward(q, cache, dataclasses.replace(m, block_table=block_table), params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _paged(impl: PallasTpuImpl, q, cache: PagedKV, m: PallasTpuMetadata, params: AttentionParams) -> AttentionState:
    spec = impl.spec
    if m.prefix is None:
        state = _launch(impl, q, cache, m, params)
        return _finished(dataclasses.replace(spec, has_sinks=False), state, impl.out_dtype or q.dtype, params)
    before, window = launches_of(spec)
    launches = (before, dataclasses.replace(m, work=m.prefix)), (window, m)
    parts = [(dataclasses.replace(impl, spec=part, out_dtype="float32"), plan) for part, plan in launches]
    state = merge(*(_launch(part, q, cache, plan, params) for part, plan in parts))
    return _finished(spec, state, impl.out_dtype or q.dtype, params)


def _finished(spec: AttentionSpec, state: AttentionState, dtype, params: AttentionParams) -> AttentionState:
    """The state with the layer's sinks, and its output in spec.output_dtype; without one in `dtype`."""
    if spec.has_sinks:
        assert params.sinks is not None
        state = with_sinks(state, params.sinks)
    if spec.output_dtype is None:
        return dataclasses.replace(state, out=state.out.astype(dtype))
    return dataclasses.replace(state, out=quant.to_dtype(state.out, spec.output_dtype, params.output_scale))


def _launch(impl: PallasTpuImpl, q, cache: PagedKV, m: PallasTpuMetadata, params: AttentionParams) -> AttentionState:
    """One launch over m.work, sinks included."""
    spec, name = impl.spec, q.dtype.name
    config = kernel_config(
        spec, cache.spec, name, m.common, params, parallel=impl.parallel, invariant=impl.invariant,
        chip=impl.chip.generation,
    )  # fmt: skip
    if impl.out_dtype is not None:
        config = dataclasses.replace(config, out_dtype=impl.out_dtype)
    table = jnp.asarray(m.block_table)
    reqs, columns = table.shape
    size = 0 if params.qq_bias is None else jnp.shape(params.qq_bias)[0]
    reasons = supports(config, chip=impl.chip.generation) + supports_batch(q.shape[0], reqs, columns, config, size)
    if reasons:
        raise UnsupportedError(
            "the TPU kernel does not support these queries; use backend='sdpa'", {"pallas_tpu": tuple(reasons)}
        )
    k, v = (quant.native(pool, cache.spec.dtype) for pool in (cache.k, cache.v))
    out, lse = ragged_paged_attention(
        q.astype(config.dtype), k, v, table, m.work, config,
        alibi_slopes=params.alibi_slopes if spec.has_alibi else None,
        sinks=params.sinks if spec.has_sinks else None,
        qq_bias=jnp.asarray(params.qq_bias, jnp.float32) if spec.use_qq_bias else None,
        q_scale=params.q_scale, k_scale=params.k_scale, v_scale=params.v_scale,
        k_token_scale=cache.k_token_scale, v_token_scale=cache.v_token_scale, chip=impl.chip.generation,
    )  # fmt: skip
    return AttentionState(out=out, lse=lse)


def _paged_backward(impl: PallasTpuImpl, saved, cotangent):
    q, cache, m, params = saved
    dq, dcache, dparams = paged_gradient(impl.spec, m.common, m.block_table, (q, cache, params), cotangent, m.shard)
    return dq, dcache, None, dparams


_paged.defvjp(lambda impl, *args: (_paged(impl, *args), args), _paged_backward)


class PallasTpuBackend(PagedKernelBackend):
    """bf16, f16 and f32 queries. pallas_kernels.tpu.supports gives the limits of the kernel."""

    name = "pallas_tpu"
    impl_cls = PallasTpuImpl
    builder_cls = PallasTpuMetadataBuilder
    metadata_cls = PallasTpuMetadata
    supported_dtypes = QUERY_DTYPES
    supported_kv_cache_dtypes = ("bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_block_sizes = (MultipleOf(16),)
    kv_cache_layouts = ("NHD", "HND", "HND128")
    attn_types = (
        AttentionType.DECODER,
        AttentionType.ENCODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
    platforms = ("tpu",)
    features = frozenset(
        {
            Feature.MM_PREFIX,
            Feature.SINK,
            Feature.PER_HEAD_QUANT_SCALES,
            Feature.SLIDING_WINDOW,
            Feature.RSWA,
            Feature.NON_CAUSAL,
            Feature.TWO_SIDED_WINDOW,
            Feature.CHUNK,
            Feature.CHUNK_LOOKBACK,
            Feature.ALIBI,
            Feature.ALIBI_SQRT,
            Feature.SOFT_CAP,
            Feature.MASK_FN,
            Feature.SCORE_FN,
            Feature.QQ_BIAS,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.PACKED,
            Feature.DECODE_BATCH_INVARIANCE,
            Feature.DCP,
            Feature.FUSED_OUTPUT_QUANT,
        }
    )

    @classmethod
    def kernel_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec, chip: Chip, dtype: str) -> list[str]:
        generation = chip.generation if chip.platform == "tpu" else ""
        return supports(kernel_config(spec, cache_spec, dtype, chip=generation), chip=generation)

    @classmethod
    def supports_combination(cls, question: Question) -> str | None:
        if not question.needs_feature(Feature.DCP):
            return None
        found = [option for feature, option in question.needs if feature is Feature.QQ_BIAS]
        if question.attn_type is not AttentionType.DECODER:
            found.append(f"attn_type={question.attn_type.value}")
        return f"DCP not supported with {', '.join(found)}" if found else None


@dataclasses.dataclass(frozen=True)
class InvariantTpuMetadataBuilder(PallasTpuMetadataBuilder):
    """Takes the sizes for batches of any lengths."""

    invariant: bool = True


@dataclasses.dataclass(frozen=True)
class InvariantTpuImpl(PallasTpuImpl):
    """Launches the kernel of these sizes."""

    invariant: bool = True


class InvariantTpuBackend(PallasTpuBackend):
    """`pallas_tpu` with the same bits for a request in every batch; slower for batches of a few tokens a request."""

    name = "pallas_tpu_invariant"
    impl_cls = InvariantTpuImpl
    builder_cls = InvariantTpuMetadataBuilder
    features = (PallasTpuBackend.features | {Feature.BATCH_INVARIANCE}) - {Feature.DCP}
