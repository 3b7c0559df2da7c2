"""The end of a product with packed matrices, sums in shared memory -> y in GMEM, and what all of its kernels share.

Warps of a CTA and the CTAs of a cluster share the inner dimension. Each CTA has its sums in shared memory as floats
[along, tile_rows, pitch]. All threads of the cluster add up some of them, always in the same order.

A config is a PackedProductConfig or a PackedWgmmaConfig; of `check_operands` and `of_each` any PackedConfig.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.packed_codes_sm90 import unit_of_scaled
from pallas_kernels.gpu.packed_product_config import BITS, ITEM_BYTES
from pallas_kernels.gpu.ptx_sm90 import of_peer

Packed = tuple[jax.Array, jax.Array, "jax.Array | None", "jax.Array | None"]
"""values, scales, zero points, factor: those of a QuantisedArray (jattn/ops/quantised.py)."""


def check_operands(cfg, x: jax.Array, matrices: Sequence[Packed], experts: int = 0):
    """ValueError unless the arrays have the shapes and dtypes of the config: a kernel would read beyond their ends."""
    lead, groups, is_four = (experts,) if experts else (), cfg.inner // cfg.group, BITS[cfg.format] == 4
    codes, rows = {"int8": "int8", "fp8": "uint8"}.get(cfg.format, "uint32"), cfg.inner // 8 if is_four else cfg.inner
    wanted = [("x", x, (cfg.x_rows, cfg.inner), cfg.x_dtype)]
    for width, (values, scales, zero_points, factor) in zip(cfg.widths, matrices, strict=True):
        for name, array, has in (("zero_points", zero_points, cfg.has_zeros), ("factor", factor, cfg.has_factor)):
            if (array is not None) != has:
                raise ValueError(f"{name} {'are missing' if has else 'are given'}: {cfg} says otherwise")
        wanted += [("values", values, (*lead, rows, width), codes)]
        wanted += [("scales", scales, (*lead, groups, width), cfg.scale_dtype)]
        wanted += [("zero_points", zero_points, (*lead, groups, width), "int8")] if cfg.has_zeros else []
        wanted += [("factor", factor, (*lead, 1, width), "float32")] if cfg.has_factor else []
    for name, array, shape, dtype in wanted:
        if (array.shape, array.dtype.name) != (shape, dtype):
            seen = f"{name} {array.dtype.name}{list(array.shape)}"
            raise ValueError(f"{seen} must be {dtype}{list(shape)} in a packed product of {cfg.inner} inputs")


def joined(matrices: Sequence[Packed]) -> list[jax.Array]:
    """The arrays of all matrices, one matrix after the other, as a kernel takes them."""
    return [array for matrix in matrices for array in matrix if array is not None]


def of_each(cfg, arrays: Sequence) -> list[Sequence]:
    """What `joined` joined, of each matrix."""
    return [arrays[cfg.arrays * i : cfg.arrays * (i + 1)] for i in range(len(cfg.widths))]


def apart(cfg, y: jax.Array) -> tuple[jax.Array, ...]:
    """The results of each matrix. Joined again, they are y itself to XLA."""
    return tuple(jnp.split(y, np.cumsum(cfg.widths)[:-1], axis=1))


@dataclasses.dataclass(frozen=True)
class Results:
    """Where the results of a CTA belong. Addresses are those of its matrix, and of its expert."""

    scales: object  # i64
    factor: object  # i64, or None
    out: object  # i64: of the first row, and of the matrix's first column
    width: object  # i32, of the matrix
    column: object  # i32, of the strip's first
    count: object  # i32, rows


def results_of(cfg, addresses, strip, tile) -> Results:
    """The results of a strip and a tile; addresses: of the scales of each matrix, of the factor of each, then of y."""
    *own, out = addresses
    scales, factors = own[: len(cfg.widths)], own[len(cfg.widths) :]
    row = ptx.mul(tile, cfg.tile_rows)
    return Results(
        scales=of_matrix(cfg, strip, scales), factor=of_matrix(cfg, strip, factors) if factors else None,
        out=first_result(cfg, out, row, strip),
        width=width_of(cfg, strip), column=first_column(cfg, strip),
        count=arith.minsi(ptx.i32(cfg.tile_rows), arith.subi(ptx.i32(cfg.rows), row)),
    )  # fmt: skip


def of_matrix(cfg, strip, choices):
    """The choice of the matrix to which a strip belongs."""
    chosen = choices[0]
    for first, choice in zip(cfg.first_strips[1:], choices[1:], strict=True):
        chosen = arith.select(ptx.less(strip, ptx.i32(first)), chosen, choice)
    return chosen


def width_of(cfg, strip):
    """The width of the matrix of a strip."""
    return of_matrix(cfg, strip, [ptx.i32(width) for width in cfg.widths])


def first_column(cfg, strip):
    """The first column of a strip in its matrix."""
    first = of_matrix(cfg, strip, [ptx.i32(first) for first in cfg.first_strips])
    return ptx.mul(arith.subi(strip, first), cfg.strip)


def first_result(cfg, out, row, strip):
    """The address, in a row of y, of the first column of the strip's matrix."""
    column = of_matrix(cfg, strip, [ptx.i32(sum(cfg.widths[:i])) for i in range(len(cfg.widths))])
    return place_of(out, row, ptx.i32(cfg.joined_width), column, ITEM_BYTES[cfg.dtype])


def place_of(base, row, width, column, size: int):
    """Address of (row, column) of a GMEM array of rows of `width` elements of `size` bytes."""
    at = arith.addi(arith.muli(ptx.to_i64(row), ptx.to_i64(width)), ptx.to_i64(column))
    return arith.addi(base, arith.muli(at, ptx.i64(size)))


