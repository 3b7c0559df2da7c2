"""Scalars and single PTX instructions inside a Mosaic GPU kernel. A value is one number of each thread."""

import inspect
import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils

SCALAR = plgpu.Layout.WG_SPLAT(())


def int_type(bits: int = 32):
    return ir.IntegerType.get_signless(bits)


def i32(value: int):
    return arith.constant(int_type(), value)


def i64(value: int):
    return arith.constant(int_type(64), value)


def f32(value: float):
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), value))


def hex_f32(value: float) -> str:
    """PTX's text of a float32."""
    return f"0f{np.float32(value).view(np.uint32):08X}"


def to_i64(x):
    """i32 -> i64."""
    return arith.extsi(int_type(64), x)


def to_u64(x):
    """i32 without a sign -> i64."""
    return arith.extui(int_type(64), x)


def scalar_value(fragment):
    """The value of a scalar argument of inline_mgpu."""
    return fragment.registers.item()


def raw_pointer(ref, space: int):
    """LLVM pointer (GMEM, 0, or SMEM, 3) to a memref's first element."""
    if "memory_space" in inspect.signature(utils.memref_ptr).parameters:
        return utils.memref_ptr(ref, memory_space=space or None)
    return utils.memref_ptr(ref)


def pointer(ref, space: int):
    """i64 (GMEM, 0) or i32 (SMEM, 3) address of a memref's first element."""
    return llvm.ptrtoint(int_type(32 if space else 64), raw_pointer(ref, space))


def thread_index(*, hidden: bool = False):
    """Thread index within the warpgroup. hidden: see lane_position."""
    thread = arith.remui(utils.thread_idx(), i32(128))
    if hidden:
        thread = arith.remui(asm_value("mov.b32 $0, $1;", "=r,r", thread), i32(128))  # the compiler knows its range
    return thread


def lane_position(*, hidden: bool = False):
    """(g = lane / 4, t = lane % 4, lane, number of the warp in the warpgroup).

    hidden: addresses that depend on it are computed where they are used, and not once for a loop: see `opaque`.
    """
    thread = thread_index(hidden=hidden)
    lane = arith.remui(thread, i32(32))
    return arith.divui(lane, i32(4)), arith.remui(lane, i32(4)), lane, arith.divui(thread, i32(32))


def asm(text: str, constraints: str, *args, result=None, pure: bool = False):
    """Emits inline PTX with one result of MLIR type `result`, or none. pure: the compiler may move or drop it."""
    result = result or ir.Type.parse("!llvm.void")
    return llvm.inline_asm(result, list(args), text, constraints, has_side_effects=not pure)


def opaque(x):
    """The i32 scalar `x`, hidden from the compiler's constant propagation.

    Addresses that depend on it are computed where they are used. Constant ones would be moved out of the loop and stay
    in registers: 72 descriptors of two registers each for a product over 576 columns.
    """

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, SCALAR))
    def hide(ctx, x):
        from jax.experimental.mosaic.gpu import fragmented_array as fa

        value = asm_value("mov.b32 $0, $1;", "=r,r", scalar_value(x))
        return fa.FragmentedArray.splat(value, (), is_signed=True)

    return hide(x)


def asm_value(text: str, constraints: str, *args, pure: bool = False):
    """Emits inline PTX with one result: f32 where its constraint is =f, else i32."""
    kind = ir.F32Type.get() if constraints.startswith(("=f", "=&f")) else int_type()
    return asm(text, constraints, *args, result=kind, pure=pure)


def asm_values(text: str, constraints: str, count: int, *args, pure: bool = False):
    """Emits inline PTX with `count` results: f32 where a result's constraint is =f, else i32."""
    kinds = [ir.F32Type.get() if of.endswith("f") else int_type() for of in constraints.split(",")[:count]]
    struct = ir.Type.parse(f"!llvm.struct<({', '.join(map(str, kinds))})>")
    results = asm(text, constraints, *args, result=struct, pure=pure)
    return [llvm.extractvalue(kind, results, [k]) for k, kind in enumerate(kinds)]


def add(*terms):
    """The sum of integers."""
    total = terms[0]
    for term in terms[1:]:
        total = arith.addi(total, term)
    return total


def mul(value, constant: int):
    return arith.muli(value, i32(constant))


def divided(value, constant: int) -> tuple:
    """(quotient, remainder) of an i32 without a sign."""
    return arith.divui(value, i32(constant)), arith.remui(value, i32(constant))


def bit(value, place: int):
    """i32: the bit at `place` of a number."""
    return arith.andi(arith.shrui(value, i32(place)), i32(1))


