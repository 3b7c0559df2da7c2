"""`mla_pallas_gpu`: absorbed latent attention by a Mosaic GPU kernel, for decoding and multi-token prediction.

The kernel computes the short requests, those with at most MAX_QUERY_LEN new tokens. The others are computed in the
materialised form (mla_gpu_prefill.py), or where the paged kernel does not support its head dimensions, as by mla_sdpa;
so are all requests if queries are float32. The gradient is that of mla_sdpa's form.

Over a cache of 8 bits the kernel multiplies in float16, which holds every value of 8 bits and more bits of a query than
bfloat16. Each row of queries is divided by a power of two, so that the largest of its values is between 1 and 2.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.backends.gpu_kernel import usual_query_dtype
from jattn.backends.gpu_write import write_pages
from jattn.backends.mla import MLABackend, MLAImpl, MLAMetadataBuilder
from jattn.backends.mla_gpu_listed import listed_rows
from jattn.backends.mla_gpu_prefill import prefill_reasons, projected_prefill
from jattn.backends.mla_gpu_prompts import PromptPlan, prompt_plan
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.latent import is_wide, latent_pages, row_scales, write_latent
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.subset import subset
from jattn.mla_spec import MLAParams, MLASpec, absorb
from jattn.ops.mla import MLAMetadata, absorbed_queries, projected_values, with_gradient_of
from jattn.ops.state import AttentionState
from jattn.types import AnyArray, Feature, MultipleOf, pytree, static
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.config import KV_DTYPES_8BIT
from pallas_kernels.gpu.mla_config import DTYPES, MAX_QUERY_LEN, MlaKernelConfig, heads_of_unit, supports_mla
from pallas_kernels.gpu.mla_sm90 import latent_attention
from pallas_kernels.gpu.work_list import GpuWorkList, build_work_list


@pytree
class MLAGpuMetadata(MLAMetadata):
    """The plan of all requests, the work list of the short ones, and the parts of the long ones."""

    short: MLAMetadata  # the plan of the short requests as a batch of their own
    work: GpuWorkList
    tokens: AnyArray | None  # i32[n] index of their tokens in the batch; T: padding. None: all requests are short
    requests: AnyArray | None  # i32[R] index of the short requests in the batch; None as above
    prompts: PromptPlan | None  # of the other requests; None as above, or where the paged kernel cannot serve them
    config: MlaKernelConfig = static()


@dataclasses.dataclass(frozen=True)
class MLAGpuMetadataBuilder(MLAMetadataBuilder):
    """Collects the short requests in a batch of their own, and divides it among the CTAs."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAGpuMetadata:
        """common_prefix_len has no effect: the kernel reads a shared prefix once for each request."""
        common: CommonAttentionMetadata = common_attn_metadata
        spec: Any = self.spec  # an MLASpec
        short, tokens, requests = common, None, None
        plan_of = functools.partial(super().build, 0, fast_build=fast_build)
        if common.max_query_len > MAX_QUERY_LEN:
            most = min(common.num_tokens, common.max_num_reqs * MAX_QUERY_LEN)
            lens = common.query_lens()
            short, tokens, requests = subset(common, (lens > 0) & (lens <= MAX_QUERY_LEN), most, MAX_QUERY_LEN)
        causal = short.causal_per_request
        config = dataclasses.replace(
            kernel_config(spec, self.cache_spec, short.max_query_len),
            mask=spec.absorbed.mask_rule(common.is_causal), logits=spec.absorbed.logit_rule(),
            has_sinks=spec.has_sinks, per_request_causal=causal is not None,
        )  # fmt: skip
        work = build_work_list(
            jnp.asarray(short.query_start_loc), jnp.asarray(short.seq_lens), short.num_tokens,
            config.list_of(short.max_num_reqs), None if causal is None else jnp.asarray(causal),
        )  # fmt: skip
        plan, prompts, dtype = plan_of(common), None, usual_query_dtype(self.cache_spec)
        if tokens is not None and not prefill_reasons(spec, dtype):
            prompts = prompt_plan(spec, dtype, _without_short(plan), self.cache_spec.block_size)
        return MLAGpuMetadata(
            **{field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}, config=config, work=work,
            short=plan_of(short), tokens=tokens, requests=requests, prompts=prompts,
        )  # fmt: skip

    def update_block_table(self, metadata: MLAMetadata, block_table, slot_mapping) -> MLAMetadata:
        """The same plan with another block table."""
        assert isinstance(metadata, MLAGpuMetadata)
        requests, short = metadata.requests, metadata.short
        table = block_table if requests is None else jnp.asarray(block_table)[requests]
        metadata = dataclasses.replace(
            metadata, short=super().update_block_table(short, table, jnp.asarray(short.slot_mapping))
        )
        return super().update_block_table(metadata, block_table, slot_mapping)


