"""Gemma 1 to 3 (text): norm scales stored minus 1, scaled embeddings; from 2 on norms before and after sublayers."""

from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    MAX_LAYERS,
    UNUSED,
    Sides,
    attention_biases,
    attention_rows,
    decoder_tensors,
    heads_of,
    mlp_rows,
    model_config,
    no_windows,
    rms_norm,
    rope_decoder,
    rope_decoder_tensors,
    sides,
    windows_by_type,
)  # fmt: skip
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import rope_of, rope_of_layer_type, theta_of
from jattn.models.tensor_names import TensorSource, norm_rows
from jattn.nn import AttentionConfig, Rope
from jattn.spec import AttentionSpec

NORM_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_norm_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
}


def gemma(c: ConfigReader) -> ModelConfig:
    """`rope_decoder` with norm scales stored minus 1. Its activation "gelu" means the approximation by tanh."""
    c.only("use_bidirectional_attention", False)
    name = c.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    act = "gelu_pytorch_tanh" if name == "gelu" else name
    c.only("hidden_activation", act)
    return rope_decoder(
        c,
        mlp=MLP(width=c.count("intermediate_size"), activation=act),
        windows=no_windows,
        norm=rms_norm(c, one_plus=True),
        model=dict(tied=True, embedding_scale=c.count("hidden_size") ** 0.5),
        **attention_biases(c),
    )


def with_windows(
    c: ConfigReader, every: int, ropes: tuple[Rope, Rope], soft_cap: float | None, qk_norm: bool, seen: Sides
) -> ModelConfig:
    """Every `every`-th layer is global, the others have a sliding window. ropes: (global, local)."""
    c.ignore("hidden_act")  # transformers uses hidden_activation
    hidden, heads, count = c.count("hidden_size"), heads_of(c), c.count("num_hidden_layers", high=MAX_LAYERS)
    norm, act = rms_norm(c, one_plus=True), c.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    mlp = MLP(width=c.count("intermediate_size"), activation=act)
    scale = c.number("query_pre_attn_scalar", above=0) ** -0.5
    bias, norms = attention_biases(c), ResidualNorms(before=norm, after=norm)
    windows = windows_by_type(c, count, [(i + 1) % every != 0 for i in range(count)])
    attn_type, sides_of_window = seen

    def layer(window: int | None) -> LayerConfig:
        both = None if window is None else sides_of_window(window)
        spec = AttentionSpec(**heads, scale=scale, sliding_window=both, logits_soft_cap=soft_cap, attn_type=attn_type)
        rope = ropes[window is not None]
        qk = norm if qk_norm else None
        self_attn = AttentionConfig(spec=spec, hidden_size=hidden, rope=rope, qk_norm=qk, **bias)
        return LayerConfig(self_attn=self_attn, mlp=mlp, attn_norms=norms, mlp_norms=norms)

    final_cap = c.number("final_logit_softcapping", None, above=0)
    return model_config(c, map(layer, windows), norm, tied=True, embedding_scale=hidden**0.5, logits_soft_cap=final_cap)


def gemma3_sides(c: ConfigReader) -> Sides:
    """use_bidirectional_attention (EmbeddingGemma): half of sliding_window on each side."""
    if not c.flag("use_bidirectional_attention", False):
        return sides(c)
    c.only("is_causal", True)  # transformers adds 1 to the window if both are given
    return "encoder_only", lambda window: (window // 2, window // 2)


def gemma2(c: ConfigReader) -> ModelConfig:
    """Every second layer is global; attention logits have a soft cap."""
    c.only("use_bidirectional_attention", False)
    c.only("sliding_window_size", c.count("sliding_window", None))  # of the models of 9B and 27B
    rope = rope_of(c, heads_of(c)["head_dim"], c.count("max_position_embeddings"))
    soft_cap = c.number("attn_logit_softcapping", None, above=0)
    return with_windows(c, 2, (rope, rope), soft_cap, qk_norm=False, seen=sides(c))


def gemma3(c: ConfigReader) -> ModelConfig:
    """Every sixth layer is global; local layers have their own theta; norms on q and k."""
    c.only("attn_logit_softcapping")  # no implementation applies it
    size, longest = heads_of(c)["head_dim"], c.count("max_position_embeddings")
    local_theta, theta = theta_of(c, "rope_local_base_freq", 10000.0), theta_of(c, "rope_theta", 1e6)
    old = c.section("rope_scaling").given
    global_rope = rope_of_layer_type(c, "full_attention", theta, size, longest, old)
    local_rope = rope_of_layer_type(c, "sliding_attention", local_theta, size, longest)
    every = c.count("sliding_window_pattern", c.count("_sliding_window_pattern", 6))
    return with_windows(c, every, (global_rope, local_rope), None, qk_norm=True, seen=gemma3_sides(c))


def gemma_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """As in Llama, with four norms per layer."""

    def layer(index: int) -> dict[str, Any]:
        return attention_rows(config, index) | mlp_rows(config, index) | norm_rows(NORM_MODULES)

    return decoder_tensors(config, layer)


DEFAULTS = dict(
    head_dim=256, num_key_value_heads=4, query_pre_attn_scalar=256, sliding_window=4096, pad_token_id=0,
    eos_token_id=1, bos_token_id=2,
)  # fmt: skip
GEMMA_DEFAULTS = dict(
    head_dim=256, num_key_value_heads=16, rope_theta=10000.0, pad_token_id=0, eos_token_id=1, bos_token_id=2
)
CAPS = dict(final_logit_softcapping=30.0, attn_logit_softcapping=50.0)
GEMMA = Family(gemma, rope_decoder_tensors, UNUSED, defaults=GEMMA_DEFAULTS)
GEMMA2 = Family(gemma2, gemma_tensors, UNUSED, defaults=DEFAULTS | CAPS | dict(rope_theta=10000.0))
GEMMA3_TEXT = Family(gemma3, gemma_tensors, UNUSED, defaults=DEFAULTS)
