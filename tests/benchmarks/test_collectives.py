"""The projection of steps from timed all-reduces: its formula by hand, and a run on two CPU devices."""

import pytest

from benchmarks import records
from benchmarks.gpu import collectives
from jattn.engine.device_kinds import DeviceKind


def test_the_fit_finds_the_constants_of_a_ring():
    ring = collectives.Ring(3e-6, 1e11)
    assert ring.seconds(4, 8 * 10**6) == pytest.approx(6 * (3e-6 + 2e6 / 1e11))
    fitted = collectives.Ring.fitted(4, {size: ring.seconds(4, size) for size in collectives.SIZES})
    assert (fitted.hop, fitted.link) == (pytest.approx(3e-6), pytest.approx(1e11))


def test_a_projected_step_is_what_a_rank_reads_and_its_all_reduces():
    """Llama 3 8B: 7.5 and 0.5 GB of bf16 for each of two ranks, and half of 64 x 4096 keys and values."""
    kind = DeviceKind("device", "gpu", 1e12, bandwidth=1e12, peak=1e30, link=1.0)
    rows = {row["variant"]: row for row in collectives.projected("8b", kind, collectives.Ring(1e-5, 1e11))}
    one, two, many = (rows[f"tensor {t}, data {d}"] for t, d in ((1, 1), (2, 1), (8, 8)))
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    weights, norms, embeddings = 32 * layer + 4096 * 128256, 65 * 4096, 64 * 4096
    cache = 64 * 4096 * 32 * 2 * 1024
    assert one["ms"] == pytest.approx(2e3 * (weights + norms + embeddings + cache) / 1e12, rel=1e-6)
    sums = 65 * 2 * (1e-5 + 64 * 4096 * 2 / 2 / 1e11)
    assert two["all_reduce_ms"] == pytest.approx(1e3 * sums)
    assert two["ms"] == pytest.approx(2e3 * ((weights + cache) / 2 + norms + embeddings) / 1e12 + 1e3 * sums, rel=1e-4)
    assert many["tokens_per_s"] == pytest.approx(8 * rows["tensor 8, data 1"]["tokens_per_s"])


def test_a_run_on_two_devices_keeps_its_rows(tmp_path):
    collectives.main(["--small", "--out", str(tmp_path)])
    rows = records.read(tmp_path / "collectives.jsonl")
    assert len(rows) == 3 + 2 * len(collectives.LAYOUTS) and all(row["case"] and row["date"] for row in rows)
    assert all(row.get("us", 1) > 0 for row in rows)
