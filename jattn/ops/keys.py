"""Where keys and values are read from, one chunk at a time: a paged pool, or packed arrays.

Every source returns the same KVChunk, so attention has one implementation for all sources. A chunk is a fixed number
of keys, aligned to the start of the request, so the result of a request does not depend on the rest of its batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from jattn.cache.layout import PagedKV, by_token
from jattn.types import AnyArray, pytree, static
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.paging import cdiv, gather_pages


@pytree
class KVChunk:
    """One chunk as float32 (cpu_storage may keep k as bfloat16), before scales; P pages of S keys, P * S = C keys."""

    k: jax.Array  # [P K S D]
    v: jax.Array  # [P K S V]
    k_scale: jax.Array | None  # [P K S] per token and head
    v_scale: jax.Array | None

    def zero_outside_range(self, inside: jax.Array) -> "KVChunk":
        """Zeros for keys and values where inside bool[C] is False: a stale page may hold NaN, and 0 * NaN is NaN."""
        keep = inside.reshape(self.v.shape[0], 1, self.v.shape[2])
        return jax.tree.map(lambda x: jnp.where(keep.reshape(keep.shape + (1,) * (x.ndim - 3)), x, 0.0), self)

    def dequantised(self) -> tuple[jax.Array, jax.Array]:
        """(k f32[K C D], v f32[K C V]) times their token scales."""
        return _by_head(self.k, self.k_scale), _by_head(self.v, self.v_scale)


def _by_head(x: jax.Array, token_scale: jax.Array | None) -> jax.Array:
    """[P K S *] -> [K C *]."""
    x = x if token_scale is None else x * token_scale[..., None]
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, x.shape[3])


class KeySource(Protocol):
    """A pytree of the keys and values of all requests. The constructors of sources make the smallest chunks."""

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
        """Upper bound of the chunks of a request."""
        ...

    def in_chunks(self, tokens: int) -> "KeySource":
        """The same keys in chunks of about this many; larger chunks are multiples of smaller ones."""
        ...

    def read(self, req: jax.Array, chunk: jax.Array) -> KVChunk:
        """Chunk number `chunk` of request `req`. Its keys past the request's last one may have any value."""
        ...


@pytree
class PagedKeys:
    """Keys in a pool, read through a block table that is padded to whole chunks. A page is a block."""

    cache: PagedKV
    block_table: jax.Array  # i32[R B], B a multiple of pages_per_chunk
    pages_per_chunk: int = static()

    @classmethod
    def of(cls, cache: PagedKV, block_table: AnyArray) -> "PagedKeys":
        """The keys of the blocks in block_table, in chunks of one block."""
        return cls(cache=cache, block_table=jnp.asarray(block_table), pages_per_chunk=1)

    def in_chunks(self, tokens: int) -> "PagedKeys":
        """A chunk is a power of two of whole pages. The width of the block table is rounded up to whole chunks."""
        pages = 1 << max(0, (tokens // self.cache.spec.block_size).bit_length() - 1)
        block_table = jnp.pad(self.block_table, ((0, 0), (0, -self.block_table.shape[1] % pages)))
        return dataclasses.replace(self, block_table=block_table, pages_per_chunk=pages)

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
        return self.block_table.shape[1] // self.pages_per_chunk

    def pages(self, req: jax.Array, chunk: jax.Array) -> jax.Array:
        """i32[P] the pages of a chunk."""
        return jax.lax.dynamic_slice(self.block_table, (req, chunk * self.pages_per_chunk), (1, self.pages_per_chunk))[
            0
        ]

    def take(
        self, pool: jax.Array, pages: jax.Array, decode: Callable[[jax.Array, str], jax.Array] = quant.decode
    ) -> jax.Array:
        """[P K S *] the decoded values of these pages."""
        spec = self.cache.spec
        return self._kv_heads_first(decode(by_token(gather_pages(pool, pages), spec), spec.dtype))

    def take_scales(self, pool: jax.Array | None, pages: jax.Array) -> jax.Array | None:
        """f32[P K S] token scales of these pages."""
        return None if pool is None else self._kv_heads_first(gather_pages(pool, pages))

    def read(self, req: jax.Array, chunk: jax.Array) -> KVChunk:
        """Chunk number `chunk` of request `req`."""
        pages, c = self.pages(req, chunk), self.cache
        return KVChunk(
            k=self.take(c.k, pages),
            v=self.take(c.v, pages),
            k_scale=self.take_scales(c.k_token_scale, pages),
            v_scale=self.take_scales(c.v_token_scale, pages),
        )

    def _kv_heads_first(self, pages: jax.Array) -> jax.Array:
        return pages if self.cache.spec.heads_first else jnp.swapaxes(pages, 1, 2)


@pytree
class PackedKeys:
    """Keys packed by request: request r owns rows start[r] .. start[r] + seq_lens[r] - 1."""

    k: jax.Array  # [Tk + padding K D]
    v: jax.Array  # [Tk + padding K V]
    start: jax.Array  # i32[R]
    dtype: str = static()  # of the values; k and v may be stored as their bit patterns, as in a cache
    padding: int = static(default=0)  # rows of padding
    chunk_tokens: int = static(default=1)
    max_len: int | None = static(default=None)  # the most keys of a request; None: all rows

    @classmethod
    def of(cls, k: jax.Array, v: jax.Array, seq_lens: jax.Array, max_len: int | None = None) -> "PackedKeys":
        """k [Tk K D], v [Tk K V] packed by seq_lens i32[R], each at most max_len, in chunks of one key."""
        start = (jnp.cumsum(seq_lens) - seq_lens).astype(jnp.int32)
        return cls(k=k, v=v, start=start, dtype=k.dtype.name, max_len=max_len)

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def v_head_dim(self) -> int:
        return self.v.shape[2]

    @property
    def max_chunks(self) -> int:
        rows = self.k.shape[0] - self.padding
        return cdiv(max(rows if self.max_len is None else min(rows, self.max_len), 1), self.chunk_tokens)

    def in_chunks(self, tokens: int) -> "PackedKeys":
        """Pads k and v by a chunk: dynamic_slice would move a chunk that reaches past the end."""
        more = max(tokens - self.padding, 0)
        k, v = (jnp.pad(x, ((0, more), (0, 0), (0, 0))) if more else x for x in (self.k, self.v))
        return dataclasses.replace(self, k=k, v=v, padding=self.padding + more, chunk_tokens=tokens)

    def read(self, req: jax.Array, chunk: jax.Array) -> KVChunk:
        """Chunk number `chunk` of request `req`."""
        first = self.start[req] + chunk * self.chunk_tokens

        def rows(x):
            part = jax.lax.dynamic_slice_in_dim(x, first, self.chunk_tokens)
            return jnp.swapaxes(quant.decode(part, self.dtype), 0, 1)[None]

        return KVChunk(k=rows(self.k), v=rows(self.v), k_scale=None, v_scale=None)
