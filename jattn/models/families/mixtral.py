"""Mixtral: Mistral with a mixture of experts, each expert a tensor of its own."""

from typing import Any

import numpy as np

from jattn.models.config import ModelConfig
from jattn.models.families.family import Family
from jattn.models.families.llama import (
    ENDS,
    NORM_NAMES,
    UNUSED,
    attention_names,
    experts_of,
    outside,
    translate,
)  # fmt: skip
from jattn.models.keys import Keys
from jattn.models.mlp import ACTIVATIONS
from jattn.models.moe import MoE
from jattn.models.names import Source, linears, sources


def mixtral(c: Keys) -> ModelConfig:
    """Softmax over the chosen experts."""
    act = c.choice("hidden_act", ACTIVATIONS, "silu")
    return translate(c, mlp=MoE(**experts_of(c), width=c.count("intermediate_size"), activation=act))


def names(config: ModelConfig) -> dict[str, Source]:
    """Experts are stacked as they are read."""

    def layer(index: int) -> dict[str, Any]:
        moe = config.layers[index].mlp
        assert isinstance(moe, MoE)
        return attention_names(config, index) | expert_names(moe.num_experts) | NORM_NAMES

    return sources(config, outside(config), "model.layers.{}.", layer)


def expert_names(count: int) -> dict[str, Any]:
    """w1 is the gate, w3 goes up, w2 down."""
    table: dict[str, Any] = linears({"mlp.router": "block_sparse_moe.gate"})
    for ours, theirs in dict(gate="w1", up="w3", down="w2").items():
        tensors = [f"block_sparse_moe.experts.{e}.{theirs}.weight" for e in range(count)]
        table[f"mlp.{ours}.kernel"] = (tensors, lambda *parts: np.stack([x.T for x in parts]))
    return table


MIXTRAL = Family(mixtral, names, UNUSED, defaults=ENDS | dict(num_key_value_heads=8, rope_theta=1e6))
