"""The door of GPU paged attention: checks, the work list, the launch, the merge."""

import jax.numpy as jnp

from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.merge_sm90 import join_parts
from pallas_kernels.gpu.ragged_attention_sm90 import Config, attend


def build_work_list(query_start_loc, seq_lens, num_tokens: int, config: Config, causal=None) -> wl.WorkList:
    """Once a step, shared by all layers: lengths i32[R+1], i32[R] -> WorkList. Pure, traceable."""
    return wl.build(query_start_loc, seq_lens, num_tokens, config.list_config, causal)


def ragged_paged_attention(
    q,
    k_pages,
    v_pages,
    block_table,
    work: wl.WorkList,
    config: Config,
    *,
    alibi_slopes=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
):
    """softmax(q k^T) v over pages: (out [T, H, V] in q's dtype, lse f32[T, H], natural log)."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    zero, one = jnp.zeros((heads,), jnp.float32), jnp.ones((kv_heads,), jnp.float32)
    columns = [zero if alibi_slopes is None else alibi_slopes, zero if sinks is None else sinks]
    per_head = jnp.stack([jnp.asarray(c, jnp.float32) for c in columns], axis=1)
    k_scale = one if k_scale is None else jnp.broadcast_to(jnp.asarray(k_scale, jnp.float32), (kv_heads,))
    v_scale = one if v_scale is None else jnp.broadcast_to(jnp.asarray(v_scale, jnp.float32), (kv_heads,))
    scales = jnp.stack([k_scale * config.logits.scale, v_scale], axis=1)
    out, lse, part, part_lse = attend(config, q, k_pages, v_pages, block_table, work, scales, per_head)
    return join_parts(config, out, lse, part, part_lse, work, per_head)
