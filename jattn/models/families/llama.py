"""Llama 2 and 3, and the families that differ from it in one thing: Mistral, Qwen 2, Qwen 3."""

from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family, token_ids
from jattn.models.keys import Keys
from jattn.models.mlp import MLP
from jattn.models.names import Source, linears, norms, same, sources, transposed
from jattn.models.rope_keys import rope_of
from jattn.nn import AttentionLayer, Norm
from jattn.spec import AttentionSpec


def heads_of(c: Keys) -> dict[str, int]:
    """num_heads, num_kv_heads, head_dim, which may differ from hidden / heads."""
    heads = c.need("num_attention_heads")
    return dict(
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads", heads),
        head_dim=c.get("head_dim", c.need("hidden_size") // heads),
    )


def decoder(c: Keys, layers: Any, norm: Norm, **more: Any) -> ModelConfig:
    """The parts that all families after Llama share."""
    return ModelConfig(
        family=c.need("model_type"),
        vocab_size=c.need("vocab_size"),
        hidden_size=c.need("hidden_size"),
        layers=tuple(layers),
        final_norm=norm,
        tied_embeddings=c.get("tie_word_embeddings", False),
        max_positions=c.need("max_position_embeddings"),
        **token_ids(c),
        **more,
    )


def windows_of(c: Keys, count: int) -> list[int | None]:
    """Each layer's window: layer_types where given, else qwen's first layers without, else the same for all."""
    window, types = c.get("sliding_window"), c.get("layer_types")
    sliding_from = c.get("max_window_layers", 0)
    if not c.get("use_sliding_window", True):
        return [None] * count
    if types is None:
        return [window if index >= sliding_from else None for index in range(count)]
    known = {"full_attention": None, "sliding_attention": window}
    return [known[name] for name in types]


def translate(
    c: Keys, *, qkv_bias: bool = False, out_bias: bool = False, mlp_bias: bool = False, qk_norm: bool = False
) -> ModelConfig:
    """A pre-norm decoder with rotary positions and a gated MLP."""
    norm, heads, count = Norm(eps=c.need("rms_norm_eps")), heads_of(c), c.need("num_hidden_layers")
    rope = rope_of(c, heads["head_dim"], c.need("max_position_embeddings"))
    mlp = MLP(width=c.need("intermediate_size"), activation=c.get("hidden_act", "silu"), bias=mlp_bias)

    def layer(window: int | None) -> LayerConfig:
        mixer = AttentionLayer(
            spec=AttentionSpec(**heads, sliding_window=window),
            hidden_size=c.need("hidden_size"),
            rope=rope,
            qk_norm=norm if qk_norm else None,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
        )
        return LayerConfig(mixer=mixer, mlp=mlp, attn_norm=norm, mlp_norm=norm)

    return decoder(c, map(layer, windows_of(c, count)), norm)


def names(config: ModelConfig) -> dict[str, Source]:
    """self_attn.q_proj and so on."""
    return sources(config, outside(config), "model.layers.{}.", lambda index: layer_names(config, index))


def outside(config: ModelConfig) -> dict[str, Any]:
    """What lies outside the layers; a tied head is not stored, or stored twice."""
    table = {"embed": ("model.embed_tokens.weight", same), **norms({"final_norm": "model.norm"})}
    return table if config.tied_embeddings else table | {"head.kernel": ("lm_head.weight", transposed)}


def layer_names(config: ModelConfig, index: int) -> dict[str, Any]:
    """One layer."""
    layer = config.layers[index]
    table = linears({f"attn.{n}": f"self_attn.{n}_proj" for n in "qkv"}, layer.mixer.qkv_bias)
    table |= linears({"attn.o": "self_attn.o_proj"}, layer.mixer.out_bias)
    table |= linears({f"mlp.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")}, getattr(layer.mlp, "bias", False))
    table |= norms({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
    if layer.mixer.qk_norm is not None:
        table |= norms({f"attn.{n}_norm": f"self_attn.{n}_norm" for n in "qk"})
    return table


def _llama(c: Keys) -> ModelConfig:
    bias = c.get("attention_bias", False)
    return translate(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.get("mlp_bias", False))


def _qwen3(c: Keys) -> ModelConfig:
    bias = c.get("attention_bias", False)
    return translate(c, qkv_bias=bias, out_bias=bias, qk_norm=True)


LLAMA_UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")
LLAMA = Family(_llama, names, LLAMA_UNUSED)
MISTRAL = Family(translate, names, LLAMA_UNUSED)
QWEN2 = Family(lambda c: translate(c, qkv_bias=True), names, LLAMA_UNUSED)
QWEN3 = Family(_qwen3, names, LLAMA_UNUSED)
