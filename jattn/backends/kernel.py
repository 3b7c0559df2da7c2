"""PagedKernelBackend: a backend whose kernel lists the static arguments that it does not support."""

import abc
import dataclasses

import jax
import jax.numpy as jnp

from jattn.backends.base import AttentionBackend
from jattn.backends.capability import without_refused_options
from jattn.cache import KVCacheSpec
from jattn.cache.write import packed_page_spec
from jattn.device import Chip
from jattn.spec import AttentionSpec
from jattn.types import AnyArray, AttentionType

ALIGNED = (
    "ALiBi, mask_fn and score_fn not supported across encoder and decoder: the kernel aligns the last query with the "
    "last key"
)


def as_arrays(*values: AnyArray | float | None) -> tuple[jax.Array | None, ...]:
    """The values as JAX arrays; None stays None."""
    return tuple(None if value is None else jnp.asarray(value) for value in values)


class PagedKernelBackend(AttentionBackend):
    """Adds the kernel's reasons to those of the lists. Packed keys are checked as the cache that they are copied to."""

    @classmethod
    @abc.abstractmethod
    def kernel_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec, chip: Chip, dtype: str) -> list[str]:
        """Every reason against queries of `dtype` in this layer over this cache on this chip."""

    @classmethod
    def usual_query_dtype(cls, cache_spec: KVCacheSpec) -> str:
        """The dtype of the queries that is assumed if it is not known."""
        return "bfloat16"

    @classmethod
    def layer_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip) -> tuple[str, ...]:
        if not isinstance(spec, AttentionSpec):
            return ()
        cache_spec = cache_spec or packed_page_spec(spec)
        if cache_spec.dtype not in cls.supported_kv_cache_dtypes:  # the list has refused it
            return ()
        dtype = cls.usual_query_dtype(cache_spec)
        found = cls.kernel_reasons(without_refused_options(cls, spec), cache_spec, chip, dtype)
        positional = spec.has_alibi or spec.mask_fn is not None or spec.score_fn is not None
        if spec.attn_type is AttentionType.ENCODER_DECODER and positional:
            found = [*found, ALIGNED]
        return tuple(found)

    @classmethod
    def query_reasons(cls, spec, cache_spec, chip, dtype, keys=None) -> tuple[str, ...]:
        """The kernel's reasons against this dtype, without those against the layer."""
        refused = super().query_reasons(spec, cache_spec, chip, dtype, keys)
        if refused or not isinstance(spec, AttentionSpec):
            return refused
        cache_spec = cache_spec or dataclasses.replace(packed_page_spec(spec), dtype=keys or "bfloat16")
        if cache_spec.dtype not in cls.supported_kv_cache_dtypes:
            return ()
        plain = dataclasses.replace(spec, mask_fn=None, score_fn=None)
        usual = cls.kernel_reasons(plain, cache_spec, chip, cls.usual_query_dtype(cache_spec))
        return tuple(why for why in cls.kernel_reasons(plain, cache_spec, chip, dtype) if why not in usual)
