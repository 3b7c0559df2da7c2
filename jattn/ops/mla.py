"""Multi-head latent attention of ragged batches, in its two forms: absorbed and materialised."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.cache.latent import gather_latent, is_wide
from jattn.cache.layout import PagedKV
from jattn.errors import UnsupportedError
from jattn.mla_spec import MLAParams, MLASpec, absorb
from jattn.ops.attend import AttentionCall, Path, attend_packed
from jattn.ops.keys import KVChunk, PagedKeys
from jattn.ops.layer import einsum, layer_terms, output_dtype
from jattn.ops.levels import Level, attend_levels, shared_prefix
from jattn.ops.listed import attend_listed
from jattn.ops.ragged import RaggedBatch
from jattn.ops.state import AttentionState, merge, with_sinks
from jattn.spec import AttentionParams
from jattn.types import AnyArray, pytree, static
from pallas_kernels.algebra.paging import cdiv, slots_of


@pytree
class LatentKeys:
    """A source of keys with one kv head: k = [kv_c | k_pe], v = kv_c. Chunks are dequantised: k has two scales."""

    pages: PagedKeys
    kv_c_scale: jax.Array | float | None
    k_pe_scale: jax.Array | float | None
    kv_lora_rank: int = static()
    wide: bool = static()  # see jattn.cache.latent.is_wide

    @classmethod
    def of(cls, spec: MLASpec, params: MLAParams, cache: PagedKV, block_table: AnyArray) -> "LatentKeys":
        """The keys of the blocks in block_table."""
        return cls(
            pages=PagedKeys.of(cache, block_table),
            kv_c_scale=params.kv_c_scale,
            k_pe_scale=params.k_pe_scale,
            kv_lora_rank=spec.kv_lora_rank,
            wide=is_wide(spec, cache.spec),
        )

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def v_head_dim(self) -> int:
        return self.kv_lora_rank

    @property
    def chunk_tokens(self) -> int:
        return self.pages.chunk_tokens

    @property
    def max_chunks(self) -> int:
        return self.pages.max_chunks

    def in_chunks(self, tokens: int) -> "LatentKeys":
        return dataclasses.replace(self, pages=self.pages.in_chunks(tokens))

    def read(self, req: jax.Array, chunk: jax.Array) -> KVChunk:
        """Chunk number `chunk` of request `req`."""
        stored = self.pages.read(req, chunk)
        if self.wide:  # the value pool is never read
            row = _dequantised(stored.k, stored.k_scale, self.kv_c_scale)
            return KVChunk(k=row, v=row[..., : self.kv_lora_rank], k_scale=None, v_scale=None)
        kv_c = _dequantised(stored.v, stored.v_scale, self.kv_c_scale)
        k_pe = _dequantised(stored.k, stored.k_scale, self.k_pe_scale)
        return KVChunk(k=jnp.concatenate([kv_c, k_pe], axis=-1), v=kv_c, k_scale=None, v_scale=None)


def _dequantised(rows: jax.Array, token_scale: jax.Array | None, scale: jax.Array | float | None) -> jax.Array:
    """Decoded rows [P 1 S .] times their scales."""
    if token_scale is not None:
        rows = rows * token_scale[..., None]
    return rows if scale is None else rows * jnp.asarray(scale, jnp.float32).reshape(1, 1, 1, 1)


CONTEXT_TOKENS = 1024
"""Cached tokens materialised at a time. With 128 heads of 192 + 128 values in float32, 1024 tokens are 160 MiB."""


@pytree
class MLAMetadata:
    """The plan of a batch for latent attention."""

    level: Level
    slot_mapping: AnyArray  # i32[T]
    is_causal: bool = static()
    shared_prefix: int = static(default=0)  # first keys that all requests share, whole blocks

    @property
    def num_tokens(self) -> int:
        return self.level.batch.num_tokens

    @property
    def block_table(self) -> AnyArray:
        return self.level.block_table


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """The static part of a latent attention layer, with a method for each form."""

    spec: MLASpec
    path: Path
    combine: Callable[[AttentionState], AttentionState] | None = None  # merges the states of all ranks

    def forward_mqa(self, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams) -> AttentionState:
        """Absorbed: q [T H nope+rope] with the cached rows as keys. W_UK is multiplied into q, W_UV into the result.

        q.k = q_nope . (kv_c W_UK) + q_pe . k_pe = (q_nope W_UK^T) . kv_c + q_pe . k_pe
        """
        spec, params = self.spec, absorb(self.spec, params)
        level = m.level
        levels = (level,) if m.shared_prefix == 0 else shared_prefix(level, m.shared_prefix, cache.spec.block_size)
        state = attend_levels(
            spec.absorbed,
            self.path,
            m.is_causal,
            absorbed_queries(spec, level.batch.cleared(q), params),
            cache,
            levels,
            _attention_params(params),
            functools.partial(LatentKeys.of, spec, params),
            self.combine,
        )
        return projected_values(state, q.dtype, params)

    def forward_listed(
        self, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams, topk_indices: jax.Array
    ) -> AttentionState:
        """The absorbed form over the keys that each token lists: see jattn.ops.listed. Levels are not shared."""
        spec, params = self.spec, absorb(self.spec, params)
        layer = spec.absorbed if self.combine is None else dataclasses.replace(spec.absorbed, has_sinks=False)
        terms = layer_terms(layer, m.is_causal, _attention_params(params))
        q_absorbed = absorbed_queries(spec, m.level.batch.cleared(q), params)
        state = attend_listed(spec, terms, q_absorbed, cache, m.level, params, jnp.asarray(topk_indices))
        if self.combine is not None:
            state = self.combine(state)
            if spec.has_sinks:
                assert params.sinks is not None
                state = with_sinks(state, params.sinks)
        return projected_values(state, q.dtype, params)

    def prefill_mha(
        self,
        q: jax.Array,
        cache: PagedKV,
        m: MLAMetadata,
        params: MLAParams,
        kv_c: jax.Array | None = None,
        k_pe: jax.Array | None = None,
    ) -> AttentionState:
        """Materialised: keys and values are projected for some tokens at a time, and the states are merged.

        kv_c [T L], k_pe [T R]: the rows of the new tokens. If they are given, only earlier tokens are read from the
        cache, so a quantised cache does not round the new ones. None: all tokens are read from the cache.
        """
        if self.combine is not None:
            raise UnsupportedError("with keys on several ranks only the absorbed form is supported; use forward_mqa")
        return _prefill(self, q, cache, m, params, kv_c, k_pe)

    def merged_windows(
        self, q, cache: PagedKV, m: MLAMetadata, params: MLAParams, kv_c, k_pe, *, differentiable: bool
    ) -> AttentionState:
        """prefill_mha. differentiable: a loop whose length depends on the block table's width, and not on the batch."""
        spec, params = self.spec, absorb(self.spec, params)
        batch = m.level.batch
        read = batch.seq_lens if kv_c is None else jnp.maximum(batch.seq_lens - batch.query_lens, 0)
        read = jnp.where(batch.query_lens > 0, read, 0)
        state = self._context(q, cache, m, params, read, differentiable)
        if kv_c is not None:
            assert k_pe is not None
            own = dataclasses.replace(batch, seq_lens=batch.query_lens, kv_offset=batch.seq_lens - batch.query_lens)
            k, v = materialised(batch.cleared(kv_c), batch.cleared(k_pe), params)
            state = merge(state, self.attend_materialised(q, k, v, cache, m, own, params))
        if spec.has_sinks:
            assert params.sinks is not None
            state = with_sinks(state, params.sinks)
        return AttentionState(out=state.out.astype(output_dtype(q.dtype)), lse=state.lse)

    def forward(self, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams) -> AttentionState:
        """Computes each request by the form that is cheaper for its number of queries."""
        limit, level = self.spec.mha_threshold, m.level
        if level.max_query_len <= limit or m.shared_prefix or self.combine is not None:
            return self.forward_mqa(q, cache, m, params)
        params, long = absorb(self.spec, params), level.batch.query_lens > limit
        few = dataclasses.replace(m, level=_queries_of(level, ~long, limit))
        many = dataclasses.replace(m, level=_queries_of(level, long, level.max_query_len))
        return merge(self.forward_few(q, cache, few, params), self.prefill_mha(q, cache, many, params))

    def forward_few(self, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams) -> AttentionState:
        """The absorbed form for the requests with few queries, in a batch in which the others are materialised."""
        return self.forward_mqa(q, cache, m, params)

    def _context(
        self, q, cache: PagedKV, m: MLAMetadata, params: MLAParams, read: jax.Array, differentiable: bool
    ) -> AttentionState:
        """Attention over the first `read` i32[R] cached keys of each request.

        The tokens of all requests, packed, are divided into windows of CONTEXT_TOKENS.
        """
        spec, batch = self.spec, m.level.batch
        table = jnp.asarray(m.block_table)
        ends = jnp.cumsum(read, dtype=jnp.int32)
        starts, total = ends - read, ends[-1]
        size = min(CONTEXT_TOKENS, table.size * cache.spec.block_size)

        def attend(state, low):
            token = low + jnp.arange(size, dtype=jnp.int32)
            req = jnp.minimum(jnp.searchsorted(ends, token, side="right"), read.shape[0] - 1)
            slots = slots_of(table, req, token - starts[req], cache.spec.block_size)
            rows = gather_latent(spec, cache, jnp.where(token < total, slots, -1), params)
            first, last = jnp.clip(starts, low, low + size), jnp.clip(ends, low, low + size)
            here = dataclasses.replace(batch, seq_lens=last - first, kv_offset=batch.kv_offset + first - starts)
            k, v = materialised(*rows, params, _product_dtype(cache, params))
            return merge(state, self.attend_materialised(q, k, v, cache, m, here, params))

        nothing = AttentionState.empty(q.shape[0], spec.num_heads, spec.v_head_dim)
        if not differentiable:
            step = lambda carry: (attend(*carry), carry[1] + size)
            return jax.lax.while_loop(lambda carry: carry[1] < total, step, (nothing, jnp.int32(0)))[0]

        def attend_if_any(state, window):
            low = window * size
            return jax.lax.cond(low < total, attend, lambda state, low: state, state, low), None

        windows = jnp.arange(cdiv(table.size * cache.spec.block_size, size), dtype=jnp.int32)
        return jax.lax.scan(jax.checkpoint(attend_if_any), nothing, windows)[0]

    def attend_materialised(
        self, q, k, v, cache: PagedKV, m: MLAMetadata, batch: RaggedBatch, params: MLAParams
    ) -> AttentionState:
        """One part of a merge, in float32 and without sinks: q [T H nope+rope] over the keys k [n H nope+rope] and
        values v [n H V] of `batch`, packed by request."""
        call = AttentionCall(
            spec=dataclasses.replace(self.spec.materialised, has_sinks=False),
            is_causal=m.is_causal,
            max_query_len=m.level.max_query_len,
            path=self.path,
            out_dtype="float32",
        )
        return attend_packed(call, q, k, v, batch, _attention_params(params))


