"""Words for another rank, inside inline_mgpu: each is stored in its memory beside the number of the exchange.

A word and its number arrive together, because they are one store of 8 bytes, so nothing else tells that it has come: no
fence, no counter and no barrier. Memory that words are sent to begins with zeros, and numbers with 1.

What is exchanged is divided into pieces of four numbers.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx

PIECE = 4  # numbers
KINDS = {"r": "b32", "f": "f32"}  # in PTX, of words by their constraint


def place_of(base, number, size: int):
    """The address of an element of `size` bytes."""
    return arith.addi(base, arith.muli(ptx.to_i64(number), ptx.i64(size)))


def differs(a, b: int):
    """i32, 1 where a is another number than b."""
    return ptx.bool_to_i32(arith.cmpi(arith.CmpIPredicate.ne, a, ptx.i32(b)))


@dataclasses.dataclass(frozen=True)
class Words:
    """How a piece of an array is words."""

    count: int
    kind: str  # of a word in PTX: r of i32, f of f32
    floats: Callable  # words -> four f32
    rounded: Callable  # four f32 -> words


def words_of(dtype: str) -> Words:
    """Four float32 are four words, four bfloat16 or float16 are two."""
    if dtype == "float32":
        return Words(4, "f", list, list)
    of_half = ptx.float_of_bf16 if dtype == "bfloat16" else ptx.float_of_f16
    return Words(
        2, "r",
        lambda words: [of_half(word, half) for word in words for half in range(2)],
        lambda values: [ptx.pack_16bit(*values[i : i + 2], dtype) for i in (0, 2)],
    )  # fmt: skip


def store_piece(dtype: str, base, number, values: Sequence, works) -> None:
    """Stores four f32 as a piece of an array of this dtype, if `works` is not 0."""
    words = words_of(dtype)
    store_words(base, number, words.rounded(values), works, words.kind)


def store_words(base, number, words: Sequence, works, kind: str) -> None:
    """Stores the words of a piece of an array, if `works` is not 0. kind: r of i32, f of f32."""
    count = len(words)
    ptx.store_if(place_of(base, number, 4 * count), works, *words, kind=KINDS[kind])


def next_number(place, counts):
    """The number of this exchange: one more than the counter at an address, which becomes it if `counts` is not 0."""
    number = ptx.add(ptx.asm_value("ld.global.b32 $0, [$1];", "=r,l", place), ptx.i32(1))
    ptx.store_if(place, counts, number)
    return number


def send(place, words: Sequence, number, sends, kind: str = "r") -> None:
    """Stores one or two words at an address of a rank, if `sends` is not 0. kind: r of i32, f of f32."""
    count = len(words)
    stored = ", ".join(f"${2 + i}, ${2 + count}" for i in range(count))
    text = f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.volatile.global.v{2 * count}.b32 [$0], {{{stored}}}; }}"
    ptx.asm(text, ",".join(("l", "r", *(kind,) * count, "r")), place, sends, *words, number)


def receive(
    places: Sequence, numbers: Sequence, waits: Sequence, instead: Sequence[Sequence], kind: str = "r"
) -> list[list]:
    """The words at each of the places, one or two, once all of them have come with the number of their place.

    instead: the words of a place for a thread whose `waits` there is 0. All places are asked for at the same time.
    """
    owners = [i for i, words in enumerate(instead) for _ in words]  # of each word, its place
    total, given = len(owners), len(places)
    operands = {"place": total, "number": total + given, "waits": total + 2 * given, "instead": total + 3 * given}
    at = lambda name, i: f"${operands[name] + i}"
    text = "{ .reg .pred other, " + ", ".join(f"w{i}" for i in range(given)) + f"; .reg .b32 seen<{total}>; "
    for k, i in enumerate(owners):
        text += f"mov.b32 ${k}, {at('instead', k)}; mov.b32 seen{k}, {at('number', i)}; "
    text += "".join(f"setp.ne.u32 w{i}, {at('waits', i)}, 0; " for i in range(given)) + "AGAIN: "
    for i in range(given):
        loaded = ", ".join(f"${k}, seen{k}" for k, owner in enumerate(owners) if owner == i)
        text += f"@w{i} ld.volatile.global.v{2 * owners.count(i)}.b32 {{{loaded}}}, [{at('place', i)}]; "
    text += f"setp.ne.u32 other, seen0, {at('number', owners[0])}; "
    for k, i in list(enumerate(owners))[1:]:
        text += f"setp.ne.or.u32 other, seen{k}, {at('number', i)}, other; "
    text += "@other bra AGAIN; }"
    constraints = (*(f"=&{kind}",) * total, *("l",) * given, *("r",) * 2 * given, *(kind,) * total)
    words = (word for words in instead for word in words)
    found = iter(ptx.asm_values(text, ",".join(constraints), total, *places, *numbers, *waits, *words))
    return [[next(found) for _ in words] for words in instead]
