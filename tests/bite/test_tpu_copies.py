"""Faults planted in the TPU kernel's copies: the interpreter suite reports each without a look at the output.

Each runs on a pool of its own size, so that no trace of the healthy kernel is reused.
"""

import functools

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

import jattn
from pallas_kernels.tpu.copies import Copies
from pallas_kernels.tpu.query_tile import QueryTile
from tests.cases import CASES
from tests.kernels.tpu.interpreted import SMALL, V6E, judge, only_run

START, PAGE = Copies.start_keys, Copies._page_copies
PROBLEM = SMALL.replace(case=CASES["decode"])


def starts_twice(self, i, b, side):
    START(self, i, b, side)
    START(self, i, b, side)


def never_waits(self, i):
    pass


def copies_to_the_first_half(self, page, j, side):
    for name, pool, ref in (("k", self.hbm.k, self.buf.k), ("v", self.hbm.v, self.buf.v)):
        yield pltpu.make_async_copy(pool.at[page], ref.at[0, j], self._sem(name, side))


def reads_past_the_pool(self, page, j, side):
    return PAGE(self, page + 10**6, j, side)


@functools.cache
def healthy(mode: str) -> bool:
    """The same problem without a fault passes."""
    judge(PROBLEM, mode, only_run)
    return True


def waits_too_late(monkeypatch):
    """The count of every semaphore is right, but a block is waited for after its products."""
    wait, add, late = Copies.wait_keys, QueryTile.add_block, []
    monkeypatch.setattr(Copies, "wait_keys", lambda *arguments: late.append(arguments))

    def products_first(self, side, first_key):
        add(self, side, first_key)
        wait(*late.pop())

    monkeypatch.setattr(QueryTile, "add_block", products_first)


FAULTS = {
    "wrong semaphore count": ("start_keys", starts_twice, "eager", "semaphore"),
    "missing wait": ("wait_q", never_waits, "eager", "semaphore"),
    "race": ("_page_copies", copies_to_the_first_half, "eager", "race"),
    "page out of range": ("_page_copies", reads_past_the_pool, "on_wait", "(?i)out.of.bounds"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_copies_is_reported(name, monkeypatch):
    method, mutant, mode, report = FAULTS[name]
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)
    assert healthy(mode)
    monkeypatch.setattr(Copies, method, mutant)
    with pytest.raises((AssertionError, IndexError, ValueError, jax.errors.JaxRuntimeError), match=report):
        judge(PROBLEM.replace(spare_blocks=20 + list(FAULTS).index(name)), mode, only_run)


def test_a_late_wait_is_a_race(monkeypatch):
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)
    waits_too_late(monkeypatch)
    with pytest.raises(AssertionError, match="race"):
        judge(PROBLEM.replace(spare_blocks=19), "eager", only_run)
