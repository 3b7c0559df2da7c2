"""Processes: the processes that share one engine, and what they tell each other.

JAX's multi-controller runtime connects them (jax.distributed). Its coordinator runs in process 0 and has a store of
keys and values, in which these keys are used, all below "jattn/":

    given           the options of process 0, before it loads weights
    start           what its engine has, and the engine's seed
    commands/G/N    the Nth list of commands: process 0 writes it, the others run it. G is N // GROUP
    read/I          how many lists process I has read. Process 0 deletes the groups that all have read
    alive/I         a counter that process I increases while it lives, and whether it asks process 0 to stop
    end             why all of them end: a sentence, or empty after an orderly stop
"""

import contextlib
import ipaddress
import itertools
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from jattn.errors import EngineDeadError
from jattn.errors.arguments import integer, number, takes, text

GROUP = 64
"""Lists of commands that are deleted together."""

POLL_SECONDS = 1.0
"""The longest wait for a key, and the time between two signs of life. Python handles signals between two waits."""

CONNECT_SECONDS = 300.0
"""How long a process waits for the others at the start."""

NOTICE_SECONDS = 10.0
"""After so long the log says that the process waits for the others."""

ABORT_SECONDS = 30
"""JAX aborts a process that still waits this long after CONNECT_SECONDS; `join` has raised its error by then."""

END_NOTICE_SECONDS = 1.0
"""How long process 0 stays after it wrote `end`, so that the others can read it: the store ends with process 0."""

TELL_SECONDS = 1.0
"""How long a process that ends tries to write `end`: the store may not answer."""

MAX_SECONDS = 86400.0
"""The longest time-out of a process."""

MAX_PROCESSES = 2**16
"""JAX counts them in int32, and for numbers near its end it does not answer."""

HOST_NAME = re.compile(r"[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+)*\.?")
"""A name, or an address of IPv4."""

STOP = ["stop"]
"""The last command."""

log = logging.getLogger("jattn.processes")

OnEnd = Callable[["Processes", str], None]
"""Called with a sentence that says why this process must end."""


