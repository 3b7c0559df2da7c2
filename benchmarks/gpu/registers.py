"""Registers and spills of what is no kernel of Hopper only, compiled for a named GPU on a machine without one.

    python -m benchmarks.gpu.registers sm_86 [--write | --out DIR]    every case below, one JSON row each
    python -m benchmarks.gpu.registers sm_86 decode_d128_bf16         these cases

It needs JAX 0.12 with its CUDA plugin, ptxas and nvJitLink: `make gpu-aot` installs them, and compares a few cases with
the rows in benchmarks/results/<chip>/registers.jsonl. A process compiles for one chip: Mosaic's cache of compiled
kernels does not tell chips apart.

A row's variant is the compiler of the kernel's PTX. JAX compiles by nvJitLink, relocatably, where that library is
installed, as `pip install jax[cuda13]` does; else by ptxas, a whole program, and by the first ptxas of PATH. Both are
the wheels' here, whatever else the machine has.
"""

import argparse
import ctypes
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import records
from jattn import AttentionParams, KVCacheSpec, empty_cache
from jattn.backends.gpu_write import write_pages
from jattn.device import Chip
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.gpu.config_sm80 import CHIPS, WarpKernelConfig
from pallas_kernels.gpu.draw_sm80 import draw
from pallas_kernels.gpu.expert_choice_sm80 import ChoiceConfig, choose_experts
from pallas_kernels.gpu.logit_row_sm80 import Scaling
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.rotate_write_sm90 import RotateWrite, rotate_and_write
from pallas_kernels.gpu.sampling_floor_sm80 import sampling_floor
from pallas_kernels.gpu.supports_sm80 import supports
from pallas_kernels.gpu.tile_policy_sm80 import warp_config
from pallas_kernels.gpu.work_list import build_work_list
from pallas_kernels.gpu.write_sm90 import write_rows

