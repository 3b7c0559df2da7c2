"""Bad arguments for the public functions of attention, MLA, parallelism, backends and layers: see walk.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jattn
from jattn import backends, nn, parallel
from tests.laws.walk import Door, walk

BUILD = jattn.CommonAttentionMetadata.from_lengths
META = BUILD([1, 2], [5, 2], [[1, 2], [3, 0]], 4)
PACKED = BUILD([1, 2], [1, 2], None, 4)
SPEC = jattn.AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8)
CACHE_SPEC = jattn.KVCacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
CACHE = jattn.empty_cache(CACHE_SPEC)
ATTN = jattn.PagedAttention(SPEC, CACHE_SPEC, "sdpa")
PLAN = ATTN.build(META)
Q, ROWS, PARAMS = jnp.ones((3, 4, 8)), jnp.ones((3, 2, 8)), jattn.AttentionParams()
RICH = dataclasses.replace(
    SPEC, has_alibi=True, has_sinks=True, use_qq_bias=True, use_distance_bias=True, output_dtype="int8"
)
RICH_ATTN = jattn.PagedAttention(RICH, CACHE_SPEC, "sdpa")
STATE = jattn.AttentionState.empty(3, 4, 8)
MLA_SPEC = jattn.MLASpec(num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
MLA_CACHE_SPEC = jattn.mla_cache_spec(MLA_SPEC, 4, 4, dtype="float32")
MLA = jattn.MLAAttention(MLA_SPEC, MLA_CACHE_SPEC)
MLA_PLAN, MLA_CACHE = MLA.build(META), MLA.empty_cache()
MLA_PARAMS = jattn.MLAParams(kv_b_proj=jnp.ones((8, 16)))
MLA_CALL = dict(q=jnp.ones((3, 2, 8)), cache=MLA_CACHE, m=MLA_PLAN, params=MLA_PARAMS)
NEW = dict(kv_c=jnp.ones((3, 8)), k_pe=jnp.ones((3, 4)))
MESH = Mesh(np.array(jax.devices()[:2]), ("x",))
TENSOR = parallel.tensor_parallel(SPEC, CACHE_SPEC, MESH, "x", backend="sdpa")
LAYER = nn.AttentionConfig(spec=SPEC, hidden_size=6, rope=nn.Rope(dim=4))
MODULE = nn.PagedAttention(SPEC, 6, rngs=nnx.Rngs(0), backend="sdpa")
ANGLES = nn.Rope(dim=4).angles(jnp.arange(3))


def attend(**params):
    return RICH_ATTN.attend(Q, CACHE, RICH_ATTN.build(META), jattn.AttentionParams(**params))


def attend_with(**functions):
    return jattn.attention(Q, ROWS, ROWS, PACKED, dataclasses.replace(SPEC, **functions), backend="sdpa")


def _split_once(name, **options):
    try:
        backends.split.make_split_backend(name, **options)
    finally:
        if name in jattn.list_backends():
            backends.unregister_backend(name)


DOORS = {
    "PagedAttention": Door(jattn.PagedAttention, dict(
        spec=SPEC, cache_spec=CACHE_SPEC, backend="auto", platform="cpu", dtype="float32", needs=(),
        parallel=backends.ContextParallel()), staged=False),
    "build": Door(ATTN.build, dict(meta=META, common_prefix_len=0, fast_build=False)),
    "build_cascade": Door(ATTN.build_cascade, dict(levels=[META])),
    "__call__": Door(ATTN, dict(q=Q, k=ROWS, v=ROWS, cache=CACHE, m=PLAN, params=PARAMS, angles=ANGLES)),
    "attend": Door(ATTN.attend, dict(q=Q, cache=CACHE, m=PLAN, params=PARAMS)),
    "params": Door(attend, dict(
        alibi_slopes=jnp.ones(4), sinks=np.ones(4, np.float32), q_scale=1.0, k_scale=2.0, v_scale=[1.0, 2.0],
        output_scale=0.1, qq_bias=np.zeros((2, 2)), distance_bias=np.zeros((4, 3)))),
    "update_block_table": Door(ATTN.update_block_table, dict(
        m=PLAN, block_table=META.block_table, slot_mapping=META.slot_mapping)),
    "for_layer": Door(ATTN.for_layer, dict(m=PLAN, layer=0, blocks_per_layer=2)),
    "paged_attention": Door(jattn.paged_attention, dict(
        q=Q, cache=CACHE, meta=META, spec=SPEC, params=PARAMS, backend="sdpa", platform="cpu")),
    "cascade_attention": Door(jattn.cascade_attention, dict(
        q=Q, cache=CACHE, levels=[META], spec=SPEC, params=PARAMS, backend="sdpa")),
    "attention": Door(jattn.attention, dict(
        q=Q, k=ROWS, v=ROWS, meta=PACKED, spec=SPEC, params=PARAMS, backend="sdpa")),
    "functions": Door(attend_with, dict(mask_fn=lambda h, q, k: k <= q, score_fn=lambda s, h, q, k: s)),
    "mask_fn's result": Door(lambda result: attend_with(mask_fn=lambda h, q, k: result), dict(result=True),
                             also=dict(result=("mask_fn",))),
    "score_fn's result": Door(lambda result: attend_with(score_fn=lambda s, h, q, k: result), dict(result=1.0),
                              also=dict(result=("score_fn",))),
    "merge": Door(lambda one, two: jattn.merge(one, two), dict(one=STATE, two=STATE),
                  also=dict(one=("states[0]",), two=("states[1]",))),
    "merge's arrays": Door(lambda **x: jattn.merge(jattn.AttentionState(**x), STATE), dict(
        out=STATE.out, lse=STATE.lse)),
    "AttentionState.empty": Door(jattn.AttentionState.empty, dict(
        num_tokens=2, num_heads=2, v_head_dim=4, dtype="float32")),
    "MLAAttention": Door(jattn.MLAAttention, dict(
        spec=MLA_SPEC, cache_spec=MLA_CACHE_SPEC, backend="auto", platform="cpu", parallel=backends.ContextParallel()),
        staged=False),
    "mla.empty_cache": Door(MLA.empty_cache, dict(fill=0.0, storage="bits")),
    "mla.prepare_params": Door(MLA.prepare_params, dict(params=MLA_PARAMS)),
    "mla.build": Door(MLA.build, dict(meta=META, common_prefix_len=0, fast_build=False)),
    "mla.write": Door(MLA.write, NEW | dict(cache=MLA_CACHE, m=MLA_PLAN, params=MLA_PARAMS)),
    "mla.__call__": Door(MLA, MLA_CALL | NEW, walked=("kv_c", "k_pe", "m")),
    "mla.attend": Door(MLA.attend, MLA_CALL | dict(topk_indices=jnp.zeros((3, 2), jnp.int32))),
    "mla.forward_mqa": Door(MLA.forward_mqa, MLA_CALL, walked=("params",)),
    "mla.prefill_mha": Door(MLA.prefill_mha, MLA_CALL | NEW, walked=("kv_c", "k_pe")),
    "MLAParams": Door(lambda **p: MLA.attend(**MLA_CALL | dict(params=jattn.MLAParams(**p))), dict(
        kv_b_proj=jnp.ones((8, 16)), kv_c_scale=1.0, k_pe_scale=[2.0])),
    "explain": Door(jattn.explain, dict(spec=SPEC, cache_spec=CACHE_SPEC, platform="cpu", needs=(), dtype="float32"),
                    staged=False),
    "resolve": Door(backends.resolve, dict(spec=SPEC, cache_spec=CACHE_SPEC, platform="cpu", backend="auto", needs=(),
                                           dtypes=("float32",)), staged=False),
    "ContextParallel": Door(backends.ContextParallel, dict(
        dcp_axis="x", dcp_world_size=2, pcp_axis="y", pcp_world_size=2, interleave=1), staged=False),
    "rank_spec": Door(parallel.rank_spec, dict(spec=SPEC, axis="x", world=2), staged=False),
    "rank_cache_spec": Door(parallel.rank_cache_spec, dict(cache_spec=CACHE_SPEC, world=2), staged=False),
    "head_partition": Door(parallel.head_partition, dict(cache_spec=CACHE_SPEC, axis="x"), staged=False),
    "tensor_parallel": Door(parallel.tensor_parallel, dict(
        spec=SPEC, cache_spec=CACHE_SPEC, mesh=MESH, axis="x", backend="sdpa", dtype="float32"), staged=False),
    "decode_context_parallel": Door(parallel.decode_context_parallel, dict(
        spec=SPEC, cache_spec=CACHE_SPEC, mesh=MESH, axis="x", interleave=1, backend="sdpa", dtype="float32"),
        staged=False),
    "a step over heads": Door(TENSOR, dict(q=Q, k=ROWS, v=ROWS, cache=CACHE, meta=META, params=PARAMS)),
    "AttentionConfig": Door(nn.AttentionConfig, dict(
        spec=SPEC, hidden_size=6, rope=nn.Rope(dim=4), qk_norm=nn.Norm(), qk_norm_all_heads=True,
        qk_norm_scale_per_head=False, temperature_tuning_offset=1,
        qk_norm_after_rope=True, qkv_bias=True, out_bias=True, fused_qkv=True, clip_qkv=1.0, alibi_slopes=None,
        temperature_tuning=(8.0, 0.1)), staged=False),
    "Norm": Door(nn.Norm, dict(kind="rms", eps=1e-6, one_plus=True, has_scale=True, has_bias=False), staged=False),
    "a norm": Door(nn.Norm(), dict(weights={"scale": jnp.ones(8)}, x=ROWS)),
    "Rope": Door(nn.Rope, dict(dim=4, theta=1e4, scaling=nn.RopeScaling(), interleaved=True), staged=False),
    "angles": Door(nn.Rope(dim=4, scaling=nn.DynamicNTKRopeScaling(factor=2.0, trained_length=8)).angles, dict(
        positions=jnp.arange(3), lengths=jnp.arange(3))),
    "rotate": Door(nn.rotate, dict(x=ROWS, angles=ANGLES)),
    "nn.apply_attention": Door(nn.apply_attention, dict(
        config=MODULE.config, weights=MODULE.weights, x=jnp.ones((3, 6)), meta=META, cache=CACHE, plan=None,
        backend="sdpa"), also=dict(plan=("call m = attn.build",), cache=("k has",))),
    "nn.PagedAttention": Door(MODULE, dict(x=jnp.ones((3, 6)), meta=PACKED)),
    "make_split_backend": Door(
        _split_once,
        dict(name="walked", decode="sdpa", prefill=None, decode_threshold=1, before="sdpa"), staged=False,
        walked=("decode", "prefill", "decode_threshold", "before"),
        also=dict(decode=("backend",), prefill=("backend",))),
}  # fmt: skip


@pytest.mark.parametrize("name", DOORS)
def test_every_argument_of_every_door_is_refused_by_a_sentence_or_taken(name):
    found = walk(DOORS[name])
    assert not found, "\n".join([f"{len(found)}:", *found])