def with_gradient_of(plain: Callable, constants: int = 1) -> Callable:
    """Decorator of (latent, q, cache, m, params, ..): its gradient is that of plain(latent, ..), which runs again.

    constants: how many arguments, of any kind, come before q.
    """

    def decorated(function):
        call = jax.custom_vjp(function, nondiff_argnums=tuple(range(constants)))

        def backward(*args):
            *given, (q, cache, m, *others), cotangent = args
            compute = lambda q, cache, *others: plain(*given, q, cache, m, *others)
            dq, dcache, *dothers = jax.vjp(compute, q, cache, *others)[1](cotangent)
            return dq, dcache, None, *dothers

        call.defvjp(lambda *args: (call(*args), args[constants:]), backward)
        return call

    return decorated


def _plain_prefill(latent: LatentAttention, *args) -> AttentionState:
    return LatentAttention(latent.spec, latent.path).merged_windows(*args, differentiable=True)


@with_gradient_of(_plain_prefill)
def _prefill(latent: LatentAttention, *args) -> AttentionState:
    return latent.merged_windows(*args, differentiable=False)


def materialised(kv_c: jax.Array, k_pe: jax.Array, params: MLAParams, dtype: Any = None) -> tuple[jax.Array, jax.Array]:
    """k f32[n H nope+rope], v f32[n H V] of rows kv_c [n L], k_pe [n R], by w_uk and w_uv.

    dtype: that of the factors, None: `_factor_dtype`; the sums are float32.
    """
    factors = [jnp.asarray(x) for x in (kv_c, params.w_uk, params.w_uv)]
    dtype = _factor_dtype(*factors) if dtype is None else dtype
    kv_c, w_uk, w_uv = (x.astype(dtype) for x in factors)
    k_pe = _float(k_pe)
    nope = einsum("tl,hnl->thn", kv_c, w_uk)
    rope = jnp.broadcast_to(k_pe[:, None], (*nope.shape[:2], k_pe.shape[1]))
    return jnp.concatenate([nope, rope], axis=-1), einsum("tl,hlv->thv", kv_c, w_uv)


