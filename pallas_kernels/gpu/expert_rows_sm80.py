"""The rows of each expert together and padded, from the experts that few tokens chose: one CTA.

XLA needs about ten launches for it, each of which waits for the one before: 15 us a layer.

    1  a warp has a group of 32 choices; the lanes whose choices are of one expert count one another
    2  for each expert: its choices before each group, and the number of its tiles
    3  for each expert: the number of tiles of the experts before it
    4  the row of each choice, after the rows of the experts, the groups and the lanes before it
"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.gpu import control_sm80 as control
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import words_sm80 as words

WARPGROUPS = 4
WARPS, THREADS = 4 * WARPGROUPS, 128 * WARPGROUPS
GROUP = 32  # choices of a warp, in each turn
MOST_COUNTS = 16384  # of an expert's choices in a group
MOST_EXPERTS = 2048  # all of which each thread reads
_LOAD = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, -1; @p ld.global.nc.b32 $0, [$1]; }"
_LOAD_SHARED = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.shared.b32 $0, [$1]; }"


def serves(choices: int, experts: int) -> bool:
    """Whether shared memory has room for a count of each expert in each group."""
    return choices > 0 and experts <= MOST_EXPERTS and cdiv(choices, GROUP) * experts <= MOST_COUNTS


@functools.partial(jax.jit, static_argnames=("experts", "tile_rows", "rows"))  # equal layers share one compiled kernel
def arrange(expert: jax.Array, experts: int, tile_rows: int, rows: int) -> tuple[jax.Array, ...]:
    """(choice i32[rows], row i32[choices], expert i32[rows], sizes i32[experts], tiles i32[1 + rows / tile_rows, 3]).

    expert i32[choices]: from 0 to `experts`, which is none of them. The rows of an expert lie together, in the order of
    the choices, padded to tiles; then the next expert's. The results: choice and expert of each row, 0 in padding;
    row of each choice, `rows` if its expert is none of these; tiles: how many tiles of `tile_rows` rows are used, three
    times, then for each tile its expert, the first tile of that expert and the number of its tiles, or zeros if it is
    not used.
    """
    choices, tiles = expert.shape[0], rows // tile_rows

    def arrange_experts(*refs):  # the kernel's name in a profile
        shared = [plgpu.SMEM((size,), jnp.int32) for size in shared_words(choices, experts)]
        pl.run_scoped(functools.partial(_warpgroup, experts, tile_rows, refs), *shared, collective_axes="wg")

    mesh = plgpu.Mesh(grid=(1,), grid_names=("cta",), num_threads=WARPGROUPS, thread_name="wg")
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    sizes = rows, choices, rows, experts, 3 * (1 + tiles)
    out = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]
    *found, flat = pl.kernel(arrange_experts, out_type=out, mesh=mesh, compiler_params=params)(expert.astype(jnp.int32))
    return *found, flat.reshape(1 + tiles, 3)


def shared_words(choices: int, experts: int) -> tuple[int, ...]:
    """Words for: the choices of each expert in each group, replaced by those in the groups before; the tiles of each
    expert, up to a multiple of 4 experts; the tiles of the experts before each."""
    return cdiv(choices, GROUP) * experts, cdiv(experts, 4) * 4, experts


def _warpgroup(experts: int, tile_rows: int, refs, *shared):
    """One warpgroup of the CTA."""
    sizes = tuple(ref.shape[0] for ref in refs)

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * (len(refs) + len(shared)), ptx.SCALAR))
    def find(ctx, *args):
        gmem, smem, wg = args[: len(refs)], args[len(refs) : -1], ptx.scalar_value(args[-1])
        thread = ptx.add(ptx.mul(wg, 128), ptx.thread_index())
        gmem, smem = [ptx.pointer(x, 0) for x in gmem], [ptx.pointer(x, 3) for x in smem]
        _arrange(experts, tile_rows, sizes, gmem, smem, thread)

    find(*refs, *shared, lax.axis_index("wg"))


def _arrange(experts: int, tile_rows: int, sizes, gmem, smem, thread):
    """One thread. gmem: the addresses of `expert` and the results, which have `sizes`; smem: those of shared_words."""
    choices, rows, groups = sizes[0], sizes[1], cdiv(sizes[0], GROUP)
    chosen, choice, row, expert, padded, tiles = gmem
    counts, of_experts, first = smem
    for target, size in ((choice, rows), (expert, rows), (tiles, sizes[5])):
        _clear(target, size, thread, words.store)
    for target, size in ((counts, groups * experts), (of_experts, cdiv(experts, 4) * 4)):
        _clear(target, size, thread, words.store_shared)
    words.barrier()
    own = [_count_group(experts, choices, chosen, counts, thread, turn) for turn in range(cdiv(groups, WARPS))]
    words.barrier()
    numbers = [ptx.add(thread, ptx.i32(i * THREADS)) for i in range(cdiv(experts, THREADS))]  # of the thread's experts
    for number in numbers:
        there = ptx.bool_to_i32(ptx.less(number, ptx.i32(experts)))
        total = _counts_before(experts, groups, words.shared_place(counts, number), there)
        used = arith.divui(ptx.add(total, ptx.i32(tile_rows - 1)), ptx.i32(tile_rows))
        words.store_shared(of_experts, number, there, used)
        words.store(padded, number, there, ptx.mul(used, tile_rows))
    words.barrier()
    for number in numbers:
        before, every = _tiles_before(experts, of_experts, number)
        there = ptx.bool_to_i32(ptx.less(number, ptx.i32(experts)))
        words.store_shared(first, number, there, before)
        is_first = ptx.bool_to_i32(ptx.equal(number, ptx.i32(0)))
        for i in range(3):
            words.store(tiles, ptx.i32(i), is_first, every)
    words.barrier()
    for each in own:
        _store_choice(tile_rows, rows, each, (choice, row, expert, tiles), (of_experts, first))


def _clear(target, size: int, thread, store):
    """Zeros to all words. store: words.store or words.store_shared."""

    def turn(i, carry):
        number = ptx.add(ptx.mul(i, THREADS), thread)
        store(target, number, ptx.bool_to_i32(ptx.less(number, ptx.i32(size))), ptx.i32(0))
        return carry

    control.loop(ptx.i32(cdiv(size, THREADS)), ptx.i32(0), turn)


class _Choice(NamedTuple):
    """A thread's choice in one turn, of which each warp has a group. i32 each."""

    number: object
    there: object  # 1 if there is such a choice
    expert: object
    kept: object  # 1 if its expert is one of these
    count_at: object  # the address of the expert's count in the group
    before: object  # choices of the same expert in the lanes before, of the group


