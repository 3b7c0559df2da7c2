"""Families as an engine serves them on this machine's GPU, beside float32 without a cache or a kernel.

    python -m tests.models.on_card [--only "gpt2,mixtral awq_g128"] [--seconds 300] [--processes 12]

Each model has the published sizes but few layers, one of each kind, and a small vocabulary. Twelve greedy requests are
served together, in chunks, then two with cached prefixes, then two alone. The log-probabilities of each generated token
and of the likeliest ones there are compared with those of the same weights in float32. A line for each model: the
largest difference of a token, the median of all and how many are above a tenth, over the spread of the logits; then the
same of bfloat16 alone, computed by XLA without a cache. Mixtures choose other experts where two are close, and random
weights may amplify the rounding.

Exit code 1 if the median of those served together, or of the others, is above LIMIT and more than MOST_TIMES that of
bfloat16 alone, or after an exception; 2 if the time is over before the end, or an argument is wrong.

Programs are lowered by processes without the GPU, compiled by threads of this one without autotuning, and each model
runs when its own are ready. On a machine without a GPU an engine compiles its programs itself: for trying the tool.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks import name_lists
from benchmarks.gpu import lowering, served
from benchmarks.gpu.packed_product import FORMS
from jattn import device, models
from jattn.engine import admission, construction, sizing
from jattn.engine.batch import empty_batch, packed_batch
from jattn.engine.dispatch import dispatch, empty_row_state
from jattn.engine.packing import Packed, PackedTree
from jattn.engine.programs import Programs, _structure_of_results
from jattn.engine.scheduler import Limits
from jattn.engine.shapes import StepShape, StepShapes
from jattn.engine.xla_options import FEW_TOKENS, options_of
from jattn.models.moe import MoE
from jattn.nn.weight_spec import is_weight_spec
from jattn.ops.quantised import is_quantised, plain
from tests.models import test_hub_configs

ALTERNATIVES = 5  # of a generated token: where it is certain, its own log-probability is 0, whatever the others
LIMIT, MOST_TIMES = 0.02, 2  # of the median difference over the spread; of that of bfloat16 alone
TOGETHER = 120  # tokens of the requests that are served together; those of cached prefixes and of single ones follow
ROWS, TOKENS, BURST, BLOCK, BLOCKS = 16, 256, 4, 64, 280
LENGTH, MODEL_LENGTH = 768, 4096  # of a sequence, at most; of what the engine is made for: its programs depend on it
LENGTHS = (5, 33, 64, 129, 300, 600, 700, 17, 90, 255, 256, 257)  # of the prompts
LAYERS, VOCABULARY, FEW_EXPERTS, WIDE = 4, 4096, 16, 6000
LLAMA = {k: v for k, v in test_hub_configs.LLAMA_31_8B.items() if k not in ("architectures", "rope_scaling")}
MISTRAL = {k: v for k, v in LLAMA.items() if k not in ("mlp_bias", "attention_bias", "pretraining_tp")}
FURTHER: dict[str, dict[str, Any]] = {
    "llama_1b": LLAMA | dict(hidden_size=2048, intermediate_size=8192, head_dim=64),
    "llama_70b": LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64),
    "qwen2_7b": test_hub_configs.QWEN_25
    | dict(hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4),
    "qwen3": LLAMA | dict(model_type="qwen3", head_dim=128, hidden_size=2560, intermediate_size=9728),
    "mistral": MISTRAL | dict(model_type="mistral", sliding_window=100),
    "mixtral": MISTRAL
    | dict(model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, sliding_window=None, vocab_size=32000),
    "gemma2_9b": test_hub_configs.GEMMA_2
    | dict(hidden_size=3584, intermediate_size=14336, num_attention_heads=16, num_key_value_heads=8)
    | dict(sliding_window=100),
    "gemma3_27b": test_hub_configs.GEMMA_3
    | dict(hidden_size=5376, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=16, head_dim=128)
    | dict(query_pre_attn_scalar=168, sliding_window=200),
    "llama4_text": dict(
        model_type="llama4_text", hidden_size=5120, intermediate_size=2048, intermediate_size_mlp=4096,
        num_attention_heads=40, num_key_value_heads=8, head_dim=128, num_hidden_layers=4, num_local_experts=16,
        num_experts_per_tok=1, interleave_moe_layer_step=2, no_rope_layers=[1, 1, 1, 0], attention_chunk_size=256,
        rope_theta=500000.0, rms_norm_eps=1e-5, vocab_size=4096, use_qk_norm=True, max_position_embeddings=4096,
        tie_word_embeddings=False, attn_temperature_tuning=True, floor_scale=100, attn_scale=0.1,
    ),
}  # fmt: skip
QUANTISED = (  # with forms of benchmarks.gpu.packed_product
    "llama int4_g64", "llama nvfp4", "llama_1b int4_g64", "llama_1b fp8_g128", "gpt_oss mxfp4", "qwen3_moe fp8_g128",
    "qwen3_moe nvfp4", "mixtral awq_g128", "deepseek_v2 int4_g64", "deepseek_v3 fp8_g128", "gemma2 int8",
)  # fmt: skip


def names() -> list[str]:
    """All models."""
    return [*_decoders(), *QUANTISED]


def _decoders() -> list[str]:
    published = [name for name in test_hub_configs.PUBLISHED if not _full_config(name).is_encoder]
    return [*FURTHER, *(name for name in published if _full_config(name).encoder is None)]


def chosen(parser: argparse.ArgumentParser, text: str) -> list[str]:
    """The models of --only, all that there are if it is empty; those that cannot be are errors."""
    if not (labels := name_lists.listed(parser, "--only", text)):
        return names()
    decoders = _decoders()
    for label in labels:
        name, _, form = label.partition(" ")
        if name not in decoders:
            parser.error(f"--only: no model {name}; there are {', '.join(decoders)}")
        if form and form not in FORMS:
            parser.error(f"--only: no form {form} of {name}; there are {', '.join(FORMS)}")
    return labels


@functools.cache
def _full_config(name: str) -> models.ModelConfig:
    raw = dict(FURTHER.get(name) or test_hub_configs.PUBLISHED[name])
    raw.pop("quantization_config", None)
    if name == "gemma3n":  # later layers read the caches of earlier ones, and tables have a vocabulary of their own
        text, kept = raw["text_config"], 10
        lists = {k: v[:kept] for k, v in text.items() if isinstance(v, list)}
        sizes = dict(num_hidden_layers=kept, num_kv_shared_layers=4, vocab_size_per_layer_input=VOCABULARY)
        raw["text_config"] = text | lists | sizes | dict(vocab_size=VOCABULARY)
    return models.config_of(raw)


@dataclasses.dataclass(frozen=True)
class Served:
    """A model, and the shapes of what an engine computes for it."""

    label: str  # name, or name and form

    @property
    def name(self) -> str:
        return self.label.split()[0]

    @property
    def form(self) -> str | None:
        return self.label.split()[1] if " " in self.label else None

    @functools.cached_property
    def config(self) -> models.ModelConfig:
        """With one layer of each kind, at least three in all."""
        config = _full_config(self.name)
        if any(layer.kv_from is not None for layer in config.layers):
            return config
        kinds = list(dict.fromkeys(_with_few_experts(layer, config.hidden_size) for layer in config.layers))[:LAYERS]
        layers = tuple(kinds if len(kinds) > 2 else (kinds * 3)[:3])
        vocab_size = min(config.vocab_size, VOCABULARY)
        return dataclasses.replace(config, layers=layers, vocab_size=vocab_size, eos_token_ids=())

    @property
    def length(self) -> int:
        """Tokens of a sequence, at most, for which the engine is made."""
        return min(MODEL_LENGTH, self.config.max_positions or MODEL_LENGTH)

    def weights(self, salt: jax.Array) -> Any:
        """Random weights. salt: u32[], 0; an argument, so that XLA does not compute them while it compiles."""
        specs = models.weight_specs(self.config)
        leaves, structure = jax.tree.flatten_with_path(specs, is_leaf=is_weight_spec)
        case = served.Case(self.name, form=self.form)

        def of_spec(seed: int, path, spec):
            uniform = _uniform(spec.shape, jnp.uint32(seed) + salt)
            if len(spec.shape) == 1 or spec.fill is not None:
                return ((spec.fill or 0) + 0.2 * uniform * (len(spec.shape) == 1)).astype(jnp.bfloat16)
            if case.form is not None:
                return served.drawn(case, path, spec, (jnp.uint32(seed) + salt).astype(jnp.int32))
            return (uniform * (3 / spec.shape[-2]) ** 0.5).astype(jnp.bfloat16)

        return jax.tree.unflatten(structure, [of_spec(seed, *leaf) for seed, leaf in enumerate(leaves)])

    @functools.cached_property
    def shapes(self) -> StepShapes:
        limits = Limits(ROWS, TOKENS, self.length, BURST, BURST)
        with_lengths = admission.depends_on_length(self.config)
        return StepShapes(limits, BLOCK, with_final_lens=with_lengths, is_coarse=True)

    @functools.cached_property
    def trees(self) -> dict[PackedTree, str]:
        """A name for the program of each batch."""
        return {self.batch(shape).tree: program_name(shape) for shape in self.shapes.all()}

    def batch(self, shape: StepShape) -> Packed:
        """One without rows."""
        return packed_batch([empty_batch(shape, len(self.config.cache_groups), self.shapes)], self.shapes)

    def make_caches(self) -> Any:
        """Those of the engine."""
        storage = sizing.storage_of("bfloat16", None)
        sizes = sizing.CacheSizing(self.config, storage, BLOCK, TOKENS, BURST, True)
        pools, _ = sizes.pools(ROWS, self.length, BLOCKS)
        return sizing.cache_maker(self.config, pools, BLOCK, storage, None, "auto")()

    def reference(self, params: Any, ids: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
        """f32[LENGTH, vocab] of one sequence, computed in a dtype without a cache or a kernel."""
        params = jax.tree.map(lambda x: plain(x, dtype).astype(dtype), params, is_leaf=is_quantised)
        lens = [LENGTH] if self.config.rope_depends_on_length else None
        meta = jattn.CommonAttentionMetadata.from_lengths([LENGTH], [LENGTH], None, 16, final_seq_lens=lens)
        unknown = dataclasses.replace(device.detect(), generation="")  # no kernel is for it
        with jax.default_matmul_precision("highest"), mock.patch.object(device, "detect", lambda: unknown):
            return models.uncached_logits(self.config, params, ids, meta, backend="sdpa").astype(jnp.float32)


def _with_few_experts(layer: models.LayerConfig, hidden: int) -> models.LayerConfig:
    """Large mixtures with FEW_EXPERTS, so that their float32 weights fit beside the others."""

    def few(mlp: Any) -> Any:
        is_large = isinstance(mlp, MoE) and (mlp.num_experts > 128 or (mlp.num_experts > 64 and hidden >= WIDE))
        if not is_large:
            return mlp
        return dataclasses.replace(mlp, num_experts=FEW_EXPERTS, identity_experts=8 * (mlp.identity_experts > 0))

    layer = dataclasses.replace(layer, mlp=few(layer.mlp))
    if layer.experts is None:
        return layer
    return dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, moe=few(layer.experts.moe)))


def _uniform(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """f32 from -1 to 1 by a hash of the place: it compiles sooner than a random generator."""
    place, stride = seed * jnp.uint32(7919) + jnp.uint32(1), 1
    for axis in reversed(range(len(shape))):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride = stride * shape[axis] % 2**32
    x = jnp.broadcast_to(place, shape) * jnp.uint32(2654435761)
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    return ((x ^ (x >> jnp.uint32(16))) >> jnp.uint32(8)).astype(jnp.float32) * 2.0**-23 - 1


@dataclasses.dataclass(frozen=True)
class Card:
    """What is known of a GPU, for processes that lower programs for it without seeing it."""

    chip: device.Chip
    processors: int | None
    keeps_registers: bool
    name: str

    @classmethod
    def here(cls) -> "Card":
        return cls(device.detect(), device.processors(), device.keeps_registers(), device.card())

    def patch(self):
        """Makes `jattn.device` see it."""
        return mock.patch.multiple(
            device,
            detect=functools.cache(lambda: self.chip),
            processors=lambda: self.processors,
            keeps_registers=functools.cache(lambda: self.keeps_registers),
            card=functools.cache(lambda: self.name),
        )


def lower(label: str, card: Card) -> dict[str, bytes]:
    """The programs of a model by name: its weights, the reference, and one for each batch."""
    model = Served(label)
    abstract = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)

    def lowered(function: Callable, *args: Any) -> bytes:
        leaves, structure = jax.tree.flatten(args)
        flat = lambda *given: tuple(jax.tree.leaves(function(*jax.tree.unflatten(structure, given))))
        return lowering.lowered(flat, *map(abstract, leaves))

    with card.patch():
        params = jax.eval_shape(model.weights, jnp.uint32(0))
        caches, before = jax.eval_shape(lambda: (model.make_caches(), empty_row_state(ROWS)))
        run = functools.partial(dispatch.function, construction.model_of(model.config, caches, None, "auto", False))
        found = {
            "weights": lowered(model.weights, jnp.uint32(0)),
            "float32": lowered(model.reference, params, jnp.zeros(LENGTH, jnp.int32)),
            "bfloat16": lowered(
                functools.partial(model.reference, dtype=jnp.bfloat16), params, jnp.zeros(LENGTH, jnp.int32)
            ),
        }
        for shape in model.shapes.all():
            found[program_name(shape)] = lowered(run, params, caches, before, model.batch(shape))
        return found


def program_name(shape: StepShape) -> str:
    """Of a dispatch."""
    return f"{shape.num_tokens} tokens"


class Compiled:
    """The programs of a model, compiled before; where there are none, JAX compiles what is called."""

    def __init__(self, model: Served, programs: dict[str, Any] | None):
        self.model, self.programs = model, programs
        self._weights = jax.eval_shape(model.weights, jnp.uint32(0))

    def weights(self) -> Any:
        if self.programs is None:
            return jax.jit(self.model.weights)(jnp.uint32(0))
        return jax.tree.unflatten(jax.tree.structure(self._weights), self.programs["weights"](jnp.uint32(0)))

    def reference(self, params: Any, ids: np.ndarray, dtype: str) -> np.ndarray:
        if self.programs is None:
            return np.asarray(self.model.reference(params, jnp.asarray(ids), dtype))
        return np.asarray(self.programs[dtype](*jax.tree.leaves(params), ids)[0])

    def for_engine(self):
        """Gives an engine these programs, whatever it would compile."""
        if self.programs is None:
            return contextlib.nullcontext()
        programs, trees = self.programs, self.model.trees

        def of(_, args):
            program, structure = programs[trees[args[-1].tree]], _structure_of_results(args)
            return lambda *given: jax.tree.unflatten(structure, program(*jax.tree.leaves(given)))

        return mock.patch.object(Programs, "of", of)


def check(programs: Compiled) -> tuple[np.ndarray, np.ndarray]:
    """The differences of all generated tokens, over the spread of the logits; those of bfloat16 alone."""
    model, params = programs.model, jax.block_until_ready(programs.weights())
    rng, greedy = np.random.default_rng(1), jattn.SamplingParams(temperature=0, max_tokens=10, logprobs=ALTERNATIVES)
    prompts = [rng.integers(3, model.config.vocab_size - 1, n).tolist() for n in LENGTHS]
    with programs.for_engine():
        engine = jattn.Engine(
            model.config, params, num_blocks=BLOCKS, block_size=BLOCK, max_num_seqs=ROWS, max_burst=BURST,
            max_num_batched_tokens=TOKENS, max_model_len=model.length, cascade_attention=False,
        )  # fmt: skip
        outputs = engine.generate(prompts, greedy) + engine.generate([prompts[5], prompts[3]], greedy)
        outputs += engine.generate([prompts[4]], greedy) + engine.generate([prompts[1]], greedy)
    del engine
    gc.collect()
    found: tuple[list, list] = [], []
    for prompt, output in zip([*prompts, *(prompts[i] for i in (5, 3, 4, 1))], outputs, strict=True):
        tokens, ids = list(output.token_ids), np.zeros(LENGTH, np.int32)
        ids[: len(prompt) + len(tokens)] = [*prompt, *tokens]
        given = [{each.token_id: each.logprob} | each.top for each in output.logprobs or ()]
        exact, rounded = (programs.reference(params, ids, dtype) for dtype in ("float32", "bfloat16"))
        for i, own in enumerate(given, start=len(prompt) - 1):
            likely, spread = log_softmax(exact[i]), exact[i].std()
            found[0].append(np.abs(np.array(list(own.values())) - likely[list(own)]).max() / spread)
            found[1].append(np.abs(log_softmax(rounded[i]) - likely)[list(own)].max() / spread)
    return np.array(found[0]), np.array(found[1])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """In float64."""
    lower = logits.astype(np.float64) - logits.max()
    return lower - np.log(np.exp(lower).sum())


def report(label: str, programs: dict[str, Any] | None) -> bool:
    """Print the line of a model: is it right?"""
    begin, model = time.time(), Served(label)
    is_right = False
    try:
        found = check(Compiled(model, programs))
        median, alone = map(float, map(np.median, found))
        is_right = all(
            np.median(own) <= max(LIMIT, MOST_TIMES * np.median(rounded))
            for own, rounded in zip(*(np.split(each, [TOGETHER]) for each in found), strict=True)
        )
        own = f"largest {found[0].max():7.4f} median {median:7.4f} above 0.1: {int((found[0] > 0.1).sum()):3}"
        figures = f"{own}; bfloat16 alone {found[1].max():7.4f} {alone:7.4f} {int((found[1] > 0.1).sum()):3}"
    except Exception as error:
        figures = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    print(f"{label:24} {'ok   ' if is_right else 'WRONG'} {figures} {time.time() - begin:5.1f} s", flush=True)
    return is_right


def compiled(made: dict[str, bytes]) -> dict[str, Any]:
    """With the engine's options, and without autotuning, for which threads would wait for one another."""

    def options(name: str) -> dict[str, Any]:
        tokens, _, unit = name.partition(" ")
        of_dispatch = options_of("gpu", int(tokens) <= FEW_TOKENS) if unit == "tokens" else {}
        return of_dispatch | dict(xla_gpu_autotune_level=0)

    return {name: lowering.compiled(program, **options(name)) for name, program in made.items()}


