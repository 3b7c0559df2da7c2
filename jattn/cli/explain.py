"""`jattn explain`: whether each backend supports a layer, with all reasons. Flags: fields of the specs."""

import argparse
import dataclasses
import re
from typing import Any

import jattn
from jattn.cli import screen
from jattn.cli.command import add_command
from jattn.device import ALIASES, PLATFORMS, Chip


def add(commands) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "explain",
        "which backends support a layer, and why the others do not",
        [
            "jattn explain --num-heads 32 --num-kv-heads 8 --head-dim 128 --sliding-window 4096",
            "jattn explain --num-heads 64 --num-kv-heads 8 --head-dim 64 --has-sinks --platform gpu",
            "jattn explain --num-heads 32 --num-kv-heads 8 --head-dim 128 --platform sm_86",
        ],
    )
    layer = parser.add_argument_group("the layer (AttentionSpec)")
    layer.add_argument("--num-heads", type=int, required=True, metavar="H", help="query heads")
    layer.add_argument("--head-dim", type=int, required=True, metavar="D", help="elements of a query or key")
    layer.add_argument("--num-kv-heads", type=int, metavar="K", help="key/value heads (default: H)")
    layer.add_argument("--v-head-dim", type=int, metavar="V", help="elements of a value (default: D)")
    layer.add_argument("--scale", type=float, help="factor of q.k (default: D ** -0.5)")
    layer.add_argument(
        "--attn-type", default="decoder", help="encoder, encoder_only or encoder_decoder (default: decoder)"
    )
    layer.add_argument(
        "--sliding-window",
        type=_window,
        metavar="W|L,R",
        help="W keys, or extra keys left,right (-1: all, given as --sliding-window=-1,0)",
    )
    layer.add_argument("--chunk-size", type=int, metavar="C", help="chunked-local attention: tokens of a chunk")
    layer.add_argument(
        "--chunk-lookback", type=int, default=0, metavar="N", help="earlier chunks that are visible (default: 0)"
    )
    layer.add_argument("--logits-soft-cap", type=float, metavar="CAP", help="logits become cap * tanh(logit / cap)")
    layer.add_argument("--has-alibi", action="store_true", help="ALiBi")
    layer.add_argument("--use-alibi-sqrt", action="store_true", help="ALiBi of square-root distances")
    layer.add_argument("--has-sinks", action="store_true", help="attention sinks")
    layer.add_argument("--use-rswa", action="store_true", help="a window that hides none of a request's first keys")
    layer.add_argument("--use-mm-prefix", action="store_true", help="spans of images see both ways")
    layer.add_argument("--mm-prefix-clamp-sliding-window", action="store_true", help="... but not left of the window")
    layer.add_argument("--use-qq-bias", action="store_true", help="a bias among the new tokens")
    layer.add_argument("--use-distance-bias", action="store_true", help="a learned bias of the distance (T5)")
    layer.add_argument("--compute-dtype", help="float8_e4m3fn: queries and weights are rounded to it")
    layer.add_argument("--output-dtype", help="8-bit dtype of the result, such as float8_e4m3fn or int8")
    layer.add_argument("--mask-fn", action="store_true", help="the layer has a mask_fn")
    layer.add_argument("--score-fn", action="store_true", help="the layer has a score_fn")
    cache = parser.add_argument_group("its cache (KVCacheSpec)")
    cache.add_argument("--num-blocks", type=int, default=1024, metavar="N", help="blocks of the pool (default: 1024)")
    cache.add_argument("--block-size", type=int, default=16, metavar="S", help="tokens of a block (default: 16)")
    cache.add_argument("--dtype", default="bfloat16", help="of stored keys and values (default: bfloat16)")
    cache.add_argument("--layout", default="auto", help="NHD, HND or HND128 (default: auto)")
    cache.add_argument("--quant", default="none", help="per_tensor, per_head or per_token_head (default: none)")
    parser.add_argument("--platform", help="cpu, gpu or tpu, or a chip: sm_86, v6e (default: the one that JAX finds)")
    parser.set_defaults(run=lambda args: _explain(parser, args))


def _explain(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    try:
        fields = _fields(jattn.AttentionSpec, args)
        fields["mask_fn"] = _some_mask if args.mask_fn else None
        fields["score_fn"] = _some_score if args.score_fn else None
        spec = jattn.AttentionSpec(**fields)
        shape: dict[str, Any] = dict(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, v_head_dim=spec.v_head_dim)
        cache_spec = jattn.KVCacheSpec(**_fields(jattn.KVCacheSpec, args) | shape)
        reports = jattn.explain(spec, cache_spec, platform=_platform(args.platform))
    except ValueError as error:
        parser.error(str(error))
    rows = [(report.name, "yes" if report.supported else "no", "\n".join(report.notes)) for report in reports]
    screen.table(("backend", "runs", "how, or why not"), rows, plain=str(reports))
    return 0 if any(report.supported for report in reports) else 1


def _fields(spec: type, args: argparse.Namespace) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(spec)}


def _platform(text: str | None) -> str | Chip | None:
    """'sm_86' -> a GPU of this generation, 'v6e' and 'tpu7x' -> a TPU; other names as they are."""
    for platform, names in (("gpu", r"sm_\d+[af]?"), ("tpu", r"(v|tpu)\d\w*")):
        if text and re.fullmatch(names, text):
            return Chip(platform, text)
    if text not in (None, *PLATFORMS, *ALIASES):
        raise ValueError(f"platform={text!r} is not known; use one of {', '.join(PLATFORMS)}, a chip (sm_86, v6e)")
    return text


def _window(text: str) -> int | tuple[int, int]:
    """'128' -> 128, '127,0' -> (127, 0)."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.strip().lstrip("-").isdigit() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} must be W or LEFT,RIGHT, for example 128 or 127,0")
    parts = [int(part) for part in parts]
    return parts[0] if len(parts) == 1 else (parts[0], parts[1])


def _some_mask(head, q_pos, kv_pos):
    return kv_pos <= q_pos


def _some_score(score, head, q_pos, kv_pos):
    return score
