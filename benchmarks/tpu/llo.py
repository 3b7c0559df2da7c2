"""Reads libtpu's LLO dump of one kernel: its loops, the code that a branch skips, and the bundles of a path.

A bundle is one VLIW instruction. A core issues at most one each cycle, so bundles are a lower bound of cycles, without
waits for DMA and pipeline stalls.
"""

import dataclasses
import functools
import pathlib
import re
import statistics

FLAGS = "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_.*"
"""LIBTPU_INIT_ARGS that write the dump to a folder; read once, when libtpu is loaded."""

MOST_SLOTS = 8
"""Bundles behind a branch that are executed before it is taken, at most: there are 4 on v6e and 6 on tpu7x."""

_LINE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s*(LH|LB|LE|PB|PF|CT)?\s*:\s*(>*)\s*\{(.*)$")
_BRANCH = re.compile(r"sbr\.rel \((!?%p\w+)\) target = \$region(\d+)")
_REGION = re.compile(r"(?:Start/End empty|Start) region (\d+)\b")


@dataclasses.dataclass(frozen=True)
class Span:
    """Bundles first .. last - 1."""

    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first

    def holds(self, other: "Span") -> bool:
        """Strictly inside."""
        return self != other and self.first <= other.first and other.last <= self.last


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The bundles of one kernel, in order."""

    marks: list[str]
    depths: list[int]
    texts: list[str]

    @functools.cached_property
    def loops(self) -> list[Span]:
        """Every loop, outer ones first."""
        found = []
        for i, (mark, depth) in enumerate(zip(self.marks, self.depths, strict=True)):
            if mark == "LB":
                found.append(Span(i, self._back_branch(i) or self._while_as_deep(i, depth)))
        return found

    def _back_branch(self, first: int) -> int | None:
        """The end of a loop by its branch back, which is printed less deep, and the delay slots behind it."""
        labels = set(_REGION.findall(self.texts[first]))
        back = [i for i, name in self._branches if i > first and name in labels]
        return min(back[-1] + 1 + self._delay_slots, len(self.texts)) if back else None

    @functools.cached_property
    def _delay_slots(self) -> int:
        """Between most branches and the mark PF of what follows if they are not taken; not all have the mark."""
        marked = [i for i, mark in enumerate(self.marks) if mark == "PF"]
        seen = [m - i - 1 for i, _ in self._branches for m in marked if 0 < m - i <= MOST_SLOTS + 1]
        return statistics.mode(seen) if seen else 4

    def _while_as_deep(self, first: int, depth: int) -> int:
        stop = first + 1
        while stop < len(self.depths) and self.depths[stop] >= depth:
            if self.marks[stop] == "LB" and self.depths[stop] == depth:
                break
            stop += 1
        return stop

    @functools.cached_property
    def _branches(self) -> list[tuple[int, str]]:
        """(bundle, name of the region that it jumps to) of each branch, in order."""
        return [(i, name) for i, text in enumerate(self.texts) for _, name in _BRANCH.findall(text)]

    @functools.cached_property
    def skipped(self) -> list[Span]:
        """What each conditional forward branch jumps over: bodies of ifs, and loops that may not run at all."""
        labels: dict[str, int] = {}
        for i, text in enumerate(self.texts):
            for name in _REGION.findall(text):
                labels.setdefault(name, i)
        found = []
        for i, name in self._branches:
            if labels.get(name, -1) > i + 1:
                found.append(Span(i + 1, labels[name]))
        return found

    def inside(self, span: Span, spans: list[Span]) -> list[Span]:
        """The outermost of the `spans` that lie in `span`."""
        held = [s for s in spans if span.holds(s)]
        return [s for s in held if not any(o.holds(s) for o in held)]

    def count(self, span: Span, word: str) -> int:
        """Occurrences of `word` in the bundles of a span."""
        return sum(text.count(word) for text in self.texts[span.first : span.last])

    def path(self, span: Span, trips, without: tuple[Span, ...] = ()) -> int:
        """Bundles of one pass through a span, except the spans in `without`; a nested loop counts trips(loop) times."""
        return self._along(span, trips, without, lambda s: s.size)

    def count_along(self, span: Span, word: str, trips, without: tuple[Span, ...] = ()) -> int:
        """Occurrences of `word` in such a pass, each as often as it is executed."""
        return self._along(span, trips, without, lambda s: self.count(s, word))

    def _along(self, span: Span, trips, without: tuple[Span, ...], measure) -> int:
        gone = [w for w in without if span.holds(w)]
        nested = [s for s in self.inside(span, self.loops) if not any(w == s or w.holds(s) for w in gone)]
        own = measure(span) - sum(measure(x) for x in (*gone, *nested))
        return own + sum(trips(s) * self._along(s, trips, without, measure) for s in nested)


def read(folder: str | pathlib.Path, name: str) -> Program:
    """The program whose name contains `name`; the largest if there are several."""
    files = [
        p
        for p in pathlib.Path(folder).glob("*-final_bundles.txt")
        if name in p.name and "schedule-analysis" not in p.name
    ]
    if not files:
        raise FileNotFoundError(f"no dump of {name!r} in {folder}")
    return parse(max(files, key=lambda p: p.stat().st_size).read_text(errors="replace"))


def parse(text: str) -> Program:
    """Parse the listing of one kernel; a line that is not a bundle belongs to the bundle before it."""
    marks, depths, texts = [], [], []
    for line in text.splitlines():
        if match := _LINE.match(line):
            _, mark, depth, body = match.groups()
            empty = body.strip().startswith("}") and not depth  # a delay slot is printed without its depth
            marks.append(mark or "")
            depths.append(depths[-1] if empty and depths else len(depth))
            texts.append(body)
        elif texts:
            texts[-1] += " " + line.strip()
    return Program(marks, depths, texts)
