"""Whole models as an engine serves them: seconds until it is ready, and a ragged trace beside its floor.

    python -m benchmarks.gpu.whole_models [--only "qwen3_30b,llama_8b int4_g64"] [--write | --out DIR]

Random weights of published models with all of their layers, and 256 greedy requests, at most 128 at a time: prompts of
128 to 511 tokens, outputs of 128 to 383. Each model has a process of its own. The seconds until ready are those of a
machine that has no compiled programs on disk.

The floor is what no engine can beat with these rows. Decodes: the longer of reading the weights in every step (of a
mixture, the experts that random choices of its rows reach) and of all products; then the keys and values that each row
sees, read once a step. Prompts: their products. It reads at 4.68 TB/s and multiplies at 700 TFLOP/s.

`busy` is the share of a further run in which the device had begun a dispatch and not ended it, `kernels` are those that
took most of that run; of a loop inside a CUDA graph CUPTI shows the first step only.
"""

import argparse
import functools
import math
import subprocess
import sys
import time
from collections import Counter

import jax
import numpy as np

from benchmarks import name_lists, records
from benchmarks.gpu import cupti, served, trace
from jattn import models
from jattn.cli.serve import collect_rarely
from jattn.nn.weight_spec import weight_path
from jattn.ops.quantised import is_quantised

GEMMA = dict(
    head_dim=256, num_attention_heads=16, num_key_value_heads=8, query_pre_attn_scalar=256, rms_norm_eps=1e-6,
    hidden_activation="gelu_pytorch_tanh", eos_token_id=1,
)  # fmt: skip
CONFIGS = served.CONFIGS | {
    "gemma2_9b": GEMMA | dict(
        model_type="gemma2", hidden_size=3584, intermediate_size=14336, vocab_size=256000, sliding_window=4096,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0, rope_theta=1e4, max_position_embeddings=8192,
    ),
    "gemma3_12b": GEMMA | dict(
        model_type="gemma3_text", hidden_size=3840, intermediate_size=15360, vocab_size=262208, sliding_window=1024,
        rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=6, max_position_embeddings=131072,
    ),
}  # fmt: skip
LAYERS = dict(
    llama_8b=32, qwen25_7b=28, gemma2_9b=42, gemma3_12b=48, qwen3_30b=48, gpt_oss_20b=24, mixtral_8x7b=32,
    deepseek_v2_lite=27,
)  # fmt: skip
CASES = (
    *(served.Case(name, layers) for name, layers in LAYERS.items() if name not in ("gpt_oss_20b", "mixtral_8x7b")),
    served.Case("llama_8b", LAYERS["llama_8b"], "int4_g64"),
    served.Case("qwen3_30b", LAYERS["qwen3_30b"], "fp8_g128"),
    served.Case("gpt_oss_20b", LAYERS["gpt_oss_20b"], "mxfp4", only_experts=True),
    served.Case("mixtral_8x7b", LAYERS["mixtral_8x7b"], "awq_g128"),
)
LOAD = trace.Trace("trace_r128", requests=256, rows=128)
READ_RATE, MULTIPLY_RATE = served.READ_RATE * 1e3, 700e12  # bytes and FLOP a second
SMALL = dict(vocab_size=512, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(num_hidden_layers=2, head_dim=32)


def used_numbers(config: models.ModelConfig, params) -> float:
    """How many numbers of matrices a token is multiplied by, without embeddings and head."""
    total = 0.0
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_quantised):
        name = weight_path(path)
        if leaf.ndim < 2 or name.startswith(("embed", "head")):
            continue
        moe = served.mixture_of(config, name, leaf)
        total += float(np.prod(leaf.shape)) * (1.0 if moe is None else moe.top_k / moe.num_experts)
    return total


