"""Mixtral: Mistral with a mixture of experts. Each expert has its own tensors."""

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import ENDS, LLAMA_NAMES, MIXTRAL_NAMES, UNUSED, experts_of, rope_decoder
from jattn.models.mlp import ACTIVATIONS
from jattn.models.moe import MoE
from jattn.models.tensor_names import named_tensors


def mixtral(c: ConfigReader) -> ModelConfig:
    """Softmax over the chosen experts."""
    act = c.choice("hidden_act", ACTIVATIONS, "silu")
    return rope_decoder(c, mlp=MoE(**experts_of(c), width=c.count("intermediate_size"), activation=act))


MIXTRAL = Family(
    mixtral,
    named_tensors(LLAMA_NAMES | MIXTRAL_NAMES),
    UNUSED,
    defaults=ENDS | dict(num_key_value_heads=8, rope_theta=1e6),
)
