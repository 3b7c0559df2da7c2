"""Absorbed latent attention for TPU: the kernel of paged_attention.py over cached rows [latent | rope].

All heads share a row, whose first L elements are also the values, so a page is read once for keys and values:

    out = softmax(q [latent | rope]^T) latent
"""

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.checks import check_seen
from pallas_kernels.tpu.config import TpuKernelConfig
from pallas_kernels.tpu.paged_attention import launch, logit_and_output_scales, row_columns
from pallas_kernels.tpu.supports import supports, supports_batch
from pallas_kernels.tpu.work_list import TpuWorkList


def ragged_latent_attention(
    q: jax.Array,
    pools: tuple[jax.Array, ...],
    block_table: jax.Array,
    work: TpuWorkList,
    config: TpuKernelConfig,
    *,
    alibi_slopes=None,
    sinks=None,
    latent_scale=None,
    chip: str = "",
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """(out [T, H, L] in config.out_dtype, lse f32[T, H], natural log) of absorbed queries q [T, H, L + R].

    pools, in this order: ropes [N, S, R] and latents [N, S, L] if config.latent is "split", rows [N, S, L + R] if it is
    "whole". The scales of the stored values must be multiplied into q; latent_scale f32 is multiplied into out. The
    other arguments: see ragged_paged_attention.
    """
    c, by_name = config, dict(slope=alibi_slopes, sink=sinks)
    reqs, columns = block_table.shape
    if reasons := supports(c, chip=chip) + supports_batch(q.shape[0], reqs, columns, c):
        raise NotImplementedError("; ".join(reasons))
    blocks = pools[0].shape[0]
    check_seen(
        ("q", q.shape[1:], (c.num_heads, c.head_dim)),
        ("pools", tuple(pool.shape for pool in pools), tuple((blocks, c.page_size, dim) for dim in c.pool_dims)),
        ("q dtype", q.dtype.name, c.dtype),
        *(("pool dtype", pool.dtype.name, c.kv_dtype) for pool in pools),
        ("block_table dtype", block_table.dtype.name, "int32"),
        ("tokens of the work list", work.row.shape[0], q.shape[0]),
        ("alibi_slopes given", alibi_slopes is not None, c.logits.has_alibi),
        ("sinks given", sinks is not None, c.has_sinks),
    )  # fmt: skip
    one_head = tuple(jnp.expand_dims(pool, 1) for pool in pools)
    scales, by_row = logit_and_output_scales(c, None, None, latent_scale), row_columns(c, by_name)
    return launch(c, q, one_head, block_table, work, scales, by_row, interpret=interpret)
