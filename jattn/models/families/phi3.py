"""Phi-3: Llama with fused projections, partial rotation and longrope."""

from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import PRE_NORM_ROWS, UNUSED, decoder_tensors, rope_decoder
from jattn.models.tensor_names import TensorSource, linear_rows, output_slice
from jattn.nn import AttentionConfig


def phi3_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """Fused tensors are split when they are read."""
    return decoder_tensors(config, lambda index: layer_rows(config, index))


def layer_rows(config: ModelConfig, index: int) -> dict[str, Any]:
    """One layer."""
    layer = config.layers[index]
    table = linear_rows({"attn.o": "self_attn.o_proj", "mlp.down": "mlp.down_proj"}) | PRE_NORM_ROWS
    assert isinstance(layer.self_attn, AttentionConfig)
    first, widths = 0, layer.self_attn.widths
    for name, width in widths.items():
        table[f"attn.{name}.kernel"] = ("self_attn.qkv_proj.weight", output_slice(first, first + width))
        first += width
    width = layer.mlp.width
    for number, name in enumerate(("gate", "up")):
        table[f"mlp.{name}.kernel"] = ("mlp.gate_up_proj.weight", output_slice(number * width, (number + 1) * width))
    return table


def phi3(c: ConfigReader) -> ModelConfig:
    """partial_rotary_factor is allowed."""
    c.only("lm_head_bias", False)
    c.ignore("full_attn_mod", "interpolate_factor")  # transformers does not use them
    return rope_decoder(c, rope_options=dict(partial=True))


DEFAULTS = dict(
    rope_theta=10000.0, original_max_position_embeddings=4096, bos_token_id=1, eos_token_id=32000, pad_token_id=32000
)
PHI3 = Family(phi3, phi3_tensors, UNUSED, defaults=DEFAULTS)