def _count_group(experts: int, choices: int, chosen, counts, thread, turn: int) -> _Choice:
    """The thread's choice. Stores how often each expert has been chosen in the group."""
    lane, group = arith.remui(thread, ptx.i32(32)), ptx.add(arith.divui(thread, ptx.i32(32)), ptx.i32(turn * WARPS))
    number = ptx.add(ptx.mul(group, GROUP), lane)
    there = ptx.bool_to_i32(ptx.less(number, ptx.i32(choices)))
    expert = ptx.asm_value(_LOAD, "=&r,l,r", words.place(chosen, number), there)
    kept = ptx.bool_to_i32(ptx.less_unsigned(expert, ptx.i32(experts)))
    alike = ptx.asm_value("match.any.sync.b32 $0, $1, -1;", "=r,r", expert)
    before = words.ones(arith.andi(alike, words.lower_lanes(lane)))
    at = ptx.add(ptx.mul(group, experts), expert)
    is_first = arith.andi(kept, ptx.bool_to_i32(ptx.equal(before, ptx.i32(0))))
    words.store_shared(counts, at, is_first, words.ones(alike))
    return _Choice(number, there, expert, kept, words.shared_place(counts, at), before)


def _counts_before(experts: int, groups: int, at, there):
    """The choices of the expert whose counts begin at `at`; each count is replaced by the sum of those before."""

    def turn(i, total):
        place = ptx.add(at, ptx.mul(i, 4 * experts))
        count = ptx.asm_value(_LOAD_SHARED, "=&r,r,r", place, there)
        ptx.store_if(place, there, total, space="shared")
        return ptx.add(total, count)

    return control.loop(ptx.i32(groups), ptx.i32(0), turn)


def _tiles_before(experts: int, of_experts, number) -> tuple:
    """(number of tiles of the experts before this one, number of tiles of all)"""

    def turn(i, sums):
        before, every = sums
        text = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        four = ptx.asm_values(text, "=r,=r,=r,=r,r", 4, ptx.add(of_experts, ptx.mul(i, 16)))
        for k, tiles in enumerate(four):
            is_before = ptx.less(ptx.add(ptx.mul(i, 4), ptx.i32(k)), number)
            before = ptx.add(before, arith.select(is_before, tiles, ptx.i32(0)))
            every = ptx.add(every, tiles)
        return before, every

    return control.loop(ptx.i32(cdiv(experts, 4)), (ptx.i32(0), ptx.i32(0)), turn)


def _store_choice(tile_rows: int, rows: int, own: _Choice, gmem, smem):
    """Stores the row of a choice, what is in that row, and the row's tile if the row is the tile's first."""
    expert, kept = own.expert, own.kept
    choice, row, expert_of_row, tiles = gmem
    of_experts, first = smem
    load = lambda place: ptx.asm_value(_LOAD_SHARED, "=&r,r,r", place, kept)
    of_expert = lambda ref: load(words.shared_place(ref, expert))
    rank, first_tile, count = ptx.add(load(own.count_at), own.before), of_expert(first), of_expert(of_experts)
    found = ptx.add(ptx.mul(first_tile, tile_rows), rank)
    found = arith.select(ptx.equal(kept, ptx.i32(1)), found, ptx.i32(rows))
    words.store(row, own.number, own.there, found)
    words.store(choice, found, kept, own.number)
    words.store(expert_of_row, found, kept, expert)
    tile = arith.divui(rank, ptx.i32(tile_rows))
    starts = arith.andi(kept, ptx.bool_to_i32(ptx.equal(ptx.mul(tile, tile_rows), rank)))
    line = ptx.mul(ptx.add(first_tile, tile, ptx.i32(1)), 3)
    for i, value in enumerate((expert, first_tile, count)):
        words.store(tiles, ptx.add(line, ptx.i32(i)), starts, value)
