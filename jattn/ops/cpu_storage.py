"""Forms of keys and queries that XLA's CPU compiler is fast with; the numbers are those of `jattn.ops.keys`.

    bit patterns    bf16 and fp8 packed keys and queries enter a loop as unsigned integers (see algebra.quant)
    bf16 as stored  keys beside bf16 queries are not widened: their products are exact in float32 either way, and a
                    core multiplies pairs of bf16 two to three times faster
    in place        few query rows multiply float32 keys where they lie in the pool, without a copy

Decided by measurement on Zen 5, with JAX 0.10 and 0.11.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.ops.keys import KeySource, KVChunk, PackedKeys, PagedKeys
from jattn.types import pytree, static
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.paging import page_ids

LANES = 8
"""Numbers of a vector as XLA's CPU compiler makes them (256 bits)."""
MOST_ROWS = 8
"""Each query row reads a page again. Above this many rows, re-reading the cache costs more than copying."""
SMALLEST_PAGE = 64
"""Keys. An operation a page is started on all threads, which costs more than a smaller page takes."""


def for_cpu_loop(keys: KeySource, q_dtype: str) -> "CpuKeySource":
    """The same keys, in the form that suits queries of this dtype in a CPU loop."""
    if isinstance(keys, PackedKeys):
        return dataclasses.replace(keys, k=bit_patterns(keys.k), v=bit_patterns(keys.v))
    if isinstance(keys, PagedKeys):
        return CpuPagedKeys(source=keys, keep_bfloat16=q_dtype == keys.cache.spec.dtype == "bfloat16")
    return keys


def in_place(keys: "CpuKeySource", query_rows: int) -> "CpuPagedKeys | None":
    """The same keys, multiplied where they lie by so many query rows a kv head; None where they are copied.

    Float32 only: other types would be widened once for each row; bf16 in place is level or 15 % slower.
    """
    if not isinstance(keys, CpuPagedKeys):
        return None
    c = keys.source.cache.spec
    fits = c.dtype == "float32" and c.physical_layout == "HND" and c.head_dim % LANES == 0
    pays = query_rows <= MOST_ROWS and c.block_size >= SMALLEST_PAGE
    return dataclasses.replace(keys, placed=True) if fits and pays else None


def bit_patterns(x: jax.Array) -> jax.Array:
    """bf16 and fp8 as the unsigned integers that hold them; everything else as it is."""
    return quant.encode(x, x.dtype.name, quant.storage_dtype(x.dtype.name, bits=True))


@pytree
class CpuPagedKeys:
    """PagedKeys whose keys are read in another form."""

    source: PagedKeys
    keep_bfloat16: bool = static()
    placed: bool = static(default=False)  # keys are not copied

    @property
    def num_kv_heads(self) -> int:
        return self.source.num_kv_heads

    @property
    def v_head_dim(self) -> int:
        return self.source.v_head_dim

    @property
    def chunk_tokens(self) -> int:
        return self.source.chunk_tokens

    @property
    def max_chunks(self) -> int:
        return self.source.max_chunks

    def in_chunks(self, tokens: int) -> "CpuPagedKeys":
        return dataclasses.replace(self, source=self.source.in_chunks(tokens))

    def read(self, req: jax.Array, chunk: jax.Array) -> "KVChunk | PlacedChunk":
        """Chunk number `chunk` of request `req`."""
        source, c = self.source, self.source.cache
        pages = source.pages(req, chunk)
        if self.placed:
            return PlacedChunk(pool=c.k, pages=pages, v=source.take(c.v, pages))
        return KVChunk(
            k=source.take(c.k, pages, quant.native if self.keep_bfloat16 else quant.decode),
            v=source.take(c.v, pages),
            k_scale=source.take_scales(c.k_token_scale, pages),
            v_scale=source.take_scales(c.v_token_scale, pages),
        )


@pytree
class PlacedChunk:
    """One chunk whose float32 keys stay in the pool, named by the pages that hold them.

    A copy of a chunk costs as much as reading it, and XLA multiplies the copy on one core. An elementwise operation on
    both has neither: with the dimension cut into D / 8 vectors of LANES numbers,

        partial[k s m :] = sum over j of pool[page k s 8j:8j+8] * q[k m 8j:8j+8]     one operation a page, no copy
        dots[k s m]      = partial . ones                                            a product, which nothing fuses with
    """

    pool: jax.Array  # f32[N K S D]
    pages: jax.Array  # i32[P] any number: ids that are out of range read some page, which the mask hides
    v: jax.Array  # f32[P K S V]

    def zero_outside_range(self, inside: jax.Array) -> "PlacedChunk":
        """Zeros in place of values that are not inside bool[C]; the mask hides what keys out of range give."""
        keep = inside.reshape(self.v.shape[0], 1, self.v.shape[2], 1)
        return dataclasses.replace(self, v=jnp.where(keep, self.v, 0.0))

    def dots(self, q: jax.Array) -> jax.Array:
        """q f32[K M D] . keys -> f32[K M P*S]."""
        pages = page_ids(self.pool, self.pages)
        dots = jnp.stack([self._page(page, q) for page in pages], axis=1)  # [K P S M]
        return dots.reshape(q.shape[0], -1, q.shape[1]).transpose(0, 2, 1)

    def _page(self, page: jax.Array, q: jax.Array) -> jax.Array:
        """f32[K S M]. Every vector of a row is a slice of the pool of its own: only then does XLA find its address once
        an operation and not once a number, which keeps it from making vectors."""
        num_kv, rows, dim = q.shape
        slots = self.pool.shape[2]

        def product(first: int):
            part = jax.lax.dynamic_slice(self.pool, (page, 0, 0, first), (1, num_kv, slots, LANES))[0]
            return part[:, :, None] * q[:, None, :, first : first + LANES]

        partial = product(0)
        for first in range(LANES, dim, LANES):
            partial = partial + product(first)
        return (partial.reshape(-1, LANES) @ jnp.ones(LANES)).reshape(num_kv, slots, rows)


CpuKeySource = KeySource | CpuPagedKeys
"""What the loop reads: CpuPagedKeys may give a PlacedChunk."""
