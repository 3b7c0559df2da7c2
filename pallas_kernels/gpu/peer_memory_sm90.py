"""The memory of the other ranks (devices of a mesh, in one process), to which a kernel may write.

XLA tells a launch the addresses of arrays on the other ranks if it asks for them, but then has a barrier of all ranks
before it, which takes 8 us. So one launch a step asks for them and stores them in an array, the table, for the others.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx


def exchange(ranks: int, received: int, counters: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(received i32[received], counters i32[counters], table), the first two zeros. Call it on all ranks, in shard_map.

    A table has two i32 for each array's address on each rank, then the number of this rank, and a 0.

    Launches write to the first two, which XLA does not know: use them for nothing else, and copy none of them. Launches
    that share them must run one after the other on a device, as XLA runs them on its stream and, unless it is told to
    run what is independent at once (`xla_gpu_command_buffer_scheduling_mode`), in its CUDA graphs. XLA may merge two
    calls with equal sizes: then their callers share what they get.
    """

    def peer_addresses(*refs):  # the kernel's name in a profile
        *arrays, table = refs
        _tell(arrays, table, ranks)

    arrays = [jax.new_ref(jnp.zeros(size, jnp.int32)) for size in (received, counters)]
    out_type = jax.ShapeDtypeStruct((2 * len(arrays) * ranks + 2,), jnp.int32)
    mesh = plgpu.Mesh(grid=(1,), grid_names=("cta",), num_threads=1, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    call = pl.kernel(peer_addresses, out_type=out_type, mesh=mesh, compiler_params=params, name="peer_addresses")
    table = call(*arrays)
    return *map(jax.freeze, arrays), table


def _tell(refs, table, ranks: int):
    """One thread stores the table of the arrays `refs` on all ranks."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * (len(refs) + 1))
    def store(ctx, table, *refs):
        base, own = ptx.pointer(table, 0), ptx.equal(ptx.thread_index(), ptx.i32(0))
        first = ptx.bool_to_i32(own)
        for rank in range(ranks):
            for i, ref in enumerate(refs):
                place = arith.addi(base, ptx.i64(8 * (len(refs) * rank + i)))
                ptx.store_if(place, first, ptx.pointer(ctx.to_remote(ref, ptx.i32(rank)), 0), kind="b64")
        ptx.store_if(arith.addi(base, ptx.i64(8 * len(refs) * ranks)), first, ctx.device_id())

    store(table, *refs)


class Table:
    """A table, inside inline_mgpu of a later launch.

    arrays: this rank's addresses of the arrays that were told.
    """

    def __init__(self, table, arrays, ranks: int):
        self.ranks, self._base, self._count = ranks, ptx.pointer(table, 0), len(arrays)
        place = arith.addi(self._base, ptx.i64(8 * self._count * ranks))
        self.rank = ptx.asm_value("ld.global.b32 $0, [$1];", "=r,l", place)
        for i, array in enumerate(arrays):  # if XLA has moved it, other ranks would write elsewhere, and all would wait
            told = self.address(self.rank, i)
            ptx.asm("{ .reg .pred p; setp.ne.u64 p, $0, $1; @p trap; }", "l,l", array, told)

    def address(self, rank, array: int):
        """The address of an array on a rank, an int or i32."""
        rank = ptx.i32(rank) if isinstance(rank, int) else rank
        place = arith.addi(self._base, ptx.to_i64(ptx.mul(rank, 8 * self._count)))
        place = arith.addi(place, ptx.i64(8 * array))
        return ptx.asm("ld.global.b64 $0, [$1];", "=l,l", place, result=ir.IntegerType.get_signless(64))
