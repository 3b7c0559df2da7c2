"""The states of 64 rows in a warpgroup's registers: (acc f32 (64, n), maximum f32 (64,), sum f32 (64,))."""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu.config import WARPGROUP_ROWS, GpuKernelConfig
from pallas_kernels.gpu.gather_sm90 import gather

LOG2E, LN2 = math.log2(math.e), math.log(2)
M_START = -1e38  # maximum before any key; finite, so that m - m is 0 and exp2(-inf - m) is 0
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)


def value_per_row(cfg: GpuKernelConfig, heads, head0, member, column):
    """f32 (64,): a column of f32[H, 2] for each row's head, times log2(e). Of a lean config it is loaded here again."""
    if cfg.lean:
        return gather(heads, 2 * (head0 + member) + column, ROW_LAYOUT) * LOG2E
    value = full_rows(0.0)
    for g in range(cfg.group):
        value = jnp.where(member == g, heads[head0 + g, column], value)
    return value * LOG2E


def full_rows(value):
    return plgpu.layout_cast(jnp.full((WARPGROUP_ROWS,), value, jnp.float32), ROW_LAYOUT)


def start_state(width: int):
    acc = plgpu.layout_cast(jnp.full((WARPGROUP_ROWS, width), 0, jnp.float32), plgpu.Layout.WGMMA)
    return acc, full_rows(M_START), full_rows(0.0)


def across_columns(vector, shape):
    """f32 or i32 (64,) -> (64, n): the same value in every column."""
    return lax.broadcast_in_dim(vector, shape, [0])


def finish_rows(m, total, sink):
    """Base-2 state and sink -> (factor of acc, natural-log lse). A row that saw no key: (0, -inf)."""
    seen = total > 0.0
    shift = m
    if sink is not None:
        shift = jnp.maximum(m, sink)
        total = total * jnp.exp2(m - shift) + jnp.exp2(sink - shift)
    safe = jnp.where(seen, total, 1.0)
    factor = jnp.exp2(m - shift) / safe if sink is not None else 1.0 / safe
    lse = (shift + lax.log(safe) * LOG2E) * (1 / LOG2E)
    return jnp.where(seen, factor, 0.0), jnp.where(seen, lse, -jnp.inf)
