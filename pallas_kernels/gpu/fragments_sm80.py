"""The numbers in the registers of a WGMMA fragment, as Python lists, inside inline_mgpu; and fragments of such lists.

A fragment of 8 columns is the result of one mma.m16n8k16 of each warp: thread (g = lane / 4, t = lane % 4) holds four
numbers of it, here a quad: row g, columns 2t and 2t + 1, then the same columns of row g + 8. Some fragments only carry
registers from one function to the next: fragment_of_floats and floats_of keep their order, whatever it means.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.config import WARPGROUP_ROWS

WGMMA = plgpu.Layout.WGMMA


def fragment_of_quads(quads):
    """A fragment f32 [64, 8 n] of n quads of floats, one for each 8 columns."""
    fragment = rows.empty_fragment((WARPGROUP_ROWS, 8 * len(quads)), WGMMA)
    places = list(rows.pair_places(fragment))

    def read(i):
        second, column = places[i]
        return quads[column // 8][2 * second :][:2]

    rows.fill(fragment, read)
    return fragment


def quads_of(fragment):
    """The inverse of fragment_of_quads."""
    quads = [[None] * 4 for _ in range(fragment.shape[1] // 8)]
    for (second, column), pair in zip(rows.pair_places(fragment), list(fragment.registers.flat), strict=True):
        quads[column // 8][2 * second : 2 * second + 2] = [rows.pair_element(pair, k) for k in range(2)]
    return quads


def word_pairs_of(fragment):
    """Of a 16-bit fragment, two words for each 8 columns: columns 2t and 2t + 1 of row g, then of row g + 8."""
    words = [[None] * 2 for _ in range(fragment.shape[1] // 8)]
    for (second, column), pair in zip(rows.pair_places(fragment), list(fragment.registers.flat), strict=True):
        words[column // 8][second] = utils.bitcast(pair, ptx.int_type())
    return words


def fragment_of_floats(shape, values):
    """A fragment f32 whose registers are pairs of these floats, in their order."""
    fragment = rows.empty_fragment(shape, WGMMA)
    assert 2 * fragment.registers.size == len(values), (fragment.registers.size, len(values))
    rows.fill(fragment, lambda i: values[2 * i : 2 * i + 2])
    return fragment


def floats_of(fragment):
    """The floats of a fragment in the order of its registers."""
    return [rows.pair_element(pair, k) for pair in fragment.registers.flat for k in range(2)]


def words_of(fragment):
    """The words of a 16-bit fragment in the order of its registers."""
    return [utils.bitcast(register, ptx.int_type()) for register in fragment.registers.flat]
