"""Biases of the products of layer_tail_sm90.py. A product has none, or one for each of its weights: GMEM [width]."""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.layer_tail_config import PIECE, LayerTailConfig
from pallas_kernels.gpu.token_share_sm90 import TokenShare, floats

_WGMMA = plgpu.Layout.WGMMA


def of_columns(cfg: LayerTailConfig, bias, first_column):
    """f32 (64 columns, T8 tokens): the bias of gate or up for each column."""
    shape = (PIECE, cfg.rows8)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ptx.SCALAR), return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, _WGMMA)
    )
    def load(ctx, bias, first_column):
        g, _, _, warp = ptx.lane_position()
        column = ptx.add(ptx.scalar_value(first_column), ptx.mul(warp, 16), g)
        last = ptx.i32(cfg.products[1].widths[0] - 1)  # a strip may go on after it
        columns = [arith.minsi(ptx.add(column, ptx.i32(8 * second)), last) for second in range(2)]
        numbers = [of_column(bias, column) for column in columns]
        fragment = rows.empty_fragment(shape, _WGMMA)
        seconds = [second for second, _ in rows.pair_places(fragment)]
        rows.fill(fragment, lambda i: [numbers[seconds[i]]] * 2)
        return fragment

    return load(bias, first_column)


def of_column(bias, column):
    """Inside inline_mgpu: f32, the bias of one column."""
    return ptx.float_of_bf16(ptx.asm_value("ld.global.nc.u16 $0, [$1];", "=r,l", _place(bias, column), pure=True), 0)


def of_share(share: TokenShare, biases, widths: tuple[int, ...]):
    """Inside inline_mgpu: the biases of each four columns of the share. widths: of the weights, side by side."""

    def place(quad):
        found, first = None, 0
        for bias, width in zip(biases, widths, strict=True):
            own = _place(bias, arith.subi(ptx.mul(quad, 4), ptx.i32(first)))
            found = own if found is None else arith.select(ptx.less(quad, ptx.i32(first // 4)), found, own)
            first += width
        return found

    return [floats(words) for words in share.words_at(place)]


def _place(bias, column):
    """The address of the bias of a column."""
    return arith.addi(ptx.pointer(bias, 0), arith.muli(ptx.to_i64(column), ptx.i64(2)))
