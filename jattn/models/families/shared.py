"""What families share: readers of the usual keys of config.json, the usual decoder, and the usual tensor names."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import MAX_COUNT, ConfigReader
from jattn.models.families.family import token_ids
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import LAYER_TYPES, rope_of
from jattn.models.tensor_names import TensorSource, linear_rows, norm_rows, tensor_table, transposed, unchanged
from jattn.nn import AttentionConfig, DynamicNTKRopeScaling, Norm, Rope
from jattn.spec import AttentionSpec

Windows = Callable[[ConfigReader, int], list[int | None]]
"""(config, number of layers) -> the sliding window of each layer; None: all earlier tokens."""

Ropes = Callable[[int, int | None], Rope | None]
"""(index of a layer, its sliding window) -> its rotary embedding."""

Sides = tuple[str, Callable[[int], int | tuple[int, int]]]
"""The type of attention, and sliding_window -> the window."""

BOTH_SIDES: Sides = ("encoder_only", lambda window: (window, window))
"""Every token attends to every other, or to as many as the window has on each side."""

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


def equal_heads(c: ConfigReader) -> dict[str, Any]:
    """`heads_of` for families with as many kv heads as query heads."""
    c.only("num_key_value_heads", c.count("num_attention_heads", high=MAX_HEADS))
    return heads_of(c)


def default_head_dim(c: ConfigReader, name: str, hidden: int, heads: int) -> int:
    """hidden / heads, where `name` is the key of hidden; ValueError if it is not an integer."""
    if hidden % heads:
        c.refuse(name, f"must be a multiple of the {heads} heads, or head_dim must be given")
    return hidden // heads


def model_config(c: ConfigReader, layers: Any, norm: Norm | None, tied: bool = False, **more: Any) -> ModelConfig:
    """The ModelConfig of these layers and the usual keys. tied: default of tie_word_embeddings. more: other fields."""
    layers = tuple(layers)
    fields: dict[str, Any] = dict(
        family=c.get("model_type"),
        vocab_size=c.count("vocab_size"),
        hidden_size=c.count("hidden_size"),
        layers=layers,
        final_norm=norm,
        tied_embeddings=c.flag("tie_word_embeddings", tied),
        max_positions=max_request_length(c.count("max_position_embeddings"), layers),
        **token_ids(c),
    )
    return ModelConfig(**fields | more)


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
    return without_windows(c, count)


def without_windows(c: ConfigReader, count: int) -> list[int | None]:
    """No window in any layer; layer_types, if given, must say the same."""
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
    mlp: MLP | MoE | Sequence[MLP | MoE] | None = None,
    windows: Windows = same_window,
    norm: Norm | None = None,
    norms: ResidualNorms | None = None,
    mlp_norms: ResidualNorms | None = None,
    parallel: bool = False,
    heads: dict[str, Any] | None = None,
    scale: float | Callable[[int], float | None] | None = None,
    sinks: bool = False,
    ropes: Ropes | None = None,
    rope_options: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **attention: Any,
) -> ModelConfig:
    """The usual decoder: norms and rotary positions.

    mlp: of all layers, or one per layer; None: a gated MLP.
    norm: after the last layer; None: the RMS norm.
    norms: of both sublayers; None: `norm` before each. mlp_norms: of the MLP; None: `norms`.
    heads: None: those of `heads_of`.
    scale: of the attention logits, or a function of the layer's index.
    ropes: None: one rotary embedding for all layers, made by `rope_of` with rope_options.
    model: more arguments of `model_config`. attention: more options of AttentionConfig.
    """
    heads, count = heads or heads_of(c), c.count("num_hidden_layers", high=MAX_LAYERS)
    norm = rms_norm(c) if norm is None else norm
    if ropes is None:
        rope = rope_of(c, heads["head_dim"], c.count("max_position_embeddings"), **(rope_options or {}))
        ropes = lambda index, window: rope
    mlp = gated_mlp(c) if mlp is None else mlp
    mlps = [mlp] * count if isinstance(mlp, MLP | MoE) else mlp
    norms = ResidualNorms(before=norm) if norms is None else norms
    if "out_bias" not in attention:
        c.only("attention_bias", False)
    c.only("mlp_bias", False, *([True] if mlps[0].bias else []))
    c.only("use_mrope", False)
    if heads.get("attn_type") == "encoder_only":
        c.only("is_causal", False)
        attn_type, seen = BOTH_SIDES
    else:
        attn_type, seen = sides(c)
    attending: dict[str, Any] = heads | dict(attn_type=attn_type)

    def layer(index: int, window: int | None) -> LayerConfig:
        layer_scale = scale(index) if callable(scale) else scale
        both = None if window is None else seen(window)
        spec = AttentionSpec(**attending, sliding_window=both, has_sinks=sinks, scale=layer_scale)
        rope = ropes(index, window)
        return LayerConfig(
            self_attn=AttentionConfig(spec=spec, hidden_size=c.count("hidden_size"), rope=rope, **attention),
            mlp=mlps[index],
            attn_norms=norms,
            mlp_norms=norms if mlp_norms is None else mlp_norms,
            parallel=parallel,
        )

    layers = [layer(index, window) for index, window in enumerate(windows(c, count))]
    return model_config(c, layers, norm, **(model or {}))


def sides(c: ConfigReader) -> Sides:
    """BOTH_SIDES where is_causal is false."""
    return ("decoder", lambda window: window) if c.flag("is_causal", True) else BOTH_SIDES


def rope_layers(c: ConfigReader, count: int) -> list[bool]:
    """For each layer: True if it has rotary positions (no_rope_layers has 1 for those)."""
    every, flags = c.count("no_rope_layer_interval", 4), c.counts("no_rope_layers", 1)
    if flags and len(flags) < count:
        c.refuse("no_rope_layers", f"must have one number for each of the {count} layers")
    return [bool(x) for x in flags[:count]] if flags else [(index + 1) % every != 0 for index in range(count)]


def layer_norm(c: ConfigReader, name: str = "layer_norm_eps", has_bias: bool = True, **options: Any) -> Norm:
    """The layer norm whose epsilon is under this key."""
    return Norm(kind="layer", eps=c.number(name, above=0), has_bias=has_bias, **options)


def plain_mlp(c: ConfigReader, bias: bool = True, default: str = "gelu_new") -> MLP:
    """The MLP without a gate, from the usual keys."""
    return MLP(
        width=c.count("intermediate_size"),
        activation=c.choice("hidden_act", ACTIVATIONS, default),
        gated=False,
        bias=bias,
    )


def rms_norm(c: ConfigReader, **options: Any) -> Norm:
    """The RMS norm with rms_norm_eps."""
    return Norm(eps=c.number("rms_norm_eps", above=0), **options)


def gated_mlp(c: ConfigReader, bias: bool = False, width: int | None = None) -> MLP:
    """The gated MLP, from the usual keys; width None: intermediate_size."""
    wide = c.count("intermediate_size") if width is None else width
    return MLP(width=wide, activation=c.choice("hidden_act", ACTIVATIONS, "silu"), bias=bias)


def experts_of(c: ConfigReader) -> dict[str, Any]:
    """The options num_experts and top_k of MoE."""
    count, top_k = c.count("num_local_experts", high=MAX_EXPERTS), c.count("num_experts_per_tok")
    if top_k > count:
        c.refuse("num_experts_per_tok", f"must be at most {c.stored_name('num_local_experts')}={count}")
    return dict(num_experts=count, top_k=top_k)


def dense_or_experts(c: ConfigReader, moe: MoE, sparse: Sequence[bool], bias: bool = False) -> list[MLP | MoE]:
    """For each layer: the experts if `sparse`, else a gated MLP of width intermediate_size."""
    c.count("intermediate_size", None)  # so that it may be given without a gated MLP; a wrong value is refused
    return [moe if is_sparse else gated_mlp(c, bias) for is_sparse in sparse]


def attention_biases(c: ConfigReader) -> dict[str, Any]:
    """attention_bias applies to all four projections."""
    bias = c.flag("attention_bias", False)
    return dict(qkv_bias=bias, out_bias=bias)


LLAMA_NAMES: dict[str, Any] = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm",
    "head": "lm_head",
    **{f"attn.{n}": f"self_attn.{n}_proj" for n in "qkvo"},
    **{f"attn.{n}_norm": f"self_attn.{n}_norm" for n in "qk"},
    **{f"mlp.{n}": f"mlp.{n}_proj" for n in ("gate", "up", "down")},
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
"""Names for `named_tensors`, as in Llama."""
EXPERT_NAMES: dict[str, Any] = {
    "mlp.router": "mlp.gate",
    "mlp.router.correction": "mlp.gate.e_score_correction_bias",
    **{f"experts.{n}": f"mlp.experts.{{e}}.{n}_proj" for n in ("gate", "up", "down")},
    **{f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
}
"""The usual names of experts."""
MIXTRAL_NAMES: dict[str, Any] = {
    "mlp.router": "block_sparse_moe.gate",
    "mlp.router.correction": "block_sparse_moe.e_score_correction_bias",
    "experts.gate": "block_sparse_moe.experts.{e}.w1",
    "experts.up": "block_sparse_moe.experts.{e}.w3",
    "experts.down": "block_sparse_moe.experts.{e}.w2",
}
"""The names of experts in Mixtral."""


def gate_up_rows(tensor: str) -> dict[str, Any]:
    """Rows of gate and up, which are stored in one tensor [2 * width, hidden]."""
    part = lambda index: lambda x: np.split(x, 2)[index].T
    return {"mlp.gate.kernel": (tensor, part(0)), "mlp.up.kernel": (tensor, part(1))}


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
    assert isinstance(attn, AttentionConfig)
    table = linear_rows({f"attn.{n}": f"self_attn.{n}_proj" for n in "qkv"}, attn.qkv_bias)
    table |= linear_rows({"attn.o": "self_attn.o_proj"}, attn.out_bias)
    if attn.qk_norm is not None and attn.qk_norm.has_scale:
        table |= norm_rows({f"attn.{n}_norm": f"self_attn.{n}_norm" for n in "qk"})
    return table


def mlp_rows(config: ModelConfig, index: int, where: str = "mlp") -> dict[str, Any]:
    """The gated MLP of one layer, module `where`."""
    table = {f"mlp.{n}": f"{where}.{n}_proj" for n in ("gate", "up", "down")}
    return linear_rows(table, config.layers[index].mlp.bias)
