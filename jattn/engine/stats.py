"""Stats: the engine's counters and queue lengths, as an immutable value."""

import dataclasses
import functools
from typing import Any


def _stat(kind: str, default: Any, text: str) -> Any:
    """A field with its description, and its type in Prometheus."""
    return dataclasses.field(default=default, metadata={"help": text, "kind": kind})


_counter, _gauge = functools.partial(_stat, "counter"), functools.partial(_stat, "gauge")


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since the engine was made, and the current lengths of its queues."""

    requests: int = _counter(0, "requests accepted")
    finished: int = _counter(0, "completions that ended with a stop or at their length")
    failed: int = _counter(0, "completions that ended with an error")
    aborted: int = _counter(0, "completions that were aborted")
    prompt_tokens: int = _counter(0, "prompt tokens of the sequences admitted, cached ones included")
    cached_tokens: int = _counter(0, "prompt tokens found in the prefix cache")
    output_tokens: int = _counter(0, "tokens generated")
    dispatches: int = _counter(0, "programs sent to the device")
    shared_prefix_dispatches: int = _counter(0, "decode dispatches that read the keys of a prefix once for all rows")
    steps: int = _counter(0, "model steps; a dispatch has several")
    preemptions: int = _counter(0, "sequences that lost their blocks and were computed again")
    evictions: int = _counter(0, "cached blocks whose contents were replaced")
    device_seconds: float = _counter(
        0.0, "seconds from the start of a dispatch, or the end of the one before it, until it had finished"
    )
    waiting_seconds: float = _counter(0.0, "seconds of the engine's thread spent waiting for results")
    host_seconds: float = _counter(
        0.0, "seconds of the engine's thread spent working: planning, sending, accepting tokens, decoding text"
    )
    running: int = _gauge(0, "sequences that hold blocks")
    waiting: int = _gauge(0, "sequences that wait for blocks or for a place in the batch")
    cache_usage: float = _gauge(0.0, "share of the block pool in use, of the fullest group of layers")
    group_usage: tuple[tuple[str, float], ...] = _gauge((), "share of the block pool in use, by group of layers")

    def plus(self, **more: float) -> "Stats":
        """A copy with these amounts added."""
        return dataclasses.replace(self, **{name: getattr(self, name) + count for name, count in more.items()})

    def prometheus(self, prefix: str = "jattn") -> str:
        """The stats in the text format of Prometheus."""
        lines = []
        for field in dataclasses.fields(self):
            kind = field.metadata["kind"]
            name = f"{prefix}_{field.name}" + ("_total" if kind == "counter" else "")
            lines += [f"# HELP {name} {field.metadata['help']}", f"# TYPE {name} {kind}"]
            value = getattr(self, field.name)
            by_group = value if isinstance(value, tuple) else ()
            lines += [f'{name}{{group="{group}"}} {share}' for group, share in by_group] or (
                [] if isinstance(value, tuple) else [f"{name} {value}"]
            )
        return "\n".join(lines) + "\n"