class Processes:
    """This process among `count`; process `id` 0 leads. Make it with `join`.

    A thread watches the others. If one gives no sign of life for `seconds`, or tells that it fails, the thread calls
    `on_end`; this process must then end too, because its next collective operation would wait for ever. Except in
    process 0, a second thread watches the store: a call of a store that does not answer never returns.
    """

    def __init__(self, client: Any, count: int, id: int, seconds: float, on_end: OnEnd):
        self.count, self.id, self.seconds, self.on_end = count, id, seconds, on_end
        self.on_stop = _terminate  # called in process 0, from a thread, if another process asks for an orderly stop
        self._asks_leader_to_stop = False
        self._client = client
        self._number = 0  # of the next list of commands
        self._first_group = 0  # of commands that are not deleted
        self._left = threading.Event()
        self._answered_at = time.monotonic()  # when the store last answered the watcher
        self._watcher = threading.Thread(target=self._watch, name="jattn-processes", daemon=True)
        self._watcher.start()
        if not self.leads:
            threading.Thread(target=self._watch_store, name="jattn-store", daemon=True).start()

    @classmethod
    @takes(coordinator=text, count=integer(), id=integer(), seconds=number(finite=False))
    def join(cls, coordinator: str, count: int, id: int, *, seconds: float = 30.0, on_end: OnEnd) -> "Processes":
        """Connect this process, before JAX starts its devices. coordinator: HOST:PORT, an address of process 0.

        ValueError if an argument is wrong; OSError if the others do not come. End the process then: a thread still
        waits for them, and JAX aborts the process after ABORT_SECONDS.
        """
        _host_and_port("coordinator", coordinator)
        if not 2 <= count <= MAX_PROCESSES:
            raise ValueError(
                f"{count} processes: there must be at least 2 and at most {MAX_PROCESSES}; a single one needs no "
                "coordinator"
            )
        if not 0 <= id < count:
            raise ValueError(f"process {id} of {count}: the ids are 0 to {count - 1}")
        if not 0 < seconds <= MAX_SECONDS:
            raise ValueError(
                f"the time-out of a process, {seconds} seconds, must be above 0 and at most {MAX_SECONDS:g}"
            )
        from jax._src import distributed  # the store has no public name

        # JAX would listen on every address of this machine.
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
        if id == 0:
            _check_address(bind)
        _connect(coordinator, count, id, dict(
            coordinator_bind_address=bind, initialization_timeout=int(CONNECT_SECONDS) + ABORT_SECONDS,
            # JAX's own watch aborts the process. It acts only if our watcher thread cannot run.
            heartbeat_timeout_seconds=int(2 * seconds) + 10, shutdown_timeout_seconds=int(seconds) + 1,
        ))  # fmt: skip
        return cls(distributed.global_state.client, count, id, seconds, on_end)

    @property
    def leads(self) -> bool:
        return self.id == 0

    @property
    def _pause(self) -> float:
        """Seconds between two looks of a watching thread."""
        return min(POLL_SECONDS, self.seconds / 4)

    # ------------------------------------------------------------------ commands
    def agree(self, key: str, mine: dict[str, Any]) -> dict[str, Any]:
        """What process 0 has for this key. Every process calls it once for a key, with what it has itself."""
        if self.leads:
            self._set(key, mine)
            return mine
        return self._wait(key)

    def publish(self, commands: list) -> None:
        """In process 0: the next list of commands, as JSON."""
        if self._number % GROUP == 0:
            self._delete_read_groups()
        self._set(self._next_key(), commands)

    def receive(self) -> list:
        """In the others: wait for the next list of commands."""
        commands = self._wait(self._next_key())
        if self._number % GROUP == 0:
            self._set(f"read/{self.id}", self._number)
        return commands

    def _next_key(self) -> str:
        key = f"commands/{self._number // GROUP}/{self._number}"
        self._number += 1
        return key

    def _delete_read_groups(self) -> None:
        """Delete the groups that all others have read. Those before them are deleted."""
        with self._store():
            read = [int(value) for _, value in self._client.key_value_dir_get("jattn/read/")]
            if len(read) == self.count - 1:
                for group in range(self._first_group, min(read) // GROUP):
                    self._client.key_value_delete(f"jattn/commands/{group}/")
                    self._first_group = group + 1

    # ------------------------------------------------------------------ the end
    def ask_leader_to_stop(self) -> None:
        """In a process other than 0: let process 0 call its `on_stop`, by default send itself SIGTERM."""
        self._asks_leader_to_stop = True  # nothing more: a signal handler calls this

    def fail(self, why: str) -> None:
        """Tell the others that this process ends, and why."""
        self._left.set()
        teller = threading.Thread(target=self._tell, args=(why,), daemon=True)
        teller.start()
        teller.join(TELL_SECONDS)
        if self.leads:
            time.sleep(END_NOTICE_SECONDS)

    def _tell(self, why: str) -> None:
        with contextlib.suppress(JaxRuntimeError):  # somebody else told first, or the store is gone
            self._client.key_value_set("jattn/end", why)

    def leave(self) -> None:
        """Disconnect after an orderly stop.

        Every process calls it: process 0 when it has nothing more to do, the others after STOP.
        """
        if self.leads:
            self.publish([STOP])
            self._set("end", "")
        self._left.set()
        self._watcher.join()
        jax.distributed.shutdown()

    def _watch(self) -> None:
        """The thread: give signs of life, and look for those of the others."""
        begin, is_signalled = time.monotonic(), False
        seen = {str(id): ("", begin) for id in range(self.count)}  # process -> its last state, and since when
        for beat in itertools.count():
            try:
                states = self._exchange_states(beat)
                now = self._answered_at = time.monotonic()
                seen |= {id: (states[id], now) for id, (last, _) in seen.items() if states.get(id, last) != last}
                if self.leads and not is_signalled and any(state.endswith("stop") for state in states.values()):
                    is_signalled = True
                    self.on_stop()
                why = self._why_to_end({id: now - since for id, (_, since) in seen.items()})
            except JaxRuntimeError as error:
                why = f"process 0 cannot be reached ({str(error).splitlines()[0]})"
            if self._left.is_set() or why == "":
                return
            if why is not None:
                self.on_end(self, why)
                return

    def _exchange_states(self, beat: int) -> dict[str, str]:
        """Write this process's `alive`, and read that of every process."""
        state = f"{beat} stop" if self._asks_leader_to_stop else f"{beat}"
        self._client.key_value_set(f"jattn/alive/{self.id}", state, allow_overwrite=True)
        return {key.rpartition("/")[2]: value for key, value in self._client.key_value_dir_get("jattn/alive/")}

    def _why_to_end(self, silent: dict[str, float]) -> str | None:
        """Why all processes must end; "": an orderly stop; None: go on. silent: seconds since each one's last sign."""
        late = [id for id, seconds in silent.items() if seconds > self.seconds]
        if not late:
            return self._get("end", self._pause)
        why = f"process {late[0]} has given no sign of life for {self.seconds:g} s"
        self._tell(why)
        return why

    def _watch_store(self) -> None:
        """The second thread: process 0, which has the store, or the network may have stopped."""
        while not self._left.wait(self._pause):
            if time.monotonic() - self._answered_at > self.seconds:
                self.on_end(self, f"process 0 has given no sign of life for {self.seconds:g} s")
                return

    # ------------------------------------------------------------------ the store
    def _set(self, key: str, value: Any) -> None:
        with self._store():
            text = value if isinstance(value, str) else json.dumps(value)
            self._client.key_value_set(f"jattn/{key}", text, allow_overwrite=True)

    def _wait(self, key: str) -> Any:
        """The value of a key, as soon as it has one."""
        with self._store():
            while (text := self._get(key, POLL_SECONDS)) is None:
                pass
        return json.loads(text)

    def _get(self, key: str, seconds: float) -> str | None:
        """The value of a key; None if it has none within so many seconds."""
        try:
            return self._client.blocking_key_value_get(f"jattn/{key}", int(seconds * 1000))
        except JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    @contextlib.contextmanager
    def _store(self):
        try:
            yield
        except JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            raise EngineDeadError(
                f"process 0 cannot be reached ({reason}): it has ended, or the network failed"
            ) from error


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _connect(coordinator: str, count: int, id: int, options: dict[str, Any]) -> None:
    """jax.distributed.initialize in a thread, because JAX aborts a process that has waited for too long; OSError."""
    failure: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(coordinator, count, id, **options)
        except Exception as error:  # any kind, for the caller's thread
            failure.append(error)

    thread = threading.Thread(target=initialize, name="jattn-connect", daemon=True)
    thread.start()
    thread.join(min(NOTICE_SECONDS, CONNECT_SECONDS))
    if thread.is_alive():
        log.warning("process %d of %d waits for the others, which connect through %s", id, count, coordinator)
        thread.join(max(CONNECT_SECONDS - NOTICE_SECONDS, 0))
    if thread.is_alive():
        raise OSError(
            f"process {id} of {count} has waited {CONNECT_SECONDS:g} s for the others at {coordinator}: start each of "
            f"them once, with --num-processes {count} and its own --process-id"
        )
    if failure and not isinstance(failure[0], RuntimeError):
        raise failure[0]
    if failure:
        reason = str(failure[0]).splitlines()[0]
        raise OSError(f"process {id} of {count} cannot be connected through {coordinator}: {reason}") from failure[0]


def _host_and_port(name: str, address: str) -> tuple[str, int]:
    """HOST:PORT in two parts; ValueError if it is not that. JAX ends the process by a segmentation fault then."""
    host, _, port = address.rpartition(":")
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_host = _is_ipv6(inner) if inner != host else bool(HOST_NAME.fullmatch(host))
    if not is_host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{name}={address!r} must be HOST:PORT, an address of process 0, with a port from 1 to 65535; an IPv6 "
            "address is in brackets, as [::1]:8476"
        )
    return inner, int(port)


def _is_ipv6(text: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def _check_address(address: str) -> None:
    """OSError if process 0 cannot listen there: JAX would end the process without a message."""
    host, port = _host_and_port("the coordinator's address", address)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise OSError(f"process 0 cannot listen on {address}: {error.strerror or error}") from error
