"""AttentionImpl: its attributes of the layer, and its ranks in a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jattn.backends import AttentionLayer, AttentionType, ContextParallel
from jattn.backends.sdpa import SdpaImpl
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.spec import AttentionParams, AttentionSpec
from tests.backends.toy import CACHE, CPU, SPEC, ToyImpl


def test_an_impl_shows_its_layer_and_hashes_by_value():
    spec = dataclasses.replace(SPEC, sliding_window=4, logits_soft_cap=3.0)
    impl = ToyImpl(spec, CACHE, CPU)
    assert (impl.num_heads, impl.num_kv_heads, impl.num_queries_per_kv, impl.head_size) == (4, 2, 2, 8)
    assert (impl.scale, impl.sliding_window, impl.logits_soft_cap) == (8**-0.5, (3, 0), 3.0)
    assert (impl.attn_type, impl.kv_cache_dtype) == (AttentionType.DECODER, "float32")
    assert ToyImpl(spec, None, CPU).kv_cache_dtype == "auto"
    assert hash(impl) == hash(ToyImpl(dataclasses.replace(spec), CACHE, Chip("cpu")))
    flags = ("can_return_lse_for_decode", "supports_pcp", "supports_quant_query_input", "need_to_return_lse_for_decode")
    assert not any(getattr(impl, flag) for flag in flags)
    assert not impl.supports_mtp_with_cp_non_trivial_interleave_size
    assert not impl.fused_output_quant_supported("fp8")
    assert SdpaImpl(spec, CACHE, CPU).fused_output_quant_supported("fp8")
    assert not SdpaImpl(spec, CACHE, CPU).fused_output_quant_supported("nvfp4")
    params = AttentionParams()
    assert impl.prepare_params(params) is params


def test_a_layer_is_whatever_has_a_spec_params_and_a_call():
    @dataclasses.dataclass
    class Layer:
        spec: AttentionSpec
        params: AttentionParams

        def __call__(self, q, k, v, cache, m):
            return cache, None

    assert isinstance(Layer(SPEC, AttentionParams()), AttentionLayer)
    assert not isinstance(SPEC, AttentionLayer)


def test_an_impl_without_packed_attention_says_so():
    with pytest.raises(UnsupportedError, match="ToyImpl attends over pages only"):
        ToyImpl(SPEC, None, CPU).forward_packed(None, None, None, None, None)


def test_context_parallel_ranks_are_the_meshs():
    parallel = ContextParallel(dcp_axis="d", dcp_world_size=2, pcp_axis="p", pcp_world_size=2)
    assert parallel.total_cp_world_size == 4
    mesh = jax.make_mesh((2, 2), ("p", "d"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ranks = jax.shard_map(
        lambda: jnp.asarray([[parallel.pcp_rank(), parallel.dcp_rank(), parallel.total_cp_rank()]]),
        mesh=mesh,
        in_specs=(),
        out_specs=P(("p", "d")),
    )()
    np.testing.assert_array_equal(ranks, [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]])


def test_without_context_parallelism_there_is_one_rank():
    alone = ContextParallel()
    assert (alone.total_cp_world_size, alone.total_cp_rank()) == (1, 0)
    with pytest.raises(ValueError, match="dcp_axis=None with dcp_world_size=2: a size > 1 needs an axis"):
        ContextParallel(dcp_world_size=2)
    with pytest.raises(ValueError, match="one_memory=True says how .* but dcp_axis=None"):
        ContextParallel(one_memory=True)


def test_lse_is_needed_when_ranks_share_a_request():
    class Merging(ToyImpl):
        can_return_lse_for_decode = True

    shared = ContextParallel(dcp_axis="d", dcp_world_size=2)
    assert Merging(SPEC, CACHE, CPU, shared).need_to_return_lse_for_decode
    assert not ToyImpl(SPEC, CACHE, CPU, shared).need_to_return_lse_for_decode
    assert not Merging(SPEC, CACHE, CPU).need_to_return_lse_for_decode
