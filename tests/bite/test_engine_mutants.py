"""Each mutant of the engine fails each of its laws, and none hangs."""

import functools
import importlib

import jax
import pytest

from jattn.engine import sampling
from jattn.engine.dispatch import dispatch
from tests.bite.engine_mutants import MUTANTS

PAIRS = [
    pytest.param(mutant, law, id=f"{name.replace(' ', '_')}-{law.__name__}")
    for name, mutant in MUTANTS.items()
    for law in mutant.laws
]


@functools.cache
def healthy(law) -> bool:
    """The law holds without a mutant."""
    law()
    return True


def owner_of(target: str):
    """(module or class, name) of 'package.module.Class.name'."""
    path = target.split(".")
    for split in range(len(path) - 1, 0, -1):
        try:
            owner = importlib.import_module(".".join(path[:split]))
        except ModuleNotFoundError:
            continue
        for name in path[split:-1]:
            owner = getattr(owner, name)
        return owner, path[-1]
    raise ValueError(f"{target}: no such module")


def forget_traces() -> None:
    for jitted in (dispatch, sampling.choose, sampling._sample_on_devices):
        jitted.clear_cache()


@pytest.fixture
def fresh():
    """What was traced with a mutant, or without, is not used with the other."""
    forget_traces()
    yield
    forget_traces()


@pytest.mark.parametrize(("mutant", "law"), PAIRS)
def test_a_mutant_of_the_engine_is_caught(mutant, law, monkeypatch, fresh):
    assert healthy(law)
    forget_traces()
    owner, name = owner_of(mutant.target)
    monkeypatch.setattr(owner, name, mutant.make(getattr(owner, name)))
    with pytest.raises(
        (AssertionError, RuntimeError)
    ) as caught:  # RuntimeError: the engine detected that there is no progress
        law()
    assert not isinstance(caught.value, jax.errors.JaxRuntimeError), "the device failed, which no law is about"
