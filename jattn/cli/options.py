"""Options that several commands have: the model, the engine, and sampling."""

import argparse
import re

import jax

from jattn import compile_cache, device, embedded
from jattn.cli import screen
from jattn.embedder import Embedder
from jattn.engine import Engine, LockStepEngine, Processes, SamplingParams, keep_freed_memory
from jattn.models import QUANTIZATIONS
from jattn.models.sentence_folder import is_sentence_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""--dtype: those of weights that an engine can serve; auto: as stored."""


def add_engine(parser: argparse.ArgumentParser) -> None:
    """--model and the Engine's own options."""
    group = parser.add_argument_group("the model and the engine")
    group.add_argument("--model", metavar="DIR", help="a Hugging Face folder (default: the bundled adder)")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: auto, as stored)")
    group.add_argument(
        "--quantization", choices=QUANTIZATIONS, help="quantise the large weights as they are read (default: as stored)"
    )
    group.add_argument("--num-blocks", type=int, metavar="N", help="cache blocks (default: from free memory)")
    group.add_argument(
        "--block-size", type=int, metavar="S", help="tokens of a block (default: 16 on a CPU, 64 on an accelerator)"
    )
    group.add_argument("--max-num-seqs", type=int, default=16, metavar="R", help="sequences at once (default: 16)")
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=256, metavar="T", help="tokens of a step (default: 256)"
    )
    group.add_argument("--max-model-len", type=int, metavar="L", help="prompt and output (default: the model's)")
    group.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="distribute the model over N devices (default: 1)"
    )
    group.add_argument(
        "--decode-context-parallel", type=int, default=1, metavar="C",
        help="distribute the model, and the keys of each request, over C times as many devices (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--data-parallel", type=int, default=1, metavar="M",
        help="hold M copies of the model, each with its own requests and cache; uses N x C x M devices (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--expert-parallel", action="store_true", help="the M copies share one set of experts, over all devices"
    )
    group.add_argument("--backend", default="auto", help="attention backend (default: auto; see `jattn explain`)")
    group.add_argument("--deterministic", action="store_true", help="the same bits in every batch; slower")
    group.add_argument("--no-prefix-caching", action="store_true", help="do not share the blocks of equal beginnings")
    group.add_argument(
        "--no-cascade-attention", action="store_true", help="read a prefix that decoding requests share once for each"
    )
    group.add_argument(
        "--compile-cache-mb",
        type=int,
        metavar="MB",
        help="size limit of the compiled programs on disk; 0: keep and load none "
        f"(default: {compile_cache.MAX_MB}; see `jattn doctor`)",
    )


def make_engine(args: argparse.Namespace, seed: int | None = None, processes: Processes | None = None) -> Engine:
    """The engine that the options describe, in a process that keeps the memory it frees."""
    if args.model == "":
        raise ValueError("--model is empty: give a folder, or omit --model for the bundled model")
    if getattr(jax.config, "jax_disable_jit", False):
        raise ValueError("JAX_DISABLE_JIT is set, and an engine runs compiled programs only: unset it")
    keep_freed_memory()
    device.detect()  # raises UnsupportedError if JAX cannot start
    keep_programs(args.compile_cache_mb)
    options = dict(
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        backend=args.backend,
        deterministic=args.deterministic,
        prefix_caching=not args.no_prefix_caching,
        cascade_attention=not args.no_cascade_attention,
        seed=seed,
        tensor_parallel=args.tensor_parallel,
        data_parallel=args.data_parallel,
        decode_context_parallel=args.decode_context_parallel,
        expert_parallel=args.expert_parallel,
    )
    folder = embedded.directory() if args.model is None else args.model
    with screen.progress("loading") as report:
        options |= dict(progress=report, dtype=args.dtype, quantization=args.quantization)
        if processes is not None:
            return LockStepEngine.from_pretrained(folder, processes=processes, **options)
        return Engine.from_pretrained(folder, **options)


def serves_embeddings(args: argparse.Namespace) -> bool:
    """True if --pooling is given, or the folder has the settings of an embedding model."""
    return args.pooling is not None or (args.model is not None and is_sentence_folder(args.model))


