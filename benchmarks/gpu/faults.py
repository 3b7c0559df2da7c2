"""Kernels with a fault that compute-sanitizer must find: they show that it sees this program's kernels at all."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx

THREADS = 128
FAR = 1 << 46  # bytes: no allocation is there


def race() -> dict:
    """Each thread reads what a thread of the next warp wrote to shared memory, without a barrier between them."""

    def fault(out, smem):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def exchange(ctx, out, smem):
            me, base = ptx.thread_index(), ptx.pointer(smem, 3)
            ptx.asm("st.shared.b32 [$0], $1;", "r,r", ptx.add(base, ptx.mul(me, 4)), me)
            other = arith.remui(ptx.add(me, ptx.i32(32)), ptx.i32(THREADS))
            found = ptx.asm_value("ld.shared.b32 $0, [$1];", "=r,r", ptx.add(base, ptx.mul(other, 4)))
            _store(out, me, found)

        exchange(out, smem)

    return dict(out=_run(fault, dict(smem=plgpu.SMEM((THREADS,), jnp.int32))), ok=True)


def bounds() -> dict:
    """Each thread reads far past the end of an array."""

    def fault(out):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def read(ctx, out):
            me = ptx.thread_index()
            place = arith.addi(ptx.pointer(out, 0), ptx.i64(FAR))
            _store(out, me, ptx.asm_value("ld.global.b32 $0, [$1];", "=r,l", place))

        read(out)

    return dict(out=_run(fault, {}), ok=True)


def kernel_of(fault, scratch: dict):
    """The kernel, a function without arguments: i32[THREADS]."""

    def body(out, **refs):
        fault(out, **refs)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((THREADS,), jnp.int32),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return jax.jit(kernel)


def _run(fault, scratch: dict) -> int:
    """The sum of what the threads stored."""
    return int(kernel_of(fault, scratch)().sum())


def _store(out, me, value):
    place = arith.addi(ptx.pointer(out, 0), ptx.to_i64(ptx.mul(me, 4)))
    ptx.asm("st.global.b32 [$0], $1;", "l,r", place, value)
