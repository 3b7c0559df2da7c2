"""Warp-level products of 64 query rows, or of twice 64, with a block of keys and values, in PTX.

Warp w computes rows 16 w .. 16 w + 15 of each 64 with mma.m16n8k16:

    S [16 rows, 8 keys]      = Q [16, D] . K^T [D, 8]          Q, K: ldmatrix
    O [16 rows, 8 columns]  += P [16, 16 keys] . V [16, 8]     P: registers of S; V: ldmatrix.trans

S, P and O are ordinary WGMMA fragments, so that the algebra of tiles_sm90.py works on them. Two halves of a tile share
each load of keys and values.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.config import WARPGROUP_ROWS
from pallas_kernels.gpu.fragments_sm80 import fragment_of_quads, quads_of, word_pairs_of

_WGMMA = plgpu.Layout.WGMMA


def _lane_row(lane, place: int):
    """Row of 16 whose address a lane gives to ldmatrix. place: the bit of the lane that chooses the second 8 rows."""
    second = ptx.bit(lane, place)
    return arith.addi(arith.remui(lane, ptx.i32(8)), arith.muli(second, ptx.i32(8)))


def _lane_byte(lane, place: int):
    """Where in the row a lane's 8 columns of 16 begin: byte 0 or 16. place: the bit of the lane that chooses."""
    return arith.muli(ptx.bit(lane, place), ptx.i32(16))


class _Tile:
    """ldmatrix of 16 x 16 parts of a swizzled SMEM tile [n, dim] of 16 bits, with few instructions for addresses.

    Within a piece (see ptx.swizzled) a part's first column only changes bits that the row's swizzle has mixed: an xor.
    Further pieces, and rows in steps of 8, add a constant, which is part of the instruction.
    """

    def __init__(self, base, row, byte, dim: int, dtype: str):
        """row, byte: what this lane addresses of the part at row 0, column 0."""
        self.row_bytes, self.swizzle = 2 * dim, rows.swizzle_bytes(dim, dtype)
        self.first = arith.addi(base, ptx.swizzled(row, byte, self.row_bytes, self.swizzle))

    def columns(self, part: int):
        """(address, offset) of columns 16 part .. 16 part + 15."""
        piece, byte = divmod(32 * part, self.swizzle)
        return arith.xori(self.first, ptx.i32(byte)) if byte else self.first, 8 * self.swizzle * piece

    def load(self, columns, row: int, transpose: bool = False):
        """Columns from `columns`, rows row .. row + 15; row is a multiple of 8."""
        place, offset = columns
        return ptx.ldmatrix(place, transpose, offset + row * self.row_bytes)


