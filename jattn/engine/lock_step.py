"""LockStepEngine: one engine on the devices of several processes.

Every process has the whole engine: scheduler, block tables, tokenizer, and its part of weights and caches. Process 0
leads: it publishes each change as a command before it makes it, and the others follow. What an engine does next
depends on nothing else: not on clocks, not on which results have arrived, not on an order of sets. So all of them send
the same programs in the same order, and the devices can communicate.
"""

import dataclasses
import inspect
import secrets
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh

from jattn.engine import admission, callers, construction, interrupts, pretrained, program_key
from jattn.engine.data_ranks import Tables
from jattn.engine.engine import Engine, Prompt
from jattn.engine.flights import Flights
from jattn.engine.live_requests import LiveRequests
from jattn.engine.outputs import RequestOutput
from jattn.engine.params import SamplingParams
from jattn.engine.processes import STOP, Processes
from jattn.engine.runner import DispatchResult, InFlight
from jattn.engine.scheduler import StepPlan
from jattn.engine.shapes import StepShape
from jattn.engine.shared_prefix import SharedPrefixRule
from jattn.engine.step_loop import StepLoop
from jattn.errors import EngineDeadError, UnsupportedError
from jattn.text.tokenizer import tokenizer_fingerprint

FOLDER_PARTS = dict(
    model="config.json or generation_config.json", weights="the weights", tokenizer="the files of the tokenizer"
)
"""What processes compare by checksum -> its name in an error."""

JAX_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable",
    "jax_high_dynamic_range_gumbel",
)  # fmt: skip
"""Settings of JAX that decide dtypes and tokens, so that processes with others exchange arrays of other sizes."""

OBJECTS = ("tokenizer", "chat_template", "forward")
"""Options of which processes compare the type: the text of such an object has its address."""

DEFAULTS = {
    name: each.default
    for function in (Engine.from_pretrained, Engine)
    for name, each in inspect.signature(function).parameters.items()
    if each.default is not each.empty and name not in ("progress", "mesh", "seed")
}
"""Option of an Engine -> its default, with which a process compares what another one gives."""

PLANS_CHECKED_EVERY = 16
"""Every 16th dispatch adds its plan and block tables to the checksum; every dispatch adds its tokens."""


