"""The attention of one tile: a few consecutive queries of one request against a range of its keys.

    M = rows * G query rows a kv head;   chunk after chunk:  dots -> logits -> mask -> online softmax

Everything is float32 from the first dot product on. Keys outside the tile's range never reach the arithmetic: they
are replaced by zeros, because a stale page may hold NaN and 0 * NaN is NaN.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jattn.metadata.parallel import KeyShard
from jattn.ops.in_place import PlacedKeys
from jattn.ops.keys import Keys, KVChunk
from jattn.types import pytree
from pallas_kernels.algebra import mask, softmax
from pallas_kernels.algebra.logits import LogitRule, shape_logits
from pallas_kernels.algebra.mask import MaskRule

einsum = jax.tree_util.Partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

FEW_ROWS = 32
"""Up to so many query rows, dots of float32 are made with the keys first: 17 us against 42 for 256 keys on a Zen 5."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """A layer's static arithmetic."""

    mask: MaskRule
    logits: LogitRule


@pytree
class Numbers:
    """A layer's traced arithmetic, broadcast once: f32[K 1 G 1] per head, f32[K 1 1 1] per kv head; None = absent."""

    slope: jax.Array | None
    sink: jax.Array | None
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    qq_bias: jax.Array | None = None  # f32[Q Q]
    output_scale: jax.Array | None = None  # f32[]


@pytree
class Tile:
    """Queries of one request; rows past the request's end are computed and thrown away by the caller."""

    q: jax.Array  # f32[rows H D]
    live: jax.Array  # bool[rows]
    position: jax.Array  # i32[rows]
    causal: jax.Array | None  # bool[rows], None = the rule's
    req: jax.Array  # i32[]
    kv_len: jax.Array  # i32[] keys that this request holds
    kv_offset: jax.Array  # i32[] position of key 0 (a later level of a cascade starts later)
    prefix: jax.Array | None = None  # i32[rows] first keys of the request that no window hides
    span: jax.Array | None = None  # i32[rows 2]
    context: jax.Array | None = None  # i32[rows]
    shard: KeyShard | None = None  # the keys are one rank's share of the request's

    def position_of(self, index: jax.Array) -> jax.Array:
        """Positions of the keys at these indices."""
        return self.kv_offset + (index if self.shard is None else self.shard.positions(index))

    def index_of(self, position: jax.Array) -> jax.Array:
        """Index of the first key at or after a position."""
        relative = position - self.kv_offset
        return jnp.maximum(relative, 0) if self.shard is None else self.shard.count_below(relative)


class Rung(NamedTuple):
    """How a tile's keys are visited while steps of this size fill."""

    keys: Keys
    at_once: int = 1
    """Chunks of a step, one after the other in arithmetic: while one is being multiplied, XLA may read the next."""

    @property
    def tokens(self) -> int:
        """Keys of a step."""
        return self.keys.chunk_tokens * self.at_once