def less(a, b):
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def less_unsigned(a, b):
    """a < b as unsigned numbers; a negative number is a large one."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def equal(a, b):
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def negated(pred):
    """i1: the opposite."""
    return equal(bool_to_i32(pred), i32(0))


def bool_to_i32(pred):
    """i1 -> i32, since inline PTX takes no predicates."""
    return arith.extui(int_type(), pred)


def fma(a, b, c):
    return asm_value("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", a, b, c, pure=True)


def fmax(a, b):
    return asm_value("max.f32 $0, $1, $2;", "=f,f,f", a, b, pure=True)


def exp2(x):
    return asm_value("ex2.approx.ftz.f32 $0, $1;", "=f,f", x, pure=True)


def exp(x):
    return exp2(arith.mulf(x, f32(math.log2(math.e))))


def log2(x):
    return asm_value("lg2.approx.f32 $0, $1;", "=f,f", x, pure=True)


def divide(a, b):
    return asm_value("div.full.f32 $0, $1, $2;", "=f,f,f", a, b, pure=True)


def pack_16bit(low, high, dtype: str):
    """Two f32 -> one word of two bfloat16 or float16, rounded to nearest."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[dtype]
    return asm_value(f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f", high, low, pure=True)


def upper_half(x):
    """An f32 with the lower 16 bits 0: a bfloat16."""
    return asm_value("and.b32 $0, $1, 0xffff0000;", "=f,f", x, pure=True)


def upper_halves(low, high):
    """The word of the upper halves of two f32."""
    return asm_value("prmt.b32 $0, $1, $2, 0x7632;", "=r,f,f", low, high, pure=True)


def float_of_bf16(word, half: int):
    """The f32 of the low (0) or high (1) bfloat16 of a word."""
    text = "and.b32 $0, $1, 0xffff0000;" if half else "shl.b32 $0, $1, 16;"
    return asm_value(text, "=f,r", word, pure=True)


def float_of_f16(word, half: int):
    """The f32 of the low (0) or high (1) float16 of a word."""
    text = "{ .reg .b16 h<2>; mov.b32 {h0, h1}, $1; cvt.f32.f16 $0, h" + str(half) + "; }"
    return asm_value(text, "=f,r", word, pure=True)


def float_of_byte(word, byte: int):
    """The f32 of a signed byte of a word."""
    number = asm_value(f"bfe.s32 $0, $1, {8 * byte}, 8;", "=r,r", word, pure=True)
    return asm_value("cvt.rn.f32.s32 $0, $1;", "=f,r", number, pure=True)


def byte_permute(word, selector: int):
    """The bytes of a word in the order of the selector's four hexadecimal digits."""
    return asm_value(f"prmt.b32 $0, $1, 0, {selector:#x};", "=r,r", word, pure=True)


def shuffle_xor(value, distance: int):
    """The f32 of lane (own ^ distance) of the warp."""
    return asm_value(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", "=f,f", value)


def predicated_load(kind: str, count: int = 1, cached: str = "nc", offset: str = "") -> str:
    """PTX: `count` values from an address, plus `offset` as in "+16", if the last operand is not 0; zeros otherwise."""
    names = [f"${i}" for i in range(count)]
    zeros = "".join(f" mov.b32 {name}, 0;" for name in names)
    target = "{" + ", ".join(names) + "}" if count > 1 else names[0]
    vector = f"v{count}." if count > 1 else ""
    load = f"@p ld.global.{cached}.{vector}{kind} {target}, [${count}{offset}];"
    return f"{{ .reg .pred p; setp.ne.u32 p, ${count + 1}, 0;{zeros} {load} }}"


def load_word(place, mask):
    """i32 that no thread of the launch writes; 0 without the mask."""
    return asm_value(predicated_load("b32"), "=&r,l,r", place, bool_to_i32(mask), pure=True)


def load_words(place, mask=None):
    """4 words that no thread of the launch writes; 0 without the mask. mask None: all threads load."""
    if mask is None:
        return asm_values("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", 4, place, pure=True)
    return asm_values(predicated_load("b32", 4), "=&r,=&r,=&r,=&r,l,r", 4, place, bool_to_i32(mask), pure=True)


def load_floats(place):
    """8 f32 that no thread of the launch writes."""
    text = "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];"
    return [x for i in (0, 16) for x in asm_values(text, "=f,=f,=f,=f,l", 4, arith.addi(place, i64(i)), pure=True)]


def load_now(place, mask):
    """4 f32 that other CTAs may have written; 0 without the mask."""
    return asm_values(predicated_load("f32", 4, "cg"), "=&f,=&f,=&f,=&f,l,r", 4, place, bool_to_i32(mask))


def store_if(place, condition, *values, kind: str = "b32", space: str = "global", offset: int | None = None):
    """Stores one value of PTX type `kind`, or a vector of them, if the i32 `condition` is not 0.

    offset: bytes to add to the address.
    """
    names = ", ".join(f"${2 + i}" for i in range(len(values)))
    vector, source = (f"v{len(values)}.", "{" + names + "}") if len(values) > 1 else ("", names)
    target = "$0" if offset is None else f"$0+{offset}"
    text = f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.{space}.{vector}{kind} [{target}], {source}; }}"
    address, of_value = {"global": "l", "shared": "r"}[space], {"b32": "r", "f32": "f", "b64": "l"}[kind]
    asm(text, ",".join([address, "r", *[of_value] * len(values)]), place, condition, *values)