def load_words(place, words: int, is_used) -> list:
    """32-bit words from a place in GMEM, in one load; what they hold is undefined where is_used is 0."""
    names = ", ".join(f"${k}" for k in range(words))
    kind, names = ("", names) if words == 1 else (f".v{words}", f"{{{names}}}")
    text = f"{{ .reg .pred p; setp.ne.u32 p, ${words + 1}, 0; @p ld.global{kind}.b32 {names}, [${words}]; }}"
    constraints = ",".join(["=r"] * words + ["l", "r"])
    if words == 1:
        return [ptx.asm_value(text, constraints, place, is_used)]
    return ptx.asm_values(text, constraints, words, place, is_used)


def scale_number(dtype: str, words, i: int):
    """Scale i, as f32, of the words that hold some."""
    if dtype == "float32":
        return ptx.asm_value("mov.b32 $0, $1;", "=f,r", words[i], pure=True)
    if dtype == "bfloat16":
        return ptx.float_of_bf16(words[i // 2], i % 2)
    return ptx.float_of_f16(words[i // 2], i % 2)


def wait_for_all(cfg):
    """All threads of the cluster; what they stored becomes visible."""
    ptx.wait_for_cluster(cfg.splits)


def wait_to_leave(cfg):
    """Waits until the other CTAs of the cluster have read the shared memory of this one; it publishes no stores.

    What a thread has read is there before it stores their sum, and it stores that before it arrives.
    """
    if cfg.splits > 1:
        ptx.asm("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;", "")


def add_up(cfg, here: Results, base, split, wg):
    """Each thread of the cluster adds up some numbers of y, and stores them, once all have stored their sums.

    base: of the sums in shared memory.
    """
    threads = 128 * cfg.warpgroups * cfg.splits
    own = ptx.add(ptx.mul(ptx.add(ptx.mul(split, cfg.warpgroups), wg), 128), ptx.thread_index())
    firsts = range(0, min(cfg.tile_rows, cfg.rows) * cfg.strip, threads)
    columns = {at: _column(cfg, here, ptx.add(own, ptx.i32(at))) for at in sorted({n % cfg.strip for n in firsts})}
    wait_for_all(cfg)
    peers = [base] if cfg.splits == 1 else [of_peer(base, rank) for rank in range(cfg.splits)]
    space = "shared" if cfg.splits == 1 else "shared::cluster"
    for first in firsts:
        column = columns[first % cfg.strip]
        row = ptx.add(column.row, ptx.i32(first // cfg.strip))
        is_used = ptx.bool_to_i32(arith.andi(ptx.less(row, here.count), column.is_used))
        inside, total = ptx.mul(ptx.add(ptx.mul(row, cfg.pitch), column.of_strip), 4), None
        for peer in peers:
            for part in range(cfg.along):
                offset = 4 * part * cfg.tile_rows * cfg.pitch
                text = "{{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.{}.f32 $0, [$1+{}]; }}"
                value = ptx.asm_value(text.format(space, offset), "=&f,r,r", ptx.add(peer, inside), is_used)
                total = value if total is None else arith.addf(total, value)
        for multiplier in column.multipliers:
            total = arith.mulf(total, multiplier)
        place = place_of(here.out, row, ptx.i32(cfg.joined_width), column.of_matrix, ITEM_BYTES[cfg.dtype])
        _store(cfg.dtype, place, total, is_used)


@dataclasses.dataclass(frozen=True)
class _Column:
    """A column of which a thread adds up some rows; mostly it has only one, as its numbers are whole rows apart."""

    row: object  # i32, the first
    of_strip: object  # i32
    of_matrix: object
    is_used: object  # is it one of the matrix?
    multipliers: list  # f32, of each sum, one after the other


def _column(cfg, here: Results, number) -> _Column:
    """The column of a number of the CTA's results."""
    row, of_strip = arith.divui(number, ptx.i32(cfg.strip)), arith.remui(number, ptx.i32(cfg.strip))
    column = ptx.add(here.column, of_strip)
    is_used = ptx.less(column, here.width)
    load = lambda start, dtype: _of_column(here, start, dtype, column, ptx.bool_to_i32(is_used))
    multipliers = [load(here.scales, cfg.scale_dtype)] if cfg.is_whole else []
    multipliers += [load(here.factor, "float32")] if cfg.has_factor else []
    multipliers += [ptx.f32(unit_of_scaled(cfg.scale_dtype, cfg.element))] if cfg.scales_codes else []
    return _Column(row, of_strip, column, is_used, multipliers)


def _of_column(here: Results, start, dtype: str, column, is_used):
    """The number of a column in a row of GMEM."""
    size = ITEM_BYTES[dtype]
    odd = arith.andi(column, ptx.i32(1)) if size == 2 else ptx.i32(0)
    place = place_of(start, ptx.i32(0), here.width, arith.subi(column, odd), size)
    word = arith.shrui(load_words(place, 1, is_used)[0], ptx.mul(odd, 16))
    return scale_number(dtype, [word], 0)


def _store(dtype: str, place, value, is_used):
    text = "{ .reg .pred p; .reg .b16 h; setp.ne.u32 p, $2, 0; "
    if dtype == "float32":
        text += "@p st.global.f32 [$0], $1; }"
    else:
        text += f"cvt.rn.{'bf16' if dtype == 'bfloat16' else 'f16'}.f32 h, $1; @p st.global.b16 [$0], h; }}"
    ptx.asm(text, "l,f,r", place, value, is_used)
