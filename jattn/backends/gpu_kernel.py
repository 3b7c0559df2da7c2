"""Which GPU kernel computes a layer, with which static arguments, and why one cannot: for `pallas_gpu`.

There are two kernels for one interface: Hopper's (TMA and wgmma) on sm_90, and a warp-level one (cp.async and mma.sync)
on the other chips since Ampere. On sm_90 the warp-level one computes pages whose size 8 does not divide, since TMA
copies groups of 8 rows, and tiles that need more registers than nvJitLink gives a warpgroup. A `platform` of
Chip("gpu", "sm_80") takes the warp-level kernel on a Hopper card too, to check it there.
"""

import dataclasses
import functools
from typing import Any

import jax

from jattn import device
from jattn.backends.parallel import ContextParallel
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.spec import AttentionSpec
from jattn.types import AttentionType
from pallas_kernels.algebra.shards import ShardRule
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.config_sm80 import CHIPS, WarpKernelConfig
from pallas_kernels.gpu.supports import COPY_ROWS, supports
from pallas_kernels.gpu.supports_sm80 import supports as warps_support
from pallas_kernels.gpu.tile_policy import default_config
from pallas_kernels.gpu.tile_policy_sm80 import warp_config

QUERY_DTYPES = ("bfloat16", "float16")
HOPPER = Chip("gpu", "sm_90")
ONE_RANK = ContextParallel()
PLAIN_LONG_TILES: dict[str, Any] = dict(computing=2, weights_first=False)
"""Long tiles without what tile_policy.py adds in some batches, for more registers."""
WARPS_SINCE = (0, 12)  # the version of JAX that lowers the warp-level kernel for chips other than sm_90
TILES_8BIT = "sm_80"  # whose tiles of the warp-level kernel were timed over an 8-bit cache on an H200: see below


def kernel_config(
    spec: AttentionSpec, cache_spec: KVCacheSpec, dtype: str, common: CommonAttentionMetadata | None = None,
    chip: Chip = HOPPER, out_dtype: str | None = None, parallel: ContextParallel = ONE_RANK, invariant: bool = False,
) -> GpuKernelConfig:  # fmt: skip
    """The static arguments of the chip's kernel for queries of `dtype` and a batch (None: any batch).

    invariant: one kernel for every batch, which cuts no unit. Fields that pay in some batches only are the same in all.
    """
    longest, keys, requests = None, None, 0
    if common is not None and not invariant:
        longest, keys = queries_of(common, spec.attn_type).max_query_len, keys_of(common, spec.attn_type).max_seq_len
        requests = common.seq_lens.shape[0]
    decoder, mask = spec.attn_type is AttentionType.DECODER, spec.mask_rule(common is None or common.is_causal)
    processors = device.processors() if chip == device.detect() else None
    same: dict[str, Any] = dict(whole_units=True, pipelines=1, **PLAIN_LONG_TILES) if invariant else {}
    fields: dict[str, Any] = same | dict(
        rows=longest and longest * spec.group_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        page_size=cache_spec.block_size,
        layout=cache_spec.physical_layout,
        dtype=dtype,
        out_dtype=out_dtype,
        kv_dtype=cache_spec.dtype,
        compute_dtype=spec.compute_dtype,
        token_scales=cache_spec.quant == "per_token_head",
        mask=dataclasses.replace(mask, prefix=False),  # a prefix has a launch of its own
        logits=spec.logit_rule(),
        has_sinks=spec.has_sinks,
        per_request_causal=decoder and common is not None and common.causal_per_request is not None,
        qq_bias=spec.use_qq_bias,
        shards=ShardRule(parallel.dcp_world_size, parallel.interleave if parallel.dcp_world_size > 1 else 1),
    )
    by_warps = functools.partial(warp_config, requests=requests, processors=processors, **fields)
    if not by_wgmma(chip, cache_spec.block_size):
        return by_warps(chip=chip.generation or HOPPER.generation)
    equal = fields_for_equal_registers(chip)
    config = default_config(keys=keys, requests=requests, card=device.card(), **fields | equal)
    if equal and _lacks_registers(config):
        instead = by_warps(chip=TILES_8BIT if config.quantised else HOPPER.generation)
        return config if warps_support(instead) else instead
    return config


def fields_for_equal_registers(chip: Chip) -> dict[str, Any]:
    """Fields of a config whose warpgroups need no more registers than an equal share, if this machine compiles kernels
    of its own chip so (device.keeps_registers); else {}. With others a block's products would wait for one another."""
    are_equal = chip == device.detect() and not device.keeps_registers()
    return PLAIN_LONG_TILES if are_equal else {}


def _lacks_registers(config: GpuKernelConfig) -> bool:
    """Do the tile's products need more registers than an equal share, which warpgroups have if nvJitLink compiles?

    See device.keeps_registers. On an H200, compiled so, before softmax_sm90.py was, a prompt over an 8-bit cache took
    4509 us instead of 1141, and 1967 by the warp-level kernel; heads of 256 807 instead of 233, heads of 128 949
    instead of 854, decodes no longer.
    """
    crowded = config.head_dim > 192 or config.quantised
    return crowded and config.has_long_tiles and config.compute_dtype is None


def usual_query_dtype(cache_spec: KVCacheSpec) -> str:
    """A float cache needs queries of its own dtype. A quantised one takes both dtypes; bfloat16 is assumed."""
    return cache_spec.dtype if cache_spec.dtype in QUERY_DTYPES else "bfloat16"


def _is_hopper(chip: Chip) -> bool:
    """Is it sm_90, or unknown?"""
    return chip.generation in ("", HOPPER.generation)


def by_wgmma(chip: Chip, block_size: int) -> bool:
    """Does Hopper's kernel compute these pages? TMA copies groups of 8 rows; the warp-level kernel single rows."""
    return _is_hopper(chip) and block_size % COPY_ROWS == 0


def config_reasons(config: GpuKernelConfig) -> list[str]:
    """Every reason why the config's kernel cannot serve it."""
    return warps_support(config) if isinstance(config, WarpKernelConfig) else supports(config)


def version_reasons(chip: Chip) -> list[str]:
    """JAX before 0.12 lowers Mosaic GPU kernels for sm_90 only, whatever `platform` says. No JAX helps another chip."""
    if _is_hopper(chip) or chip.generation not in CHIPS:
        return []
    if jax.__version_info__ >= WARPS_SINCE or device.detect().generation == HOPPER.generation:
        return []
    return [f"chip {chip.generation} with JAX {jax.__version__}: its Mosaic GPU needs sm_90; wanted JAX 0.12 or newer"]


def merges_inside(config: GpuKernelConfig, common: CommonAttentionMetadata) -> bool:
    """Does the last CTA of a split unit merge its parts? With few requests each is split over many CTAs, and a launch
    that merges them in parallel is faster: at 600 keys 12.4 us for one request, and 10.0 with that launch. A list in
    waves has units for at least half of the CTAs: 16 requests of 450 to 750 keys take 15.5, with the launch 16.6."""
    is_cut = config.flat_list and not config.whole_units and not config.piece_blocks
    serves = type(config) is GpuKernelConfig and is_cut
    return serves and (config.in_waves or config.num_kv_heads * common.seq_lens.shape[0] >= config.num_ctas)
