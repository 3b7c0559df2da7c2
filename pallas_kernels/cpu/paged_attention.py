"""Paged attention in portable Pallas: the readable specification of every paged kernel in this tree.

    grid (K, tiles)                       one program: the G query heads of one kv head, `rows` queries of one request
      for page in key_range // S:         bounds known at run time; block_table gives the page
        dots -> logits -> mask -> online softmax

It runs in the interpreter on every platform; its purpose is to be read and to be compared with the fast kernels. A
program writes its own output block only, so the grid may run in any order, and reads only pages that its queries see.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.algebra import mask, quant, softmax
from pallas_kernels.algebra.logits import LogitRule, shape_logits
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.cpu import tiles as tiling
from pallas_kernels.cpu.closure import ConvertedClosure, convert_closure
from pallas_kernels.cpu.tiles import QueryTiles

LAYOUTS = ("NHD", "HND")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """The static arguments of the kernel; hashable."""

    mask: MaskRule
    logits: LogitRule
    kv_dtype: str  # dtype of the stored numbers; the pool may hold them as unsigned integers of the same size
    out_dtype: str
    layout: str = "HND"

    def __post_init__(self):
        choices = (("kv_dtype", (*quant.FLOATS, *quant.QUANTISED)), ("out_dtype", quant.FLOATS), ("layout", LAYOUTS))
        for name, values in choices:
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(values)}")


class PagePool(NamedTuple):
    """The paged cache: [N K S *] for layout HND, [N S K *] for NHD."""

    k: jax.Array  # [N K S D]
    v: jax.Array  # [N K S V]
    k_token_scale: jax.Array | None = None  # f32[N K S]
    v_token_scale: jax.Array | None = None


class PagedBatch(NamedTuple):
    """The requests. Query i of request r is at position num_computed_tokens[r] + i, key j at position j."""

    query_lens: jax.Array  # i32[R]
    seq_lens: jax.Array  # i32[R] number of keys
    num_computed_tokens: jax.Array  # i32[R]
    block_table: jax.Array  # i32[R B]
    causal: jax.Array | None = None  # bool[R]; replaces the causal flag of the mask rule


class KernelParams(NamedTuple):
    """A layer's traced parameters; real value = stored value * scale. None: no scale, no slope, no sink."""

    q_scale: jax.Array | None = None  # f32[] or [H]
    k_scale: jax.Array | None = None  # f32[] or [K]
    v_scale: jax.Array | None = None
    alibi_slopes: jax.Array | None = None  # f32[H]
    sinks: jax.Array | None = None  # f32[H]


NO_PARAMS = KernelParams()


class _ProgramRows(NamedTuple):
    """The M rows of a program, m = query * G + (query head within the group), and the keys that they see."""

    head: jax.Array  # i32[M 1]
    position: jax.Array  # i32[M 1]
    causal: jax.Array | None  # bool[]
    key_begin: jax.Array  # i32[] keys key_begin .. key_end - 1 are seen by at least one live row
    key_end: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def paged_attention(
    q: jax.Array,
    pool: PagePool,
    batch: PagedBatch,
    tiles: QueryTiles,
    params: KernelParams = NO_PARAMS,
    *,
    config: KernelConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """q [T H D] -> (out [T H V], lse f32[T H], natural log). A token of no request or without a visible key: (0, -inf).

    `tiles` is `tiles.make_tiles(query_start_loc, T, rows)`, computed once a step for all layers.
    """
    num_kv_heads, block_size = _pool_sizes(pool, config)
    check_static(q, pool, batch, params, num_kv_heads)
    num_tokens, num_heads, _ = q.shape
    count, rows = tiles.token.shape
    m = rows * num_heads // num_kv_heads
    if count == 0:
        empty = jnp.zeros((num_tokens, num_heads, pool.v.shape[-1]), config.out_dtype)
        return empty, jnp.full(empty.shape[:2], -jnp.inf, jnp.float32)
    index = (jax.ShapeDtypeStruct((m, 1), jnp.int32),) * 2 + (jax.ShapeDtypeStruct((1, block_size), jnp.int32),)
    closures = (
        convert_closure(config.mask.mask_fn, *index),
        convert_closure(config.logits.score_fn, jax.ShapeDtypeStruct((m, block_size), jnp.float32), *index),
    )
    tiled = tiling.gather(q, tiles, num_kv_heads)
    inputs = (
        tiles.req,
        tiles.first_row,
        batch,
        tuple(() if fn is None else fn.consts for fn in closures),
        tiled,
        _params_per_row(params, num_heads, num_kv_heads, rows),
        pool,
    )
    whole = lambda tree: jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), tree)
    of_tile = lambda dim: pl.BlockSpec((1, 1, m, dim), lambda head, tile: (head, tile, 0, 0))
    of_head = jax.tree.map(lambda x: pl.BlockSpec((1, *x.shape[1:]), lambda head, tile: (head, 0, 0)), inputs[5])
    shape = lambda dim, dtype: jax.ShapeDtypeStruct((*tiled.shape[:3], dim), dtype)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, config=config, closures=closures, group_size=num_heads // num_kv_heads),
        grid=(num_kv_heads, count),
        in_specs=[*map(whole, inputs[:4]), of_tile(q.shape[-1]), of_head, whole(pool)],
        out_specs=[of_tile(pool.v.shape[-1]), of_tile(1)],
        out_shape=[shape(pool.v.shape[-1], config.out_dtype), shape(1, jnp.float32)],
        interpret=interpret,
        name="paged_attention",
    )(*inputs)
    return (
        tiling.scatter(out, tiles, num_tokens, 0.0),
        tiling.scatter(lse, tiles, num_tokens, -jnp.inf)[..., 0],
    )


