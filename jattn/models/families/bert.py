"""BERT and its relatives, encoders: norms after each residual sum, learned positions, a head for masked tokens."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.errors import UnsupportedError
from jattn.models.config import HeadTransform, LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.distance_bias import distance_bias_rows
from jattn.models.families.family import Family, token_ids
from jattn.models.families.shared import MAX_HEADS, MAX_LAYERS, default_head_dim, layer_norm
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import TensorSource, named_tensors
from jattn.nn import AttentionConfig, Norm
from jattn.spec import AttentionSpec


def bert(c: ConfigReader) -> ModelConfig:
    """A masked language model: every token attends to every other."""
    if (kind := str(c.given.get("position_embedding_type"))) in OWN_CODE:
        raise UnsupportedError(
            f"{c.where}: position_embedding_type={kind!r} is that of {OWN_CODE[kind]}, defined by code of its folder, "
            "which is never run; use bge-m3, gte-modernbert-base or Qwen3-Embedding instead"
        )
    c.only("position_embedding_type", "absolute")
    c.only("is_decoder", False)
    c.ignore("num_key_value_heads")  # not a key of this family
    c.ignore("directionality", "eos_token_ids", *TINYBERT_KEYS, *(f"pooler_{name}" for name in POOLER_KEYS))
    norm, positions = layer_norm(c), c.count("max_position_embeddings")
    return masked_lm(c, norm, positions, token_types=c.count("type_vocab_size", 2))


def roberta(c: ConfigReader) -> ModelConfig:
    """BERT whose positions count from pad_token_id + 1. Its head always has the exact GELU.

    A padding token inside a text has a position like any other token here; in transformers it has the first one.
    """
    config, rows = bert(c), c.count("max_position_embeddings")
    positions = rows - first_position(c.count("pad_token_id", low=0))
    if positions < 1:
        c.refuse("max_position_embeddings", f"must be more than pad_token_id={c.get('pad_token_id')} + 1")
    head = HeadTransform(activation="gelu", norm=layer_norm(c))
    return dataclasses.replace(config, learned_positions=positions, max_positions=positions, head_transform=head)


def first_position(pad_token_id: int) -> int:
    """The row of the position table that belongs to the first token."""
    return pad_token_id + 1


def ernie(c: ConfigReader) -> ModelConfig:
    """BERT that may add an embedding of the task, whose number is always 0."""
    tasks = c.count("task_type_vocab_size", 3)
    return dataclasses.replace(bert(c), task_types=tasks if c.flag("use_task_id", False) else 0)


def electra(c: ConfigReader) -> ModelConfig:
    """BERT whose embeddings may be narrower than its layers. The head of its generator always has the exact GELU."""
    c.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
    config, width = bert(c), c.count("embedding_size")
    return dataclasses.replace(
        config,
        embedding_size=None if width == config.hidden_size else width,
        head_transform=HeadTransform(activation="gelu", norm=layer_norm(c)),
    )


def distilbert(c: ConfigReader) -> ModelConfig:
    """BERT without token types."""
    c.ignore("sinusoidal_pos_embds", "tie_weights_")
    return masked_lm(c, Norm(kind="layer", eps=1e-12, has_bias=True), c.count("max_position_embeddings"))


def masked_lm(c: ConfigReader, norm: Norm, positions: int, **more: Any) -> ModelConfig:
    """The ModelConfig of the usual keys. more: other fields."""
    c.only("tie_word_embeddings", True)
    hidden, heads = c.count("hidden_size"), c.count("num_attention_heads", high=MAX_HEADS)
    act = c.choice("hidden_act", ACTIVATIONS, "gelu")
    spec = AttentionSpec(
        num_heads=heads, head_dim=default_head_dim(c, "hidden_size", hidden, heads), attn_type="encoder_only"
    )
    layer = LayerConfig(
        self_attn=AttentionConfig(spec=spec, hidden_size=hidden, qkv_bias=True, out_bias=True),
        mlp=MLP(width=c.count("intermediate_size"), activation=act, gated=False, bias=True),
        attn_norms=ResidualNorms(of_sum=norm),
        mlp_norms=ResidualNorms(of_sum=norm),
    )
    return ModelConfig(
        family=c.get("model_type"), vocab_size=c.count("vocab_size"), hidden_size=hidden,
        layers=(layer,) * c.count("num_hidden_layers", high=MAX_LAYERS), final_norm=None, embedding_norm=norm,
        learned_positions=positions, max_positions=positions, head_transform=HeadTransform(activation=act, norm=norm),
        tied_embeddings=True, head_bias=True, **more, **token_ids(c),
    )  # fmt: skip


def mpnet(c: ConfigReader) -> ModelConfig:
    """RoBERTa without token types, with a learned bias of the distance. Its positions count from 2 in any case."""
    c.only("relative_attention_num_buckets", 32)
    rows = c.count("max_position_embeddings", low=MPNET_FIRST + 1)
    config = masked_lm(c, layer_norm(c), rows - MPNET_FIRST)
    first = config.layers[0]
    spec = dataclasses.replace(first.attention, use_distance_bias=True)
    layer = dataclasses.replace(first, self_attn=dataclasses.replace(first.self_attn, spec=spec, max_distance=128))
    head = HeadTransform(activation="gelu", norm=layer_norm(c))
    return dataclasses.replace(config, layers=(layer,) * len(config.layers), head_transform=head, distance_buckets=32)


OWN_CODE = {"alibi": "jina-embeddings-v2", "rotary": "jina-embeddings-v3"}
"""Values of position_embedding_type that no BERT of transformers has -> the models that have them."""
POOLER_KEYS = "fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type"
"""Keys of Google's first BERTs. The pooler is not part of the model here, and transformers does not read them."""
TINYBERT_KEYS = "cell", "emb_size", "pre_trained", "structure", "training"
MPNET_FIRST = 2

