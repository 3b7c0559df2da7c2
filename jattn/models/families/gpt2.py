"""GPT-2, GPT-Neo and OPT: learned positions, layer norms, a plain MLP, biases."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.models.config import ModelConfig
from jattn.models.config_reader import MAX_COUNT, ConfigReader
from jattn.models.families.bart import without_padding
from jattn.models.families.family import Family
from jattn.models.families.parallel import GPT2_KEYS, GPT2_UNUSED_KEYS, OLD_BUFFERS, inner_mlp
from jattn.models.families.shared import MAX_LAYERS, UNUSED, equal_heads, layer_norm, no_windows, rope_decoder
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import named_tensors, unchanged
from jattn.nn import Norm


def learned_positions_decoder(
    c: ConfigReader, mlp: MLP, norm: Norm, *, model: dict[str, Any] | None = None, **options: Any
):
    """`rope_decoder` with learned positions instead of rotation. model, options: arguments of `rope_decoder`."""
    model = dict(tied=True, learned_positions=c.count("max_position_embeddings")) | (model or {})
    return rope_decoder(
        c, mlp=mlp, norm=norm, heads=equal_heads(c), ropes=lambda index, window: None, model=model, **options
    )


def gpt2(c: ConfigReader) -> ModelConfig:
    """Attention logits may be left unscaled, or be divided by the layer's number."""
    c.only("add_cross_attention", False)
    c.only("quantization_config")  # its matrices are stored [in, out], and programs pack them in different orders
    c.ignore("reorder_and_upcast_attn", *GPT2_UNUSED_KEYS)
    usual = equal_heads(c)["head_dim"] ** -0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_layer = c.flag("scale_attn_by_inverse_layer_idx", False)
    return learned_positions_decoder(
        c,
        inner_mlp(c, c.count("hidden_size")),
        layer_norm(c, "layer_norm_epsilon"),
        windows=no_windows,
        scale=lambda index: usual / (index + 1) if by_layer else usual,
        qkv_bias=True,
        out_bias=True,
    )


def gpt_neo(c: ConfigReader) -> ModelConfig:
    """Attention logits are not scaled; local layers have a window."""
    c.ignore(*GPT2_UNUSED_KEYS)
    c.only("is_causal", True)  # transformers ignores it: the mask is part of the layer
    count, window = c.count("num_hidden_layers", high=MAX_LAYERS), c.count("window_size", 256)
    kinds = attention_kinds(c, count)
    act = c.choice("activation_function", ACTIVATIONS, "gelu_new")
    mlp = MLP(width=c.count("intermediate_size", 4 * c.count("hidden_size")), activation=act, gated=False, bias=True)
    return learned_positions_decoder(
        c,
        mlp,
        layer_norm(c, "layer_norm_epsilon"),
        windows=lambda c, count: [window if kind == "local" else None for kind in kinds],
        scale=1.0,
        out_bias=True,
    )


def attention_kinds(c: ConfigReader, count: int) -> list[str]:
    """'global' or 'local' for each layer: attention_types is a list of [kinds, how often]."""
    kinds: list[str] = []
    pairs = c.get("attention_types", [[["global", "local"], 12]])
    for item in pairs if isinstance(pairs, list) else [pairs]:
        if not (isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], list) and is_count(item[1])):
            c.refuse("attention_types", "must be a list of [kinds of layers, how often]")
        kinds += list(item[0]) * min(item[1], count + 1)
    if len(kinds) != count or any(kind not in ("global", "local") for kind in kinds):
        c.refuse("attention_types", f"must give 'global' or 'local' to each of the {count} layers")
    c.only("attention_layers", kinds)
    return kinds


def is_count(x: Any) -> bool:
    """Is x an int from 1 to MAX_COUNT?"""
    return isinstance(x, int) and not isinstance(x, bool) and 0 < x <= MAX_COUNT


