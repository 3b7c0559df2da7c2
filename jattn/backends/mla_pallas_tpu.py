"""`mla_pallas_tpu`: absorbed latent attention by the TPU kernel, for decode, prefill and mixed batches.

It was never run on a TPU: tests interpret it on CPU and compile it ahead of time. Sparse attention over listed keys and
prefill_mha, the materialised form, are computed as by mla_sdpa, and the gradient is that of its absorbed form.

Where a batch may have a long prompt, `forward` takes two launches. The keys before the new tokens are read in the
absorbed form, which they all see; among the new tokens, keys and values are projected for HEADS heads at a time and
multiplied in the materialised form, which takes 0.29 of the products (DeepSeek V3). The two states are merged. A
layer whose mask or logits depend on positions takes one launch for all.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jattn.backends.mla import MLABackend, MLAImpl, MLAMetadataBuilder
from jattn.cache import KVCacheSpec, PagedKV
from jattn.cache.latent import gather_latent, is_wide, latent_pages, row_scales
from jattn.cache.write import PACKED_PAGE, packed_as_pages
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata import CommonAttentionMetadata
from jattn.mla_spec import MLAParams, MLASpec, absorb
from jattn.ops.mla import MLAMetadata, absorbed_queries, materialised, projected_values, with_gradient_of
from jattn.ops.state import AttentionState, merge, with_sinks
from jattn.types import AnyArray, Feature, MultipleOf, pytree, static
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import slots_of
from pallas_kernels.tpu.config import TpuKernelConfig
from pallas_kernels.tpu.latent_attention import ragged_latent_attention
from pallas_kernels.tpu.paged_attention import ragged_paged_attention
from pallas_kernels.tpu.supports import supports, supports_batch
from pallas_kernels.tpu.tile_policy import default_config, for_packed_keys
from pallas_kernels.tpu.work_list import TpuWorkList, build_work_list

QUERY_DTYPES = ("bfloat16", "float32")
HEADS = 4
"""Heads of one launch of the materialised form, at most: DeepSeek V3's tiles of 512 tokens fit VMEM on every
generation, in float32 with smaller blocks."""


@pytree
class MLATpuMetadata(MLAMetadata):
    """The plan of a batch, and the kernel's list of tiles."""

    work: TpuWorkList  # with `new_tokens`, over the keys before them
    config: TpuKernelConfig = static()  # with any dtype of queries
    new_tokens: TpuWorkList | None = None  # of the materialised form, among the new tokens
    query_lens: AnyArray | None = None  # i32[R], with new_tokens
    new_config: TpuKernelConfig | None = static(default=None)
    longest: int = static(default=0)  # upper bound of query_lens


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
        causal = None if common.causal_per_request is None else jnp.asarray(common.causal_per_request)
        starts, lens, tokens = jnp.asarray(common.query_start_loc), jnp.asarray(common.seq_lens), common.num_tokens
        fields = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
        new_config = new_tokens_config(spec, config, common, self.chip)
        if new_config is None:
            work = build_work_list(starts, lens, tokens, config, causal)
            return MLATpuMetadata(**fields, work=work, config=config)
        new, mask = common.query_lens(), dataclasses.replace(config.mask, causal=False)
        config = dataclasses.replace(config, mask=mask, per_request_causal=False, has_sinks=False)
        return MLATpuMetadata(
            **fields, config=config, new_config=new_config, query_lens=new, longest=common.max_query_len,
            work=build_work_list(starts, jnp.maximum(lens - new, 0), tokens, config),
            new_tokens=build_work_list(starts, new, tokens, new_config, causal),
        )  # fmt: skip


