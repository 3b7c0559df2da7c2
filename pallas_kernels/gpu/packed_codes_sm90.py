"""Codes of 4 or 8 bits as pairs of bfloat16 or float16, in PTX: two consecutive inputs of one output in a word.

Every number of a format is exact in both. Integers come from the bits of a power of two whose last place is 1:
0x4300 | n is the bfloat16 128 + n for 0 <= n < 128, and 0x4380 is 256; 0x6400 | n is the float16 1024 + n for
0 <= n < 1024. Floats are moved to the places of the exponent and fraction and multiplied by the power of two between
the two formats, which is right for subnormal numbers, too; float16 has an instruction for fp8.
"""

import dataclasses

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.decode_sm90 import decode_word


@dataclasses.dataclass(frozen=True)
class _Element:
    """The dtype of the two numbers of a pair."""

    pair: str  # in PTX
    ones: int  # the bits of the power of two whose last place is 1
    four: int  # the bits of that power plus 8, which `pair_of_word` subtracts: an int4 code is its number plus 8
    place: int  # the lowest bit of a fraction of fp4
    ratio: int  # the bits of the power of two between fp4 and its bits at that place


_ELEMENTS = {
    "bfloat16": _Element("bf16x2", 0x4300, 0x4308, 6, 0x7E80),  # 128, 136; 2 ** 126
    "float16": _Element("f16x2", 0x6400, 0x6408, 9, 0x7400),  # 1024, 1032; 2 ** 14
}


def _twice(half: int) -> int:
    """Both halves of a word."""
    return half | half << 16


def _both(word, mask: int, bits: int = 0):
    """(word & mask) | bits, in one instruction."""
    if not bits:
        return arith.andi(word, ptx.i32(_signed(mask)))
    return ptx.asm_value(f"lop3.b32 $0, $1, {mask:#x}, $2, 0xea;", "=r,r,r", word, ptx.i32(_signed(bits)), pure=True)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def subtract(a, b, element: str):
    """a - b of two words of two numbers."""
    return ptx.asm_value(f"sub.rn.{_ELEMENTS[element].pair} $0, $1, $2;", "=r,r,r", a, b, pure=True)


def _times(a, factor: int, element: str):
    """Both halves times the number with the bits of `factor`."""
    return _product(a, ptx.i32(_signed(_twice(factor))), element)


def _product(a, b, element: str):
    """a * b of two words of two numbers."""
    return ptx.asm_value(f"mul.rn.{_ELEMENTS[element].pair} $0, $1, $2;", "=r,r,r", a, b, pure=True)


def _bytes(word, selector: int, other=None):
    """Four of the eight bytes of two words; a digit of the selector for each, the lowest first."""
    other = word if other is None else other
    return ptx.asm_value(f"prmt.b32 $0, $1, $2, {selector:#x};", "=r,r,r", word, other, pure=True)


def offset(format: str, element: str) -> float:
    """The numbers of `pairs_of_word` are factor * (what a code stands for) + offset."""
    return 0.0 if format != "int4" else {"bfloat16": 136.0, "float16": 1152.0}[element]


def factor(format: str, element: str) -> float:
    """See `offset`. In float16 a code is 16 times as large, so that the offset is smaller beside it."""
    return 16.0 if (format, element) == ("int4", "float16") else 1.0


def scale_pairs(dtype: str, words: list, element: str) -> list:
    """Of each of the four scales of this dtype in one or two words: what codes of fp4 are multiplied by.

    See `unit_of_scaled`.
    """
    if dtype == "bfloat16":
        return [pair for word in words for pair in each_twice(two_scales(dtype, word, element))]
    (word,) = words
    if element == "float16":
        first, second = ptx.asm_values(decode_word(dtype, element), "=r,=r,r", 2, word, pure=True)
        return [*each_twice(first), *each_twice(second)]
    even, odd = (each_twice(_bfloat16_of_scales(upper)) for upper in (_shift(word, -8), word))
    return [even[0], odd[0], even[1], odd[1]]


def two_scales(dtype: str, word, element: str):
    """The two scales in a word, of e4m3 in its lower half, as those that `scale_pairs` has twice."""
    if dtype == "bfloat16":
        assert element == "bfloat16"
        return _times(word, 0x5F80, element)  # 2 ** 64
    if element == "float16":
        return ptx.asm_values(decode_word(dtype, element), "=r,=r,r", 2, word, pure=True)[0]
    return _bfloat16_of_scales(_bytes(word, 0x1100))


def _bfloat16_of_scales(word):
    """2 ** 118 times each of the scales of e4m3 in the upper bytes of both halves; at most 1.75 * 2 ** 126.

    Their bits at the places of bfloat16 are 2 ** -120 times the scale. No bfloat16 is 2 ** 238, so it takes two steps.
    """
    moved = arith.ori(_both(word, 0x80008000), _both(_shift(word, 4), 0x07F007F0))
    return _times(_times(moved, 0x7F00, "bfloat16"), 0x7700, "bfloat16")  # 2 ** 127, 2 ** 111


