"""BERT, the encoder: norms of sums, learned positions, token types, a masked-token head."""

from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family, token_ids
from jattn.models.families.llama import MOST_HEADS, MOST_LAYERS, share_of
from jattn.models.keys import Keys
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.names import Source, linears, norms, same, sources
from jattn.nn import AttentionLayer, Norm
from jattn.spec import AttentionSpec

LAYER: dict[str, Any] = {
    **linears({f"attn.{n[0]}": f"attention.self.{n}" for n in ("query", "key", "value")}, bias=True),
    **linears(
        {"attn.o": "attention.output.dense", "mlp.up": "intermediate.dense", "mlp.down": "output.dense"}, bias=True
    ),
    **norms({"attn_norm_sum": "attention.output.LayerNorm", "mlp_norm_sum": "output.LayerNorm"}, bias=True),
}
OUTSIDE: dict[str, Any] = {
    "embed": ("bert.embeddings.word_embeddings.weight", same),
    "positions": ("bert.embeddings.position_embeddings.weight", same),
    "token_types": ("bert.embeddings.token_type_embeddings.weight", same),
    **norms(
        {"embedding_norm": "bert.embeddings.LayerNorm", "final_norm": "cls.predictions.transform.LayerNorm"}, bias=True
    ),
    **linears({"head.transform": "cls.predictions.transform.dense"}, bias=True),
    "head.bias": ("cls.predictions.bias", same),
}


def bert(c: Keys) -> ModelConfig:
    """A masked language model: all tokens see each other."""
    c.only("position_embedding_type", "absolute")
    c.only("is_decoder", False)
    c.only("tie_word_embeddings", True)
    c.ignore("num_key_value_heads")  # not this family's
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads", high=MOST_HEADS)
    longest, head_dim = c.count("max_position_embeddings"), share_of(c, "hidden_size", hidden, heads)
    norm = Norm(kind="layer", eps=c.number("layer_norm_eps", 1e-12, above=0), has_bias=True)
    act = c.choice("hidden_act", ACTIVATIONS, "gelu")
    spec = AttentionSpec(num_heads=heads, head_dim=head_dim, attn_type="encoder_only")
    layer = LayerConfig(
        mixer=AttentionLayer(spec=spec, hidden_size=hidden, qkv_bias=True, out_bias=True),
        mlp=MLP(width=c.count("intermediate_size"), activation=act, gated=False, bias=True),
        attn_norm_sum=norm,
        mlp_norm_sum=norm,
    )
    return ModelConfig(
        family="bert", vocab_size=c.count("vocab_size"), hidden_size=hidden,
        layers=(layer,) * c.count("num_hidden_layers", high=MOST_LAYERS), final_norm=norm, embedding_norm=norm,
        learned_positions=longest, max_positions=longest, token_types=c.count("type_vocab_size", 2),
        head_transform=act, tied_embeddings=True, head_bias=True, **token_ids(c),
    )  # fmt: skip


def names(config: ModelConfig) -> dict[str, Source]:
    """bert.encoder.layer.0.attention.self.query and so on."""
    return sources(config, OUTSIDE, "bert.encoder.layer.{}.", lambda index: LAYER)


UNUSED = ("position_ids", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias", "pooler.dense.weight",
          "pooler.dense.bias", "cls.seq_relationship.weight", "cls.seq_relationship.bias")  # fmt: skip
BERT = Family(bert, names, UNUSED, prefix="", defaults=dict(pad_token_id=0))