def make_embedder(args: argparse.Namespace) -> Embedder:
    """The Embedder that the options describe; ValueError for an option of the engine, which it does not have."""
    if not args.model:
        raise ValueError("--pooling needs --model: the bundled model makes no embeddings")
    unused = [f"--{name.replace('_', '-')}" for name, default in ENGINE_ONLY.items() if getattr(args, name) != default]
    if unused:
        raise ValueError(f"{args.model} is served for embeddings, which do not have {', '.join(unused)}")
    keep_freed_memory()
    device.detect()  # raises UnsupportedError if JAX cannot start
    keep_programs(args.compile_cache_mb)
    with screen.progress("loading") as report:
        return Embedder.from_pretrained(
            args.model, pooling=args.pooling, dtype=args.dtype, quantization=args.quantization, progress=report,
            backend=args.backend, max_batched_tokens=args.max_num_batched_tokens,
        )  # fmt: skip


ENGINE_ONLY: dict[str, object] = dict(
    num_blocks=None, block_size=None, max_num_seqs=16, max_model_len=None, tensor_parallel=1, data_parallel=1,
    decode_context_parallel=1, expert_parallel=False, deterministic=False, no_prefix_caching=False,
    no_cascade_attention=False,
)  # fmt: skip
"""Options of `add_engine` that an Embedder does not have -> their defaults."""


def keep_programs(max_mb: int | None) -> None:
    """Keep compiled programs on disk, as --compile-cache-mb says."""
    folder = compile_cache.users_folder()
    if max_mb is not None and folder:
        raise ValueError(
            f"--compile-cache-mb {max_mb} limits jattn's own cache, but JAX_COMPILATION_CACHE_DIR={folder} is set; "
            "give one of the two"
        )
    if max_mb is not None and max_mb < 0:
        raise ValueError(f"--compile-cache-mb {max_mb} must be 0 or more")
    compile_cache.enable(compile_cache.MAX_MB if max_mb is None else max_mb)


SAMPLING = dict(
    max_tokens=(int, 64, "tokens to generate"),
    temperature=(float, 0.0, "divides the logits; 0: always the most likely token"),
    top_k=(int, 0, "only the k most likely tokens; 0: off"),
    top_p=(float, 1.0, "only the most likely tokens that together reach this probability"),
    min_p=(float, 0.0, "only tokens at least this likely, relative to the most likely one"),
    repetition_penalty=(
        float,
        1.0,
        "above 1: tokens of the prompt and the output become less likely",
    ),
    presence_penalty=(float, 0.0, "subtracted from the logit of each token of the output"),
    frequency_penalty=(float, 0.0, "subtracted once for each time that the output has a token"),
    n=(int, 1, "completions of a prompt"),
    seed=(int, None, "of the random draws (default: random)"),
)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The fields of SamplingParams, with dashes."""
    group = parser.add_argument_group("sampling")
    for name, (kind, default, what) in SAMPLING.items():
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=what + shown)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help=r"end before this text, where \n is a line break; repeatable",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The SamplingParams that the options describe."""
    stop = [unescaped("--stop", text) for text in args.stop]
    return SamplingParams(**{name: getattr(args, name) for name in SAMPLING}, stop=stop, ignore_eos=args.ignore_eos)


ESCAPE = re.compile(r"\\([\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3]?[0-7]{1,2})?")


def unescaped(option: str, text: str) -> str:
    """The text with Python's backslash escapes replaced, as in --stop '\\n'."""

    def read(found: re.Match[str]) -> str:
        if found[1] is None:
            raise ValueError("a backslash does not begin an escape; write two backslashes for one")
        return found[0].encode("ascii").decode("unicode_escape")

    try:
        made = ESCAPE.sub(read, text)
        made.encode()  # UnicodeEncodeError for an unpaired surrogate
    except ValueError as error:
        raise ValueError(f"{option} {text!r} cannot be read: {error}") from None
    return made


def warm(engine: Engine) -> int:
    """Compile all programs, with a progress bar; returns their number."""
    with screen.progress("compiling") as report:
        return engine.warmup(report)
