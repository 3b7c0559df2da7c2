"""`jattn plan`: memory, the largest batch and context, and the shortest time of a step, for devices that need not be
here."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from jattn.cli import screen
from jattn.cli.command import add_command
from jattn.cli.options import DTYPES
from jattn.engine import plan as planning
from jattn.engine.construction import check_decoder_only
from jattn.engine.device_kinds import DeviceKind, device_kind, kind_and_count
from jattn.engine.sizing import dtype_of
from jattn.errors import UnsupportedError
from jattn.errors.arguments import dtype_name, integer, optional
from jattn.models import QUANTIZATIONS
from jattn.models.load import stored_weights
from jattn.models.model_folder import read_model_folder, weights_dtype

HEAD = (
    "layout", "weights", "activations", "cache", "tokens", "batch", "context", "decode, ms (rows)", "prefill, ms",
)  # fmt: skip
NOTE = f"""\
Bytes are of each device; --max-num-seqs and --max-num-batched-tokens are those of each data rank; batch and rows are
of all. Cache: what the engine takes for --max-num-seqs sequences of `tokens` tokens. Batch: the most sequences of that
length, up to {planning.MAX_BATCH} for each data rank; context: the longest sequence alone. Activations are an
estimate. Times are lower bounds: bytes / bandwidth or FLOP / peak, and the bytes of collectives over the links; decode
with sequences of full length, prefill of the first --max-num-batched-tokens tokens."""


def add(commands) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "plan",
        "the memory and the time that a model takes on given devices, for each way to divide it over them",
        ["jattn plan --model ~/models/llama --devices h200x2 l4", "jattn plan --model ~/models/llama --devices cpu"],
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        required=True,
        help="a Hugging Face folder; config.json is enough unless weights are stored quantised. Without weights and "
        "--dtype their dtype is that of config.json, or bfloat16",
    )
    parser.add_argument(
        "--devices", nargs="+", required=True, metavar="KIND[xN]", help="as h200x8; cpu: this machine, measured"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of the weights (default: auto, as stored)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the large weights (default: as stored)")
    parser.add_argument("--cache-dtype", metavar="DTYPE", help="of keys and values (default: that of the weights)")
    parser.add_argument("--max-model-len", type=int, metavar="L", help="prompt and output (default: the model's)")
    parser.add_argument("--max-num-seqs", type=int, default=16, metavar="R", help="sequences at once (default: 16)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=256, metavar="T", help="tokens of a step (default: 256)"
    )
    parser.add_argument(
        "--memory-fraction", type=float, metavar="F",
        help="share of the memory that JAX may use (default: 0.75 on a GPU, as XLA_PYTHON_CLIENT_MEM_FRACTION)",
    )  # fmt: skip
    parser.add_argument(
        "--expert-parallel", action="store_true", help="data ranks share one set of experts, over all devices"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if the engine can run the model on each of the devices, in some layout."""
    if args.model == "":
        raise ValueError("--model is empty: give a folder")
    if args.memory_fraction is not None and not 0 < args.memory_fraction <= 1:
        raise ValueError(f"--memory-fraction {args.memory_fraction} must be above 0 and at most 1")
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        optional(integer(1))(f"--{name.replace('_', '-')}", getattr(args, name))
    if args.cache_dtype is not None:
        args.cache_dtype = dtype_name("--cache-dtype", args.cache_dtype)
    folder = read_model_folder(args.model)
    config, method, dtype = folder.config, folder.method_of_weights, weights_dtype(args.dtype) or folder.stored_dtype
    check_decoder_only(config)
    stored = _stored_weights(args, method)
    if stored is not None and method is None:
        dtype = dtype_of(stored)
    fields = [field.name for field in dataclasses.fields(planning.PlanOptions)]
    options = planning.PlanOptions(**{name: getattr(args, name) for name in fields if hasattr(args, name)})
    asked = [kind_and_count(text) for text in args.devices]
    found = []
    for name, count in asked:
        kind = device_kind(name, count)
        found.append((kind, count, planning.plan_layouts(config, dtype, kind, count, options, stored)))
    if args.json:
        print(json.dumps([_as_json(kind, count, plans, dtype) for kind, count, plans in found]))
    else:
        for kind, count, plans in found:
            _show(kind, count, plans)
        print(NOTE)
    return 0 if all(any(plan.refused is None for plan in plans) for *_, plans in found) else 1


def _stored_weights(args: argparse.Namespace, method: str | None) -> dict[str, Any] | None:
    """The shapes and dtypes of the folder's weights; None if they are not there, or not readable, but not needed."""
    if method is None:
        try:
            return stored_weights(args.model, dtype=args.dtype)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, ImportError) as error:  # such as a clone with pointers in place of weights
            source = "config.json" if weights_dtype(args.dtype) is None else "--dtype"
            said = f"{screen.told(error)}; the dtype is that of {source}"
            print(f"jattn: its weights cannot be read: {said}", file=sys.stderr)
            return None
    if args.quantization is not None:
        raise UnsupportedError(f"{args.model}: its weights are quantised ({method}); leave --quantization out")
    try:
        return stored_weights(args.model, dtype=args.dtype)
    except FileNotFoundError as error:
        raise UnsupportedError(
            f"{args.model}: its weights are stored quantised ({method}); which, only the headers of its *.safetensors "
            "say, and they are not there"
        ) from error


def _as_json(kind: DeviceKind, count: int, plans: list[planning.LayoutPlan], dtype: str) -> dict:
    layouts = [planning.as_dict(plan) for plan in plans]
    return dict(devices=dataclasses.asdict(kind) | dict(count=count), dtype=dtype, layouts=layouts)


def _show(kind: DeviceKind, count: int, plans: list[planning.LayoutPlan]) -> None:
    """A table of the layouts that run, then those that do not, with the reasons."""
    print(
        f"{count} x {kind.name}: {planning.size_text(kind.memory)}, {kind.bandwidth / 1e9:.0f} GB/s, "
        f"{kind.peak / 1e12:.4g} TFLOP/s, link {kind.link / 1e9:.0f} GB/s"
    )
    rows = [_row(plan) for plan in plans if plan.refused is None]
    if rows:
        widths = [max(map(len, column)) for column in zip(HEAD, *rows, strict=True)]
        line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        screen.table(HEAD, rows, plain="\n".join(map(line, (HEAD, *rows))))
    refused: dict[str, list[str]] = {}
    for plan in plans:
        if plan.refused is not None:
            refused.setdefault(plan.refused, []).append(str(plan.layout))
    for why, layouts in refused.items():
        print(f"refused: {'; '.join(layouts)}: {why}")
    print()


def _row(plan: planning.LayoutPlan) -> tuple[str, ...]:
    sizes = (plan.weight_bytes, plan.activation_bytes, plan.cache_bytes)
    counts = (plan.max_model_len, plan.largest_batch, plan.largest_context)
    decode = ", ".join(f"{1e3 * seconds:.3g} ({rows})" for rows, seconds in (plan.decode_seconds or {}).items())
    prefill = f"{1e3 * (plan.prefill_seconds or 0):.3g}"
    return str(plan.layout), *(planning.size_text(size or 0) for size in sizes), *map(str, counts), decode, prefill
