"""Bad arguments for the public functions of batches, specs and caches: see walk.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import metadata
from jattn.compat import vllm
from jattn.compat.vllm import join_kv_cache, split_kv_cache
from tests.laws.walk import Door, walk

TABLE = np.array([[1, 2], [3, 0]], np.int32)
BUILD = jattn.CommonAttentionMetadata.from_lengths
META = BUILD([1, 2], [5, 2], TABLE, 4, num_tokens=4, num_reqs=2)
DECODES = BUILD([1, 1], [5, 2], TABLE, 4)
CROSS = BUILD([1], [2], [[0]], 4, encoder_seq_lens=[3], cross_block_table=[[1]])
SPEC = jattn.AttentionSpec(num_heads=2, head_dim=8)
LAYERS = jattn.get_per_layer_parameters({"a": SPEC})
CACHE_SPEC = jattn.KVCacheSpec(num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
CACHE = jattn.empty_cache(CACHE_SPEC)
ROWS = jnp.ones((3, 2, 8))
START, LENS = np.array([0, 1, 3], np.int32), np.array([5, 2], np.int32)
MLA = dict(num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
SPLIT = jattn.split_decodes_and_prefills(META)
LOGITS = META.replace(logits_indices=np.array([0, 2], np.int32))

DOORS = {
    "from_lengths": Door(BUILD, dict(
        query_lens=[1, 2], seq_lens=[5, 2], block_table=TABLE, block_size=4, num_tokens=4, num_reqs=3, max_blocks=2,
        causal=True, encoder_seq_lens=[3, 1], cross_block_table=TABLE, num_encoder_tokens=8,
        mm_prefix_ranges=[[(0, 1)], []], rswa_prefix_lens=[1, 0],
    ), also=dict(mm_prefix_ranges=("ranges",)), staged=False),
    "from_traced": Door(jattn.CommonAttentionMetadata.from_traced, dict(
        query_start_loc=START, seq_lens=LENS, block_table=TABLE, block_size=4, num_tokens=4, max_query_len=4,
        max_seq_len=8, causal=True), also=dict(query_start_loc=("seq_lens",), seq_lens=("query_start_loc",))),
    "replace": Door(lambda causal: META.replace(causal=causal), dict(causal=True)),
    "padded": Door(META.padded, dict(num_tokens=8, num_reqs=4), staged=False),
    "unpadded": Door(META.unpadded, dict(num_tokens=3, num_reqs=2), staged=False),
    "advanced": Door(DECODES.advanced, dict(block_size=4)),
    "check_host": Door(jattn.check_host, dict(meta=META, cache_spec=CACHE_SPEC), staged=False),
    "Buckets": Door(jattn.Buckets, dict(tokens=(1, 2), reqs=(1,), blocks=(4,)), staged=False),
    "Buckets.powers_of_two": Door(jattn.Buckets.powers_of_two, dict(max_tokens=4, max_reqs=2, max_blocks=8),
                                  staged=False),
    "Buckets.sizes": Door(jattn.Buckets((1, 8), (4,), (4,)).sizes, dict(num_tokens=4, num_reqs=2, num_blocks=3),
                          staged=False),
    "Buckets.sizes_for": Door(jattn.Buckets((1, 8), (4,), (4,)).sizes_for,
                              dict(query_lens=[1, 2], seq_lens=[5, 2], block_size=4),
                              also=dict(block_size=("num_blocks",)), staged=False),
    "cascade_levels": Door(jattn.cascade_levels, dict(meta=BUILD([1, 1], [5, 6], [[1, 2], [1, 0]], 4), prefixes=4,
                                                      block_size=4), also=dict(prefixes=("level",)), staged=False),
    "use_cascade_attention": Door(metadata.use_cascade_attention, dict(
        common_prefix_len=512, query_lens=[1] * 9, num_query_heads=4, num_kv_heads=2, use_alibi=False,
        use_sliding_window=False, use_local_attention=False, num_sms=2, dcp_world_size=1), staged=False),
    "required_support": Door(vllm.required_support, dict(meta=META), staged=False),
    "can_run_in_cudagraph": Door(vllm.can_run_in_cudagraph,
                                 dict(meta=META, support=jattn.backends.AttentionCGSupport(3)),
                                 staged=False),
    "next_decode": Door(vllm.next_decode, dict(meta=META, block_size=4)),
    "draft_metadata": Door(vllm.draft_metadata, dict(meta=DECODES, draft_index=1, block_size=4)),
    "update_block_table": Door(vllm.update_block_table, dict(
        meta=META, block_table=TABLE, slot_mapping=META.slot_mapping)),
    **{f.__name__: Door(f, dict(meta=CROSS, attn_type="decoder"))
       for f in (vllm.lens_for, metadata.keys_of, metadata.queries_of, vllm.get_seq_len_block_table_args)},
    **{f.__name__: Door(f, dict(meta=CROSS))
       for f in (vllm.is_all_encoder_attn_metadata_set, vllm.is_all_cross_attn_metadata_set)},
    "max_local_attention_virtual_batches": Door(vllm.max_local_attention_virtual_batches, dict(
        attn_chunk_size=8, max_num_reqs=2, max_num_tokens=4), staged=False),
    "make_local_attention_virtual_batches": Door(jattn.make_local_attention_virtual_batches, dict(
        attn_chunk_size=8, batch=META, block_size=4), also=dict(batch=("query_start_loc", "seq_lens"))),
    "local arrays": Door(lambda **a: jattn.make_local_attention_virtual_batches(*a.values()), dict(
        attn_chunk_size=8, query_start_loc_np=START, seq_lens_np=LENS, block_table=TABLE, block_size=4), staged=False),
    "BlockTableRemap": Door(jattn.make_local_attention_virtual_batches(8, META, 4)[1], dict(block_table=TABLE)),
    "make_kv_sharing_fast_prefill": Door(vllm.make_kv_sharing_fast_prefill_common_attn_metadata, dict(
        common=LOGITS, num_logits_indices=2)),
    "split_block_table": Door(vllm.split_block_table, dict(block_table=TABLE, ratio=2), staged=False),
    "csr_from_block_table": Door(vllm.csr_from_block_table, dict(block_table=TABLE, seq_lens=LENS, block_size=4,
                                                              num_indices=4)),
    "block_table_from_csr": Door(vllm.block_table_from_csr, dict(indptr=START, indices=[1, 2, 3], max_blocks=2)),
    "get_seq_lens": Door(vllm.get_seq_lens, dict(indptr=START, last_page_len=[1, 2], page_size=4),
                         also=dict(indptr=("last_page_len",))),
    "get_batch_indices_positions": Door(vllm.get_batch_indices_positions,
                                        dict(append_indptr=START, seq_lens=LENS, nnz=4),
                                        also=dict(append_indptr=("seq_lens",))),
    "get_dcp_local_seq_lens": Door(jattn.get_dcp_local_seq_lens, dict(seq_lens=LENS, dcp_size=2, rank=0, interleave=1)),
    "with_dcp": Door(metadata.with_dcp, dict(meta=META, dcp_size=2, rank=0, interleave=1)),
    "get_per_layer_parameters": Door(jattn.get_per_layer_parameters, dict(specs={"a": SPEC}), staged=False),
    "infer_global_hyperparameters": Door(jattn.infer_global_hyperparameters, dict(per_layer_params=LAYERS, strict=True),
                                         staged=False),
    "group_by_parameters": Door(vllm.group_by_parameters, dict(per_layer_params=LAYERS), staged=False),
    "get_kv_cache_layout": Door(jattn.get_kv_cache_layout, dict(requested="HND", supported=[("HND",)], preferred="HND"),
                                staged=False),
    "compute_mm_prefix_range_tensor": Door(metadata.compute_mm_prefix_range_tensor, dict(
        ranges=[[(0, 1)], []], num_reqs=2, max_ranges=2), also=dict(num_reqs=("request",)), staged=False),
    "fill_mm_prefix_query_ranges": Door(metadata.fill_mm_prefix_query_ranges, dict(
        meta=META, ranges=np.zeros((2, 1, 2), np.int32), position=np.zeros(4, np.int32))),
    "reorder": Door(jattn.reorder_batch_to_split_decodes_and_prefills, dict(
        common=META, decode_threshold=1, is_prefilling=[True, False])),
    "batch_regions": Door(vllm.batch_regions, dict(query_lens=[1, 2], num_computed_tokens=[4, 0], decode_threshold=1,
                                                is_prefilling=[True, False]),
                          also=dict(query_lens=("num_computed_tokens",))),
    "region_permutation": Door(vllm.region_permutation, dict(region=[0, 1])),
    "inverse_permutation": Door(vllm.inverse_permutation, dict(perm=[1, 0])),
    "token_permutation": Door(vllm.token_permutation, dict(meta=META, perm=[1, 0])),
    "apply_permutation": Door(vllm.apply_permutation, dict(meta=META, perm=[1, 0])),
    "decode_threshold": Door(vllm.decode_threshold, dict(
        threshold=1, num_speculative_tokens=2, dcp_size=1, supports_spec_as_decode=True,
        supports_dcp_with_varlen=False), staged=False),
    "get_scheduler_metadata": Door(jattn.get_scheduler_metadata, dict(
        meta=META, spec=SPEC, num_workers=2, kv_tile=16, max_query_rows=32, enable_kv_split=True, max_split_queries=1,
        fixed_split_tokens=16), walked=("meta", "spec", "enable_kv_split")),
    "schedule_plan": Door(vllm.schedule_plan, dict(spec=SPEC, num_workers=2, kv_tile=16, max_query_rows=32,
                                                max_split_queries=1, fixed_split_tokens=16), staged=False),
    "slice_requests": Door(vllm.slice_requests, dict(meta=META, start=0, stop=1, token_start=0, token_stop=1),
                           staged=False),
    "decode_metadata": Door(vllm.decode_metadata, dict(meta=META, split=SPLIT), staged=False),
    "prefill_metadata": Door(vllm.prefill_metadata, dict(meta=META, split=SPLIT), staged=False),
    "slice_query_start_locs": Door(vllm.slice_query_start_locs, dict(query_start_loc=START, request_slice=slice(0, 1))),
    "ubatch_slices": Door(vllm.ubatch_slices, dict(meta=META, num_ubatches=2, split_points=[1]), staged=False),
    "split_attn_metadata": Door(vllm.split_attn_metadata, dict(slices=vllm.ubatch_slices(META), meta=META),
                                staged=False),
    "reshape_query_for_spec_decode": Door(vllm.reshape_query_for_spec_decode, dict(query=ROWS, batch_size=1)),
    "reshape_attn_output_for_spec_decode": Door(vllm.reshape_attn_output_for_spec_decode, dict(output=ROWS)),
    "split_decodes_and_prefills": Door(jattn.split_decodes_and_prefills, dict(
        common=META, decode_threshold=1, require_uniform=False, treat_short_extends_as_decodes=False,
        is_prefilling=[True, False]), staged=False),
    "split_decodes_prefills_and_extends": Door(vllm.split_decodes_prefills_and_extends, dict(
        common=META, decode_threshold=1), staged=False),
    "split_prefill_chunks": Door(vllm.split_prefill_chunks, dict(seq_lens=LENS, workspace_size=8, request_offset=1),
                                 staged=False),
    "AttentionSpec": Door(jattn.AttentionSpec, dict(
        num_heads=2, head_dim=8, num_kv_heads=1, v_head_dim=8, scale=0.5, attn_type="decoder", sliding_window=4,
        chunk_size=None, chunk_lookback=0, logits_soft_cap=1.0, has_alibi=True, use_alibi_sqrt=True, has_sinks=False,
        use_rswa=True, use_mm_prefix=True, mm_prefix_clamp_sliding_window=False, use_qq_bias=False,
        use_distance_bias=False, mask_fn=None, score_fn=None, output_dtype="int8"), staged=False),
    "AttentionParams.check_host": Door(lambda **p: jattn.AttentionParams(**p).check_host(), dict(
        q_scale=1.0, k_scale=[1.0], v_scale=2.0, output_scale=1), staged=False),
    "MLASpec": Door(jattn.MLASpec, MLA | dict(
        q_lora_rank=4, scale=0.5, sliding_window=4, chunk_size=8, logits_soft_cap=1.0, has_alibi=True, has_sinks=False,
        mask_fn=None, score_fn=None), staged=False),
    "KVCacheSpec": Door(jattn.KVCacheSpec, dict(
        num_blocks=4, block_size=4, num_kv_heads=2, head_dim=8, v_head_dim=4, dtype="int8", layout="NHD",
        quant="per_head"), staged=False),
    "mla_cache_spec": Door(jattn.mla_cache_spec, dict(
        spec=jattn.MLASpec(**MLA), num_blocks=4, block_size=4, dtype="int8", quant="per_tensor", layout="auto"),
        staged=False),
    "empty_cache": Door(jattn.empty_cache, dict(spec=CACHE_SPEC, fill=0.0, platform="cpu", storage="bits")),
    "PagedKV.from_logical": Door(jattn.PagedKV.from_logical, dict(
        spec=CACHE_SPEC, k=np.ones((4, 4, 2, 8)), v=np.ones((4, 4, 2, 8)), params=jattn.AttentionParams(),
        storage="bits")),
    "write_kv": Door(jattn.write_kv, dict(cache=CACHE, k=ROWS, v=ROWS, slot_mapping=[0, 1, -1],
                                          params=jattn.AttentionParams())),
    "write_kv's scales": Door(lambda **p: jattn.write_kv(CACHE, ROWS, ROWS, [0, 1], jattn.AttentionParams(**p)),
                              dict(k_scale=1.0, v_scale=2.0)),
    "copy_blocks": Door(jattn.copy_blocks, dict(cache=CACHE, src_dst=[[0, 1]])),
    "swap_blocks": Door(jattn.swap_blocks, dict(src_cache=CACHE, dst_cache=CACHE, src_dst=[[0, 1]])),
    "split_kv_cache": Door(split_kv_cache, dict(
        kv_cache=np.zeros((2, 3, 64), np.float32), num_kv_heads=2, head_size=8)),
    "join_kv_cache": Door(join_kv_cache, dict(k=jnp.ones((2, 4, 2, 8)), v=jnp.ones((2, 4, 2, 8)))),
}  # fmt: skip


@pytest.mark.parametrize("name", DOORS)
def test_every_argument_of_every_door_is_refused_by_a_sentence_or_taken(name):
    found = walk(DOORS[name])
    assert not found, "\n".join([f"{len(found)}:", *found])


def test_every_batch_utility_is_walked():
    names = {name for name in metadata.__all__ if callable(getattr(metadata, name)) and name.islower()}
    walked = {door.call.__name__ for door in DOORS.values() if hasattr(door.call, "__name__")}
    assert names <= walked, sorted(names - walked)


def test_good_numbers_stay_good_in_every_form():
    """Lists, numpy of any width, 0-d arrays and jax arrays mean the same batch."""
    plain = BUILD([1, 2], [5, 2], TABLE.tolist(), 4, num_tokens=4)
    for form in (np.int64, np.uint8, np.int32):
        same = BUILD(np.array([1, 2], form), tuple(np.array([5, 2], form)), TABLE.astype(form), form(4),
                     num_tokens=form(4))  # fmt: skip
        assert all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(same)))
    same = BUILD(
        jnp.array([1, 2]), [jnp.int32(5), np.array(2)], jnp.asarray(TABLE), jnp.int32(4), num_tokens=np.array(4)
    )
    assert all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(same)))
    assert jax.tree.structure(plain) == jax.tree.structure(same)
