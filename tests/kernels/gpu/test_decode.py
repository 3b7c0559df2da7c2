"""Decoding of 8-bit numbers to 16-bit ones: its PTX, run instruction by instruction, against ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import decode_sm90
from pallas_kernels.gpu.decode_sm90 import decode_word
from tests.kernels.gpu.simt import Machine, emulated
from tests.kernels.gpu.test_warp_mma import place_tile

SOURCES = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
TARGETS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
HALVES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def permute(a, b, selector):
    """prmt: a digit's low three bits choose a byte of a and b; its highest bit repeats that byte's sign instead."""
    every, out = (int(b) << 32 | int(a)), 0
    for place in range(4):
        digit = int(selector, 16) >> 4 * place & 15
        byte = every >> 8 * (digit & 7) & 255
        byte = (255 if byte & 128 else 0) if digit & 8 else byte
        out |= byte << 8 * place
    return out


def lookup(a, b, c, table):
    """lop3: bit i of the table is the result where the three bits are the digits of i."""
    bits = sum((table >> i & 1) * _where(a, b, c, i) for i in range(8))
    return bits & 0xFFFFFFFF


def _where(a, b, c, i):
    pick = lambda x, wanted: x if wanted else ~x
    return pick(a, i & 4) & pick(b, i & 2) & pick(c, i & 1) & 0xFFFFFFFF


def packed(kind, function, *words):
    """Applies `function` to both halves of words, rounded to the type once."""
    pairs = [np.array([w & 0xFFFF, w >> 16], np.uint16).view(HALVES[kind]).astype(np.float64) for w in words]
    with np.errstate(invalid="ignore"):
        low, high = function(*pairs).astype(HALVES[kind]).view(np.uint16)
    return int(high) << 16 | int(low)


def run(text, word):
    """($0, $1) of PTX that decodes $2."""
    named = {"$2": word}
    read = lambda name: int(name, 0) if name[0].isdigit() else named[name]
    for line in filter(None, (part.strip() for part in text.strip("{} ").split(";"))):
        name, rest = line.split(maxsplit=1)
        if name == ".reg":
            continue
        if name == "mov.b32" and "{" in rest:
            names, source = rest.strip("{").split("}")
            low, high = (part.strip() for part in names.split(","))
            named[low], named[high] = (read(source.strip(", ")) >> 16 * k & 0xFFFF for k in range(2))
            continue
        to, *operands = (part.strip() for part in rest.split(","))
        kind = name.split(".")
        if name == "prmt.b32":
            named[to] = permute(read(operands[0]), read(operands[1]), operands[2])
        elif name == "lop3.b32":
            named[to] = lookup(*map(read, operands))
        elif name == "cvt.f32.f16":
            named[to] = np.array([named[operands[0]]], np.uint16).view(np.float16).astype(np.float32)[0]
        elif name == "cvt.rn.bf16x2.f32":
            with np.errstate(invalid="ignore"):
                low, high = np.array([named[x] for x in operands[::-1]]).astype(ml_dtypes.bfloat16).view(np.uint16)
            named[to] = int(high) << 16 | int(low)
        elif kind[0] == "fma":
            named[to] = packed(kind[2][:-2], lambda a, b, c: a * b + c, *map(read, operands))
        elif kind[0] == "sub" and kind[-1] == "f16x2":
            named[to] = packed("f16", lambda a, b: a - b, *map(read, operands))
        else:
            x = [read(operand) for operand in operands]
            simple = {"mov": lambda a: a, "and": lambda a, b: a & b, "xor": lambda a, b: a ^ b,
                      "add": lambda a, b: a + b, "shr": lambda a, b: a >> b}  # fmt: skip
            named[to] = simple[kind[0]](*x) & 0xFFFFFFFF
    return named["$0"], named["$1"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("source", "converts_fp8"), [("int8", True), ("int8", False), ("float8_e4m3fn", False), ("float8_e5m2", False)]
)
def test_decodes_every_byte_and_nan_without_an_instruction_for_it(source, converts_fp8, target):
    text, seen = decode_word(source, target, converts_fp8), set()
    assert "e4m3" not in text and "e5m2" not in text  # sm_80 and sm_86 lack them
    rng = np.random.default_rng(0)
    for word in np.concatenate([rng.permutation(256).astype(np.uint8).reshape(-1, 4) for _ in range(4)]):
        got = np.array(run(text, int(word.view(np.uint32)[0])), np.uint32).view(TARGETS[target]).astype(np.float64)
        np.testing.assert_array_equal(got, word.view(SOURCES[source]).astype(np.float64))
        seen |= set(word.tolist())
    assert len(seen) == 256


def test_a_chip_with_the_instruction_uses_it():
    assert "cvt.rn.f16x2.e4m3x2" in decode_word("float8_e4m3fn", "bfloat16")


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 192, 256])
def test_a_tile_is_decoded_to_the_places_of_its_swizzle(dim):
    """Every thread's addresses: those of later steps are the first ones' plus constants (steps_of_equal_columns)."""
    rows, source = 64, "int8"
    values = np.random.default_rng(dim).integers(-128, 128, (rows, dim)).astype(np.int8)
    machine, target = Machine(128, 3 * values.nbytes), np.full(128, values.nbytes, np.int32)
    place_tile(machine.memory, 0, values)
    with emulated(decode_sm90, machine):
        kind = dict(rows=rows, dim=dim, source=source, target="float16", hidden=True)
        decode_sm90.decode_tile(np.zeros(128, np.int32), target, **kind)
    want = np.zeros(2 * values.nbytes, np.uint8)
    place_tile(want, 0, values.astype(np.float16))
    np.testing.assert_array_equal(machine.memory[values.nbytes :], want)
