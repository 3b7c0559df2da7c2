"""What families share: readers of the usual keys of config.json, the usual decoder, and the usual tensor names."""

from collections.abc import Callable
from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import MAX_COUNT, ConfigReader
from jattn.models.families.family import token_ids
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import LAYER_TYPES, rope_of
from jattn.models.tensor_names import TensorSource, linear_rows, norm_rows, tensor_table, transposed, unchanged
from jattn.nn import AttentionConfig, DynamicNTKRopeScaling, Norm
from jattn.spec import AttentionSpec

Windows = Callable[[ConfigReader, int], list[int | None]]
"""(config, number of layers) -> the sliding window of each layer; None: all earlier tokens."""

MAX_LAYERS, MAX_HEADS, MAX_EXPERTS = 10_000, 65_536, 65_536
"""Upper limits, far above any known model. Larger numbers would exhaust memory while the config is read."""

UNUSED = ("rotary_emb.inv_freq", "lm_head.weight")
"""Tensors that are not read: buffers of old checkpoints, and a tied head that is stored a second time."""
ENDS = dict(bos_token_id=1, eos_token_id=2)
"""Token ids of configs without them, in several families."""


def heads_of(c: ConfigReader) -> dict[str, Any]:
    """num_heads, num_kv_heads and head_dim, which may differ from hidden_size / num_heads."""
    heads, hidden = c.count("num_attention_heads", high=MAX_HEADS), c.count("hidden_size")
    kv_heads, head_dim = c.count("num_key_value_heads", heads), c.count("head_dim", None, high=MAX_HEADS)
    if heads % kv_heads:
        c.refuse("num_key_value_heads", f"must divide num_attention_heads={heads}")
    return dict(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim or default_head_dim(c, "hidden_size", hidden, heads)
    )


def default_head_dim(c: ConfigReader, name: str, hidden: int, heads: int) -> int:
    """hidden / heads, where `name` is the key of hidden; ValueError if it is not an integer."""
    if hidden % heads:
        c.refuse(name, f"must be a multiple of the {heads} heads, or head_dim must be given")
    return hidden // heads


def model_config(c: ConfigReader, layers: Any, norm: Norm, tied: bool = False, **more: Any) -> ModelConfig:
    """The ModelConfig of these layers and the usual keys. tied: default of tie_word_embeddings. more: other fields."""
    layers = tuple(layers)
    return ModelConfig(
        family=c.get("model_type"),
        vocab_size=c.count("vocab_size"),
        hidden_size=c.count("hidden_size"),
        layers=layers,
        final_norm=norm,
        tied_embeddings=c.flag("tie_word_embeddings", tied),
        max_positions=max_request_length(c.count("max_position_embeddings"), layers),
        **token_ids(c),
        **more,
    )


def max_request_length(max_positions: int, layers: tuple[LayerConfig, ...]) -> int:
    """Tokens of the longest request: max_position_embeddings, times the factor of dynamic NTK."""
    scalings = [layer.rope.scaling for layer in layers if layer.rope is not None]
    factors = [scaling.factor for scaling in scalings if isinstance(scaling, DynamicNTKRopeScaling)]
    return min(max(int(max_positions * min(factors, default=1.0)), max_positions), MAX_COUNT)


def same_window(c: ConfigReader, count: int) -> list[int | None]:
    """The same window in all layers (Mistral)."""
    window = c.count("sliding_window", None)
    if window is not None:
        c.only("use_sliding_window", True)  # transformers uses the window even if this is false
    c.ignore("use_sliding_window", "max_window_layers")
    types = c.choices("layer_types", LAYER_TYPES[:2], count)
    if types is not None and {kind == LAYER_TYPES[1] for kind in types} != {window is not None}:
        c.refuse("layer_types", f"does not fit sliding_window={window}, which applies to all layers of this model_type")
    return [window] * count


def no_windows(c: ConfigReader, count: int) -> list[int | None]:
    """Every layer attends to all earlier tokens (Llama)."""
    c.only("sliding_window")
    c.only("use_sliding_window", False)
    c.ignore("max_window_layers")
    c.choices("layer_types", LAYER_TYPES[:1], count)
    return [None] * count


def windows_by_type(c: ConfigReader, count: int, slides: list[bool]) -> list[int | None]:
    """The window of each layer, from layer_types; if that is absent: sliding_window where `slides` is true."""
    types = c.choices("layer_types", LAYER_TYPES[:2], count)
    slides = slides if types is None else [kind == LAYER_TYPES[1] for kind in types]
    window = c.count("sliding_window", None)
    return [window if slide else None for slide in slides]


