"""The door of GPU paged attention: checks, the work list, the launch, the merge."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.checks import check_arrays
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.merge_sm90 import join_parts
from pallas_kernels.gpu.pieces_sm90 import Config
from pallas_kernels.gpu.ragged_attention_sm90 import attend
from pallas_kernels.gpu.supports import CAP_FOURTHS, FIXED_MAX, default_tiles, supports

__all__ = ["Config", "build_work_list", "default_config", "make_config", "ragged_paged_attention", "supports"]


def default_config(*, rows: int | None = None, **fields) -> Config:
    """Config's fields, and for those not given what serves best; not checked (see supports).

    rows: bound on the packed rows of every request, when it is known: few rows have tiles of their own.
    """
    shape = {name: fields[name] for name in ("head_dim", "v_head_dim", "kv_dtype", "page_size")}
    tiles = default_tiles(**shape, rows=rows, token_scales=fields.get("token_scales", False))
    config = Config(**(tiles | fields))
    if FIXED_MAX and config.can_fix_max and "fixed_max" not in fields:
        return dataclasses.replace(config, fixed_max=True, cap_fourths=fields.get("cap_fourths", CAP_FOURTHS))
    return config


def make_config(**fields) -> Config:
    """default_config, or NotImplementedError with every reason if it cannot be done."""
    config = default_config(**fields)
    if reasons := supports(config):
        raise NotImplementedError("; ".join(reasons))
    return config


def build_work_list(query_start_loc, seq_lens, num_tokens: int, config: Config, causal=None) -> wl.WorkList:
    """Once a step, shared by all layers: lengths i32[R+1], i32[R] -> WorkList. Pure, traceable, no host sync.

    causal bool[R] is wanted exactly when config.per_request_causal.
    """
    if (causal is not None) != config.per_request_causal:
        raise ValueError(f"{config.per_request_causal=} but causal {'was' if causal is not None else 'was not'} given")
    return wl.build(query_start_loc, seq_lens, num_tokens, config.list_config, causal)


def ragged_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    work: wl.WorkList,
    config: Config,
    *,
    alibi_slopes=None,
    sinks=None,
    q_scale=None,
    k_scale=None,
    v_scale=None,
    k_token_scale=None,
    v_token_scale=None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(q k^T) v over pages: (out [T, H, V] in q's dtype, lse f32[T, H], natural log).

    q [T, H, D]; pools in their own dtype, HND [N, K, S, D] or NHD [N, S, K, D]; block_table i32[R, B], whose
    unused columns may hold anything. alibi_slopes, sinks f32[H]; q_scale f32 or f32[H], k_scale, v_scale f32 or
    f32[K]: real = stored * scale, times its own of k_token_scale, v_token_scale f32 [N, K, S] or [N, S, K] as the pools
    are. All are traced. A row that sees nothing is (0, -inf); padding tokens too.
    """
    _check(q, k_pages, v_pages, block_table, config, alibi_slopes, sinks, (k_token_scale, v_token_scale))
    heads, kv_heads = config.num_heads, config.num_kv_heads
    per_head = jnp.stack([_spread(alibi_slopes, heads, 0.0), _spread(sinks, heads, 0.0)], axis=1)
    scales = [_spread(k_scale, kv_heads, 1.0) * config.logits.scale, _spread(v_scale, kv_heads, 1.0)]
    if q_scale is not None and jnp.ndim(q_scale) == 0:
        scales[0] = scales[0] * q_scale
    elif q_scale is not None:
        q = (q.astype(jnp.float32) * q_scale[None, :, None]).astype(q.dtype)
    scales = jnp.stack(scales, axis=1)
    tokens = (k_token_scale, v_token_scale) if config.token_scales else ()
    out, lse, part, part_lse = attend(config, q, k_pages, v_pages, block_table, work, scales, per_head, tokens)
    return join_parts(config, out, lse, part, part_lse, work, per_head)


def _spread(value, size: int, default: float) -> jax.Array:
    value = jnp.asarray(default if value is None else value, jnp.float32)
    return jnp.broadcast_to(value, (size,))


def _check(q, k_pages, v_pages, block_table, config: Config, alibi_slopes, sinks, token_scales):
    if reasons := supports(config):
        raise NotImplementedError("; ".join(reasons))
    c = config
    order = (c.num_kv_heads, c.page_size) if c.layout == "HND" else (c.page_size, c.num_kv_heads)
    more = (
        ("alibi_slopes given", alibi_slopes is not None, c.logits.has_alibi),
        ("sinks given", sinks is not None, c.has_sinks),
        *(
            (f"{name}_token_scale", None if x is None else x.shape, k_pages.shape[:-1] if c.token_scales else None)
            for name, x in zip("kv", token_scales, strict=True)
        ),
    )
    check_arrays(c, q, k_pages, v_pages, block_table, order, more)
