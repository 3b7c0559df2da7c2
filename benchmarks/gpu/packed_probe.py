"""Where the time of packed_product_sm90.py goes: kernels that leave something out, at one row."""

from unittest import mock

import jax

from benchmarks.gpu import cupti
from benchmarks.gpu import packed_product as bench
from jattn.ops import product as product_ops
from pallas_kernels.gpu import packed_product_sm90 as kernel
from pallas_kernels.gpu import ptx_sm90 as ptx
from jax._src.lib.mlir.dialects import arith
import dataclasses


def read_only(cfg, weights, xs, acc):
    words = [w for w in jax.tree.leaves(weights)]
    if xs is not None:
        words += jax.tree.leaves(xs)
    total = words[0]
    for w in words[1:]:
        total = arith.xori(total, w)
    value = ptx.asm_value("mov.b32 $0, $1;", "=f,r", total, pure=True)
    first = arith.addf(acc[0][0][0], value)
    return [[[first, *acc[0][0][1:]], *acc[0][1:]], *acc[1:]]


def without_x(cfg, weights, xs, acc):
    return read_only(cfg, weights, None, acc)


def no_loop(count, carry, step):
    words = jax.tree.leaves(carry[0])
    total = words[0]
    for w in words[1:]:
        total = arith.xori(total, w)
    value = ptx.asm_value("mov.b32 $0, $1;", "=f,r", total, pure=True)
    acc = carry[1]
    first = arith.addf(acc[0][0][0], value)
    return carry[0], [[[first, *acc[0][0][1:]], *acc[0][1:]], *acc[1:]]


def main():
    for shape, splits in (("8b_o", dict(across=1, along=16, depth=4, unroll=2)), ("8b_gate_up", dict(across=4, along=2, depth=4, unroll=2))):
        x, groups, size = bench.inputs(shape, "int4_g64", 1)
        given = product_ops._gpu_config(x, groups[0], x.dtype)
        way = dataclasses.replace(given, splits=1, **splits)
        for name, swaps in {
            "whole": {}, "read": dict(_multiply_chunk=read_only), "read, x unused": dict(_multiply_chunk=without_x),
            "first loads only": dict(_loop=no_loop),
        }.items():  # fmt: skip
            jax.clear_caches()
            with mock.patch.multiple(kernel, **swaps) if swaps else mock.patch.object(kernel, "_hold", kernel._hold):
                us = cupti.micros(bench.ours, x, groups, way, iterations=5)[0] / len(groups)
            print("probe", shape, name, f"{us:.2f} us, {size / bench.READ_RATE / us:.2f} of the rate", flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