def _product_dtype(cache: PagedKV, params: MLAParams) -> Any:
    """That of the factors of `materialised`: bfloat16 if cached latents and weights are bfloat16, whose products are
    exact in float32; else float32."""
    is_plain = cache.spec.dtype == "bfloat16" and cache.v_token_scale is None and params.kv_c_scale is None
    weights = {jnp.asarray(w).dtype for w in (params.w_uk, params.w_uv)}
    return jnp.bfloat16 if is_plain and weights == {jnp.dtype(jnp.bfloat16)} else jnp.float32


def _factor_dtype(*factors: jax.Array) -> Any:
    """The dtype in which arrays are multiplied: their own if all have the same one of 16 bits, whose products are exact
    in float32; else float32. XLA:CPU multiplies 16 bits in batches on some CPUs only, so there it is float32."""
    dtypes = {x.dtype for x in factors}
    is_small = len(dtypes) == 1 and factors[0].dtype.itemsize == 2 and device.detect().platform != "cpu"
    return factors[0].dtype if is_small else jnp.float32


def absorbed_queries(spec: MLASpec, q: jax.Array, params: MLAParams) -> jax.Array:
    """f32[T H L+R] [q_nope W_UK^T | q_pe] of q [T H nope+rope]: queries of the cached rows."""
    nope, rope = jnp.split(q, [spec.qk_nope_head_dim], axis=-1)
    return jnp.concatenate([_per_head(nope, jnp.asarray(params.w_uk), "float32"), _float(rope)], axis=-1)


