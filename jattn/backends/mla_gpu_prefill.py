"""Long prompts over a latent cache on Hopper: keys and values are projected, then the paged kernel attends to them.

    new tokens          their rows are projected into pages of their own; causal; one launch
    earlier tokens      windows of two sizes, each projected into pages of PAGE and attended to by all queries of
                        their requests; the states are merged. How many depends on the batch, inside jit

A product's output is a pool as the kernel reads it, [tokens, heads, head_dim]: nothing is transposed. The rotated part
of a key is a part of the same product, by an identity beside the weights. Keys and values of a long window exceed L2,
so the kernel takes as many heads at a time as have a tile for each CTA: then they are read from memory once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jattn import device
from jattn.backends.gpu_kernel import fields_for_equal_registers
from jattn.cache import PagedKV
from jattn.cache.latent import gather_latent
from jattn.mla_spec import MLAParams, MLASpec, absorb
from jattn.ops.mla import LatentAttention, MLAMetadata, with_gradient_of
from jattn.ops.state import AttentionState, merge
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import cdiv, slots_of
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.supports import supports
from pallas_kernels.gpu.tile_policy import default_config
from pallas_kernels.gpu.work_columns import TILE_ROWS
from pallas_kernels.gpu.work_list import build_work_list

PAGE = 128  # tokens of a page of earlier tokens
NEW_PAGES = (128, 64, 32, 16)  # tokens of a page of new tokens: the largest of which padding is at most a quarter
WINDOW_BYTES = 5 << 28  # of projected keys and values: 16384 tokens with 128 heads of 192 and 128
LARGE_WINDOW, SMALL_WINDOW = 128, 32  # pages; a window is projected whole, whatever it holds
JOINED = True  # the rotated part of a key is a part of the product; False: concatenated


@dataclasses.dataclass(frozen=True)
class Pages:
    """Rows in pages: page p belongs to one request, whose tokens fill it from its first place on."""

    request: jax.Array  # i32[P]
    position: jax.Array  # i32[P, S] of each place in its request's tokens
    live: jax.Array  # bool[P, S]: is there a token?
    table: jax.Array  # i32[R, W] pages of each request
    lens: jax.Array  # i32[R] tokens of each request in these pages


def pages_of(counts: jax.Array, low, num_pages: int, page: int, most: int) -> Pages:
    """Pages low .. low + num_pages - 1 of all requests end to end, each of `counts` i32[R] tokens from a new page on.

    most: static bound of a request's tokens.
    """
    pages = cdiv(counts, page)
    ends = jnp.cumsum(pages, dtype=jnp.int32)
    starts = ends - pages
    number = low + jnp.arange(num_pages, dtype=jnp.int32)
    request = jnp.minimum(jnp.sum(ends[None, :] <= number[:, None], axis=1, dtype=jnp.int32), counts.shape[0] - 1)
    position = (number - starts[request])[:, None] * page + jnp.arange(page, dtype=jnp.int32)[None]
    first, last = (jnp.clip(x, low, low + num_pages) for x in (starts, ends))
    lens = jnp.clip(counts - (first - starts) * page, 0, (last - first) * page)
    width = min(num_pages, cdiv(most, page))
    table = jnp.minimum((first - low)[:, None] + jnp.arange(width, dtype=jnp.int32)[None], num_pages - 1)
    return Pages(request, position, (position >= 0) & (position < counts[request][:, None]), table, lens)


def projection_config(
    spec: MLASpec, dtype: str, page: int, rows: int | None = None, causal: bool = True, per_request: bool = False,
    out_dtype: str | None = None, num_tokens: int = 0,
) -> GpuKernelConfig:  # fmt: skip
    """The paged kernel's config over projected keys and values. num_tokens: of the batch, to choose heads_together."""
    heads = spec.num_heads
    most = max(GpuKernelConfig.num_ctas // max(cdiv(num_tokens, TILE_ROWS), 1), 1)
    together = next(n for n in range(min(most, heads), 0, -1) if heads % n == 0)
    return default_config(
        rows=rows, num_heads=heads, num_kv_heads=heads, head_dim=spec.qk_head_dim, v_head_dim=spec.v_head_dim,
        page_size=page, layout="NHD", dtype=dtype, kv_dtype=dtype, out_dtype=out_dtype, mask=MaskRule(causal=causal),
        logits=spec.materialised.logit_rule(), per_request_causal=per_request, heads_together=together,
        **fields_for_equal_registers(device.detect()),
    )  # fmt: skip


def prefill_reasons(spec: MLASpec, dtype: str) -> list[str]:
    """Every reason why the paged kernel cannot attend to this layer's projected keys."""
    return supports(projection_config(spec, dtype, PAGE))


def _plain_prefill(latent: LatentAttention, q, cache: PagedKV, m: MLAMetadata, params: MLAParams, new_rows=None):
    return latent.prefill_mha(q, cache, m, params, *(new_rows or ()))


@with_gradient_of(_plain_prefill)
def projected_prefill(
    latent: LatentAttention, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams, new_rows=None
) -> AttentionState:
    """The materialised form for the requests of m that have queries; the rows of other tokens may hold anything.

    new_rows: (kv_c [T L], k_pe [T R]), or None to read the cache. The state of the new tokens is rounded to q's dtype
    before that of earlier ones is merged into it.
    """
    spec, batch, dtype = latent.spec, m.level.batch, q.dtype.name
    params, lens = absorb(spec, params), batch.query_lens
    before = jnp.where(lens > 0, jnp.maximum(batch.seq_lens - lens, 0), 0)
    own = jnp.where(lens > 0, batch.seq_lens - before, 0)
    weights = _weights(spec, params, q.dtype)
    starts = jnp.append(batch.start, jnp.max(batch.start + lens))
    most = m.level.max_query_len
    table = jnp.asarray(m.block_table)

    def attend(pages: Pages, rows, causal, config: GpuKernelConfig):
        page = config.page_size
        work = build_work_list(starts, pages.lens, q.shape[0], config, causal, query_lens=lens)
        x = jnp.where(pages.live.reshape(-1, 1), jnp.concatenate(rows, axis=-1), 0).astype(q.dtype)
        k, v = (pool.reshape(-1, page, *pool.shape[1:]) for pool in _project(spec, x, weights))
        out, lse = ragged_paged_attention(q, k, v, pages.table, work, config)
        return AttentionState(out=out, lse=lse)

    def cached(pages: Pages, shift):
        request = jnp.broadcast_to(pages.request[:, None], pages.position.shape).reshape(-1)
        token = jnp.maximum(pages.position.reshape(-1) + shift[request], 0)
        slots = slots_of(table, request, token, cache.spec.block_size)
        return gather_latent(spec, cache, jnp.where(pages.live.reshape(-1), slots, -1), params)

    page = next((n for n in NEW_PAGES if n * lens.shape[0] * 4 <= q.shape[0]), NEW_PAGES[-1])
    pages = pages_of(own, 0, q.shape[0] // page + lens.shape[0], page, most)
    if new_rows is None:
        rows = cached(pages, before)
    else:
        token = pages.position + batch.start[pages.request][:, None]
        rows = [jnp.asarray(x).at[token.reshape(-1)].get(mode="clip") for x in new_rows]
    causal = None if batch.rows.causal is None else batch.rows.causal[jnp.minimum(batch.start, q.shape[0] - 1)]
    kind: dict[str, Any] = dict(rows=most, num_tokens=q.shape[0])
    config = projection_config(spec, dtype, page, causal=m.is_causal, per_request=causal is not None, **kind)
    first = attend(pages, rows, causal, config)

    total = jnp.sum(cdiv(before, PAGE))
    longest = table.shape[1] * cache.spec.block_size
    capacity = lens.shape[0] * cdiv(longest, PAGE)
    width = PAGE * spec.num_heads * (spec.qk_head_dim + spec.v_head_dim) * q.dtype.itemsize
    large = max(min(WINDOW_BYTES // width, LARGE_WINDOW, capacity), 1)
    small = min(SMALL_WINDOW, large)
    config = projection_config(spec, dtype, PAGE, causal=False, out_dtype="float32", **kind)

    def with_windows(size: int, low, end, state: AttentionState):
        """(the page after the last window, the state after windows of `size` pages from `low` until `end`)."""

        def step(carry):
            low, state = carry
            pages = pages_of(before, low, size, PAGE, longest)
            return low + size, merge(state, attend(pages, cached(pages, jnp.zeros_like(before)), None, config))

        return lax.while_loop(lambda carry: carry[0] < end, step, (low, state))

    def with_earlier(state: AttentionState) -> AttentionState:
        """Large windows, until what is left takes at most half of one: that is left to small ones."""
        begin, state = jnp.int32(0), dataclasses.replace(state, out=state.out.astype(jnp.float32))
        if small < large:
            begin, state = with_windows(large, begin, total - large // 2, state)
        _, state = with_windows(small, begin, total, state)
        return dataclasses.replace(state, out=state.out.astype(q.dtype))

    return lax.cond(total > 0, with_earlier, lambda state: state, first)


def _weights(spec: MLASpec, params: MLAParams, dtype) -> tuple[jax.Array, jax.Array]:
    """(of keys [H, nope+R, L+R], of values [H, V, L])."""
    w_uk, w_uv = (jnp.asarray(w).astype(dtype) for w in (params.w_uk, params.w_uv))
    w_uv = jnp.swapaxes(w_uv, 1, 2)
    if not JOINED:
        return w_uk, w_uv
    rope = spec.qk_rope_head_dim
    unit = jnp.pad(jnp.eye(rope, dtype=dtype), ((0, 0), (spec.kv_lora_rank, 0)))
    unit = jnp.broadcast_to(unit[None], (spec.num_heads, *unit.shape))
    return jnp.concatenate([jnp.pad(w_uk, ((0, 0), (0, 0), (0, rope))), unit], axis=1), w_uv


def _project(spec: MLASpec, rows: jax.Array, weights) -> tuple[jax.Array, jax.Array]:
    """Keys [n, H, nope+R] and values [n, H, V] of rows [n, L+R]."""
    of_keys, of_values = weights
    latents, ropes = rows[:, : spec.kv_lora_rank], rows[:, spec.kv_lora_rank :]

    def times(x, w):
        return lax.dot_general(x, w, (((1,), (2,)), ((), ())), preferred_element_type=x.dtype)

    values = times(latents, of_values)
    if JOINED:
        return times(rows, of_keys), values
    ropes = jnp.broadcast_to(ropes[:, None], (rows.shape[0], spec.num_heads, ropes.shape[1]))
    return jnp.concatenate([times(latents, of_keys), ropes], axis=-1), values