def attend_tile(
    tile: Tile, ladder: Sequence[Rung], rules: Rules, numbers: Numbers, static_trips: bool = False, shares: int = 1
):
    """(out f32[rows H V], lse f32[rows H]) of a tile.

    `ladder` holds the same keys in steps of falling size: the largest are visited while they fill, the rest in smaller
    ones. static_trips visits every chunk that the keys could have, which reverse-mode differentiation needs; otherwise
    only those in the tile's range are visited. `shares`: the kv heads in so many parts that wait for each other only
    where keys are read (see `shares_of`).
    """
    rows, num_heads, _ = tile.q.shape
    num_kv, value_dim = ladder[0].keys.num_kv_heads, ladder[0].keys.v_head_dim
    group = num_heads // num_kv
    q = tile.q.reshape(rows, num_kv, group, -1).transpose(1, 0, 2, 3)  # [K rows G D]
    head_stop, first, last = _ranges(tile, rules.mask)
    of_rows = lambda x: None if x is None else x[None, :, None, None]  # noqa: E731
    position, causal, prefix = of_rows(tile.position), of_rows(tile.causal), of_rows(tile.prefix)
    span = None if tile.span is None else (of_rows(tile.span[:, 0]), of_rows(tile.span[:, 1]))
    head = jnp.arange(num_heads).reshape(num_kv, 1, group, 1)
    parts = [slice(i * num_kv // shares, (i + 1) * num_kv // shares) for i in range(shares)]
    queries = [q[part] for part in parts]  # cut outside the loop

    def fold(state, part, q, chunk, kv_pos, bias, inside):
        m, l, acc = state  # noqa: E741
        of_part = lambda x: None if x is None else x[part]  # noqa: E731
        chunk = _without_strangers(chunk if shares == 1 else jax.tree.map(lambda x: x[:, part], chunk), inside)
        dots = _dots(q, chunk)
        if numbers.k_scale is not None:
            dots = dots * numbers.k_scale[part]
        logits = shape_logits(rules.logits, dots, head[part], position, kv_pos, of_part(numbers.slope), bias)
        seen = mask.visible(rules.mask, head[part], position, kv_pos, causal, prefix, span) & inside[None, None, None]
        m, alpha, p = softmax.weights(m, jnp.where(seen, logits, softmax.NEG_INF))
        return m, l * alpha + jnp.sum(p, -1, keepdims=True), acc * alpha + _weighted(p, chunk)

    def step(keys, c, states, inside):
        index = c * keys.chunk_tokens + jnp.arange(keys.chunk_tokens)
        kv_pos = tile.position_of(index)[None, None, None]
        shared = keys.read(tile.req, c), kv_pos, _bias(tile, numbers, kv_pos), inside(index)
        return tuple(fold(*own, *shared) for own in zip(states, parts, queries, strict=True))

    def sweep(states, first, last):
        begin = first
        for rung, finer in zip(ladder, (*ladder[1:], ladder[-1]), strict=True):
            chunk = begin // rung.keys.chunk_tokens  # steps begin where the range does, chunks where the request does
            span = last - chunk * rung.keys.chunk_tokens
            steps = (span + finer.tokens - 1) // rung.tokens  # a step that finer ones would fill too is one of these

            def visit(s, states, rung=rung, begin=begin, chunk=chunk):
                inside = lambda i: (i >= begin) & (i < last)  # noqa: E731
                for c in range(rung.at_once):
                    states = step(rung.keys, chunk + s * rung.at_once + c, states, inside)
                return states

            states = jax.lax.fori_loop(0, steps, visit, states)
            begin = jnp.maximum(begin, chunk * rung.keys.chunk_tokens + steps * rung.tokens)
        return states

    states = tuple(softmax.start((part.stop - part.start, rows, group), value_dim) for part in parts)
    if static_trips:
        inside = lambda i: ((i >= first) & (i < last)) | (i < head_stop)  # noqa: E731
        keys = ladder[0].keys
        body = jax.checkpoint(lambda carry, c: (step(keys, c, carry, inside), None))
        states, _ = jax.lax.scan(body, states, jnp.arange(keys.max_chunks))
    else:
        if rules.mask.prefix:  # its keys first, none of them twice
            states = sweep(states, 0, head_stop)
        states = sweep(states, jnp.maximum(first, head_stop), last)
    out, lse = softmax.finish(*map(jnp.concatenate, zip(*states, strict=True)), sink=numbers.sink)
    if numbers.v_scale is not None:
        out = out * numbers.v_scale
    return out.transpose(1, 0, 2, 3).reshape(rows, num_heads, value_dim), lse.transpose(1, 0, 2).reshape(rows, -1)


def shares_of(rows: int, num_kv: int) -> int:
    """For a CPU's loop: two where a step has many query rows, and the kv heads can be halved; JAX 0.10 alone.

    Its XLA gives a product to one thread while the result has at most 512 rows by 128 columns a head, whatever the
    number of heads. Of two products each thread takes one, and one's softmax hides beside the other's: 4 to 13 % of a
    prompt. More than two, or few rows, gain nothing, and newer XLA is 2 to 5 % faster undivided.
    """
    return 2 if rows > FEW_ROWS and num_kv % 2 == 0 and jax.__version_info__ < (0, 11) else 1


def _ranges(tile: Tile, rule: MaskRule):
    """(stop of the prefix, first, last): key indices that some live row may see; nothing when no row is live."""
    q_first = jnp.min(jnp.where(tile.live, tile.position, jnp.iinfo(jnp.int32).max // 2))
    q_last = jnp.max(jnp.where(tile.live, tile.position, jnp.iinfo(jnp.int32).min // 2))
    causal = None if tile.causal is None else jnp.all(tile.causal | ~tile.live)
    span = None
    if rule.spans:
        mine = tile.live & (tile.span[:, 1] >= 0)
        span = jnp.min(jnp.where(mine, tile.span[:, 0], q_first)), jnp.max(jnp.where(mine, tile.span[:, 1], -1))
    first, last = mask.key_range(rule, q_first, q_last, tile.position_of(tile.kv_len - 1) + 1, causal, span)
    first, last = tile.index_of(first), tile.index_of(last)
    last = jnp.where(jnp.any(tile.live), jnp.maximum(last, first), first)
    if not rule.prefix:
        return 0, first, last
    prefix = jnp.max(jnp.where(tile.live, tile.prefix, 0))
    return jnp.minimum(tile.index_of(prefix), jnp.minimum(last, tile.kv_len)), first, last


def _bias(tile: Tile, numbers: Numbers, kv_pos: jax.Array) -> jax.Array | None:
    """f32[1 rows 1 C] of queries and keys that are both new; 0 elsewhere."""
    if numbers.qq_bias is None:
        return None
    size = numbers.qq_bias.shape[0]
    i, j = (tile.position - tile.context)[:, None], kv_pos.reshape(1, -1) - tile.context[:, None]
    both = (i < size) & (j >= 0) & (j < size)
    found = numbers.qq_bias[jnp.clip(i, 0, size - 1), jnp.clip(j, 0, size - 1)]
    return jnp.where(both, found, 0.0)[None, :, None]


def _without_strangers(chunk: KVChunk, inside: jax.Array) -> KVChunk:
    """Zeros in place of keys outside the tile's range; keys in place stay, for the mask hides all that they give."""
    pages, _, slots, _ = chunk.v.shape
    keep = inside.reshape(pages, 1, slots)
    clear = lambda x, k: None if x is None else jnp.where(k, x, 0.0)  # noqa: E731
    return KVChunk(
        k=chunk.k if isinstance(chunk.k, PlacedKeys) else clear(chunk.k, keep[..., None]),
        v=clear(chunk.v, keep[..., None]),
        k_scale=clear(chunk.k_scale, keep),
        v_scale=clear(chunk.v_scale, keep),
    )


def _dots(q: jax.Array, chunk: KVChunk) -> jax.Array:
    """q [K rows G D] . k -> f32[K rows G C]."""
    num_kv, rows, group, dim = q.shape
    flat = q.reshape(num_kv, rows * group, dim)
    if isinstance(chunk.k, PlacedKeys):
        return chunk.k.dots(flat).reshape(num_kv, rows, group, -1)
    pages, _, slots, _ = chunk.k.shape
    flat = flat.astype(chunk.k.dtype)
    keys = chunk.k.transpose(1, 0, 2, 3).reshape(num_kv, pages * slots, dim)
    if rows * group <= FEW_ROWS and keys.dtype == jnp.float32:  # XLA would fold the transposition without a barrier
        dots = jax.lax.optimization_barrier(einsum("kmd,kcd->kcm", flat, keys)).transpose(0, 2, 1)
    else:
        dots = einsum("kmd,kcd->kmc", flat, keys)
    if chunk.k_scale is not None:
        dots = dots * chunk.k_scale.transpose(1, 0, 2).reshape(num_kv, 1, -1)
    return dots.reshape(num_kv, rows, group, pages * slots)


def _weighted(p: jax.Array, chunk: KVChunk) -> jax.Array:
    """p [K rows G C] . v -> f32[K rows G V]."""
    num_kv, rows, group, _ = p.shape
    pages, _, slots, dim = chunk.v.shape
    if chunk.v_scale is not None:
        p = p * chunk.v_scale.transpose(1, 0, 2).reshape(num_kv, 1, 1, -1)
    values = chunk.v.transpose(1, 0, 2, 3).reshape(num_kv, pages * slots, dim)
    return einsum("kmc,kcd->kmd", p.reshape(num_kv, rows * group, -1), values).reshape(num_kv, rows, group, dim)
