"""Nomic BERT, an encoder: BERT with rotary positions, gated MLPs and no biases in its projections."""

import dataclasses
from typing import Any

from jattn.models.config import HeadTransform, LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.bert import BERT_HEAD, BERT_UNUSED, embedding_names
from jattn.models.families.family import Family
from jattn.models.families.modernbert import split_names
from jattn.models.families.shared import MAX_LAYERS, heads_of, layer_norm, model_config
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import rope_of
from jattn.models.tensor_names import named_tensors
from jattn.nn import AttentionConfig, DynamicNTKRopeScaling
from jattn.nn.rope_scaling import FACTORS
from jattn.spec import AttentionSpec

GATED = {"swiglu": "silu", "geglu": "gelu"}
"""Values of activation_function, the old key -> the activation of the gate."""


def nomic_bert(c: ConfigReader) -> ModelConfig:
    """Its config has the usual keys, or those of the code that the model is published with (n_embd and so on)."""
    for name in ("prenorm", "use_rms_norm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "causal", "parallel_block",
                 "parallel_block_tied_norm", "rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx"):  # fmt: skip
        c.only(name, False)
    c.only("scale_attn_weights", True)
    c.only("tie_word_embeddings", True)
    c.only("rotary_emb_scale_base")
    c.ignore(
        "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple",
        "reorder_and_upcast_attn", "use_xentropy", "summary_activation", "summary_first_dropout",
        "summary_proj_to_labels", "summary_type", "summary_use_proj",
    )  # fmt: skip
    heads, norm, act = heads_of(c), layer_norm(c), activation_of(c)
    c.only("num_key_value_heads", heads["num_heads"])
    positions = c.count("max_position_embeddings")
    rope = rope_of(c, heads["head_dim"], positions, partial=True)
    factor, trained = c.number_within("rotary_scaling_factor", FACTORS, None), c.count("max_trained_positions", 2048)
    more: dict[str, Any] = {}
    if factor is not None:
        rope = dataclasses.replace(rope, scaling=DynamicNTKRopeScaling(factor=factor, trained_length=trained))
        more = dict(max_positions=positions)
    spec = AttentionSpec(**heads, attn_type="encoder_only")
    layer = LayerConfig(
        self_attn=AttentionConfig(spec=spec, hidden_size=c.count("hidden_size"), rope=rope),
        mlp=MLP(width=c.count("intermediate_size"), activation=act),
        attn_norms=ResidualNorms(of_sum=norm),
        mlp_norms=ResidualNorms(of_sum=norm),
    )
    return model_config(
        c,
        (layer,) * c.count("num_hidden_layers", high=MAX_LAYERS),
        None,
        tied=True,
        embedding_norm=norm,
        token_types=c.count("type_vocab_size", 2),
        head_transform=HeadTransform(activation=act, norm=norm),
        head_bias=True,
        **more,
    )


def activation_of(c: ConfigReader) -> str:
    """The activation of the gate: hidden_act, or that of activation_function, the old key."""
    old = c.choice("activation_function", GATED, None)
    return c.choice("hidden_act", ACTIVATIONS, "silu" if old is None else GATED[old])


NAMES = embedding_names("nomic_bert") | BERT_HEAD | {
    "embedding_norm": "nomic_bert.emb_ln",
    **split_names("attn.Wqkv", "attn.q", "attn.k", "attn.v"),
    "attn.o": "attn.out_proj",
    "attn_norm_sum": "norm1",
    "mlp.up": "mlp.fc11",
    "mlp.gate": "mlp.fc12",
    "mlp.down": "mlp.fc2",
    "mlp_norm_sum": "norm2",
    "head.transform_norm": "cls.predictions.transform.layer_norm",
}  # fmt: skip
OLD_KEYS = dict(
    hidden_size=("hidden_size", "n_embd"),
    num_attention_heads=("num_attention_heads", "n_head"),
    num_hidden_layers=("num_hidden_layers", "n_layer"),
    intermediate_size=("intermediate_size", "n_inner"),
    max_position_embeddings=("max_position_embeddings", "n_positions"),
    layer_norm_eps=("layer_norm_eps", "layer_norm_epsilon"),
    rope_theta=("rope_theta", "rotary_emb_base"),
    partial_rotary_factor=("rotary_emb_fraction",),
)
NOMIC_BERT = Family(
    nomic_bert,
    named_tensors(NAMES, "nomic_bert.encoder.layers.{}."),
    BERT_UNUSED,
    prefix="nomic_bert.",
    renames=(("bert.", "nomic_bert."),),
    defaults=dict(layer_norm_eps=1e-12, rope_theta=1000.0, max_position_embeddings=2048, pad_token_id=0),
    aliases=OLD_KEYS,
)
