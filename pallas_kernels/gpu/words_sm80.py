"""Words of 32 bits in arrays, by their number: their addresses, and stores under a condition. A value is one number of
each thread; addresses are i64 in GMEM and i32 in SMEM."""

from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx


def place(base, number):
    """The address of a word in GMEM."""
    return arith.addi(base, ptx.to_i64(ptx.mul(number, 4)))


def shared_place(base, number):
    """The address of a word in SMEM."""
    return ptx.add(base, ptx.mul(number, 4))


def store(base, number, condition, value, kind: str = "b32"):
    """Stores a word in GMEM if the i32 `condition` is 1. kind: "f32" for a float."""
    ptx.store_if(place(base, number), condition, value, kind=kind)


def store_shared(base, number, condition, value):
    """Stores a word in SMEM if the i32 `condition` is 1."""
    ptx.store_if(shared_place(base, number), condition, value, space="shared")


def of_float(x):
    """The bits of an f32."""
    return ptx.asm_value("mov.b32 $0, $1;", "=r,f", x, pure=True)


def ordered(x):
    """A word whose order, as a number without a sign, is that of the f32: more than 0 but for one NaN."""
    word = of_float(x)
    return arith.xori(word, arith.ori(arith.shrsi(word, ptx.i32(31)), ptx.i32(-(2**31))))


def float_of_ordered(word):
    """The f32 of which `ordered` gives this word."""
    flipped = arith.xori(word, ptx.i32(-1))
    bits = arith.xori(word, arith.ori(arith.shrsi(flipped, ptx.i32(31)), ptx.i32(-(2**31))))
    return ptx.asm_value("mov.b32 $0, $1;", "=f,r", bits, pure=True)


def ones(word):
    """How many bits of a word are set."""
    return ptx.asm_value("popc.b32 $0, $1;", "=r,r", word, pure=True)


def votes(condition):
    """A word with the bits of the lanes of the warp for which the condition, an i1, holds. All lanes must be there."""
    text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1; }"
    return ptx.asm_value(text, "=r,r", ptx.bool_to_i32(condition))


def lower_lanes(lane):
    """A word with the bits of the lanes before this one."""
    return arith.subi(arith.shli(ptx.i32(1), lane), ptx.i32(1))


def barrier():
    """All threads of the CTA."""
    ptx.asm("bar.sync 0;", "")