BASE = dict(num_heads=32, num_kv_heads=8, page_size=16, dtype="bfloat16", logits=LogitRule(scale=0.1))
EVERY_OPTION = dict(
    logits=LogitRule(scale=0.1, soft_cap=30.0, has_alibi=True), has_sinks=True, mask=MaskRule(left=99), layout="NHD"
)
POSITIONS = EVERY_OPTION | dict(
    logits=LogitRule(
        scale=0.1, soft_cap=30.0, has_alibi=True, score_fn=lambda s, h, q, k: s + 0.01 * (h + 1) * jnp.abs(q - k)
    ),
    mask=MaskRule(left=99, mask_fn=lambda h, q, k: ((k * 7 + q + h) & 3) != 0),
    per_request_causal=True,
)
"""Every option that fits in a mask and a logit, each computed from positions."""
CACHES = {  # name -> fields of the config, head dimensions of decode, and those of a mixed batch too
    "bf16": (dict(kv_dtype="bfloat16"), (16, 64, 96, 128, 192, 256), (64, 96, 128, 192, 256)),
    "f16": (dict(dtype="float16", kv_dtype="float16"), (128,), (128,)),
    "e4m3": (dict(kv_dtype="float8_e4m3fn"), (64, 128, 256), (64, 128, 256)),
    "e5m2": (dict(kv_dtype="float8_e5m2"), (128,), (128,)),
    "int8": (dict(kv_dtype="int8"), (128,), (128,)),
    "e4m3_tokens": (dict(kv_dtype="float8_e4m3fn", token_scales=True), (256,), (256,)),
    "int8_tokens_f16": (dict(dtype="float16", kv_dtype="int8", token_scales=True), (128,), (128,)),
}
KINDS = {"decode": dict(rows=4), "mixed": {}}
SHAPES = {
    f"{kind}_d{d}_{cache}": KINDS[kind] | fields | dict(head_dim=d, v_head_dim=d)
    for cache, (fields, *dims) in CACHES.items()
    for kind, of_kind in zip(KINDS, dims, strict=True)
    for d in of_kind
}
SHAPES |= {
    f"{kind}_{name}": rows | dict(kv_dtype="bfloat16", head_dim=128, v_head_dim=128) | fields
    for kind, rows in KINDS.items()
    for name, fields in (
        ("d192_v128_bf16", dict(head_dim=192)),
        ("d128_bf16_every_option", EVERY_OPTION),
        ("d128_int8_tokens_every_option", EVERY_OPTION | dict(kv_dtype="int8", token_scales=True)),
    )
}
SHAPES["decode_d128_bf16_16_rows"] = SHAPES["decode_d128_bf16"] | dict(rows=16)
SHAPES["decode_d128_e4m3_16_rows"] = SHAPES["decode_d128_e4m3"] | dict(rows=16)
INT8_TOKENS_F16 = SHAPES["decode_d128_int8_tokens_f16"] | dict(head_dim=256, v_head_dim=256, rows=16)
SHAPES |= {
    "decode_d256_int8_tokens_f16_16_rows": INT8_TOKENS_F16,
    "decode_d256_int8_tokens_f16_16_rows_positions": INT8_TOKENS_F16 | POSITIONS | dict(qq_bias=True),
    "decode_d192_bf16_16_rows_positions": SHAPES["decode_d192_bf16"] | POSITIONS | dict(rows=16, qq_bias=True),
    "mixed_d128_bf16_positions": SHAPES["mixed_d128_bf16"] | POSITIONS,
    "mixed_d128_bf16_qq_bias": SHAPES["mixed_d128_bf16"] | dict(qq_bias=True),
    "mixed_d128_e5m2_tokens_f16": SHAPES["mixed_d128_int8_tokens_f16"] | dict(kv_dtype="float8_e5m2"),
}
TOKENS_F16 = dict(dtype="float16", token_scales=True)
SHAPES |= {
    "mixed_d256_e4m3_tokens_f16_128_rows_spans": TOKENS_F16 | dict(
        kv_dtype="float8_e4m3fn", head_dim=256, v_head_dim=256, rows=128, num_heads=128, num_kv_heads=1,
        logits=LogitRule(scale=0.1, soft_cap=30.0, score_fn=POSITIONS["logits"].score_fn), mask=MaskRule(spans=True),
    ),
    "mixed_d224_e5m2_tokens_f16_score_fn": TOKENS_F16 | dict(
        kv_dtype="float8_e5m2", head_dim=224, v_head_dim=224, num_heads=8, layout="NHD", has_sinks=True,
        logits=LogitRule(scale=0.1, score_fn=lambda s, h, q, k: s * 1.5), mask=MaskRule(left=99),
    ),
}  # fmt: skip
SHAPES["mixed_d128_bf16_64_rows"] = SHAPES["mixed_d128_bf16"] | dict(rows=64, num_heads=64, num_kv_heads=1)
CHOICES: dict[str, dict[str, Any]] = {
    "choose_experts_qwen3": dict(routes=128, top_k=8, experts=128, least_sum=1e-20),
    "choose_experts_deepseek_v3": dict(
        routes=256, top_k=8, experts=256, groups=8, top_groups=4, group_best=2, factor=2.5, scores="sigmoid",
        has_correction=True, least_sum=1e-20,
    ),
    "choose_experts_longcat": dict(routes=768, top_k=12, experts=512, identity_experts=256, has_correction=True),
    "choose_experts_768_in_32_groups": dict(
        routes=768, top_k=32, experts=768, groups=32, top_groups=8, group_best=4, scores="sigmoid",
        has_correction=True, least_sum=1e-20, has_scale=True,
    ),
}  # fmt: skip
OTHERS = (
    "write_kv_pages", "write_kv_pages_e4m3", "write_kv_pages_int8_tokens", "rotate_and_write", "sampling_floor", "draw",
    *CHOICES,
)  # fmt: skip
CASES = (*SHAPES, *OTHERS)
MODULE, ENTRY = "// Generated by LLVM NVPTX Back-End", r"\.entry (\w+)_mosaic_gpu_kernel"
NVJITLINK_PTX = 2  # nvJitLink's number of this kind of input
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