def opt(c: ConfigReader) -> ModelConfig:
    """Norms before the sublayers, or after each sum."""
    hidden = c.count("hidden_size")
    c.only("word_embed_proj_dim", hidden)
    c.only("learned_embeddings", True)  # of Galactica
    c.only("scale_embeddings", False)
    bias, is_before = c.flag("enable_bias", True), c.flag("do_layer_norm_before", True)
    affine = c.flag("layer_norm_elementwise_affine", True)
    norm = Norm(kind="layer", eps=1e-5, has_scale=affine, has_bias=affine)
    act = c.choice("activation_function", ACTIVATIONS, "relu")
    is_removed = c.flag("_remove_final_layer_norm", False)
    return learned_positions_decoder(
        c,
        MLP(width=c.count("ffn_dim"), activation=act, gated=False, bias=bias),
        norm,
        windows=no_windows,
        norms=ResidualNorms(before=norm) if is_before else ResidualNorms(of_sum=norm),
        model=dict(final_norm=None) if is_removed or not is_before else {},
        qkv_bias=bias,
        out_bias=bias,
    )


def qkv_third(index: int) -> Callable[[np.ndarray], np.ndarray]:
    """q (0), k (1) or v (2) of GPT-2's projection, which is stored as [in, 3 * out]."""
    return lambda x: np.split(x, 3, axis=-1)[index]


GPT2_NAMES: dict[str, Any] = {
    "embed": "transformer.wte.weight", "positions": "transformer.wpe.weight", "final_norm": "transformer.ln_f",
    "head": "lm_head", "attn_norm": "ln_1", "mlp_norm": "ln_2",
}  # fmt: skip
GPT2_CONV: dict[str, Any] = {"attn.o": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
GPT2_ROWS: dict[str, Any] = {f"{ours}.kernel": (f"{theirs}.weight", unchanged) for ours, theirs in GPT2_CONV.items()}
for number, name in enumerate("qkv"):
    GPT2_ROWS[f"attn.{name}.kernel"] = ("attn.c_attn.weight", qkv_third(number))
    GPT2_ROWS[f"attn.{name}.bias"] = ("attn.c_attn.bias", qkv_third(number))
GPT_NEO_NAMES = GPT2_NAMES | {
    **{f"attn.{n}": f"attn.attention.{n}_proj" for n in "qkv"}, "attn.o": "attn.attention.out_proj",
    "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
OPT_PREFIX = "model.decoder."
OPT_NAMES: dict[str, Any] = {
    "embed": f"{OPT_PREFIX}embed_tokens.weight", "positions": (f"{OPT_PREFIX}embed_positions.weight", without_padding),
    "final_norm": f"{OPT_PREFIX}final_layer_norm", "head": "lm_head", "mlp.up": "fc1", "mlp.down": "fc2",
    **{f"attn.{n}": f"self_attn.{n}_proj" for n in "qkv"}, "attn.o": "self_attn.out_proj",
    "attn_norm": "self_attn_layer_norm", "attn_norm_sum": "self_attn_layer_norm",
    "mlp_norm": "final_layer_norm", "mlp_norm_sum": "final_layer_norm",
}  # fmt: skip
GPT2_DEFAULTS = dict(bos_token_id=50256, eos_token_id=50256)
GPT2_UNUSED = (*UNUSED, *OLD_BUFFERS)
GPT2 = Family(
    gpt2, named_tensors(GPT2_NAMES | GPT2_CONV | GPT2_ROWS, "transformer.h.{}."), GPT2_UNUSED, prefix="transformer.",
    aliases=GPT2_KEYS, defaults=GPT2_DEFAULTS,
)  # fmt: skip
GPT_NEO = Family(
    gpt_neo, named_tensors(GPT_NEO_NAMES, "transformer.h.{}."), GPT2_UNUSED, prefix="transformer.",
    aliases=dict(
        num_hidden_layers=("num_layers", "num_hidden_layers"),
        num_attention_heads=("num_heads", "num_attention_heads"),
    ), defaults=GPT2_DEFAULTS,
)  # fmt: skip
OPT = Family(
    opt, named_tensors(OPT_NAMES, "model.decoder.layers.{}."), UNUSED,
    defaults=dict(pad_token_id=1, bos_token_id=2, eos_token_id=2),
)  # fmt: skip
