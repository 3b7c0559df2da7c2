"""Batches: the metadata that all layers of a step share, and its utilities."""

from jattn.metadata.buckets import Buckets
from jattn.metadata.cascade import cascade_levels, use_cascade_attention
from jattn.metadata.check import check_host
from jattn.metadata.common import CommonAttentionMetadata
from jattn.metadata.coverage import can_run_in_cudagraph, required_support
from jattn.metadata.drafting import draft_metadata, next_decode, update_block_table
from jattn.metadata.encoder import (
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    keys_of,
    lens_for,
    queries_of,
)
from jattn.metadata.local import (
    BlockTableRemap,
    make_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
)
from jattn.metadata.logits import make_kv_sharing_fast_prefill_common_attn_metadata
from jattn.metadata.pages import (
    block_table_from_csr,
    csr_from_block_table,
    get_batch_indices_positions,
    get_seq_lens,
    split_block_table,
)
from jattn.metadata.parallel import get_dcp_local_seq_lens, with_dcp
from jattn.metadata.parameters import (
    GlobalHyperparameters,
    get_kv_cache_layout,
    get_per_layer_parameters,
    group_by_parameters,
    infer_global_hyperparameters,
)
from jattn.metadata.ranges import compute_mm_prefix_range_tensor, fill_mm_prefix_query_ranges
from jattn.metadata.reorder import (
    apply_permutation,
    batch_regions,
    decode_threshold,
    inverse_permutation,
    region_permutation,
    reorder_batch_to_split_decodes_and_prefills,
    token_permutation,
)
from jattn.metadata.schedule import get_scheduler_metadata, schedule_plan
from jattn.metadata.slices import (
    UbatchSlice,
    decode_metadata,
    prefill_metadata,
    slice_query_start_locs,
    slice_requests,
    split_attn_metadata,
    ubatch_slices,
)
from jattn.metadata.speculative import reshape_attn_output_for_spec_decode, reshape_query_for_spec_decode
from jattn.metadata.split import (
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)

__all__ = [
    # the batch
    "Buckets",
    "CommonAttentionMetadata",
    "check_host",
    # its parts and their order
    "UbatchSlice",
    "apply_permutation",
    "batch_regions",
    "can_run_in_cudagraph",
    "decode_metadata",
    "decode_threshold",
    "inverse_permutation",
    "prefill_metadata",
    "region_permutation",
    "reorder_batch_to_split_decodes_and_prefills",
    "required_support",
    "slice_query_start_locs",
    "slice_requests",
    "split_attn_metadata",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
    "split_prefill_chunks",
    "token_permutation",
    "ubatch_slices",
    # other batches made from it
    "BlockTableRemap",
    "cascade_levels",
    "draft_metadata",
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    "make_local_attention_virtual_batches",
    "max_local_attention_virtual_batches",
    "next_decode",
    "update_block_table",
    "use_cascade_attention",
    "with_dcp",
    # plans
    "GlobalHyperparameters",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "get_scheduler_metadata",
    "group_by_parameters",
    "infer_global_hyperparameters",
    "schedule_plan",
    # lengths, pages, ranges
    "block_table_from_csr",
    "compute_mm_prefix_range_tensor",
    "csr_from_block_table",
    "fill_mm_prefix_query_ranges",
    "get_batch_indices_positions",
    "get_dcp_local_seq_lens",
    "get_seq_len_block_table_args",
    "get_seq_lens",
    "is_all_cross_attn_metadata_set",
    "is_all_encoder_attn_metadata_set",
    "lens_for",
    "keys_of",
    "queries_of",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "split_block_table",
]
