"""`pallas_gpu`: one persistent Mosaic GPU kernel for decode, prefill and mixed batches; first on NVIDIA GPUs.

There are two kernels for one interface: Hopper's (TMA and wgmma) on sm_90, and a warp-level one (cp.async and mma.sync)
on the other chips since Ampere. A `platform` of Chip("gpu", "sm_80") takes the warp-level kernel on a Hopper card too,
to check it there.

The gradient over pages is that of `sdpa`: the backward pass computes the forward pass again. That of packed keys is
cuDNN's where it supports the layer and the batch (see cudnn_gradient.py), else that of `sdpa`.

Keys in levels (jattn.cascade_attention, or a common_prefix_len) take a launch for each level. All queries of a group
are the rows of one request over the keys that they share. The levels' float32 states are merged and rounded once.

`pallas_gpu` divides the work by the whole batch, so the last bits of a request's result depend on it.
`pallas_gpu_invariant` launches one kernel for batches of any lengths, in which one CTA computes each tile of a request
over all its keys: the bits depend on the request only. With needs=(Feature.BATCH_INVARIANCE,) it is chosen.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.backends import cudnn, cudnn_gradient
from jattn.backends.base import AttentionImpl, AttentionMetadataBuilder
from jattn.backends.capability import Question
from jattn.backends.gpu_write import write_pages
from jattn.backends.kernel import PagedKernelBackend
from jattn.backends.parallel import ContextParallel
from jattn.backends.sdpa import cache_of_eight_bit_products, without_gradient_if_quantised
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.write import packed_as_pages, write_kv
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata.batch import CommonAttentionMetadata, keys_of, queries_of
from jattn.metadata.cascade import prefix_levels
from jattn.metadata.mm_prefix import fill_mm_prefix_query_ranges
from jattn.metadata.parallel import KeyShard
from jattn.ops.gradient import paged_gradient
from jattn.ops.levels import merged
from jattn.ops.rotation import Angles, rotate
from jattn.ops.state import AttentionState, merge, with_sinks
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AnyArray, AttentionCGSupport, AttentionType, Feature, MultipleOf, pytree
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.shards import ShardRule
from pallas_kernels.algebra.token_ranges import token_ranges
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.config_sm80 import WarpKernelConfig
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.rotate_write_sm90 import RotateWrite, rotate_and_write
from pallas_kernels.gpu.rotate_write_sm90 import supports as rotates_and_writes
from pallas_kernels.gpu.supports import COPY_ROWS, supports
from pallas_kernels.gpu.supports_sm80 import supports as warps_support
from pallas_kernels.gpu.tile_policy import default_config
from pallas_kernels.gpu.tile_policy_sm80 import warp_config
from pallas_kernels.gpu.work_list import GpuWorkList, build_work_list

QUERY_DTYPES = ("bfloat16", "float16")
HOPPER = Chip("gpu", "sm_90")
ONE_RANK = ContextParallel()
WARPS_SINCE = (0, 12)  # JAX's version


def kernel_config(
    spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: str, common: CommonAttentionMetadata | None = None,
    chip: Chip = HOPPER, out_dtype: str | None = None, parallel: ContextParallel = ONE_RANK, invariant: bool = False,
) -> GpuKernelConfig:  # fmt: skip
    """The static arguments of the chip's kernel for queries of `dtype` and a batch (None: any batch).

    invariant: one kernel for every batch, which cuts no unit.
    """
    longest = keys = None
    if common is not None and not invariant:
        longest, keys = queries_of(common, spec.attn_type).max_query_len, keys_of(common, spec.attn_type).max_seq_len
    decoder, mask = spec.attn_type is AttentionType.DECODER, spec.mask_rule(common is None or common.is_causal)
    config_of = functools.partial(warp_config, chip=chip.generation or HOPPER.generation)
    if _by_wgmma(chip, cache_spec.block_size):
        config_of = functools.partial(default_config, keys=keys, **(dict(whole_units=True) if invariant else {}))
    return config_of(
        rows=longest and longest * spec.group_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        page_size=cache_spec.block_size,
        layout=cache_spec.physical_layout,
        dtype=dtype,
        out_dtype=out_dtype,
        kv_dtype=cache_spec.dtype,
        compute_dtype=spec.compute_dtype,
        token_scales=cache_spec.quant == "per_token_head",
        mask=dataclasses.replace(mask, prefix=False),  # a prefix has a launch of its own
        logits=spec.logit_rule(),
        has_sinks=spec.has_sinks,
        per_request_causal=decoder and common is not None and common.causal_per_request is not None,
        qq_bias=spec.use_qq_bias,
        shards=ShardRule(parallel.dcp_world_size, parallel.interleave if parallel.dcp_world_size > 1 else 1),
    )


def _is_hopper(chip: Chip) -> bool:
    """Is it sm_90, or unknown?"""
    return chip.generation in ("", HOPPER.generation)


def _by_wgmma(chip: Chip, block_size: int) -> bool:
    """Does Hopper's kernel compute these pages? TMA copies whole groups of rows; the warp-level kernel single rows."""
    return _is_hopper(chip) and block_size % COPY_ROWS == 0


