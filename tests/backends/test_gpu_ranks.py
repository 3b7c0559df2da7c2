"""`pallas_gpu` with a request's keys on several ranks: its numbers, interpreted, beside a witness; what it refuses."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import device, parallel
from jattn.backends import ContextParallel, Feature, pallas_gpu
from jattn.device import Chip
from jattn.ops.rank_launches import VMAPS_SINCE
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


def lowered_layers(in_program: bool, tokens: int = 1, gradient: bool = False, mapped: bool = False) -> str:
    """The module of three layers whose keys are on two Hopper GPUs of one host."""
    hopper, mesh = Chip("gpu", "sm_90"), jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    spec = jattn.AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64)
    cache_spec = jattn.KVCacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_dim=64, layout="HND")
    meta = jattn.CommonAttentionMetadata.from_lengths([tokens], [2000], [[*range(63)]], 32)
    with (
        mock.patch.object(device, "detect", lambda: hopper),
        mock.patch.object(device, "are_peers", lambda devices: True),
        mock.patch.object(parallel, "is_traced", lambda q: in_program),
    ):
        step = parallel.decode_context_parallel(
            spec, cache_spec, mesh, "x", backend="pallas_gpu", dtype=jnp.bfloat16, interleave=8
        )

        def layers(q, k, v, cache):
            for _ in range(3):
                cache, state = step(q, k, v, cache, meta)
                q = (q + state.out).astype(q.dtype)
            return q.astype(jnp.float32).sum() if gradient else (cache, q)

        shape = jax.ShapeDtypeStruct
        rows = [shape((tokens, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
        cache = jax.eval_shape(lambda: jattn.empty_cache(cache_spec, platform=hopper))
        check = jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
        if mapped:
            rows = [shape((2, *row.shape), row.dtype) for row in rows]
            layers = jax.vmap(layers, (0, 0, 0, None))
        run = jax.jit(jax.grad(layers) if gradient else layers)
        return jax.export.export(run, platforms=["cuda"], disabled_checks=[check])(*rows, cache).mlir_module()


@pytest.mark.parametrize("gradient", [False, True])
def test_layers_of_one_program_merge_in_each_others_memory(gradient):
    text = lowered_layers(in_program=True, gradient=gradient)
    assert "merge_ranks" in text and "peer_addresses" in text
    assert ("stablehlo.all_gather" in text) == gradient  # the gradient's collectives are those of jnp


def test_calls_by_themselves_and_many_tokens_merge_by_collectives():
    """A call of one layer would wait for a barrier of all ranks, and many threads cannot all wait for one another."""
    for text in (lowered_layers(in_program=False), lowered_layers(in_program=True, tokens=1025)):
        merges_by_collectives(text)


@pytest.mark.skipif(jax.__version_info__ < VMAPS_SINCE, reason="JAX before 0.12 cannot vmap the kernels")
def test_vmap_merges_by_collectives():
    """It would give each element a slice of what the launches share, and other ranks would write elsewhere."""
    merges_by_collectives(lowered_layers(in_program=True, mapped=True), has_addresses=True)


def merges_by_collectives(text: str, has_addresses: bool = False):
    """has_addresses: a launch has effects, so it stays in a program whose compiled layers do not use its result."""
    assert "stablehlo.all_gather" in text and "merge_ranks" not in text and ("peer_addresses" in text) == has_addresses


class Driver:
    """CUDA's driver with two pairs of GPUs, of which no pair reaches the other."""

    def __init__(self, fails: str = ""):
        self.fails = fails

    def cuDeviceGet(self, handle, number):
        handle._obj.value = 100 + number
        return 3 if self.fails == "get" else 0

    def cuDeviceCanAccessPeer(self, answer, a, b):
        answer._obj.value = (a.value - 100) // 2 == (b.value - 100) // 2
        return 999 if self.fails == "ask" else 0


@pytest.mark.parametrize(
    ("driver", "count", "expected"),
    [(Driver(), 1, True), (Driver(), 2, True), (Driver(), 3, False), (Driver(), 4, False), (None, 4, True),
     (Driver("get"), 4, True), (Driver("ask"), 4, True)],
)  # fmt: skip
def test_launches_write_only_to_gpus_that_the_driver_lets_reach_one_another(driver, count, expected, monkeypatch):
    def library(name):
        if driver is None:
            raise OSError(name)
        return driver

    monkeypatch.setattr(device.ctypes, "CDLL", library)
    device._reach_one_another.cache_clear()
    gpus = [mock.Mock(id=number, local_hardware_id=number) for number in range(count)]
    try:
        assert device.are_peers(gpus) is expected
        assert not device.are_peers(gpus[::-1]) or count == 1
    finally:
        device._reach_one_another.cache_clear()
