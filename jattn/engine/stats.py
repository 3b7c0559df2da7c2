"""Stats: the engine's counters and queue lengths, as an immutable value."""

import dataclasses

_HELP = dict(
    requests="requests accepted",
    finished="completions that ended with a stop or at their length",
    failed="completions that ended with an error",
    aborted="completions that were aborted",
    prompt_tokens="prompt tokens of the sequences admitted, cached ones included",
    cached_tokens="prompt tokens found in the prefix cache",
    output_tokens="tokens generated",
    dispatches="programs sent to the device",
    shared_prefix_dispatches="decode dispatches that read the keys of a prefix once for all rows",
    steps="model steps; a dispatch has several",
    preemptions="sequences that lost their blocks and were computed again",
    evictions="cached blocks whose contents were replaced",
    device_seconds="seconds from the start of a dispatch, or the end of the one before it, until it had finished",
    waiting_seconds="seconds of the engine's thread spent waiting for results",
    host_seconds="seconds of the engine's thread spent working: planning, sending, accepting tokens, decoding text",
    running="sequences that hold blocks",
    waiting="sequences that wait for blocks or for a place in the batch",
    cache_usage="share of the block pool in use, of the fullest group of layers",
    group_usage="share of the block pool in use, by group of layers",
)
_GAUGES = ("running", "waiting", "cache_usage", "group_usage")


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters since the engine was made, and the current lengths of its queues."""

    requests: int = 0  # requests accepted
    finished: int = 0  # completions that ended with a stop or at their length
    failed: int = 0  # completions that ended with an error
    aborted: int = 0  # completions that were aborted
    prompt_tokens: int = 0  # prompt tokens of admitted sequences, cached ones included
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    output_tokens: int = 0  # tokens generated
    dispatches: int = 0  # programs sent to the device
    shared_prefix_dispatches: int = 0  # decode dispatches that read the keys of a prefix once for all rows
    steps: int = 0  # model steps; a dispatch has several
    preemptions: int = 0  # sequences that lost their blocks and were computed again
    evictions: int = 0  # cached blocks whose contents were replaced
    device_seconds: float = 0.0  # that the device had a dispatch to compute
    waiting_seconds: float = 0.0  # of steps, spent waiting for results
    host_seconds: float = 0.0  # of steps, spent working
    running: int = 0  # sequences that hold blocks
    waiting: int = 0  # sequences that wait for blocks or a place in the batch
    cache_usage: float = 0.0  # share of blocks in use, 0 .. 1, of the fullest cache group
    group_usage: tuple[tuple[str, float], ...] = ()  # (name, share of blocks in use) of each cache group

    def plus(self, **more: float) -> "Stats":
        """A copy with these amounts added."""
        return dataclasses.replace(self, **{name: getattr(self, name) + count for name, count in more.items()})

    def prometheus(self, prefix: str = "jattn") -> str:
        """The stats in the text format of Prometheus."""
        lines = []
        for field in dataclasses.fields(self):
            gauge = field.name in _GAUGES
            name = f"{prefix}_{field.name}" + ("" if gauge else "_total")
            lines += [f"# HELP {name} {_HELP[field.name]}", f"# TYPE {name} {'gauge' if gauge else 'counter'}"]
            value = getattr(self, field.name)
            by_group = value if isinstance(value, tuple) else ()
            lines += [f'{name}{{group="{group}"}} {share}' for group, share in by_group] or (
                [] if isinstance(value, tuple) else [f"{name} {value}"]
            )
        return "\n".join(lines) + "\n"