def projected_values(
    state: AttentionState, q_dtype, params: MLAParams, scale: jax.Array | float | None = None
) -> AttentionState:
    """The state whose out [T H L] is multiplied by W_UV and by a scale, in the output dtype of such queries."""
    dtype = output_dtype(q_dtype)
    out = _per_head(state.out, jnp.asarray(params.w_uv), dtype)
    out = out if scale is None else out * jnp.asarray(scale, jnp.float32).reshape(1, 1, 1)
    return AttentionState(out=out.astype(dtype), lse=state.lse)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _per_head(x: jax.Array, w: jax.Array, dtype: str) -> jax.Array:
    """f32[T H b]: x [T H a] times the matrix of each head, w [H a b]. dtype: to which the caller rounds the result.

    With bfloat16 matrices, rows of another dtype become pairs of bfloat16 rows: exact for float16; for float32 with an
    error of 2**-17, only where the result is rounded to 16 bits. Derivatives are those of float32 factors.
    """
    pairs = (jnp.float16,) if dtype == "float32" else (jnp.float16, jnp.float32)
    if x.dtype in pairs and _factor_dtype(w) == jnp.bfloat16:
        high, rest = jax.vmap(_heads_product, (0, None))(jnp.stack(_two_bfloat16(_float(x))), w)
        return high + rest
    factors = _factor_dtype(x, w)
    return _heads_product(x.astype(factors), w.astype(factors))


@_per_head.defjvp
def _per_head_jvp(dtype: str, primals, tangents):
    (x, w), (dx, dw) = (map(_float, pair) for pair in (primals, tangents))
    return _per_head(*primals, dtype), _heads_product(dx, w) + _heads_product(x, dw)


def _heads_product(x: jax.Array, w: jax.Array) -> jax.Array:
    """f32[T H b] by one batched product [H T b], as XLA computes it: then rows are transposed and not single numbers.
    On a CPU with 2 to 8 rows this is up to ten times as fast as a product in the order [T H b]."""
    return jnp.swapaxes(einsum("tha,hab->htb", x, w), 0, 1)


def _two_bfloat16(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(f32 x rounded, the rest rounded), as bfloat16. The rest of an infinity is 0. XLA:GPU leaves out a conversion to
    bfloat16 and back, without which the rest would be 0, but not reduce_precision."""
    high = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    rest = jnp.where(jnp.isinf(high), 0, x - high)
    return high.astype(jnp.bfloat16), rest.astype(jnp.bfloat16)


def _queries_of(level: Level, keep: jax.Array, max_query_len: int) -> Level:
    """The same batch, in which only the requests where keep bool[R] have queries."""
    batch = dataclasses.replace(level.batch, query_lens=jnp.where(keep, level.batch.query_lens, 0))
    return dataclasses.replace(level, batch=batch, max_query_len=max_query_len)


def _float(x) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)


def _attention_params(params: MLAParams) -> AttentionParams:
    """Without scales: they are applied where the rows are read."""
    return AttentionParams(alibi_slopes=params.alibi_slopes, sinks=params.sinks)
