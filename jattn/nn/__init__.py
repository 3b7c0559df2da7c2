"""Layers: an attention layer as data and a pure function, and its parts."""

from jattn.nn.layer import AttentionLayer
from jattn.nn.norm import Norm
from jattn.nn.rope import Angles, Rope, rotate
from jattn.nn.rope_scaling import DynamicNTK, Linear, Llama3, LongRope, Scaling, Yarn

__all__ = [
    "Angles",
    "AttentionLayer",
    "DynamicNTK",
    "Linear",
    "Llama3",
    "LongRope",
    "Norm",
    "Rope",
    "Scaling",
    "Yarn",
    "rotate",
]