def kv_bytes(config: models.ModelConfig, steps: list[list[int]]) -> float:
    """Bytes of keys and values that decode steps (trace.decode_keys) read. A layer reads none outside its window."""
    total, keys_within = 0.0, functools.cache(lambda reach: sum(min(keys, reach) for step in steps for keys in step))
    for layer, spec in zip(config.layers, config.cache_specs(2, 16, dtype="bfloat16"), strict=True):
        reach = min((n for n in layer.attention.retention if n is not None), default=math.inf)
        total += keys_within(reach) * spec.bytes_per_block / 16
    return total


def floor_of(config: models.ModelConfig, params, work: list, rows: int) -> dict[str, float]:
    """The least seconds of a trace, and their parts."""
    steps, flop = trace.decode_keys(work, rows), 2 * used_numbers(config, params)
    times = Counter(map(len, steps))  # rows of a step -> steps
    weights = sum(count * served.read_bytes(params, config, n) for n, count in times.items())
    parts = dict(
        floor_weights_seconds=weights / READ_RATE,
        floor_products_seconds=sum(new for _, new in work) * flop / MULTIPLY_RATE,
        floor_kv_seconds=kv_bytes(config, steps) / READ_RATE,
        floor_prompts_seconds=sum(len(prompt) for prompt, _ in work) * flop / MULTIPLY_RATE,
    )
    of_decodes = max(parts["floor_weights_seconds"], parts["floor_products_seconds"])
    seconds = of_decodes + parts["floor_kv_seconds"] + parts["floor_prompts_seconds"]
    return parts | dict(floor_seconds=seconds, floor_steps=len(steps))


def measure(case: served.Case, load: trace.Trace, small: bool) -> dict:
    """The row of one model."""
    config = models.config_of(CONFIGS[case.config] | dict(num_hidden_layers=case.layers) | (SMALL if small else {}))
    params = jax.block_until_ready(served.weights_of(case, config))
    begin = time.perf_counter()
    engine = trace.engine_of(config, params, load.rows, load.budget, load.longest)
    programs = engine.warmup()
    ready = time.perf_counter() - begin
    collect_rarely()
    work = load.work(config.vocab_size)
    with trace.watched() as seen:
        run = trace.serve(engine, work)
    row = dict(
        layers=len(config.layers), requests=load.requests, rows=load.rows, programs=programs, ready_seconds=ready
    )
    row |= run.figures() | dict(compiled_later=seen.programs, dispatches=seen.dispatches)
    floor = floor_of(config, params, work, load.rows)
    row |= floor | dict(share_of_floor=floor["floor_seconds"] / run.seconds)
    if not small:
        found, wall, _ = trace.under_profiler(engine, work)
        kernels = {name: round(seconds, 4) for name, seconds in found.top(12).items()}
        row |= dict(busy=found.occupied / wall, kernels=kernels)
    return row


def main(argv: list[str] | None = None) -> int:
    """Run and print every model; 1 if one failed, or a program was compiled after warm-up."""
    description = str(__doc__).splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.whole_models", description=description)
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--small", action="store_true", help="two small layers, for a CPU")
    records.add_options(parser)
    args = parser.parse_args(argv)
    cases = {case.name: case for case in CASES}
    wanted = name_lists.known(parser, "--only", args.only, cases, "model") or list(cases)
    if len(wanted) > 1:  # each in a process of its own, whose memory is free afterwards
        given = sys.argv[1:] if argv is None else argv
        runs = [[*given, "--only", name] for name in wanted]  # the last --only holds
        command = [sys.executable, "-m", "benchmarks.gpu.whole_models"]
        codes = [subprocess.run([*command, *run], check=False).returncode for run in runs]
        return int(any(codes))  # one that a signal ended is below 0
    (name,) = wanted
    load = trace.SMALL_TRACE if args.small else LOAD
    row: dict = dict(case=name, variant=load.name) | cupti.attempt(lambda: measure(cases[name], load, args.small))
    print(name, flush=True)
    trace.show(row)
    records.write([row | records.provenance()], "whole_models", records.folder_of(args))
    return int("error" in row or row["compiled_later"] != 0)


if __name__ == "__main__":
    sys.exit(main())
