"""`pallas_gpu`: one persistent Mosaic GPU kernel for decode, prefill and mixed batches; the first choice on GPUs.

gpu_kernel.py chooses the kernel and its static arguments, gpu_plan.py divides a batch.

The gradient over pages is that of `sdpa`: the backward pass computes the forward pass again. That of packed keys is
cuDNN's where it supports the layer and the batch (see cudnn_gradient.py), else that of `sdpa`.

Keys in levels (jattn.cascade_attention, or a common_prefix_len) take a launch for each level. All queries of a group
are the rows of one request over the keys that they share. The levels' float32 states are merged and rounded once.

`pallas_gpu` divides the work by the whole batch, so the last bits of a request's result depend on it; those of
`pallas_gpu_invariant` do not.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.backends import cudnn, cudnn_gradient, gpu_kernel
from jattn.backends.base import AttentionImpl
from jattn.backends.capability import Question
from jattn.backends.gpu_plan import PallasGpuMetadata, PallasGpuMetadataBuilder, against_levels, against_shards
from jattn.backends.gpu_ranks import merged_by_launch
from jattn.backends.gpu_write import write_pages
from jattn.backends.kernel import PagedKernelBackend
from jattn.backends.rswa import launches_of
from jattn.backends.sdpa import cache_of_eight_bit_products, without_gradient_if_quantised
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.write import packed_as_pages, scales_of, write_kv
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata.attention_type import keys_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.ops.gradient import paged_gradient
from jattn.ops.levels import merged
from jattn.ops.rotation import Angles, rotate
from jattn.ops.state import AttentionState, merge, with_sinks
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AttentionType, Feature, MultipleOf
from pallas_kernels.algebra import quant
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.rotate_write_sm90 import RotateWrite, rotate_and_write
from pallas_kernels.gpu.rotate_write_sm90 import supports as rotates_and_writes
from pallas_kernels.gpu.supports import COPY_ROWS


@dataclasses.dataclass(frozen=True)
class PallasGpuImpl(AttentionImpl[PallasGpuMetadata]):
    """Launches the kernel, and merges the states of requests whose keys were split."""

    can_return_lse_for_decode = True
    lengths: cudnn.Lengths = cudnn.Lengths.UNKNOWN  # of the batch; see for_batch
    out_dtype: str | None = None  # of the kernel's output: float32, or None for that of the queries
    invariant: bool = False  # see gpu_kernel.py

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
        if m.peers is None:
            state = merged(states, self.parallel.combine)
        else:
            dtype = "float32" if self.spec.has_sinks else self.out_dtype or q.dtype.name
            state: Any = merged_by_launch(self.parallel, dtype, *states, m.peers)
        if self.spec.has_sinks:
            assert params.sinks is not None
            state = with_sinks(state, params.sinks)
        return dataclasses.replace(state, out=state.out.astype(self.out_dtype or q.dtype))

    def do_kv_cache_update(self, cache: PagedKV, k, v, m: PallasGpuMetadata, params: AttentionParams) -> PagedKV:
        """The same values as jattn.write_kv, for both pools in one launch, in place if the cache is donated."""
        return write_pages(self.chip, cache, k, v, m.slot_mapping, scales_of(params))

    def rotate_update_and_forward(self, q, k, v, angles: Angles, cache: PagedKV, m: PallasGpuMetadata, params):
        """The same; in one kernel that rotates and writes, if rotate_write_sm90.py supports the layer."""
        dtypes = (q.dtype.name, k.dtype.name, v.dtype.name, cache.k.dtype.name, cache.v.dtype.name)
        dims = q.shape[-1], v.shape[-1], angles.dim, angles.interleaved
        if m.slot_mapping.shape[0] != q.shape[0] or not rotates_and_writes(*dims, dtypes):
            return super().rotate_update_and_forward(q, k, v, angles, cache, m, params)
        written: Any = _rotate_and_write(self, q, k, v, angles, cache, m.slot_mapping)
        q, cache, counters = written
        config = gpu_kernel.kernel_config(
            self.spec, cache.spec, q.dtype.name, m.common, self.chip, invariant=self.invariant
        )
        whole = not m.shared and m.shard is None  # the configs of levels and of ranks are others
        counters = counters if whole and gpu_kernel.merges_inside(config, m.common) else None
        return cache, self._over_pages(q, cache, m, params, counters)

    def for_batch(self, meta: CommonAttentionMetadata) -> "PallasGpuImpl":
        return dataclasses.replace(self, lengths=cudnn.lengths_known(self.spec, meta))

    def forward_packed(self, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> AttentionState:
        """Copies packed keys to a temporary cache. If a gradient is taken, cuDNN computes both instead where it can."""
        if not self.invariant and cudnn_gradient.applies(self, q, k, v, meta, params):
            state: Any = cudnn_gradient.attend(self, q, k, v, meta, params)
            return state
        return self.forward_copied(q, k, v, meta, params)

    def forward_copied(self, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> AttentionState:
        keys = keys_of(meta, self.spec.attn_type)
        cache, block_table = packed_as_pages(k, v, jnp.asarray(keys.seq_lens), keys.max_seq_len)
        m = PallasGpuMetadataBuilder(self.spec, cache.spec, self.chip, invariant=self.invariant).build(0, meta)
        impl = dataclasses.replace(self, cache_spec=cache.spec)
        return impl.forward(q, cache, dataclasses.replace(m, block_table=block_table), params)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _paged(
    impl: PallasGpuImpl, q, cache: PagedKV, m: PallasGpuMetadata, params: AttentionParams, counters
) -> AttentionState:
    if m.prefix is None:
        return _launch(impl, q, cache, m, params, counters)
    before, window = launches_of(impl.spec)
    plans = (before, dataclasses.replace(m, work=m.prefix)), (window, m)
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
    config = gpu_kernel.kernel_config(*layer)
    if counters is not None:
        config = dataclasses.replace(config, merges_inside=True)
    if reasons := gpu_kernel.config_reasons(config):
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
        counters=2 * GpuKernelConfig.num_ctas,  # one for each pipeline, of which a CTA has at most two
    )  # fmt: skip
    # XLA makes one kernel of the three projections' last step and this concatenation.
    rows = jnp.concatenate([x.reshape(x.shape[0], -1) for x in (q, k, v)], axis=1)
    pools, slots = (cache.k, cache.v), jnp.asarray(slots, jnp.int32)
    q, (k, v), counters = rotate_and_write(rows, angles.cos, angles.sin, slots, pools, sizes)
    return q, dataclasses.replace(cache, k=k, v=v), counters


def _rotate_and_write_backward(impl: PallasGpuImpl, saved, cotangent):
    def reference(q, k, v, angles, cache):
        return rotate(q, angles), write_kv(cache, rotate(k, angles), v, saved[-1])

    return *jax.vjp(reference, *saved[:-1])[1](cotangent[:2]), None  # counters have no gradient


_rotate_and_write.defvjp(lambda impl, *args: (_rotate_and_write(impl, *args), args), _rotate_and_write_backward)


class PallasGpuBackend(PagedKernelBackend):
    """bf16 and f16 queries on NVIDIA GPUs. pallas_kernels.gpu.supports and .supports_sm80 give the kernels' limits."""

    name = "pallas_gpu"
    impl_cls = PallasGpuImpl
    builder_cls = PallasGpuMetadataBuilder
    metadata_cls = PallasGpuMetadata
    supported_dtypes = gpu_kernel.QUERY_DTYPES
    supported_kv_cache_dtypes = (*gpu_kernel.QUERY_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
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
        return gpu_kernel.usual_query_dtype(cache_spec)

    @classmethod
    def kernel_name(cls, chip: Chip, cache_spec: KVCacheSpec | None) -> str:
        if gpu_kernel.by_wgmma(chip, COPY_ROWS if cache_spec is None else cache_spec.block_size):
            name = "Hopper's kernel (TMA and wgmma)"
            if chip == device.detect() and not device.keeps_registers():
                name += "; the warp-level one for prompts of heads above 192 or over 8 bits, as nvJitLink compiles"
            return name
        lowered = chip.generation or gpu_kernel.HOPPER.generation
        return f"the warp-level kernel (cp.async and mma.sync), lowered for {lowered}"

    @classmethod
    def kernel_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec, chip: Chip, dtype: str) -> list[str]:
        return gpu_kernel.version_reasons(chip) + gpu_kernel.config_reasons(
            gpu_kernel.kernel_config(spec, cache_spec, dtype, chip=chip)
        )

    @classmethod
    def supports_combination(cls, question: Question) -> str | None:
        if (reason := cache_of_eight_bit_products(question)) is not None:
            return reason
        if question.needs_feature(Feature.CASCADE) and (found := against_levels(question)):
            return f"levels of keys not supported with {', '.join(found)}: queries of one tile have no order among them"
        if question.needs_feature(Feature.DCP) and (found := against_shards(question)):
            return f"DCP not supported with {', '.join(found)}: the kernel has no positions of keys on several ranks"
        return None

    @classmethod
    def gradient_by(
        cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip, dtypes: tuple[str, ...] = ()
    ) -> str:
        return cudnn_gradient.chosen(spec, cache_spec, dtypes, chip)
