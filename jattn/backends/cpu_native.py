"""`cpu_native`: C++ kernels, called through XLA's FFI and chosen by instruction set. The first choice on a CPU.

The bits of a request's result depend on that request only, not on the batch or the number of threads. The gradient is
that of `sdpa`: the backward pass computes the forward pass again. Under vmap the kernel is called once per element.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jattn.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from jattn.backends.kernel import as_arrays
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.write import scales_of, write_backward
from jattn.device import Chip
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.ops.gradient import packed_gradient, paged_gradient
from jattn.ops.layer import output_dtype
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AnyArray, AttentionCGSupport, AttentionType, Feature, MultipleOf, pytree
from pallas_kernels.cpu.native import library, ops


@pytree
class CpuNativeMetadata:
    """The batch with the blocks and slots that this layer uses. The kernel itself divides the work."""

    common: CommonAttentionMetadata
    block_table: AnyArray | None  # i32[R B] of the keys
    slot_mapping: AnyArray  # i32[T] slots of k and v

    @property
    def num_tokens(self) -> int:
        return self.common.num_tokens


@dataclasses.dataclass(frozen=True)
class CpuNativeMetadataBuilder(AttentionMetadataBuilder[CpuNativeMetadata]):
    """Computes nothing: the C++ kernel divides the work among threads."""

    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CpuNativeMetadata:
        """common_prefix_len has no effect: the kernel reads a shared prefix once for each request."""
        keys = keys_of(common_attn_metadata, self.spec.attn_type)
        return CpuNativeMetadata(
            common=common_attn_metadata, block_table=keys.block_table, slot_mapping=keys.slot_mapping
        )


@dataclasses.dataclass(frozen=True)
class CpuNativeImpl(AttentionImpl[CpuNativeMetadata]):
    """One custom call writes, another one attends."""

    can_return_lse_for_decode = True
    supports_quant_query_input = True
    isa: str = "auto"  # or the name of an instruction set: see pallas_kernels.cpu.native.library.status

    def forward(self, q, cache: PagedKV, m: CpuNativeMetadata, params: AttentionParams) -> AttentionState:
        return _paged(self, q, cache, m, params)

    def forward_packed(self, q, k, v, meta: CommonAttentionMetadata, params: AttentionParams) -> AttentionState:
        return _packed(self, q, k, v, meta, params)

    def do_kv_cache_update(self, cache: PagedKV, k, v, m: CpuNativeMetadata, params: AttentionParams) -> PagedKV:
        """The same values as jattn.write_kv, written in place if the cache is donated."""
        return _write(self, cache, k, v, m.slot_mapping, scales_of(params))

    def config(self, q_dtype, kv_dtype: str, heads_first: bool = True) -> ops.NativeConfig:
        """The kernel's static arguments."""
        left, right = self.spec.window
        return ops.NativeConfig(
            scale=self.spec.scale,
            kv_dtype=kv_dtype,
            out_dtype=output_dtype(q_dtype),
            soft_cap=self.spec.logits_soft_cap or 0.0,
            window_left=left,
            window_right=right,
            chunk_size=self.spec.chunk_size or 0,
            heads_first=heads_first,
            isa=self.isa,
        )

    def batch(self, common: CommonAttentionMetadata, **pages) -> ops.NativeBatch:
        """The kernel's batch: lengths and causality. Only a decoder's layer is ever causal."""
        kind = self.spec.attn_type
        queries, keys = queries_of(common, kind), keys_of(common, kind)
        causal = None
        if kind is AttentionType.DECODER and common.causal_per_request is not None:
            causal = jnp.asarray(common.causal_per_request)
        elif kind is AttentionType.DECODER and common.is_causal:
            causal = jnp.ones(queries.max_num_reqs, jnp.int32)
        return ops.NativeBatch(
            query_start_loc=jnp.asarray(queries.query_start_loc),
            seq_lens=jnp.asarray(queries.seq_lens),
            kv_lens=jnp.asarray(keys.seq_lens),
            causal=causal,
            **pages,
        )

    def kernel_params(self, params: AttentionParams) -> dict[str, jax.Array | None]:
        """The kernel's traced parameters, without those that the spec does not use."""
        q_scale, k_scale, v_scale = as_arrays(params.q_scale, params.k_scale, params.v_scale)
        return dict(
            alibi_slopes=params.alibi_slopes if self.spec.has_alibi else None,
            sinks=params.sinks if self.spec.has_sinks else None,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _paged(impl: CpuNativeImpl, q, cache: PagedKV, m: CpuNativeMetadata, params) -> AttentionState:
    spec = cache.spec
    config = impl.config(q.dtype, spec.dtype, spec.physical_layout == "HND")
    out, lse = ops.attend(
        config, q, cache.k, cache.v, impl.batch(m.common, block_table=m.block_table),
        k_token_scale=cache.k_token_scale, v_token_scale=cache.v_token_scale, **impl.kernel_params(params),
    )  # fmt: skip
    return AttentionState(out=out, lse=lse)


def _paged_backward(impl: CpuNativeImpl, saved, cotangent):
    q, cache, m, params = saved
    dq, dcache, dparams = paged_gradient(impl.spec, m.common, m.block_table, (q, cache, params), cotangent)
    return dq, dcache, None, dparams


_paged.defvjp(lambda impl, *args: (_paged(impl, *args), args), _paged_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed(impl: CpuNativeImpl, q, k, v, common: CommonAttentionMetadata, params) -> AttentionState:
    lengths = jnp.asarray(keys_of(common, impl.spec.attn_type).seq_lens)
    batch = impl.batch(common, kv_start=jnp.cumsum(lengths, dtype=jnp.int32) - lengths)
    out, lse = ops.attend(impl.config(q.dtype, k.dtype.name), q, k, v, batch, **impl.kernel_params(params))
    return AttentionState(out=out, lse=lse)


def _packed_backward(impl: CpuNativeImpl, saved, cotangent):
    q, k, v, common, params = saved
    dq, (dk, dv), dparams = packed_gradient(impl.spec, common, (q, (k, v), params), cotangent)
    return dq, dk, dv, None, dparams


_packed.defvjp(lambda impl, *args: (_packed(impl, *args), args), _packed_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _write(impl: CpuNativeImpl, cache: PagedKV, k, v, slots, params: AttentionParams) -> PagedKV:
    spec = cache.spec
    if k.dtype != v.dtype:
        k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    pools = (cache.k, cache.v, cache.k_token_scale, cache.v_token_scale)
    k_scale, v_scale = as_arrays(params.k_scale, params.v_scale)
    new = ops.write(
        k, v, slots, pools, kv_dtype=spec.dtype, heads_first=spec.physical_layout == "HND",
        k_scale=k_scale, v_scale=v_scale, isa=impl.isa,
    )  # fmt: skip
    return PagedKV(k=new[0], v=new[1], k_token_scale=new[2], v_token_scale=new[3], spec=spec)


_write.defvjp(lambda impl, *args: (_write(impl, *args), args), lambda impl, *args: write_backward(*args))


class CpuNativeBackend(AttentionBackend):
    """Any head dim up to 512, any block size, layout and quantisation; no mask_fn, score_fn or cascade."""

    name = "cpu_native"
    impl_cls = CpuNativeImpl
    builder_cls = CpuNativeMetadataBuilder
    metadata_cls = CpuNativeMetadata
    supported_dtypes = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_kv_cache_dtypes = ("auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_block_sizes = (MultipleOf(1),)
    attn_types = (
        AttentionType.DECODER,
        AttentionType.ENCODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
    platforms = ("cpu",)
    features = frozenset(
        {
            Feature.SINK,
            Feature.PER_HEAD_QUANT_SCALES,
            Feature.SLIDING_WINDOW,
            Feature.NON_CAUSAL,
            Feature.BATCH_INVARIANCE,
            Feature.TWO_SIDED_WINDOW,
            Feature.CHUNK,
            Feature.ALIBI,
            Feature.SOFT_CAP,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.PACKED,
        }
    )

    @classmethod
    def layer_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip) -> tuple[str, ...]:
        """Head dims that are too large, and on a CPU why the library cannot be loaded. The first call compiles it."""
        large = tuple(
            f"{name}={size} not supported: at most {ops.MAX_HEAD_DIM}"
            for name, size in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim))
            if size > ops.MAX_HEAD_DIM
        )
        absent = library.status().reason if chip.platform == "cpu" else ""
        return (*large, absent) if absent else large