def missing() -> str:
    """What this Python lacks to compile for a GPU; empty: nothing."""
    if jax.__version_info__ < (0, 12):
        return f"JAX 0.12 or newer, which lowers Mosaic kernels for every chip; this is {jax.__version__}"
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "JAX's CUDA plugin"
    return "" if any(_wheels("bin/ptxas")) else "ptxas, of the wheel nvidia-cuda-nvcc"


def compilers() -> dict[str, Callable[[str], str]]:
    """Name -> function: PTX -> what this compiler reports of it; those that are installed."""
    found: dict[str, Callable[[str], str]] = {"ptxas": by_ptxas}
    return found | ({"nvjitlink": by_nvjitlink} if any(_wheels("lib/libnvJitLink.so*")) else {})


def by_ptxas(ptx: str) -> str:
    (program,) = _wheels("bin/ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        line = [str(program), "-v", f"-arch={_target(ptx)}", file.name, "-o", os.devnull]
        return subprocess.run(line, check=True, capture_output=True, text=True).stderr


def by_nvjitlink(ptx: str) -> str:
    """With the options that XLA gives it."""
    library, handle, size = ctypes.CDLL(str(_wheels("lib/libnvJitLink.so*")[0])), ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"-arch={_target(ptx)}".encode(), b"-verbose", b"-split-compile=1", b"-no-cache"]
    done = library.nvJitLinkCreate(ctypes.byref(handle), len(options), (ctypes.c_char_p * len(options))(*options))
    data = ptx.encode() + b"\0"
    done = done or library.nvJitLinkAddData(handle, NVJITLINK_PTX, data, ctypes.c_size_t(len(data)), None)
    done = done or library.nvJitLinkComplete(handle)
    said = ""
    for log in ("Error", "Info"):
        getattr(library, f"nvJitLinkGet{log}LogSize")(handle, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value + 1)
        getattr(library, f"nvJitLinkGet{log}Log")(handle, text)
        said += text.value.decode()
    library.nvJitLinkDestroy(ctypes.byref(handle))
    if done:
        raise RuntimeError(f"nvJitLink: {said}")
    return said


def _target(ptx: str) -> str:
    return re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]


def _wheels(pattern: str) -> list[pathlib.Path]:
    """The files of NVIDIA's wheels for CUDA 13 that match."""
    found = importlib.util.find_spec("nvidia")
    folders = (found.submodule_search_locations or ()) if found else ()
    return [path for folder in folders for path in (pathlib.Path(folder) / "cu13").glob(pattern)]


def environment() -> dict[str, str]:
    """The environment in which a process compiles without a GPU."""
    own = dict(JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTX="1")
    programs = [str(path.parent) for path in _wheels("bin/ptxas")]
    return own | dict(PATH=os.pathsep.join([*programs, os.environ.get("PATH", "")]))


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


def attention(config: WarpKernelConfig, tokens: int = 64, requests: int = 8):
    """(attention and its merge, the shapes of the arguments)."""
    c, shape = config, jax.ShapeDtypeStruct
    order = (c.num_kv_heads, c.page_size)
    pool = (32, *(order if c.layout == "HND" else order[::-1]))
    per_head = shape((c.num_heads,), jnp.float32)

    def step(q, k, v, table, work, slopes, sinks, k_token, v_token, bias):
        extra = dict(alibi_slopes=slopes) if c.logits.has_alibi else {}
        extra |= dict(sinks=sinks) if c.has_sinks else {}
        extra |= dict(k_token_scale=k_token, v_token_scale=v_token) if c.token_scales else {}
        extra |= dict(qq_bias=bias) if c.qq_bias else {}
        return ragged_paged_attention(q, k, v, table, work, c, **extra)

    of_work = [shape((requests + 1,), jnp.int32), shape((requests,), jnp.int32)]
    of_work += [shape((requests,), jnp.bool_)] if c.per_request_causal else []
    spans = dict(ranges=shape((tokens, 2), jnp.int32)) if c.mask.spans else {}
    work_of = lambda starts, seqs, *causal, **ranges: build_work_list(starts, seqs, tokens, c, *causal, **ranges)
    arguments = (
        shape((tokens, c.num_heads, c.head_dim), jnp.dtype(c.dtype)),
        *(shape((*pool, dim), jnp.dtype(c.kv_dtype)) for dim in (c.head_dim, c.v_head_dim)),
        shape((requests, 16), jnp.int32),
        jax.eval_shape(work_of, *of_work, **spans),
        per_head, per_head, shape(pool, jnp.float32), shape(pool, jnp.float32), shape((16, 16), jnp.float32),
    )  # fmt: skip
    return step, arguments


