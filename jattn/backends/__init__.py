"""Backends. AttentionBackend lists what one supports, its builder plans a batch, its AttentionImpl computes."""

from jattn.backends.base import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    fits,
)
from jattn.backends.capability import Question, is_quantized_kv_cache
from jattn.backends.parallel import ContextParallel
from jattn.backends.registry import (
    BackendReport,
    explain,
    list_backends,
    register_backend,
    resolve,
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
    subclass_attention_metadata_builder,
    unregister_backend,
)
from jattn.types import AttentionCGSupport, AttentionType, Feature, MultipleOf

__all__ = [
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionLayer",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionType",
    "BackendReport",
    "ContextParallel",
    "Feature",
    "MultipleOf",
    "Question",
    "explain",
    "fits",
    "is_quantized_kv_cache",
    "list_backends",
    "register_backend",
    "resolve",
    "subclass_attention_backend",
    "subclass_attention_backend_with_overrides",
    "subclass_attention_metadata_builder",
    "unregister_backend",
]
