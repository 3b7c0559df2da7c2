"""`mla_pallas_tpu`: absorbed latent attention by the TPU kernel, for decode, prefill and mixed batches.

It was never run on a TPU: tests interpret it on CPU and compile it ahead of time. Sparse attention over listed keys and
prefill_mha, the materialised form, are computed as by mla_sdpa, and the gradient is that of its absorbed form.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.backends.mla import MLABackend, MLAImpl, MLAMetadataBuilder
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.latent import is_wide
from jattn.errors import UnsupportedError
from jattn.metadata import CommonAttentionMetadata
from jattn.mla_spec import MLAParams, MLASpec, absorb
from jattn.ops.mla import MLAMetadata, absorbed_queries, projected_values
from jattn.ops.state import AttentionState
from jattn.types import Feature, MultipleOf, pytree, static
from pallas_kernels.algebra import quant
from pallas_kernels.tpu.config import TpuKernelConfig
from pallas_kernels.tpu.latent_attention import ragged_latent_attention
from pallas_kernels.tpu.supports import supports, supports_batch
from pallas_kernels.tpu.tile_policy import default_config
from pallas_kernels.tpu.work_list import TpuWorkList, build_work_list

QUERY_DTYPES = ("bfloat16", "float32")


@pytree
class MLATpuMetadata(MLAMetadata):
    """The plan of a batch, and the kernel's list of tiles."""

    work: TpuWorkList
    config: TpuKernelConfig = static()  # with any dtype of queries


@dataclasses.dataclass(frozen=True)
class MLATpuMetadataBuilder(MLAMetadataBuilder):
    """Divides the queries into tiles, without a host sync."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLATpuMetadata:
        """common_prefix_len has no effect: the kernel reads a shared prefix once for each request."""
        common: CommonAttentionMetadata = common_attn_metadata
        spec: Any = self.spec  # an MLASpec
        config = kernel_config(spec, self.cache_spec, common=common)
        plan = super().build(0, common, fast_build)
        reqs, columns = plan.block_table.shape
        if reasons := supports_batch(common.num_tokens, reqs, columns, config):
            raise UnsupportedError("the TPU kernel does not support this batch", {"mla_pallas_tpu": tuple(reasons)})
        causal = common.causal_per_request
        work = build_work_list(
            jnp.asarray(common.query_start_loc), jnp.asarray(common.seq_lens), common.num_tokens, config,
            None if causal is None else jnp.asarray(causal),
        )  # fmt: skip
        fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        return MLATpuMetadata(**fields, work=work, config=config)


def kernel_config(
    spec: MLASpec, cache_spec: KVCacheSpec, dtype: str = "bfloat16", common: CommonAttentionMetadata | None = None
) -> TpuKernelConfig:
    """The kernel's static arguments, not checked: see supports.py. A work list does not depend on dtype."""
    return default_config(
        longest=None if common is None else common.max_query_len,
        num_heads=spec.num_heads,
        num_kv_heads=1,
        head_dim=spec.head_dim,
        v_head_dim=spec.kv_lora_rank,
        page_size=cache_spec.block_size,
        dtype=dtype,
        kv_dtype=cache_spec.dtype,
        out_dtype=dtype,
        mask=spec.absorbed.mask_rule(common is None or common.is_causal),
        logits=spec.absorbed.logit_rule(),
        has_sinks=spec.has_sinks,
        per_request_causal=common is not None and common.causal_per_request is not None,
        latent="whole" if is_wide(spec, cache_spec) else "split",
    )


