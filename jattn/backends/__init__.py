"""Backends: what each can do (AttentionBackend), plans (its builder) and computes (AttentionImpl)."""

from jattn.backends.backend import AttentionBackend
from jattn.backends.builder import AttentionMetadataBuilder, fits
from jattn.backends.derive import (
    subclass_attention_backend,
    subclass_attention_backend_with_overrides,
    subclass_attention_metadata_builder,
)
from jattn.backends.feature import Feature
from jattn.backends.impl import AttentionImpl
from jattn.backends.layer import AttentionLayer
from jattn.backends.metadata import AttentionMetadata
from jattn.backends.parallel import ContextParallel
from jattn.backends.question import Question, is_quantized_kv_cache
from jattn.backends.registry import list_backends, register_backend, unregister_backend
from jattn.backends.select import BackendReport, explain, resolve
from jattn.types import AttentionCGSupport, AttentionType, MultipleOf

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
