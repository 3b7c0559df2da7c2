"""The keys and values of one piece, fetched ahead of use by the warps that compute with them.

Keys and values have `stages` buffers each. Block i of keys is copied while blocks i - stages .. i - 1 are computed. The
groups of copies begin in the order K0 V0 K1 V1 .. and end in it, so that the next block to be used has arrived when at
most the 2 (s - 1) groups begun after it are under way; s stages:

    start      K0, V0, .., V[s-2], K[s-1]
    block j    wait for K[j]; copy V[j+s-1]; scores; wait for V[j]; copy K[j+s]; weighted values

With one stage this is FlashAttention-2's order. A block past the piece's end is an empty group.
"""

import dataclasses

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import copies_sm80 as copies
from pallas_kernels.gpu import work_columns as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config_sm80 import WarpKernelConfig
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, Refs
from pallas_kernels.gpu.token_scales_sm90 import load_per_key


@dataclasses.dataclass(frozen=True)
class BlockReader:
    """Copies the blocks of a piece. warps: 1 if a warp reads only the keys that it copied; 4 if it reads all keys."""

    cfg: WarpKernelConfig
    refs: Refs
    piece: Piece
    warps: int

    @property
    def first_key(self):
        return (self.piece[wl.BLK0] + self.piece.lo) * self.cfg.block_kv

    def slot(self, i):
        """The buffer of block i."""
        return lax.rem(i, jnp.int32(self.cfg.stages)) if self.cfg.stages > 1 else jnp.int32(0)

    def _pool_rows(self, i):
        """In registers: the rows of block i's keys in the pools. Keys that no row of the tile sees have none."""
        cfg, table, piece = self.cfg, self.refs.block_table, self.piece
        kind = dict(block=cfg.block_kv, page=cfg.page_size, columns=table.shape[1])
        kind |= dict(heads=cfg.num_kv_heads, heads_first=cfg.layout == "HND")
        where = (piece[wl.REQ], piece[HEAD], self.first_key + i * cfg.block_kv, piece[wl.KSTART], piece[wl.KSTOP])
        return copies.pool_rows(table, *where, **kind)

    def _row_list(self, i):
        """In shared memory: the same, from the copy of block i's keys to that of its values; then block i + 2's."""
        return self.refs.pool_rows.at[lax.rem(i, jnp.int32(2))]

    def _copy(self, pool, tile, dim, i, scales=()):
        block, row_list = self.cfg.block_kv, self._row_list(i)
        kind = dict(block=block, dim=dim, dtype=self.cfg.kv_dtype)

        @when(i < self.piece.count)
        def _():
            copies.copy_block(pool, tile.at[self.slot(i)], row_list, **kind)
            for n, scale in enumerate(scales):
                own = self.refs.token_scale.at[self.slot(i), pl.ds(n * block, block)]
                copies.copy_scales(scale, own, row_list, block=block)

        copies.commit()

    def _copy_keys(self, i):
        """Begins to copy block i's keys, and the scales of its tokens' keys and values."""
        scales = (self.refs.k_token_scale, self.refs.v_token_scale) if self.cfg.token_scales else ()
        self._copy(self.refs.k, self.refs.k_tile, self.cfg.head_dim, i, scales)

    def _copy_values(self, i):
        self._copy(self.refs.v, self.refs.v_tile, self.cfg.v_head_dim, i)

    def token_scales(self, slot, axis: int):
        """Scales (of keys, of values) of a block, or (None, None); between the two waits of the block."""
        if not self.cfg.token_scales:
            return None, None
        return load_per_key(self.refs.token_scale, slot, axis, self.cfg.block_kv)

    def _wait(self):
        """Until the next block of keys or values, in the order above, has arrived."""
        copies.wait_for_copies(2 * (self.cfg.stages - 1), self.warps)

    def start(self):
        """Begins to copy the first blocks. Returns the rows of block `stages`, which wait_for_values takes."""
        stages = self.cfg.stages
        rows = [self._pool_rows(jnp.int32(i)) for i in range(stages + 1)]
        for i in range(stages):
            copies.put_rows(self._row_list(jnp.int32(i)), rows[i], block=self.cfg.block_kv)
            copies.sync_lanes()
            self._copy_keys(jnp.int32(i))
            if i < stages - 1:
                self._copy_values(jnp.int32(i))
        return rows[-1]

    def wait_for_keys(self, j):
        """Waits for block j's keys; begins to copy the values of block j + stages - 1."""
        self._wait()
        self._copy_values(j + self.cfg.stages - 1)

    def wait_for_values(self, j, rows):
        """Waits for block j's values; begins to copy the keys of block j + stages, which are the pool's `rows`.

        Returns the rows of the block after that: they are read from the block table a step ahead of their use.
        """
        copies.put_rows(self._row_list(j + self.cfg.stages), rows, block=self.cfg.block_kv)
        self._wait()
        self._copy_keys(j + self.cfg.stages)
        return self._pool_rows(j + self.cfg.stages + 1)
