"""Where keys and values are read from, one chunk at a time: a paged pool, or packed arrays.

All hand out the same thing, so the attention of a tile does not know which it reads. A chunk is a fixed number of
keys, aligned to the start of the request: what a request computes never depends on the batch around it.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jattn.cache.layout import PagedKV
from jattn.ops.in_place import LANES, MOST_ROWS, SMALLEST_PAGE, PlacedKeys
from jattn.ops.ragged import CLASSES
from jattn.types import pytree, static
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.paging import cdiv, gather_pages

CHUNK_TOKENS = 256
"""Keys read at once, where nobody asks for another number."""
LONGEST_CHUNK = max(CHUNK_TOKENS, *(tokens for kind in CLASSES for tokens in kind.chunks))
"""The most that anybody asks for: packed keys are padded by so many."""


@pytree
class KVChunk:
    """One chunk as float32, before scales; P pages of S keys, P * S = chunk_tokens."""

    k: jax.Array | PlacedKeys  # [P K S D]; bfloat16 only where the queries hold nothing finer
    v: jax.Array  # [P K S V]
    k_scale: jax.Array | None  # [P K S] per token and head
    v_scale: jax.Array | None


class Keys(Protocol):
    """A pytree of keys and values in which requests can be found."""

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def v_head_dim(self) -> int: ...

    @property
    def chunk_tokens(self) -> int:
        """Keys of a chunk."""
        ...

    @property
    def max_chunks(self) -> int:
        """Chunks that the longest request could have."""
        ...

    def in_chunks(self, tokens: int) -> "Keys":
        """The same keys, about this many at once; larger chunks are multiples of smaller ones."""
        ...

    def beside(self, q_dtype: str) -> "Keys":
        """The same keys, read in the form that suits queries of this dtype in a CPU loop."""
        ...

    def in_place(self, query_rows: int) -> "Keys | None":
        """The same keys, multiplied where they lie by so many query rows a kv head; None where they must be copied."""
        ...

    def read(self, req: jax.Array, chunk: jax.Array) -> KVChunk:
        """Chunk number `chunk` of request `req`."""
        ...


@pytree
class PagedKeys:
    """Keys in a pool, found through a block table padded to whole chunks."""

    cache: PagedKV
    table: jax.Array  # i32[R B], B a multiple of pages_per_chunk
    pages_per_chunk: int = static()
    k_as_stored: bool = static(default=False)
    placed: bool = static(default=False)  # keys are not copied

    @classmethod
    def of(cls, cache: PagedKV, block_table: jax.Array) -> "PagedKeys":
        """In chunks of CHUNK_TOKENS."""
        return cls(cache=cache, table=jnp.asarray(block_table), pages_per_chunk=1).in_chunks(CHUNK_TOKENS)

    def in_chunks(self, tokens: int) -> "PagedKeys":
        """Round the table's width up to whole chunks."""
        pages = _pages(tokens, self.cache.spec.block_size)
        table = jnp.pad(self.table, ((0, 0), (0, -self.table.shape[1] % pages)))
        return dataclasses.replace(self, table=table, pages_per_chunk=pages)

    @property
    def num_kv_heads(self) -> int:
        return self.cache.spec.num_kv_heads

    @property
    def v_head_dim(self) -> int:
        return self.cache.spec.v_head_dim

    @property
    def chunk_tokens(self) -> int:
        return self.pages_per_chunk * self.cache.spec.block_size

    @property
    def max_chunks(self) -> int:
        return self.table.shape[1] // self.pages_per_chunk

    def beside(self, q_dtype: str) -> "PagedKeys":
        """For queries of this dtype: bf16 keys beside bf16 queries stay bf16, for their products are exact in float32
        either way, and a core multiplies pairs of bf16 two to three times faster."""
        return dataclasses.replace(self, k_as_stored=q_dtype == self.cache.spec.dtype == "bfloat16")

    def in_place(self, query_rows: int) -> "PagedKeys | None":
        """Float32 alone: other types would be widened once for each row; bf16 in place is level or 15 % slower."""
        c = self.cache.spec
        fits = c.dtype == "float32" and c.physical_layout == "HND" and c.head_dim % LANES == 0
        pays = query_rows <= MOST_ROWS and c.block_size >= SMALLEST_PAGE
        return dataclasses.replace(self, placed=True) if fits and pays else None

    def read(self, req: jax.Array, chunk: jax.Array) -> KVChunk:
        """Chunk number `chunk` of request `req`."""
        pages = jax.lax.dynamic_slice(self.table, (req, chunk * self.pages_per_chunk), (1, self.pages_per_chunk))[0]
        heads_first = self.cache.spec.physical_layout == "HND"

        def take(pool):
            return pool if pool is None else gather_pages(pool, pages)

        def pool_rows(pool, decode=quant.decode):
            rows = decode(take(pool), self.cache.spec.dtype)
            return rows if heads_first else jnp.swapaxes(rows, 1, 2)

        def scales(pool):
            rows = take(pool)
            return rows if rows is None or heads_first else jnp.swapaxes(rows, 1, 2)

        c = self.cache
        k_decode = quant.native if self.k_as_stored else quant.decode
        return KVChunk(
            k=PlacedKeys(pool=c.k, pages=pages) if self.placed else pool_rows(c.k, k_decode),
            v=pool_rows(c.v),
            k_scale=scales(c.k_token_scale),
            v_scale=scales(c.v_token_scale),
        )


