"""The door of TPU paged attention: checks, packing, the launch, unpacking."""

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.checks import check_arrays
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.tpu import work_list
from pallas_kernels.tpu.config import Config
from pallas_kernels.tpu.ragged_attention import attend
from pallas_kernels.tpu.supports import default_config, supports, supports_batch
from pallas_kernels.tpu.work_list import Plan, build

__all__ = ["Config", "Plan", "build", "default_config", "ragged_paged_attention", "supports", "supports_batch"]

NEG_INF = float("-inf")


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    plan: Plan,
    config: Config,
    *,
    alibi_slopes=None,
    sinks=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    chip: str = "",
    interpret=False,
) -> tuple[jax.Array, jax.Array]:
    """softmax(q k^T) v over pages: (out [T, H, V] in q's dtype, lse f32[T, H], natural log).

    q [T, H, D]; pools [N, K, S, D] and [N, K, S, V] in their own dtype; block_table i32[R, B], whose unused columns
    may hold anything. alibi_slopes, sinks f32[H]; q_scale f32 or f32[H], k_scale, v_scale f32 or f32[K]: real =
    stored * scale. All are traced. A row that sees nothing is (0, -inf); padding tokens too. chip: whose limits hold.
    interpret: False, or pltpu.InterpretParams.
    """
    by_name = dict(q_scale=q_scale, slope=alibi_slopes, sink=sinks)
    _check(q, k_pages, v_pages, block_table, plan, config, by_name, chip)
    packed = work_list.pack(q, plan, config)
    out, lse = attend(
        config, packed, k_pages, v_pages, block_table, plan, _scales(config, q_scale, k_scale, v_scale),
        _columns(config, by_name), interpret=interpret,
    )  # fmt: skip
    by_head = jnp.moveaxis(lse[..., : config.num_kv_heads], -1, 0)[..., None]  # [K packs 16 1]
    return (
        work_list.unpack(out, plan, config, 0.0),
        work_list.unpack(by_head, plan, config, NEG_INF)[..., 0],
    )


def _scales(c: Config, q_scale, k_scale, v_scale) -> jax.Array:
    """f32[2 K]: the factor of a kv head's logits, then of its output."""
    spread = lambda x: jnp.broadcast_to(jnp.asarray(1.0 if x is None else x, jnp.float32), (c.num_kv_heads,))
    logit = spread(k_scale) * c.logits.scale
    if q_scale is not None and not c.per_head_q_scale:
        logit = logit * q_scale
    return jnp.concatenate([logit, spread(v_scale)])


def _columns(c: Config, by_name) -> jax.Array | None:
    """f32[K rows C]: the numbers of each row's query head, in the order of Config.columns."""
    if not c.columns:
        return None
    table = jnp.stack([jnp.asarray(by_name[name], jnp.float32) for name in c.columns], axis=-1)
    by_group = table.reshape(c.num_kv_heads, c.group, len(c.columns))
    return jnp.tile(by_group, (1, cdiv(c.rows, c.group), 1))[:, : c.rows]


def _check(q, k_pages, v_pages, block_table, plan: Plan, config: Config, by_name, chip: str):
    c = config
    tokens, (reqs, columns) = q.shape[0], block_table.shape
    if reasons := supports(c, chip=chip) + supports_batch(tokens, reqs, columns, c):
        raise NotImplementedError("; ".join(reasons))
    more = (
        ("plan's tokens", plan.row.shape[0], tokens),
        ("alibi_slopes given", by_name["slope"] is not None, c.logits.has_alibi),
        ("sinks given", by_name["sink"] is not None, c.has_sinks),
        ("q_scale a head", jnp.ndim(by_name["q_scale"]) == 1 if by_name["q_scale"] is not None else False,
         c.per_head_q_scale),
    )  # fmt: skip
    check_arrays(c, q, k_pages, v_pages, block_table, (c.num_kv_heads, c.page_size), more)
