"""Llama 4 (text): chunked attention, layers without positions, a mixture of experts with a shared expert."""

from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    ENDS,
    MAX_LAYERS,
    PRE_NORM_ROWS,
    UNUSED,
    attention_biases,
    attention_rows,
    decoder_tensors,
    experts_of,
    heads_of,
    mlp_rows,
    model_config,
    rms_norm,
    rope_layers,
)  # fmt: skip
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import rope_of
from jattn.models.tensor_names import TensorSource, linear_rows, unchanged
from jattn.nn import AttentionConfig
from jattn.spec import AttentionSpec


def llama4(c: ConfigReader) -> ModelConfig:
    """Layers with rotary positions normalise q and k after rotation; the others have temperature tuning of q."""
    count, heads, norm = c.count("num_hidden_layers", high=MAX_LAYERS), heads_of(c), rms_norm(c)
    c.ignore("for_llm_compressor", "attn_implementation")
    rope = rope_of(c, heads["head_dim"], c.count("max_position_embeddings"), interleaved=True)
    with_rope: dict[str, Any] = dict(rope=rope)
    if c.flag("use_qk_norm", True):
        with_rope |= dict(qk_norm=rms_norm(c, has_scale=False), qk_norm_after_rope=True)
    tuning = c.number("floor_scale", 8192.0, above=0), c.number("attn_scale", 0.1)
    first_release = c.get("attn_temperature_tuning") == 4  # its config has 4 for true
    is_tuned = first_release or c.flag("attn_temperature_tuning", True)
    without_rope = dict(temperature_tuning=tuning if is_tuned else None)
    has_rope, has_experts = rope_layers(c, count), moe_layers(c, count)
    chunks, bias = chunk_sizes(c, has_rope), attention_biases(c)
    dense, experts = dense_mlp(c), moe(c)
    norms = ResidualNorms(before=norm)

    def layer(index: int) -> LayerConfig:
        spec = AttentionSpec(**heads, chunk_size=chunks[index])
        options = with_rope if has_rope[index] else without_rope
        self_attn = AttentionConfig(spec=spec, hidden_size=c.count("hidden_size"), **options, **bias)
        mlp = experts if index in has_experts else dense
        return LayerConfig(self_attn=self_attn, mlp=mlp, attn_norms=norms, mlp_norms=norms)

    return model_config(c, map(layer, range(count)), norm)


def chunk_sizes(c: ConfigReader, has_rope: list[bool]) -> list[int | None]:
    """The attention chunk size of each layer; None: it attends to all earlier tokens."""
    types = c.choices("layer_types", ("chunked_attention", "full_attention"), len(has_rope))
    chunked = has_rope if types is None else [kind == "chunked_attention" for kind in types]
    size = c.count("attention_chunk_size", None)
    if size is None and any(chunked):
        c.refuse("attention_chunk_size", "must be a number, because some layers have chunked attention")
    return [size if is_chunked else None for is_chunked in chunked]


def moe_layers(c: ConfigReader, count: int) -> set[int]:
    """The indices of layers with experts."""
    step, given = c.count("interleave_moe_layer_step", 1), c.counts("moe_layers", count - 1)
    return set(range(step - 1, count, step)) if given is None else set(given)


def dense_mlp(c: ConfigReader) -> MLP:
    """The MLP of layers without experts."""
    return MLP(width=c.count("intermediate_size_mlp"), activation=c.choice("hidden_act", ACTIVATIONS, "silu"))


def moe(c: ConfigReader) -> MoE:
    """Experts whose inputs are multiplied by the sigmoid of their logit, and a shared expert."""
    width, act = c.count("intermediate_size"), c.choice("hidden_act", ACTIVATIONS, "silu")
    shared = MLP(width=width, activation=act)
    return MoE(**experts_of(c), width=width, activation=act, scores="sigmoid_of_input", shared=shared)


def llama4_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """Module feed_forward is an MLP or a mixture of experts."""
    return decoder_tensors(config, lambda index: layer_rows(config, index))


def layer_rows(config: ModelConfig, index: int) -> dict[str, Any]:
    """One layer. One tensor has gate and up of all experts, concatenated along the outputs."""
    table = attention_rows(config, index) | PRE_NORM_ROWS
    if isinstance(config.layers[index].mlp, MLP):
        return table | mlp_rows(config, index, "feed_forward")
    half = {"gate": 0, "up": 1}
    experts = {
        f"mlp.{n}.kernel": ("feed_forward.experts.gate_up_proj", lambda x, part=part: np.split(x, 2, axis=-1)[part])
        for n, part in half.items()
    }
    shared = {f"mlp.shared.{n}": f"feed_forward.shared_expert.{n}_proj" for n in ("gate", "up", "down")}
    table |= linear_rows({"mlp.router": "feed_forward.router", **shared})
    return table | experts | {"mlp.down.kernel": ("feed_forward.experts.down_proj", unchanged)}


DEFAULTS = ENDS | dict(num_key_value_heads=8, head_dim=128, rope_theta=500000.0, attention_chunk_size=8192)
LLAMA4_TEXT = Family(llama4, llama4_tensors, UNUSED, defaults=DEFAULTS)