def kernel_config(spec: MLASpec, cache_spec: KVCacheSpec, max_query_len: int) -> MlaKernelConfig:
    """The kernel's static arguments for a causal batch, without options that the backend's features refuse."""
    return MlaKernelConfig(
        num_heads=spec.num_heads,
        group=heads_of_unit(spec.num_heads, max_query_len),
        latent_dim=spec.kv_lora_rank,
        rope_dim=spec.qk_rope_head_dim,
        page_size=cache_spec.block_size,
        max_rows=heads_of_unit(spec.num_heads, max_query_len) * max_query_len,
        dtype=cache_spec.dtype if cache_spec.dtype in DTYPES else "float16",
        kv_dtype=None if cache_spec.dtype in DTYPES else cache_spec.dtype,
        whole_rows=is_wide(spec, cache_spec),
        mask=MaskRule(),
        logits=LogitRule(scale=spec.scale),
    )


@dataclasses.dataclass(frozen=True)
class MLAGpuImpl(MLAImpl):
    """Launches the kernel for the short requests, and merges in the others."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  the plan of this backend's builder
        self, q, cache, m: MLAGpuMetadata, params: MLAParams
    ) -> AttentionState:
        if q.dtype.name not in DTYPES:
            return super().forward(q, cache, m, params)
        if m.tokens is None:
            return self._short(q, cache, m, params)
        tokens, long = m.tokens, _without_short(m)
        if prefill_reasons(self.spec, q.dtype.name):
            state = self._latent.forward(q, cache, long, params)
        else:
            state: Any = projected_prefill(self._latent, q, cache, long, params, None, m.prompts)
        short = self._short(q.at[tokens].get(mode="fill", fill_value=0), cache, m, params)
        out, lse = short.out.astype(state.out.dtype), short.lse
        index = jnp.where(tokens < q.shape[0], tokens, q.shape[0] + jnp.arange(tokens.shape[0]))  # no two alike
        put = dict(mode="drop", unique_indices=True)
        return AttentionState(out=state.out.at[index].set(out, **put), lse=state.lse.at[index].set(lse, **put))

    def prefill_mha(self, q, cache, m: MLAMetadata, params: MLAParams, kv_c=None, k_pe=None) -> AttentionState:
        """The materialised form for all requests; by the paged kernel if q is of 16 bits and it supports the layer."""
        if q.dtype.name not in DTYPES or prefill_reasons(self.spec, q.dtype.name):
            return super().prefill_mha(q, cache, m, params, kv_c, k_pe)
        plan = MLAMetadata(level=m.level, slot_mapping=m.slot_mapping, is_causal=m.is_causal)
        return projected_prefill(self._latent, q, cache, plan, params, None if kv_c is None else (kv_c, k_pe))

    def forward_mqa(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q, cache, m: MLAGpuMetadata, params: MLAParams
    ) -> AttentionState:
        """The absorbed form for all requests; by the kernel if all are short and q is of 16 bits."""
        by_kernel = m.tokens is None and q.dtype.name in DTYPES
        return self._short(q, cache, m, params) if by_kernel else super().forward_mqa(q, cache, m, params)

    def forward_listed(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, q, cache, m: MLAMetadata, params: MLAParams, topk_indices
    ) -> AttentionState:
        """The absorbed form over the keys that each token lists; by the kernel if q and the cache are of 16 bits."""
        config = dataclasses.replace(kernel_config(self.spec, cache.spec, 1), listed=True)
        if q.dtype.name not in DTYPES or q.size * topk_indices.size == 0 or supports_mla(config):
            return super().forward_listed(q, cache, m, params, topk_indices)
        plan = MLAMetadata(level=m.level, slot_mapping=m.slot_mapping, is_causal=m.is_causal)
        state: Any = _listed(self, config, q, cache, plan, params, topk_indices)
        return state

    def do_kv_cache_update(  # pyright: ignore[reportIncompatibleMethodOverride]  a latent layer has MLAParams
        self, cache: PagedKV, k: jax.Array, v: jax.Array, m: MLAMetadata, params: MLAParams
    ) -> PagedKV:
        """k is the latent kv_c [T L], v the rotated key k_pe [T R]; both pools are written in one launch."""
        write = functools.partial(write_pages, self.chip)
        return write_latent(self.spec, cache, k, v, m.slot_mapping, params, write)

    def _short(self, q, cache, m: MLAGpuMetadata, params: MLAParams) -> AttentionState:
        """The kernel's result. q: the tokens of the short requests."""
        state: Any = _absorbed(self, m.config, q, cache, m.short, params, m.work)
        return state