def each_twice(word) -> list:
    """Each half of a word in both halves. Multiplications take it from the word itself, which they do not from prmt."""
    text = "{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; mov.b32 $0, {{{0}, {0}}}; }}"
    return [ptx.asm_value(text.format(half), "=r,r", word, pure=True) for half in "lh"]


def unit_of_scaled(dtype: str, element: str) -> float:
    """What the products of fp4 codes and such scales, of this dtype, must be multiplied by.

    All products with scales of e4m3 are exact: as float16 a scale is itself, and the smallest product 2 ** -24. Of
    bfloat16, those with powers of two from 2 ** -60 to 2 ** 63 are.
    """
    if dtype == "bfloat16":
        return 2.0**62
    return {"bfloat16": 2.0**8, "float16": 2.0**14}[element]


def pairs_of_word(format: str, word, element: str, scale=None) -> list:
    """The four pairs of a word of eight codes of 4 bits: of inputs (0, 1), (2, 3), (4, 5), (6, 7).

    scale: of fp4: one of `scale_pairs`.
    """
    return [_pair_of_nibbles(format, word, j, element, scale) for j in range(4)]


def _pair_of_nibbles(format: str, word, j: int, element: str, scale=None):
    """Of the codes in the bits 4 j to 4 j + 3 of both halves. int4: 128 + code, as float16 1024 + 16 code."""
    of, shifted = _ELEMENTS[element], lambda bits: word if not bits else _shift(word, bits)
    if format == "int4":
        first = 0 if element == "bfloat16" else 4  # the bit to which a code is moved
        return _both(shifted(4 * j - first), _twice(0xF << first), _twice(of.ones))
    sign, rest = _both(shifted(4 * j - 12), 0x80008000), _both(shifted(4 * j - of.place), _twice(7 << of.place))
    return _number_of_fp4(arith.ori(sign, rest), element, scale)


def _number_of_fp4(bits, element: str, scale):
    """The pair of the codes whose bits are at the places of the element."""
    return _times(bits, _ELEMENTS[element].ratio, element) if scale is None else _product(bits, scale, element)


def pair_of_word(format: str, word, t, element: str, scale=None):
    """The pair of inputs 2 t and 2 t + 1 of a word of eight codes of 4 bits, without an offset; t: i32, 0 to 3."""
    of = _ELEMENTS[element]
    if format == "int4":
        pair = _both(arith.shrui(word, ptx.mul(t, 4)), 0x000F000F, _twice(of.ones))
        return subtract(pair, ptx.i32(_twice(of.four)), element)
    to_place = arith.andi(ptx.add(ptx.mul(t, 4), ptx.i32(-of.place)), ptx.i32(31))  # where _pair_of_nibbles wants them
    word = ptx.asm_value("shf.r.wrap.b32 $0, $1, $1, $2;", "=r,r,r", word, to_place, pure=True)
    sign = _both(_shift(word, of.place - 12), 0x80008000)
    return _number_of_fp4(arith.ori(sign, _both(word, _twice(7 << of.place))), element, scale)


def _shift(word, right: int):
    amount = ptx.i32(abs(right))
    return arith.shrui(word, amount) if right > 0 else arith.shli(word, amount)


def pairs_of_bytes(format: str, first, second, byte: int, element: str) -> list:
    """The pairs of this byte of two words, and of the next byte."""
    if element == "bfloat16":
        return [_pair_of_bytes(format, first, second, byte + k) for k in range(2)]
    selector = byte | (4 + byte) << 4 | (byte + 1) << 8 | (5 + byte) << 12
    four = _bytes(first, selector, second)
    text = decode_word({"fp8": "float8_e4m3fn"}.get(format, format), element)
    return ptx.asm_values(text, "=r,=r,r", 2, four, pure=True)


def _pair_of_bytes(format: str, first, second, byte: int):
    """As bfloat16."""
    selector = byte | byte << 4 | (4 + byte) << 8 | (4 + byte) << 12
    twice = _bytes(first, selector, second)
    if format == "int8":
        return _integers(twice)
    magnitude = _both(_shift(twice, 4), 0x07F007F0)
    return _times(arith.ori(_both(twice, 0x80008000), magnitude), 0x7B80, "bfloat16")  # 2 ** 120


def _integers(twice):
    """The signed bytes 0 and 2 of a word: 128 + the lowest 7 bits, less 128, or 256 where the sign is set."""
    ones = _twice(_ELEMENTS["bfloat16"].ones)
    return subtract(_both(twice, 0x007F007F, ones), _both(twice, 0x00800080, ones), "bfloat16")
