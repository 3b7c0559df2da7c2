"""Llama 2 and 3, and the families that differ from it in one thing: Mistral, Qwen 2, Qwen 3."""

from collections.abc import Callable
from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family, token_ids
from jattn.models.keys import MOST, Keys
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.names import Source, linears, norms, same, sources, transposed
from jattn.models.rope_keys import KINDS, rope_of
from jattn.nn import AttentionLayer, DynamicNTK, Norm
from jattn.spec import AttentionSpec

Windows = Callable[[Keys, int], list[int | None]]
"""Each layer's window, from the keys and the number of layers."""


MOST_LAYERS, MOST_HEADS, MOST_EXPERTS = 10_000, 65_536, 65_536
"""More than any known model has; larger numbers in a config would exhaust memory while it is read."""


def heads_of(c: Keys) -> dict[str, int]:
    """num_heads, num_kv_heads, head_dim, which may differ from hidden / heads."""
    heads, hidden = c.count("num_attention_heads", high=MOST_HEADS), c.count("hidden_size")
    kv_heads, head_dim = c.count("num_key_value_heads", heads), c.count("head_dim", None, high=MOST_HEADS)
    if heads % kv_heads:
        c.refuse("num_key_value_heads", f"must divide num_attention_heads={heads}")
    return dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim or share_of(c, "hidden_size", hidden, heads))


def share_of(c: Keys, name: str, hidden: int, heads: int) -> int:
    """head_dim where it is not given: the value of key `name`, divided by the heads."""
    if hidden % heads:
        c.refuse(name, f"must be a multiple of the {heads} heads, or head_dim be given")
    return hidden // heads


def decoder(c: Keys, layers: Any, norm: Norm, tied: bool = False, **more: Any) -> ModelConfig:
    """The parts that all families after Llama share; tied: the default of tie_word_embeddings."""
    layers = tuple(layers)
    return ModelConfig(
        family=c.get("model_type"),
        vocab_size=c.count("vocab_size"),
        hidden_size=c.count("hidden_size"),
        layers=layers,
        final_norm=norm,
        tied_embeddings=c.flag("tie_word_embeddings", tied),
        max_positions=longest(c.count("max_position_embeddings"), layers),
        **token_ids(c),
        **more,
    )


def longest(max_positions: int, layers: tuple[LayerConfig, ...]) -> int:
    """Tokens of the longest request; dynamic NTK is there to go past max_position_embeddings, by its factor."""
    scalings = [layer.rope.scaling for layer in layers if layer.rope is not None]
    factors = [scaling.factor for scaling in scalings if isinstance(scaling, DynamicNTK)]
    return min(max(int(max_positions * min(factors, default=1.0)), max_positions), MOST)


def one_window(c: Keys, count: int) -> list[int | None]:
    """The same window in all layers, as in Mistral."""
    window = c.count("sliding_window", None)
    if window is not None:
        c.only("use_sliding_window", True)  # transformers uses the window even where this is false
    c.ignore("use_sliding_window", "max_window_layers")
    types = c.choices("layer_types", KINDS[:2], count)
    if types is not None and {kind == KINDS[1] for kind in types} != {window is not None}:
        c.refuse("layer_types", f"does not fit sliding_window={window}, which holds for all layers of this family")
    return [window] * count


def no_windows(c: Keys, count: int) -> list[int | None]:
    """Llama: every layer attends to all earlier tokens."""
    c.only("sliding_window")
    c.only("use_sliding_window", False)
    c.ignore("max_window_layers")
    c.choices("layer_types", KINDS[:1], count)
    return [None] * count


def windows_by_type(c: Keys, count: int, usual: list[bool]) -> list[int | None]:
    """Each layer's window: by layer_types, or by `usual` (does the layer slide?) if that is absent."""
    types = c.choices("layer_types", KINDS[:2], count)
    slides = usual if types is None else [kind == KINDS[1] for kind in types]
    window = c.count("sliding_window", None)
    return [window if mine else None for mine in slides]


