"""The picture of the README, docs/pictures/step.svg: one serving step, from the batch to the attention state."""

import dataclasses

WIDTH, HEIGHT = 880, 322
SIDE = 22  # of a token's square
BLOCK = 4  # tokens of a block
INK, GREY, LINE = "#1f2933", "#52606d", "#9aa5b1"


@dataclasses.dataclass(frozen=True)
class Request:
    """A request of the drawn batch."""

    name: str
    doing: str
    seq_len: int
    new: int  # how many of them are new in this step
    blocks: tuple[int, ...]
    old_colour: str
    new_colour: str


REQUESTS = (
    Request("A", "decodes", 6, 1, (3, 6), "#cfe2f7", "#3f83c8"),
    Request("B", "prefills", 3, 3, (1,), "#fbdcb8", "#dd8022"),
    Request("C", "continues a prompt", 7, 2, (4, 2), "#cdebd3", "#3c9a57"),
)


class Drawing:
    """Lines of SVG."""

    def __init__(self):
        self.lines: list[str] = []

    def box(self, x, y, width, height, fill, stroke=LINE, radius=2) -> None:
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(self, x, y, words, size=13, colour=INK, anchor="start", weight="normal", family="sans-serif") -> None:
        self.lines.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
            f'font-weight="{weight}" font-family="{family}">{words}</text>'
        )

    def code(self, x, y, words, size=12, colour=INK, anchor="start") -> None:
        self.text(x, y, words.replace(" ", "&#160;"), size, colour, anchor, family="monospace")

    def token(self, x, y, request: Request, position: int) -> None:
        """A token's square with its position; new tokens are strong, cached ones pale."""
        is_new = position >= request.seq_len - request.new
        self.box(x, y, SIDE, SIDE, request.new_colour if is_new else request.old_colour)
        self.text(x + SIDE / 2, y + 15, position, 11, "#fff" if is_new else GREY, "middle")

    def arrow(self, x, y, length) -> None:
        self.lines.append(
            f'<path d="M{x} {y} h{length - 7}" stroke="{GREY}" stroke-width="2" fill="none"/>'
            f'<path d="M{x + length} {y} l-9 -5 v10 z" fill="{GREY}"/>'
        )

    def heading(self, x, number, words) -> None:
        self.text(x, 36, f"{number}  {words}", 15, weight="bold")


def step() -> str:
    """The picture as SVG, on a light card of its own so that it can be read on a dark page too."""
    drawing = Drawing()
    _batch(drawing, 24)
    drawing.arrow(222, 150, 34)
    _pool(drawing, 272)
    drawing.arrow(510, 150, 34)
    _launch(drawing, 552)
    drawing.arrow(700, 150, 34)
    _state(drawing, 746)
    body = "\n".join(drawing.lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="A ragged batch, its pages in one pool, one launch, and the attention state">\n'
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10" fill="#fbfcfd" stroke="#d3dae0"/>\n'
        f"{body}\n</svg>\n"
    )


def _batch(drawing: Drawing, x: int) -> None:
    drawing.heading(x, 1, "Ragged batch")
    y = 62
    for request in REQUESTS:
        drawing.text(x, y, f"{request.name} {request.doing}", 12, GREY)
        for position in range(request.seq_len):
            drawing.token(x + position * (SIDE + 2), y + 6, request, position)
        y += 58
    drawing.text(x, y + 4, "new tokens, packed", 12, GREY)
    for i, (request, position) in enumerate(_packed()):
        drawing.token(x + i * (SIDE + 2), y + 10, request, position)
    starts = [sum(request.new for request in REQUESTS[:i]) for i in range(len(REQUESTS) + 1)]
    drawing.code(x, y + 50, f"query_start_loc  {' '.join(map(str, starts))}", 11)
    drawing.code(x, y + 66, f"seq_lens         {' '.join(str(request.seq_len) for request in REQUESTS)}", 11)


def _packed() -> list[tuple[Request, int]]:
    return [(request, request.seq_len - request.new + i) for request in REQUESTS for i in range(request.new)]


def _pool(drawing: Drawing, x: int) -> None:
    drawing.heading(x, 2, "Pages of one pool")
    drawing.text(x, 62, "8 blocks of 4 tokens; pale: cached earlier", 12, GREY)
    held = {block: (request, column) for request in REQUESTS for column, block in enumerate(request.blocks)}
    for block in range(8):
        left, top = x + block % 2 * 116 + 18, 72 + block // 2 * 38
        drawing.text(left - 6, top + 16, block, 11, GREY, "end")
        request, column = held.get(block, (None, 0))
        for offset in range(BLOCK):
            position = column * BLOCK + offset
            if request is not None and position < request.seq_len:
                drawing.token(left + offset * SIDE, top, request, position)
            else:
                drawing.box(left + offset * SIDE, top, SIDE, SIDE, "#eef1f4", "#cbd2d9")
    drawing.code(x, 246, "block_table", 11)
    for row, request in enumerate(REQUESTS):
        y = 234 + row * 26
        drawing.text(x + 104, y + 15, request.name, 12, GREY, "end")
        for column in range(2):
            left = x + 112 + column * 34
            known = column < len(request.blocks)
            drawing.box(left, y, 32, SIDE, request.old_colour if known else "#eef1f4")
            drawing.text(left + 16, y + 15, request.blocks[column] if known else "", 12, INK, "middle")


def _launch(drawing: Drawing, x: int) -> None:
    drawing.heading(x, 3, "One launch")
    drawing.box(x, 72, 140, 156, "#243b53", "#243b53", 8)
    for row, words in enumerate(("attn(q, k, v,", "     cache, plan)")):
        drawing.code(x + 10, 98 + row * 17, words, 12, "#fff")
    told = ("writes the new k, v", "into their slots,", "then attends through", "the block table")
    for row, words in enumerate(told):
        drawing.text(x + 10, 146 + row * 18, words, 12, "#d9e2ec")
    drawing.text(x, 250, "prefill, decode, window,", 12, GREY)
    drawing.text(x, 266, "chunks, soft cap, ALiBi,", 12, GREY)
    drawing.text(x, 282, "sinks, your own mask", 12, GREY)


def _state(drawing: Drawing, x: int) -> None:
    drawing.heading(x, 4, "State")
    for left, name in ((x + 6, "out"), (x + 56, "lse")):
        drawing.code(left + SIDE / 2, 64, name, 12, INK, "middle")
        for i, (request, _) in enumerate(_packed()):
            drawing.box(left, 72 + i * (SIDE + 2), SIDE, SIDE, request.new_colour)
    drawing.code(x, 236, "out [T H V]", 11)
    drawing.code(x, 252, "lse [T H]", 11)
    drawing.text(x, 272, "the next layer, or", 12, GREY)
    drawing.text(x, 288, "a merge of states", 12, GREY)
