"""Models: a Hugging Face folder in, one model built from data, paged caches of the caller."""

from jattn.models.config import CacheGroup, LayerConfig, ModelConfig
from jattn.models.decoder import forward
from jattn.models.load import config_of, load, load_config
from jattn.models.mlp import MLP
from jattn.models.moe import MoE
from jattn.models.parts import head
from jattn.models.run import prompt_logits
from jattn.models.shapes import init_params, logical_axes, weights_of
from jattn.models.uncached import encode, uncached_logits

__all__ = [
    "MLP",
    "CacheGroup",
    "LayerConfig",
    "MoE",
    "ModelConfig",
    "config_of",
    "encode",
    "forward",
    "head",
    "init_params",
    "load",
    "load_config",
    "logical_axes",
    "prompt_logits",
    "uncached_logits",
    "weights_of",
]
