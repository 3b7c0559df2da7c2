"""Long prompts over a latent cache on Hopper: keys and values are projected, then the paged kernel attends to them.

The plan (mla_gpu_prompts.py) divides the tokens into parts: the new ones, and windows of earlier ones. Each part's rows
are projected into pages of their own, one launch attends to them, and the states are merged.

A product's output is a pool as the kernel reads it, [tokens, heads, head_dim]: nothing is transposed. The rotated part
of a key is a part of the same product, by an identity beside the weights. Keys and values of a long window exceed L2,
so the kernel takes as many heads at a time as have a tile for each CTA: then they are read from memory once.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jattn.backends.mla_gpu_prompts import PAGE, Pages, PromptPart, PromptPlan, Windows, projection_config, prompt_plan
from jattn.cache import PagedKV
from jattn.cache.latent import gather_latent
from jattn.mla_spec import MLAParams, MLASpec, absorb
from jattn.ops.mla import LatentAttention, MLAMetadata, with_gradient_of
from jattn.ops.state import AttentionState, merge
from pallas_kernels.algebra.paging import slots_of
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.supports import supports

JOINED = True  # the rotated part of a key is a part of the product; False: concatenated


def prefill_reasons(spec: MLASpec, dtype: str) -> list[str]:
    """Every reason why the paged kernel cannot attend to this layer's projected keys."""
    return supports(projection_config(spec, dtype, PAGE))


def _plain_prefill(latent: LatentAttention, q, cache: PagedKV, m: MLAMetadata, params: MLAParams, rows=None, plan=None):
    return latent.prefill_mha(q, cache, m, params, *(rows or ()))


@with_gradient_of(_plain_prefill)
def projected_prefill(
    latent: LatentAttention, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams, new_rows=None,
    plan: PromptPlan | None = None,
) -> AttentionState:  # fmt: skip
    """The materialised form for the requests of m that have queries; the rows of other tokens may hold anything.

    new_rows: (kv_c [T L], k_pe [T R]), or None to read the cache. plan: that of m; it is made here if there is none, or
    if it is for another dtype of q. The state of the new tokens is rounded to q's dtype before that of earlier ones is
    merged into it.
    """
    spec, batch = latent.spec, m.level.batch
    if plan is None or not plan.is_for(q.dtype.name):
        plan = prompt_plan(spec, q.dtype.name, m, cache.spec.block_size)
    params, table = absorb(spec, params), jnp.asarray(m.block_table)
    weights = _weights(spec, params, q.dtype)

    def attend(part: PromptPart, rows) -> AttentionState:
        pages = part.pages
        x = jnp.where(pages.live.reshape(-1, 1), jnp.concatenate(rows, axis=-1), 0).astype(q.dtype)
        k, v = (pool.reshape(-1, pages.size, *pool.shape[1:]) for pool in _project(spec, x, weights))
        out, lse = ragged_paged_attention(q, k, v, pages.table, part.work, part.config)
        return AttentionState(out=out, lse=lse)

    def cached(pages: Pages, shift: jax.Array | None = None):
        """The rows of these pages' tokens. shift: i32[R] to add to the position of each request's tokens."""
        request = jnp.broadcast_to(pages.request[:, None], pages.position.shape).reshape(-1)
        token = pages.position.reshape(-1) + (0 if shift is None else shift[request])
        slots = jnp.where(pages.live.reshape(-1), slots_of(table, request, token, cache.spec.block_size), -1)
        slots = lax.optimization_barrier(slots)  # else XLA:GPU finds a row's slot again for each of its columns
        return gather_latent(spec, cache, slots, params)

    pages = plan.new.pages
    if new_rows is None:
        rows = cached(pages, plan.earlier)
    else:
        token = pages.position + batch.start[pages.request][:, None]
        rows = [jnp.asarray(x).at[token.reshape(-1)].get(mode="clip") for x in new_rows]
    first = attend(plan.new, rows)

    def with_windows(windows: Windows, state: AttentionState) -> AttentionState:
        def step(i, state):
            return merge(state, attend(part := windows.part(i), cached(part.pages)))

        return lax.fori_loop(0, windows.count, step, state)

    def with_earlier(state: AttentionState) -> AttentionState:
        state = dataclasses.replace(state, out=state.out.astype(jnp.float32))
        for windows in plan.windows:
            state = with_windows(windows, state)
        return dataclasses.replace(state, out=state.out.astype(q.dtype))

    return lax.cond(sum(windows.count for windows in plan.windows) > 0, with_earlier, lambda state: state, first)


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