def run_lowered(labels: list[str], processes: int, seconds: float) -> tuple[int, int]:
    """(models that are wrong, models left out). Each runs as soon as its programs are compiled."""
    begin, compiler, card = time.time(), lowering.Compiler(processes, 16), Card.here()
    wrong = 0
    try:
        waiting = {label: compiler.compile(compiler.lower(lower, label, card), compiled) for label in labels}
        while waiting and time.time() - begin < seconds:
            ready = next((label for label, job in waiting.items() if job.done()), None)
            if ready is None:
                time.sleep(0.1)
                continue
            wrong += not _report_job(ready, waiting.pop(ready))
            gc.collect()
    finally:  # when interrupted, too: Python would wait for all programs before it ends
        compiler.close()
    return wrong, len(waiting)


def run_here(labels: list[str], seconds: float) -> tuple[int, int]:
    """The same without a GPU: an engine compiles its programs itself."""
    begin, wrong = time.time(), 0
    for number, label in enumerate(labels):
        if not time.time() - begin < seconds:
            return wrong, len(labels) - number
        wrong += not report(label, None)
    return wrong, 0


def _report_job(label: str, job: Future) -> bool:
    if (error := job.exception()) is not None:
        print(f"{label:24} WRONG {type(error).__name__}: {' '.join(str(error).split())[:200]}", flush=True)
        return False
    return report(label, job.result())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.on_card", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--processes", type=int, default=12, help="that lower programs (default: 12)")
    parser.add_argument("--seconds", type=float, default=300, help="no model is begun afterwards (default: 300)")
    args = parser.parse_args(argv)
    if args.processes < 1:
        parser.error(f"--processes: {args.processes} is less than 1")
    labels = chosen(parser, args.only)
    if jax.default_backend() == "gpu":
        wrong, left_out = run_lowered(labels, args.processes, args.seconds)
    else:
        wrong, left_out = run_here(labels, args.seconds)
    print(f"{len(labels)} models, {wrong} wrong, {left_out} left out", flush=True)
    sys.stdout.flush()
    os._exit(1 if wrong else 2 if left_out else 0)  # without waiting for what still compiles


if __name__ == "__main__":
    main()