def new_tokens_config(
    spec: MLASpec, config: TpuKernelConfig, common: CommonAttentionMetadata, chip: Chip
) -> TpuKernelConfig | None:
    """The kernel's static arguments for the materialised form among the new tokens; None: the batch has no long prompt,
    or the layer cannot be computed so.

    A new token sees half of its prompt on average, so twice mha_threshold tokens are long.
    """
    mask, logits = config.mask, config.logits
    plain = mask == MaskRule(causal=mask.causal) and logits == LogitRule(logits.scale, logits.soft_cap)
    if not plain or common.max_query_len <= 2 * spec.mha_threshold:
        return None
    heads = next(n for n in range(HEADS, 0, -1) if spec.num_heads % n == 0)
    found = default_config(
        chip=chip.generation, longest=common.max_query_len, num_heads=heads, num_kv_heads=heads,
        head_dim=spec.qk_head_dim, v_head_dim=spec.v_head_dim, page_size=PACKED_PAGE, dtype=config.dtype,
        kv_dtype=config.dtype, out_dtype="float32", mask=mask, logits=logits,
        per_request_causal=config.per_request_causal,
        early_heads=0,  # v6e's table asks for 1, against spills that steps of these dims do not have
    )  # fmt: skip
    widest = for_packed_keys(found, "float32", chip.generation)  # the queries' dtype is not known yet
    return None if supports(widest, chip=chip.generation) else found


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
        """By the launches of the plan, so the new tokens of a long prompt are materialised here, too."""
        config = dataclasses.replace(m.config, dtype=q.dtype.name, out_dtype=q.dtype.name)
        if reasons := supports(config, chip=self.chip.generation):
            raise UnsupportedError(
                "the TPU kernel does not support these queries; use backend='mla_sdpa'",
                {"mla_pallas_tpu": tuple(reasons)},
            )
        state: Any = _attend(self, config, q, cache, m, params)
        return state


@with_gradient_of(lambda impl, config, *args: impl._latent.forward_mqa(*args), constants=2)
def _attend(
    impl: MLATpuImpl, config: TpuKernelConfig, q, cache: PagedKV, m: MLATpuMetadata, params: MLAParams
) -> AttentionState:
    """The absorbed form of all keys, or of those before the new tokens, merged with the materialised form of these."""
    if m.new_tokens is None:
        return _absorbed(impl, config, q, cache, m, params)
    before = _absorbed(impl, dataclasses.replace(config, out_dtype="float32"), q, cache, m, params, "float32")
    state = merge(before, _among_new_tokens(impl.spec, q, cache, m, params, impl.chip.generation))
    if impl.spec.has_sinks:
        assert params.sinks is not None
        state = with_sinks(state, params.sinks)
    return dataclasses.replace(state, out=state.out.astype(q.dtype))


def _among_new_tokens(spec: MLASpec, q, cache: PagedKV, m: MLATpuMetadata, params: MLAParams, chip: str):
    """The materialised form over the new tokens' own keys, some heads at a time; float32."""
    assert m.new_config is not None and m.new_tokens is not None and m.query_lens is not None
    params, work = absorb(spec, params), m.new_tokens
    config = for_packed_keys(m.new_config, q.dtype.name, chip)
    batch = m.level.batch
    slots = slots_of(jnp.asarray(m.block_table), batch.req_of_token()[0], batch.rows.position, cache.spec.block_size)
    rows, lens = gather_latent(spec, cache, slots, params), jnp.asarray(m.query_lens)

    def groups(x, axis):
        x = x.reshape(*x.shape[:axis], -1, config.num_heads, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def attend(some):
        q, w_uk, w_uv = some
        heads = dataclasses.replace(params, w_uk=w_uk, w_uv=w_uv)
        k, v = (x.astype(config.dtype) for x in materialised(*rows, heads))
        pages, table = packed_as_pages(k, v, lens, m.longest)
        k, v = (jnp.swapaxes(x, 1, 2) for x in (pages.k, pages.v))
        return ragged_paged_attention(q, k, v, table, work, config, chip=chip)

    out, lse = jax.lax.map(attend, (groups(q, 1), groups(params.w_uk, 0), groups(params.w_uv, 0)))
    whole = lambda x: jnp.moveaxis(x, 0, 1).reshape(q.shape[:2] + x.shape[3:])
    return AttentionState(out=whole(out), lse=whole(lse))


def _absorbed(
    impl: MLATpuImpl, config: TpuKernelConfig, q, cache: PagedKV, m: MLATpuMetadata, params: MLAParams, dtype=None
) -> AttentionState:
    """W_UK and the scales of the rows multiplied into q, the kernel, its result multiplied by W_UV."""
    spec, params = impl.spec, absorb(impl.spec, params)
    latent_scale, scales = row_scales(spec, cache.spec, params)
    rows = (absorbed_queries(spec, q, params) * scales[None, None]).astype(config.dtype)
    pools = (cache.k,) if config.latent == "whole" else (cache.k, cache.v)
    out, lse = ragged_latent_attention(
        rows, tuple(latent_pages(pool, cache.spec) for pool in pools), jnp.asarray(m.block_table), m.work, config,
        alibi_slopes=params.alibi_slopes, sinks=params.sinks if config.has_sinks else None, latent_scale=latent_scale,
        chip=impl.chip.generation,
    )  # fmt: skip
    return projected_values(AttentionState(out=out, lse=lse), dtype or q.dtype, params)


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
