"""A small numpy model of the PTX that a Mosaic GPU kernel inlines: a value is an array of one number for each thread.

`emulated(module, machine)` swaps the MLIR builders under a module of inline PTX for numpy, so that its own code runs on
a CPU, lane by lane: shared memory, cp.async, ldmatrix, movmatrix, mma, shuffles and predicated stores, by PTX's
definitions.
"""

import contextlib
import re
from unittest import mock

import jax
import ml_dtypes
import numpy as np

from pallas_kernels.gpu import control_sm80 as control
from pallas_kernels.gpu import layer_tail_biases_sm90 as layer_tail_biases
from pallas_kernels.gpu import peer_sums_sm90 as peer_sums
from pallas_kernels.gpu import peer_words_sm90 as peer_words
from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu import rows_sm90 as rows
from pallas_kernels.gpu import token_share_sm90 as token_share
from pallas_kernels.gpu import token_tile_sm90 as token_tile
from pallas_kernels.gpu import words_sm80

HALF = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
SIXTEEN = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
EIGHT = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}


class Fragment:
    """A FragmentedArray's registers: pairs of values."""

    def __init__(self, shape, layout=None):
        self.shape = shape
        self.layout = layout.to_mgpu() if layout is not None else None
        dims = self.layout.registers_shape(shape) if layout is not None else (shape[0] * shape[1] // 256,)
        self.registers = np.empty(dims, object)


def _like(b, a):
    """Words as those of a: with a sign or without."""
    a, b = np.asarray(a), np.asarray(b)
    return b.view(a.dtype) if b.dtype.itemsize == a.dtype.itemsize else b


def _with_one_nan(x):
    """As on a GPU, where every NaN that an instruction computes has the bits 0x7fffffff."""
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF).view(np.float32), x) if np.isnan(x).any() else x


