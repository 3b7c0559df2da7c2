"""A ragged batch cut into tiles of queries, by how many queries a request has.

A request with one query gets a tile of 1, a short one (speculative decoding) tiles of 8, a longer one tiles of 128.
The choice depends on that request alone, so the arithmetic of a request, bit for bit, never depends on its batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.metadata.parallel import KeyShard
from jattn.types import pytree
from pallas_kernels.algebra.paging import cdiv

LONG_TILE = 128
SHORT_TILE = 8


@pytree
class RaggedBatch:
    """Which queries attend to how many keys, each query with its own position."""

    start: jax.Array  # i32[R] first packed token
    query_len: jax.Array  # i32[R]
    kv_len: jax.Array  # i32[R]
    kv_offset: jax.Array  # i32[R] position of the request's key 0
    position: jax.Array  # i32[T]
    causal: jax.Array | None  # bool[T], None = the rule's
    prefix: jax.Array | None = None  # i32[T] first keys of the request that no window hides
    context: jax.Array | None = None  # i32[T] position of the request's first new token
    span: jax.Array | None = None  # i32[T 2] (first, last) position of the token's span, (-1, -1): none
    shard: KeyShard | None = None  # kv_len counts one rank's keys; None = they are a plain run

    @property
    def num_tokens(self) -> int:
        return self.position.shape[0]

    @property
    def num_reqs(self) -> int:
        return self.start.shape[0]


@dataclasses.dataclass(frozen=True)
class TileClass:
    """Tiles of `rows` queries, for requests that have shortest .. longest of them.

    chunks: keys at once in a CPU's loop, falling. A long tile's logits must fit its caches (with 512 keys four prompts
    of 512 are twice as slow), few rows want long chunks (512 instead of 256: 20 % faster), the smallest spares short
    contexts, and the first tiles of a prompt, keys that nobody sees.
    """

    rows: int
    shortest: int
    longest: int
    chunks: tuple[int, ...]

    def capacity(self, num_tokens: int, num_reqs: int) -> int:
        """At most this many tiles: one a request, plus one for every full tile of tokens."""
        reqs = min(num_reqs, num_tokens // self.shortest)
        return reqs if self.longest <= self.rows else reqs + num_tokens // self.rows


CLASSES = (
    TileClass(1, 1, 1, (512, 128)),
    TileClass(SHORT_TILE, 2, SHORT_TILE, (512, 128)),
    TileClass(LONG_TILE, SHORT_TILE + 1, 2**31 - 1, (256, 128)),
)


def classes_for(max_query_len: int) -> tuple[TileClass, ...]:
    """Those that a batch with this static bound can meet."""
    return tuple(c for c in CLASSES if c.shortest <= max_query_len)


@pytree
class TileIndex:
    """Where tile t of a class lies: its request and its first query within it."""

    ends: jax.Array  # i32[R] tiles of requests 0 .. r
    counts: jax.Array  # i32[R]

    @property
    def total(self) -> jax.Array:
        """i32[] live tiles."""
        return self.ends[-1]

    def locate(self, t: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(request, number of the tile within it); a t past the end gives the last request."""
        passed = jnp.sum(self.ends <= t)  # one operation; a binary search is a loop of many
        req = jnp.minimum(passed, self.ends.shape[0] - 1).astype(jnp.int32)
        return req, t - (self.ends[req] - self.counts[req])


def index_tiles(batch: RaggedBatch, kind: TileClass) -> TileIndex:
    """Lay the tiles of one class end to end, in the order of requests."""
    mine = (batch.query_len >= kind.shortest) & (batch.query_len <= kind.longest)
    counts = jnp.where(mine, cdiv(batch.query_len, kind.rows), 0).astype(jnp.int32)
    return TileIndex(ends=jnp.cumsum(counts).astype(jnp.int32), counts=counts)
