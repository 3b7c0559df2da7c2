"""ModernBERT, an encoder: norms before sublayers, rotary positions, a window of both sides in two of three layers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.models.config import HeadTransform, LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import MAX_HEADS, MAX_LAYERS, default_head_dim, layer_norm, model_config
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import LAYER_TYPES, rope_of_layer_type, theta_of
from jattn.models.tensor_names import named_tensors
from jattn.nn import AttentionConfig
from jattn.spec import AttentionSpec

FULL, SLIDING = LAYER_TYPES[:2]


def modernbert(c: ConfigReader) -> ModelConfig:
    """Every third layer is global; the others see local_attention / 2 tokens on each side and have their own theta.

    The first layer has no norm before its attention, because the embeddings end with one.
    """
    c.ignore(
        "position_embedding_type", "layer_norm_eps", "deterministic_flash_attn",
        "initializer_cutoff_factor", "reference_compile", "repad_logits_with_grad", "sparse_prediction",
        "sparse_pred_ignore_index", "classifier_pooling",
    )  # fmt: skip
    c.only("is_causal", False)
    c.only("causal_mask", False)
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads", high=MAX_HEADS)
    head_dim, positions = default_head_dim(c, "hidden_size", hidden, heads), c.count("max_position_embeddings")
    norm, bias = layer_norm(c, "norm_eps", c.flag("norm_bias", False)), c.flag("attention_bias", False)
    mlp = MLP(
        width=c.count("intermediate_size"),
        activation=c.choice("hidden_activation", ACTIVATIONS, "gelu"),
        bias=c.flag("mlp_bias", False),
    )
    scaling = c.section("rope_scaling").given  # of both types of layers
    thetas = {FULL: theta_of(c, "global_rope_theta", 160_000.0), SLIDING: theta_of(c, "local_rope_theta", 10_000.0)}
    ropes = {kind: rope_of_layer_type(c, kind, theta, head_dim, positions, scaling) for kind, theta in thetas.items()}
    side = c.count("local_attention") // 2

    def layer(index: int, kind: str) -> LayerConfig:
        window = (side, side) if kind == SLIDING else None
        spec = AttentionSpec(num_heads=heads, head_dim=head_dim, attn_type="encoder_only", sliding_window=window)
        self_attn = AttentionConfig(spec=spec, hidden_size=hidden, rope=ropes[kind], qkv_bias=bias, out_bias=bias)
        attn_norms, mlp_norms = ResidualNorms(before=norm if index else None), ResidualNorms(before=norm)
        return LayerConfig(self_attn=self_attn, mlp=mlp, attn_norms=attn_norms, mlp_norms=mlp_norms)

    transform = HeadTransform(
        activation=c.choice("classifier_activation", ACTIVATIONS, "gelu"),
        norm=norm,
        bias=c.flag("classifier_bias", False),
    )
    return model_config(
        c,
        [layer(index, kind) for index, kind in enumerate(layer_types(c))],
        norm,
        tied=True,
        embedding_norm=norm,
        head_transform=transform,
        head_bias=c.flag("decoder_bias", True),
    )


def layer_types(c: ConfigReader) -> list[str]:
    """The type of each layer; without layer_types, the first of every global_attn_every_n_layers is global."""
    count, every = c.count("num_hidden_layers", high=MAX_LAYERS), c.count("global_attn_every_n_layers", 3)
    stored = c.choices("layer_types", (FULL, SLIDING), count)
    return [SLIDING if index % every else FULL for index in range(count)] if stored is None else stored


def part(index: int, parts: int) -> Callable[[np.ndarray], np.ndarray]:
    """A conversion: one of `parts` projections with as many outputs each, or its bias."""

    def take(x: np.ndarray) -> np.ndarray:
        own = np.split(x, parts)[index]
        return own.T if own.ndim == 2 else own

    return take


def split_names(stored: str, *ours: str) -> dict[str, Any]:
    """Names of the projections that are stored in one module, in this order."""
    leaves = {"kernel": "weight", "bias": "bias"}
    return {
        f"{name}.{leaf}": (f"{stored}.{theirs}", part(index, len(ours)))
        for index, name in enumerate(ours)
        for leaf, theirs in leaves.items()
    }


NAMES = {
    "embed": "model.embeddings.tok_embeddings.weight",
    "embedding_norm": "model.embeddings.norm",
    **split_names("attn.Wqkv", "attn.q", "attn.k", "attn.v"),
    "attn.o": "attn.Wo",
    **split_names("mlp.Wi", "mlp.gate", "mlp.up"),
    "mlp.down": "mlp.Wo",
    "attn_norm": "attn_norm",
    "mlp_norm": "mlp_norm",
    "final_norm": "model.final_norm",
    "head": "decoder",
    "head.transform": "head.dense",
    "head.transform_norm": "head.norm",
}
DEFAULTS = dict(
    norm_eps=1e-5, local_attention=128, pad_token_id=50283, eos_token_id=50282, bos_token_id=50281,
)  # fmt: skip
MODERNBERT = Family(modernbert, named_tensors(NAMES), ("decoder.weight",), defaults=DEFAULTS)