class LockStepEngine(Engine):
    """An Engine whose mesh has devices of several processes. Each process makes one, with the same arguments.

    In process 0 it has the methods of an Engine; a request is added or aborted with the next step. The other processes
    call `follow`. An exception in a step is not contained: the engine ends, and with it all processes.
    """

    spans_processes = True

    def __init__(
        self, config: Any, params: Any, *args: Any, processes: Processes, mesh: Mesh | None = None,
        seed: int | None = None, fingerprint: int | None = None, **options: Any,
    ):  # fmt: skip
        """fingerprint: of the weights, equal where they are; from_pretrained makes one of the folder."""
        if mesh is None:
            raise ValueError(
                f"{processes.count} processes need a mesh: give tensor_parallel, decode_context_parallel and "
                f"data_parallel whose product is {jax.device_count()}"
            )
        self.processes, seed = processes, construction.OPTIONS["seed"]("seed", seed)
        start = dict(
            model=_checksum(config), mesh=dict(mesh.shape),
            devices=[device.id for device in mesh.devices.flat], weights=fingerprint,
            seed=secrets.randbits(63) if seed is None else seed, **_own_code(), **_as_text(options),
        )  # fmt: skip
        agreed = _agree(processes, "start", start, free=("seed",) if seed is None else ())
        super().__init__(config, params, *args, mesh=mesh, seed=agreed["seed"], **options)
        self._pending: list[list] = []  # commands that are not published yet
        self._pending_ids: set[str] = set()  # of the requests that they add

    def _loop_of(self, make_tables: Callable[..., Tables], rule: SharedPrefixRule | None) -> StepLoop:
        self._flights = _DigestedFlights(self.runner, self.config.eos_token_ids, rule)
        return _LockStepLoop(self.processes.id, self.runner, self.limits, make_tables, self._flights)

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, processes: Processes, **options: Any) -> "LockStepEngine":
        """As Engine.from_pretrained. Processes with other options, files or code end before they load a weight.

        Weights that are divided or quantised in another way would end in a collective operation that never ends.
        """
        from jattn.models import checkpoint, load_config

        config = load_config(directory)  # first, because its error says more of a folder that is not there
        fingerprint = checkpoint.fingerprint(directory)
        given = dict(mesh=None) | {name: value for name, value in options.items() if name not in ("progress", "seed")}
        tokenizer = tokenizer_fingerprint(directory)  # each process looks for stop strings
        files = dict(model=_checksum(config), weights=fingerprint, tokenizer=tokenizer)
        _agree(processes, "given", _own_code() | _as_text(given) | files)  # files last: there is an option tokenizer
        made = super().from_pretrained(directory, fingerprint=fingerprint, processes=processes, **options)
        assert isinstance(made, LockStepEngine)
        return made

    # ------------------------------------------------------------------ in process 0
    @callers.one_at_a_time
    def add_request(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None, salt: str = ""
    ) -> str:
        """As Engine.add_request; the request is queued in the next step."""
        self._must_lead("add_request()")
        params = SamplingParams() if params is None else params
        id = self._new_id() if request_id is None else request_id
        tokens, _, wrong = admission.check(prompt, params, self.tokenizer, self.config.vocab_size, self.limits, salt)
        if wrong or not isinstance(id, str) or not id or self._is_taken(id):
            # a wrong request gets its error here and is not published
            return super().add_request(prompt, params, request_id=id, salt=salt)
        self._pending.append(["add", id, tokens, dataclasses.asdict(params), salt])
        self._pending_ids.add(id)
        return id

    @callers.one_at_a_time
    def abort(self, request_id: str) -> bool:
        """As Engine.abort; the blocks are free after the next step."""
        self._must_lead("abort()")
        if not isinstance(request_id, str):
            return False
        is_aborted = ["abort", request_id] in self._pending
        known = not is_aborted and (request_id in self._loop.requests or self._is_pending(request_id))
        if known:
            self._pending.append(["abort", request_id])
        return known

    @callers.one_at_a_time
    def step(self) -> list[RequestOutput]:
        """As Engine.step, in all processes."""
        self._must_lead("step()")
        self._check_step()  # before the others take it
        return self._publish(["step", self._flights.digest])

    @callers.one_at_a_time
    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        """As Engine.warmup, in all processes."""
        self._must_lead("warmup()")
        self._check_warmup()  # before the others begin it
        with interrupts.held():
            self.processes.publish([["warmup"]])
            return self._warm(progress)

    def _warm(self, progress: Callable[[int, int, str], None] | None = None) -> int:
        try:
            return super().warmup(progress)
        except JaxRuntimeError as error:
            raise _failed("the warm-up", self.processes.id, error) from error

    @property
    def has_work(self) -> bool:
        """Is there a request to compute, or an output to return?"""
        return super().has_work or bool(self._pending)

    @interrupts.held()
    def _publish(self, command: list) -> list[RequestOutput]:
        """Publish what is pending and this command, and run them."""
        commands, self._pending, self._pending_ids = [*self._pending, command], [], set()
        self.processes.publish(commands)
        return [output for each in commands for output in self._run(*each)]

    def _is_taken(self, id: str) -> bool:
        return super()._is_taken(id) or self._is_pending(id)

    def _is_pending(self, id: str) -> bool:
        return id in self._pending_ids

    def _must_lead(self, method: str) -> None:
        if not self.processes.leads:
            raise RuntimeError(f"{method} in process {self.processes.id}: process 0 leads, the others follow()")

    # ------------------------------------------------------------------ in the other processes
    def follow(self) -> None:
        """Run what process 0 publishes, until it leaves."""
        if self.processes.leads:
            raise RuntimeError("follow() in process 0, which leads")
        while STOP not in (commands := self.processes.receive()):
            for command in commands:
                self._run(*command)

    # ------------------------------------------------------------------ in all processes
    def _run(self, name: str, *arguments: Any) -> list[RequestOutput]:
        """Run one command; returns the outputs of a step."""
        if name == "add":
            id, tokens, params, salt = arguments
            super().add_request(tokens, SamplingParams(**params), request_id=id, salt=salt)
        elif name == "abort":
            super().abort(*arguments)
        elif name == "warmup":
            self._warm()
        elif name == "step":
            self._compare(*arguments)
            return super().step()
        else:
            raise AssertionError(f"unknown command {name!r}")
        return []

    def _compare(self, digest: int) -> None:
        """Stop if this process has computed anything else than process 0."""
        if digest != self._flights.digest:
            raise EngineDeadError(
                f"process {self.processes.id} has planned or sampled other tokens than process 0: the same request "
                "would have two answers. Report this: it is a defect of jattn"
            )

    def update_weights(self, params: Any) -> None:
        raise UnsupportedError("update_weights() on several processes is not implemented: start them with new weights")

    def sleep(self) -> None:
        raise UnsupportedError("sleep() on several processes is not implemented: end them, and start them again")

    def wake(self) -> None:
        raise UnsupportedError("wake() on several processes is not implemented: sleep() is not either")