def rope_decoder(
    c: ConfigReader,
    *,
    mlp: MLP | MoE | None = None,
    windows: Windows = same_window,
    norms: ResidualNorms | None = None,
    sinks: bool = False,
    rope_options: dict[str, Any] | None = None,
    **attention: Any,
) -> ModelConfig:
    """The usual decoder: RMS norms and rotary positions.

    mlp None: a gated MLP. norms: of both sublayers; None: one norm before each. rope_options: of `rope_of`.
    attention: more options of AttentionConfig.
    """
    norm, heads, count = rms_norm(c), heads_of(c), c.count("num_hidden_layers", high=MAX_LAYERS)
    rope = rope_of(c, heads["head_dim"], c.count("max_position_embeddings"), **(rope_options or {}))
    mlp = gated_mlp(c) if mlp is None else mlp
    norms = ResidualNorms(before=norm) if norms is None else norms
    if "out_bias" not in attention:
        c.only("attention_bias", False)
    c.only("mlp_bias", False, *([True] if getattr(mlp, "bias", False) else []))

    def layer(window: int | None) -> LayerConfig:
        spec = AttentionSpec(**heads, sliding_window=window, has_sinks=sinks)
        self_attn = AttentionConfig(spec=spec, hidden_size=c.count("hidden_size"), rope=rope, **attention)
        return LayerConfig(self_attn=self_attn, mlp=mlp, attn_norms=norms, mlp_norms=norms)

    return model_config(c, map(layer, windows(c, count)), norm)


def rms_norm(c: ConfigReader, **options: Any) -> Norm:
    """The RMS norm with rms_norm_eps."""
    return Norm(eps=c.number("rms_norm_eps", above=0), **options)


def gated_mlp(c: ConfigReader, bias: bool = False) -> MLP:
    """The gated MLP of the usual keys."""
    return MLP(width=c.count("intermediate_size"), activation=c.choice("hidden_act", ACTIVATIONS, "silu"), bias=bias)


def experts_of(c: ConfigReader) -> dict[str, Any]:
    """The options num_experts and top_k of MoE."""
    count, top_k = c.count("num_local_experts", high=MAX_EXPERTS), c.count("num_experts_per_tok")
    if top_k > count:
        c.refuse("num_experts_per_tok", f"must be at most num_local_experts={count}")
    return dict(num_experts=count, top_k=top_k)


def attention_biases(c: ConfigReader) -> dict[str, Any]:
    """attention_bias applies to all four projections."""
    bias = c.flag("attention_bias", False)
    return dict(qkv_bias=bias, out_bias=bias)


def rope_decoder_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """The tensors of a `rope_decoder` with norms before its sublayers: model.layers.0.self_attn.q_proj and so on."""
    return decoder_tensors(
        config, lambda index: attention_rows(config, index) | mlp_rows(config, index) | PRE_NORM_ROWS
    )


def decoder_tensors(config: ModelConfig, layer: Callable[[int], dict[str, Any]]) -> dict[str, TensorSource]:
    """The usual tensors outside the layers, and layer(index) -> rows of one layer, see `tensor_table`."""
    return tensor_table(config, outside_rows(config), "model.layers.{}.", layer)


def outside_rows(config: ModelConfig) -> dict[str, Any]:
    """The tensors outside the layers. A tied head needs none."""
    table = {"embed": ("model.embed_tokens.weight", unchanged), **norm_rows({"final_norm": "model.norm"})}
    return table if config.tied_embeddings else table | {"head.kernel": ("lm_head.weight", transposed)}


PRE_NORM_ROWS = norm_rows({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})


def attention_rows(config: ModelConfig, index: int) -> dict[str, Any]:
    """The attention of one layer."""
    attn = config.layers[index].self_attn
    table = linear_rows({f"attn.{n}": f"self_attn.{n}_proj" for n in "qkv"}, attn.qkv_bias)
    table |= linear_rows({"attn.o": "self_attn.o_proj"}, attn.out_bias)
    if attn.qk_norm is not None and attn.qk_norm.has_scale:
        table |= norm_rows({f"attn.{n}_norm": f"self_attn.{n}_norm" for n in "qk"})
    return table


def mlp_rows(config: ModelConfig, index: int, where: str = "mlp") -> dict[str, Any]:
    """The gated MLP of one layer, module `where`."""
    table = {f"mlp.{n}": f"{where}.{n}_proj" for n in ("gate", "up", "down")}
    return linear_rows(table, getattr(config.layers[index].mlp, "bias", False))
