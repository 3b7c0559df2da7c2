"""Operations of the attention kernels by kind, as lowered for CUDA: what a kernel does, before any compiler.

    python -m benchmarks.gpu.operations [--write | --out DIR]

An option of a layer must cost nothing where it is off. A row counts the operations of a kernel without any option:
MLIR's, and of inline PTX its instructions. A test compares the counts of a later version with the rows in
benchmarks/results/<chip>/operations.jsonl, for the JAX that counted them. No GPU and no compiler is needed.
"""

import argparse
import collections
import json
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import core

from benchmarks import records
from benchmarks.gpu import registers
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.paged_attention_sm90 import ragged_paged_attention
from pallas_kernels.gpu.tile_policy import default_config
from pallas_kernels.gpu.tile_policy_sm80 import warp_config
from pallas_kernels.gpu.work_list import build_work_list

SHAPES = {
    "decode_bf16": dict(kv_dtype="bfloat16", rows=4),
    "decode_e4m3": dict(kv_dtype="float8_e4m3fn", rows=4),
    "mixed_bf16": dict(kv_dtype="bfloat16"),
    "mixed_e4m3": dict(kv_dtype="float8_e4m3fn"),
}
CHIPS = {"sm_90": default_config, "sm_80": warp_config}  # Hopper's kernel, and the warp-level one
NAME = ragged_paged_attention.__name__
INSTRUCTION = re.compile(r"(?:^|[;{}]|@!?\w+)\s*([a-z]\w*(?:\.[\w:]+)+)\s")


def config_of(chip: str, shape: str, **fields) -> GpuKernelConfig:
    """The kernel of a shape with heads of 128; `fields` change it."""
    every = registers.BASE | dict(head_dim=128, v_head_dim=128) | SHAPES[shape] | fields
    return CHIPS[chip](**every, **(dict(chip=chip) if chip != "sm_90" else {}))


def module_of(config: GpuKernelConfig, tokens: int = 64, requests: int = 8):
    """The MLIR module of the attention kernel, before its merge."""
    shape, modules = jax.ShapeDtypeStruct, []
    order = (config.num_kv_heads, config.page_size)
    pool = (32, *(order if config.layout == "HND" else order[::-1]))
    per_head, ints = shape((config.num_heads,), jnp.float32), lambda *dims: shape(dims, jnp.int32)

    def step(q, k, v, table, starts, seqs, slopes, sinks):
        own = dict(rank=starts[0], local_lens=seqs) if config.shards.world > 1 else {}
        own |= dict(ranges=jnp.zeros((tokens, 2), jnp.int32)) if config.mask.spans else {}
        causal = seqs > 1 if config.per_request_causal else None
        extra = dict(alibi_slopes=slopes) if config.logits.has_alibi else {}
        extra |= dict(sinks=sinks) if config.has_sinks else {}
        extra |= dict(qq_bias=jnp.zeros((9, 9))) if config.qq_bias else {}
        scales = jnp.ones(pool) if config.token_scales else None
        extra |= dict(k_token_scale=scales, v_token_scale=scales)
        work = build_work_list(starts, seqs, tokens, config, causal, **own)
        return ragged_paged_attention(q, k, v, table, work, config, **extra)

    def kept(module, **options):
        modules.append(module)
        return lower(module, **options)

    lower, kv = core._run_serde_pass, jnp.dtype(config.kv_dtype)
    arguments = (
        shape((tokens, config.num_heads, config.head_dim), jnp.dtype(config.dtype)),
        shape((*pool, config.head_dim), kv), shape((*pool, config.v_head_dim), kv),
        ints(requests, 16), ints(requests + 1), ints(requests), per_head, per_head,
    )  # fmt: skip
    check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    with mock.patch.object(core, "_run_serde_pass", kept):
        jax.export.export(jax.jit(step), platforms=["cuda"], disabled_checks=[check])(*arguments)
    return modules[0]


def text_of(module) -> str:
    """A module without the places of its source, and without the number that Mosaic gives each kernel of a process."""
    return re.sub(rf"{NAME}_\d+", NAME, module.operation.get_asm(enable_debug_info=False))


def counts_of(module) -> dict[str, int]:
    """Operations by kind; of inline PTX the instructions, with `ptx` before their names."""
    counts: collections.Counter[str] = collections.Counter()

    def visit(operation):
        name = operation.operation.name
        if name == "llvm.inline_asm":
            text = operation.operation.attributes["asm_string"].value
            counts.update(f"ptx {found}" for found in INSTRUCTION.findall(text) if not found.startswith("reg"))
        else:
            counts[name] += 1
        return walk_on

    from jax._src.lib.mlir import ir

    walk_on = ir.WalkResult.ADVANCE
    module.operation.walk(visit)
    return dict(sorted(counts.items()))


def measure(chip: str, shape: str) -> dict[str, Any]:
    """A kernel's row."""
    return dict(case=shape, counts=counts_of(module_of(config_of(chip, shape))))


def main(argv: list[str] | None = None) -> None:
    """Prints and keeps a row for each kernel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.operations", description=__doc__.splitlines()[0])
    records.add_options(parser)
    args = parser.parse_args(argv)
    for chip in CHIPS:
        for shape in SHAPES:
            row = measure(chip, shape)
            print(chip, shape, sum(row["counts"].values()), json.dumps(row["counts"]), flush=True)
            folder = records.RESULTS / chip if args.write else args.out
            records.write([records.provenance() | dict(chip=chip) | row], "operations", folder)


if __name__ == "__main__":
    main()