def queries_times_keys(q_ref, k_ref, *, halves: int, block: int, dim: int, dtype: str):
    """S f32 [64, block] of each half: SMEM tiles [halves, 64, D] and [block, D], both of 16 bits."""
    tile = plgpu.RefType(rows.tile_transforms(dim, dtype))
    shape = plgpu.ShapeDtypeStruct((WARPGROUP_ROWS, block), jnp.float32, _WGMMA)

    @plgpu.inline_mgpu(arg_types=(tile, tile), return_type=(shape,) * halves)
    def multiply(ctx, q_tile, k_tile):
        q_base, k_base = ptx.pointer(q_tile, 3), ptx.pointer(k_tile, 3)
        _, _, lane, warp = ptx.lane_position(hidden=True)
        own = arith.addi(arith.muli(warp, ptx.i32(16)), _lane_row(lane, 3))
        queries = _Tile(q_base, own, _lane_byte(lane, 4), dim, dtype)
        keys = _Tile(k_base, _lane_row(lane, 4), _lane_byte(lane, 3), dim, dtype)
        sums = [[[ptx.f32(0.0)] * 4 for _ in range(block // 8)] for _ in range(halves)]
        for step in range(dim // 16):
            own_columns, columns = queries.columns(step), keys.columns(step)
            left = [queries.load(own_columns, WARPGROUP_ROWS * half) for half in range(halves)]
            for pair in range(block // 16):
                right = keys.load(columns, 16 * pair)
                for n in range(2):
                    for half in range(halves):
                        old = sums[half][2 * pair + n]
                        sums[half][2 * pair + n] = ptx.mma(left[half], right[2 * n : 2 * n + 2], old, dtype)
        return tuple(fragment_of_quads(tiles) for tiles in sums)

    return multiply(q_ref, k_ref)


def add_weighted_values(accs, weights, v_ref, *, block: int, dim: int, dtype: str, ref_dim: int):
    """O + P V of each half: O f32 [64, V], P [64, block] and V SMEM [block, V] of 16 bits; dim is V.

    ref_dim: columns of v_ref, at least V. The memory at its start holds [block, V], as if it had V.
    """
    halves = len(accs)
    shape = plgpu.ShapeDtypeStruct((WARPGROUP_ROWS, dim), jnp.float32, _WGMMA)
    kinds = (plgpu.RefType(rows.tile_transforms(ref_dim, dtype)), *(_WGMMA,) * (2 * halves))

    @plgpu.inline_mgpu(arg_types=kinds, return_type=(shape,) * halves)
    def add(ctx, v_tile, *fragments):
        base, (_, _, lane, _) = ptx.pointer(v_tile, 3), ptx.lane_position(hidden=True)
        values = _Tile(base, _lane_row(lane, 3), _lane_byte(lane, 4), dim, dtype)
        columns = [values.columns(pair) for pair in range(dim // 16)]
        sums = [quads_of(fragment) for fragment in fragments[:halves]]
        p = [word_pairs_of(fragment) for fragment in fragments[halves:]]
        for group in range(block // 16):
            left = [(*words[2 * group], *words[2 * group + 1]) for words in p]
            for pair in range(dim // 16):
                right = values.load(columns[pair], 16 * group, transpose=True)
                for n in range(2):
                    for half in range(halves):
                        old = sums[half][2 * pair + n]
                        sums[half][2 * pair + n] = ptx.mma(left[half], right[2 * n : 2 * n + 2], old, dtype)
        return tuple(fragment_of_quads(tiles) for tiles in sums)

    return add(v_ref, *accs, *weights)


def exponentials(x, factor, top):
    """2 ** (x * factor - top): f32 [64, n], an f32 scalar and f32 (64,), number by number.

    Where a chip has arithmetic on pairs (WarpChip.pairs), LLVM would use it for the two numbers of a register pair, and
    the operands that it must pair for that take more registers than there are.
    """

    @plgpu.inline_mgpu(
        arg_types=(_WGMMA, ptx.SCALAR, _WGMMA.reduce(1)),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, _WGMMA),
    )
    def raise_two(ctx, x, factor, top):
        factor, out = ptx.scalar_value(factor), rows.empty_fragment(x.shape, _WGMMA)
        lower = [arith.negf(rows.register_value(r)) for r in top.registers.flat]
        places, flat = list(rows.pair_places(x)), list(x.registers.flat)

        def read(i):
            return [ptx.exp2(ptx.fma(rows.pair_element(flat[i], k), factor, lower[places[i][0]])) for k in range(2)]

        rows.fill(out, read)
        return out

    return raise_two(x, factor, top)


def rescaled(acc, alpha):
    """acc * alpha, f32 [64, V] and f32 (64,) of at most 1. A lane whose two rows have alpha 1 skips the products.

    As rows_sm90.scale_rows, without its vote.sync, which may be a call (lanes_sm80.py).
    """
    shape = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, _WGMMA)

    @plgpu.inline_mgpu(arg_types=(_WGMMA, _WGMMA.reduce(1)), return_type=shape)
    def rescale(ctx, acc, alpha):
        factors = [rows.register_value(r) for r in alpha.registers.flat]
        which = [second for second, _ in rows.pair_places(acc) for _ in range(2)]
        flat = [rows.pair_element(pair, k) for pair in acc.registers.flat for k in range(2)]
        count = len(flat)
        text = f"min.f32 y, ${count}, ${count + 1}; setp.lt.f32 p, y, 0f3F800000;"
        text += " @!p bra SAME; "
        text += " ".join(f"mul.f32 ${k}, ${k}, ${count + second};" for k, second in enumerate(which))
        constraints = ",".join(["=&f"] * count + ["f", "f"] + [str(k) for k in range(count)])
        flat = ptx.asm_values(f"{{ .reg .pred p; .reg .f32 y; {text} SAME: }}", constraints, count, *factors, *flat)
        out = rows.empty_fragment(acc.shape, _WGMMA)
        rows.fill(out, lambda i: flat[2 * i : 2 * i + 2])
        return out

    return rescale(acc, alpha)


def split_columns(x, width: int):
    """f32 [64, n] -> n / width fragments f32 [64, width], of the same registers; width is a multiple of 8."""
    shape = plgpu.ShapeDtypeStruct((WARPGROUP_ROWS, width), jnp.float32, _WGMMA)

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=(shape,) * (x.shape[1] // width))
    def split(ctx, x):
        tiles, step = quads_of(x), width // 8
        return tuple(fragment_of_quads(tiles[i : i + step]) for i in range(0, len(tiles), step))

    return split(x)


def join_columns(parts):
    """The inverse of split_columns."""
    shape = (WARPGROUP_ROWS, sum(part.shape[1] for part in parts))

    @plgpu.inline_mgpu(arg_types=(_WGMMA,) * len(parts), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _WGMMA))
    def join(ctx, *parts):
        return fragment_of_quads([tile for part in parts for tile in quads_of(part)])

    return join(*parts)


def unpaired(acc):
    """The registers of f32 [64, V], two numbers each, as registers of one: what a loop passes from step to step.

    Where a chip has arithmetic on pairs (WarpChip.pairs), LLVM would pass pairs, and copy all of them in each step.
    """
    size = acc.shape[0] * acc.shape[1]
    shape = plgpu.ShapeDtypeStruct((size,), jnp.float32, plgpu.Layout.WG_STRIDED((size,), vec_size=1))

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=shape)
    def take_apart(ctx, acc):
        out, flat = rows.empty_fragment(shape.shape, shape.layout), list(acc.registers.flat)
        rows.fill(out, lambda i: [rows.pair_element(flat[i // 2], i % 2)])
        return out

    return take_apart(acc)


def paired(numbers, dim: int):
    """The inverse of unpaired: f32 [64, dim]."""
    size, shape = numbers.shape[0], (WARPGROUP_ROWS, dim)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_STRIDED((size,), vec_size=1),),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _WGMMA),
    )
    def join(ctx, numbers):
        out, flat = rows.empty_fragment(shape, _WGMMA), list(numbers.registers.flat)
        rows.fill(out, lambda i: [rows.register_value(x) for x in flat[2 * i : 2 * i + 2]])
        return out

    return join(numbers)


def bfloat16_parts(p):
    """Two bfloat16 fragments whose sum is the f32 fragment `p` to 2^-16 of each number: its upper half, and the rest.

    They are cut and packed in pairs: a number converted alone would keep a register until its neighbour is converted.
    """
    shape = plgpu.ShapeDtypeStruct(p.shape, jnp.bfloat16, _WGMMA)

    @plgpu.inline_mgpu(arg_types=(_WGMMA,), return_type=(shape, shape))
    def split(ctx, p):
        words = [], []
        for pair in p.registers.flat:
            both = [rows.pair_element(pair, k) for k in range(2)]
            words[0].append(ptx.upper_halves(*both))
            words[1].append(ptx.pack_16bit(*(arith.subf(x, ptx.upper_half(x)) for x in both), "bfloat16"))
        element = utils.dtype_to_ir_type(jnp.dtype(jnp.bfloat16))
        return tuple(rows.fragment_of_words(p.shape, element, own) for own in words)

    return split(p)
