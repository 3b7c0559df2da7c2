"""Backends and builders made from others by changing one thing.

Make each once, at module level: a class is part of the trace key, and two made alike are not equal.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jattn.backends.backend import AttentionBackend
from jattn.backends.builder import AttentionMetadataBuilder
from jattn.metadata import CommonAttentionMetadata


def subclass_attention_backend(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    builder_cls: type[AttentionMetadataBuilder],
) -> type[AttentionBackend]:
    """The same backend with another builder; its class is named prefix + name."""
    return subclass_attention_backend_with_overrides(
        name_prefix, attention_backend_cls, {"get_builder_cls": classmethod(lambda cls: builder_cls)}
    )


def subclass_attention_backend_with_overrides(
    name_prefix: str, attention_backend_cls: type[AttentionBackend], overrides: Mapping[str, Any]
) -> type[AttentionBackend]:
    """The same backend with other attributes or class methods; names that it does not have are refused."""
    unknown = [name for name in overrides if name not in dir(attention_backend_cls)]
    if unknown:
        raise ValueError(f"{attention_backend_cls.__name__} has no {', '.join(unknown)} to override")
    return type(name_prefix + attention_backend_cls.__name__, (attention_backend_cls,), dict(overrides))


def subclass_attention_metadata_builder(
    name_prefix: str,
    builder_cls: type[AttentionMetadataBuilder],
    build_preprocess_fn: Callable[[CommonAttentionMetadata], CommonAttentionMetadata],
) -> type[AttentionMetadataBuilder]:
    """The same builder behind a transform of the batch (chunked-local requests, an encoder's lengths ...)."""

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return builder_cls.build(self, common_prefix_len, build_preprocess_fn(common_attn_metadata), fast_build)

    return type(name_prefix + builder_cls.__name__, (builder_cls,), {"build": build})
