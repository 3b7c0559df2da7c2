"""Programs: the compiled dispatches of one engine, of which some may come from disk."""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import jax

from jattn.engine import kept_programs
from jattn.engine.dispatch import Model, RowState, dispatch
from jattn.engine.packing import Packed, PackedTree
from jattn.engine.program_key import NoKey, key_of
from jattn.engine.sampling import Sampled

log = logging.getLogger("jattn.compile_cache")

Args = tuple[Any, Any, RowState, Packed]
"""(params, caches, before, packed): the arguments of a dispatch after the model."""


class BrokenProgramError(RuntimeError):
    """A program from disk failed the first time it ran. It was removed, and the caches that it was given are lost."""


class Programs:
    """Calls `dispatch` for one model; a program is loaded from disk or compiled when it is first needed.

    An engine has one program for each tree of a batch's arrays. If none are kept on disk, `dispatch` has them, as JAX
    does.
    """

    def __init__(self, model: Model):
        self.model = model
        self._ready: dict[PackedTree, Callable[..., Any]] = {}
        self._keys: dict[PackedTree, str] = {}
        self._unproven: set[PackedTree] = set()  # those from disk that have not run
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> tuple[Any, Sampled, RowState]:
        """dispatch(model, params, caches, before, packed)."""
        return self.of(args)(*args)

    def of(self, args: Args | Any) -> Callable[..., Any]:
        """The program for these arguments."""
        tree = args[-1].tree
        if tree not in self._ready and not self.load(args):
            if self._key(args):
                self.compile(args, self.lower(args))
            else:
                self._ready[tree] = functools.partial(dispatch, self.model)
        if tree in self._unproven:
            return self._first_run
        return self._ready[tree]

    def load(self, args: Args) -> bool:
        """Load the program of these arguments, unless it is ready; False if it has to be compiled."""
        tree = args[-1].tree
        if tree not in self._ready and (key := self._key(args)):
            structures = jax.tree.structure((args, {})), _structure_of_results(args)
            if (program := kept_programs.load(key, *structures, _device(args))) is not None:
                self._ready[tree] = program
                self._unproven.add(tree)
        return tree in self._ready

    def lower(self, args: Args) -> jax.stages.Lowered:
        """Trace and lower the program of these arguments."""
        return dispatch.lower(self.model, *args)

    def compile(self, args: Args, lowered: jax.stages.Lowered) -> None:
        """Compile what was lowered, and keep it on disk."""
        if key := self._key(args):
            self._ready[args[-1].tree] = kept_programs.compiled(lowered, key, _structure_of_results(args))
        else:
            lowered.compile()  # a later call of `dispatch` finds it

    def _key(self, args: Args) -> str:
        """The key under which the program is kept; "" if it is not."""
        tree = args[-1].tree
        with self._lock:  # the first key reads all source files, the others do not
            if tree not in self._keys:
                try:
                    kept = kept_programs.are_kept()
                    self._keys[tree] = key_of(self.model, args, dispatch.options(self.model, *args)) if kept else ""
                except (NoKey, OSError) as why:
                    log.debug("only JAX's cache keeps a program: %s", why)
                    self._keys[tree] = ""
            return self._keys[tree]

    def _first_run(self, *args: Any) -> tuple[Any, Sampled, RowState]:
        """Run a program from disk and wait for it. If it fails, it and all others that have not run are removed."""
        tree = args[-1].tree
        try:
            results = jax.block_until_ready(self._ready[tree](*args))
        except Exception as error:
            for each in self._unproven:
                kept_programs.remove(self._keys[each])
                del self._ready[each]
            self._unproven.clear()
            raise BrokenProgramError(f"a program from disk failed, it will be compiled again: {error}") from error
        self._unproven.remove(tree)
        return results


def _device(args: Args) -> Any:
    """The device of all arguments; they have a key, so they are on one."""
    (device,) = args[2].last.sharding.device_set
    return device


def _structure_of_results(args: Args) -> Any:
    """The tree of what a dispatch returns: (caches, Sampled, RowState)."""
    _, caches, before, _ = args
    sampled: Any = Sampled(tokens=0, logprobs=0, top_tokens=0, top_logprobs=0)  # pyright: ignore[reportArgumentType]
    return jax.tree.structure((caches, sampled, before))
