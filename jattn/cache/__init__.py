"""The paged KV cache: its spec, storage, writes and copies of blocks."""

from jattn.cache.layout import KVCacheSpec, PagedKV, empty_cache
from jattn.cache.transfer import copy_blocks, swap_blocks
from jattn.cache.write import write_kv

__all__ = [
    "KVCacheSpec",
    "PagedKV",
    "copy_blocks",
    "empty_cache",
    "swap_blocks",
    "write_kv",
]
