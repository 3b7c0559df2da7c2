"""GLM 4: half of a head is rotated, in neighbouring pairs; gate and up in one tensor. glm4 also has norms after."""

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import LLAMA_NAMES, UNUSED, gate_up_rows, no_windows, rms_norm, rope_decoder
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import named_tensors


def glm(c: ConfigReader, has_after: bool = False) -> ModelConfig:
    """attention_bias applies to q, k and v only. has_after: norms after the sublayers, too."""
    norm = rms_norm(c)
    c.fill("eos_token_id", [151329, 151336, 151338])
    return rope_decoder(
        c,
        windows=no_windows,
        norms=ResidualNorms(before=norm, after=norm if has_after else None),
        rope_options=dict(interleaved=True, partial=True),
        qkv_bias=c.flag("attention_bias", True),
        out_bias=False,
    )


def glm4(c: ConfigReader) -> ModelConfig:
    """GLM with norms before and after each sublayer."""
    return glm(c, has_after=True)


NAMES = LLAMA_NAMES | gate_up_rows("mlp.gate_up_proj.weight")
AFTER = {"attn_norm_after": "post_self_attn_layernorm", "mlp_norm_after": "post_mlp_layernorm"}
DEFAULTS = dict(
    num_key_value_heads=2, head_dim=128, partial_rotary_factor=0.5, rope_theta=10000.0, pad_token_id=151329
)  # fmt: skip
GLM = Family(glm, named_tensors(NAMES), UNUSED, defaults=DEFAULTS)
GLM4 = Family(glm4, named_tensors(NAMES | AFTER), UNUSED, defaults=DEFAULTS)