def write_kv(tokens: int = 64):
    """(write, the shapes of its arguments): of bfloat16 keys and values, as if they had a scale of each token, too."""
    shape = jax.ShapeDtypeStruct
    pool, scales = shape((32, 8, 16, 128), jnp.bfloat16), shape((32, 8, 16), jnp.float32)
    new, new_scales = shape((tokens, 8, 128), jnp.bfloat16), shape((tokens, 8), jnp.float32)

    def step(k, v, k_scale, v_scale, slots, pools, scale_pools):
        return write_rows((k, v), (k_scale, v_scale), slots, pools, scale_pools, page_size=16, heads_first=True)

    slots = shape((tokens,), jnp.int32)
    return step, (new, new, new_scales, new_scales, slots, (pool, pool), (scales, scales))


def rotate_kv(tokens: int = 64):
    """(write that first rotates queries and keys, the shapes of its arguments)."""
    shape = jax.ShapeDtypeStruct
    pool, angles = shape((32, 8, 16, 128), jnp.bfloat16), shape((tokens, 64), jnp.float32)
    sizes = RotateWrite(
        tokens=tokens, heads=32, kv_heads=8, head_dim=128, v_head_dim=128, dim=128, blocks=32, page=16,
        heads_first=True, counters=132,
    )  # fmt: skip
    rows, slots = shape((tokens, sizes.width), jnp.bfloat16), shape((tokens,), jnp.int32)
    return functools.partial(rotate_and_write, sizes=sizes), (rows, angles, angles, slots, (pool, pool))


def write_8_bits(chip: str, **fields):
    """(a backend's write of bfloat16 keys and values to a cache of 8 bits, the shapes of its arguments)."""
    spec = KVCacheSpec(num_blocks=32, block_size=16, num_kv_heads=8, head_dim=128, layout="HND", **fields)
    cache = jax.eval_shape(lambda: empty_cache(spec, platform=Chip("gpu", chip)))
    rows, slots = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)
    return lambda *args: write_pages(Chip("gpu", chip), *args, AttentionParams()), (cache, rows, rows, slots)


def floor_of_samples():
    """(the floor of top_k and top_p, the shapes of its arguments)."""
    shapes = ((64, 128256), jnp.float32), ((64,), jnp.int32), ((64,), jnp.float32)
    step = lambda logits, *cuts: sampling_floor(logits, Scaling.none(64), *cuts)
    return step, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def drawn_tokens():
    """(the draw of tokens, the shapes of its arguments)."""
    shapes = ((64, 128256), jnp.float32), ((64,), jnp.uint32), ((64, 2), jnp.uint32)
    step = lambda logits, *more: draw(logits, Scaling.none(64), *more)
    return step, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


def choice_of_experts(**fields):
    c, shape = ChoiceConfig(tokens=8, **fields), jax.ShapeDtypeStruct
    of_expert = lambda has: shape((c.routes,), jnp.float32) if has else None
    arguments = (
        shape((c.tokens, c.routes), jnp.float32), of_expert(c.has_correction), of_expert(c.has_scale),
        shape((c.tokens,), jnp.int32), shape((1,), jnp.int32),
    )  # fmt: skip
    return lambda *args: choose_experts(*args, c), arguments


