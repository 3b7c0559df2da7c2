"""Models as served on one GPU: the engine's programs of a few layers, timed, with what each kernel takes.

    python -m benchmarks.gpu.served [--only "gpt_oss_20b r1,llama_8b r64"] [--kernels 30] [--write | --out DIR]

Random weights of a published shape, cut to `layers` layers. Batches: `r1` and `r64` decode that many requests of some
600 tokens in a burst, `T2048` is a prompt, `T2048 after 4096` the next chunk of one. A program runs several times over
the same cache; `equal` is the share of its tokens that are the same in every run, which must be 1: work that is
recorded wrongly in a CUDA graph shows in its second run. `read_ms` is the time to read all weights but the embeddings,
experts by how many of them random choices reach, at 4.68 TB/s.
"""

import argparse
import dataclasses
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import name_lists, records
from benchmarks.gpu.packed_product import draw
from benchmarks.gpu.programs import Program, build, kernels
from jattn import device, models
from jattn.engine.batch import empty_batch, meta_of, packed_batch
from jattn.engine.dispatch import Model
from jattn.engine.scheduler import Limits
from jattn.engine.shapes import LEAST_ROWS, StepShape, StepShapes
from jattn.models.quantising import PROJECTIONS
from jattn.nn.weight_spec import WeightSpec, is_weight_spec, weight_path
from jattn.ops.quantised import QuantisedArray, is_quantised

