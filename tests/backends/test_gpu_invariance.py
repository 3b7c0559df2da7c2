"""`pallas_gpu_invariant`: the same bits for a request in every batch, interpreted; what it refuses; its launches."""

import jax
import numpy as np
import pytest

import jattn
from jattn.backends import Feature
from jattn.device import Chip
from pallas_kernels.gpu import work_columns
from pallas_kernels.gpu.config_sm80 import CHIPS
from tests.backends.gpu_interpreted import INTERPRETS, interpreted_warps
from tests.backends.invariance import backend_of_engine, bits
from tests.backends.test_pallas_gpu import HOPPER, LAYER, POOL, lower
from tests.cases import FEATURES, Case
from tests.problem import Problem
from tests.running import conform

NAME = "pallas_gpu_invariant"
BATCH = Case("decodes, a chunk and a prompt", (1, 40, 1, 3, 9), (1300, 70, 130, 200, 9))
SIZES = dict(heads=4, kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")


@pytest.mark.slow
@INTERPRETS
@pytest.mark.parametrize("feature", ["plain", "cap_sinks_window"])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(feature):
    """`pallas_gpu` cuts the longest request, whose bits differ: the test can see a cut."""
    problem = Problem(case=BATCH, feature=FEATURES[feature], **SIZES)
    with interpreted_warps():
        conform(problem, NAME, 2.0**-15)
        together = bits(problem, NAME)
        for r in (0, 1, 3):
            assert [together[r]] == bits(problem.alone(r), NAME), f"request {r}"
        if feature == "plain":
            assert bits(problem, "pallas_gpu")[:1] != bits(problem.alone(0), "pallas_gpu")


@pytest.mark.parametrize("page", [3, 16])
@pytest.mark.parametrize("generation", CHIPS)
def test_no_chip_cuts_the_keys_of_a_request(generation, page, monkeypatch):
    """On a Hopper card, which takes the kernels of every chip with every JAX."""
    monkeypatch.setattr(jattn.device, "detect", lambda: HOPPER)
    spec, cache_spec = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL | dict(block_size=page))
    chip, lens = Chip("gpu", generation), ([1, 1, 300], [40_000, 700, 9000])
    meta = jattn.CommonAttentionMetadata.from_lengths(*lens, np.zeros((3, 40_000 // page + 1), np.int32), page)
    for name, cuts in ((NAME, False), ("pallas_gpu", True)):
        build = jax.jit(jattn.PagedAttention(spec, cache_spec, name, chip).build)  # one program, not 150
        blocks = np.asarray(build(meta).work.cta)[:, [work_columns.LINE_BLK0, work_columns.LINE_BLK1]]
        assert blocks.any() == cuts


@pytest.mark.parametrize("needs", [(), (Feature.DECODE_BATCH_INVARIANCE,), (Feature.BATCH_INVARIANCE,)])
def test_it_is_chosen_where_invariance_is_needed(needs):
    spec, cache_spec = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL)
    attn = jattn.PagedAttention(spec, cache_spec, platform=HOPPER, needs=needs)
    assert attn.backend_name == (NAME if needs else "pallas_gpu")


def test_a_deterministic_engine_takes_it_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jattn.device, "detect", lambda: HOPPER)
    assert backend_of_engine(deterministic=True) == NAME
    assert backend_of_engine(deterministic=False) == "auto"


def test_every_batch_is_a_write_and_a_launch():
    spec, cache_spec = jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL)
    for lens in ([1, 1], [1, 33]):
        assert lower(spec, cache_spec, lens, backend=NAME) == 2
    one, many = (jattn.PagedAttention(spec, cache_spec, NAME, HOPPER).builder for _ in range(2))
    assert one == many and one.invariant


def test_levels_of_keys_are_refused():
    attn = jattn.PagedAttention(jattn.AttentionSpec(**LAYER), jattn.KVCacheSpec(**POOL), NAME, Chip("gpu", "sm_90"))
    meta = jattn.CommonAttentionMetadata.from_lengths([1], [3], [[0]], 16)
    with pytest.raises(jattn.UnsupportedError, match="not batch-invariant"):
        attn.build_cascade([meta, meta])
    assert not jax.eval_shape(lambda meta: attn.build(meta, common_prefix_len=3), meta).shared
