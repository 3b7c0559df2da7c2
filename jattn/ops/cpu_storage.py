"""Forms of keys and queries for which XLA's CPU compiler makes fast code. The values equal those of `jattn.ops.keys`.

    bit patterns    packed bf16 and fp8 keys and queries are passed to a loop as unsigned integers (see algebra.quant)
    bf16 as stored  bf16 keys for bf16 queries are not converted to float32: the products are exact in float32 in both
                    forms, and a core multiplies bf16 two to three times faster
    in place        for few query rows, float32 keys are multiplied in the pool, without a copy

Chosen by measurement on Zen 5, with JAX 0.10 and 0.11.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jattn.ops.keys import KeySource, KVChunk, PackedKeys, PagedKeys
from jattn.types import pytree, static
from pallas_kernels.algebra import quant
from pallas_kernels.algebra.paging import page_ids

LANES = 8
"""float32 values in a vector of XLA's CPU compiler (256 bits)."""
MAX_ROWS = 8
"""Each query row reads a page again. Above this many rows, reading it again costs more than a copy."""
MIN_PAGE = 64
"""Keys of a page. Each page is one operation, and to start it on all threads costs more than a smaller page takes."""


def for_cpu_loop(keys: KeySource, q_dtype: str) -> "CpuKeySource":
    """The same keys in the form that is fastest in a CPU loop with queries of this dtype."""
    if isinstance(keys, PackedKeys):
        return dataclasses.replace(keys, k=bit_patterns(keys.k), v=bit_patterns(keys.v))
    if isinstance(keys, PagedKeys):
        return CpuPagedKeys(source=keys, keep_bfloat16=q_dtype == keys.cache.spec.dtype == "bfloat16")
    return keys


def in_place(keys: "CpuKeySource", query_rows: int) -> "CpuPagedKeys | None":
    """The same keys, to be multiplied in place; None if a copy is faster. query_rows: of each kv head.

    float32 only: other dtypes would be converted once for each row. bf16 in place is as fast as a copy or 15 % slower.
    """
    if not isinstance(keys, CpuPagedKeys):
        return None
    c = keys.source.cache.spec
    fits = c.dtype == "float32" and c.physical_layout == "HND" and c.head_dim % LANES == 0
    pays = query_rows <= MAX_ROWS and c.block_size >= MIN_PAGE
    return dataclasses.replace(keys, placed=True) if fits and pays else None


def bit_patterns(x: jax.Array) -> jax.Array:
    """bf16 and fp8 as the unsigned integers that hold them; other dtypes unchanged."""
    return quant.encode(x, x.dtype.name, quant.storage_dtype(x.dtype.name, bits=True))


@pytree
class CpuPagedKeys:
    """PagedKeys that are read in the form that is fastest on a CPU."""

    source: PagedKeys
    keep_bfloat16: bool = static()  # k is not converted to float32
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
    """One chunk whose float32 keys remain in the pool; `pages` has their block ids.

    A copy of a chunk costs as much as reading it, and XLA multiplies the copy on one core. Elementwise operations need
    no copy and run on all cores. With D divided into D / 8 vectors of LANES values,

        partial[k s m :] = sum over j of pool[page k s 8j:8j+8] * q[k m 8j:8j+8]     one operation for each page
        dots[k s m]      = partial . ones                                            a product, which XLA does not fuse
    """

    pool: jax.Array  # f32[N K S D]
    pages: jax.Array  # i32[P] ids out of range read some page, whose keys the mask hides
    v: jax.Array  # f32[P K S V]

    def zero_outside_range(self, inside: jax.Array) -> "PlacedChunk":
        """Zeros for values where inside bool[C] is False. Keys are unchanged: the mask hides their logits."""
        keep = inside.reshape(self.v.shape[0], 1, self.v.shape[2], 1)
        return dataclasses.replace(self, v=jnp.where(keep, self.v, 0.0))

    def dots(self, q: jax.Array) -> jax.Array:
        """q f32[K M D] . keys -> f32[K M P*S]."""
        pages = page_ids(self.pool, self.pages)
        dots = jnp.stack([self._page(page, q) for page in pages], axis=1)  # [K P S M]
        return dots.reshape(q.shape[0], -1, q.shape[1]).transpose(0, 2, 1)

    def _page(self, page: jax.Array, q: jax.Array) -> jax.Array:
        """f32[K S M] of one page.

        Each vector is sliced from the pool by itself. XLA then computes an address once for each operation, not for
        each value, and can use vector instructions.
        """
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
