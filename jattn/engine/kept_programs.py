"""Compiled dispatches on disk, so that a start neither traces nor lowers them.

JAX's compilation cache is asked for a program that was lowered, and a large program takes a second to trace and lower.
A file of this module is found by a key that is known before (see program_key). It is in a folder below that of
`jattn.compile_cache`, with the same limit and the same switch.

A file is a pickle with machine code, so what it has runs in this process. It is read only from a folder and a file that
no other user can write, and only if the hash of its key and content is that at its beginning: a file that was cut off,
or has the name of another one, is refused.
"""

import contextlib
import functools
import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import cache_key  # the hook has no public name
from jax.experimental import serialize_executable

from jattn import compile_cache
from pallas_kernels import folders

BELOW = "dispatches"
"""The folder, below that of JAX's cache."""

SUFFIX = "-program"
"""The end of the name of each file."""

log = logging.getLogger("jattn.compile_cache")
_of_thread = threading.local()
_lock = threading.Lock()
_broken: dict[str, str] = {}
"""The keys of programs that could not be used -> what is added to JAX's keys of them."""


def are_kept() -> bool:
    """Are programs kept on disk, in a folder of jattn's?"""
    return compile_cache.own_folder() is not None


def load(key: str, in_tree: Any, out_tree: Any, device: Any) -> jax.stages.Compiled | None:
    """The program of this key, or None: it is not kept, or cannot be used. out_tree: of its results."""
    with _opened() as folder:
        if folder is None:
            return None
        try:
            content = folders.read(folder, key + SUFFIX)
        except FileNotFoundError:
            return None
        except (OSError, folders.FolderError) as error:
            log.info("a kept program is not loaded: %s", error)
            remove(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(key + SUFFIX, dir_fd=folder.fd, follow_symlinks=False)  # the least recently used ones go first
    size = hashlib.sha256().digest_size
    digest, serialized = content[:size], content[size:]
    if _digest(key, serialized) == digest:
        try:
            return serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, backend=device.client, execution_devices=[device]
            )
        except Exception as error:  # of pickle, JAX or XLA: any kind
            log.warning("the kept program %s cannot be loaded, it is compiled again: %s", key, error)
    remove(key)
    return None


def compiled(lowered: jax.stages.Lowered, key: str, out_tree: Any) -> jax.stages.Compiled:
    """Compile, and keep the program if that is possible.

    What JAX's cache had is not kept: XLA on a CPU serializes a program that was loaded without some of its functions.
    So `key` becomes part of JAX's key, else the cache would have most programs after a change of jattn's code, and
    every start would trace and lower them.
    """
    with _cache_events(key + _broken.get(key, "")) as seen:
        program = lowered.compile()
    if "cache_misses" in seen and "cache_hits" not in seen and program.out_tree == out_tree:
        _store(key, program)
    return program


def remove(key: str) -> None:
    """Remove a program that cannot be used. It is compiled again, not taken from JAX's cache, and then kept."""
    _broken[key] = secrets.token_hex(8)
    with _opened() as folder, contextlib.suppress(OSError):
        if folder is not None:
            os.unlink(key + SUFFIX, dir_fd=folder.fd)


def _digest(key: str, serialized: bytes) -> bytes:
    """The first bytes of a file."""
    return hashlib.sha256(key.encode() + serialized).digest()


def _store(key: str, program: jax.stages.Compiled) -> None:
    try:
        serialized, _, _ = serialize_executable.serialize(program)
    except Exception as error:  # a program that JAX cannot serialize: any kind
        log.debug("a program is not kept: %s", error)
        return
    with _opened() as folder:
        if folder is not None:
            try:
                folders.write(folder, key + SUFFIX, _digest(key, serialized) + serialized, 0o600)
            except OSError as error:
                log.debug("a program is not kept: %s", error)


@contextlib.contextmanager
def _opened() -> Iterator[folders.Folder | None]:
    """The folder, opened; None if programs are not kept, or others could write to it."""
    own = compile_cache.own_folder()
    with contextlib.ExitStack() as stack:
        folder = None
        if own is not None:
            try:
                for place in (own.parent.parent, own.parent, own, own / BELOW):
                    folder = stack.enter_context(folders.private(place))
            except (OSError, folders.FolderError) as error:
                folder = None
                log.debug("programs are not kept: %s", error)
        yield folder


@contextlib.contextmanager
def _cache_events(key: str) -> Iterator[list[str]]:
    """What JAX's compilation cache reports in this thread, while `key` is part of its own keys."""
    with _lock:
        _listen()
    seen: list[str] = []
    _of_thread.seen, _of_thread.key = seen, key
    try:
        yield seen
    finally:
        del _of_thread.seen, _of_thread.key


@functools.cache
def _listen() -> None:
    """Register the listener and the hook, once."""
    others = cache_key.custom_hook
    cache_key.custom_hook = lambda: others() + getattr(_of_thread, "key", "")
    jax.monitoring.register_event_listener(_heard)


def _heard(event: str, **_: Any) -> None:
    if event.startswith("/jax/compilation_cache/") and (seen := getattr(_of_thread, "seen", None)) is not None:
        seen.append(event.rpartition("/")[2])
