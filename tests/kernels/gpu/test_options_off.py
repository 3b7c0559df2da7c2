"""An option of a layer costs nothing where it is off: what the kernels do with it, without it, and without its code."""

import contextlib
import functools
from unittest import mock

import jax
import pytest

from benchmarks import records
from benchmarks.gpu import operations
from pallas_kernels.algebra.logits import LogitRule
from pallas_kernels.algebra.mask import MaskRule
from pallas_kernels.algebra.shards import ShardRule
from pallas_kernels.gpu import narrow_sm90, new_tokens_sm90, queries_sm90, tiles_sm90, token_scales_sm90
from pallas_kernels.gpu import work_columns as wl

SHAPE = "decode_bf16"
OPTIONS = {  # name -> fields of the config, and the function of the kernels that only this option calls
    "mm_prefix": (dict(mask=MaskRule(causal=True, spans=True)), (wl, "token_range")),
    "qq_bias": (dict(qq_bias=True), (new_tokens_sm90, "bias_of")),
    "alibi": (dict(logits=LogitRule(scale=0.1, has_alibi=True)), (narrow_sm90, "gather")),
    "sinks": (dict(has_sinks=True), (tiles_sm90, "value_per_row")),
    "8-bit products": (
        dict(kv_dtype="float8_e4m3fn", compute_dtype="float8_e4m3fn"), (queries_sm90, "eight_bit_weights"),
    ),
    "token scales": (dict(kv_dtype="int8", token_scales=True), (token_scales_sm90, "load_per_key")),
    "a rank's keys": (dict(shards=ShardRule(4, 2)), (ShardRule, "count_below")),
    "soft cap": (dict(logits=LogitRule(scale=0.1, soft_cap=30.0)), None),
    "window": (dict(mask=MaskRule(causal=True, left=99)), None),
    "chunk": (dict(mask=MaskRule(causal=True, chunk=64)), None),
    "causal by request": (dict(per_request_causal=True), None),
}  # fmt: skip
BY_LIST = {  # pairs of configs whose kernels have the same operations: the work list differs, or a constant
    "chunk lookback": tuple(dict(mask=MaskRule(causal=True, chunk=64, lookback=n)) for n in (0, 2)),
    "batch invariance": (dict(), dict(whole_units=True)),
}  # fmt: skip


class Absent(Exception):
    """The code of an option was called."""


@functools.cache
def plain(chip):
    """(text, operations) of the kernel without options."""
    return seen(chip)


def seen(chip="sm_90", **fields):
    """The same of a kernel with these fields."""
    module = operations.module_of(operations.config_of(chip, SHAPE, **fields))
    return operations.text_of(module), operations.counts_of(module)


def raises(*_, **__):
    raise Absent


@pytest.mark.parametrize("chip", operations.CHIPS)
def test_a_kernel_without_options_is_that_without_their_code(chip):
    with contextlib.ExitStack() as stack:
        for _, place in OPTIONS.values():
            if place is not None:
                stack.enter_context(mock.patch.object(*place, raises))
        is_same = seen(chip)[0] == plain(chip)[0]
    assert is_same  # of texts of a megabyte, pytest would show a difference for minutes


@pytest.mark.parametrize("name", [name for name, (_, place) in OPTIONS.items() if place])
def test_each_option_calls_the_code_that_is_left_out(name):
    fields, place = OPTIONS[name]
    with mock.patch.object(*place, raises), pytest.raises(Absent):
        seen(**fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, place) in OPTIONS.items() if not place])
def test_each_other_option_adds_operations(name):
    """Those whose code is among the kernel's. Some take a kind away: soft-capped logits need no maximum."""
    before, after = plain("sm_90")[1], seen(**OPTIONS[name][0])[1]
    added = {kind: count - before.get(kind, 0) for kind, count in after.items() if count > before.get(kind, 0)}
    assert added and sum(after.values()) > sum(before.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_LIST)
def test_options_of_the_work_list_leave_the_kernel_as_it_is(name):
    without, with_it = (seen(**fields)[1] if fields else plain("sm_90")[1] for fields in BY_LIST[name])
    assert with_it == without


RECORDED = {
    (chip, row["case"]): row
    for chip in operations.CHIPS
    for row in records.read(records.RESULTS / chip / "operations.jsonl")
}


def test_every_kernel_without_options_is_recorded():
    assert RECORDED.keys() == {(chip, shape) for chip in operations.CHIPS for shape in operations.SHAPES}


@pytest.mark.parametrize(
    ("chip", "shape"),
    [key if key[1] == SHAPE else pytest.param(*key, marks=pytest.mark.slow) for key in RECORDED],
)
def test_a_kernel_without_options_has_the_operations_recorded(chip, shape):
    """A new option adds none. Where a kernel was changed on purpose: python -m benchmarks.gpu.operations --write"""
    row = RECORDED[chip, shape]
    if row["jax"] != jax.__version__:
        pytest.skip(f"recorded with JAX {row['jax']}")
    counts = plain(chip)[1] if shape == SHAPE else operations.measure(chip, shape)["counts"]
    assert counts == row["counts"]
