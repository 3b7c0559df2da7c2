"""Reads XLA's listing of a compiled dispatch: donated arguments, and the operations of its loop over steps.

The loop is the one whose body calls a Pallas kernel. Of a conditional the first branch counts: a batch of greedy rows
takes it. `compiled.as_text()` fails on async operations of libtpu (JAX 0.10), so the compiler writes the listing.
"""

import dataclasses
import functools
import glob
import math
import pathlib
import re

KERNEL = 'custom_call_target="tpu_custom_call"'
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
COPIES = ("copy", "transpose", "sparse-core-data-format-call")
ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ALIAS = re.compile(r"input_output_alias=\{(.*?)\}, entry_computation_layout")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(:T\((\d+),(\d+)\))?)?")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\(")
_BRANCHES = re.compile(r"(?:branch_computations=\{|true_computation=)%?([\w.\-]+)")


def options(folder: str) -> dict:
    """Compiler options that write the listing to a folder."""
    return dict(xla_dump_to=folder, xla_dump_hlo_as_text=True)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a listing."""

    label: str  # its own name, e.g. all-reduce.62.cloned.1.call-done
    name: str  # of the operation, e.g. async-done
    result: str  # its type, layout included
    text: str

    @property
    def kind(self) -> str:
        """What is done; of an asynchronous operation the last part says it: all-reduce-done, or async-done by label.

        On tpu7x the SparseCores exchange and copy, as async operations whose labels alone say what they are.
        """
        return self.label.partition(".")[0] if self.name == "async-done" else self.name.removesuffix("-done")

    @property
    def bytes(self) -> int:
        """Of all arrays of the result, padded to tiles."""
        return sum(physical_bytes(array) for array in _ARRAY.finditer(self.result))


def physical_bytes(array: re.Match) -> int:
    """Bytes of an array in memory: its two minor axes are whole tiles."""
    dtype, shape, order, tiled, *tile = array.groups()
    sizes = [int(n) for n in shape.split(",") if n]
    if tiled and len(sizes) >= 2:
        minor = [int(n) for n in order.split(",")]
        for axis, unit in zip(minor[1::-1], map(int, tile), strict=True):
            sizes[axis] = -(-sizes[axis] // unit) * unit
    return math.prod(sizes) * ITEM_BYTES.get(dtype, 4)


@dataclasses.dataclass(frozen=True, eq=False)
class Listing:
    """The computations of a module by name, each a list of operations."""

    text: str

    @functools.cached_property
    def computations(self) -> dict[str, list[Operation]]:
        found: dict[str, list[Operation]] = {}
        lines: list[Operation] = []
        for line in self.text.splitlines():
            if match := _COMPUTATION.match(line):
                lines = found.setdefault(match[2], [])
            elif match := _OPERATION.match(line):
                lines.append(Operation(match[1], match[3], match[2], line))
        return found

    @property
    def donated(self) -> list[int]:
        """The arguments whose memory a result takes over."""
        match = _ALIAS.search(self.text)
        return [] if match is None else [int(n) for n in re.findall(r": \((\d+),", match[1])]

    @property
    def step(self) -> list[Operation]:
        """The operations of the loop's body and of the first branch of each conditional in it."""
        bodies = [ops for ops in self.computations.values() if any(KERNEL in op.text for op in ops)]
        if len(bodies) != 1:
            raise ValueError(f"{len(bodies)} computations call a kernel; wanted one, the body of the loop over steps")
        return self._with_branches(bodies[0])

    @property
    def around(self) -> list[Operation]:
        """The operations before and after the loop."""
        match = re.search(r"^ENTRY %?([\w.\-]+)", self.text, re.MULTILINE)
        return [] if match is None else self._with_branches(self.computations[match[1]])

    def _with_branches(self, operations: list[Operation]) -> list[Operation]:
        found = list(operations)
        for op in operations:
            if op.name == "conditional" and (branch := _BRANCHES.search(op.text)):
                found += self._with_branches(self.computations[branch[1]])
        return found


def kernels(operations: list[Operation]) -> int:
    """Calls of Pallas kernels."""
    return sum(KERNEL in op.text for op in operations)


def collectives(operations: list[Operation]) -> list[Operation]:
    """Exchanges between devices, each once."""
    return [op for op in operations if op.kind in COLLECTIVES]


def copies(operations: list[Operation], shape: tuple[int, ...]) -> list[Operation]:
    """Copies of whole arrays of this shape, e.g. to another layout."""
    wanted = f"[{','.join(map(str, shape))}]"
    return [op for op in operations if op.kind in COPIES and wanted in op.result]


def read(folder: str, name: str) -> Listing:
    """The listing of the function with this name, after all passes."""
    files = glob.glob(f"{glob.escape(folder)}/*.jit_{name}.*after_optimizations.txt")
    if len(files) != 1:
        raise FileNotFoundError(f"{len(files)} listings of {name!r} in {folder}; wanted one")
    return Listing(pathlib.Path(files[0]).read_text())