LAYER_NAMES = {
    **{f"attn.{n[0]}": f"attention.self.{n}" for n in ("query", "key", "value")},
    "attn.o": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "attn_norm_sum": "attention.output.LayerNorm",
    "mlp_norm_sum": "output.LayerNorm",
}
BERT_HEAD = {
    "head.transform": "cls.predictions.transform.dense",
    "head.transform_norm": "cls.predictions.transform.LayerNorm",
    "head.bias": "cls.predictions.bias",
}
ROBERTA_HEAD = {
    "head.transform": "lm_head.dense",
    "head.transform_norm": "lm_head.layer_norm",
    "head.bias": "lm_head.bias",
}
ELECTRA_HEAD = {
    "head.transform": "generator_predictions.dense",
    "head.transform_norm": "generator_predictions.LayerNorm",
    "head.bias": "generator_lm_head.bias",
}
DISTILBERT_NAMES = {
    **{f"attn.{n}": f"attention.{n}_lin" for n in "qkv"},
    "attn.o": "attention.out_lin",
    "mlp.up": "ffn.lin1",
    "mlp.down": "ffn.lin2",
    "attn_norm_sum": "sa_layer_norm",
    "mlp_norm_sum": "output_layer_norm",
    "head.transform": "vocab_transform",
    "head.transform_norm": "vocab_layer_norm",
    "head.bias": "vocab_projector.bias",
}


MPNET_NAMES = {
    **{f"attn.{n}": f"attention.attn.{n}" for n in "qkvo"},
    "attn.distance_bias": "",  # see mpnet_tensors
    "attn_norm_sum": "attention.LayerNorm",
}


def embedding_names(model: str) -> dict[str, Any]:
    """The names of the embeddings of the module `model`."""
    tables = {"embed": "word", "positions": "position", "token_types": "token_type"}
    names = {ours: f"{model}.embeddings.{theirs}_embeddings.weight" for ours, theirs in tables.items()}
    return names | {"embedding_norm": f"{model}.embeddings.LayerNorm"}


