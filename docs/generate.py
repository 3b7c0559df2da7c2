"""Writes what the documents do not write by hand: support_matrix.md, arguments.md, families.md, and pictures.

    python docs/generate.py            write them
    python docs/generate.py --check    exit 1 if they are not what would be written
    python docs/generate.py --site     build the documentation site into site/html

The matrix asks the backends themselves, with `jattn.explain`, for every platform: a plain layer first, then the same
layer with one thing more. What a plain layer is refused for (a compiler that is not installed, say) is not counted
against the one thing, so that every machine writes the same file.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]  # this checkout, whatever jattn is installed

from website import architecture, build, picture  # noqa: E402
from website.arguments import arguments_page  # noqa: E402

import jattn  # noqa: E402
from jattn.backends import Feature, registry  # noqa: E402
from jattn.device import PLATFORMS, Chip  # noqa: E402
from jattn.models.families import FAMILIES  # noqa: E402
from jattn.models.honoured import honoured_options  # noqa: E402
from pallas_kernels.algebra.quant import QUANTISED  # noqa: E402

CHIPS = {"cpu": Chip("cpu"), "gpu": Chip("gpu", "sm_90"), "tpu": Chip("tpu")}
LAYER = dict(num_heads=8, num_kv_heads=2, head_dim=128)
LATENT = dict(num_heads=8, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
CACHE = dict(num_blocks=64, block_size=128, num_kv_heads=2, head_dim=128)
HEAD_DIMS = (1, 8, 40, 64, 80, 96, 128, 192, 256, 512, 576)
BLOCK_SIZES = (1, 3, 16, 48, 128)
QUANTS = ("per_tensor", "per_head", "per_token_head")


def _any(*args):
    return args[-1]


FIELDS = {  # what a layer or its cache must say to ask for a feature; all others are asked for by name
    Feature.SINK: dict(has_sinks=True),
    Feature.PER_HEAD_QUANT_SCALES: dict(cache=dict(dtype="float8_e4m3fn", quant="per_head")),
    Feature.SLIDING_WINDOW: dict(sliding_window=1000),
    Feature.TWO_SIDED_WINDOW: dict(sliding_window=(100, 100)),
    Feature.CHUNK: dict(chunk_size=1024),
    Feature.CHUNK_LOOKBACK: dict(chunk_size=1024, chunk_lookback=1),
    Feature.ALIBI: dict(has_alibi=True),
    Feature.ALIBI_SQRT: dict(has_alibi=True, use_alibi_sqrt=True),
    Feature.QQ_BIAS: dict(use_qq_bias=True),
    Feature.DISTANCE_BIAS: dict(use_distance_bias=True),
    Feature.MM_PREFIX: dict(use_mm_prefix=True),
    Feature.RSWA: dict(sliding_window=1000, use_rswa=True),
    Feature.SOFT_CAP: dict(logits_soft_cap=30.0),
    Feature.MASK_FN: dict(mask_fn=_any),
    Feature.SCORE_FN: dict(score_fn=_any),
    Feature.DIFF_KV: dict(v_head_dim=64),
    Feature.PACKED: dict(cache=None),
    Feature.FUSED_OUTPUT_QUANT: dict(output_dtype="float8_e4m3fn"),
    Feature.EIGHT_BIT_PRODUCTS: dict(
        compute_dtype="float8_e4m3fn", cache=dict(dtype="float8_e4m3fn", quant="per_tensor")
    ),
}
SPELLED = {  # how a user says it, where the name alone does not tell
    Feature.SLIDING_WINDOW: "`sliding_window=W`",
    Feature.TWO_SIDED_WINDOW: "`sliding_window=(left, right)`",
    Feature.SINK: "`has_sinks`",
    Feature.CHUNK: "`chunk_size`",
    Feature.CHUNK_LOOKBACK: "`chunk_lookback`",
    Feature.ALIBI: "`has_alibi`",
    Feature.ALIBI_SQRT: "`use_alibi_sqrt`",
    Feature.QQ_BIAS: "`use_qq_bias`",
    Feature.DISTANCE_BIAS: "`use_distance_bias`",
    Feature.MM_PREFIX: "`use_mm_prefix`",
    Feature.RSWA: "`use_rswa`",
    Feature.SOFT_CAP: "`logits_soft_cap`",
    Feature.MASK_FN: "`mask_fn`",
    Feature.SCORE_FN: "`score_fn`",
    Feature.NON_CAUSAL: "`causal=False`",
    Feature.PER_REQUEST_CAUSAL: "`causal=[...]`",
    Feature.DIFF_KV: "`v_head_dim`",
    Feature.PACKED: "`jattn.attention`",
    Feature.CASCADE: "`jattn.cascade_attention`",
    Feature.LSE: "`state.lse`",
    Feature.FUSED_OUTPUT_QUANT: "`output_dtype`",
    Feature.EIGHT_BIT_PRODUCTS: "`compute_dtype`",
    Feature.PER_HEAD_QUANT_SCALES: '`quant="per_head"`',
}


def answers(name: str, layer: dict, cache: dict | None, needs=()) -> dict[str, set[str]]:
    """The reasons of backend `name` against this layer, by platform."""
    spec, cache_spec = (_latent if registry.load(name).is_mla() else _usual)(layer, cache)
    found = {}
    for platform in platforms(name):
        report = next(r for r in jattn.explain(spec, cache_spec, CHIPS[platform], tuple(needs)) if r.name == name)
        found[platform] = set(report.reasons)
    return found


def _usual(layer: dict, cache: dict | None):
    layer = LAYER | layer
    dims = {key: layer[key] for key in ("head_dim", "v_head_dim") if key in layer}
    return jattn.AttentionSpec(**layer), None if cache is None else jattn.KVCacheSpec(**(CACHE | dims | cache))


def _latent(layer: dict, cache: dict):
    fields = {field.name for field in dataclasses.fields(jattn.MLASpec)}  # what it has no word for is asked by name
    spec = jattn.MLASpec(**(LATENT | {name: value for name, value in layer.items() if name in fields}))
    cache = dict(block_size=CACHE["block_size"]) | cache
    return spec, jattn.mla_cache_spec(spec, CACHE["num_blocks"], **cache)


def platforms(name: str) -> tuple[str, ...]:
    """Where the backend says that it runs."""
    backend = registry.load(name)
    return tuple(p for p in PLATFORMS if backend.supports_platform(p))


def takes(name: str, layer: dict | None = None, cache: dict | None = None, needs=(), packed=False) -> tuple[str, ...]:
    """The platforms on which nothing more is said against it than against a plain layer."""
    plain = answers(name, {}, {})
    asked = answers(name, layer or {}, None if packed else cache or {}, needs)
    return tuple(platform for platform, reasons in asked.items() if not reasons - plain[platform])


def cell(name: str, where: tuple[str, ...]) -> str:
    if where == platforms(name):
        return "yes"
    return ", ".join(where) or "-"


def sizes(name: str, values, ask) -> str:
    """Those of `values` that are taken on every platform of the backend: 'any' for all of them."""
    good = [value for value in values if ask(value) == platforms(name)]
    return "any" if good == list(values) else ", ".join(map(str, good)) or "-"


def rows(names: tuple[str, ...], latent: bool):
    """(section, [(row title, [cell of each backend])]) of backends that are all latent, or none of them."""
    each = lambda title, ask: (title, [ask(name) for name in names])
    yield "Where", [each("platforms", lambda name: ", ".join(platforms(name)))]
    if not latent:
        kinds = list(jattn.AttentionType)
        yield (
            "Who attends to whom",
            [each(kind.value, lambda name, t=kind: cell(name, takes(name, dict(attn_type=t)))) for kind in kinds],
        )
    left_out = (Feature.DIFF_KV, Feature.PACKED) if latent else ()  # latent caches have neither by nature
    yield "Features", [_feature(feature, names) for feature in Feature if feature not in left_out]
    caches = [
        each(f"{dtype} cache", lambda name, d=dtype: cell(name, takes(name, cache=dict(dtype=d))))
        for dtype in ("float32", "float16", "bfloat16")
    ]
    quantised = [
        each(
            f"{dtype} cache, `quant=` {_of(QUANTS)}",
            lambda name, d=dtype: sizes(name, QUANTS, lambda mode: takes(name, cache=dict(dtype=d, quant=mode))),
        )
        for dtype in QUANTISED
    ]
    queries = [
        each(f"{dtype} queries", lambda name, d=dtype: "yes" if registry.load(name).supports_dtype(d) else "-")
        for dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    ]
    yield "Types", [*queries, *caches, *quantised]
    shapes = [
        each(order, lambda name, layout=order: cell(name, takes(name, cache=dict(layout=layout))))
        for order in ("HND", "NHD")
    ]
    narrow = dict(layer=dict(head_dim=64), cache=dict(layout="HND128"))
    shapes += [] if latent else [each("HND128, heads of 64", lambda name: cell(name, takes(name, **narrow)))]
    by_head = lambda name: sizes(name, HEAD_DIMS, lambda d: takes(name, dict(head_dim=d)))
    by_block = lambda name: sizes(name, BLOCK_SIZES, lambda s: takes(name, cache=dict(block_size=s)))
    shapes += [] if latent else [each(f"head dim {_of(HEAD_DIMS)}", by_head)]
    yield "Shapes", [*shapes, each(f"page {_of(BLOCK_SIZES)}", by_block)]


def _of(values) -> str:
    return "of " + ", ".join(map(str, values))


def _feature(feature: Feature, names: tuple[str, ...]):
    fields = dict(FIELDS.get(feature, {}))
    packed = "cache" in fields and fields["cache"] is None
    cache = fields.pop("cache", None)
    title = f"{feature.value}: {SPELLED[feature]}" if feature in SPELLED else feature.value
    return title, [cell(name, takes(name, fields, cache, (feature,), packed)) for name in names]


def _table(title: str, names, table) -> list[str]:
    """One section; rows that everybody refuses become a sentence."""
    lines = [
        "",
        f"## {title}",
        "",
        f"| | {' | '.join(f'`{name}`' for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    lines += [f"| {row} | {' | '.join(cells)} |" for row, cells in table if {*cells} != {"-"}]
    refused = [row for row, cells in table if {*cells} == {"-"}]
    return [*lines, "", f"Nobody yet: {'; '.join(refused)}."] if refused else lines


def _gradients() -> str:
    """Which features leave the gradient of packed keys on a GPU to cuDNN."""
    backend = registry.load("pallas_gpu")
    asked = {f: fields for f, fields in FIELDS.items() if "cache" not in fields and takes("pallas_gpu", fields)}
    of = {
        f: backend.gradient_by(jattn.AttentionSpec(**LAYER | fields), None, CHIPS["gpu"]) for f, fields in asked.items()
    }
    sdpa = [SPELLED[feature] for feature, who in of.items() if who != "cuDNN"]
    return (
        "The gradient of `jattn.attention` by `pallas_gpu` is cuDNN's. That of `sdpa`, which is slower, is taken with "
        f"{', '.join(sdpa)}, `causal=[...]` and where a causal batch has computed tokens. "
        "On other GPUs than sm_90, 100 and 103 it is also taken with heads above 128, and unless all requests are "
        "known to have one even length while jit traces."
    )


def support_matrix() -> str:
    names = jattn.list_backends()
    lines = [
        "# What each backend supports",
        "",
        "Written by `docs/generate.py` from the backends' own answers; `tests/rooms/test_doc_blocks.py` writes it",
        'again and finds no difference. Backends stand in the order in which `backend="auto"` tries them. *yes*: on',
        "every platform of the backend; a platform's name: only there; *-*: refused, with a reason. Features compose:",
        "what is *yes* alone is *yes* together, unless `jattn.explain(spec, cache_spec)`, which knows the layer,",
        "its cache and the chip, says otherwise.",
    ]
    latent = tuple(name for name in names if registry.load(name).is_mla())
    for section, table in rows(tuple(name for name in names if name not in latent), False):
        lines += _table(section, [name for name in names if name not in latent], table)
    lines += ["", _gradients()]
    together = [row for _, table in rows(latent, True) for row in table]
    lines += _table("Multi-head latent attention: `jattn.MLAAttention`", latent, together)
    return "\n".join(lines) + "\n"


def block_table_picture() -> str:
    """Two requests of 6 and 3 tokens in pages of 4: rows of the table on the left, the pool of 8 blocks below."""
    colours = {"A": "#7fb2e5", "B": "#f2b36d"}
    table = {"A": (3, 6, None), "B": (1, None, None)}
    lengths, size, side = {"A": 6, "B": 3}, 4, 26
    held = {}  # block -> (request, tokens in it)
    for request, pages in table.items():
        for column, block in enumerate(page for page in pages if page is not None):
            held[block] = (request, max(0, min(size, lengths[request] - column * size)), column * size)
    out = []

    def box(x, y, w, h, fill, stroke="#555"):
        out.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{stroke}"/>')

    def text(x, y, words, anchor="middle", colour="#222", size=13):
        out.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>')

    text(20, 26, "block_table", "start")
    text(330, 26, "the request's own view: positions", "start")
    for row, (request, pages) in enumerate(table.items()):
        y = 40 + row * 44
        text(20, y + 19, f"request {request}", "start")
        for column, block in enumerate(pages):
            x = 110 + column * 40
            box(x, y, 40, side, "#fff" if block is None else colours[request])
            text(x + 20, y + 18, "any" if block is None else block, colour="#999" if block is None else "#222")
        for position in range(lengths[request]):
            x = 330 + position * side + position // size * 8
            box(x, y, side, side, colours[request])
            text(x + side / 2, y + 18, position)
    text(20, 152, "the pool: 8 blocks of 4 slots; a number is the position of the token that lies there", "start")
    for block in range(8):
        x0 = 20 + block * (size * 19 + 8)
        request, tokens, first = held.get(block, (None, 0, 0))
        text(x0 + size * 19 / 2, 178, f"block {block}", size=12)
        for offset in range(size):
            x, used = x0 + offset * 19, offset < tokens
            box(x, 186, 19, side, colours[request] if used else "#eee", "#555" if used else "#bbb")
            if used:
                text(x + 9.5, 204, first + offset)
    text(20, 238, "grey: free slots and page tails, which may hold anything, NaN included", "start", "#666", 12)
    body = "\n".join(out)
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 252" width="700" height="252" '
        f'font-family="sans-serif">\n<rect width="700" height="252" fill="#fff"/>\n{body}\n</svg>\n'
    )


def families_page() -> str:
    """docs/families.md: the options of config.json that each family of models honours."""
    head = [
        "# Families of models and their options", "",
        "Written by `docs/generate.py` from what each family reads; `jattn models` prints the same. Sizes and token",
        "ids are not listed. A listed key may be limited to the value that fits the others: `num_key_value_heads` of",
        "`gpt2` must equal the number of heads. Any other key is refused by name, unless it is known to be harmless:",
        "see [models](models.md).", "", "| model_type | options |", "|---|---|",
    ]  # fmt: skip
    body = [f"| `{name}` | {', '.join(f'`{key}`' for key in honoured_options(name))} |" for name in FAMILIES]
    return "\n".join([*head, *body, ""])


def documents() -> dict[Path, str]:
    """Every generated file and what belongs into it."""
    return {
        HERE / "support_matrix.md": support_matrix(),
        HERE / "arguments.md": arguments_page(),
        HERE / "families.md": families_page(),
        HERE / "pictures" / "block_table.svg": block_table_picture(),
        HERE / "pictures" / "step.svg": picture.step(),
        HERE / "pictures" / "rooms.svg": architecture.rooms(),
        HERE / "pictures" / "request.svg": architecture.request(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated documents.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file would change")
    parser.add_argument("--site", action="store_true", help="build the documentation site; exit 1 on any warning")
    args = parser.parse_args()
    if args.site:
        return build.build()
    check = args.check
    stale = [path for path, text in documents().items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(documents()[path])
        print(f"{'stale' if check else 'written'}: {path.relative_to(HERE.parent)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