def qwen_windows(c: Keys, count: int) -> list[int | None]:
    """Windows only with use_sliding_window, and only from layer max_window_layers on."""
    first, used = c.count("max_window_layers", low=0), c.flag("use_sliding_window", False)
    windows = windows_by_type(c, count, [index >= first for index in range(count)])
    return windows if used else [None] * count


def translate(
    c: Keys, *, mlp: MLP | MoE | None = None, windows: Windows = one_window, sinks: bool = False,
    ropes: dict[str, Any] | None = None, **mixer: Any,
) -> ModelConfig:  # fmt: skip
    """A pre-norm decoder with rotary positions; `mixer` are options of AttentionLayer, `ropes` of rope_of; mlp None:
    a gated MLP from the config."""
    norm, heads, count = norm_of(c), heads_of(c), c.count("num_hidden_layers", high=MOST_LAYERS)
    rope = rope_of(c, heads["head_dim"], c.count("max_position_embeddings"), **(ropes or {}))
    mlp = gated_mlp(c) if mlp is None else mlp
    if "out_bias" not in mixer:
        c.only("attention_bias", False)
    c.only("mlp_bias", False, *([True] if getattr(mlp, "bias", False) else []))

    def layer(window: int | None) -> LayerConfig:
        spec = AttentionSpec(**heads, sliding_window=window, has_sinks=sinks)
        own = AttentionLayer(spec=spec, hidden_size=c.count("hidden_size"), rope=rope, **mixer)
        return LayerConfig(mixer=own, mlp=mlp, attn_norm=norm, mlp_norm=norm)

    return decoder(c, map(layer, windows(c, count)), norm)


def norm_of(c: Keys, **options: Any) -> Norm:
    """The RMS norm of every layer."""
    return Norm(eps=c.number("rms_norm_eps", above=0), **options)


def gated_mlp(c: Keys, bias: bool = False) -> MLP:
    """down(act(gate x) * up x) of the usual keys."""
    return MLP(width=c.count("intermediate_size"), activation=c.choice("hidden_act", ACTIVATIONS, "silu"), bias=bias)


def experts_of(c: Keys) -> dict[str, int]:
    """How many there are, and how many a token visits."""
    count, visited = c.count("num_local_experts", high=MOST_EXPERTS), c.count("num_experts_per_tok")
    if visited > count:
        c.refuse("num_experts_per_tok", f"must be at most num_local_experts={count}")
    return dict(num_experts=count, top_k=visited)


def biases(c: Keys) -> dict[str, bool]:
    """attention_bias puts one on all four projections."""
    bias = c.flag("attention_bias", False)
    return dict(qkv_bias=bias, out_bias=bias)


def names(config: ModelConfig) -> dict[str, Source]:
    """self_attn.q_proj and so on."""
    return sources(config, outside(config), "model.layers.{}.", lambda index: layer_names(config, index))


def outside(config: ModelConfig) -> dict[str, Any]:
    """The tensors outside the layers; a tied head is not stored, or not read."""
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


UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")  # buffers, and a tied head stored a second time
ENDS = dict(bos_token_id=1, eos_token_id=2)
QWEN = dict(
    num_key_value_heads=32, use_sliding_window=False, sliding_window=4096, max_window_layers=28, rope_theta=10000.0
)


def llama(c: Keys) -> ModelConfig:
    """Biases as the config says, no windows."""
    return translate(c, mlp=gated_mlp(c, c.flag("mlp_bias", False)), windows=no_windows, **biases(c))


def qwen2(c: Keys) -> ModelConfig:
    """Biases of q, k and v."""
    return translate(c, windows=qwen_windows, qkv_bias=True)


def qwen3(c: Keys) -> ModelConfig:
    """Norms of q and k."""
    return translate(c, windows=qwen_windows, qk_norm=norm_of(c), **biases(c))


LLAMA = Family(llama, names, UNUSED, defaults=ENDS | dict(rope_theta=10000.0))
MISTRAL = Family(
    translate, names, UNUSED, defaults=ENDS | dict(sliding_window=4096, num_key_value_heads=8, rope_theta=10000.0)
)
QWEN2 = Family(qwen2, names, UNUSED, defaults=QWEN)
QWEN3 = Family(qwen3, names, UNUSED, defaults=QWEN | dict(head_dim=128))
