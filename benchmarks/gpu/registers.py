"""Registers and spills of the warp-level kernel, compiled for a named GPU on a machine without one.

    python -m benchmarks.gpu.registers sm_86                     every shape below, one JSON row each
    python -m benchmarks.gpu.registers sm_86 decode_d128_bf16    these shapes

It needs JAX 0.12 with its CUDA plugin and ptxas (packages jax-cuda13-plugin, jax-cuda13-pjrt, nvidia-cuda-nvcc,
nvidia-nvvm, nvidia-cuda-runtime, nvidia-nvjitlink, nvidia-cuda-cupti). A process compiles for one chip: Mosaic's cache
of compiled kernels does not tell chips apart.
"""

import json
import os
import re
import sys
import tempfile
from unittest import mock

import jax
import jax.numpy as jnp

from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.config_sm80 import CHIPS, WarpKernelConfig
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.supports_sm80 import supports
from pallas_kernels.gpu.tile_policy_sm80 import warp_config
from pallas_kernels.gpu.work_list import build_work_list

BASE = dict(num_heads=32, num_kv_heads=8, page_size=16, dtype="bfloat16", logits=LogitRule(scale=0.1))
EVERY_OPTION = dict(
    logits=LogitRule(scale=0.1, soft_cap=30.0, has_alibi=True), has_sinks=True, mask=MaskRule(left=99), layout="NHD"
)
SHAPES = {
    **{f"decode_d{d}_bf16": dict(rows=4, head_dim=d, v_head_dim=d) for d in (16, 64, 80, 96, 128, 192, 256)},
    "decode_d192_v128_bf16": dict(rows=4, head_dim=192, v_head_dim=128),
    "decode_d128_f16": dict(rows=4, head_dim=128, v_head_dim=128, dtype="float16", kv_dtype="float16"),
    "decode_d128_16_rows": dict(rows=16, head_dim=128, v_head_dim=128),
    "decode_d128_every_option": dict(rows=4, head_dim=128, v_head_dim=128, **EVERY_OPTION),
    **{f"mixed_d{d}_bf16": dict(head_dim=d, v_head_dim=d) for d in (16, 64, 80, 96, 128, 192, 256)},
    "mixed_d192_v128_bf16": dict(head_dim=192, v_head_dim=128),
    "mixed_d128_f16": dict(head_dim=128, v_head_dim=128, dtype="float16", kv_dtype="float16"),
    "mixed_d128_every_option": dict(head_dim=128, v_head_dim=128, **EVERY_OPTION),
    "decode_d128_64_rows": dict(rows=64, num_heads=64, num_kv_heads=1, head_dim=128, v_head_dim=128),
}
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: {core}
  threads_per_core_limit: 1536 core_count: {processors} fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 1000000000000 l2_cache_size: 41943040
  clock_rate_ghz: 1.4 device_memory_size: 24000000000 shared_memory_per_block_optin: {cta}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 name: "{name}" driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{name}"
"""


def capability(chip: str) -> tuple[int, int]:
    """(8, 6) of sm_86, (12, 0) of sm_120."""
    return divmod(int(chip[3:]), 10)


def topology_of(chip: str):
    """The topology of one GPU of this chip, for JAX to compile for."""
    from jax.experimental import topologies

    known, (major, minor) = CHIPS[chip], capability(chip)
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"  # Mosaic's PTX is then for sm_90a, sm_100a, sm_120a
    sizes = dict(features=features, core=known.smem, cta=known.smem_cta, processors=known.processors)
    text = TARGET.format(**sizes, major=major, minor=minor, name=f"NVIDIA {chip}")
    return topologies.get_topology_desc(platform="cuda", target_config=text, topology="1x1x1")


def step_of(config: WarpKernelConfig, tokens: int = 64, requests: int = 8):
    """(a step of work list, attention and merge, the shapes of its arguments)."""
    c, shape = config, jax.ShapeDtypeStruct
    order = (c.num_kv_heads, c.page_size)
    pool = (32, *(order if c.layout == "HND" else order[::-1]))
    per_head = shape((c.num_heads,), jnp.float32)

    def step(q, k, v, table, starts, seqs, slopes, sinks, k_token, v_token):
        extra = dict(alibi_slopes=slopes) if c.logits.has_alibi else {}
        extra |= dict(sinks=sinks) if c.has_sinks else {}
        extra |= dict(k_token_scale=k_token, v_token_scale=v_token) if c.token_scales else {}
        return ragged_paged_attention(q, k, v, table, build_work_list(starts, seqs, tokens, c), c, **extra)

    arguments = (
        shape((tokens, c.num_heads, c.head_dim), jnp.dtype(c.dtype)),
        *(shape((*pool, dim), jnp.dtype(c.kv_dtype)) for dim in (c.head_dim, c.v_head_dim)),
        *(shape(size, jnp.int32) for size in ((requests, 16), (requests + 1,), (requests,))),
        per_head, per_head, shape(pool, jnp.float32), shape(pool, jnp.float32),
    )  # fmt: skip
    return step, arguments


def compiled(chip: str, config: WarpKernelConfig) -> list[dict]:
    """Compiles a step for the chip: one row for each Mosaic kernel, from ptxas's report."""
    from jax.experimental.mosaic.gpu import utils

    step, arguments = step_of(config)
    mesh = jax.sharding.Mesh(topology_of(chip).devices[:1], ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for a in arguments]
    # with no GPU, JAX takes the chip for sm_90
    with jax.set_mesh(mesh), mock.patch.object(utils, "_infer_arch", lambda: capability(chip)):
        report = _output_of(lambda: jax.jit(step).lower(*arguments).compile())
    found = re.findall(
        r"Compiling entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers", report, re.DOTALL,
    )  # fmt: skip
    names = ("kernel", "target", "stack", "spill_stores", "spill_loads", "registers")
    return [dict(zip(names, (*row[:2], *map(int, row[2:])), strict=True)) for row in found]


def _output_of(function) -> str:
    """What the process writes to its standard error and output while the function runs, C++ included."""
    with tempfile.TemporaryFile("w+") as file:
        saved = [os.dup(fd) for fd in (1, 2)]
        try:
            sys.stdout.flush()
            for fd in (1, 2):
                os.dup2(file.fileno(), fd)
            function()
        finally:
            for fd, old in zip((1, 2), saved, strict=True):
                os.dup2(old, fd)
                os.close(old)
        file.seek(0)
        return file.read()


def main(chip: str, *names: str):
    os.environ |= {"MOSAIC_GPU_DUMP_PTXAS": "1"}
    for name in names or SHAPES:
        fields = BASE | {"kv_dtype": "bfloat16"} | SHAPES[name]
        config = warp_config(chip=chip, **fields)
        assert not supports(config), supports(config)
        tiles = dict(stages=config.stages, block_kv=config.block_kv, ctas=config.num_ctas, smem=config.smem_bytes)
        for row in compiled(chip, config):
            print(json.dumps(dict(shape=name, chip=chip, **row) | tiles), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
