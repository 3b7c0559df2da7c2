"""Llama 4 (text): layers that see only their own chunk, layers without positions, a mixture with a shared expert."""

from typing import Any

import numpy as np

from jattn.errors import UnsupportedError
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family
from jattn.models.families.llama import (
    NORM_NAMES,
    UNUSED,
    attention_names,
    biases,
    decoder,
    heads_of,
    mlp_names,
    outside,
)  # fmt: skip
from jattn.models.keys import Keys
from jattn.models.mlp import MLP
from jattn.models.moe import MoE
from jattn.models.names import Source, linears, same, sources
from jattn.models.rope_keys import rope_of
from jattn.nn import AttentionLayer, Norm
from jattn.spec import AttentionSpec


def llama4(c: Keys) -> ModelConfig:
    """A layer with positions turns in pairs, then normalises q and k; one without warms q as positions grow."""
    count, heads, norm = c.need("num_hidden_layers"), heads_of(c), Norm(eps=c.need("rms_norm_eps"))
    c.ignore("for_llm_compressor", "attn_implementation")
    rope = rope_of(c, heads["head_dim"], c.need("max_position_embeddings"), interleaved=True)
    bare = Norm(eps=c.need("rms_norm_eps"), has_scale=False) if c.get("use_qk_norm", True) else None
    growth = (c.get("floor_scale", 8192), c.get("attn_scale", 0.1)) if c.get("attn_temperature_tuning", True) else None
    growth = None if growth is None else (float(growth[0]), float(growth[1]))
    turned, mixed = turned_layers(c, count), moe_layers(c, count)
    chunked, bias = chunked_layers(c, turned), biases(c)
    halves = dense(c), moe(c)

    def layer(index: int) -> LayerConfig:
        spec = AttentionSpec(**heads, chunk_size=c.need("attention_chunk_size") if chunked[index] else None)
        own = dict(rope=rope, qk_norm=bare, norm_after_rope=True) if turned[index] else dict(query_growth=growth)
        mixer = AttentionLayer(spec=spec, hidden_size=c.need("hidden_size"), **own, **bias)
        return LayerConfig(mixer=mixer, mlp=halves[index in mixed], attn_norm=norm, mlp_norm=norm)

    return decoder(c, map(layer, range(count)), norm)


def turned_layers(c: Keys, count: int) -> list[bool]:
    """Which layers have positions."""
    every, given = c.get("no_rope_layer_interval", 4), c.get("no_rope_layers")
    return [bool(x) for x in given] if given else [(index + 1) % every != 0 for index in range(count)]


def chunked_layers(c: Keys, turned: list[bool]) -> list[bool]:
    """Which layers see only their own chunk."""
    types = c.get("layer_types")
    if types is None:
        return turned
    known = {"chunked_attention": True, "full_attention": False}
    if not set(types) <= known.keys():
        raise UnsupportedError(f"{c.where}: layer_types {sorted(set(types))} must be among {[*known]}")
    return [known[name] for name in types]


def moe_layers(c: Keys, count: int) -> set[int]:
    """Which layers have experts."""
    step, given = c.get("interleave_moe_layer_step", 1), c.get("moe_layers")
    return set(range(step - 1, count, step)) if given is None else set(given)


def dense(c: Keys) -> MLP:
    """The MLP of layers without experts."""
    return MLP(width=c.need("intermediate_size_mlp"), activation=c.get("hidden_act", "silu"))


def moe(c: Keys) -> MoE:
    """Experts whose input is scaled by the sigmoid of their logit, and one that all tokens visit."""
    width, act = c.need("intermediate_size"), c.get("hidden_act", "silu")
    return MoE(
        num_experts=c.need("num_local_experts"),
        top_k=c.need("num_experts_per_tok"),
        width=width,
        activation=act,
        scores="sigmoid_of_input",
        shared=MLP(width=width, activation=act),
    )


def names(config: ModelConfig) -> dict[str, Source]:
    """feed_forward holds one or the other."""
    return sources(config, outside(config), "model.layers.{}.", lambda index: layer_names(config, index))


def layer_names(config: ModelConfig, index: int) -> dict[str, Any]:
    """One layer; gate and up of all experts lie side by side in one tensor."""
    table = attention_names(config, index) | NORM_NAMES
    if isinstance(config.layers[index].mlp, MLP):
        return table | mlp_names(config, index, "feed_forward")
    half = {"gate": 0, "up": 1}
    experts = {
        f"mlp.{n}.kernel": ("feed_forward.experts.gate_up_proj", lambda x, part=part: np.split(x, 2, axis=-1)[part])
        for n, part in half.items()
    }
    shared = {f"mlp.shared.{n}": f"feed_forward.shared_expert.{n}_proj" for n in ("gate", "up", "down")}
    table |= linears({"mlp.router": "feed_forward.router", **shared})
    return table | experts | {"mlp.down.kernel": ("feed_forward.experts.down_proj", same)}


LLAMA4_TEXT = Family(llama4, names, UNUSED)