class Arith:
    """The arith dialect, on numpy arrays."""

    addf = staticmethod(lambda a, b: _with_one_nan(a + b))
    subf = staticmethod(lambda a, b: _with_one_nan(a - b))
    addi = staticmethod(lambda a, b: a + _like(b, a))
    subi = staticmethod(lambda a, b: a - _like(b, a))
    mulf = staticmethod(lambda a, b: _with_one_nan(a * b))
    muli = staticmethod(lambda a, b: a * _like(b, a))
    divui = staticmethod(lambda a, b: a // _like(b, a))
    remui = staticmethod(lambda a, b: a % _like(b, a))
    andi = staticmethod(lambda a, b: a & _like(b, a))
    ori = staticmethod(lambda a, b: a | _like(b, a))
    xori = staticmethod(lambda a, b: a ^ _like(b, a))
    shrsi = staticmethod(lambda a, b: (a.view(np.int32) >> b.view(np.int32)).view(a.dtype))
    shrui = staticmethod(lambda a, b: (a.view(np.uint32) >> b.view(np.uint32)).view(a.dtype))
    shli = staticmethod(lambda a, b: a << _like(b, a))
    minsi = staticmethod(lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(a.dtype))
    maxsi = staticmethod(lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(a.dtype))
    minui = staticmethod(lambda a, b: np.minimum(a.view(np.uint32), b.view(np.uint32)).view(a.dtype))
    maxui = staticmethod(lambda a, b: np.maximum(a.view(np.uint32), b.view(np.uint32)).view(a.dtype))
    negf = staticmethod(lambda a: -a)
    select = staticmethod(lambda condition, a, b: np.where(condition, a, _like(b, a)))
    cmpf = staticmethod(lambda kind, a, b: kind(a, b))

    cmpi = staticmethod(lambda kind, a, b: kind(a, b))

    class CmpFPredicate:
        OGT, OEQ = np.greater, np.equal

    class CmpIPredicate:
        sge, ne = np.greater_equal, np.not_equal


def _fma(a, b, c):
    """Rounded once, as a GPU does: the product of two f32 is exact in f64."""
    return np.asarray(np.asarray(a, np.float64) * b + c, np.float32)


def _less(a, b):
    """Of numbers with a sign, which a load does not know."""
    signed = lambda x: x.view(np.int32) if x.dtype == np.uint32 else x
    return signed(a) < signed(b)


class Machine:
    """Threads, and one byte array for both memories: addresses are offsets into it."""

    def __init__(self, threads: int, memory: int):
        self.lane, self.memory = np.arange(threads, dtype=np.int32), np.zeros(memory, np.uint8)
        self.outputs = 0  # of the assembly that is being run
        self.bounds: list = []  # (begin, end) of each array in GMEM; empty: addresses there are not checked
        self.copies = [[]]  # of cp.async: the groups that were committed, and the last one, which was not yet
        self.copies_late = False  # are copies done when they are waited for, and not at once?

    def load(self, place, kind, mask=None):
        place = np.broadcast_to(place, self.lane.shape).astype(np.int64)
        mask = np.ones(self.lane.shape, bool) if mask is None else mask
        out = np.zeros(self.lane.shape, kind)
        out[mask] = self._elements(kind)[self._number_of(place[mask], out.itemsize)]
        return out

    def store(self, place, values, mask):
        """Words of one thread, one after the other: where two threads store, the last one's stays."""
        place = np.broadcast_to(place, self.lane.shape).astype(np.int64)
        words = [np.broadcast_to(value, self.lane.shape) for value in values]
        assert all(word.dtype.itemsize == 4 for word in words)
        words = np.stack([np.ascontiguousarray(word).view(np.uint32) for word in words], 1)[mask]
        first = self._number_of(place[mask], 4 * len(values)) * len(values)
        self._elements(np.uint32)[first[:, None] + np.arange(len(values))] = words

    def _elements(self, kind) -> np.ndarray:
        """The memory as whole elements."""
        size = np.dtype(kind).itemsize
        return self.memory[: len(self.memory) // size * size].view(kind)

    def _number_of(self, place, size: int) -> np.ndarray:
        """The number of the element, of so many bytes, at each address."""
        assert (place >= 0).all() and (place % size == 0).all()
        return place // size

    def run(self, text: str, *args):
        """Executes PTX whose operands are $0, $1, ... (outputs first); returns the outputs."""
        flags, outputs = {}, {}
        text = text.strip()
        if text.startswith("{"):
            text = text[1 : text.rindex("}")]
        if "bra" in text:  # outputs are tied to the last inputs, and the branch skips to the end
            return self._branch(text, args)
        for line in filter(None, (part.strip() for part in text.split(";"))):
            if not line.startswith((".reg", "bar.sync")):  # the threads run in step
                self._step(line, flags, outputs, args)
        return [outputs[k] for k in sorted(outputs)]

    def _branch(self, text, args):
        """Lines on named registers, of which those from `@!p bra END` to `END:` are run where p holds."""
        values = dict(enumerate(args[-self.outputs :])) | dict(enumerate(args, start=self.outputs))
        values = {f"${k}": np.broadcast_to(value, self.lane.shape) for k, value in values.items()}
        inside, every = np.ones(self.lane.shape, bool), np.ones(self.lane.shape, bool)
        for line in filter(None, (part.strip() for part in text.split(";"))):
            label = re.match(r"(\w+): *", line)
            if label:
                inside, line = every, line[label.end() :]
            name, _, rest = line.partition(" ")
            if name == "@!p":
                inside = values["p"]
            elif name and not name.startswith(".reg"):
                target, *sources = (x.strip() for x in rest.split(","))
                new = self._named(name, [values[x] if x in values else x for x in sources])
                values[target] = np.where(inside, new, values.get(target, np.zeros_like(new)))
        return [values[f"${k}"] for k in range(self.outputs)]

    def _named(self, name, x):
        """The result of one line; a source that is no register is its text."""
        x = [np.uint32(int(v[2:], 16)).view(np.float32) if isinstance(v, str) and v.startswith("0f") else v for v in x]
        kind = name.split(".")
        if kind[0] == "vote":
            assert x[1] == "-1", "all lanes vote"
            return np.repeat({"any": np.any, "all": np.all}[kind[2]](x[0].reshape(-1, 32), axis=1), 32)
        if kind[0] == "shfl":
            assert kind[2] == "bfly" and x[2:] == ["31", "-1"]
            return x[0][self.lane ^ int(x[1])]
        if kind[0] == "setp":  # gtu: or if one of them is no number
            return {"gt": np.greater, "gtu": lambda a, b: ~(a <= b)}[kind[1]](x[0], x[1])
        if kind[:2] == ["cvt", "rpi"]:
            return np.ceil(x[0])
        if kind[0] == "cvt":
            pair = np.stack([np.broadcast_to(v, self.lane.shape) for v in x[::-1]], 1).astype(HALF[kind[2][:-2]])
            return np.ascontiguousarray(pair).view(np.uint32).reshape(-1)
        simple = {
            "mov": lambda a: a, "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative,
            "abs": np.abs,
            "fma": _fma, "max": np.maximum, "ex2": np.exp2, "tanh": np.tanh,
            "selp": lambda a, b, p: np.where(p, a, b), "or": np.logical_or,
        }  # fmt: skip
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(simple[kind[0]](*x), bool if kind[-1] == "pred" else np.float32)

    def _step(self, line, flags, outputs, args):
        mask = np.ones(self.lane.shape, bool)
        if line.startswith("@"):
            name, line = line[1:].split(maxsplit=1)
            mask = np.broadcast_to(flags[name], mask.shape)
        name, _, rest = line.partition(" ")
        if name == "cp.async.commit_group":
            return self.copies.append([])
        if name == "bar.warp.sync":
            return
        if name == "cp.async.wait_group":
            return self._finish(int(rest))
        numbers = [int(n) for n in re.findall(r"\$(\d+)", rest)]
        writes = not name.startswith(("st", "red.", "setp", "cp.async", "bar")) and not rest.startswith("t,")
        count = len(re.findall(r"\$", rest.split("[")[0].split("}")[0])) if rest.startswith("{") else 1
        count = count if writes else 0
        get = lambda n: args[n - len(args_outputs)]
        args_outputs = range(self.outputs)
        operands = [get(n) for n in numbers[count:]]
        offset = int((re.findall(r"\[\$\d+\+(\d+)\]", rest) or [0])[0])
        if self.bounds and ".global" in name:
            self._check_bounds(name, operands[name.startswith("cp.async")] + offset, mask)
        if name == "and.b32" and len(numbers) == 2 and rest.startswith("t,"):  # to the register t
            flags["t"] = operands[0] & operands[1]
        elif name.startswith("setp"):
            target, left, constant = (x.strip() for x in rest.split(",")[:3])
            compare = {"ne": np.not_equal, "eq": np.equal, "lt": np.less, "ge": np.greater_equal}[name.split(".")[1]]
            number = flags["t"] if left == "t" else operands[0]
            number = number.view(np.int32) if name.endswith(".s32") else number
            flags[target] = compare(number, np.int64(int(constant)).astype(number.dtype))
            if ".and." in name:
                flags[target] = flags[target] & flags[rest.split(",")[3].strip()]
        elif name.startswith("cp.async.cg"):  # 16 bytes; zeros where the predicate among its operands holds
            ignored = flags[rest.split(",")[3].strip()] if rest.count(",") == 3 else ~mask
            for i in np.flatnonzero(mask):
                to, source = (int(np.broadcast_to(x, mask.shape)[i]) for x in operands)
                assert (to + offset) % 16 == 0 and source % 16 == 0
                self.copies[-1].append((to + offset, None if ignored[i] else source))
            if not self.copies_late:
                self._copy(self.copies[-1])
        elif name.startswith("stmatrix"):
            self._stmatrix(operands[0], operands[1:])
        elif name == "red.shared.add.u32":
            np.add.at(self.memory.view(np.uint32), operands[0][mask] // 4, np.uint32(int(rest.split(",")[1])))
        elif name.startswith(("red.shared.or", "red.shared.max")):
            combine = np.bitwise_or if ".or." in name else np.maximum
            place, word = (np.broadcast_to(x, mask.shape)[mask].view(np.uint32) for x in operands)
            combine.at(self.memory.view(np.uint32), place // 4, word)
        elif name.startswith("st."):
            self.store(operands[0] + offset, operands[1:], mask)
        else:
            results = self._compute(name, rest, operands, offset, mask, flags)
            for number, new in zip(numbers[:count], results, strict=True):
                outputs[number] = np.where(mask, new, outputs[number]) if number in outputs else new

    def _check_bounds(self, name: str, place, mask) -> None:
        """Every address of a load, a store or a copy is within one of the arrays."""
        words = re.findall(r"\.v(\d)", name)
        size = 16 if name.startswith("cp.async") else 4 * int(words[0]) if words else 4
        place = np.broadcast_to(place, mask.shape)[mask].astype(np.int64)
        within = [(begin <= place) & (place + size <= end) for begin, end in self.bounds]
        assert np.any(within, axis=0).all(), f"{name} beyond an array"

    def _copy(self, some: list) -> None:
        """Does these copies of cp.async, (to, source or None for zeros), and forgets them."""
        for to, source in some:
            self.memory[to : to + 16] = 0 if source is None else self.memory[source : source + 16]
        some.clear()

    def _finish(self, pending: int) -> None:
        """Does the copies of all committed groups but the last `pending`."""
        last = len(self.copies) - 1 - pending
        for group in self.copies[: max(last, 0)]:
            self._copy(group)

    def _compute(self, name, rest, x, offset, mask, flags):
        kind = name.split(".")
        if kind[0] == "and":
            return [(x[0].view(np.uint32) & np.uint32(int(rest.split(",")[2], 16))).view(np.float32)]
        if kind[0] == "shl":
            return [(x[0].view(np.uint32) << np.uint32(int(rest.split(",")[2]))).view(np.float32)]
        if kind[-1] in ("bf16x2", "f16x2") and kind[0] in ("add", "sub", "mul"):
            half = HALF[kind[-1][:-2]]
            a, b = (np.ascontiguousarray(word).view(half).astype(np.float32) for word in x)
            exact = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[kind[0]](a, b)
            return [exact.astype(half).view(np.uint32)]
        if kind[0] == "lop3":  # (a & mask) | c
            assert rest.endswith("0xea")
            return [x[0].view(np.uint32) & np.uint32(int(rest.split(",")[2], 16)) | x[1].view(np.uint32)]
        if kind[0] == "bfe":
            first = int(rest.split(",")[2]) // 8
            return [x[0].view(np.int8).reshape(-1, 4)[:, first].astype(np.int32)]
        if name == "cvt.rn.f32.s32":
            return [x[0].astype(np.float32)]
        if name == "mov.f32":
            return [np.full(self.lane.shape, int(rest.split("0f")[1], 16), np.uint32).view(np.float32)]
        if kind[0] in ("popc", "clz"):
            lengths = [f"{word:b}" if word else "" for word in x[0].view(np.uint32)]
            return [np.array([n.count("1") if kind[0] == "popc" else 32 - len(n) for n in lengths], np.int32)]
        if kind[0] == "match":  # the bits of the lanes that have the same number
            alike = x[0].reshape(-1, 32, 1) == x[0].reshape(-1, 1, 32)
            return [(alike.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).reshape(-1)]
        if kind[0] == "redux":
            combine = {"max": np.maximum, "min": np.minimum}[kind[2]]
            return [np.repeat(combine.reduce(x[0].view(np.uint32).reshape(-1, 32), axis=1), 32).view(np.int32)]
        if kind[0] == "vote":  # the bits of the lanes in which p holds
            bits = flags["p"].reshape(-1, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
            return [np.repeat(bits.sum(axis=1).astype(np.uint32), 32)]
        if kind[0] == "mov":
            return x if x else [np.full(self.lane.shape, int(rest.split(",")[1]) & 0xFFFFFFFF, np.uint32)]
        if kind[0] == "ld":
            width = int(kind[-2][1:]) if kind[-2].startswith("v") else 1
            element = {"f32": np.float32, "b32": np.uint32, "b16": np.uint16, "u16": np.uint16}[kind[-1]]
            assert np.where(mask, np.asarray(x[0]) + offset, 0).min() >= 0
            loaded = [self.load(x[0] + offset + 4 * k, element, mask) for k in range(width)]
            return [word.astype(np.uint32) for word in loaded] if kind[-1] == "u16" else loaded
        if kind[0] == "shf":  # a rotation to the right
            word, right = x[0].view(np.uint32), x[-1].view(np.uint32)
            return [word >> right | word << (-right & np.uint32(31))]
        if kind[0] == "ldmatrix":
            return self._ldmatrix(x[0] + offset, "trans" in kind)
        if kind[0] == "mma":
            if kind[3] == "m16n8k8":
                zero = np.zeros_like(x[0])
                return self._mma([*x[:2], zero, zero], [x[2], zero], x[3:], HALF[kind[-2]])
            return self._mma(x[:4], x[4:6], x[6:], HALF[kind[-2]])
        if kind[0] == "movmatrix":
            tile = x[0].view(np.uint16).reshape(-1, 8, 8)
            return [np.ascontiguousarray(tile.transpose(0, 2, 1)).reshape(-1).view(np.uint32)]
        if kind[0] == "shfl":
            if "idx" in kind and "0x1c1f" in rest:  # of the four lanes
                return [x[0][self.lane // 4 * 4 + int(rest.split(",")[2])]]
            if "idx" in kind:
                return [x[0][self.lane // 32 * 32 + x[1]]]
            if "up" in kind:  # a lane without another before it keeps its own
                distance = int(rest.split(",")[2])
                return [np.where(self.lane % 32 >= distance, np.roll(x[0], distance), x[0])]
            distance = int(rest.split(",")[2])
            return [x[0][self.lane ^ distance]]
        if kind[0] == "prmt":
            selector = int(rest.split(",")[-1], 16)
            digits = [selector >> 4 * k & 15 for k in range(4)]
            both = np.concatenate([word.view(np.uint8).reshape(-1, 4) for word in (x[0], x[-1])], 1)
            return [np.ascontiguousarray(both[:, digits]).view(np.uint32).reshape(-1)]
        if kind[0] == "cvt":
            half = HALF[kind[2][:-2]]
            with np.errstate(over="ignore"):
                pair = np.stack([np.broadcast_to(v, self.lane.shape) for v in (x[1], x[0])], 1).astype(half)
            return [pair.view(np.uint32).reshape(-1)]
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            simple = {
                "tanh": np.tanh,
                "fma": _fma, "max": np.maximum, "ex2": np.exp2, "lg2": np.log2, "div": np.divide,
                "rcp": np.reciprocal,
                "rsqrt": lambda x: 1 / np.sqrt(x),
            }  # fmt: skip
            return [np.asarray(simple[kind[0]](*x), np.float32)]

    def _ldmatrix(self, place, trans):
        place, out = place.reshape(-1, 4, 8), []
        for m in range(4):
            units = np.stack([self.memory[p : p + 16].view(np.uint16) for p in place[:, m].reshape(-1)])
            units = units.reshape(-1, 8, 8)
            units = units.transpose(0, 2, 1) if trans else units
            out.append(np.ascontiguousarray(units).reshape(-1).view(np.uint32))
        return out

    def _stmatrix(self, place, words):
        place = np.broadcast_to(place, self.lane.shape).reshape(-1, 4, 8)
        for m, word in enumerate(words):
            units = word.view(np.uint8).reshape(-1, 16)  # four lanes hold a row
            for row, at in zip(units, place[:, m].reshape(-1), strict=True):
                self.memory[at : at + 16] = row

    def _mma(self, a, b, c, half):
        warps = len(self.lane) // 32
        whole = lambda words: [w.view(half).astype(np.float32).reshape(warps, 8, 8) for w in words]
        a0, a1, a2, a3 = whole(a)  # [warp, row g, column 2t + i] of each quarter
        left = np.concatenate([np.concatenate([a0, a2], 2), np.concatenate([a1, a3], 2)], 1)
        right = np.concatenate([w.transpose(0, 2, 1) for w in whole(b)], 1)  # b: row g of the transposed is a column
        with np.errstate(invalid="ignore"):  # of what is undefined, and not used
            product = left @ right
        low, high = product[:, :8].reshape(-1, 2), product[:, 8:].reshape(-1, 2)
        return [np.asarray(x + y, np.float32) for x, y in zip(c, (*low.T, *high.T), strict=True)]


@contextlib.contextmanager
def emulated(module, machine: Machine):
    """Within, `module`'s functions take Fragments, scalars a thread and byte addresses instead of refs."""

    def inline(**_):
        return lambda f: lambda *args: f(None, *args)

    def assembled(count, text, *args):
        machine.outputs = count
        if "abs.f32" in text and "bra" not in text:
            return [np.maximum(args[0], abs(args[1]))]
        if "max.u16x2" in text:  # of magnitudes, or of those of another lane
            words = [np.broadcast_to(x, machine.lane.shape).astype(np.uint32) for x in args]
            if "shfl" in text:
                words.append(words[0][machine.lane ^ int(re.findall(r"\$1, (\d+), 31", text)[0])])
            else:
                words[0] = words[0] & 0x7FFF7FFF
            return [np.maximum(*(x.view(np.uint16) for x in words)).view(np.uint32)]
        if "max.NaN.f32" in text and "0f" in text and "bra" not in text:  # the scale of a row
            top = args[0].view(np.uint16).reshape(-1, 2).max(axis=1)
            top = top.view(ml_dtypes.bfloat16 if "shl.b32" in text else np.float16).astype(np.float32)
            factor, least = (np.uint32(int(x, 16)).view(np.float32) for x in re.findall("0f([0-9A-F]{8})", text))
            return [np.maximum(top * factor, least)]
        if "mov.b32 {l, h}" in text:  # a half twice
            halves = np.ascontiguousarray(args[0]).view(np.uint16).reshape(-1, 2)
            return [np.repeat(halves[:, int("{h, h}" in text)], 2).view(np.uint32)]
        if "cvt.f32.f16" in text:
            return [args[0].view(np.float16).reshape(-1, 2)[:, int("h1;" in text)].astype(np.float32)]
        if "e4m3x2.f32 h" in text:  # four f32 -> a word
            four = np.clip(np.stack(args, 1), -448, 448).astype(EIGHT["float8_e4m3fn"])
            return [np.ascontiguousarray(four).view(np.uint32).reshape(-1)]
        if text.startswith("decode"):
            _, source, target = text.split()
            values = args[0].view(EIGHT[source]).astype(np.float32).reshape(-1, 2, 2)
            words = values.astype(ml_dtypes.bfloat16 if target == "bfloat16" else np.float16).view(np.uint32)
            return [np.ascontiguousarray(words[:, k, 0]) for k in range(2)]
        if text.startswith("encode"):
            _, source, target = text.split()
            words, divisor = args[:-2], args[-2]
            with np.errstate(divide="ignore", invalid="ignore"):
                x = np.stack(words, 1).view(SIXTEEN[source]).astype(np.float32) / divisor[:, None]
            x = np.trunc(x + np.copysign(np.float32(0.5), x)) if target == "int8" else x
            largest = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344}[target]
            x = np.clip(np.nan_to_num(x) if target == "int8" else x, -largest, largest)
            x = np.ascontiguousarray(x.astype(EIGHT[target])).view(np.uint32).reshape(len(x), -1)
            return [np.ascontiguousarray(column) for column in x.T]
        return machine.run(text, *args)

    def one(text, constraints, *args, **_):
        value = assembled(1, text, *args)[0]
        if value.dtype.itemsize != 4:
            return value
        is_float = constraints.startswith(("=f", "=&f"))
        return value.view(np.float32) if is_float else value.view(np.int32) if value.dtype == np.float32 else value

    def fill(fragment, read):
        flat = fragment.registers.reshape(-1)
        for i in range(flat.size):
            flat[i] = tuple(read(i))

    def fragment_of_words(shape, element, words):
        fragment = Fragment(shape)
        fragment.registers[:] = words
        return fragment

    def loop(count, carry, step):
        for i in range(np.max(count)):
            new = step(np.full(machine.lane.shape, i, np.int32), carry)
            is_run = i < np.asarray(count)  # a thread that has run its own number of steps keeps what it has
            kept = lambda new, old, is_run=is_run: np.where(is_run, new, _like(old, new))
            carry = new if np.all(is_run) else jax.tree.map(kept, new, carry)
        return carry

    def repeat(condition, step, *carry):
        while np.all(condition(*carry)):
            carry = step(*carry)
        return carry

    def where(condition, compute, otherwise):
        if not np.any(condition):
            return otherwise
        return jax.tree.map(lambda new, old: np.where(condition, _like(new, old), old), compute(), otherwise)

    every = lambda dtype: lambda v: np.full(machine.lane.shape, v, dtype)
    modules = {ptx, peer_words, peer_sums, layer_tail_biases, token_share, token_tile, words_sm80, module}
    swaps = [
        *(mock.patch.object(m, "arith", Arith) for m in modules if hasattr(m, "arith")),
        mock.patch.object(ptx.utils, "thread_idx", lambda: machine.lane),
        mock.patch.object(ptx, "i32", every(np.int32)), mock.patch.object(ptx, "i64", every(np.int64)),
        mock.patch.object(ptx, "f32", every(np.float32)),
        mock.patch.object(ptx, "to_i64", lambda x: x.astype(np.int64)),
        mock.patch.object(ptx, "to_u64", lambda x: x.astype(np.int64) & 0xFFFFFFFF),
        mock.patch.object(ptx, "scalar_value", lambda x: np.broadcast_to(x, machine.lane.shape)),
        mock.patch.object(ptx, "pointer", lambda ref, space: ref), mock.patch.object(ptx, "less", _less),
        mock.patch.object(ptx, "equal", np.equal), mock.patch.object(ptx, "bool_to_i32", lambda x: x.astype(np.int32)),
        mock.patch.object(ptx, "asm", lambda text, _, *args, **kw: assembled(0, text, *args)),
        mock.patch.object(ptx, "asm_value", one),
        mock.patch.object(ptx, "asm_values", lambda text, _, count, *args, **kw: assembled(count, text, *args)),
        *(mock.patch.object(control, f.__name__, f) for f in (loop, repeat, where)),
        mock.patch.object(rows, "empty_fragment", lambda shape, layout, *_: Fragment(shape, layout)),
        mock.patch.object(rows, "fill", fill),
        mock.patch.object(rows, "fragment_of_words", fragment_of_words),
        *([mock.patch.object(module.plgpu, "inline_mgpu", inline)] if hasattr(module, "plgpu") else []),
        mock.patch.object(ptx.utils, "bitcast", lambda x, _: x),
        mock.patch.object(ptx.utils, "dtype_to_ir_type", lambda x: x),
        mock.patch.object(ptx, "int_type", lambda *_: None),
        mock.patch.object(ptx, "less_unsigned", lambda a, b: a.view(np.uint32) < b.view(np.uint32)),
        mock.patch.object(rows, "register_value", lambda register: register[0]),
        mock.patch.object(rows, "pair_element", lambda pair, k: pair[k]),
    ]  # fmt: skip
    if hasattr(module, "lanes"):
        swaps.append(mock.patch.object(module.lanes, "arith", Arith))
    if hasattr(module, "decode_word"):
        decoded = lambda source, target, _=True: f"decode {source} {target}"
        swaps.append(mock.patch.object(module, "decode_word", decoded))
    if hasattr(module, "encode_words"):
        swaps.append(
            mock.patch.object(module, "encode_words", lambda source, target, _=False: f"encode {source} {target}")
        )
    with contextlib.ExitStack() as stack:
        for swap in swaps:
            stack.enter_context(swap)
        yield machine
