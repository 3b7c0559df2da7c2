"""The two pictures of docs/architecture.md: the rooms, and one request's way through them.

The rooms and their order are those of the import contract in pyproject.toml, so the picture cannot differ from what is
checked. A room's sentence is here, because a picture needs a short one.
"""

import html
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = {
    "cli": "the command line: one file a command",
    "serve": "the HTTP server: OpenAI's interface over one engine",
    "demo": "every backend on a small batch, checked against numpy",
    "embedded": "a small model that ships with the package",
    "engine": "requests in, tokens out: scheduling, block tables, sampling, compiled steps",
    "embedder": "texts in, embeddings out: pooling, batches of few sizes",
    "text": "tokenizers, growing text, chat templates",
    "models": "Hugging Face folders to one decoder that is built from data",
    "nn": "Flax layers: projections, rotary positions, norms, attention",
    "parallel": "one layer on several devices",
    "attention": "PagedAttention; all arguments are checked here",
    "mla": "the same for multi-head latent attention",
    "backends": "what each backend can do, plans and computes; the choice between them",
    "compat": "vLLM's names: batch utilities, further methods of backends",
    "ops": "attention in jnp, and the state that attention returns",
    "cache": "the paged pool: its layout, writes, copies of blocks",
    "metadata": "the batch: lengths, block tables, slots",
    "mla_spec": "the options of a latent attention layer",
    "spec": "the options of an attention layer",
    "strict_json": "JSON from untrusted sources",
    "types": "axis names, enums, pytrees",
    "errors": "error classes, argument checks",
    "device": "the chip",
    "compile_cache": "compiled programs on disk",
    "cpu": "C++ kernels; a readable Pallas one",
    "gpu": "Mosaic GPU kernels",
    "tpu": "Mosaic TPU kernels",
    "tuning": "measured tile sizes, by chip",
    "folders": "private folders for compiled code",
    "switches": "settings of the environment that are 0 or 1",
    "algebra": "masks, softmax, quantisation, paging: written once for all of the above",
}
STYLE = """
  <style>
    text { font-family: system-ui, -apple-system, 'Segoe UI', sans-serif; font-size: 13px; fill: #1f2933; }
    .name { font-weight: 600; } .small { font-size: 11.5px; fill: #52606d; } .head { font-weight: 600; fill: #52606d; }
    .room { fill: #f5f7fa; stroke: #9aa5b1; } .kernel { fill: #e6f2ec; stroke: #7fae95; } .host { fill: #eef2fb; stroke: #8ea2cf; }
    .lane { fill: none; stroke: #cbd2d9; stroke-dasharray: 4 4; } .way { stroke: #52606d; fill: none; marker-end: url(#tip); }
    .paper { fill: #ffffff; }
  </style>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
    <path d="M0 0L8 4L0 8z" fill="#52606d"/></marker></defs>
"""  # noqa: E501
STEPS = [  # (lane, room, what happens there)
    (0, "serve.connection", "bytes to an HTTP request; limits and time-outs"),
    (0, "serve.body, fields", "strict JSON; every field has bounds"),
    (1, "serve.engine_loop", "the engine's thread takes the request"),
    (1, "engine.add_request", "admission checks; sequences join the queue"),
    (1, "engine.scheduler", "which tokens next; allocates their blocks"),
    (1, "engine.batch", "int32 arrays, padded to a compiled shape"),
    (2, "engine.dispatch", "layers, sampling, and a loop of steps"),
    (2, "models.decoder", "norms, projections, rotary positions"),
    (2, "attention, a backend", "keys and values into pages, then attention"),
    (2, "engine.sampling", "logits to the next token of every row"),
    (1, "engine.live_requests", "tokens to sequences; stop conditions; text"),
    (0, "serve.responses", "each request's newest output, as events"),
]
LANES = ("HTTP server", "engine, on the host", "device, one program")


def document(width: int, height: int, body: list[str]) -> str:
    """An SVG with the shared style."""
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="6"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head + STYLE, "  " + paper, *("  " + line for line in body), "</svg>", ""])


def box(x: float, y: float, width: float, name: str, sentence: str, kind: str, beside: int = 0) -> list[str]:
    """A rectangle with a name, and a sentence under it or (`beside` pixels from its left edge) on the same line."""
    height, at = (28, (beside, 18)) if beside else (44, (10, 34))
    return [
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="4"/>',
        f'<text class="name" x="{x + 10:g}" y="{y + 18:g}">{html.escape(name)}</text>',
        f'<text class="small" x="{x + at[0]:g}" y="{y + at[1]:g}">{html.escape(sentence)}</text>',
    ]


def floors(container: str) -> list[list[str]]:
    """The rooms of a package by floor, highest first, as the import contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers" and c["containers"] == [container])
    return [[name for name in re.findall(r"\w+", layer) if name != "__main__"] for layer in layers]


def rooms() -> str:
    """A floor is a line; a room imports only rooms below it."""
    width, left, y, body = 960, 20, 34, []
    for title, container, kind in (("jattn", "jattn", "room"), ("pallas_kernels", "pallas_kernels", "kernel")):
        body.append(f'<text class="head" x="{left}" y="{y - 10}">{title}</text>')
        for floor in filter(None, floors(container)):
            each = (width - 2 * left - 10 * (len(floor) - 1)) / len(floor)
            for i, name in enumerate(floor):
                body += box(left + i * (each + 10), y, each, name, SENTENCES[name], kind, 100 if len(floor) < 3 else 72)
            y += 33
        y += 28
    return document(width, y - 22, body)


def request() -> str:
    """Time runs down; a box stands in the lane of the thread or device that does the work."""
    lane, left, top, step = 310, 20, 60, 56
    body = []
    for i, name in enumerate(LANES):
        x = left + i * lane
        body.append(f'<text class="head" x="{x + 10}" y="34">{name}</text>')
        body.append(f'<rect class="lane" x="{x}" y="44" width="{lane - 10}" height="{len(STEPS) * step + 16}" rx="6"/>')
    for n, (where, name, sentence) in enumerate(STEPS):
        x, y = left + where * lane + 8, top + n * step
        body += box(x, y, lane - 26, f"{n + 1}  {name}", sentence, ("room", "host", "kernel")[where])
        if n + 1 < len(STEPS):
            after = left + STEPS[n + 1][0] * lane + 8
            middle = (lane - 26) / 2
            if after == x:
                body.append(f'<path class="way" d="M{x + middle:g} {y + 44}V{y + step - 1}"/>')
            else:
                start, end = (x + middle, after + middle)
                body.append(f'<path class="way" d="M{start:g} {y + 44}V{y + 50}H{end:g}V{y + step - 1}"/>')
    return document(left + 3 * lane + 10, top + len(STEPS) * step + 20, body)
