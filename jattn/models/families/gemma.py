"""Gemma 2 and Gemma 3 (text): norms around both halves, scales that are added to one, embeddings scaled up."""

from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family
from jattn.models.families.llama import (
    UNUSED,
    attention_names,
    biases,
    decoder,
    heads_of,
    mlp_names,
    outside,
    windows_of,
)  # fmt: skip
from jattn.models.keys import Keys
from jattn.models.mlp import MLP
from jattn.models.names import Source, norms, sources
from jattn.models.rope_keys import rope_of
from jattn.nn import AttentionLayer, Norm, Rope
from jattn.spec import AttentionSpec

NORMS = {
    "attn_norm": "input_layernorm",
    "attn_norm_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
}


def translate(c: Keys, every: int, ropes: tuple[Rope, Rope], soft_cap: float | None, qk_norm: bool) -> ModelConfig:
    """Sliding layers but for each `every`-th; ropes (global, local)."""
    c.only("use_bidirectional_attention", False)
    c.ignore("hidden_act")  # hidden_activation is the one that counts
    hidden, heads, count = c.need("hidden_size"), heads_of(c), c.need("num_hidden_layers")
    norm = Norm(eps=c.need("rms_norm_eps"), one_plus=True)
    mlp = MLP(width=c.need("intermediate_size"), activation=c.get("hidden_activation", "gelu_pytorch_tanh"))
    scale, bias, kept = c.need("query_pre_attn_scalar") ** -0.5, biases(c), dict.fromkeys(NORMS, norm)
    if c.get("layer_types") is None:
        windows = [None if (i + 1) % every == 0 else c.need("sliding_window") for i in range(count)]
    else:
        windows = windows_of(c, count)

    def layer(window: int | None) -> LayerConfig:
        spec = AttentionSpec(**heads, scale=scale, sliding_window=window, logits_soft_cap=soft_cap)
        rope = ropes[window is not None]
        mixer = AttentionLayer(spec=spec, hidden_size=hidden, rope=rope, qk_norm=norm if qk_norm else None, **bias)
        return LayerConfig(mixer=mixer, mlp=mlp, **kept)

    final_cap = c.get("final_logit_softcapping")
    return decoder(c, map(layer, windows), norm, tied=True, embedding_scale=hidden**0.5, logits_soft_cap=final_cap)


def gemma2(c: Keys) -> ModelConfig:
    """Every second layer sees everything; attention logits are soft-capped."""
    rope = rope_of(c, c.need("head_dim"), c.need("max_position_embeddings"))
    return translate(c, 2, (rope, rope), c.get("attn_logit_softcapping"), qk_norm=False)


def gemma3(c: Keys) -> ModelConfig:
    """Every sixth layer sees everything; local layers have a theta of their own; q and k are normalised."""
    c.only("attn_logit_softcapping")  # no implementation applies it
    size, longest = c.need("head_dim"), c.need("max_position_embeddings")
    whole = rope_of(c, size, longest, kind="full_attention")
    local = c.get("rope_local_base_freq")
    near = Rope(dim=whole.dim, theta=local) if local else rope_of(c, size, longest, kind="sliding_attention")
    every = c.get("sliding_window_pattern", c.get("_sliding_window_pattern", 6))
    return translate(c, every, (whole, near), None, qk_norm=True)


def names(config: ModelConfig) -> dict[str, Source]:
    """Llama's, with two more norms."""

    def layer(index: int) -> dict[str, Any]:
        return attention_names(config, index) | mlp_names(config, index) | norms(NORMS)

    return sources(config, outside(config), "model.layers.{}.", layer)


GEMMA2 = Family(gemma2, names, UNUSED)
GEMMA3_TEXT = Family(gemma3, names, UNUSED)