def _without_short(m: MLAMetadata) -> MLAMetadata:
    """The plan in which the short requests have no queries."""
    batch = m.level.batch
    batch = dataclasses.replace(batch, query_lens=jnp.where(batch.query_lens > MAX_QUERY_LEN, batch.query_lens, 0))
    level = dataclasses.replace(m.level, batch=batch)
    return MLAMetadata(level=level, slot_mapping=m.slot_mapping, is_causal=m.is_causal)


@with_gradient_of(lambda impl, config, *args: impl._latent.forward_mqa(*args[:-1]), constants=2)
def _absorbed(
    impl: MLAGpuImpl, config: MlaKernelConfig, q, cache: PagedKV, m: MLAMetadata, params: MLAParams, work: GpuWorkList
) -> AttentionState:
    """The kernel over the cached rows of each request."""
    return _by_kernel(impl, config, q, cache, jnp.asarray(m.block_table), work, params)


def _by_kernel(impl: MLAGpuImpl, config: MlaKernelConfig, q, cache: PagedKV, table, work: GpuWorkList, params):
    """W_UK multiplied into q, the kernel over the cached rows, its result multiplied by W_UV, and all scales."""
    spec, params = impl.spec, absorb(impl.spec, params)
    _, scales = row_scales(spec, cache.spec, params)
    rows, factors = absorbed_queries(spec, q, params) * scales[None, None], None
    if config.is_decoded:
        rows, factors = _in_range(rows)
    rows = rows.astype(config.dtype)
    if config.whole_rows:
        latents, ropes = latent_pages(cache.k, cache.spec), None
    else:
        latents, ropes = latent_pages(cache.v, cache.spec), latent_pages(cache.k, cache.spec)
    out, lse = latent_attention(rows, latents, ropes, table, work, config, factors)
    return projected_values(AttentionState(out=out, lse=lse), q.dtype, params, params.kv_c_scale)


def _in_range(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """f32 rows [T H n] -> (rows whose largest magnitude is between 1 and 2, the powers of two f32[T H] taken out)."""
    top = jnp.max(jnp.abs(rows), axis=-1)
    power = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(top, jnp.int32) & 0x7F800000, jnp.float32)
    power = jnp.where(jnp.isfinite(power) & (power > 0), power, 1.0)
    return rows / power[..., None], power


@with_gradient_of(lambda impl, config, *args: impl._latent.forward_listed(*args), constants=2)
def _listed(
    impl: MLAGpuImpl, config: MlaKernelConfig, q, cache: PagedKV, m: MLAMetadata, params: MLAParams, topk_indices
) -> AttentionState:
    """The kernel over the listed rows; each token is a request of its own."""
    rows, counts = listed_rows(m.level, m.is_causal, topk_indices, cache.spec.block_size)
    starts = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    work = build_work_list(starts, counts, q.shape[0], config.attention)
    return _by_kernel(impl, config, q, cache, rows, work, params)


class MLAPallasGpuBackend(MLABackend):
    """Latent caches of 16 or 8 bits, split or wide. pallas_kernels.gpu.mla_config gives the kernel's limits."""

    name = "mla_pallas_gpu"
    impl_cls = MLAGpuImpl
    builder_cls = MLAGpuMetadataBuilder
    metadata_cls = MLAGpuMetadata
    supported_dtypes = ("float32", *DTYPES)  # float32 without the kernel
    supported_kv_cache_dtypes = (*DTYPES, *KV_DTYPES_8BIT)
    supported_block_sizes = (MultipleOf(8),)
    quant_modes = ("none", "per_tensor", "per_head")  # the rows have one head
    platforms = ("gpu",)
    min_compute_capability = 90
    features = frozenset(
        {
            Feature.NON_CAUSAL,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.PER_HEAD_QUANT_SCALES,
        }
    )

    @classmethod
    def layer_reasons(cls, spec, cache_spec, chip) -> tuple[str, ...]:
        own = super().layer_reasons(spec, cache_spec, chip)
        if own or not isinstance(spec, MLASpec) or cache_spec is None:
            return own
        if cache_spec.dtype not in cls.supported_kv_cache_dtypes:
            return own
        return tuple(supports_mla(kernel_config(spec, cache_spec, 1), chip=chip.generation or "sm_90"))
