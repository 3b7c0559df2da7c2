"""`mla_cpu_native`: latent attention by the C++ kernels of `cpu_native`. The first choice for latent caches on a CPU.

The absorbed form is three custom calls: the products by W_UK and by W_UV, and attention, which reads each cached row
once for all heads, as key and as value. Sums are float32; what goes from one call to the next is rounded to bfloat16 if
queries are bfloat16 and the next call multiplies in bfloat16. Of the materialised form, attention over packed keys is a
custom call, and keys and values are rounded likewise, unless the layer has chunks or heads of more than 512 values.
Sparse attention, writes and gradients are those of `mla_sdpa`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.backends.kernel import as_arrays
from jattn.backends.mla import MLABackend, MLAImpl, MLAMetadataBuilder
from jattn.cache import PagedKV
from jattn.cache.latent import is_wide
from jattn.metadata import CommonAttentionMetadata
from jattn.mla_spec import MLAParams, MLASpec, absorb
from jattn.ops.layer import output_dtype
from jattn.ops.mla import LatentAttention, MLAMetadata, with_gradient_of
from jattn.ops.ragged import RaggedBatch
from jattn.ops.state import AttentionState
from jattn.types import Feature
from pallas_kernels.cpu.native import library, ops


@dataclasses.dataclass(frozen=True)
class CpuMLAMetadataBuilder(MLAMetadataBuilder):
    """The plan of `mla_sdpa` without a shared prefix: the kernel reads it once for each request."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> MLAMetadata:
        """common_prefix_len has no effect."""
        return super().build(0, common_attn_metadata, fast_build)


@dataclasses.dataclass(frozen=True)
class NativeLatentAttention(LatentAttention):
    """The absorbed form, and attention over materialised keys, by the C++ calls."""

    isa: str = "auto"  # or the name of an instruction set: see pallas_kernels.cpu.native.library.status

    def forward_mqa(self, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams) -> AttentionState:
        return _absorbed(self, q, cache, m, params)

    def forward_few(self, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams) -> AttentionState:
        """Computed only if there are such requests: the products by W_UK and W_UV are for all tokens of the batch."""
        compute = lambda: self.forward_mqa(q, cache, m, params)
        nothing = lambda: AttentionState.empty(
            q.shape[0], self.spec.num_heads, self.spec.v_head_dim, output_dtype(q.dtype)
        )
        return jax.lax.cond(jnp.any(m.level.batch.query_lens > 0), compute, nothing)

    def attend_materialised(
        self, q, k, v, cache: PagedKV, m: MLAMetadata, batch: RaggedBatch, params: MLAParams
    ) -> AttentionState:
        """By the call for packed keys, unless heads are wider than it takes, or there are chunks: those begin at
        absolute positions, and the call counts from the first key. Keys and values, new ones too, are rounded as the
        absorbed form rounds rows."""
        is_too_wide = max(self.spec.qk_head_dim, self.spec.v_head_dim) > ops.MAX_HEAD_DIM
        if is_too_wide or self.spec.chunk_size is not None:
            return super().attend_materialised(q, k, v, cache, m, batch, params)
        dtype = jnp.bfloat16 if _multiplies_in_bf16(q, cache) else jnp.float32
        k, v = k.astype(dtype), v.astype(dtype)
        config = _config(self, kv_dtype=k.dtype.name, out_dtype="float32")
        out, lse = ops.attend(config, q.astype(dtype), k, v, _packed_batch(m, batch), alibi_slopes=params.alibi_slopes)
        return AttentionState(out=out, lse=lse)


def _config(latent: NativeLatentAttention, **others) -> ops.NativeConfig:
    spec = latent.spec
    return ops.NativeConfig(
        scale=spec.scale, soft_cap=spec.logits_soft_cap or 0.0, window_left=spec.window[0],
        window_right=spec.window[1], isa=latent.isa, **others,
    )  # fmt: skip


def _multiplies_in_bf16(q: jax.Array, cache: PagedKV) -> bool:
    return q.dtype == jnp.bfloat16 and cache.spec.dtype not in ("float32", "float16")


def _plain_absorbed(latent: NativeLatentAttention, *args) -> AttentionState:
    return LatentAttention(latent.spec, latent.path).forward_mqa(*args)


