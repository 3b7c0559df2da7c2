"""What the warp-level attention kernel cannot serve: `supports` gives every reason. Each list names what it can."""

import dataclasses

from pallas_kernels.algebra.checks import Subject
from pallas_kernels.gpu.config_sm80 import (
    BLOCK_KV,
    CHIPS,
    MOST_COLUMNS_OF_TWO_HALVES,
    NARROW_ROWS,
    WarpKernelConfig,
)
from pallas_kernels.gpu.supports import list_reasons, shape_reasons

OF_HOPPER = (
    "q_buffers", "fixed_max", "last_block_first", "merges_inside", "pipelines", "computing", "weights_first",
)  # fmt: skip
"""Fields of a config that this kernel does not read. Some of them change the work list, which it would not finish."""


def supports(config: WarpKernelConfig) -> list[str]:
    """Every reason why the kernel cannot serve this config; an empty list if it can."""
    c, reasons = config, shape_reasons(config)
    refuse = reasons.refuse
    refuse(c.chip not in CHIPS, f"chip {c.chip}: wanted one of {', '.join(CHIPS)}")
    refuse(c.narrow_rows not in NARROW_ROWS, f"narrow_rows {c.narrow_rows}: wanted 8 or 16")
    refuse(c.long_tiles and not c.wide_tiles, "long_tiles: wanted wide_tiles")
    halves = (1, 2) if c.v_head_dim <= MOST_COLUMNS_OF_TWO_HALVES and c.wide_tiles else (1,)
    refuse(c.tile_halves not in halves, f"tile_halves {c.tile_halves}: wanted one of {halves}")
    reasons += list_reasons(c)
    refuse(c.block_kv != BLOCK_KV, f"block_kv {c.block_kv}: wanted {BLOCK_KV}")
    refuse(c.stages < c.least_stages, f"stages {c.stages}: wanted at least {c.least_stages}")
    for field in dataclasses.fields(c):
        value = getattr(c, field.name)
        wanted = f"{field.name} {value}: a choice of the Hopper kernel, wanted {field.default}"
        refuse(field.name in OF_HOPPER and value != field.default, wanted)
    refuse(c.num_ctas < 1, f"num_ctas {c.num_ctas}: wanted at least 1")
    refuse(c.compute_dtype is not None, f"compute_dtype {c.compute_dtype}: wanted sm_90 and pages of a multiple of 8")
    if not reasons:
        wanted, room = c.smem_bytes, CHIPS[c.chip].smem_cta
        refuse(wanted > room, f"{wanted} bytes of shared memory; there are {room} on {c.chip}", Subject.MEMORY)
    return reasons
