"""The pools as operands of a launch: they stay in HBM, and the kernel copies pages of them.

An operand that may lie anywhere (ANY) is put into VMEM by XLA where it fits, which copies a whole pool in each step.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = pl.BlockSpec(memory_space=pltpu.HBM)


def launch(kernel, before, pools, after=()):
    """kernel(*before, *pools, *after); traced, because JAX cannot constrain the memory of an array that is not.

    Without jax_enable_x64, with which a kernel's own integers have 64 bits, which Mosaic refuses. Under vmap, in which
    JAX cannot constrain memory, one launch after the other.
    """

    def traced(before, pools, after):
        return kernel(*before, *(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in pools), *after)

    with jax.enable_x64(False):
        return jax.jit(jax.custom_batching.sequential_vmap(traced))(before, pools, after)