@with_gradient_of(_plain_absorbed)
def _absorbed(latent: NativeLatentAttention, q, cache: PagedKV, m: MLAMetadata, params: MLAParams) -> AttentionState:
    spec, stored, params = latent.spec, cache.spec, absorb(latent.spec, params)
    is_split = not is_wide(spec, stored)
    kv_c_scale, k_pe_scale = as_arrays(params.kv_c_scale, params.k_pe_scale if is_split else params.kv_c_scale)
    assert params.w_uk is not None and params.w_uv is not None  # absorb has split kv_b_proj
    nope, rope = jnp.split(q, [spec.qk_nope_head_dim], axis=-1)
    absorbed = _per_head_product(nope, params.w_uk, "float32", latent.isa)
    rows = jnp.concatenate([_times(absorbed, kv_c_scale), _times(rope.astype(jnp.float32), k_pe_scale)], axis=-1)
    config = _config(
        latent, kv_dtype=stored.dtype, latent_dim=spec.kv_lora_rank, chunk_size=spec.chunk_size or 0,
        out_dtype="bfloat16" if q.dtype == params.w_uv.dtype == jnp.bfloat16 else "float32",
        heads_first=stored.physical_layout == "HND",
    )  # fmt: skip
    k, k_token_scale = cache.k, cache.k_token_scale
    v, v_token_scale = (cache.v, cache.v_token_scale) if is_split else (k, k_token_scale)
    out, lse = ops.attend(
        config, rows.astype(jnp.bfloat16) if _multiplies_in_bf16(q, cache) else rows, k, v, _batch(m),
        k_token_scale=k_token_scale,
        v_token_scale=v_token_scale, alibi_slopes=params.alibi_slopes, sinks=params.sinks, v_scale=kv_c_scale,
    )  # fmt: skip
    return AttentionState(out=_per_head_product(out, params.w_uv, output_dtype(q.dtype), latent.isa), lse=lse)


def _per_head_product(x: jax.Array, w, out_dtype: str, isa: str) -> jax.Array:
    """[T H out] x[:, h] @ w[h], summed in float32; x [T H in], w [H in out]. In float32 unless both are bfloat16."""
    in_bf16 = x.dtype == w.dtype == jnp.bfloat16
    x, w = (x, w) if in_bf16 else (x.astype(jnp.float32), jnp.asarray(w, jnp.float32))
    return ops.head_product(x, w, out_dtype=out_dtype, isa=isa)


def _times(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return x if scale is None else x * scale.reshape(())


def _batch(m: MLAMetadata) -> ops.NativeBatch:
    """The kernel's batch. A request with query_lens 0 in this level keeps its tokens; kv_lens 0 gives them no keys."""
    batch = m.level.batch
    seq_lens = jnp.asarray(batch.seq_lens)
    return ops.NativeBatch(
        query_start_loc=_query_start_loc(batch),
        seq_lens=seq_lens,
        kv_lens=jnp.where(batch.query_lens > 0, seq_lens, 0),
        block_table=jnp.asarray(m.level.block_table),
        causal=_causal(m, batch),
    )


def _packed_batch(m: MLAMetadata, batch: RaggedBatch) -> ops.NativeBatch:
    """The same of keys packed by request, those of `batch`. Positions count from a request's first key, which is at
    kv_offset: seq_lens may be negative for a request without queries, which has no keys here."""
    lengths = jnp.asarray(batch.seq_lens)
    return ops.NativeBatch(
        query_start_loc=_query_start_loc(batch),
        seq_lens=m.level.batch.seq_lens - batch.kv_offset,
        kv_lens=jnp.where(batch.query_lens > 0, lengths, 0),
        kv_start=jnp.cumsum(lengths, dtype=jnp.int32) - lengths,
        causal=_causal(m, batch),
    )


def _query_start_loc(batch: RaggedBatch) -> jax.Array:
    start = jnp.asarray(batch.start)
    return jnp.append(start, start[-1] + batch.query_lens[-1])


def _causal(m: MLAMetadata, batch: RaggedBatch) -> jax.Array | None:
    """i32[R] or bool[R]: 1 for a causal request. None: none is."""
    if batch.rows.causal is not None:
        return jnp.asarray(batch.rows.causal)[jnp.minimum(jnp.asarray(batch.start), batch.num_tokens - 1)]
    return jnp.ones(batch.num_reqs, jnp.int32) if m.is_causal else None


@dataclasses.dataclass(frozen=True)
class CpuMLAImpl(MLAImpl):
    """MLAImpl with NativeLatentAttention."""

    isa: str = "auto"  # see NativeLatentAttention

    @property
    def _latent(self) -> LatentAttention:
        plain = super()._latent
        return NativeLatentAttention(plain.spec, plain.path, isa=self.isa)


class CpuMLABackend(MLABackend):
    """Latent caches, split or wide (`cache.latent.is_wide`), with latents and rotated keys of up to 512 values."""

    name = "mla_cpu_native"
    impl_cls = CpuMLAImpl
    builder_cls = CpuMLAMetadataBuilder
    metadata_cls = MLAMetadata
    platforms = ("cpu",)
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
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
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.DECODE_BATCH_INVARIANCE,  # in the absorbed form
        }
    )

    @classmethod
    def layer_reasons(cls, spec, cache_spec, chip) -> tuple[str, ...]:
        """Rows that the kernel cannot read, and on a CPU why the library cannot be loaded."""
        reasons = super().layer_reasons(spec, cache_spec, chip)
        if not isinstance(spec, MLASpec):
            return reasons
        for name in ("kv_lora_rank", "qk_rope_head_dim"):
            if (size := getattr(spec, name)) > ops.MAX_HEAD_DIM:
                reasons += (f"{name}={size} not supported: at most {ops.MAX_HEAD_DIM}",)
        if cache_spec is not None and cache_spec.quant == "per_token_head" and not is_wide(spec, cache_spec):
            reasons += ("quant='per_token_head' not supported in a split cache: its rows have two scales",)
        absent = library.status().reason if chip.platform == "cpu" else ""
        return (*reasons, absent) if absent else reasons
