"""Counters in global memory by which the CTAs of layer_tail_sm90.py wait for one another.

A product has two sets of counters, so that a CTA waits only for the columns that it reads:

    columns_stored(i, g)   CTAs that have stored group g of product i's columns, those that one CTA reads next
    share_added(i, s)      CTAs that have added up share s of a token's columns, one CTA for each token
    attended(h)            CTAs that have stored a part of kv head h's attention (tail_attention_sm90.py)
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith

from pallas_kernels.gpu import ptx_sm90 as ptx
from pallas_kernels.gpu.layer_tail_config import KV_HEADS, THREADS, LayerTailConfig

PRODUCTS = 4
_GROUPS = 8  # counters of a product's groups, and as many of its shares
_ATTENTION = PRODUCTS * 2 * _GROUPS
COUNTERS = _ATTENTION + KV_HEADS
WORDS = 32 * COUNTERS  # int32: each counter has a line of 128 bytes


def columns_stored(product: int, group):
    """The counter of a group of a product's columns."""
    return 2 * _GROUPS * product + group


def share_added(product: int, share):
    """The counter of a share of the columns of all tokens."""
    return 2 * _GROUPS * product + _GROUPS + share


def attended(kv_head):
    """The counter of a kv head. Works on scalars of the kernel and of inline PTX."""
    return kv_head + _ATTENTION if isinstance(kv_head, int | jax.Array) else ptx.add(kv_head, ptx.i32(_ATTENTION))


def groups(cfg: LayerTailConfig, i: int) -> int:
    """Groups of product i's columns: those that different CTAs read next, if they are whole strips."""
    readers = cfg.products[i + 1].splits if cfg.products[i].gated else cfg.shares
    is_whole = cfg.products[i].has_whole_strips and cfg.products[i].strips % readers == 0
    return readers if is_whole and readers <= _GROUPS else 1


def stored_for(cfg: LayerTailConfig, i: int, reader):
    """The counter that a reader (number of a share of product i's columns) waits for."""
    return columns_stored(i, reader if groups(cfg, i) > 1 else jnp.int32(0))


def group_size(cfg: LayerTailConfig, i: int) -> int:
    """The CTAs that arrive at each counter of product i's columns."""
    return cfg.products[i].units // groups(cfg, i)


def arrive(counters, counter):
    """The computing warpgroup's stores so far become visible to those that wait for this counter."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
    def arrive(ctx, counters, counter):
        ptx.asm(f"bar.sync 8, {THREADS};", "")
        text = "{ .reg .pred p; setp.eq.u32 p, $1, 0; @p red.release.gpu.global.add.u32 [$0], 1; }"
        ptx.asm(text, "l,r", address(counters, ptx.scalar_value(counter)), ptx.thread_index())

    arrive(counters, counter)


def address(counters, number):
    """Address of a counter."""
    return arith.addi(ptx.pointer(counters, 0), arith.muli(ptx.to_i64(number), ptx.i64(128)))


def wait_before_tma(counters, counter, count: int):
    """The loading thread waits until `count` CTAs have arrived; then TMA may read what they stored."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ptx.SCALAR))
    def wait(ctx, counters, counter):
        _spin(address(counters, ptx.scalar_value(counter)), count, 31)
        ptx.asm("fence.proxy.async.global;", "")

    wait(counters, counter)


def one_thread_waits(cfg: LayerTailConfig, i: int, counters, reader):
    """Inside inline_mgpu, thread 0 waits for the columns of product i that `reader` reads. A barrier must follow."""
    group = reader if groups(cfg, i) > 1 else ptx.i32(0)
    _spin(address(counters, ptx.add(group, ptx.i32(columns_stored(i, 0)))), group_size(cfg, i), 0)


def every_thread_waits(counters, counter, count):
    """Inside inline_mgpu, each thread waits until `count` CTAs have arrived at its counter."""
    _spin(address(counters, counter), count, THREADS - 1)


def _spin(place, count, last: int):
    """The threads 0 .. last of the warpgroup wait until `count` CTAs have arrived."""
    count = ptx.i32(count) if isinstance(count, int) else count
    text = (
        "{ .reg .pred p; .reg .b32 seen; setp.gt.u32 p, $1, $3; @p bra DONE;"
        " AGAIN: ld.acquire.gpu.global.u32 seen, [$0]; setp.lt.u32 p, seen, $2; @p bra AGAIN; DONE: }"
    )
    ptx.asm(text, "l,r,r,r", place, ptx.thread_index(), count, ptx.i32(last))
