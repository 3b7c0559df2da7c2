"""`pallas_gpu` with a request's keys on several ranks: its numbers, interpreted, beside a witness; what it refuses."""

import functools

import pytest

import jattn
from jattn.backends import ContextParallel, Feature, pallas_gpu
from jattn.device import Chip
from tests.backends.gpu_interpreted import INTERPRETS, interpreted_warps
from tests.backends.two_ranks import check_keys_on_two_ranks

OPTIONS = {"plain": {}, "window, soft cap, sinks": dict(sliding_window=20, logits_soft_cap=5.0, has_sinks=True)}


@pytest.mark.slow
@INTERPRETS
@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize("name", OPTIONS)
def test_keys_on_two_ranks_are_attention_by_its_definition(name, interleave):
    check_keys_on_two_ranks("pallas_gpu", interleave, OPTIONS[name], interpreted_warps(), platform="cpu")


TWO = ContextParallel(dcp_axis="x", dcp_world_size=2)


def test_auto_takes_the_kernel_on_hopper_and_refuses_what_needs_positions():
    cache_spec = jattn.KVCacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=128)
    layer = functools.partial(jattn.AttentionSpec, num_heads=8, num_kv_heads=2, head_dim=128)
    make = functools.partial(jattn.PagedAttention, cache_spec=cache_spec, platform=Chip("gpu", "sm_90"), parallel=TWO)
    assert make(layer(sliding_window=99, has_sinks=True)).backend_name == "pallas_gpu"
    with pytest.raises(jattn.UnsupportedError) as refusal:
        make(layer(has_alibi=True), backend="pallas_gpu")
    (reason,) = refusal.value.reasons["pallas_gpu"]
    assert (
        reason.startswith("DCP not supported with has_alibi=True")
        and Feature.DCP in pallas_gpu.PallasGpuBackend.features
    )
    with pytest.raises(jattn.UnsupportedError, match="a cascade does not support dcp_world_size > 1"):
        make(layer()).build_cascade((jattn.CommonAttentionMetadata.from_lengths([1], [9], [[1]], 16),))