def check_static(q, pool: PagePool, batch: PagedBatch, params: KernelParams, num_kv_heads: int) -> None:
    """Raise ValueError if shapes do not fit together."""
    num_heads, num_reqs = q.shape[1] if q.ndim == 3 else 0, batch.seq_lens.shape[0]
    if q.ndim != 3 or q.shape[2] != pool.k.shape[-1] or num_heads % num_kv_heads:
        raise ValueError(f"{q.shape=} must be [T, a multiple of {num_kv_heads=}, {pool.k.shape[-1]}]")
    wanted = dict(query_lens=(num_reqs,), num_computed_tokens=(num_reqs,), causal=(num_reqs,))
    seen = [(name, getattr(batch, name), (shape,)) for name, shape in wanted.items()]
    seen += [("v", pool.v[..., 0], (pool.k.shape[:-1],))]
    seen += [(name, getattr(pool, name), (pool.k.shape[:-1],)) for name in ("k_token_scale", "v_token_scale")]
    seen += [(name, getattr(params, name), ((num_heads,),)) for name in ("alibi_slopes", "sinks")]
    seen += [("q_scale", params.q_scale, ((), (num_heads,)))]
    seen += [(name, getattr(params, name), ((), (num_kv_heads,))) for name in ("k_scale", "v_scale")]
    for name, x, shapes in seen:
        if x is not None and jnp.shape(x) not in shapes:
            raise ValueError(f"{name}.shape={jnp.shape(x)} must be {' or '.join(map(str, shapes))}")
    if batch.block_table.ndim != 2 or batch.block_table.shape[0] != num_reqs:
        raise ValueError(f"{batch.block_table.shape=} must be [{num_reqs}, B]")


def _kernel(
    # Whole arrays, of which a program reads a few elements
    tile_req,  # i32[tiles]
    tile_first_row,  # i32[tiles]
    batch,  # PagedBatch: lengths i32[R], block_table i32[R B], causal bool[R] or None
    consts,  # the arrays that mask_fn and score_fn close over
    # Input
    q_ref,  # [1 1 M D]
    params,  # KernelParams: q_scale, alibi_slopes, sinks f32[1 M 1]; k_scale, v_scale f32[1 1 1]
    pool,  # PagePool, whole: k [N K S D], v [N K S V] or NHD; token scales f32[N K S] or None
    # Output
    out_ref,  # [1 1 M V]
    lse_ref,  # f32[1 1 M 1]
    # Scratch: none; the loop carries the softmax state
    *,
    config: KernelConfig,
    closures: tuple[ConvertedClosure | None, ConvertedClosure | None],
    group_size: int,
):
    head, tile = pl.program_id(0), pl.program_id(1)
    mask_rule, logit_rule = _bind_functions(config, closures, consts)
    block_size = _pool_sizes(pool, config)[1]
    q = q_ref[0, 0].astype(jnp.float32) * params.q_scale[0]
    req, first_row = tile_req[tile], tile_first_row[tile]
    rows = _program_rows(head, req, first_row, batch, num_rows=q.shape[0], group_size=group_size, rule=mask_rule)

    def visit(column, state):
        m, l, acc = state  # noqa: E741
        kv_pos = column * block_size + jax.lax.broadcasted_iota(jnp.int32, (1, block_size), 1)
        in_range = (kv_pos >= rows.key_begin) & (kv_pos < rows.key_end)
        page = batch.block_table[req, column]
        k, k_token = _read(pool.k, pool.k_token_scale, page, head, in_range, config)
        v, v_token = _read(pool.v, pool.v_token_scale, page, head, in_range, config)
        dots = _dot(q, k.T) * (k_token * params.k_scale[0])
        logits = shape_logits(logit_rule, dots, rows.head, rows.position, kv_pos, params.alibi_slopes[0])
        visible = in_range & mask.visible(mask_rule, rows.head, rows.position, kv_pos, rows.causal)
        m, alpha, p = softmax.weights(m, jnp.where(visible, logits, softmax.NEG_INF))
        return m, l * alpha + jnp.sum(p, -1, keepdims=True), acc * alpha + _dot(p * v_token, v)

    start = softmax.start(q.shape[:1], out_ref.shape[-1])
    first_page = rows.key_begin // block_size
    end_page = jnp.where(rows.key_end > rows.key_begin, cdiv(rows.key_end, block_size), first_page)
    state = jax.lax.fori_loop(first_page, end_page, visit, start)
    out, lse = softmax.finish(*state, sink=params.sinks[0])
    out_ref[0, 0] = (out * params.v_scale[0]).astype(out_ref.dtype)
    lse_ref[0, 0] = lse[:, None]