def shuffle_xor_word(word, distance: int):
    """The i32 of lane (own ^ distance) of the warp."""
    return asm_value(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", "=r,r", word)


def largest_halves(words, distances):
    """The largest magnitudes in the low and the high halves of words of two bfloat16 or float16, as their bits.

    distances: to the lanes with which this one exchanges what it has, one after the other. Bits of magnitudes are in
    their order.
    """
    top = i32(0)
    for word in words:
        text = "{ .reg .b32 t; and.b32 t, $1, 0x7fff7fff; max.u16x2 $0, t, $2; }"
        top = asm_value(text, "=r,r,r", word, top, pure=True)
    for distance in distances:
        text = f"{{ .reg .b32 t; shfl.sync.bfly.b32 t, $1, {distance}, 31, -1; max.u16x2 $0, t, $1; }}"
        top = asm_value(text, "=r,r", top)
    return top


def of_peer(place, rank):
    """The same SMEM address in another CTA of the cluster, an int or i32."""
    rank = i32(rank) if isinstance(rank, int) else rank
    return asm_value("mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", place, rank)


def wait_for_cluster(ctas: int):
    """All threads of a cluster of so many CTAs; what they stored becomes visible."""
    cluster = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    asm(cluster if ctas > 1 else "bar.sync 0;", "")


def transpose_8x8(word):
    """Transposes an 8 x 8 matrix of 16-bit values, two in each lane of the warp."""
    return asm_value("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", word)


def ldmatrix(place, transpose: bool = False, offset: int = 0):
    """Loads four 8 x 8 matrices of 16-bit units from SMEM; lane 8 i + j gives the address of row j of matrix i.

    offset: bytes to add to every address.
    """
    trans = ".trans" if transpose else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return asm_values(text, "=r,=r,=r,=r,r", 4, place)


def mma(a, b, c, dtype: str):
    """c + a b in f32: a [16, 16] in 4 words, b [16, 8] in 2 words, c [16, 8] in 4 floats."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return asm_values(text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", 4, *a, *b, *c, pure=True)


def mma_8(a, b, dtype: str):
    """a b in f32: a [16, 8] in 2 words, b [8, 8] in 1 word; 4 floats."""
    kind, zero = {"bfloat16": "bf16", "float16": "f16"}[dtype], f32(0.0)
    text = f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32"
    text += " {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $7, $7, $7};"
    return asm_values(text, "=f,=f,=f,=f,r,r,r,f", 4, *a, b, zero, pure=True)


def flat_row(row, tok0, head0, row0, group: int, heads: int):
    """i64 flat row of [T * H, ...] for tile row `row`."""
    packed = arith.addi(row0, row)
    token = arith.divui(packed, i32(group))
    head = arith.subi(packed, arith.muli(token, i32(group)))
    token = arith.muli(to_i64(arith.addi(tok0, token)), i64(heads))
    return arith.addi(token, to_i64(arith.addi(head0, head)))


def pool_row(block, offset, head, *, heads: int, page: int, heads_first: bool):
    """i64 row of a pool [N, K, S, ...] (heads_first) or [N, S, K, ...] for i32 block, offset in it, and kv head."""
    outer, size, inner = (head, page, offset) if heads_first else (offset, heads, head)
    inside = arith.addi(arith.muli(outer, i32(size)), inner)
    return arith.addi(arith.muli(to_i64(block), i64(heads * page)), to_i64(inside))


def swizzled(row, col_byte, row_bytes: int, swizzle: int):
    """Byte offset of (row, col_byte) in a swizzled tile of pieces of 8 rows and `swizzle` bytes, row-major."""
    piece_row, piece_col = arith.divui(row, i32(8)), arith.divui(col_byte, i32(swizzle))
    piece = arith.addi(arith.muli(piece_row, i32(row_bytes // swizzle)), piece_col)
    inside = arith.addi(arith.muli(arith.remui(row, i32(8)), i32(swizzle)), arith.remui(col_byte, i32(swizzle)))
    # the number of a 16-byte chunk is xored with the number of its 128-byte line
    mask = i32(swizzle - 16)
    mixed = arith.xori(inside, arith.andi(arith.shrui(inside, i32(3)), mask))
    return arith.addi(arith.muli(piece, i32(8 * swizzle)), mixed)


def put_numbers(box, numbers):
    """Writes 4 n i32 scalars to SMEM i32[16], by every thread, without the two barriers of each plain store."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(SCALAR,) * len(numbers)))
    def put(ctx, box, *numbers):
        base = pointer(box, 3)
        for i in range(0, len(numbers), 4):
            words = [scalar_value(x) for x in numbers[i : i + 4]]
            asm(f"st.shared.v4.b32 [$0+{4 * i}], {{$1, $2, $3, $4}};", "r,r,r,r,r", base, *words)

    put(box, *numbers)
