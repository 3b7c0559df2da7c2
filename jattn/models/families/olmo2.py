"""OLMo 2: norms after the sublayers only, and norms of q and k over all heads together."""

from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    UNUSED,
    attention_biases,
    attention_rows,
    decoder_tensors,
    mlp_rows,
    no_windows,
    rms_norm,
    rope_decoder,
)
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import TensorSource, norm_rows


def olmo2(c: ConfigReader) -> ModelConfig:
    """The usual decoder with other norms."""
    norm = rms_norm(c)
    return rope_decoder(
        c,
        windows=no_windows,
        norms=ResidualNorms(after=norm),
        qk_norm=norm,
        qk_norm_all_heads=True,
        **attention_biases(c),
    )


def olmo2_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """model.layers.0.self_attn.q_proj and so on, with two norms per layer."""

    def layer(index: int) -> dict[str, Any]:
        return attention_rows(config, index) | mlp_rows(config, index) | NORM_ROWS

    return decoder_tensors(config, layer)


NORM_ROWS = norm_rows({"attn_norm_after": "post_attention_layernorm", "mlp_norm_after": "post_feedforward_layernorm"})
DEFAULTS = dict(rope_theta=10000.0, eos_token_id=50279, pad_token_id=1)
OLMO2 = Family(olmo2, olmo2_tensors, UNUSED, defaults=DEFAULTS)
