"""Gemma 2 and 3 (text): norms before and after each part, norm scales stored less 1, scaled embeddings."""

from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family
from jattn.models.families.llama import (
    MOST_LAYERS,
    UNUSED,
    attention_names,
    biases,
    decoder,
    heads_of,
    mlp_names,
    norm_of,
    outside,
    windows_by_type,
)  # fmt: skip
from jattn.models.keys import Keys
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.names import Source, norms, sources
from jattn.models.rope_keys import rope_of, rope_of_kind, theta_of
from jattn.nn import AttentionLayer, Rope
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
    hidden, heads, count = c.count("hidden_size"), heads_of(c), c.count("num_hidden_layers", high=MOST_LAYERS)
    norm, act = norm_of(c, one_plus=True), c.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    mlp = MLP(width=c.count("intermediate_size"), activation=act)
    scale = c.number("query_pre_attn_scalar", above=0) ** -0.5
    bias, kept = biases(c), dict.fromkeys(NORMS, norm)
    windows = windows_by_type(c, count, [(i + 1) % every != 0 for i in range(count)])

    def layer(window: int | None) -> LayerConfig:
        spec = AttentionSpec(**heads, scale=scale, sliding_window=window, logits_soft_cap=soft_cap)
        rope = ropes[window is not None]
        mixer = AttentionLayer(spec=spec, hidden_size=hidden, rope=rope, qk_norm=norm if qk_norm else None, **bias)
        return LayerConfig(mixer=mixer, mlp=mlp, **kept)

    final_cap = c.number("final_logit_softcapping", None, above=0)
    return decoder(c, map(layer, windows), norm, tied=True, embedding_scale=hidden**0.5, logits_soft_cap=final_cap)


def gemma2(c: Keys) -> ModelConfig:
    """Every second layer sees everything; attention logits are soft-capped."""
    rope = rope_of(c, heads_of(c)["head_dim"], c.count("max_position_embeddings"))
    return translate(c, 2, (rope, rope), c.number("attn_logit_softcapping", None, above=0), qk_norm=False)


def gemma3(c: Keys) -> ModelConfig:
    """Every sixth layer sees everything; local layers have a theta of their own; q and k are normalised."""
    c.only("attn_logit_softcapping")  # no implementation applies it
    size, longest = heads_of(c)["head_dim"], c.count("max_position_embeddings")
    near_theta, theta = theta_of(c, "rope_local_base_freq", 10000.0), theta_of(c, "rope_theta", 1e6)
    old = c.part("rope_scaling").given
    whole = rope_of_kind(c, "full_attention", theta, size, longest, old)
    near = rope_of_kind(c, "sliding_attention", near_theta, size, longest)
    every = c.count("sliding_window_pattern", c.count("_sliding_window_pattern", 6))
    return translate(c, every, (whole, near), None, qk_norm=True)


def names(config: ModelConfig) -> dict[str, Source]:
    """Llama's, with two more norms."""

    def layer(index: int) -> dict[str, Any]:
        return attention_names(config, index) | mlp_names(config, index) | norms(NORMS)

    return sources(config, outside(config), "model.layers.{}.", layer)


DEFAULTS = dict(
    head_dim=256, num_key_value_heads=4, query_pre_attn_scalar=256, sliding_window=4096, pad_token_id=0,
    eos_token_id=1, bos_token_id=2,
)  # fmt: skip
CAPS = dict(final_logit_softcapping=30.0, attn_logit_softcapping=50.0)
GEMMA2 = Family(gemma2, names, UNUSED, defaults=DEFAULTS | CAPS | dict(rope_theta=10000.0))
GEMMA3_TEXT = Family(gemma3, names, UNUSED, defaults=DEFAULTS)
