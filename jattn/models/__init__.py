"""Models from Hugging Face folders: a ModelConfig describes the one forward pass; the caller keeps the paged caches."""

from jattn.models.config import CacheGroup, LayerConfig, ModelConfig
from jattn.models.decoder import forward, prompt_logits
from jattn.models.embedding import POOLINGS, embed
from jattn.models.layers import head
from jattn.models.load import load
from jattn.models.mlp import MLP
from jattn.models.model_folder import config_of, load_config
from jattn.models.model_mesh import ModelMesh
from jattn.models.moe import MoE
from jattn.models.quantising import QUANTIZATIONS, quantise
from jattn.models.residual import ResidualNorms
from jattn.models.weight_tree import init_params, logical_axes, weight_specs
from jattn.models.without_cache import encode, uncached_logits

__all__ = [
    "MLP",
    "POOLINGS",
    "QUANTIZATIONS",
    "CacheGroup",
    "LayerConfig",
    "MoE",
    "ModelConfig",
    "ModelMesh",
    "ResidualNorms",
    "config_of",
    "embed",
    "encode",
    "forward",
    "head",
    "init_params",
    "load",
    "load_config",
    "logical_axes",
    "prompt_logits",
    "quantise",
    "uncached_logits",
    "weight_specs",
]
