"""ALBERT, an encoder: BERT whose layers share one set of weights, with embeddings that are narrower than its layers."""

import dataclasses

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.bert import UNUSED, bert, embedding_names
from jattn.models.families.family import Family
from jattn.models.tensor_names import named_tensors

UNUSED_KEYS = ("net_structure_type", "gap_size", "num_memory_blocks", "down_scale_factor", "classifier_dropout_prob")
"""Keys of Google's releases that transformers does not read."""
MOST_LAYERS = 128
"""Published ones have up to 24. The number of tensors does not limit them, as it does in other families."""


def albert(c: ConfigReader) -> ModelConfig:
    """Every layer has the weights of the one group of one layer."""
    c.only("num_hidden_groups", 1)
    c.only("inner_group_num", 1)
    c.count("num_hidden_layers", high=MOST_LAYERS)
    c.ignore(*UNUSED_KEYS)
    return dataclasses.replace(bert(c), embedding_size=c.count("embedding_size"))


NAMES = embedding_names("albert") | {
    "embedding_projection": "albert.encoder.embedding_hidden_mapping_in",
    **{f"attn.{n[0]}": f"attention.{n}" for n in ("query", "key", "value")},
    "attn.o": "attention.dense",
    "attn_norm_sum": "attention.LayerNorm",
    "mlp.up": "ffn",
    "mlp.down": "ffn_output",
    "mlp_norm_sum": "full_layer_layer_norm",
    "head.transform": "predictions.dense",
    "head.transform_norm": "predictions.LayerNorm",
    "head.bias": "predictions.bias",
}
ALBERT = Family(
    albert,
    named_tensors(NAMES, "albert.encoder.albert_layer_groups.0.albert_layers.0."),
    (*UNUSED, "albert.pooler.weight", "albert.pooler.bias", "predictions.decoder.weight", "predictions.decoder.bias"),
    skipped=lambda config: ("sop_classifier.",),
    prefix="albert.",
    defaults=dict(
        layer_norm_eps=1e-12, embedding_size=128, hidden_act="gelu_new", pad_token_id=0, bos_token_id=2, eos_token_id=3
    ),
)
