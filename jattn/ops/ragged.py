"""A ragged batch, and its queries divided into tiles. The tile size depends on the query length of the request.

A request with one query gets a tile of 1, a short one (speculative decoding) tiles of 8, a longer one tiles of 128.
The size depends on that request alone, so the bits of its result do not depend on the rest of the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.metadata.parallel import KeyShard
from jattn.types import pytree
from pallas_kernels.algebra import mask
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.paging import cdiv


@pytree
class QueryRows:
    """The values of each query that the mask and the logits depend on; None: the layer does not use it."""

    position: jax.Array  # i32[M]
    causal: jax.Array | None  # bool[M]; None: mask_rule.causal holds for all
    prefix: jax.Array | None = None  # i32[M] the number of first keys that a window does not hide
    context: jax.Array | None = None  # i32[M] position of the request's first new token
    span: tuple[jax.Array, jax.Array] | None = None  # i32[M] first and last position of the token's span, -1: none


@pytree
class KeyRun:
    """The keys 0 .. length - 1 of one request, and their positions."""

    length: jax.Array  # i32[]
    offset: jax.Array  # i32[] position of key 0; > 0 in later levels of a cascade
    shard: KeyShard | None  # this rank's share of the request's keys; None: all keys

    def positions(self, index: jax.Array) -> jax.Array:
        """Positions of the keys at these indices."""
        return self.offset + (index if self.shard is None else self.shard.positions(index))

    def index_of(self, position: jax.Array) -> jax.Array:
        """Index of the first key at or after a position."""
        relative = position - self.offset
        return jnp.maximum(relative, 0) if self.shard is None else self.shard.count_below(relative)


@pytree
class RaggedBatch:
    """The queries of each request, the number of its keys, and the position of each query."""

    start: jax.Array  # i32[R] first packed token
    query_lens: jax.Array  # i32[R] queries of each request
    seq_lens: jax.Array  # i32[R] keys of each request, in this level of a cascade
    kv_offset: jax.Array  # i32[R] position of the request's key 0
    rows: QueryRows  # of all T tokens
    shard: KeyShard | None = None  # with it, seq_lens count the keys of this rank

    @property
    def num_tokens(self) -> int:
        return self.rows.position.shape[0]

    @property
    def num_reqs(self) -> int:
        return self.start.shape[0]

    def req_of_token(self) -> tuple[jax.Array, jax.Array]:
        """(i32[T] the request of each token, bool[T] False for padding and for a request whose query_lens are 0)."""
        start, token = jnp.asarray(self.start), jnp.arange(self.num_tokens, dtype=jnp.int32)
        req = jnp.maximum(jnp.searchsorted(start, token, side="right") - 1, 0).astype(jnp.int32)
        return req, (token >= start[req]) & (token < start[req] + jnp.asarray(self.query_lens)[req])

    def cleared(self, x: jax.Array) -> jax.Array:
        """x [T ..] with 0 for tokens that are not live: they may hold NaN, and in a gradient 0 * NaN would be NaN."""
        live = self.req_of_token()[1].reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(live, x, jnp.zeros((), x.dtype))

    def keys_of(self, req: jax.Array) -> KeyRun:
        """One request's keys."""
        return KeyRun(length=_item(self.seq_lens, req), offset=_item(self.kv_offset, req), shard=self.shard)


