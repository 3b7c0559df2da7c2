"""The trace of a GPU: its small form runs here, and its figures are compared with ones counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import records
from benchmarks.gpu import timeline, trace
from benchmarks.gpu.timeline import Kernel, Timeline


@pytest.mark.slow
def test_the_small_form_serves_and_keeps_its_rows(tmp_path):
    assert trace.main(["--small", "--out", str(tmp_path)]) == 0
    served, first = records.read(tmp_path / "trace.jsonl")
    work = trace.SMALL_TRACE.work(512)
    assert served["case"] == "trace_small" and served["output_tokens"] == sum(new for _, new in work)
    assert served["output_tokens_per_s"] == pytest.approx(served["output_tokens"] / served["seconds"])
    assert 0 < served["ttft_ms_p50"] <= served["ttft_ms_p99"] <= served["seconds"] * 1e3
    assert served["itl_ms_p50"] <= served["gap_ms_p50"]
    assert served["stats"]["output_tokens"] == served["output_tokens"] and served["compiled_later"] == 0
    assert sum(served["dispatches"].values()) == served["stats"]["dispatches"]
    assert first["case"] == "ttft_small" and first["ms"] in first["rounds_ms"] and first["compiled_later"] == 0
    assert {"date", "commit", "chip", "jax", "bench"} <= served.keys() & first.keys()


def test_a_trace_is_the_same_in_every_process_and_has_the_lengths_that_it_names():
    work = trace.TRACES[0].work(32000)
    assert work == trace.TRACES[0].work(32000) and len(work) == 128
    assert {len(prompt) for prompt, _ in work} <= set(range(128, 512))
    assert {new for _, new in work} <= set(range(128, 384))
    assert (sum(len(prompt) for prompt, _ in work), sum(new for _, new in work)) == (41425, 33747)


def test_a_program_that_is_compiled_late_is_counted_by_its_name():
    @jax.jit
    def dispatch(x):
        return x + 1

    with trace.watched() as seen:
        dispatch(jnp.zeros(3))
        jax.jit(lambda x: x + 2)(jnp.zeros(3))
    assert seen.programs == 1 and sum(seen.compiled.values()) >= 2


def test_percentiles_of_a_client():
    """Two requests: tokens at 1, 2 (two at once) and 4 s; and one token at 3 s."""
    served = trace.Served(4.0, {"a": [(1.0, 1), (2.0, 3), (4.0, 4)], "b": [(3.0, 1)]})
    row = served.figures()
    assert row["output_tokens_per_s"] == 5 / 4 and row["ttft_ms_p50"] == 2000
    assert row["gap_ms_p50"] == 1500 and row["itl_ms_p50"] == 500


def test_the_floor_reads_each_key_once_a_step():
    """Rows of prompt 3 with 3 tokens and prompt 5 with 2 in one row: 2 steps of 4 + 5 keys, then one of 6."""
    work = [([7] * 3, 3), ([7] * 5, 2)]
    assert trace.decode_steps(work, 1) == (3, 4 + 5 + 6)
    assert trace.decode_steps(work, 2) == (2, 4 + 5 + 6)
    assert trace.decode_steps([([7], 1)], 2) == (0, 0), "the prompt's own pass gives the only token"


def test_the_weights_of_a_step_are_all_but_the_embedding():
    config, params = trace.model_of(True, 96)
    weights, flop, cache = trace.sizes_of(config, params)
    width, inner, layers, vocab = 128, 256, 2, 512
    of_layer = width * (128 + 64 + 64 + 128) + 3 * width * inner
    assert flop == 2 * layers * of_layer
    assert weights == 4 * (layers * (of_layer + 2 * width) + width + vocab * width)
    assert cache == layers * 2 * 64 * 4


def test_busy_time_counts_overlaps_once_and_goes_to_the_shape_that_was_sent():
    kernel = lambda start, end, launch, program: Kernel("k", start, end, launch, program)
    found = Timeline(
        (
            kernel(100, 200, 1, "jit_dispatch 7"),
            kernel(150, 300, 2, "jit_dispatch 7"),
            kernel(300, 350, 3, "jit_copy 8"),
            kernel(400, 500, 4, "jit_dispatch 9"),
            kernel(600, 700, 5, "jit_dispatch 7"),
        ),
        {1: 10, 2: 12, 3: 14, 4: 30, 5: 50},
        ((5.0, "4x4"), (25.0, "16x4"), (45.0, "4x4")),
    )
    assert {shape: row["busy_seconds"] for shape, row in found.shapes.items()} == pytest.approx(
        {"4x4": 300e-9, "other": 50e-9, "16x4": 100e-9}
    )
    assert found.shapes["4x4"]["span_seconds"] == pytest.approx(300e-9)
    rest = found.launches, found.sends
    nameless = Timeline((kernel(100, 200, 4, None), kernel(200, 250, None, None)), *rest)
    assert {shape: row["busy_seconds"] for shape, row in nameless.shapes.items()} == pytest.approx(
        {"16x4": 100e-9, "4x4": 50e-9}
    )
    gaps = Timeline((kernel(100, 200, 1, "jit_dispatch 7"), kernel(250, 300, 2, "jit_dispatch 7")), *rest)
    assert gaps.shapes == {"4x4": pytest.approx(dict(busy_seconds=150e-9, span_seconds=200e-9))}
    assert gaps.occupied == pytest.approx(200e-9)


def test_a_profile_without_a_device_is_an_error(tmp_path):
    with jax.profiler.trace(tmp_path):
        jnp.zeros(3).block_until_ready()
    with pytest.raises(RuntimeError, match="shows no kernel"):
        timeline.read(str(tmp_path), [])


def test_the_engine_names_each_dispatch_in_a_profile(tmp_path):
    """`timeline.read` relies on it: one host event for each dispatch."""
    config, params = trace.model_of(True, 96)
    engine = trace.engine_of(config, params, 2, 32, 64)
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 1, 0
    with trace.watched() as seen, jax.profiler.trace(tmp_path, profiler_options=options):
        trace.serve(engine, [([5] * 9, 5), ([6] * 20, 30)])
    (path,) = tmp_path.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [event.name for plane in planes for line in plane.lines for event in line.events]
    assert events.count(timeline.SEND) == len(seen.sent) > 1
