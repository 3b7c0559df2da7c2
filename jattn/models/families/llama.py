"""Llama 2 and 3, and the families that differ from it in one thing: Mistral, Qwen 2, Qwen 3."""

from typing import Any

from jattn.errors import UnsupportedError
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family, token_ids
from jattn.models.keys import Keys
from jattn.models.mlp import MLP
from jattn.models.moe import MoE
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


def decoder(c: Keys, layers: Any, norm: Norm, tied: bool | None = None, **more: Any) -> ModelConfig:
    """The parts that all families after Llama share; tied: what absence of the key means to this family."""
    return ModelConfig(
        family=c.need("model_type"),
        vocab_size=c.need("vocab_size"),
        hidden_size=c.need("hidden_size"),
        layers=tuple(layers),
        final_norm=norm,
        tied_embeddings=c.get("tie_word_embeddings", bool(tied)),
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
    if len(types) != count or not set(types) <= known.keys():
        raise UnsupportedError(
            f"{c.where}: {len(types)} layer_types {sorted(set(types))} must be {count} of {[*known]}"
        )
    return [known[name] for name in types]


def translate(c: Keys, *, mlp: MLP | MoE | None = None, sinks: bool = False, **mixer: Any) -> ModelConfig:
    """A pre-norm decoder with rotary positions; `mixer` are options of AttentionLayer, mlp None reads a gated one."""
    norm, heads, count = Norm(eps=c.need("rms_norm_eps")), heads_of(c), c.need("num_hidden_layers")
    rope = rope_of(c, heads["head_dim"], c.need("max_position_embeddings"))
    mlp = gated_mlp(c) if mlp is None else mlp
    if "out_bias" not in mixer:
        c.only("attention_bias", False)
    c.only("mlp_bias", False, *([True] if getattr(mlp, "bias", False) else []))

    def layer(window: int | None) -> LayerConfig:
        spec = AttentionSpec(**heads, sliding_window=window, has_sinks=sinks)
        own = AttentionLayer(spec=spec, hidden_size=c.need("hidden_size"), rope=rope, **mixer)
        return LayerConfig(mixer=own, mlp=mlp, attn_norm=norm, mlp_norm=norm)

    return decoder(c, map(layer, windows_of(c, count)), norm)


def gated_mlp(c: Keys, bias: bool = False) -> MLP:
    """down(act(gate x) * up x) of the usual keys."""
    return MLP(width=c.need("intermediate_size"), activation=c.get("hidden_act", "silu"), bias=bias)


def biases(c: Keys) -> dict[str, bool]:
    """attention_bias puts one on all four projections."""
    bias = c.get("attention_bias", False)
    return dict(qkv_bias=bias, out_bias=bias)


def names(config: ModelConfig) -> dict[str, Source]:
    """self_attn.q_proj and so on."""
    return sources(config, outside(config), "model.layers.{}.", lambda index: layer_names(config, index))


def outside(config: ModelConfig) -> dict[str, Any]:
    """What lies outside the layers; a tied head is not stored, or stored twice."""
    table = {"embed": ("model.embed_tokens.weight", same), **norms({"final_norm": "model.norm"})}
    return table if config.tied_embeddings else table | {"head.kernel": ("lm_head.weight", transposed)}


def layer_names(config: ModelConfig, index: int) -> dict[str, Any]:
    """One layer."""
    return attention_names(config, index) | mlp_names(config, index) | NORM_NAMES


NORM_NAMES = norms({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})


def attention_names(config: ModelConfig, index: int) -> dict[str, Any]:
    """Its attention."""
    mixer = config.layers[index].mixer
    table = linears({f"attn.{n}": f"self_attn.{n}_proj" for n in "qkv"}, mixer.qkv_bias)
    table |= linears({"attn.o": "self_attn.o_proj"}, mixer.out_bias)
    if mixer.qk_norm is not None and mixer.qk_norm.has_scale:
        table |= norms({f"attn.{n}_norm": f"self_attn.{n}_norm" for n in "qk"})
    return table


def mlp_names(config: ModelConfig, index: int, where: str = "mlp") -> dict[str, Any]:
    """Its gated MLP."""
    table = {f"mlp.{n}": f"{where}.{n}_proj" for n in ("gate", "up", "down")}
    return linears(table, getattr(config.layers[index].mlp, "bias", False))


UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")  # buffers, and a tied head that was stored all the same
LLAMA = Family(lambda c: translate(c, mlp=gated_mlp(c, c.get("mlp_bias", False)), **biases(c)), names, UNUSED)
MISTRAL = Family(translate, names, UNUSED)
QWEN2 = Family(lambda c: translate(c, qkv_bias=True), names, UNUSED)
QWEN3 = Family(lambda c: translate(c, qk_norm=Norm(eps=c.need("rms_norm_eps")), **biases(c)), names, UNUSED)
