"""BERT, an encoder: norms after each residual sum, learned positions, token types, a head for masked tokens."""

from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family, token_ids
from jattn.models.families.shared import MAX_HEADS, MAX_LAYERS, default_head_dim
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import TensorSource, linear_rows, norm_rows, tensor_table, unchanged
from jattn.nn import AttentionConfig, Norm
from jattn.spec import AttentionSpec

LAYER_ROWS: dict[str, Any] = {
    **linear_rows({f"attn.{n[0]}": f"attention.self.{n}" for n in ("query", "key", "value")}, bias=True),
    **linear_rows(
        {"attn.o": "attention.output.dense", "mlp.up": "intermediate.dense", "mlp.down": "output.dense"}, bias=True
    ),
    **norm_rows({"attn_norm_sum": "attention.output.LayerNorm", "mlp_norm_sum": "output.LayerNorm"}, bias=True),
}
OUTSIDE_ROWS: dict[str, Any] = {
    "embed": ("bert.embeddings.word_embeddings.weight", unchanged),
    "positions": ("bert.embeddings.position_embeddings.weight", unchanged),
    "token_types": ("bert.embeddings.token_type_embeddings.weight", unchanged),
    **norm_rows(
        {"embedding_norm": "bert.embeddings.LayerNorm", "final_norm": "cls.predictions.transform.LayerNorm"}, bias=True
    ),
    **linear_rows({"head.transform": "cls.predictions.transform.dense"}, bias=True),
    "head.bias": ("cls.predictions.bias", unchanged),
}


def bert(c: ConfigReader) -> ModelConfig:
    """A masked language model: every token attends to every other."""
    c.only("position_embedding_type", "absolute")
    c.only("is_decoder", False)
    c.only("tie_word_embeddings", True)
    c.ignore("num_key_value_heads")  # not a key of this family
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads", high=MAX_HEADS)
    positions, head_dim = c.count("max_position_embeddings"), default_head_dim(c, "hidden_size", hidden, heads)
    norm = Norm(kind="layer", eps=c.number("layer_norm_eps", 1e-12, above=0), has_bias=True)
    act = c.choice("hidden_act", ACTIVATIONS, "gelu")
    spec = AttentionSpec(num_heads=heads, head_dim=head_dim, attn_type="encoder_only")
    layer = LayerConfig(
        self_attn=AttentionConfig(spec=spec, hidden_size=hidden, qkv_bias=True, out_bias=True),
        mlp=MLP(width=c.count("intermediate_size"), activation=act, gated=False, bias=True),
        attn_norms=ResidualNorms(of_sum=norm),
        mlp_norms=ResidualNorms(of_sum=norm),
    )
    return ModelConfig(
        family="bert", vocab_size=c.count("vocab_size"), hidden_size=hidden,
        layers=(layer,) * c.count("num_hidden_layers", high=MAX_LAYERS), final_norm=norm, embedding_norm=norm,
        learned_positions=positions, max_positions=positions, token_types=c.count("type_vocab_size", 2),
        head_transform=act, tied_embeddings=True, head_bias=True, **token_ids(c),
    )  # fmt: skip


def bert_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """bert.encoder.layer.0.attention.self.query and so on."""
    return tensor_table(config, OUTSIDE_ROWS, "bert.encoder.layer.{}.", lambda index: LAYER_ROWS)


UNUSED = ("position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "pooler.dense.weight",
          "pooler.dense.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias")  # fmt: skip
BERT = Family(bert, bert_tensors, UNUSED, prefix="", defaults=dict(pad_token_id=0))
