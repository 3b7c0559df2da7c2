"""vLLM's batch utilities under vLLM's names, for programs and backends that are ported from vLLM.

jattn's own engine does not use them: its backends take the requests of a batch in any order, in one launch.
docs/vllm.md says what each utility is in vLLM and what jattn uses instead.
"""

from jattn.compat.vllm.attention_types import (
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
    lens_for,
)
from jattn.compat.vllm.caches import join_kv_cache, split_kv_cache
from jattn.compat.vllm.decodes_and_prefills import (
    apply_permutation,
    batch_regions,
    decode_threshold,
    inverse_permutation,
    region_permutation,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
    token_permutation,
)
from jattn.compat.vllm.drafting import (
    draft_metadata,
    next_decode,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
    update_block_table,
)
from jattn.compat.vllm.graphs import can_run_in_cudagraph, required_support
from jattn.compat.vllm.kv_sharing import make_kv_sharing_fast_prefill_common_attn_metadata
from jattn.compat.vllm.local import (
    BlockTableRemap,
    make_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
)
from jattn.compat.vllm.pages import (
    block_table_from_csr,
    csr_from_block_table,
    get_batch_indices_positions,
    get_seq_lens,
    split_block_table,
)
from jattn.compat.vllm.parameters import (
    GlobalHyperparameters,
    get_kv_cache_layout,
    get_per_layer_parameters,
    group_by_parameters,
    infer_global_hyperparameters,
)
from jattn.compat.vllm.schedule import get_scheduler_metadata, schedule_plan
from jattn.compat.vllm.slices import (
    UbatchSlice,
    decode_metadata,
    prefill_metadata,
    slice_query_start_locs,
    slice_requests,
    split_attn_metadata,
    ubatch_slices,
)

__all__ = [
    # decodes and prefills
    "apply_permutation",
    "batch_regions",
    "decode_threshold",
    "inverse_permutation",
    "region_permutation",
    "reorder_batch_to_split_decodes_and_prefills",
    "split_decodes_and_prefills",
    "split_decodes_prefills_and_extends",
    "split_prefill_chunks",
    "token_permutation",
    # parts of a batch
    "UbatchSlice",
    "decode_metadata",
    "prefill_metadata",
    "slice_query_start_locs",
    "slice_requests",
    "split_attn_metadata",
    "ubatch_slices",
    # other batches made from it
    "BlockTableRemap",
    "draft_metadata",
    "make_kv_sharing_fast_prefill_common_attn_metadata",
    "make_local_attention_virtual_batches",
    "max_local_attention_virtual_batches",
    "next_decode",
    "reshape_attn_output_for_spec_decode",
    "reshape_query_for_spec_decode",
    "update_block_table",
    # plans and compiled steps
    "GlobalHyperparameters",
    "can_run_in_cudagraph",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "get_scheduler_metadata",
    "group_by_parameters",
    "infer_global_hyperparameters",
    "required_support",
    "schedule_plan",
    # lengths, pages, caches
    "block_table_from_csr",
    "csr_from_block_table",
    "get_batch_indices_positions",
    "get_seq_len_block_table_args",
    "get_seq_lens",
    "is_all_cross_attn_metadata_set",
    "is_all_encoder_attn_metadata_set",
    "join_kv_cache",
    "lens_for",
    "split_block_table",
    "split_kv_cache",
]
