"""The keys and values of one piece, fetched ahead of use by the warps that compute with them.

Keys and values have `stages` buffers each. Block i of keys is copied while blocks i - stages .. i - 1 are computed. The
groups of copies are, in order, K0 V0 K1 V1 .., so that after 2 (stages - 1) later groups a block is known to be there:

    start      K0, V0, .., V[s-2], K[s-1]
    block j    wait for K[j]; copy V[j+s-1]; scores; wait for V[j]; copy K[j+s]; weighted values

With one stage this is FlashAttention-2's order. A block past the piece's end is an empty group.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import copies_sm80 as copies
from pallas_kernels.gpu import work_list as wl
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.config_sm80 import WarpKernelConfig
from pallas_kernels.gpu.pieces_sm90 import HEAD, Piece, Refs


@dataclasses.dataclass(frozen=True)
class BlockReader:
    """Copies the blocks of a piece. warps: how many wait for each other, 1 or 4."""

    cfg: WarpKernelConfig
    refs: Refs
    piece: Piece
    warps: int

    @property
    def first_key(self):
        return (self.piece[wl.BLK0] + self.piece.lo) * self.cfg.block_kv

    def slot(self, i):
        return lax.rem(i, jnp.int32(self.cfg.stages)) if self.cfg.stages > 1 else jnp.int32(0)

    def _where(self, i):
        return self.first_key + i * self.cfg.block_kv, self.piece[wl.KSTART], self.piece[wl.KSTOP]

    def ids(self, i):
        """The page numbers of block i."""
        columns = self.refs.block_table.shape[1]
        kind = dict(block=self.cfg.block_kv, page=self.cfg.page_size, columns=columns)
        return copies.page_ids(self.refs.block_table, self.piece[wl.REQ], *self._where(i), **kind)

    def _copy(self, pool, tile, dim, i, ids):
        cfg = self.cfg
        kind = dict(block=cfg.block_kv, page=cfg.page_size, dim=dim, dtype=cfg.kv_dtype)
        kind |= dict(heads=cfg.num_kv_heads, heads_first=cfg.layout == "HND")

        @when(i < self.piece.count)
        def _():
            copies.copy_block(pool, tile.at[self.slot(i)], ids, self.piece[HEAD], *self._where(i), **kind)

        copies.commit()

    def copy_keys(self, i, ids):
        self._copy(self.refs.k, self.refs.k_tile, self.cfg.head_dim, i, ids)

    def copy_values(self, i, ids):
        self._copy(self.refs.v, self.refs.v_tile, self.cfg.v_head_dim, i, ids)

    def wait(self):
        copies.wait_for_copies(2 * (self.cfg.stages - 1), self.warps)

    def start(self):
        """Copies the first blocks; returns what `step` carries: the page numbers of the next values and keys."""
        stages = self.cfg.stages
        ids = [self.ids(jnp.int32(i)) for i in range(stages + 1)]
        for i in range(stages):
            self.copy_keys(jnp.int32(i), ids[i])
            if i < stages - 1:
                self.copy_values(jnp.int32(i), ids[i])
        return ids[-2], ids[-1]

    def keys(self, j, ids):
        """Waits for block j's keys; copies further values."""
        self.wait()
        self.copy_values(j + self.cfg.stages - 1, ids[0])

    def values(self, j, ids):
        """Waits for block j's values; copies further keys. Returns the next `ids`."""
        self.wait()
        self.copy_keys(j + self.cfg.stages, ids[1])
        return ids[1], self.ids(j + self.cfg.stages + 1)