def config_reasons(config: GpuKernelConfig) -> list[str]:
    """Every reason why the config's kernel cannot serve it."""
    return warps_support(config) if isinstance(config, WarpKernelConfig) else supports(config)


def _version_reasons(chip: Chip) -> list[str]:
    """JAX before 0.12 lowers Mosaic GPU kernels for sm_90 only, whatever `platform` says."""
    if _is_hopper(chip) or jax.__version_info__ >= WARPS_SINCE or device.detect().generation == HOPPER.generation:
        return []
    return [f"chip {chip.generation} with JAX {jax.__version__}: its Mosaic GPU needs sm_90; wanted JAX 0.12 or newer"]


@pytree
class PallasGpuMetadata:
    """The batch, its blocks and slots, and the work list of the CTAs; of a cascade, those of the last level."""

    common: CommonAttentionMetadata
    block_table: AnyArray | None  # i32[R B] of the keys
    slot_mapping: AnyArray  # i32[T] slots of k and v
    work: GpuWorkList  # pieces of queries and keys, divided among the CTAs
    shared: tuple["PallasGpuMetadata", ...] = ()  # of a cascade: the plans of the levels before
    shard: KeyShard | None = None  # the keys of this rank, if several have them
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
        return not _against_levels(Question.of(self.spec, self.cache_spec))

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
        dtype = PallasGpuBackend.usual_query_dtype(self.cache_spec)
        config = kernel_config(
            self.spec, self.cache_spec, dtype, common, self.chip, None, self.parallel, self.invariant
        )
        shard, slots, own = self.parallel.dcp_shard(self.cache_spec), keys.slot_mapping, {}
        if shard is not None:
            slots = shard.slot_mapping(keys, self.cache_spec.block_size)
            own = dict(rank=shard.rank, local_lens=shard.local_lens(keys))
        causal = None if causal is None else jnp.asarray(causal)
        lengths = jnp.asarray(queries.query_start_loc), jnp.asarray(keys.seq_lens), queries.num_tokens
        rule, prefix = config.mask, None
        spans = fill_mm_prefix_query_ranges(common, common.mm_prefix_ranges) if rule.spans else None
        if rule.spans:
            own["ranges"] = token_ranges(*lengths, rule, causal, spans)
        if self.spec.use_rswa:
            lens = jnp.asarray(common.rswa_prefix_lens, jnp.int32)
            before = token_ranges(*lengths, rule, causal, spans, lens)
            whole = dataclasses.replace(config, mask=dataclasses.replace(rule, spans=True))
            prefix = build_work_list(*lengths, whole, causal, ranges=before)
        work = build_work_list(*lengths, config, causal, **own)
        return PallasGpuMetadata(
            common=common, block_table=keys.block_table, slot_mapping=slots, work=work, shard=shard, prefix=prefix
        )


