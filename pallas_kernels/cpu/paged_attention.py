"""Paged attention in portable Pallas: the readable specification of every paged kernel in this tree.

    grid (K, tiles)                       one program: the G query heads of one kv head, `rows` queries of one request
      for page in key_range // S:         dynamic bounds; a page is found through the block table
        dots -> logits -> mask -> online softmax

It is made for the interpreter, on every platform, to be read and to judge other kernels by. Each program owns its
output block and reads only the pages that its queries can see, so the grid may run in any order.
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
from pallas_kernels.cpu.closure import Opened, open_closure
from pallas_kernels.cpu.tiles import Tiles

LAYOUTS = ("NHD", "HND")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What the kernel is specialised for; hashable."""

    mask: MaskRule
    logits: LogitRule
    kv_dtype: str  # what the pool means; it may be stored as bits
    out_dtype: str
    layout: str = "HND"

    def __post_init__(self):
        known = (("kv_dtype", (*quant.FLOATS, *quant.QUANTISED)), ("out_dtype", quant.FLOATS), ("layout", LAYOUTS))
        for name, values in known:
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(values)}")


class Pool(NamedTuple):
    """The paged cache: [N K S *] for layout HND, [N S K *] for NHD."""

    k: jax.Array  # [N K S D]
    v: jax.Array  # [N K S V]
    k_token_scale: jax.Array | None = None  # f32[N K S]
    v_token_scale: jax.Array | None = None


class Batch(NamedTuple):
    """Who attends to how many keys; query i of request r stands at num_computed_tokens[r] + i, key j at j."""

    query_lens: jax.Array  # i32[R]
    seq_lens: jax.Array  # i32[R] keys
    num_computed_tokens: jax.Array  # i32[R]
    block_table: jax.Array  # i32[R B]
    causal: jax.Array | None = None  # bool[R] overrules the mask rule


class Numbers(NamedTuple):
    """A layer's traced numbers; real value = stored value * scale. None is the neutral element, exactly."""

    q_scale: jax.Array | None = None  # f32[] or [H]
    k_scale: jax.Array | None = None  # f32[] or [K]
    v_scale: jax.Array | None = None
    slopes: jax.Array | None = None  # f32[H]
    sinks: jax.Array | None = None  # f32[H]


PLAIN = Numbers()


