"""PagedKernelBackend: a backend over a kernel that says itself, from its static arguments, what it cannot do."""

import dataclasses

from jattn.backends.base import AttentionBackend
from jattn.backends.capability import without_refused_options
from jattn.cache import KVCacheSpec
from jattn.cache.write import packed_page_spec
from jattn.device import Chip
from jattn.spec import AttentionSpec


class PagedKernelBackend(AttentionBackend):
    """Adds the kernel's reasons to those of the lists. Packed keys are asked about as a cache of one page."""

    @classmethod
    def kernel_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec, chip: Chip, dtype: str) -> list[str]:
        """Every reason why the kernel cannot take queries of `dtype` of this layer over this cache on this chip."""
        raise NotImplementedError

    @classmethod
    def usual_query_dtype(cls, cache_spec: KVCacheSpec) -> str:
        """The query dtype that is assumed where none is known."""
        return "bfloat16"

    @classmethod
    def layer_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip) -> tuple[str, ...]:
        if not isinstance(spec, AttentionSpec):
            return ()
        cache_spec = cache_spec or packed_page_spec(spec)
        if cache_spec.dtype not in cls.supported_kv_cache_dtypes:  # refused by name already
            return ()
        dtype = cls.usual_query_dtype(cache_spec)
        return tuple(cls.kernel_reasons(without_refused_options(cls, spec), cache_spec, chip, dtype))

    @classmethod
    def query_reasons(cls, spec, cache_spec, chip, dtype, keys=None) -> tuple[str, ...]:
        """The kernel's reasons against this dtype, beyond those against the layer."""
        refused = super().query_reasons(spec, cache_spec, chip, dtype, keys)
        if refused or not isinstance(spec, AttentionSpec):
            return refused
        cache_spec = cache_spec or dataclasses.replace(packed_page_spec(spec), dtype=keys or "bfloat16")
        if cache_spec.dtype not in cls.supported_kv_cache_dtypes:
            return ()
        plain = dataclasses.replace(spec, mask_fn=None, score_fn=None)
        usual = cls.kernel_reasons(plain, cache_spec, chip, cls.usual_query_dtype(cache_spec))
        return tuple(why for why in cls.kernel_reasons(plain, cache_spec, chip, dtype) if why not in usual)
