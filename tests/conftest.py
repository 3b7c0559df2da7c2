"""The suite is strict by default: what a server would only log is an error here.

Set before JAX is imported: CPU, several devices. Then rank promotion raises, 64-bit stays off, warnings are
errors (pyproject.toml), hypothesis draws the same examples on every run. `JAX_PLATFORMS=cuda make test` runs
the suite on a chip.
"""

import collections
import contextlib
import dataclasses
import gc
import itertools
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

HOST_DEVICES = 4
QUICK = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "true"}
"""Four fifths of the suite's time is XLA compiling programs that run once. XLA_FLAGS from outside win:
XLA_FLAGS=--xla_backend_optimization_level=3 compiles them as users' programs are."""
if metadata.version("jaxlib").startswith("0.10."):  # its older emitters need a third of the time; newer XLA has none
    QUICK |= {"xla_cpu_use_fusion_emitters": "false", "xla_cpu_parallel_codegen_split_count": "1"}

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JATTN_COMPILE_CACHE"] = "0"  # programs of tests are not for the user's own cache
_given = os.environ.get("XLA_FLAGS", "")
_wanted = {"xla_force_host_platform_device_count": str(HOST_DEVICES)}
if os.environ["JAX_PLATFORMS"] == "cpu":  # devices have 40 s to meet, or the process is ended: too few if it is busy
    _wanted |= {"xla_cpu_collective_call_terminate_timeout_seconds": "600"}
if os.environ["JAX_PLATFORMS"] == "cpu" and "optimization_level" not in _given:
    _wanted |= QUICK
_added = [f"--{name}={value}" for name, value in _wanted.items() if name not in _given]
os.environ["XLA_FLAGS"] = " ".join([*_given.split(), *_added])

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

from tests import quick, sampled  # noqa: E402

# Importing and collecting make a million objects that live as long as the process. Python's collector would walk them
# again and again: a quarter of the time of collecting, and a twentieth of that of the tests.
YOUNG_OBJECTS = 5_000
gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    gc.enable()


jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", False)

hypothesis.settings.register_profile(
    "jattn",
    derandomize=True,  # the same examples on every run and machine
    deadline=None,  # the first example of a shape compiles
    database=None,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("jattn")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class CompileCount:
    """How often XLA compiled, by the name of the jitted function ('jit(f)' counts as 'f')."""

    names: list[str] = dataclasses.field(default_factory=list)

    def of(self, name: str) -> int:
        """Compilations of the jitted function called `name`."""
        return self.names.count(name)

    @property
    def total(self) -> int:
        """All compilations, eager jnp operations included."""
        return len(self.names)


@contextlib.contextmanager
def count_compiles() -> Iterator[CompileCount]:
    """Count what XLA compiles: `with count_compiles() as seen: ...`, then `assert seen.of("step") <= 3`."""
    seen = CompileCount()

    def listen(event: str, duration: float, **tags) -> None:
        if event == _COMPILE_EVENT:
            seen.names.append(str(tags.get("fun_name", "?")).removeprefix("jit(").removesuffix(")"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def compiles():
    """The trace counter, as a context manager: see `count_compiles`."""
    return count_compiles


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick.mark(items)
    sampled.mark(items, config.rootpath)
    if not any("::" in argument for argument in config.args) and not config.getoption("lf", False):  # files are whole
        quick.check(items)
        check_places(config.rootpath)


def check_places(root: Path) -> None:
    """pytest.UsageError where tests/quick.py or tests/sampled.py names a place that is not there."""
    if gone := [place for place in (*quick.SUBSET, *sampled.ONE_IN) if not (root / place).exists()]:
        raise pytest.UsageError(f"tests/quick.py and tests/sampled.py name what is not there: {', '.join(gone)}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --durations, the seconds of the slowest files, too."""
    if not config.option.durations:
        return
    seconds = collections.defaultdict[str, float](float)
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0]] += report.duration
    terminalreporter.section(f"slowest {config.option.durations} files")
    for path in sorted(seconds, key=seconds.__getitem__, reverse=True)[: config.option.durations]:
        terminalreporter.line(f"{seconds[path]:7.1f}s {path}")


# Every compiled program holds a few memory maps until it is dropped, and Linux kills a process that asks for more
# than vm.max_map_count (65530) of them: the suite compiles enough in one process to get there. Between two modules
# nothing that is warmed up is in use. Within one, an engine may be, and a test that counts compilations would fail.
MAX_MAPS_BETWEEN_MODULES, MAX_MAPS = 20_000, 50_000
TESTS_BETWEEN_LOOKS = 20
_MAPS = Path("/proc/self/maps")
_tests = itertools.count(1)


@pytest.hookimpl(trylast=True)  # after the fixtures of a finished module are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    is_last = nextitem is None or nextitem.path != item.path
    if (is_last or next(_tests) % TESTS_BETWEEN_LOOKS == 0) and _MAPS.exists():
        with _MAPS.open("rb") as maps:
            used = sum(1 for _ in maps)
        if used > (MAX_MAPS_BETWEEN_MODULES if is_last else MAX_MAPS):
            jax.clear_caches()
