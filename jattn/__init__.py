"""jattn: paged attention for JAX with functional metadata, and the same numbers on every backend."""

# The layer
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import AttentionType

# The cache
from jattn.cache import KVCacheSpec, PagedKV, copy_blocks, empty_cache, swap_blocks, write_kv

# The batch
from jattn.metadata import Buckets, CommonAttentionMetadata, cascade_levels, check_host

# Attention
from jattn.attention import PagedAttention, attention, cascade_attention, paged_attention
from jattn.ops import AttentionState, merge

# Multi-head latent attention
from jattn.cache.latent import mla_cache_spec
from jattn.mla import MLAAttention
from jattn.mla_spec import MLAParams, MLASpec

# Which backend computes, and why not the others
from jattn.backends import BackendReport, explain, list_backends, register_backend
from jattn.errors import UnsupportedError
from jattn.types import Feature

# Several devices
from jattn.parallel import decode_context_parallel, tensor_parallel

# Layers and models
from jattn import models, nn

# Serving
from jattn.embedder import Embedder
from jattn.engine import Engine, RequestOutput, SamplingParams

# Batch utilities for programs ported from vLLM: see jattn.compat.vllm
from jattn.compat.vllm import (
    get_kv_cache_layout,
    get_per_layer_parameters,
    get_scheduler_metadata,
    infer_global_hyperparameters,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    split_decodes_and_prefills,
)
from jattn.metadata import get_dcp_local_seq_lens

__version__ = "0.1.0"

__all__ = [
    # the layer
    "AttentionParams",
    "AttentionSpec",
    "AttentionType",
    # the cache
    "KVCacheSpec",
    "PagedKV",
    "copy_blocks",
    "empty_cache",
    "swap_blocks",
    "write_kv",
    # the batch
    "Buckets",
    "CommonAttentionMetadata",
    "cascade_levels",
    "check_host",
    # attention
    "AttentionState",
    "PagedAttention",
    "attention",
    "cascade_attention",
    "merge",
    "paged_attention",
    # multi-head latent attention
    "MLAAttention",
    "MLAParams",
    "MLASpec",
    "mla_cache_spec",
    # the choice of a backend
    "BackendReport",
    "Feature",
    "UnsupportedError",
    "explain",
    "list_backends",
    "register_backend",
    # several devices
    "decode_context_parallel",
    "tensor_parallel",
    # layers and models
    "models",
    "nn",
    # serving
    "Embedder",
    "Engine",
    "RequestOutput",
    "SamplingParams",
    # for programs ported from vLLM
    "get_dcp_local_seq_lens",
    "get_kv_cache_layout",
    "get_per_layer_parameters",
    "get_scheduler_metadata",
    "infer_global_hyperparameters",
    "make_local_attention_virtual_batches",
    "reorder_batch_to_split_decodes_and_prefills",
    "split_decodes_and_prefills",
]
