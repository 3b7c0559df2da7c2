"""Granite and GraniteMoE: factors of the embeddings, of each sublayer's output, of attention logits, and of logits."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    ENDS,
    LLAMA_NAMES,
    UNUSED,
    attention_biases,
    experts_of,
    gated_mlp,
    no_windows,
    rms_norm,
    rope_decoder,
    rope_decoder_tensors,
)
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import named_tensors


def with_factors(c: ConfigReader, mlp: MLP | MoE) -> ModelConfig:
    """x + residual_multiplier * sublayer(norm(x)); logits / logits_scaling."""
    scaling = c.number("logits_scaling", above=0)
    norms = ResidualNorms(before=rms_norm(c), factor=c.number("residual_multiplier", above=0))
    return rope_decoder(
        c,
        mlp=mlp,
        windows=no_windows,
        norms=norms,
        scale=c.number("attention_multiplier", above=0),
        model=dict(embedding_scale=c.number("embedding_multiplier", above=0), logits_scale=1 / scaling),
        **attention_biases(c),
    )


def granite(c: ConfigReader) -> ModelConfig:
    """A gated MLP in every layer."""
    return with_factors(c, gated_mlp(c, c.flag("mlp_bias", False)))


def granitemoe(c: ConfigReader) -> ModelConfig:
    """Experts in every layer, weighted by softmax over the chosen ones."""
    act = c.choice("hidden_act", ACTIVATIONS, "silu")
    c.only("position_embedding_type", "rope")  # transformers 4.53 to 4.57 write it
    return with_factors(c, MoE(**experts_of(c), width=c.count("intermediate_size"), activation=act))


def expert_half(index: int) -> Callable[[np.ndarray], np.ndarray]:
    """Gate (0) or up (1) as [experts, in, out], from one tensor [experts, 2 * out, in]."""
    return lambda x: np.split(x, 2, axis=1)[index].swapaxes(1, 2)


EXPERTS: dict[str, Any] = {
    "mlp.router": "block_sparse_moe.router.layer",
    "mlp.gate.kernel": ("block_sparse_moe.input_linear.weight", expert_half(0)),
    "mlp.up.kernel": ("block_sparse_moe.input_linear.weight", expert_half(1)),
    "mlp.down.kernel": ("block_sparse_moe.output_linear.weight", lambda x: x.swapaxes(1, 2)),
}
DEFAULTS = ENDS | dict(
    rope_theta=10000.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0, embedding_multiplier=1.0
)
GRANITE = Family(granite, rope_decoder_tensors, UNUSED, defaults=DEFAULTS)
GRANITEMOE = Family(granitemoe, named_tensors(LLAMA_NAMES | EXPERTS), UNUSED, defaults=DEFAULTS)
