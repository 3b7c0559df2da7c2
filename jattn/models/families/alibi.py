"""BLOOM and MPT: linear biases instead of positions, layer norm, a plain MLP four times as wide."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family, token_ids
from jattn.models.families.llama import MOST_HEADS, MOST_LAYERS, share_of
from jattn.models.keys import MOST, Keys
from jattn.models.mlp import MLP
from jattn.models.names import Source, linears, norms, rows, same, sources, transposed
from jattn.nn import AttentionLayer, Norm
from jattn.spec import AttentionSpec


def alibi_slopes(heads: int, longest: float = 8.0) -> tuple[float, ...]:
    """2 ** (-longest * i / n), i = 1 .. n, for n heads, a power of two; else every second of the next power's first."""
    n = 1 << max(heads - 1, 0).bit_length()
    slopes = [2.0 ** (-longest * i / n) for i in range(1, n + 1)]
    return tuple(slopes if n == heads else [*slopes[1::2], *slopes[0::2]][:heads])


def decoder(
    c: Keys, hidden: int, heads: int, count: int, slopes: tuple[float, ...], norm: Norm, gelu: str, **mixer: Any
) -> dict[str, Any]:
    """What the two share."""
    spec = AttentionSpec(
        num_heads=heads,
        head_dim=share_of(c, "hidden_size", hidden, heads),
        has_alibi=True,
        scale=mixer.pop("scale", None),
    )
    bias = norm.has_bias
    layer = LayerConfig(
        mixer=AttentionLayer(spec=spec, hidden_size=hidden, qkv_bias=bias, out_bias=bias, alibi_slopes=slopes, **mixer),
        mlp=MLP(width=4 * hidden, activation=gelu, gated=False, bias=bias),
        attn_norm=norm,
        mlp_norm=norm,
    )
    return dict(
        family=c.get("model_type"), vocab_size=c.count("vocab_size"), hidden_size=hidden, layers=(layer,) * count,
        final_norm=norm, tied_embeddings=c.flag("tie_word_embeddings", True), **token_ids(c),
    )  # fmt: skip


def bloom(c: Keys) -> ModelConfig:
    """Embeddings are normalised; no limit of length."""
    c.only("apply_residual_connection_post_layernorm", False)
    c.only("n_inner")
    c.ignore(
        "slow_but_exact", "seq_length", "offset_alibi", "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion",
        "masked_softmax_fusion", "attention_softmax_in_fp32", "unk_token_id", "hidden_dropout",
    )  # fmt: skip
    norm = Norm(kind="layer", eps=c.number("layer_norm_epsilon", above=0), has_bias=True)
    hidden = either(c, "hidden_size", "n_embed")
    heads = either(c, "n_head", "num_attention_heads", MOST_HEADS)
    count = either(c, "n_layer", "num_hidden_layers", MOST_LAYERS)
    return ModelConfig(
        **decoder(c, hidden, heads, count, alibi_slopes(heads), norm, "gelu_pytorch_tanh"), embedding_norm=norm
    )


def either(c: Keys, name: str, other: str, high: int = MOST) -> int:
    """A count under one of two names; the other one counts where both are there."""
    value = c.count(other, None, high=high)
    return c.count(name, high=high) if value is None else c.count(name, value, high=high)


def mpt(c: Keys) -> ModelConfig:
    """No biases; queries, keys and values may be clipped."""
    attn = c.part("attn_config")
    attn.only("alibi", True)
    attn.only("attn_type", "multihead_attention")
    for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attn.only(name, False)
    attn.ignore("attn_impl")
    c.only("no_bias", True)
    c.only("expansion_ratio", 4)
    c.only("logit_scale")
    c.only("norm_type", "low_precision_layernorm", "layernorm")
    c.ignore("learned_pos_emb", "embedding_fraction", "verbose", "init_config", "tokenizer_name", "max_seq_len")
    heads = c.count("n_heads", high=MOST_HEADS)
    norm = Norm(kind="layer", eps=c.number("layer_norm_epsilon", 1e-5, above=0))
    slopes = alibi_slopes(heads, attn.number("alibi_bias_max", 8.0, above=0))
    own = dict(scale=attn.number("softmax_scale", None, above=0), clip_qkv=attn.number("clip_qkv", None, above=0))
    attn.close()
    count = c.count("n_layers", high=MOST_LAYERS)
    return ModelConfig(**decoder(c, c.count("d_model"), heads, count, slopes, norm, "gelu", **own))


def head_part(part: int, heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """q, k or v (0, 1, 2) of BLOOM's fused projection, whose rows go [head, part, D]."""

    def cut(x: np.ndarray) -> np.ndarray:
        y = x.reshape(heads, 3, -1, *x.shape[1:])[:, part]
        return y.reshape(-1, *x.shape[1:]).T

    return cut


def bloom_names(config: ModelConfig) -> dict[str, Source]:
    """transformer.h.0.self_attention.query_key_value and so on."""
    heads = config.layers[0].attention.num_heads
    table: dict[str, Any] = linears(
        {"attn.o": "self_attention.dense", "mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}, bias=True
    )
    table |= norms({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}, bias=True)
    for part, name in enumerate("qkv"):
        for ours, theirs in dict(kernel="weight", bias="bias").items():
            table[f"attn.{name}.{ours}"] = (f"self_attention.query_key_value.{theirs}", head_part(part, heads))
    outside = {"embed": ("transformer.word_embeddings.weight", same)} | norms(
        {"embedding_norm": "transformer.word_embeddings_layernorm", "final_norm": "transformer.ln_f"}, bias=True
    )
    return sources(config, outside | _head(config), "transformer.h.{}.", lambda index: table)


def mpt_names(config: ModelConfig) -> dict[str, Source]:
    """transformer.blocks.0.attn.Wqkv and so on."""
    hidden = config.hidden_size
    table: dict[str, Any] = linears({"attn.o": "attn.out_proj", "mlp.up": "ffn.up_proj", "mlp.down": "ffn.down_proj"})
    table |= norms({"attn_norm": "norm_1", "mlp_norm": "norm_2"})
    for part, name in enumerate("qkv"):
        table[f"attn.{name}.kernel"] = ("attn.Wqkv.weight", rows(part * hidden, (part + 1) * hidden))
    outside = {"embed": ("transformer.wte.weight", same), **norms({"final_norm": "transformer.norm_f"})}
    return sources(config, outside | _head(config), "transformer.blocks.{}.", lambda index: table)


def _head(config: ModelConfig) -> dict[str, Any]:
    return {} if config.tied_embeddings else {"head.kernel": ("lm_head.weight", transposed)}


BLOOM = Family(
    bloom, bloom_names, ("lm_head.weight",), prefix="transformer.", defaults=dict(bos_token_id=1, eos_token_id=2)
)
MPT = Family(mpt, mpt_names, ("lm_head.weight",), prefix="transformer.")
