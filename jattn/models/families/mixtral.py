"""Mixtral: Mistral with a mixture of experts. Each expert has its own tensors."""

from typing import Any

import numpy as np

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    ENDS,
    PRE_NORM_ROWS,
    UNUSED,
    attention_rows,
    decoder_tensors,
    experts_of,
    rope_decoder,
)  # fmt: skip
from jattn.models.mlp import ACTIVATIONS
from jattn.models.moe import MoE
from jattn.models.tensor_names import TensorSource, linear_rows


def mixtral(c: ConfigReader) -> ModelConfig:
    """Softmax over the chosen experts."""
    act = c.choice("hidden_act", ACTIVATIONS, "silu")
    return rope_decoder(c, mlp=MoE(**experts_of(c), width=c.count("intermediate_size"), activation=act))


def mixtral_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """The tensors of all experts are stacked when they are read."""

    def layer(index: int) -> dict[str, Any]:
        moe = config.layers[index].mlp
        assert isinstance(moe, MoE)
        return attention_rows(config, index) | expert_rows(moe.num_experts) | PRE_NORM_ROWS

    return decoder_tensors(config, layer)


def expert_rows(count: int) -> dict[str, Any]:
    """w1 is gate, w3 is up, w2 is down."""
    table: dict[str, Any] = linear_rows({"mlp.router": "block_sparse_moe.gate"})
    for ours, theirs in dict(gate="w1", up="w3", down="w2").items():
        tensors = [f"block_sparse_moe.experts.{e}.{theirs}.weight" for e in range(count)]
        table[f"mlp.{ours}.kernel"] = (tensors, lambda *parts: np.stack([x.T for x in parts]))
    return table


MIXTRAL = Family(mixtral, mixtral_tensors, UNUSED, defaults=ENDS | dict(num_key_value_heads=8, rope_theta=1e6))
