"""gpt-oss: sinks, alternating windows, biases on all projections, a clamped mixture of experts, yarn, MXFP4 weights."""

import dataclasses
import functools
from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    PRE_NORM_ROWS,
    UNUSED,
    attention_biases,
    attention_rows,
    decoder_tensors,
    experts_of,
    rope_decoder,
    windows_by_type,
)  # fmt: skip
from jattn.models.moe import MoE
from jattn.models.mxfp4 import mxfp4, mxfp4_form
from jattn.models.tensor_names import TensorSource, linear_rows, unchanged


def gpt_oss(c: ConfigReader) -> ModelConfig:
    """Softmax over the chosen experts, whose gated unit is (up + 1) * gate * sigmoid(alpha * gate), clamped."""
    c.only("hidden_act", "silu")  # MoE computes this gated unit from silu
    c.ignore("experts_per_token", "initial_context_length")  # duplicates of other keys
    moe = MoE(
        **experts_of(c),
        width=c.count("intermediate_size"),
        clamp=(c.number("swiglu_alpha", 1.702), c.number("swiglu_limit", 7.0, above=0)),
        router_bias=True,
        bias=True,
    )
    return rope_decoder(
        c, mlp=moe, windows=alternating_windows, sinks=True, rope_options=dict(default=YARN), **attention_biases(c)
    )


def alternating_windows(c: ConfigReader, count: int) -> list[int | None]:
    """A window in layers 0, 2, 4 and so on, none in the others."""
    return windows_by_type(c, count, [(index + 1) % 2 != 0 for index in range(count)])


def gpt_oss_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """Gate and up are interleaved in one tensor. Experts are stored as floats, or in MXFP4."""

    def layer(index: int) -> dict[str, Any]:
        return attention_rows(config, index) | LAYER_ROWS | PRE_NORM_ROWS

    table = decoder_tensors(config, layer)
    for index in range(len(config.layers)):
        for part, (tensor, columns) in PACKED.items():
            path = f"layers.{index}.mlp.{part}.kernel"
            stored = tuple(f"model.layers.{index}.{EXPERTS}.{tensor}_{kind}" for kind in ("blocks", "scales"))
            packed = TensorSource(stored, functools.partial(mxfp4, columns), form=mxfp4_form)
            table[path] = dataclasses.replace(table[path], packed=packed)
    return table


EXPERTS = "mlp.experts"
GATE, UP, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)
PACKED = {"gate": ("gate_up_proj", GATE), "up": ("gate_up_proj", UP), "down": ("down_proj", ALL)}
LAYER_ROWS: dict[str, Any] = {
    "attn.sinks": ("self_attn.sinks", unchanged),
    **linear_rows({"mlp.router": "mlp.router"}, bias=True),
    "mlp.gate.kernel": (f"{EXPERTS}.gate_up_proj", lambda x: x[..., GATE]),
    "mlp.gate.bias": (f"{EXPERTS}.gate_up_proj_bias", lambda x: x[..., GATE]),
    "mlp.up.kernel": (f"{EXPERTS}.gate_up_proj", lambda x: x[..., UP]),
    "mlp.up.bias": (f"{EXPERTS}.gate_up_proj_bias", lambda x: x[..., UP]),
    "mlp.down.kernel": (f"{EXPERTS}.down_proj", unchanged),
    "mlp.down.bias": (f"{EXPERTS}.down_proj_bias", unchanged),
}
YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)
DEFAULTS = dict(num_key_value_heads=8, head_dim=64, sliding_window=128, attention_bias=True, rope_theta=150000.0)
GPT_OSS = Family(gpt_oss, gpt_oss_tensors, UNUSED, quant_methods=("mxfp4",), defaults=DEFAULTS)
