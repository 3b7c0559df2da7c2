"""Reads a profile of jax.profiler: how long the device was busy, and with which dispatches and kernels.

A kernel belongs to a dispatch by its program (XLA gives each compiled program a number) and its launch: the shape that
a program was most often launched for is the shape of all its kernels.
"""

import bisect
import dataclasses
import pathlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import jax

SEND = "jattn.step"
"""The name of the host event in which the engine sends a dispatch."""
_COPY = ("memcpy", "memset")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel on the device, in nanoseconds."""

    name: str
    start: float
    end: float
    launch: int | None = None  # its launch's correlation id
    program: str | None = None  # module and number of the program that launched it; None: the profile does not say


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The kernels of a profile; of the host, the launches (time by correlation id) and the sends (time, shape)."""

    all_kernels: tuple[Kernel, ...]
    launches: dict[int, float]
    sends: tuple[tuple[float, str], ...]

    @property
    def kernels(self) -> int:
        return len(self.all_kernels)

    @property
    def occupied(self) -> float:
        """Seconds between the first and the last kernel of a dispatch, of all dispatches."""
        spans: dict[int, tuple[float, float]] = {}
        for kernel in self.all_kernels:
            if (send := self._send_of(kernel)) >= 0:
                start, end = spans.get(send, (kernel.start, kernel.end))
                spans[send] = min(start, kernel.start), max(end, kernel.end)
        return union(spans.values()) * 1e-9

    def top(self, count: int) -> dict[str, float]:
        """The kernels that took most, with their seconds."""
        seconds: dict[str, float] = defaultdict(float)
        for kernel in self.all_kernels:
            seconds[kernel.name[:60]] += (kernel.end - kernel.start) * 1e-9
        return dict(sorted(seconds.items(), key=lambda item: -item[1])[:count])

    @property
    def shapes(self) -> dict[str, dict[str, float]]:
        """Of the dispatches of each shape: seconds in which a kernel ran, and from each one's first kernel to its last.

        'other' are the kernels that no dispatch launched.
        """
        votes, busy, own = defaultdict(Counter), defaultdict(list), defaultdict(list)
        for kernel in self.all_kernels:
            votes[kernel.program][self._shape(self._send_of(kernel))] += 1
        for kernel in self.all_kernels:
            send = self._send_of(kernel)
            if kernel.program is None:
                shape = self._shape(send)
            else:
                shape = votes[kernel.program].most_common(1)[0][0] if "dispatch" in kernel.program else "other"
            busy[shape].append((kernel.start, kernel.end))
            own[shape, send].append(kernel)
        found = {shape: dict(busy_seconds=union(each) * 1e-9, span_seconds=0.0) for shape, each in sorted(busy.items())}
        for (shape, _), kernels in own.items():
            span = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
            found[shape]["span_seconds"] += span * 1e-9
        return found

    def _send_of(self, kernel: Kernel) -> int:
        """The number of the last dispatch sent before the kernel's launch, or before its start if that is unknown."""
        launch = kernel.start if kernel.launch is None else self.launches.get(kernel.launch, kernel.start)
        return bisect.bisect_right(self.sends, launch, key=lambda send: send[0]) - 1

    def _shape(self, send: int) -> str:
        return self.sends[send][1] if send >= 0 else "other"


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def read(folder: str, shapes: Sequence[str]) -> Timeline:
    """The profile in the folder that jax.profiler wrote. shapes: of the dispatches, in the order of their sends."""
    (path,) = pathlib.Path(folder).rglob("*.xplane.pb")
    kernels, launches, sends = [], {}, []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    kernels += [kernel for event in line.events if (kernel := _kernel(event))]
        elif plane.name.startswith("/host"):
            for line in plane.lines:
                for event in line.events:
                    if event.name == SEND:
                        sends.append(event.start_ns)
                    elif event.name.startswith("cu"):  # CUDA's own calls
                        for name, value in event.stats:
                            if name == "correlation_id":
                                launches[int(value)] = event.start_ns
    if not kernels:
        raise RuntimeError(f"the profile shows no kernel; it has {_planes(path)}")
    if len(sends) != len(shapes):
        raise RuntimeError(f"the profile shows {len(sends)} dispatches, but {len(shapes)} were sent")
    return Timeline(tuple(kernels), launches, tuple(zip(sorted(sends), shapes, strict=True)))


def _kernel(event) -> Kernel | None:
    """A device event as a Kernel; None for a copy."""
    if event.name.lower().startswith(_COPY):
        return None
    stats = {name: value for name, value in event.stats if name in ("correlation_id", "hlo_module", "program_id")}
    launch = stats.get("correlation_id")
    known = "hlo_module" in stats and "program_id" in stats
    program = f"{stats['hlo_module']} {stats['program_id']}" if known else None
    return Kernel(event.name, event.start_ns, event.end_ns, None if launch is None else int(launch), program)


def _planes(path: pathlib.Path) -> str:
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    return "; ".join(f"{plane.name}: {', '.join(line.name for line in plane.lines)}" for plane in planes)[:1000]