def _program_rows(
    head, req, first_row, batch: PagedBatch, *, num_rows: int, group_size: int, rule: MaskRule
) -> _ProgramRows:
    """Heads and positions of a tile's rows, and the keys that its live rows see (none for a dead tile)."""
    m = jax.lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)
    causal = None if batch.causal is None else batch.causal[req]
    live = jnp.clip(batch.query_lens[req] - first_row, 0, num_rows // group_size)
    q_first = batch.num_computed_tokens[req] + first_row
    key_begin, key_end = mask.key_range(rule, q_first, q_first + live - 1, batch.seq_lens[req], causal)
    return _ProgramRows(
        head=head * group_size + m % group_size,
        position=q_first + m // group_size,
        causal=causal,
        key_begin=key_begin,
        key_end=jnp.where(live > 0, key_end, key_begin),
    )


def _read(pool_ref, scale_ref, page, head, in_range, config: KernelConfig):
    """(f32[S *], f32[1 S] token scales or 1.0) of one head of one page; zeros outside the range of keys.

    Slots outside the range may hold anything. A weight of 0 does not remove a NaN (0 * NaN is NaN), so they are zeroed.
    """
    at = (page, head) if config.layout == "HND" else (page, slice(None), head)
    stored = jnp.where(in_range.reshape(-1, 1), quant.decode(pool_ref[at], config.kv_dtype), 0.0)
    return stored, 1.0 if scale_ref is None else jnp.where(in_range, scale_ref[at][None], 0.0)


def _dot(a, b):
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _pool_sizes(pool: PagePool, config: KernelConfig) -> tuple[int, int]:
    """(K, S); the pool may hold arrays or Refs."""
    _, first, second, _ = pool.k.shape
    return (first, second) if config.layout == "HND" else (second, first)


def _params_per_row(params: KernelParams, num_heads: int, num_kv_heads: int, rows: int) -> KernelParams:
    """f32[K M 1] per row, f32[K 1 1] per kv head. Absent scales become 1, slopes 0, sinks -inf."""
    group_size = num_heads // num_kv_heads

    def per_head(x, neutral, heads):
        return jnp.broadcast_to(jnp.asarray(neutral if x is None else x, jnp.float32), (heads,))

    def per_row(x, neutral):
        grouped = per_head(x, neutral, num_heads).reshape(num_kv_heads, 1, group_size)
        return jnp.broadcast_to(grouped, (num_kv_heads, rows, group_size)).reshape(num_kv_heads, rows * group_size, 1)

    return KernelParams(
        q_scale=per_row(params.q_scale, 1.0),
        k_scale=per_head(params.k_scale, 1.0, num_kv_heads).reshape(num_kv_heads, 1, 1),
        v_scale=per_head(params.v_scale, 1.0, num_kv_heads).reshape(num_kv_heads, 1, 1),
        alibi_slopes=per_row(params.alibi_slopes, 0.0),
        sinks=per_row(params.sinks, softmax.NEG_INF),
    )


def _bind_functions(config: KernelConfig, closures, consts) -> tuple[MaskRule, LogitRule]:
    """The two rules, the user's functions bound to the Refs of their constants."""

    def bind(fn: ConvertedClosure | None, refs):
        return None if fn is None else lambda *args: fn.fn([ref[...] for ref in refs], *args)

    mask_fn, score_fn = (bind(fn, refs) for fn, refs in zip(closures, consts, strict=True))
    return dataclasses.replace(config.mask, mask_fn=mask_fn), dataclasses.replace(config.logits, score_fn=score_fn)
