"""Phi-3: Llama with fused projections, and frequencies stretched dimension by dimension."""

from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.families.family import Family
from jattn.models.families.llama import NORM_NAMES, UNUSED, outside, translate
from jattn.models.keys import Keys
from jattn.models.names import Source, linears, rows, sources


def names(config: ModelConfig) -> dict[str, Source]:
    """Fused tensors are cut as they are read."""
    return sources(config, outside(config), "model.layers.{}.", lambda index: layer_names(config, index))


def layer_names(config: ModelConfig, index: int) -> dict[str, Any]:
    """One layer."""
    layer = config.layers[index]
    table = linears({"attn.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}) | NORM_NAMES
    first, widths = 0, layer.mixer.widths
    for name, width in widths.items():
        table[f"attn.{name}.kernel"] = ("self_attn.qkv_proj.weight", rows(first, first + width))
        first += width
    width = layer.mlp.width
    for number, name in enumerate(("gate", "up")):
        table[f"mlp.{name}.kernel"] = ("mlp.gate_up_proj.weight", rows(number * width, (number + 1) * width))
    return table


def phi3(c: Keys) -> ModelConfig:
    """Rotation may be partial."""
    c.only("lm_head_bias", False)
    c.ignore("full_attn_mod", "interpolate_factor")  # transformers reads neither
    return translate(c, ropes=dict(partial=True))


DEFAULTS = dict(
    rope_theta=10000.0, original_max_position_embeddings=4096, bos_token_id=1, eos_token_id=32000, pad_token_id=32000
)
PHI3 = Family(phi3, names, UNUSED, defaults=DEFAULTS)