def other(chip: str, case: str):
    """(what a case of OTHERS computes, the shapes of its arguments)."""
    if case in CHOICES:
        return choice_of_experts(**CHOICES[case])
    if case == "sampling_floor":
        return floor_of_samples()
    if case == "draw":
        return drawn_tokens()
    if case == "write_kv_pages_e4m3":
        return write_8_bits(chip, dtype="float8_e4m3fn", quant="per_tensor")
    if case == "write_kv_pages_int8_tokens":
        return write_8_bits(chip, dtype="int8", quant="per_token_head")
    return rotate_kv() if case == "rotate_and_write" else write_kv()


def compiled(chip: str, step, arguments) -> dict[str, dict[str, dict]]:
    """Compiles a step for the chip: compiler -> name of each Mosaic kernel -> its registers and spills."""
    from jax.experimental.mosaic.gpu import utils

    mesh = jax.sharding.Mesh(topology_of(chip).devices[:1], ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere), arguments)
    # with no GPU, JAX takes the chip for sm_90
    with jax.set_mesh(mesh), mock.patch.object(utils, "_infer_arch", lambda: capability(chip)):
        report = _output_of(lambda: jax.jit(step).lower(*arguments).compile())
    modules = {kernel: text for text in report.split(MODULE)[1:] for kernel in re.findall(ENTRY, text)}
    assert modules, f"no PTX:\n{report[-2000:]}"
    return {
        compiler: {kernel: _figures(report_of(_without_reports(text))) for kernel, text in modules.items()}
        for compiler, report_of in compilers().items()
    }


def _figures(report: str) -> dict[str, int]:
    found = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", report, re.DOTALL)
    assert len(found) == 1, report[-2000:]
    return dict(zip(("spill_stores", "spill_loads", "registers"), map(int, found[0]), strict=True))


def _without_reports(text: str) -> str:
    """A module without what the compiler of JAX said after it."""
    return re.split(r"^(?:ptxas|info|warning)\b", text, maxsplit=1, flags=re.MULTILINE)[0]


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


def measure(chip: str, case: str) -> list[dict[str, Any]]:
    """A case's row for each compiler: registers of its kernel, and the most bytes that a kernel of its step spills."""
    if case in OTHERS:
        found, tiles = compiled(chip, *other(chip, case)), {}
    else:
        config = warp_config(chip=chip, **BASE | SHAPES[case])
        assert not supports(config), supports(config)
        found = compiled(chip, *attention(config))
        tiles = dict(stages=config.stages, tile_halves=config.tile_halves, smem=config.smem_bytes)
    names = "write_kv_pages", "rotate_and_write", "sampling_floor", "draw", "choose_experts"
    own = next((name for name in names if case.startswith(name)), None)
    own, rows = own or ragged_paged_attention.__name__, []
    for compiler, kernels in found.items():
        worst = {column: max(row[column] for row in kernels.values()) for column in ("spill_stores", "spill_loads")}
        rows.append(dict(case=case, variant=compiler, registers=kernels[own]["registers"]) | worst | tiles)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Prints and keeps one row for each case."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.registers", description=__doc__.splitlines()[0])
    parser.add_argument("chip", choices=CHIPS)
    parser.add_argument("cases", nargs="*", default=CASES)
    records.add_options(parser)
    args = parser.parse_args(argv)
    if unknown := [case for case in args.cases if case not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(CASES)}")
    if needed := missing():
        parser.error(f"it needs {needed}")
    os.environ |= environment()
    jax.config.update("jax_enable_compilation_cache", False)  # what is not compiled has no report
    folder = records.RESULTS / args.chip if args.write else args.out
    for case in args.cases:
        for row in measure(args.chip, case):
            print(json.dumps(row), flush=True)
            records.write([records.provenance() | dict(chip=args.chip) | row], "registers", folder)


if __name__ == "__main__":
    main()