def roberta_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """roberta.encoder.layer.0.attention.self.query and so on."""
    assert config.pad_token_id is not None
    names = embedding_names("roberta") | LAYER_NAMES | ROBERTA_HEAD
    names["positions"] = (names["positions"], without_first(first_position(config.pad_token_id)))
    return named_tensors(names, "roberta.encoder.layer.{}.")(config)


def mpnet_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """mpnet.encoder.layer.0.attention.attn.q and so on."""
    names = embedding_names("mpnet") | LAYER_NAMES | MPNET_NAMES | ROBERTA_HEAD
    names["positions"] = (names["positions"], without_first(MPNET_FIRST))
    table = named_tensors(names, "mpnet.encoder.layer.{}.")(config)
    return table | distance_bias_rows(config, "mpnet.encoder.relative_attention_bias.weight")


def without_first(count: int) -> Callable[[np.ndarray], np.ndarray]:
    """A conversion: the rows of a table after the first `count`."""
    return lambda x: x[count:]


UNUSED = ("position_ids", "pooler.dense.weight", "pooler.dense.bias")
BERT_UNUSED = (*UNUSED, "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
               "cls.seq_relationship.weight", "cls.seq_relationship.bias")  # fmt: skip
ROBERTA_UNUSED = (*UNUSED, "lm_head.decoder.weight", "lm_head.decoder.bias")
DISTILBERT_KEYS = dict(
    hidden_size=("dim", "hidden_size"), num_attention_heads=("n_heads", "num_attention_heads"),
    num_hidden_layers=("n_layers", "num_hidden_layers"),
    intermediate_size=("hidden_dim",), hidden_act=("activation",),
)  # fmt: skip
EPS = dict(layer_norm_eps=1e-12)

BERT = Family(
    bert,
    named_tensors(embedding_names("bert") | LAYER_NAMES | BERT_HEAD, "bert.encoder.layer.{}."),
    BERT_UNUSED,
    prefix="bert.",
    defaults=EPS | dict(pad_token_id=0),
)
ERNIE = dataclasses.replace(
    BERT,
    config=ernie,
    tensors=named_tensors(
        embedding_names("ernie")
        | {"task_types": "ernie.embeddings.task_type_embeddings.weight"}
        | LAYER_NAMES
        | BERT_HEAD,
        "ernie.encoder.layer.{}.",
    ),
    prefix="ernie.",
)
ROBERTA = Family(
    roberta,
    roberta_tensors,
    ROBERTA_UNUSED,
    prefix="roberta.",
    defaults=EPS | dict(bos_token_id=0, eos_token_id=2, pad_token_id=1),
)
ELECTRA = Family(
    electra,
    named_tensors(
        embedding_names("electra")
        | LAYER_NAMES
        | ELECTRA_HEAD
        | {"embedding_projection": "electra.embeddings_project"},
        "electra.encoder.layer.{}.",
    ),
    ("position_ids", "generator_lm_head.weight"),
    skipped=lambda config: ("discriminator_predictions.",),
    prefix="electra.",
    defaults=EPS | dict(pad_token_id=0, embedding_size=128),
)
DISTILBERT = Family(
    distilbert,
    named_tensors(embedding_names("distilbert") | DISTILBERT_NAMES, "distilbert.transformer.layer.{}."),
    (*UNUSED, "vocab_projector.weight"),
    prefix="distilbert.",
    defaults=dict(pad_token_id=0, max_position_embeddings=512),
    aliases=DISTILBERT_KEYS,
)
MPNET = Family(
    mpnet,
    mpnet_tensors,
    ROBERTA_UNUSED,
    prefix="mpnet.",
    defaults=EPS | dict(bos_token_id=0, eos_token_id=2, pad_token_id=1),
)