@dataclasses.dataclass(frozen=True)
class MLATpuImpl(MLAImpl):
    """Launches the kernel for all requests."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  the plan of this backend's builder
        self, q, cache, m: MLATpuMetadata, params: MLAParams
    ) -> AttentionState:
        return self.forward_mqa(q, cache, m, params)

    def forward_mqa(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q, cache, m: MLATpuMetadata, params: MLAParams
    ) -> AttentionState:
        config = dataclasses.replace(m.config, dtype=q.dtype.name, out_dtype=q.dtype.name)
        if reasons := supports(config, chip=self.chip.generation):
            raise UnsupportedError(
                "the TPU kernel does not support these queries; use backend='mla_sdpa'",
                {"mla_pallas_tpu": tuple(reasons)},
            )
        state: Any = _absorbed(self, config, q, cache, m, params)
        return state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _absorbed(
    impl: MLATpuImpl, config: TpuKernelConfig, q, cache: PagedKV, m: MLATpuMetadata, params: MLAParams
) -> AttentionState:
    """W_UK and the scales of the rows multiplied into q, the kernel, its result multiplied by W_UV."""
    spec, params = impl.spec, absorb(impl.spec, params)
    latent_scale = _scale(params.kv_c_scale)
    rope_scale = latent_scale if config.latent == "whole" else _scale(params.k_pe_scale)
    scales = jnp.repeat(jnp.stack([latent_scale, rope_scale]), np.array([spec.kv_lora_rank, spec.qk_rope_head_dim]))
    rows = (absorbed_queries(spec, q, params) * scales[None, None]).astype(config.dtype)
    pools = (cache.k,) if config.latent == "whole" else (cache.k, cache.v)
    out, lse = ragged_latent_attention(
        rows, tuple(_pages(pool, cache.spec) for pool in pools), jnp.asarray(m.block_table), m.work, config,
        alibi_slopes=params.alibi_slopes, sinks=params.sinks, latent_scale=latent_scale, chip=impl.chip.generation,
    )  # fmt: skip
    return projected_values(AttentionState(out=out.astype(jnp.float32), lse=lse), q.dtype, params)


def _pages(pool: jax.Array, cache_spec: KVCacheSpec) -> jax.Array:
    """[N S .] of a pool with one kv head, in either order."""
    return quant.native(pool, cache_spec.dtype).reshape(pool.shape[0], cache_spec.block_size, -1)


def _scale(scale) -> jax.Array:
    """f32 scalar; 1 for None."""
    return jnp.asarray(1.0 if scale is None else scale, jnp.float32).reshape(())


def _absorbed_backward(impl: MLATpuImpl, config: TpuKernelConfig, saved, cotangent):
    q, cache, m, params = saved
    reference = lambda q, cache, params: impl._latent.forward_mqa(q, cache, m, params)  # noqa: E731
    dq, dcache, dparams = jax.vjp(reference, q, cache, params)[1](cotangent)
    return dq, dcache, None, dparams


_absorbed.defvjp(lambda impl, config, *args: (_absorbed(impl, config, *args), args), _absorbed_backward)


class MLAPallasTpuBackend(MLABackend):
    """Latent caches, split or wide, in either order. pallas_kernels.tpu.supports gives the kernel's limits."""

    name = "mla_pallas_tpu"
    impl_cls = MLATpuImpl
    builder_cls = MLATpuMetadataBuilder
    metadata_cls = MLATpuMetadata
    supported_dtypes = QUERY_DTYPES
    supported_kv_cache_dtypes = (*QUERY_DTYPES, "float8_e4m3fn", "float8_e5m2", "int8")
    supported_block_sizes = (MultipleOf(16),)
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
            Feature.ALIBI,
            Feature.SOFT_CAP,
            Feature.MASK_FN,
            Feature.SCORE_FN,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
        }
    )

    @classmethod
    def layer_reasons(cls, spec, cache_spec, chip) -> tuple[str, ...]:
        own = super().layer_reasons(spec, cache_spec, chip)
        if own or not isinstance(spec, MLASpec) or cache_spec is None:
            return own
        if cache_spec.dtype not in cls.supported_kv_cache_dtypes:  # the list has refused it
            return ()
        return tuple(supports(kernel_config(spec, cache_spec), chip=chip.generation if chip.platform == "tpu" else ""))
