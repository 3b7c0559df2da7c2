"""`pallas_tpu_invariant`: the same bits for a request in every batch; `pallas_tpu`: for requests with one new token."""

import pytest
from jax.experimental.pallas import tpu as pltpu

import jattn
from jattn.backends import Feature
from tests.backends.invariance import backend_of_engine, bits
from tests.backends.test_pallas_tpu import LAYER, POOL, V6E
from tests.cases import FEATURES, Case
from tests.kernels.tpu.interpreted import SMALL
from tests.running import conform

NAME = "pallas_tpu_invariant"
BATCH = Case("a decode, a prompt and a few tokens", (1, 20, 5), (30, 20, 300))
"""The few tokens have 10 rows: in a batch of their own in chunks of fewer rows, which take other keys in one step."""


@pytest.fixture(autouse=True)
def _on_a_tpu(monkeypatch):
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(mode):
    problem = SMALL.replace(case=BATCH, feature=FEATURES["cap_sinks_window"])
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode)):
        conform(problem, NAME)
        together = bits(problem, NAME)
        for r in (0, 2):
            assert [together[r]] == bits(problem.alone(r), NAME), f"request {r}"
        others = bits(problem, "pallas_tpu")
        assert others[:1] == bits(problem.alone(0), "pallas_tpu"), "one new token"
        assert others[2:] != bits(problem.alone(2), "pallas_tpu"), "this batch does not tell the backends apart"


def test_a_decode_whose_queries_are_taken_in_place_has_the_bits_of_a_mixed_batch():
    """8 kv heads, four to a window of rows: their rows are others than in the packs of a mixed batch."""
    problem = SMALL.replace(case=Case("a decode and a few tokens", (1, 3), (90, 30)), heads=16, kv_heads=8)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode="eager")):
        assert bits(problem, "pallas_tpu")[:1] == bits(problem.alone(0), "pallas_tpu")


def test_the_sizes_of_tiles_follow_the_batch_in_one_of_them_only():
    """A few tokens have small chunks in a batch of their own, and other keys are then seen by all rows of a chunk."""
    from jattn.backends.pallas_tpu import kernel_config

    spec, cache_spec = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL)
    metas = [jattn.CommonAttentionMetadata.from_lengths([n], [99], [list(range(7))], 16) for n in (1, 3, 40)]
    sizes = lambda invariant: {
        (c.tile_rows, c.chunk_rows)
        for c in (kernel_config(spec, cache_spec, common=meta, invariant=invariant) for meta in metas)
    }
    assert len(sizes(True)) == 1 and len(sizes(False)) > 1


CHOSEN = [((), "pallas_tpu"), ((Feature.DECODE_BATCH_INVARIANCE,), "pallas_tpu"), ((Feature.BATCH_INVARIANCE,), NAME)]


@pytest.mark.parametrize(("needs", "name"), CHOSEN)
def test_what_is_chosen_where_invariance_is_needed(needs, name):
    spec, cache_spec = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL)
    assert jattn.PagedAttention(spec, cache_spec, platform=V6E, needs=needs).backend_name == name


def test_a_deterministic_engine_takes_the_kernel_on_a_tpu():
    assert backend_of_engine(deterministic=True) == "pallas_tpu"
