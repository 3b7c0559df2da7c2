"""`pallas_tpu` with a request's keys on several ranks: its numbers, interpreted, beside a witness; what it refuses."""

import functools

import pytest
from jax.experimental.pallas import tpu as pltpu

import jattn
from jattn.backends import ContextParallel
from tests.backends.test_pallas_tpu import V6E
from tests.backends.two_ranks import check_keys_on_two_ranks

OPTIONS = {
    "ALiBi, eager": ("eager", 1, dict(has_alibi=True)),
    "window, soft cap, sinks": ("on_wait", 8, dict(sliding_window=20, logits_soft_cap=5.0, has_sinks=True)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_keys_on_two_ranks_are_attention_by_its_definition(name, monkeypatch):
    monkeypatch.setattr(jattn.device, "detect", lambda: V6E)
    mode, interleave, options = OPTIONS[name]
    interpreted = pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode=mode))
    check_keys_on_two_ranks("pallas_tpu", interleave, options, interpreted, storage="native")


def test_auto_takes_the_kernel_and_refuses_a_tree():
    cache_spec = jattn.KVCacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=128)
    layer = functools.partial(jattn.AttentionSpec, num_heads=8, num_kv_heads=2, head_dim=128)
    two = ContextParallel(dcp_axis="x", dcp_world_size=2)
    make = functools.partial(jattn.PagedAttention, cache_spec=cache_spec, platform=V6E, parallel=two)
    assert make(layer(sliding_window=99, has_sinks=True, has_alibi=True)).backend_name == "pallas_tpu"
    with pytest.raises(jattn.UnsupportedError) as refusal:
        make(layer(use_qq_bias=True), backend="pallas_tpu")
    (reason,) = refusal.value.reasons["pallas_tpu"]
    assert reason == "DCP not supported with use_qq_bias=True"
