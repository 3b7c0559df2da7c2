"""Llama 4 (text): layers that see only their own chunk, layers without positions, a mixture with a shared expert."""

from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family
from jattn.models.families.llama import (
    ENDS,
    MOST_LAYERS,
    NORM_NAMES,
    UNUSED,
    attention_names,
    biases,
    decoder,
    experts_of,
    heads_of,
    mlp_names,
    norm_of,
    outside,
)  # fmt: skip
from jattn.models.keys import Keys
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.names import Source, linears, same, sources
from jattn.models.rope_keys import rope_of
from jattn.nn import AttentionLayer
from jattn.spec import AttentionSpec


def llama4(c: Keys) -> ModelConfig:
    """Layers with rotary positions rotate pairs and then normalise q and k; the others scale q up as positions grow."""
    count, heads, norm = c.count("num_hidden_layers", high=MOST_LAYERS), heads_of(c), norm_of(c)
    c.ignore("for_llm_compressor", "attn_implementation")
    rope = rope_of(c, heads["head_dim"], c.count("max_position_embeddings"), interleaved=True)
    bare = norm_of(c, has_scale=False) if c.flag("use_qk_norm", True) else None
    growth = c.number("floor_scale", 8192.0, above=0), c.number("attn_scale", 0.1)
    tuned = c.get("attn_temperature_tuning") == 4  # the model's first release wrote 4 for true
    growth = growth if tuned or c.flag("attn_temperature_tuning", True) else None
    turned, mixed = turned_layers(c, count), moe_layers(c, count)
    chunks, bias = chunks_of(c, turned), biases(c)
    halves = dense(c), moe(c)

    def layer(index: int) -> LayerConfig:
        spec = AttentionSpec(**heads, chunk_size=chunks[index])
        own = dict(rope=rope, qk_norm=bare, norm_after_rope=True) if turned[index] else dict(query_growth=growth)
        mixer = AttentionLayer(spec=spec, hidden_size=c.count("hidden_size"), **own, **bias)
        return LayerConfig(mixer=mixer, mlp=halves[index in mixed], attn_norm=norm, mlp_norm=norm)

    return decoder(c, map(layer, range(count)), norm)


def turned_layers(c: Keys, count: int) -> list[bool]:
    """Which layers have positions."""
    every, given = c.count("no_rope_layer_interval", 4), c.counts("no_rope_layers", 1)
    if given and len(given) < count:
        c.refuse("no_rope_layers", f"must have one number for each of the {count} layers")
    return [bool(x) for x in given[:count]] if given else [(index + 1) % every != 0 for index in range(count)]


def chunks_of(c: Keys, turned: list[bool]) -> list[int | None]:
    """The chunk that each layer sees; None: everything."""
    types = c.choices("layer_types", ("chunked_attention", "full_attention"), len(turned))
    chunked = turned if types is None else [kind == "chunked_attention" for kind in types]
    size = c.count("attention_chunk_size", None)
    if size is None and any(chunked):
        c.refuse("attention_chunk_size", "must be a number: some layers see only their own chunk")
    return [size if mine else None for mine in chunked]


def moe_layers(c: Keys, count: int) -> set[int]:
    """Which layers have experts."""
    step, given = c.count("interleave_moe_layer_step", 1), c.counts("moe_layers", count - 1)
    return set(range(step - 1, count, step)) if given is None else set(given)


def dense(c: Keys) -> MLP:
    """The MLP of layers without experts."""
    return MLP(width=c.count("intermediate_size_mlp"), activation=c.choice("hidden_act", ACTIVATIONS, "silu"))


def moe(c: Keys) -> MoE:
    """Experts whose input is scaled by the sigmoid of their logit, and one that all tokens visit."""
    width, act = c.count("intermediate_size"), c.choice("hidden_act", ACTIVATIONS, "silu")
    shared = MLP(width=width, activation=act)
    return MoE(**experts_of(c), width=width, activation=act, scores="sigmoid_of_input", shared=shared)


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


DEFAULTS = ENDS | dict(num_key_value_heads=8, head_dim=128, rope_theta=500000.0, attention_chunk_size=8192)
LLAMA4_TEXT = Family(llama4, names, UNUSED, defaults=DEFAULTS)
