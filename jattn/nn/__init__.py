"""The attention layer: Flax modules, the pure function that they call, and the data that describes it.

`PagedAttention` is a flax.nnx module, `linen.PagedAttention` a flax.linen module. Flax is imported when either is first
used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jattn.nn.apply import apply_attention
from jattn.nn.attention_layer import AttentionConfig
from jattn.nn.latent_layer import LatentConfig
from jattn.nn.norm import Norm
from jattn.nn.rope import Angles, Rope, rotate
from jattn.nn.rope_scaling import (
    DynamicNTKRopeScaling,
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    RopeScaling,
    YarnRopeScaling,
)

if TYPE_CHECKING:
    from jattn.nn import linen
    from jattn.nn.nnx import PagedAttention

__all__ = [
    "Angles",
    "AttentionConfig",
    "DynamicNTKRopeScaling",
    "LatentConfig",
    "LinearRopeScaling",
    "Llama3RopeScaling",
    "LongRopeScaling",
    "Norm",
    "PagedAttention",
    "ProportionalRopeScaling",
    "Rope",
    "RopeScaling",
    "YarnRopeScaling",
    "apply_attention",
    "linen",
    "rotate",
]


def __getattr__(name: str) -> Any:
    if name == "PagedAttention":
        return importlib.import_module("jattn.nn.nnx").PagedAttention
    if name == "linen":
        return importlib.import_module("jattn.nn.linen")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