BURST, CONTEXT, EARLIER, BLOCK, MOST_ROWS = 16, 600, 4096, 64, 64
LONGEST = EARLIER + 4096
DRAWN_EXPERTS = 32
READ_RATE = 4.68e9  # bytes a millisecond
YARN = dict(type="yarn", beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0)
LLAMA = dict(model_type="llama", rms_norm_eps=1e-5, hidden_act="silu", max_position_embeddings=8192, eos_token_id=1)
LLAMA |= dict(rope_theta=500000.0, tie_word_embeddings=False, vocab_size=128256, num_key_value_heads=8, head_dim=128)
DEEPSEEK = dict(
    model_type="deepseek_v3", attention_bias=False, first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=512,
    max_position_embeddings=163840, moe_layer_freq=1, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-6,
    rope_scaling=YARN | dict(original_max_position_embeddings=4096), rope_theta=10000, tie_word_embeddings=False,
    v_head_dim=128, eos_token_id=1, norm_topk_prob=True,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama_8b": LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32),
    "llama_1b": LLAMA | dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, head_dim=64),
    "qwen25_7b": LLAMA | dict(
        model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
        vocab_size=152064, rope_theta=1e6, rms_norm_eps=1e-6,
    ),
    "qwen3_4b": LLAMA | dict(
        model_type="qwen3", hidden_size=2560, intermediate_size=9728, num_attention_heads=32, vocab_size=151936,
        rope_theta=1e6, rms_norm_eps=1e-6, attention_bias=False,
    ),
    "qwen3_30b": LLAMA | dict(
        model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, num_attention_heads=32, num_key_value_heads=4, vocab_size=151936,
        decoder_sparse_step=1, mlp_only_layers=[], rope_theta=1e6, rms_norm_eps=1e-6,
    ),
    "mixtral_8x7b": LLAMA | dict(
        model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_local_experts=8,
        num_experts_per_tok=2, vocab_size=32000, sliding_window=None,
    ),
    "gpt_oss_20b": LLAMA | dict(
        model_type="gpt_oss", attention_bias=True, head_dim=64, hidden_size=2880, intermediate_size=2880,
        num_attention_heads=64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128, swiglu_limit=7.0,
        rope_theta=150000, vocab_size=201088, max_position_embeddings=131072,
        rope_scaling=dict(
            rope_type="yarn", beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
            truncate=False,
        ),
    ),
    "deepseek_v3": DEEPSEEK | dict(
        hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048, n_group=8, n_routed_experts=256,
        n_shared_experts=1, num_attention_heads=128, num_experts_per_tok=8, num_key_value_heads=128, q_lora_rank=1536,
        routed_scaling_factor=2.5, scoring_func="sigmoid", topk_group=4, topk_method="noaux_tc", vocab_size=129280,
    ),
    "deepseek_v2_lite": DEEPSEEK | dict(
        model_type="deepseek_v2", hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, n_group=1,
        n_routed_experts=64, n_shared_experts=2, num_attention_heads=16, num_experts_per_tok=6, num_key_value_heads=16,
        q_lora_rank=None, routed_scaling_factor=1.0, topk_group=1, topk_method="greedy", vocab_size=102400,
        norm_topk_prob=False,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with some layers, in a form of packed_product.FORMS or in bfloat16."""

    config: str
    layers: int = 4
    form: str | None = None
    only_experts: bool = False  # in that form

    @property
    def name(self) -> str:
        return self.config + (f" {self.form}" if self.form else "")


CASES = {
    case.name: case
    for case in (
        Case("llama_8b"),
        Case("llama_8b", form="int4_g64"),
        Case("llama_8b", form="nvfp4"),
        Case("llama_1b"),
        Case("qwen25_7b"),
        Case("qwen3_4b"),
        Case("qwen3_30b"),
        Case("qwen3_30b", form="fp8_g128"),
        Case("gpt_oss_20b", form="mxfp4", only_experts=True),
        Case("mixtral_8x7b"),
        Case("mixtral_8x7b", form="awq_g128"),
        Case("deepseek_v2_lite"),
        Case("deepseek_v3", layers=3, form="fp8_g128"),
    )
}
BATCHES = {  # new tokens of each row, and those before them
    "r1": ([1], [CONTEXT]),
    "r64": ([1] * 64, [CONTEXT * 3 // 4 + 5 * i for i in range(64)]),
    "T2048": ([2048], [0]),
    "T2048 after 4096": ([2048], [EARLIER]),
}


def weights_of(case: Case, config: models.ModelConfig) -> Any:
    """Random weights; those of projections but the head drawn in the case's form."""
    leaves, structure = jax.tree.flatten_with_path(models.weight_specs(config), is_leaf=is_weight_spec)
    return jax.tree.unflatten(structure, [drawn(case, *leaf, seed) for seed, leaf in enumerate(leaves)])


def drawn(case: Case, path: tuple, spec: WeightSpec, seed: int) -> "jax.Array | QuantisedArray":
    """One weight. Of more than DRAWN_EXPERTS, others repeat their codes: drawing takes many times their memory."""
    *_, module, name = ("", *weight_path(path).split("."))
    is_projection = name == "kernel" and module in PROJECTIONS and module != "head"
    if case.form is None or not is_projection or (case.only_experts and len(spec.shape) < 3):
        return spec.draw(jax.random.key(seed), "bfloat16")
    *lead, inner, width = spec.shape
    experts = min(lead[0], DRAWN_EXPERTS) if lead else 1
    flat = draw(case.form, experts * inner, width, seed)
    scales, factor, smaller = flat.scales, flat.factor, inner**-0.5
    if factor is not None:
        factor = jnp.broadcast_to(factor * smaller, (*lead, 1, width))
    elif case.form == "mxfp4":  # powers of two
        scales = (2.0 ** jnp.round(jnp.log2(scales.astype(jnp.float32) * smaller))).astype(scales.dtype)
    else:
        scales = (scales * smaller).astype(scales.dtype)

    def apart(x):
        if x is None:
            return None
        repeats = [-(-lead[0] // experts), 1, 1] if lead else [1, 1]
        return jnp.tile(x.reshape(*[experts] * len(lead), -1, width), repeats)[: lead[0] if lead else None]

    return dataclasses.replace(
        flat, values=apart(flat.values), scales=apart(scales), zero_points=apart(flat.zero_points), factor=factor
    )


def read_bytes(params: Any, config: models.ModelConfig, tokens: int) -> float:
    """Bytes of weights that a step of so many tokens reads."""
    total = 0.0
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=is_quantised):
        size = sum(x.nbytes for x in jax.tree.leaves(leaf))
        name = weight_path(path)
        if (moe := mixture_of(config, name, leaf)) is not None:
            total += size * (1 - (1 - moe.top_k / moe.num_experts) ** tokens)
        elif not name.startswith("embed") or config.tied_embeddings:
            total += size
    return total


def mixture_of(config: models.ModelConfig, name: str, weight: Any) -> Any:
    """The MoE to whose experts the weight with this path belongs; None if it is of every token."""
    return config.layers[int(name.split(".")[1])].moe if weight.ndim == 3 and ".mlp." in name else None


def batch_of(name: str, shapes: StepShapes, num_blocks: int):
    """The packed batch of this name."""
    lens, before = BATCHES[name]
    rng, is_decode = np.random.default_rng(0), max(lens) == 1
    tokens = max(sum(lens), LEAST_ROWS) if is_decode else sum(lens)
    shape = StepShape(tokens, tokens if is_decode else shapes.limits.max_num_seqs, is_decode)
    seqs = [new + old for new, old in zip(lens, before, strict=True)]
    table = 1 + rng.permutation(num_blocks - 1)[: len(lens) * (-(-max(seqs) // BLOCK) + 1)]
    table = np.pad(table.reshape(len(lens), -1), ((0, 0), (0, shapes.max_blocks)))[:, : shapes.max_blocks]
    batch = empty_batch(shape, 1, shapes)
    meta = meta_of(lens, seqs, seqs, table.astype(np.int32), shapes, shape)
    remaining = np.where(np.arange(shape.num_rows) < len(lens), 40, 0).astype(np.int32)
    batch = dataclasses.replace(
        batch, token_ids=rng.integers(5, 500, tokens).astype(np.int32), metas=(meta,),
        rows=dataclasses.replace(batch.rows, remaining=remaining), steps=np.int32(BURST if is_decode else 1),
    )  # fmt: skip
    return packed_batch([batch], shapes)


def program_of(case: Case, name: str, params: Any, config: models.ModelConfig) -> Program:
    """The engine's program for a batch."""
    shapes = StepShapes(Limits(MOST_ROWS, 2048, LONGEST, BURST), BLOCK)
    num_blocks = MOST_ROWS * (-(-2 * CONTEXT // BLOCK) + 1) + shapes.max_blocks + 1

    def numbers(x):
        at = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1) + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return (at % 127 / 127 - 0.5).astype(x.dtype)

    make_caches = jax.jit(lambda: jax.tree.map(numbers, config.make_caches(num_blocks, BLOCK, "bfloat16")))
    batch = batch_of(name, shapes, num_blocks)
    model, steps = Model(models.forward, config), BURST if max(BATCHES[name][0]) == 1 else 1
    return Program(f"{case.name} {name}", model, params, make_caches, MOST_ROWS, batch, "engine", steps)


def measure(program: Program, repeats: int = 12) -> dict:
    """ms of a step, in a series of runs and of a run alone, and the share of tokens equal in all runs."""
    (caches, before), batch = program.make_state(), jax.device_put(program.batch)
    runs, seconds = [], []

    def run() -> Any:
        nonlocal caches, before
        caches, sampled, before = program.compiled(program.params, caches, before, batch)
        return sampled.tokens

    for _ in range(5):
        begin = time.perf_counter()
        runs.append(np.asarray(run()))
        seconds.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    jax.block_until_ready([run() for _ in range(repeats)])
    ms = (time.perf_counter() - begin) / repeats / program.steps * 1e3
    equal = float(np.mean([(found == runs[0])[runs[0] >= 0].mean() for found in runs]))
    return dict(ms=ms, alone_ms=min(seconds) / program.steps * 1e3, equal=equal)


def main(argv: list[str] | None = None) -> int:
    """Print a line for each program as soon as it is measured; 1 if tokens differed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.served", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="cases, or cases with a batch, separated by commas")
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each program")
    parser.add_argument("--list", action="store_true", help="print the names of all programs")
    records.add_options(parser)
    args = parser.parse_args(argv)
    every = [*CASES, *(f"{case} {batch}" for case in CASES for batch in BATCHES)]
    wanted = name_lists.known(parser, "--only", args.only, every, "case")
    if args.kernels < 0:
        parser.error(f"--kernels: {args.kernels} is less than 0")
    if device.detect().platform != "gpu" and not args.list:
        parser.error(f"it needs a GPU; this process runs on {device.detect().platform}")
    is_wanted = lambda case, batch: not wanted or case in wanted or f"{case} {batch}" in wanted
    chosen = {case: [batch for batch in BATCHES if is_wanted(case, batch)] for case in CASES}
    rows = []
    for name, batches in chosen.items():
        if args.list:
            print(*(f"{name} {batch}\n" for batch in batches), sep="", end="")
        elif batches:
            rows += of_case(CASES[name], batches, args.kernels)
            records.write(rows[-len(batches) :], "served", records.folder_of(args))
    return int(any(row["equal"] < 1 for row in rows))


def of_case(case: Case, batches: list[str], count: int) -> list[dict]:
    """The rows of one model; its programs are compiled side by side."""
    config = models.config_of(CONFIGS[case.config] | dict(num_hidden_layers=case.layers))
    params = jax.block_until_ready(weights_of(case, config))
    rows = []
    with ThreadPoolExecutor(len(batches)) as pool:
        jobs = [pool.submit(build(program_of(case, batch, params, config))) for batch in batches]
    for batch, job in zip(batches, jobs, strict=True):
        program = job.result()
        read_ms = read_bytes(params, config, sum(BATCHES[batch][0])) / READ_RATE
        found = measure(program) | dict(read_ms=read_ms)
        print(f"{program.name:36}", {key: float(f"{value:.4g}") for key, value in found.items()}, flush=True)
        rows.append(dict(case=program.name, layers=case.layers) | found | records.provenance())
        if count:
            print_kernels(program, count)
    return rows


def print_kernels(program: Program, count: int) -> None:
    """The kernels that take most. A profile has one pass of a loop that is in a CUDA graph, so they are those of one
    step and of what surrounds the loop."""
    listed = kernels(dataclasses.replace(program, steps=1))
    print(f"   {sum(times for _, times, _ in listed):.0f} kernels, {sum(us for *_, us in listed):.1f} us")
    for name, times, us in listed[:count]:
        print(f"   {us:9.1f} us {times:5.0f}  {name[:80]}")


if __name__ == "__main__":
    sys.exit(main())
