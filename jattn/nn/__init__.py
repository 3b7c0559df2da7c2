"""Layers: an attention layer as data and a pure function, its parts, and the Flax modules around it.

`PagedAttention` is flax.nnx's, `linen.PagedAttention` flax.linen's; Flax is imported when either is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jattn.nn.call import call
from jattn.nn.layer import AttentionLayer
from jattn.nn.norm import Norm
from jattn.nn.rope import Angles, Rope, rotate
from jattn.nn.rope_scaling import DynamicNTK, Linear, Llama3, LongRope, Scaling, Yarn

if TYPE_CHECKING:
    from jattn.nn import linen
    from jattn.nn.nnx import PagedAttention

__all__ = [
    "Angles",
    "AttentionLayer",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRope",
    "Norm",
    "PagedAttention",
    "Rope",
    "Scaling",
    "Yarn",
    "call",
    "linen",
    "rotate",
]


def __getattr__(name: str) -> Any:
    if name == "PagedAttention":
        return importlib.import_module("jattn.nn.nnx").PagedAttention
    if name == "linen":
        return importlib.import_module("jattn.nn.linen")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