def _pages(tokens: int, block_size: int) -> int:
    """Pages of a chunk of at most `tokens` keys, at least one: a power of two, so that chunks of all sizes fit."""
    return 1 << max(0, (tokens // block_size).bit_length() - 1)


@pytree
class PackedKeys:
    """Keys packed by request: request r owns rows start[r] .. start[r] + kv_len[r] - 1."""

    k: jax.Array  # [Tk + LONGEST_CHUNK K D] padded so that a chunk that begins inside never clamps
    v: jax.Array  # [Tk + LONGEST_CHUNK K V]
    start: jax.Array  # i32[R]
    dtype: str = static()
    chunk_tokens: int = static()

    @classmethod
    def of(cls, k: jax.Array, v: jax.Array, kv_lens: jax.Array, bits: bool) -> "PackedKeys":
        """Pad the tail; `bits` keeps bf16 as bit patterns on its way into a CPU loop (see algebra.quant)."""
        ends = jnp.cumsum(kv_lens)
        pad = lambda x: jnp.pad(loop_bits(x, bits), ((0, LONGEST_CHUNK), (0, 0), (0, 0)))  # noqa: E731
        start = (ends - kv_lens).astype(jnp.int32)
        return cls(k=pad(k), v=pad(v), start=start, dtype=k.dtype.name, chunk_tokens=CHUNK_TOKENS)

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def v_head_dim(self) -> int:
        return self.v.shape[2]

    @property
    def max_chunks(self) -> int:
        return cdiv(max(self.k.shape[0] - LONGEST_CHUNK, 1), self.chunk_tokens)

    def in_chunks(self, tokens: int) -> "PackedKeys":
        return dataclasses.replace(self, chunk_tokens=tokens)

    def beside(self, q_dtype: str) -> "PackedKeys":
        return self

    def in_place(self, query_rows: int) -> None:
        return None

    def read(self, req: jax.Array, chunk: jax.Array) -> KVChunk:
        """Chunk number `chunk` of request `req`."""
        first = self.start[req] + chunk * self.chunk_tokens

        def rows(x):
            part = jax.lax.dynamic_slice_in_dim(x, first, self.chunk_tokens)
            return jnp.swapaxes(quant.decode(part, self.dtype), 0, 1)[None]

        return KVChunk(k=rows(self.k), v=rows(self.v), k_scale=None, v_scale=None)


def loop_bits(x: jax.Array, bits: bool) -> jax.Array:
    """x as it may enter a loop: with `bits`, bf16 and fp8 as bit patterns; everything else as it is."""
    return quant.encode(x, x.dtype.name, quant.storage_dtype(x.dtype.name, bits))
