"""The rows of x of packed_product_sm90.py in shared memory, and a number of each run of inputs and row.

A run is what shares scales in a step. Its number, as f32, is

    a power   of two by which its sums are multiplied, where rows of bfloat16 become float16: a run's inputs are divided
              by it, so that the largest is just below 2 ** 15. float16 then holds every input above 2 ** -29 of it
              exactly
    a sum     of its inputs, where the numbers of codes are too large by an offset; times minus the offset where there
              are no zero points
"""

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import control_sm80 as control
from pallas_kernels.gpu import packed_codes_sm90 as codes
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.packed_product_config import BLOCK, COPIES, PackedProductConfig
from pallas_kernels.gpu.packed_sums_sm90 import load_words, place_of
from pallas_kernels.gpu.queries_sm90 import TOP, powers


def first_loads(cfg: PackedProductConfig, here, begin) -> list:
    """Loads the first pieces of x that the thread copies, before it asks for weights, which take longer to come.

    here: a _Strip of packed_product_sm90.py; begin: the first step of the CTA.
    """
    return _loads(cfg, here, begin, ptx.i32(0))


def copy(cfg: PackedProductConfig, here, base, begin, loaded: list) -> None:
    """The CTA's part of the rows of x to SMEM, [rows, row_bytes], and the numbers of its runs, [runs, tile_rows].

    Each thread copies some pieces of 8 inputs. Threads side by side find the number of a run. loaded: `first_loads`.
    """
    _store(cfg, base, loaded)
    turns = -(-_pieces_of_thread(cfg) // len(loaded))
    if turns > 1:

        def turn(k, carry):
            _store(cfg, base, _loads(cfg, here, begin, ptx.add(k, ptx.i32(1))))
            return carry

        control.loop(ptx.i32(turns - 1), ptx.i32(0), turn)


def _pieces_of_thread(cfg: PackedProductConfig) -> int:
    return -(-min(cfg.tile_rows, cfg.rows) * cfg.row_pieces // (128 * cfg.warpgroups))


def _loads(cfg: PackedProductConfig, here, begin, turn) -> list:
    """(row, piece, is there one?, words) of the pieces of a turn."""
    threads, some = 128 * cfg.warpgroups, min(_pieces_of_thread(cfg), COPIES)
    own, loaded = ptx.add(ptx.mul(here.wg, 128), ptx.thread_index()), []
    for i in range(some):
        number = ptx.add(own, ptx.mul(turn, some * threads), ptx.i32(i * threads))
        row, piece = ptx.divided(number, cfg.row_pieces)
        column = ptx.add(ptx.mul(begin, BLOCK * cfg.unroll), ptx.mul(piece, 8))
        is_used = arith.andi(ptx.less(row, here.count), ptx.less(column, ptx.i32(cfg.inner)))
        is_used, place = ptx.bool_to_i32(is_used), place_of(here.x, row, ptx.i32(cfg.inner), column, 2)
        loaded.append((row, piece, is_used, load_words(place, 4, is_used)))
    return loaded


def _store(cfg: PackedProductConfig, base, loaded: list) -> None:
    for row, piece, is_used, words in loaded:
        number = None
        if cfg.becomes_float16:
            words, number = _halves(cfg, words)
        elif cfg.has_offset:
            number = _sum_of_inputs(cfg, words)
        to = ptx.add(base, ptx.i32(cfg.row_start), ptx.mul(row, cfg.row_bytes), ptx.mul(piece, 16))
        ptx.store_if(to, is_used, *words, space="shared")
        if number is not None:
            _store_number(cfg, base, row, piece, is_used, number)


def _distances(cfg: PackedProductConfig) -> list[int]:
    """Between the lanes that exchange what they have of a run: 4 for each block, a power of two, at most 32."""
    return [2**i for i in range((4 * cfg.run).bit_length() - 1)]


def _halves(cfg: PackedProductConfig, words) -> tuple:
    """(the words of a piece as float16, the power of two that its run was divided by)"""
    top = ptx.largest_halves(words, _distances(cfg))
    top = arith.maxui(arith.shli(top, ptx.i32(16)), arith.andi(top, ptx.i32(0x7FFF0000)))
    factor, inverse = powers(top, TOP["float16"])
    pair = lambda word: [arith.mulf(ptx.float_of_bf16(word, half), factor) for half in range(2)]
    return [ptx.pack_16bit(*pair(word), "float16") for word in words], inverse


def _sum_of_inputs(cfg: PackedProductConfig, words):
    of_word = ptx.float_of_bf16 if cfg.x_dtype == "bfloat16" else ptx.float_of_f16
    floats = [of_word(word, half) for word in words for half in range(2)]
    while len(floats) > 1:
        floats = [arith.addf(floats[i], floats[i + 1]) for i in range(0, len(floats), 2)]
    total = floats[0]
    for distance in _distances(cfg):
        total = arith.addf(total, ptx.shuffle_xor(total, distance))
    return total if cfg.has_zeros else arith.mulf(total, ptx.f32(-codes.offset(cfg.format, cfg.element)))


def _store_number(cfg: PackedProductConfig, base, row, piece, is_used, number):
    of_run = 4 * cfg.run
    run, inside = ptx.divided(piece, of_run)
    to = ptx.add(base, ptx.i32(4 * cfg.sum_floats), ptx.mul(run, 4 * cfg.tile_rows), ptx.mul(row, 4))
    first = arith.select(ptx.equal(inside, ptx.i32(0)), is_used, ptx.i32(0))
    ptx.store_if(to, first, number, kind="f32", space="shared")


def load(cfg: PackedProductConfig, base, rows, chunk) -> tuple[list, list]:
    """([block][tile of 8 rows][4] words of x: the thread's 8 inputs of each block, [run][tile of 8 rows][2] numbers)

    Numbers are those of the tokens 2 t and 2 t + 1.
    """
    at = ptx.mul(chunk, 2 * BLOCK * cfg.unroll)
    text = "ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{}];"
    one = lambda row, b: ptx.asm_values(text.format(2 * BLOCK * b), "=r,=r,=r,=r,r", 4, ptx.add(row, at))
    xs = [[one(row, b) for row in rows] for b in range(cfg.unroll)]
    if not cfg.has_numbers:
        return xs, []
    runs, t = cfg.unroll // cfg.run, ptx.lane_position()[1]
    start = ptx.add(base, ptx.i32(4 * cfg.sum_floats), ptx.mul(chunk, 4 * runs * cfg.tile_rows), ptx.mul(t, 8))
    text = "ld.shared.v2.f32 {{$0, $1}}, [$2+{}];"
    pair = lambda run, n: ptx.asm_values(text.format(4 * (run * cfg.tile_rows + 8 * n)), "=f,=f,r", 2, start)
    return xs, [[pair(run, n) for n in range(len(rows))] for run in range(runs)]
