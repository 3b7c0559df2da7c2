"""BART, an encoder-decoder: norms after each residual sum, learned positions, cross attention in all decoder layers."""

from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family, token_ids
from jattn.models.families.shared import MAX_HEADS, MAX_LAYERS, default_head_dim
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import TensorSource, linear_rows, norm_rows, tensor_table, unchanged
from jattn.nn import AttentionConfig, Norm
from jattn.spec import AttentionSpec

NORM = Norm(kind="layer", eps=1e-5, has_bias=True)


def bart(c: ConfigReader) -> ModelConfig:
    """The decoder, with the encoder as a field; both share the token embeddings."""
    c.only_these(dict(normalize_before=False, add_final_layer_norm=False, normalize_embedding=True))
    c.only("add_bias_logits", False)
    c.only("static_position_embeddings", False)
    c.only("do_blenderbot_90_layernorm", False)
    c.only("tie_word_embeddings", True)
    c.ignore("extra_pos_embeddings", "num_hidden_layers", "force_bos_token_to_be_generated")
    c.ignore("save_step", "replacing_rate", "student_encoder_layers", "student_decoder_layers")  # DistilBART's training
    c.ignore("kobart_version")
    ends = token_ids(c)
    return side_config(c, "decoder", encoder=side_config(c, "encoder"), tied_embeddings=True, head_bias=True, **ends)


def side_config(c: ConfigReader, side: str, **more: Any) -> ModelConfig:
    """The ModelConfig of one side, 'encoder' or 'decoder'. more: other fields."""
    hidden, heads = c.count("d_model"), c.count(f"{side}_attention_heads", high=MAX_HEADS)
    positions, head_dim = c.count("max_position_embeddings"), default_head_dim(c, "d_model", hidden, heads)

    def attention(attn_type: str) -> AttentionConfig:
        spec = AttentionSpec(num_heads=heads, head_dim=head_dim, attn_type=attn_type)
        return AttentionConfig(spec=spec, hidden_size=hidden, qkv_bias=True, out_bias=True)

    is_decoder = side == "decoder"
    fields: dict[str, Any] = {"tied_embeddings": True} | more
    width, act = c.count(f"{side}_ffn_dim"), c.choice("activation_function", ACTIVATIONS, "gelu")
    layer = LayerConfig(
        self_attn=attention(side),
        cross_attn=attention("encoder_decoder") if is_decoder else None,
        mlp=MLP(width=width, activation=act, gated=False, bias=True),
        attn_norms=ResidualNorms(of_sum=NORM),
        cross_norms=ResidualNorms(of_sum=NORM if is_decoder else None),
        mlp_norms=ResidualNorms(of_sum=NORM),
    )
    return ModelConfig(
        family="bart", vocab_size=c.count("vocab_size"), hidden_size=hidden,
        layers=(layer,) * c.count(f"{side}_layers", high=MAX_LAYERS), final_norm=None, embedding_norm=NORM,
        embedding_scale=hidden**0.5 if c.flag("scale_embedding", False) else 1.0,
        learned_positions=positions, max_positions=positions, **fields,
    )  # fmt: skip


def bart_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """model.decoder.layers.0.self_attn.q_proj and so on; the paths of the encoder start with 'encoder.'."""
    assert config.encoder is not None
    decoder = tensor_table(
        config, outside_rows("decoder"), "model.decoder.layers.{}.", lambda _: layer_rows(cross=True)
    )
    encoder = tensor_table(config.encoder, outside_rows("encoder"), "model.encoder.layers.{}.", lambda _: layer_rows())
    shared = {"embed": TensorSource(("model.shared.weight",), unchanged)}
    shared["head.bias"] = TensorSource(("final_logits_bias",), lambda x: x.reshape(-1))
    return decoder | {f"encoder.{path}": source for path, source in encoder.items()} | shared


def outside_rows(side: str) -> dict[str, Any]:
    """Position embeddings, whose first two rows are for padding, and the norm after the embeddings."""
    positions = {"positions": (f"model.{side}.embed_positions.weight", without_padding)}
    return positions | norm_rows({"embedding_norm": f"model.{side}.layernorm_embedding"}, bias=True)


def without_padding(x: np.ndarray) -> np.ndarray:
    return x[2:]


def layer_rows(cross: bool = False) -> dict[str, Any]:
    """One layer of the encoder or decoder."""
    table: dict[str, Any] = linear_rows({"mlp.up": "fc1", "mlp.down": "fc2"}, bias=True)
    table |= norm_rows({"attn_norm_sum": "self_attn_layer_norm", "mlp_norm_sum": "final_layer_norm"}, bias=True)
    for ours, theirs in [("attn", "self_attn"), ("cross", "encoder_attn")][: 1 + cross]:
        projections = {f"{ours}.{n}": f"{theirs}.{'out' if n == 'o' else n}_proj" for n in "qkvo"}
        table |= linear_rows(projections, bias=True)
    return table | (norm_rows({"cross_norm_sum": "encoder_attn_layer_norm"}, bias=True) if cross else {})


UNUSED = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
BART = Family(bart, bart_tensors, UNUSED, defaults=dict(bos_token_id=0, eos_token_id=2, pad_token_id=1))
