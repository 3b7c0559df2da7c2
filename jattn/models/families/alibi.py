"""BLOOM and MPT: ALiBi instead of positions, layer norm, a plain MLP of four times the hidden size."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import MAX_COUNT, ConfigReader
from jattn.models.families.family import Family, token_ids
from jattn.models.families.shared import MAX_HEADS, MAX_LAYERS, default_head_dim
from jattn.models.mlp import MLP
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import (
    TensorSource,
    linear_rows,
    norm_rows,
    output_slice,
    tensor_table,
    transposed,
    unchanged,
)
from jattn.nn import AttentionConfig, Norm
from jattn.spec import AttentionSpec


def alibi_slopes(heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """One slope per head. For n = heads a power of two: 2 ** (-max_bias * i / n), i = 1 .. n.

    Otherwise with n the next power of two: the slopes of even i, then those of odd i, cut to the number of heads.
    """
    n = 1 << max(heads - 1, 0).bit_length()
    slopes = [2.0 ** (-max_bias * i / n) for i in range(1, n + 1)]
    return tuple(slopes if n == heads else [*slopes[1::2], *slopes[0::2]][:heads])


def shared_fields(
    c: ConfigReader,
    hidden: int,
    heads: int,
    count: int,
    slopes: tuple[float, ...],
    norm: Norm,
    gelu: str,
    scale: float | None = None,
    clip_qkv: float | None = None,
) -> dict[str, Any]:
    """The fields of ModelConfig that BLOOM and MPT share. count: of layers."""
    spec = AttentionSpec(
        num_heads=heads,
        head_dim=default_head_dim(c, "hidden_size", hidden, heads),
        has_alibi=True,
        scale=scale,
    )
    bias = norm.has_bias
    layer = LayerConfig(
        self_attn=AttentionConfig(
            spec=spec, hidden_size=hidden, qkv_bias=bias, out_bias=bias, alibi_slopes=slopes, clip_qkv=clip_qkv
        ),
        mlp=MLP(width=4 * hidden, activation=gelu, gated=False, bias=bias),
        attn_norms=ResidualNorms(before=norm),
        mlp_norms=ResidualNorms(before=norm),
    )
    return dict(
        family=c.get("model_type"), vocab_size=c.count("vocab_size"), hidden_size=hidden, layers=(layer,) * count,
        final_norm=norm, tied_embeddings=c.flag("tie_word_embeddings", True), **token_ids(c),
    )  # fmt: skip


def bloom(c: ConfigReader) -> ModelConfig:
    """A norm after the embeddings; no limit on the length."""
    c.only("apply_residual_connection_post_layernorm", False)
    c.only("n_inner")
    if c.get("pretraining_tp", 1) != 1:
        c.only("slow_but_exact", False)  # then transformers leaves the biases of two projections out
    c.ignore(
        "slow_but_exact", "seq_length", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion",
        "masked_softmax_fusion", "attention_softmax_in_fp32",
    )  # fmt: skip
    norm = Norm(kind="layer", eps=c.number("layer_norm_epsilon", above=0), has_bias=True)
    hidden = either(c, "hidden_size", "n_embed")
    heads = either(c, "n_head", "num_attention_heads", MAX_HEADS)
    count = either(c, "n_layer", "num_hidden_layers", MAX_LAYERS)
    return ModelConfig(
        **shared_fields(c, hidden, heads, count, alibi_slopes(heads), norm, "gelu_pytorch_tanh"), embedding_norm=norm
    )


def either(c: ConfigReader, name: str, other: str, high: int = MAX_COUNT) -> int:
    """A count under one of two keys; `name` takes precedence if both are there."""
    value = c.count(other, None, high=high)
    return c.count(name, high=high) if value is None else c.count(name, value, high=high)


def mpt(c: ConfigReader) -> ModelConfig:
    """No biases; clip_qkv and softmax_scale are optional."""
    attn = c.section("attn_config")
    attn.only("alibi", True)
    attn.only("attn_type", "multihead_attention")
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attn.only(name, False)
    attn.ignore("attn_impl", "tie_word_embeddings")
    c.only("no_bias", True)
    c.only("expansion_ratio", 4)
    c.only("logit_scale")
    c.only("norm_type", "low_precision_layernorm", "layernorm")
    c.ignore("learned_pos_emb", "embedding_fraction", "verbose", "init_config", "tokenizer_name", "max_seq_len")
    heads = c.count("n_heads", high=MAX_HEADS)
    norm = Norm(kind="layer", eps=c.number("layer_norm_epsilon", 1e-5, above=0))
    slopes = alibi_slopes(heads, attn.number("alibi_bias_max", 8.0, above=0))
    options = dict(scale=attn.number("softmax_scale", None, above=0), clip_qkv=attn.number("clip_qkv", None, above=0))
    attn.refuse_unread()
    count = c.count("n_layers", high=MAX_LAYERS)
    return ModelConfig(**shared_fields(c, c.count("d_model"), heads, count, slopes, norm, "gelu", **options))


def fused_part(part: int, heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """q, k or v (part 0, 1, 2) of BLOOM's fused projection, whose outputs are ordered [head, part, D]."""

    def cut(x: np.ndarray) -> np.ndarray:
        y = x.reshape(heads, 3, -1, *x.shape[1:])[:, part]
        return y.reshape(-1, *x.shape[1:]).T

    return cut


def bloom_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """transformer.h.0.self_attention.query_key_value and so on."""
    heads = config.layers[0].attention.num_heads
    table: dict[str, Any] = linear_rows(
        {"attn.o": "self_attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}, bias=True
    )
    table |= norm_rows({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}, bias=True)
    for part, name in enumerate("qkv"):
        for ours, theirs in dict(kernel="weight", bias="bias").items():
            table[f"attn.{name}.{ours}"] = (f"self_attention.query_key_value.{theirs}", fused_part(part, heads))
    outside = {"embed": ("transformer.word_embeddings.weight", unchanged)} | norm_rows(
        {"embedding_norm": "transformer.word_embeddings_layernorm", "final_norm": "transformer.ln_f"}, bias=True
    )
    return tensor_table(config, outside | _head_row(config), "transformer.h.{}.", lambda index: table)


def mpt_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """transformer.blocks.0.attn.Wqkv and so on."""
    hidden = config.hidden_size
    table: dict[str, Any] = linear_rows(
        {"attn.o": "attn.out_proj", "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj"}
    )
    table |= norm_rows({"attn_norm": "norm_1", "mlp_norm": "norm_2"})
    for part, name in enumerate("qkv"):
        table[f"attn.{name}.kernel"] = ("attn.Wqkv.weight", output_slice(part * hidden, (part + 1) * hidden))
    outside = {"embed": ("transformer.wte.weight", unchanged), **norm_rows({"final_norm": "transformer.norm_f"})}
    return tensor_table(config, outside | _head_row(config), "transformer.blocks.{}.", lambda index: table)


def _head_row(config: ModelConfig) -> dict[str, Any]:
    return {} if config.tied_embeddings else {"head.kernel": ("lm_head.weight", transposed)}


BLOOM = Family(
    bloom, bloom_tensors, ("lm_head.weight",), prefix="transformer.", defaults=dict(bos_token_id=1, eos_token_id=2)
)
MPT = Family(mpt, mpt_tensors, ("lm_head.weight",), prefix="transformer.")
