"""Batches: the metadata that all layers of a step share. vLLM's batch utilities are in jattn.compat.vllm."""

from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.metadata.buckets import Buckets
from jattn.metadata.cascade import cascade_levels, use_cascade_attention
from jattn.metadata.check import check_host
from jattn.metadata.lengths import compute_mm_prefix_range_tensor
from jattn.metadata.mm_prefix import fill_mm_prefix_query_ranges
from jattn.metadata.parallel import get_dcp_local_seq_lens, with_dcp

__all__ = [
    # the batch
    "Buckets",
    "CommonAttentionMetadata",
    "check_host",
    "keys_of",
    "queries_of",
    # prefixes shared between requests, spans that see both ways, keys on several ranks
    "cascade_levels",
    "compute_mm_prefix_range_tensor",
    "fill_mm_prefix_query_ranges",
    "get_dcp_local_seq_lens",
    "use_cascade_attention",
    "with_dcp",
]