@dataclasses.dataclass(frozen=True)
class TileClass:
    """Tiles of `rows` queries, for requests with shortest .. longest queries."""

    rows: int
    shortest: int
    longest: int

    def capacity(self, num_tokens: int, num_reqs: int) -> int:
        """Upper bound of the number of tiles: one for each request, plus the full tiles of longer requests."""
        reqs = min(num_reqs, num_tokens // self.shortest)
        return reqs if self.longest <= self.rows else reqs + num_tokens // self.rows


TILE_CLASSES = (TileClass(1, 1, 1), TileClass(8, 2, 8), TileClass(128, 9, 2**31 - 1))


def classes_for(max_query_len: int) -> tuple[TileClass, ...]:
    """The classes that a batch with this static bound can need."""
    return tuple(c for c in TILE_CLASSES if c.shortest <= max_query_len)


@pytree
class TileIndex:
    """The tiles of a class, in order of requests; locate(t) gives the request of tile t."""

    ends: jax.Array  # i32[R] the number of tiles of requests 0 .. r
    counts: jax.Array  # i32[R] the number of tiles of each request

    @property
    def total(self) -> jax.Array:
        """i32[] live tiles."""
        return self.ends[-1]

    def locate(self, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(request, number of the tile in that request). For t >= total, the request is the last one."""
        passed = jnp.sum(self.ends <= t, dtype=jnp.int32)  # one operation; searchsorted is a loop
        req = jnp.minimum(passed, self.ends.shape[0] - 1).astype(jnp.int32)
        return req, t - (self.ends[req] - self.counts[req])


def index_tiles(batch: RaggedBatch, kind: TileClass) -> TileIndex:
    """The index of the tiles of one class."""
    mine = (batch.query_lens >= kind.shortest) & (batch.query_lens <= kind.longest)
    counts = jnp.where(mine, cdiv(batch.query_lens, kind.rows), 0).astype(jnp.int32)
    return TileIndex(ends=jnp.cumsum(counts).astype(jnp.int32), counts=counts)


@pytree
class RaggedTile:
    """Some consecutive queries of one request. Rows that are not live belong to other tiles or are padding."""

    first_row: jax.Array  # i32[] in the batch
    q: jax.Array  # [M H D]
    live: jax.Array  # bool[M]
    rows: QueryRows
    req: jax.Array  # i32[]
    keys: KeyRun

    def cleared(self, is_live: jax.Array) -> "RaggedTile":
        """The tile with live & is_live. Queries that are not live become 0: in a gradient, 0 * NaN would be NaN."""
        live = self.live & is_live
        q = jnp.where(live[:, None, None], self.q, jnp.zeros((), self.q.dtype))
        return dataclasses.replace(self, live=live, q=q)


def cut_tile(q: jax.Array, batch: RaggedBatch, kind: TileClass, req: jax.Array, number: jax.Array) -> RaggedTile:
    """Tile `number` of request `req`. q: [T.. H D] with at least kind.rows rows.

    A tile that would reach past the last token begins earlier. To pad q instead would copy it into new memory, which
    costs more than the attention of short prompts.
    """
    start = _item(batch.start, req)
    first = start + number * kind.rows
    row = jnp.minimum(first, q.shape[0] - kind.rows)
    token = row + jnp.arange(kind.rows, dtype=jnp.int32)
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, row, kind.rows)  # noqa: E731
    return RaggedTile(
        first_row=row,
        q=cut(q),
        live=(token >= first) & (token < jnp.minimum(first + kind.rows, start + _item(batch.query_lens, req))),
        rows=jax.tree.map(lambda x: cut(at_least(x, q.shape[0])), batch.rows),
        req=req,
        keys=batch.keys_of(req),
    )


def key_ranges(tile: RaggedTile, rule: MaskRule):
    """(prefix_stop, first, last): live rows can see only keys 0 .. prefix_stop - 1 and first .. last - 1.

    Both ranges are empty if no row is live. Other keys may have any value, also NaN.
    """
    rows, keys, live = tile.rows, tile.keys, tile.live
    q_first = jnp.min(jnp.where(live, rows.position, jnp.iinfo(jnp.int32).max // 2))
    q_last = jnp.max(jnp.where(live, rows.position, jnp.iinfo(jnp.int32).min // 2))
    causal = None if rows.causal is None else jnp.all(rows.causal | ~live)
    span = None
    if rule.spans:
        assert rows.span is not None
        mine = live & (rows.span[1] >= 0)
        span = jnp.min(jnp.where(mine, rows.span[0], q_first)), jnp.max(jnp.where(mine, rows.span[1], -1))
    first, last = mask.key_range(rule, q_first, q_last, keys.positions(keys.length - 1) + 1, causal, span)
    first, last = keys.index_of(first), keys.index_of(last)
    last = jnp.where(jnp.any(live), jnp.maximum(last, first), first)
    if not rule.prefix:
        return 0, first, last
    assert rows.prefix is not None
    prefix = jnp.max(jnp.where(live, rows.prefix, 0))
    return jnp.minimum(keys.index_of(prefix), jnp.minimum(last, keys.length)), first, last


def at_least(x: jax.Array, rows: int) -> jax.Array:
    """x, padded to this many rows if it has fewer."""
    short = max(rows - x.shape[0], 0)
    return jnp.pad(x, ((0, short), *[(0, 0)] * (x.ndim - 1))) if short else x


def _item(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)  # x may still be numpy
