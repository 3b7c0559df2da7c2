"""Ring: stages of shared memory that one warpgroup of a kernel fills by TMA and another empties, by mbarriers."""

import dataclasses

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import launch_context, utils

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows

FULL, FREE = 0, 1  # the kinds of mbarrier of a stage
DTYPE = jnp.dtype(jnp.bfloat16)


def block_transforms(block: tuple[int, int]):
    """The layout in shared memory of a stage [rows, columns]."""
    return rows.tile_transforms(block[1], DTYPE)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages of shared memory that one warpgroup fills and another empties."""

    stages: int
    bytes: int  # of a stage
    arrivals: int  # at `free`
    first: int  # place of its mbarriers: first .. first + 2 stages

    def place(self, barriers, number, kind: int):
        """Address of the mbarrier FULL or FREE of block `number`'s stage."""
        stage = arith.remui(number, ptx.i32(self.stages))
        return ptx.add(ptx.pointer(barriers, 3), ptx.mul(stage, 8), ptx.i32(8 * (self.first + self.stages * kind)))

    def initial(self) -> str:
        """PTX for one thread, if p is true: initialises all mbarriers, from the address $0 on."""
        text = ""
        for stage in range(self.stages):
            full, free = (8 * (self.first + stage + kind * self.stages) for kind in (FULL, FREE))
            text += f"@p mbarrier.init.shared.b64 [$0+{full}], 1; "
            text += f"@p mbarrier.init.shared.b64 [$0+{free}], {self.arrivals}; "
        return text

    def wait(self, barriers, number, kind: int, one_warp: bool = False):
        """Waits until the stage of block `number` is FULL, or FREE of the block that it held before.

        one_warp: only the warp waits that loads. Nothing would hold back the other three; if one were late by a whole
        turn of the ring, the barrier's parity would be that of its phase again, and it could wait for ever.
        """

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
        def wait(ctx, barriers, number):
            number = ptx.scalar_value(number)
            turn = arith.divui(number, ptx.i32(self.stages))
            parity = arith.andi(ptx.add(turn, ptx.i32(kind)), ptx.i32(1))
            spin = "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra AGAIN;"
            place = self.place(barriers, number, kind)
            if one_warp:
                text = "{ .reg .pred p; setp.gt.u32 p, $2, 31; @p bra DONE; " + spin + " DONE: }"
                ptx.asm(text, "r,r,r", place, parity, ptx.thread_index())
            else:
                ptx.asm("{ .reg .pred p; " + spin + " }", "r,r", place, parity)

        wait(barriers, number)

    def free(self, barriers, number):
        """Says that this warp has used the stage of block `number`."""

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
        def free(ctx, barriers, number):
            _, _, lane, _ = ptx.lane_position()
            text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.arrive.shared.b64 _, [$0]; }"
            ptx.asm(text, "r,r", self.place(barriers, ptx.scalar_value(number), FREE), lane)

        free(barriers, number)

    def copy(self, source, tile, barriers, number, start: tuple, block: tuple[int, int]):
        """One TMA copy of a block of a GMEM array [rows, columns] from `start` on to the stage of block `number`.

        Plain copy_gmem_to_smem lets all 128 threads arrive at the barrier, once for each copy.
        """
        scalars = (number, *start)
        kinds = (plgpu.RefType(), plgpu.RefType(block_transforms(block)), plgpu.RefType())

        @plgpu.inline_mgpu(arg_types=(*kinds, *(ptx.SCALAR,) * len(scalars)))
        def copy(ctx, source, tile, barriers, *scalars):
            number, *corner = map(ptx.scalar_value, scalars)
            place = self.place(barriers, number, FULL)
            text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p mbarrier.arrive.expect_tx.shared.b64 _, [$0], $2; }"
            ptx.asm(text, "r,r,r", place, ptx.thread_index(), ptx.i32(self.bytes))
            stage = arith.remui(number, ptx.i32(self.stages))
            as_index = lambda value: arith.index_cast(ir.IndexType.get(), value)
            target = utils.memref_slice(tile, (as_index(stage),))
            ctx.async_copy(
                src_ref=source,
                dst_ref=target,
                gmem_slice=tuple(
                    utils.DynamicSlice(as_index(at), size) for at, size in zip(corner, block, strict=True)
                ),
                gmem_transform=(launch_context.TileTransform((8, rows.swizzle_columns(block[1], DTYPE))),),
                barrier=utils.BarrierRef(ptx.raw_pointer(barriers, 3), ptx.add(stage, ptx.i32(self.first)), None, 1),
                swizzle=rows.swizzle_bytes(block[1], DTYPE),
                arrive=False,
                predicate=utils.single_thread_predicate(utils.ThreadSubset.WARPGROUP),
            )

        copy(source, tile, barriers, *scalars)
