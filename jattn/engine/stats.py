"""The engine's counters and queue lengths, as a value."""

import dataclasses

_HELP = dict(
    requests="requests accepted",
    finished="completions that ended by themselves",
    failed="completions that ended with an error",
    aborted="completions that were aborted",
    prompt_tokens="prompt tokens of the sequences admitted, cached ones included",
    cached_tokens="prompt tokens that the prefix cache saved",
    output_tokens="tokens generated",
    dispatches="programs sent to the device",
    steps="model steps, several a dispatch",
    preemptions="sequences that gave their blocks back and were computed anew",
    evictions="cached blocks given up for others",
    device_seconds="time spent waiting for the device",
    host_seconds="time spent between dispatches, planning and reading text",
    running="sequences that hold blocks",
    waiting="sequences that wait for a place",
    cache_usage="share of the block pool in use, of the fullest group of layers",
    group_usage="share of the block pool in use, by group of layers",
)
_GAUGES = ("running", "waiting", "cache_usage", "group_usage")


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since the engine was made, and the queues of this moment."""

    requests: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    dispatches: int = 0
    steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    group_usage: tuple[tuple[str, float], ...] = ()

    def plus(self, **more: float) -> "Stats":
        """A copy with these amounts added."""
        return dataclasses.replace(self, **{name: getattr(self, name) + count for name, count in more.items()})

    def prometheus(self, prefix: str = "jattn") -> str:
        """The Prometheus text format."""
        lines = []
        for field in dataclasses.fields(self):
            gauge = field.name in _GAUGES
            name = f"{prefix}_{field.name}" + ("" if gauge else "_total")
            lines += [f"# HELP {name} {_HELP[field.name]}", f"# TYPE {name} {'gauge' if gauge else 'counter'}"]
            value = getattr(self, field.name)
            by_group = value if isinstance(value, tuple) else ()
            lines += [f'{name}{{group="{group}"}} {share}' for group, share in by_group] or [f"{name} {value}"]
        return "\n".join(lines) + "\n"
