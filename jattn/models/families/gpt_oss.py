"""gpt-oss: sinks, alternating windows, biases everywhere, a clamped mixture of experts, yarn."""

import dataclasses
from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.families.family import Family
from jattn.models.families.llama import (
    NORM_NAMES,
    UNUSED,
    attention_names,
    biases,
    experts_of,
    outside,
    translate,
    windows_by_type,
)  # fmt: skip
from jattn.models.keys import Keys
from jattn.models.moe import MoE
from jattn.models.mxfp4 import unpacked
from jattn.models.names import Source, linears, same, sources


def gpt_oss(c: Keys) -> ModelConfig:
    """Softmax over the chosen experts; (up + 1) * gate * sigmoid(alpha * gate), clamped."""
    c.only("hidden_act", "silu")  # the unit is built in
    c.ignore("experts_per_token", "initial_context_length")  # second names of other keys
    moe = MoE(
        **experts_of(c),
        width=c.count("intermediate_size"),
        clamp=(c.number("swiglu_alpha", 1.702), c.number("swiglu_limit", 7.0, above=0)),
        router_bias=True,
        bias=True,
    )
    return translate(c, mlp=moe, windows=windows_of, sinks=True, ropes=dict(usual=YARN), **biases(c))


def windows_of(c: Keys, count: int) -> list[int | None]:
    """Every second layer sees everything."""
    return windows_by_type(c, count, [(index + 1) % 2 != 0 for index in range(count)])


def names(config: ModelConfig) -> dict[str, Source]:
    """Gate and up lie interleaved in one tensor; experts are stored plain, or packed in MXFP4."""

    def layer(index: int) -> dict[str, Any]:
        return attention_names(config, index) | LAYER | NORM_NAMES

    table = sources(config, outside(config), "model.layers.{}.", layer)
    for index in range(len(config.layers)):
        for part, (tensor, half) in PACKED.items():
            path = f"layers.{index}.mlp.{part}.kernel"
            stored = tuple(f"model.layers.{index}.{EXPERTS}.{tensor}_{kind}" for kind in ("blocks", "scales"))
            packed = Source(stored, lambda *parts, half=half: unpacked(*parts)[..., half])
            table[path] = dataclasses.replace(table[path], packed=packed)
    return table


EXPERTS = "mlp.experts"
GATE, UP, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)
PACKED = {"gate": ("gate_up_proj", GATE), "up": ("gate_up_proj", UP), "down": ("down_proj", ALL)}
LAYER: dict[str, Any] = {
    "attn.sinks": ("self_attn.sinks", same),
    **linears({"mlp.router": "mlp.router"}, bias=True),
    "mlp.gate.kernel": (f"{EXPERTS}.gate_up_proj", lambda x: x[..., GATE]),
    "mlp.gate.bias": (f"{EXPERTS}.gate_up_proj_bias", lambda x: x[..., GATE]),
    "mlp.up.kernel": (f"{EXPERTS}.gate_up_proj", lambda x: x[..., UP]),
    "mlp.up.bias": (f"{EXPERTS}.gate_up_proj_bias", lambda x: x[..., UP]),
    "mlp.down.kernel": (f"{EXPERTS}.down_proj", same),
    "mlp.down.bias": (f"{EXPERTS}.down_proj_bias", same),
}
YARN = dict(
    rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=4096
)
DEFAULTS = dict(num_key_value_heads=8, head_dim=64, sliding_window=128, attention_bias=True, rope_theta=150000.0)
GPT_OSS = Family(gpt_oss, names, UNUSED, packings=("mxfp4",), defaults=DEFAULTS)
