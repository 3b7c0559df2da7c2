"""The gated product of layer_tail_sm90.py by pairs of CTAs, each with half of the inner dimension of a strip.

With few strips (a rank of four or eight has 3584 or 1792 columns of an MLP of 14336) most SMs would have none, and one
reads 50 GB/s at most. A pair is a cluster. A thread of one CTA has sums of the same columns and tokens as that of the
same number in the other:

    columns 16 w + g       finished by CTA 0 of the pair, which adds what the other has sent to its shared memory
    columns 16 w + g + 8   by CTA 1

w: the warp; g: the lane / 4. Each CTA waits for all threads of the other, so neither ends before the last store to its
memory. It does so once a launch: the mbarrier has one phase, of parity 0.
"""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu.gates import GELU_TANH
from pallas_kernels.gpu.layer_tail_biases_sm90 import of_column
from pallas_kernels.gpu.layer_tail_config import PIECE, THREADS, LayerTailConfig
from pallas_kernels.gpu.ptx_sm90 import of_peer
from pallas_kernels.gpu.token_share_sm90 import plus

_WGMMA = plgpu.Layout.WGMMA
_FOUR = 16  # bytes that a thread sends of two tokens: their sums of gate and of up


def grid(cfg: LayerTailConfig) -> dict:
    """Arguments of plgpu.Mesh."""
    if not cfg.in_pairs:
        return dict(grid=(cfg.ctas,), grid_names=("cta",))
    return dict(grid=(cfg.ctas // 2,), grid_names=("pair",), cluster=(2,), cluster_names=("half",))


def number(cfg: LayerTailConfig):
    """i32: the number of this CTA."""
    return lax.axis_index("pair") * 2 + lax.axis_index("half") if cfg.in_pairs else lax.axis_index("cta")


def initial(cfg: LayerTailConfig) -> str:
    """PTX for one thread, if p is true: initialises the pair's mbarrier. All mbarriers begin at the address $0."""
    return f"@p mbarrier.init.shared.b64 [$0+{8 * cfg.ring_barriers}], {THREADS}; " if cfg.in_pairs else ""


def store(cfg: LayerTailConfig, refs, gate, up, factors, first_column):
    """h = activation(gate) * up of this CTA's columns.

    gate, up: f32 (64 columns, T8 tokens) of its half of the inner dimension; `factors` multiply those of both halves;
    None: 1.
    """
    given, width, biases = (refs.h, refs.received, refs.barriers), cfg.products[1].widths[0], refs.biases[1]
    multiply = [] if factors is None else [factors]
    types = (*(plgpu.RefType(),) * len(given), *(_WGMMA,) * 2, *(ptx.SCALAR,) * 2, *(_WGMMA,) * len(multiply))

    @plgpu.inline_mgpu(arg_types=(*types, *(plgpu.RefType(),) * len(biases)))
    def exchange(ctx, h, received, barriers, gate, up, first_column, half, *rest):
        factors, biases = rest[: len(multiply)], rest[len(multiply) :]
        half, first_column = ptx.scalar_value(half), ptx.scalar_value(first_column)
        here = ptx.add(ptx.pointer(received, 3), ptx.mul(ptx.thread_index(), _FOUR))
        barrier = ptx.add(ptx.pointer(barriers, 3), ptx.i32(8 * cfg.ring_barriers))
        own, others = _by_half(gate, up, half)
        _send(here, barrier, half, others)
        text = (
            "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], 0;"
            " @!p bra AGAIN; }"
        )
        ptx.asm(text, "r", barrier)
        g, t, _, warp = ptx.lane_position()
        first = ptx.add(first_column, ptx.mul(warp, 16), ptx.mul(half, 8))
        column = ptx.add(first, ptx.mul(t, 2))  # of a word that is stored, after the transposition
        numbers = [of_column(bias, ptx.add(first, g)) for bias in biases]  # of gate and of up, before it
        added = [number for number in numbers for _ in range(2)]  # the two tokens of a four
        place = arith.addi(arith.muli(ptx.to_i64(g), ptx.i64(width)), ptx.to_i64(column))
        base = arith.addi(ptx.pointer(h, 0), arith.muli(place, ptx.i64(2)))
        scales = {
            token: pair for f in factors for (_, token), pair in zip(rows.pair_places(f), f.registers.flat, strict=True)
        }
        for i, (token, four) in enumerate(own.items()):
            text = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
            came = ptx.asm_values(text, "=f,=f,=f,=f,r", 4, ptx.add(here, ptx.i32(i * THREADS * _FOUR)))
            sums = [arith.addf(a, b) for a, b in zip(four, came, strict=True)]
            if factors:
                scale = [rows.pair_element(scales[token], k) for k in (0, 1, 0, 1)]
                sums = [arith.mulf(y, s) for y, s in zip(sums, scale, strict=True)]
            sums = plus(sums, 1.0, added) if biases else sums
            word = ptx.pack_16bit(*(_gated(cfg, *sums[k::2]) for k in range(2)), "bfloat16")
            word = ptx.transpose_8x8(word)  # a column of two tokens -> two columns of a token
            ptx.asm(f"st.global.b32 [$0+{2 * token * width}], $1;", "l,r", base, word)

    exchange(*given, gate, up, first_column, lax.axis_index("half"), *multiply, *biases)


def _by_half(gate, up, half):
    """(own, others): token -> [gate of it, gate of the next token, up of it, of the next], of the columns of each CTA.

    The tokens are those of lane 0 of four: lane t has the tokens 2 t further on.
    """
    own, others = {}, {}
    fragments = [dict(zip(rows.pair_places(x), x.registers.flat, strict=True)) for x in (gate, up)]
    is_first = ptx.equal(half, ptx.i32(0))
    for second, token in fragments[0]:
        if second == 0:
            low, high = ([rows.pair_element(x[row, token], k) for x in fragments for k in range(2)] for row in range(2))
            own[token] = [arith.select(is_first, a, b) for a, b in zip(low, high, strict=True)]
            others[token] = [arith.select(is_first, b, a) for a, b in zip(low, high, strict=True)]
    return own, others


def _send(here, barrier, half, fours) -> None:
    """Stores fours in the other CTA's memory and arrives at its mbarrier. here, barrier: the places in this CTA's."""
    other = arith.subi(ptx.i32(1), half)
    target = of_peer(here, other)
    for i, four in enumerate(fours.values()):
        text = f"st.shared::cluster.v4.f32 [$0+{i * THREADS * _FOUR}], {{$1, $2, $3, $4}};"
        ptx.asm(text, "r,f,f,f,f", target, *four)
    ptx.asm("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", "r", of_peer(barrier, other))


def _gated(cfg: LayerTailConfig, gate, up):
    """activation(gate) * up"""
    factor = ptx.f32(-math.log2(math.e))
    if cfg.activation == "gelu_tanh":
        a, b = map(ptx.f32, GELU_TANH)
        factor = ptx.fma(b, arith.mulf(gate, gate), a)
    shrunk = ptx.exp2(arith.mulf(gate, factor))
    return arith.mulf(ptx.divide(gate, arith.addf(shrunk, ptx.f32(1.0))), up)


def received_floats(cfg: LayerTailConfig) -> int:
    """f32 in shared memory in which a CTA receives sums."""
    return PIECE // 2 * cfg.rows8 * 2
