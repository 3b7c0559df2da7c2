"""Batches: the metadata that all layers of a step share, and its utilities."""

from jattn.metadata.buckets import Buckets
from jattn.metadata.check import check_host
from jattn.metadata.common import CommonAttentionMetadata

__all__ = ["Buckets", "CommonAttentionMetadata", "check_host"]
