"""The least time of a TPU kernel, with figures counted by hand."""

import pytest

from benchmarks.tpu import model


def test_a_decode_is_limited_by_memory_or_by_bundles():
    least = lambda chip, bundles: model.least(dict(chip=chip, case="decode", bundles_per_key=bundles))
    memory = least("v5e", 1.5)
    assert memory["limit"] == "memory" and memory["ns"] == pytest.approx(4096 / 819, rel=1e-3)
    bundles = least("v5e", 9.0)
    assert bundles["limit"] == "bundles" and bundles["ns"] == pytest.approx(9 / 1.5, rel=1e-3)
    assert least("v5p", 1.5)["ns_memory"] == pytest.approx(4096 / (2765 / 2), rel=1e-3), "one core of two"


def test_keys_of_a_prefill_are_read_once_for_a_tile():
    row = dict(chip="v6e", case="rpa3_prefill", milli_bundles=110.0)
    assert model.least(row | dict(tile_queries=128))["limit"] == "bundles"
    assert model.least(row | dict(tile_queries=8))["ns"] == pytest.approx(4096 / 8 / 1638, rel=1e-3)


def test_the_table_sets_each_kernel_beside_the_others():
    rows = [
        dict(chip="v6e", case="decode", ns=2.5, limit="memory"),
        dict(chip="v6e", case="jax_decode", ns=2.6, limit="bundles"),
        dict(chip="v6e", case="rpa3_decode", error="out of VMEM"),
    ]
    head, decode, prefill = model.table(rows).splitlines()
    assert head.split("  ")[-1].strip() == "RPA v3"
    assert "2.5000 by memory" in decode and "2.6000 by bundles" in decode and decode.endswith("does not compile")
    assert prefill.split()[-3:] == ["-", "-", "-"]
