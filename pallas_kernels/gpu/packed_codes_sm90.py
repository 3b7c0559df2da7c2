"""Codes of 4 or 8 bits as pairs of bfloat16, or fp8 as float16, in PTX: two consecutive inputs of one output in a word.

Every number of a format is exact in bfloat16. Integers come from the bits of 128 = 0x4300, whose last place is 1:
0x4300 | n is 128 + n for 0 <= n < 128, and 0x4380 is 256. Floats are moved to the places of bfloat16's exponent and
fraction and multiplied by the power of two between the two formats, which is right for subnormal numbers, too.
"""

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.decode_sm90 import decode_word

_MAGIC = 0x43004300  # 128, 128
_INT4_OFFSET = 0x43084308  # 136, 136


def _both(word, mask: int, bits: int = 0):
    """(word & mask) | bits, in one instruction."""
    if not bits:
        return arith.andi(word, ptx.i32(_signed(mask)))
    return ptx.asm_value(f"lop3.b32 $0, $1, {mask:#x}, $2, 0xea;", "=r,r,r", word, ptx.i32(_signed(bits)), pure=True)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def subtract(a, b):
    """a - b of two words of two bfloat16."""
    return ptx.asm_value("sub.rn.bf16x2 $0, $1, $2;", "=r,r,r", a, b, pure=True)


def _times(a, factor: int):
    return ptx.asm_value("mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", a, ptx.i32(factor), pure=True)


def offset(format: str) -> float:
    """What the numbers of `pairs_of_word` and `pair_of_bytes` are too large by."""
    return 136.0 if format == "int4" else 0.0


def pairs_of_word(format: str, word) -> list:
    """The four pairs of a word of eight codes of 4 bits: of inputs (0, 1), (2, 3), (4, 5), (6, 7)."""
    return [_pair_of_nibbles(format, word, j) for j in range(4)]


def _pair_of_nibbles(format: str, word, j: int):
    """Of the codes in the bits 4 j to 4 j + 3 of both halves. int4: 128 + code."""
    shifted = lambda bits: word if not bits else _shift(word, bits)
    if format == "int4":
        return _both(shifted(4 * j), 0x000F000F, _MAGIC)
    sign, rest = _both(shifted(4 * j - 12), 0x80008000), _both(shifted(4 * j - 6), 0x01C001C0)
    return _times(arith.ori(sign, rest), 0x7E807E80)  # 2 ** 126


def pair_of_word(format: str, word, t):
    """The pair of inputs 2 t and 2 t + 1 of a word of eight codes of 4 bits, without an offset; t: i32, 0 to 3."""
    if format == "int4":
        pair = _both(arith.shrui(word, ptx.mul(t, 4)), 0x000F000F, _MAGIC)
        return subtract(pair, ptx.i32(_INT4_OFFSET))
    to_bit_6 = arith.andi(ptx.add(ptx.mul(t, 4), ptx.i32(-6)), ptx.i32(31))  # where _pair_of_nibbles wants magnitudes
    word = ptx.asm_value("shf.r.wrap.b32 $0, $1, $1, $2;", "=r,r,r", word, to_bit_6, pure=True)
    sign = _both(_shift(word, -6), 0x80008000)
    return _times(arith.ori(sign, _both(word, 0x01C001C0)), 0x7E807E80)


def _shift(word, right: int):
    amount = ptx.i32(abs(right))
    return arith.shrui(word, amount) if right > 0 else arith.shli(word, amount)


def pair_of_bytes(format: str, first, second, byte: int):
    """The pair of this byte of two words."""
    selector = byte | byte << 4 | (4 + byte) << 8 | (4 + byte) << 12
    twice = ptx.asm_value(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", first, second, pure=True)
    if format == "int8":
        return _integers(twice)
    magnitude = _both(_shift(twice, 4), 0x07F007F0)
    return _times(arith.ori(_both(twice, 0x80008000), magnitude), 0x7B807B80)  # 2 ** 120


def halves_of_bytes(first, second, byte: int) -> list:
    """fp8 as float16: the pairs of this byte of two words, and of the next byte."""
    selector = byte | (4 + byte) << 4 | (byte + 1) << 8 | (5 + byte) << 12
    four = ptx.asm_value(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", first, second, pure=True)
    return ptx.asm_values(decode_word("float8_e4m3fn", "float16"), "=r,=r,r", 2, four, pure=True)


def _integers(twice):
    """The signed bytes 0 and 2 of a word: 128 + the lowest 7 bits, less 128, or 256 where the sign is set."""
    return subtract(_both(twice, 0x007F007F, _MAGIC), _both(twice, 0x00800080, _MAGIC))
