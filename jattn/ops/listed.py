"""Latent attention in which each token names its keys: what an indexer chose, as in DeepSeek-V3.2's sparse attention.

topk_indices i32[T n] has positions of keys in the token's own request, as the indexer of vLLM writes them (vLLM's
kernels take pool slots, which it makes of these positions and the block table). An entry below 0 names no key. A named
position is a key if the token would see it without the list: one beyond the request's keys, the causal limit or the
window is not. The list is a set: neither its order nor a repeated entry changes a bit of the result.
"""

import jax
import jax.numpy as jnp

from jattn.cache.latent import gather_latent
from jattn.cache.layout import PagedKV
from jattn.mla_spec import MLAParams, MLASpec
from jattn.ops import layer
from jattn.ops.layer import LayerTerms, einsum
from jattn.ops.levels import Level
from jattn.ops.state import AttentionState
from pallas_kernels.algebra import softmax
from pallas_kernels.algebra.paging import slots_of

KEYS_AT_ONCE = 16384
"""Keys that are gathered at a time, of several tokens: 36 MiB in float32 for rows of 512 + 64 values."""


def attend_listed(
    spec: MLASpec,
    terms: LayerTerms,
    q: jax.Array,
    cache: PagedKV,
    level: Level,
    params: MLAParams,
    topk_indices: jax.Array,
) -> AttentionState:
    """Absorbed queries [T H L+R], 0 for padding, over the listed rows: out f32[T H L], lse f32[T H].

    (0, -inf) for a token without a key. The backward pass gathers the keys again.
    """
    batch, table = jax.tree.map(jnp.asarray, (level.batch, level.block_table))
    (num_tokens, num_heads, _), width = q.shape, topk_indices.shape[1]
    if num_tokens * width == 0:
        return AttentionState.empty(num_tokens, num_heads, spec.kv_lora_rank)
    req, live = batch.req_of_token()
    listed = jnp.sort(topk_indices, axis=1)
    is_repeated = jnp.pad(listed[:, 1:] == listed[:, :-1], ((0, 0), (1, 0)))

    def attend(x):
        q, req, row, position, wanted = x
        run = batch.keys_of(req)
        index = run.index_of(position)
        inside = wanted & (run.positions(index) == position) & (index < run.length)
        row = jax.tree.map(lambda value: value[None], row)
        seen = layer.visible(terms, row, position, inside)  # [K 1 G n], or 1 in place of K and G
        slots = slots_of(table, req, index, cache.spec.block_size)
        kv_c, k_pe = gather_latent(spec, cache, jnp.where(jnp.any(seen, axis=(0, 1, 2)), slots, -1), params)
        dots = einsum("hd,nd->hn", q, jnp.concatenate([kv_c, k_pe], axis=-1))[None, None]
        logits = jnp.where(seen, layer.logits(terms, dots, row, position), softmax.NEG_INF)
        m = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.exp(logits - softmax.finite_max(m))
        total = jnp.sum(weights, axis=-1, keepdims=True)
        out, lse = layer.finish(terms, m, total, einsum("kmgn,nl->kmgl", weights, kv_c))
        return out[0], lse[0]

    inputs = (q, req, batch.rows, listed, live[:, None] & ~is_repeated)
    out, lse = jax.lax.map(jax.checkpoint(attend), inputs, batch_size=max(KEYS_AT_ONCE // width, 1))
    return AttentionState(out=out, lse=lse)
