"""Dots of few query rows with float32 keys where they lie: a CPU's loop that multiplies a page out of the pool.

A copy of a chunk costs as much as reading it, and XLA multiplies the copy on one core. An elementwise operation on both
has neither: with the dimension cut into D / 8 vectors of LANES numbers,

    partial[k s m :] = sum over j of pool[page k s 8j:8j+8] * q[k m 8j:8j+8]       one operation a page, no copy
    dots[k s m]      = partial . ones                                              a product, which nothing fuses with
"""

import jax
import jax.numpy as jnp

from jattn.types import pytree
from pallas_kernels.algebra.paging import page_ids

LANES = 8
"""Numbers of a vector as XLA's CPU compiler makes them (256 bits)."""
MOST_ROWS = 8
"""Each query row reads a page again, out of a near cache: up to so many the memory is slower than that."""
SMALLEST_PAGE = 64
"""Keys. An operation a page is started on all threads, which a smaller one does not pay for."""


@pytree
class PlacedKeys:
    """The keys of one chunk, by the pages that hold them; strangers' keys are among them."""

    pool: jax.Array  # f32[N K S D]
    pages: jax.Array  # i32[P] any number: ids that are out of range read some page, which the mask hides

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
