"""A model on one device and on several: milliseconds of a decode step, and of a long prompt.

    python -m benchmarks.gpu.tensor_parallel [--ranks 1 2] [--data 1] [--model 8b | 70b] [--write | --out DIR] [--small]

tp_8b_decode_r64   a decode step of 64 requests, as served, after prompts of 512 tokens
tp_8b_prefill_8k   one prompt of 8192 tokens and its first token, in an idle engine; the median
dp2_8b_decode_r64  with --data 2: the same decode step, with 32 requests on each of two data ranks

Random weights in bf16 in the shapes of Llama 3, each made in its parts. The 70b model has 141 GB of weights: leave one
rank out. `to_one_device` is the time over that of one device, if both were measured. --small is a model for a CPU.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import numpy as np
from jax.sharding import Mesh

import jattn
from benchmarks import records
from benchmarks.gpu.engine_step import BURST, LLAMA, UNTIMED, serve
from jattn import models
from jattn.nn.weight_spec import WeightSpec, is_weight_spec
from jattn.text import ByteTokenizer

KINDS = {
    "8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "70b": dict(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    "small": dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, head_dim=8),
}


def config_of(kind: str) -> models.ModelConfig:
    """The model: 8 kv heads of 128, a vocabulary of 128256, 9216 positions."""
    sizes = dict(vocab_size=512 if kind == "small" else 128256, head_dim=128, num_key_value_heads=8)
    return models.config_of(LLAMA | sizes | dict(max_position_embeddings=9216) | KINDS[kind])


def weights_of(config: models.ModelConfig, mesh: Mesh, dtype: str):
    """Random weights; no device ever has more than its part of one."""
    specs = models.weight_specs(config)
    shardings = models.ModelMesh.of(config, mesh).weight_shardings(config)

    @functools.cache
    def drawing(spec: WeightSpec, sharding):
        return jax.jit(lambda key: spec.draw(key, dtype), out_shardings=None if mesh.size == 1 else sharding)

    keys = map(jax.random.key, range(10**6))
    draw = lambda spec, sharding: drawing(spec, sharding)(next(keys))
    return jax.block_until_ready(jax.tree.map(draw, specs, shardings, is_leaf=is_weight_spec))


def engine_of(
    config, params, mesh: Mesh, rows: int, budget: int, longest: int, num_blocks: int | None = None
) -> jattn.Engine:
    """An engine on the mesh, or on the device, without prefix caching."""
    return jattn.Engine(
        config, params, ByteTokenizer(), max_num_seqs=rows, max_num_batched_tokens=budget, max_model_len=longest,
        max_burst=BURST, prefix_caching=False, mesh=None if mesh.size == 1 else mesh, num_blocks=num_blocks,
    )  # fmt: skip


def decode_ms(config, params, mesh: Mesh, rows: int, prompt: int, dispatches: int) -> float:
    """Milliseconds of a decode step of `rows` requests, of all data ranks together."""
    longest = prompt + BURST * (UNTIMED + dispatches + 2) + 1
    of_rank = rows // mesh.shape["data"]
    engine = engine_of(config, params, mesh, of_rank, of_rank * prompt, longest)
    prompts = np.random.default_rng(0).integers(2, config.vocab_size, (rows, prompt))
    seconds, _ = serve(engine, prompts, dispatches)
    return sum(seconds) / dispatches / BURST * 1e3


def prefill_ms(config, params, mesh: Mesh, prompt: int, rounds: int) -> float:
    """Milliseconds until the first token of one prompt."""
    engine = engine_of(config, params, mesh, 1, prompt, prompt + 64)
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, prompt).tolist()
    seconds = []
    for _ in range(1 + rounds):  # the first compiles
        begin = time.perf_counter()
        engine.generate([tokens], jattn.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) * 1e3


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.tensor_parallel", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--small", action="store_true", help="a model for a CPU")
    parser.add_argument("--model", choices=("8b", "70b"), default="8b", help="default: 8b")
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 2), help="devices (default: 1 2)")
    parser.add_argument("--data", type=int, default=1, help="data ranks that the devices are divided into (default: 1)")
    parser.add_argument("--dispatches", type=int, default=20, help=f"timed, of {BURST} steps each (default: 20)")
    records.add_options(parser)
    args = parser.parse_args(argv)
    kind, rows, prompt = ("small", 2, 64) if args.small else (args.model, 64, 8192)
    config, alone = config_of(kind), {}
    for ranks in args.ranks:
        mesh = jax.make_mesh((args.data, ranks // args.data), ("data", "tensor"), devices=jax.devices()[:ranks])
        params = weights_of(config, mesh, "float32" if args.small else "bfloat16")
        prefix = "tp" if args.data == 1 else f"dp{args.data}"
        decode = decode_ms(config, params, mesh, rows, prompt // 16, args.dispatches)
        measured = {f"{prefix}_{kind}_decode_r{rows}": decode}
        if args.data == 1:  # a prompt is computed by one data rank
            case = f"tp_{kind}_prefill_{'64' if args.small else '8k'}"
            measured |= {case: prefill_ms(config, params, mesh, prompt, 5)}
        for case, ms in measured.items():
            alone |= {case: ms} if ranks == 1 else {}
            row = dict(case=case, variant=f"{ranks} devices", ranks=ranks, ms=ms)
            row |= dict(to_one_device=ms / alone[case]) if case in alone else {}
            print(json.dumps(row), flush=True)
            records.write([row | records.provenance()], "tensor_parallel", records.folder_of(args))


if __name__ == "__main__":
    main()