def _agree(processes: Processes, key: str, mine: dict[str, Any], free: tuple[str, ...] = ()) -> dict[str, Any]:
    """What process 0 has for `mine`; ValueError if this process has anything else, but for the names in `free`."""
    mine = dict(num_processes=processes.count) | mine
    agreed = processes.agree(key, mine)
    wrong = [name for name in agreed | mine if name not in free and agreed.get(name) != mine.get(name)]
    told = [f"here {name}={mine.get(name)} and there {agreed.get(name)}" for name in wrong if name not in FOLDER_PARTS]
    if files := [part for name, part in FOLDER_PARTS.items() if name in wrong]:
        told.append(f"{' and '.join(files)} are not those of process 0's folder")
    if told:
        raise ValueError(f"process {processes.id} and process 0 were started differently: {', '.join(told)}")
    return agreed


def _as_text(options: dict[str, Any]) -> dict[str, str]:
    """All options as processes compare them: values that mean the same have one text."""
    options = pretrained.check_options(DEFAULTS | options)
    is_object = lambda name, value: name in OBJECTS and value is not None
    return {name: type(value).__name__ if is_object(name, value) else repr(value) for name, value in options.items()}


def _checksum(config: Any) -> int:
    return zlib.crc32(repr(config).encode())


def _own_code() -> dict[str, Any]:
    """What must be equal in all processes besides their options: processes that plan other steps, or compile other
    programs, wait in their collectives for ever."""
    try:
        source = program_key.sources()[:12]
    except program_key.NoKey as error:  # a file changed after this process read it
        source = str(error)
    return dict(jattn_source=source, jax=jax.__version__) | {name: getattr(jax.config, name) for name in JAX_SETTINGS}


def _failed(what: str, process_id: int, error: Exception) -> EngineDeadError:
    """The error of a collective operation that failed."""
    return EngineDeadError(
        f"{what} failed in process {process_id}, perhaps because another process has ended "
        f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    )


class _LockStepLoop(StepLoop):
    """A StepLoop that does not go on after a failure: the other processes may not have failed."""

    def __init__(self, process_id: int, *args: Any):
        super().__init__(*args)
        self._process_id = process_id

    def _contain(self, error: Exception) -> list[RequestOutput]:
        raise _failed("a step", self._process_id, error) from error

    def _restart_unfinished(self, *args: Any, **options: Any) -> list[RequestOutput]:
        raise EngineDeadError(f"a step was interrupted in process {self._process_id}")


class _DigestedFlights(Flights):
    """Flights with a checksum of what was planned and sampled so far. Equal engines have equal checksums."""

    digest = 0

    def send(self, plan: StepPlan, requests: LiveRequests, number: int) -> StepShape:
        if number % PLANS_CHECKED_EVERY == 0:
            tables = b"".join(table.tobytes() for seq in requests.sequences(plan.rows) for table in seq.tables)
            self.digest = zlib.crc32(tables, zlib.crc32(repr(plan).encode(), self.digest))
        return super().send(plan, requests, number)

    def wait(self, flight: InFlight) -> tuple[DispatchResult, dict[str, float]]:
        result, times = super().wait(flight)
        self.digest = zlib.crc32(result.tokens[: flight.plan.burst].tobytes(), self.digest)
        return result, times