class _Rows(NamedTuple):
    """The M query rows of a program, m = row * G + (query head within the group), and the keys they may see."""

    head: jax.Array  # i32[M 1]
    position: jax.Array  # i32[M 1]
    causal: jax.Array | None  # bool[]
    first: jax.Array  # i32[] keys first .. last - 1 are seen by some live row
    last: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def paged_attention(
    q: jax.Array,
    pool: Pool,
    batch: Batch,
    tiles: Tiles,
    numbers: Numbers = PLAIN,
    *,
    config: Config,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """q [T H D] -> (out [T H V], lse f32[T H], natural log); tokens of no request give (0, -inf), and so do blind rows.

    `tiles` is `tiles.cut(query_start_loc, T, rows)`: once a step, for all layers.
    """
    num_kv, slots = _sizes(pool, config)
    check_static(q, pool, batch, numbers, num_kv, slots)
    num_tokens, num_heads, _ = q.shape
    count, rows = tiles.token.shape
    m = rows * num_heads // num_kv
    if count == 0:
        empty = jnp.zeros((num_tokens, num_heads, pool.v.shape[-1]), config.out_dtype)
        return empty, jnp.full(empty.shape[:2], -jnp.inf, jnp.float32)
    index = (jax.ShapeDtypeStruct((m, 1), jnp.int32),) * 2 + (jax.ShapeDtypeStruct((1, slots), jnp.int32),)
    opened = (
        open_closure(config.mask.mask_fn, *index),
        open_closure(config.logits.score_fn, jax.ShapeDtypeStruct((m, slots), jnp.float32), *index),
    )
    tiled = tiling.gather(q, tiles, num_kv)
    inputs = (
        tiles.req,
        tiles.first_row,
        batch,
        tuple(() if fn is None else fn.consts for fn in opened),
        tiled,
        _columns(numbers, num_heads, num_kv, rows),
        pool,
    )
    whole = lambda tree: jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), tree)
    of_tile = lambda dim: pl.BlockSpec((1, 1, m, dim), lambda head, tile: (head, tile, 0, 0))
    of_head = jax.tree.map(lambda x: pl.BlockSpec((1, *x.shape[1:]), lambda head, tile: (head, 0, 0)), inputs[5])
    shape = lambda dim, dtype: jax.ShapeDtypeStruct((*tiled.shape[:3], dim), dtype)
    out, lse = pl.pallas_call(
        functools.partial(_kernel, config=config, opened=opened, group=num_heads // num_kv),
        grid=(num_kv, count),
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


def check_static(q, pool: Pool, batch: Batch, numbers: Numbers, num_kv: int, slots: int) -> None:
    """Raise ValueError where the shapes already tell that the call cannot mean anything."""
    num_heads, num_reqs = q.shape[1] if q.ndim == 3 else 0, batch.seq_lens.shape[0]
    if q.ndim != 3 or q.shape[2] != pool.k.shape[-1] or num_heads % num_kv:
        raise ValueError(f"{q.shape=} must be [T, a multiple of {num_kv=}, {pool.k.shape[-1]}]")
    wanted = dict(query_lens=(num_reqs,), num_computed_tokens=(num_reqs,), causal=(num_reqs,))
    seen = [(name, getattr(batch, name), (shape,)) for name, shape in wanted.items()]
    seen += [("v", pool.v[..., 0], (pool.k.shape[:-1],))]
    seen += [(name, getattr(pool, name), (pool.k.shape[:-1],)) for name in ("k_token_scale", "v_token_scale")]
    seen += [(name, getattr(numbers, name), ((num_heads,),)) for name in ("slopes", "sinks")]
    seen += [("q_scale", numbers.q_scale, ((), (num_heads,)))]
    seen += [(name, getattr(numbers, name), ((), (num_kv,))) for name in ("k_scale", "v_scale")]
    for name, x, shapes in seen:
        if x is not None and jnp.shape(x) not in shapes:
            raise ValueError(f"{name}.shape={jnp.shape(x)} must be {' or '.join(map(str, shapes))}")
    if batch.block_table.ndim != 2 or batch.block_table.shape[0] != num_reqs:
        raise ValueError(f"{batch.block_table.shape=} must be [{num_reqs}, B]")


def _kernel(
    # Prefetch: whole arrays, of which a program reads a few numbers
    tile_req,  # i32[tiles]
    tile_first_row,  # i32[tiles]
    batch,  # Batch: lengths i32[R], block_table i32[R B], causal bool[R] or None
    consts,  # the arrays that mask_fn and score_fn close over
    # Input
    q_ref,  # [1 1 M D]
    numbers,  # Numbers: q_scale, slopes, sinks f32[1 M 1]; k_scale, v_scale f32[1 1 1]
    pool,  # Pool, whole: k [N K S D], v [N K S V] or NHD; token scales f32[N K S] or None
    # Output
    out_ref,  # [1 1 M V]
    lse_ref,  # f32[1 1 M 1]
    # Scratch: none; the state of the softmax is carried
    *,
    config: Config,
    opened: tuple[Opened | None, Opened | None],
    group: int,
):
    head, tile = pl.program_id(0), pl.program_id(1)
    mask_rule, logit_rule = _with_functions(config, opened, consts)
    slots = _sizes(pool, config)[1]
    q = q_ref[0, 0].astype(jnp.float32) * numbers.q_scale[0]
    req, first_row = tile_req[tile], tile_first_row[tile]
    rows = _rows(head, req, first_row, batch, size=q.shape[0], group=group, rule=mask_rule)

    def visit(column, state):
        m, l, acc = state  # noqa: E741
        kv_pos = column * slots + jax.lax.broadcasted_iota(jnp.int32, (1, slots), 1)
        inside = (kv_pos >= rows.first) & (kv_pos < rows.last)
        page = batch.block_table[req, column]
        k, k_token = _read(pool.k, pool.k_token_scale, page, head, inside, config)
        v, v_token = _read(pool.v, pool.v_token_scale, page, head, inside, config)
        dots = _dot(q, k.T) * (k_token * numbers.k_scale[0])
        logits = shape_logits(logit_rule, dots, rows.head, rows.position, kv_pos, numbers.slopes[0])
        seen = inside & mask.visible(mask_rule, rows.head, rows.position, kv_pos, rows.causal)
        m, alpha, p = softmax.weights(m, jnp.where(seen, logits, softmax.NEG_INF))
        return m, l * alpha + jnp.sum(p, -1, keepdims=True), acc * alpha + _dot(p * v_token, v)

    start = softmax.start(q.shape[:1], out_ref.shape[-1])
    first_page = rows.first // slots
    last_page = jnp.where(rows.last > rows.first, cdiv(rows.last, slots), first_page)
    state = jax.lax.fori_loop(first_page, last_page, visit, start)
    out, lse = softmax.finish(*state, sink=numbers.sinks[0])
    out_ref[0, 0] = (out * numbers.v_scale[0]).astype(out_ref.dtype)
    lse_ref[0, 0] = lse[:, None]


def _rows(head, req, first_row, batch: Batch, *, size: int, group: int, rule: MaskRule) -> _Rows:
    """Which rows, where they stand, and the range of keys that some live row sees (empty for a dead tile)."""
    m = jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    causal = None if batch.causal is None else batch.causal[req]
    live = jnp.clip(batch.query_lens[req] - first_row, 0, size // group)
    q_first = batch.num_computed_tokens[req] + first_row
    first, last = mask.key_range(rule, q_first, q_first + live - 1, batch.seq_lens[req], causal)
    return _Rows(
        head=head * group + m % group,
        position=q_first + m // group,
        causal=causal,
        first=first,
        last=jnp.where(live > 0, last, first),
    )


def _read(pool_ref, scale_ref, page, head, inside, config: Config):
    """(f32[S *], f32[1 S] token scales or 1.0) of one head of one page, zeros where the keys are strangers'.

    A page's tail may hold anything, NaN included, and 0 * NaN is NaN: what is not inside never reaches a product.
    """
    at = (page, head) if config.layout == "HND" else (page, slice(None), head)
    stored = jnp.where(inside.reshape(-1, 1), quant.decode(pool_ref[at], config.kv_dtype), 0.0)
    return stored, 1.0 if scale_ref is None else jnp.where(inside, scale_ref[at][None], 0.0)


def _dot(a, b):
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _sizes(pool: Pool, config: Config) -> tuple[int, int]:
    """(K, S) of arrays or Refs."""
    _, a, b, _ = pool.k.shape
    return (a, b) if config.layout == "HND" else (b, a)


def _columns(numbers: Numbers, num_heads: int, num_kv: int, rows: int) -> Numbers:
    """Per query row f32[K M 1], per kv head f32[K 1 1]; absent ones as 1, or 0 for slopes and -inf for sinks."""
    group = num_heads // num_kv

    def of_heads(x, neutral, heads):
        return jnp.broadcast_to(jnp.asarray(neutral if x is None else x, jnp.float32), (heads,))

    def per_row(x, neutral):
        by_group = of_heads(x, neutral, num_heads).reshape(num_kv, 1, group)
        return jnp.broadcast_to(by_group, (num_kv, rows, group)).reshape(num_kv, rows * group, 1)

    return Numbers(
        q_scale=per_row(numbers.q_scale, 1.0),
        k_scale=of_heads(numbers.k_scale, 1.0, num_kv).reshape(num_kv, 1, 1),
        v_scale=of_heads(numbers.v_scale, 1.0, num_kv).reshape(num_kv, 1, 1),
        slopes=per_row(numbers.slopes, 0.0),
        sinks=per_row(numbers.sinks, softmax.NEG_INF),
    )


def _with_functions(config: Config, opened, consts) -> tuple[MaskRule, LogitRule]:
    """The rules with the user's functions bound to the constants that came in as Refs."""

    def bind(fn: Opened | None, refs):
        return None if fn is None else lambda *args: fn.fn([ref[...] for ref in refs], *args)

    mask_fn, score_fn = (bind(fn, refs) for fn, refs in zip(opened, consts, strict=True))
    return dataclasses.replace(config.mask, mask_fn=mask_fn), dataclasses.replace(config.logits, score_fn=score_fn)
