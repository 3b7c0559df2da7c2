"""Tokens of a product of layer_tail_sm90.py that its token warpgroup computes itself, where TMA would load them.

A turn fills some neighbouring stages of the ring of tokens. A thread has the same 4 columns of all tokens.
"""

import dataclasses
from collections.abc import Callable

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.branch import when
from pallas_kernels.gpu.layer_tail_config import BLOCK, THREADS, LayerTailConfig
from pallas_kernels.gpu.stage_ring_sm90 import DTYPE, FREE, FULL, Ring, block_transforms


@dataclasses.dataclass(frozen=True)
class TokenTile:
    """The tokens of one product."""

    cfg: LayerTailConfig
    product: int

    @property
    def each(self) -> int:
        """Stages of a turn."""
        blocks = self.cfg.products[self.product].blocks
        return next(n for n in (4, 3, 2, 1) if blocks % n == 0 and n <= self.cfg.token_stages)

    @property
    def type(self):
        return plgpu.RefType(block_transforms((self.cfg.rows8, BLOCK)))

    def each_turn(self, refs, ring: Ring, share, before, fill: Callable) -> None:
        """fill(number of a turn's first stage, its first column) of this share of the inner dimension, tokens zero."""
        product = self.cfg.products[self.product]
        self._meet()

        def turn(i, carry):
            number, column = before + i * self.each, (share * product.blocks + i * self.each) * BLOCK
            for n in range(self.each):

                @when(number + n >= ring.stages)
                def _(n=n):
                    ring.wait(refs.barriers, number + n, FREE)

            self.zero(refs.x_tile, number)
            fill(number, column)
            self._tell(ring, refs.barriers, number)
            return carry

        lax.fori_loop(0, product.blocks // self.each, turn, jnp.int32(0))

    def _meet(self):
        """The warps that do not load by TMA were ahead of the one that does: see Ring.wait."""

        @plgpu.inline_mgpu()
        def meet(ctx):
            ptx.asm(f"bar.sync 11, {THREADS};", "")

        meet()

    def four(self):
        """(the thread's four of columns in a turn, bool: has it any)."""
        fours = self.each * BLOCK // 4
        thread = ptx.thread_index()
        return arith.remui(thread, ptx.i32(fours)), ptx.less(thread, ptx.i32(fours))

    def put(self, tile, number, row, words):
        """Two words, the thread's columns of a token, in a turn that begins with stage `number`."""
        four, is_used = self.four()
        block, inside = arith.divui(four, ptx.i32(BLOCK // 4)), arith.remui(four, ptx.i32(BLOCK // 4))
        stage = arith.remui(ptx.add(number, block), ptx.i32(self.cfg.token_stages))
        place = ptx.add(ptx.pointer(tile, 3), ptx.mul(stage, self.cfg.token_bytes))
        swizzle = rows.swizzle_bytes(BLOCK, DTYPE)
        place = ptx.add(place, ptx.swizzled(row, ptx.mul(inside, 8), 2 * BLOCK, swizzle))
        ptx.store_if(place, ptx.bool_to_i32(is_used), *words, space="shared")

    def zero(self, tile, number):
        """Zeros in all rows of a turn's stages: padding tokens stay so."""

        @plgpu.inline_mgpu(arg_types=(self.type, ptx.SCALAR))
        def zero(ctx, tile, number):
            for row in range(self.cfg.rows8):
                self.put(tile, ptx.scalar_value(number), ptx.i32(row), [ptx.i32(0)] * 2)

        zero(tile, number)

    def _tell(self, ring: Ring, barriers, number):
        """The stages of a turn are full."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
        def tell(ctx, barriers, number):
            ptx.asm("fence.proxy.async.shared::cta;", "")
            ptx.asm(f"bar.sync 11, {THREADS};", "")
            text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.arrive.shared.b64 _, [$0]; }"
            for n in range(self.each):
                place = ring.place(barriers, ptx.add(ptx.scalar_value(number), ptx.i32(n)), FULL)
                ptx.asm(text, "r,r", place, ptx.thread_index())

        tell(barriers, number)