@dataclasses.dataclass(frozen=True)
class PallasGpuImpl(AttentionImpl[PallasGpuMetadata]):
    """Launches the kernel, and merges the states of requests whose keys were split."""

    can_return_lse_for_decode = True
    lengths: cudnn.Lengths = cudnn.Lengths.UNKNOWN  # of the batch; see for_batch
    out_dtype: str | None = None  # of the kernel's output: float32, or None for that of the queries
    invariant: bool = False  # see kernel_config

    def forward(self, q, cache: PagedKV, m: PallasGpuMetadata, params: AttentionParams) -> AttentionState:
        return self._over_pages(q, cache, m, params)

    def _over_pages(
        self, q, cache: PagedKV, m: PallasGpuMetadata, params: AttentionParams, counters=None
    ) -> AttentionState:
        """One launch for each level. counters: see ragged_paged_attention, for the last level."""
        q, cache, params = without_gradient_if_quantised(self.spec, (q, cache, params))
        if (quantised := self.spec.output_dtype) is not None:
            spec = dataclasses.replace(self.spec, output_dtype=None)
            impl = dataclasses.replace(self, spec=spec, out_dtype="float32")
            state = impl._over_pages(q, cache, m, params, counters)
            return dataclasses.replace(state, out=quant.to_dtype(state.out, quantised, params.output_scale))
        if not m.shared and m.shard is None:
            state: Any = _paged(self, q, cache, m, params, counters)
            return state
        impl = dataclasses.replace(self, spec=dataclasses.replace(self.spec, has_sinks=False), out_dtype="float32")
        states: Any = [_paged(impl, q, cache, level, params, None) for level in m.shared]
        states += [_paged(impl, q, cache, dataclasses.replace(m, shared=()), params, counters)]
        state = merged(states, self.parallel.combine)
        if self.spec.has_sinks:
            assert params.sinks is not None
            state = with_sinks(state, params.sinks)
        return dataclasses.replace(state, out=state.out.astype(self.out_dtype or q.dtype))

    def do_kv_cache_update(self, cache: PagedKV, k, v, m: PallasGpuMetadata, params: AttentionParams) -> PagedKV:
        """The same values as jattn.write_kv, for both pools in one launch, in place if the cache is donated."""
        return write_pages(cache, k, v, m.slot_mapping, params)

    def rotate_update_and_forward(self, q, k, v, angles: Angles, cache: PagedKV, m: PallasGpuMetadata, params):
        """The same; in one kernel that rotates and writes, if rotate_write_sm90.py supports the layer."""
        dtypes = (q.dtype.name, k.dtype.name, v.dtype.name, cache.k.dtype.name, cache.v.dtype.name)
        dims = q.shape[-1], v.shape[-1], angles.dim, angles.interleaved
        if m.slot_mapping.shape[0] != q.shape[0] or not rotates_and_writes(*dims, dtypes):
            return super().rotate_update_and_forward(q, k, v, angles, cache, m, params)
        written: Any = _rotate_and_write(self, q, k, v, angles, cache, m.slot_mapping)
        q, cache, counters = written
        config = kernel_config(self.spec, cache.spec, q.dtype.name, m.common, self.chip, invariant=self.invariant)
        whole = not m.shared and m.shard is None  # the configs of levels and of ranks are others
        counters = counters if whole and _merges_inside(config, m.common) else None
        return cache, self._over_pages(q, cache, m, params, counters)

    def for_batch(self, meta: CommonAttentionMetadata) -> "PallasGpuImpl":
        return dataclasses.replace(self, lengths=cudnn.lengths_known(self.spec, meta))

    def forward_packed(self, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> AttentionState:
        """Copies packed keys to a temporary cache. If a gradient is taken, cuDNN computes both instead where it can."""
        if not self.invariant and cudnn_gradient.applies(self.spec, q, k, v, meta, params):
            state: Any = cudnn_gradient.attend(self, q, k, v, meta, params)
            return state
        return self.forward_copied(q, k, v, meta, params)

    def forward_copied(self, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> AttentionState:
        keys = keys_of(meta, self.spec.attn_type)
        cache, block_table = packed_as_pages(k, v, jnp.asarray(keys.seq_lens), keys.max_seq_len)
        m = PallasGpuMetadataBuilder(self.spec, cache.spec, self.chip, invariant=self.invariant).build(0, meta)
        impl = dataclasses.replace(self, cache_spec=cache.spec)
        return impl.forward(q, cache, dataclasses.replace(m, block_table=block_table), params)


def _merges_inside(config: GpuKernelConfig, common: CommonAttentionMetadata) -> bool:
    """Does the last CTA of a split unit merge its parts? With few requests each is split over many CTAs, and a launch
    that merges them in parallel is faster: at 600 keys 12.4 us for one request, and 10.0 with that launch."""
    is_cut = config.flat_list and not config.whole_units
    serves = type(config) is GpuKernelConfig and is_cut and not config.narrow_rows
    return serves and config.num_kv_heads * common.seq_lens.shape[0] >= config.num_ctas


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _paged(
    impl: PallasGpuImpl, q, cache: PagedKV, m: PallasGpuMetadata, params: AttentionParams, counters
) -> AttentionState:
    if m.prefix is None:
        return _launch(impl, q, cache, m, params, counters)
    # R-SWA: what a row sees is a window and, before it, a prefix. Each has a launch, so nothing between them is read.
    spec = dataclasses.replace(impl.spec, use_rswa=False, has_sinks=False)
    before = dataclasses.replace(spec, use_mm_prefix=True, mm_prefix_clamp_sliding_window=False)
    plans = (before, dataclasses.replace(m, work=m.prefix)), (spec, m)
    parts = [dataclasses.replace(impl, spec=own, out_dtype="float32") for own, _ in plans]
    states = [_launch(part, q, cache, plan, params, None) for part, (_, plan) in zip(parts, plans, strict=True)]
    state = merge(*states)
    if impl.spec.has_sinks:
        assert params.sinks is not None
        state = with_sinks(state, params.sinks)
    return dataclasses.replace(state, out=state.out.astype(impl.out_dtype or q.dtype))


def _launch(
    impl: PallasGpuImpl, q, cache: PagedKV, m: PallasGpuMetadata, params: AttentionParams, counters
) -> AttentionState:
    """One launch over the pages of m.work, and its merge."""
    spec = impl.spec
    layer = (spec, cache.spec, q.dtype.name, m.common, impl.chip, impl.out_dtype, impl.parallel, impl.invariant)
    config = kernel_config(*layer)
    if counters is not None:
        config = dataclasses.replace(config, merges_inside=True)
    if reasons := config_reasons(config):
        raise UnsupportedError(
            "the GPU kernel does not support these queries; use backend='sdpa'", {"pallas_gpu": tuple(reasons)}
        )
    k, v = (quant.native(pool, cache.spec.dtype) for pool in (cache.k, cache.v))
    out, lse = ragged_paged_attention(
        q, k, v, jnp.asarray(m.block_table), m.work, config,
        alibi_slopes=params.alibi_slopes if spec.has_alibi else None,
        sinks=params.sinks if spec.has_sinks else None,
        qq_bias=jnp.asarray(params.qq_bias, jnp.float32) if spec.use_qq_bias else None,
        q_scale=params.q_scale, k_scale=params.k_scale, v_scale=params.v_scale,
        k_token_scale=cache.k_token_scale, v_token_scale=cache.v_token_scale, counters=counters,
    )  # fmt: skip
    return AttentionState(out=out, lse=lse)


def _paged_backward(impl: PallasGpuImpl, saved, cotangent):
    q, cache, m, params, _ = saved
    dq, dcache, dparams = paged_gradient(impl.spec, m.common, m.block_table, (q, cache, params), cotangent, m.shard)
    return dq, dcache, None, dparams, None


_paged.defvjp(lambda impl, *args: (_paged(impl, *args), args), _paged_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate_and_write(impl: PallasGpuImpl, q, k, v, angles: Angles, cache: PagedKV, slots) -> Any:
    spec = cache.spec
    sizes = RotateWrite(
        tokens=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[2], v_head_dim=v.shape[2],
        dim=angles.dim, blocks=spec.num_blocks, page=spec.block_size, heads_first=spec.physical_layout == "HND",
        counters=GpuKernelConfig.num_ctas,
    )  # fmt: skip
    # XLA makes one kernel of the three projections' last step and this concatenation.
    rows = jnp.concatenate([x.reshape(x.shape[0], -1) for x in (q, k, v)], axis=1)
    pools, slots = (cache.k, cache.v), jnp.asarray(slots, jnp.int32)
    q, (k, v), counters = rotate_and_write(rows, angles.cos, angles.sin, slots, pools, sizes)
    return q, dataclasses.replace(cache, k=k, v=v), counters


def _rotate_and_write_backward(impl: PallasGpuImpl, saved, cotangent):
    def reference(q, k, v, angles, cache):
        return rotate(q, angles), write_kv(cache, rotate(k, angles), v, saved[-1])

    return *jax.vjp(reference, *saved[:-1])[1](cotangent), None


_rotate_and_write.defvjp(lambda impl, *args: (_rotate_and_write(impl, *args), args), _rotate_and_write_backward)


IN_LEVELS = (
    *(Feature.SINK, Feature.PER_HEAD_QUANT_SCALES, Feature.NON_CAUSAL, Feature.SOFT_CAP, Feature.PER_REQUEST_CAUSAL),
    *(Feature.DIFF_KV, Feature.LSE, Feature.FUSED_OUTPUT_QUANT, Feature.EIGHT_BIT_PRODUCTS),
)
"""Features that a layer may need beside levels of keys: they do not depend on the positions of queries and keys."""


IN_SHARDS = (*IN_LEVELS, Feature.SLIDING_WINDOW, Feature.TWO_SIDED_WINDOW, Feature.CHUNK, Feature.CHUNK_LOOKBACK)
"""Features that a layer may need beside DCP: a range of positions is a range of one rank's keys."""


def _against_levels(question: Question) -> list[str]:
    """The options of a layer with which the kernel cannot attend to keys in levels."""
    return _beyond(question, (*IN_LEVELS, Feature.CASCADE))


def _against_shards(question: Question) -> list[str]:
    """The options of a layer whose keys cannot be on several ranks."""
    return _beyond(question, (*IN_SHARDS, Feature.DCP))


def _beyond(question: Question, allowed: tuple[Feature, ...]) -> list[str]:
    found = [option for feature, option in question.needs if feature not in allowed]
    kind = question.attn_type
    return found if kind is AttentionType.DECODER else [*found, f"attn_type={kind.value}"]


class PallasGpuBackend(PagedKernelBackend):
    """bf16 and f16 queries on NVIDIA GPUs. pallas_kernels.gpu.supports and .supports_sm80 give the kernels' limits."""

    name = "pallas_gpu"
    impl_cls = PallasGpuImpl
    builder_cls = PallasGpuMetadataBuilder
    metadata_cls = PallasGpuMetadata
    supported_dtypes = QUERY_DTYPES
    supported_kv_cache_dtypes = (*QUERY_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
    supported_block_sizes = (MultipleOf(1),)
    attn_types = (
        AttentionType.DECODER,
        AttentionType.ENCODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
    platforms = ("gpu",)
    min_compute_capability = 80
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
            Feature.SOFT_CAP,
            Feature.MASK_FN,
            Feature.SCORE_FN,
            Feature.QQ_BIAS,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.PACKED,
            Feature.CASCADE,
            Feature.DCP,
            Feature.FUSED_OUTPUT_QUANT,
            Feature.EIGHT_BIT_PRODUCTS,
        }
    )

    @classmethod
    def usual_query_dtype(cls, cache_spec: KVCacheSpec) -> str:
        """A float cache needs queries of its own dtype. A quantised one takes both dtypes; bfloat16 is assumed."""
        return cache_spec.dtype if cache_spec.dtype in QUERY_DTYPES else "bfloat16"

    @classmethod
    def kernel_name(cls, chip: Chip, cache_spec: KVCacheSpec | None) -> str:
        if _by_wgmma(chip, COPY_ROWS if cache_spec is None else cache_spec.block_size):
            return "Hopper's kernel (TMA and wgmma)"
        lowered = chip.generation or HOPPER.generation
        return f"the warp-level kernel (cp.async and mma.sync), lowered for {lowered}"

    @classmethod
    def kernel_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec, chip: Chip, dtype: str) -> list[str]:
        return _version_reasons(chip) + config_reasons(kernel_config(spec, cache_spec, dtype, chip=chip))

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

    @classmethod
    def supports_combination(cls, question: Question) -> str | None:
        if (reason := cache_of_eight_bit_products(question)) is not None:
            return reason
        if question.needs_feature(Feature.CASCADE) and (found := _against_levels(question)):
            return f"levels of keys not supported with {', '.join(found)}: queries of one tile have no order among them"
        if question.needs_feature(Feature.DCP) and (found := _against_shards(question)):
            return f"DCP not supported with {', '.join(found)}: the kernel has no positions of keys on several ranks"
        return None

    @classmethod
    def gradient_by(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, dtypes: tuple[str, ...] = ()) -> str:
        if cache_spec is not None:
            return "sdpa, as cuDNN takes packed keys only"
        reasons = cudnn.layer_reasons(spec, dtypes[0] if dtypes else "bfloat16")
        return f"sdpa, as cuDNN takes no {', '.join(reasons)}" if reasons else "cuDNN"


@dataclasses.dataclass(frozen=True)
class InvariantGpuMetadataBuilder(PallasGpuMetadataBuilder):
    """Gives every unit out whole. A common prefix changes nothing: it is in the keys of each request."""

    supports_cascade = False
    invariant: bool = True


@dataclasses.dataclass(frozen=True)
class InvariantGpuImpl(PallasGpuImpl):
    """Launches the kernel that serves batches of any lengths."""

    invariant: bool = True


class InvariantGpuBackend(PallasGpuBackend):
    """`pallas_gpu` with the same bits for a request in every batch; slower for few requests of many keys."""

    name = "pallas_gpu_invariant"
    impl_cls = InvariantGpuImpl
    builder_cls = InvariantGpuMetadataBuilder
    features = (PallasGpuBackend.features | {Feature.BATCH_INVARIANCE}) - {Feature.CASCADE, Feature.DCP, Feature.RSWA}

    @classmethod
    def gradient_by(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, dtypes: tuple[str, ...] = ()) -> str:
        return "sdpa"
