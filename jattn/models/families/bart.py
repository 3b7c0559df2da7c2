"""BART, encoder and decoder: norms of sums, learned positions, cross attention in every decoder layer."""

from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.families.family import Family, token_ids
from jattn.models.families.llama import MOST_HEADS, MOST_LAYERS, share_of
from jattn.models.keys import Keys
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.names import Source, linears, norms, same, sources
from jattn.nn import AttentionLayer, Norm
from jattn.spec import AttentionSpec

NORM = Norm(kind="layer", eps=1e-5, has_bias=True)


def bart(c: Keys) -> ModelConfig:
    """One table of tokens for both halves."""
    for name, wanted in dict(normalize_before=False, add_final_layer_norm=False, normalize_embedding=True).items():
        c.only(name, wanted)
    c.only("add_bias_logits", False)
    c.only("static_position_embeddings", False)
    c.only("tie_word_embeddings", True)
    c.ignore("extra_pos_embeddings", "num_hidden_layers", "classif_dropout", "force_bos_token_to_be_generated")
    ends = token_ids(c)
    return half(c, "decoder", encoder=half(c, "encoder"), tied_embeddings=True, head_bias=True, **ends)


def half(c: Keys, side: str, **more: Any) -> ModelConfig:
    """The encoder or the decoder."""
    hidden, heads = c.count("d_model"), c.count(f"{side}_attention_heads", high=MOST_HEADS)
    longest, head_dim = c.count("max_position_embeddings"), share_of(c, "d_model", hidden, heads)

    def attention(kind: str) -> AttentionLayer:
        spec = AttentionSpec(num_heads=heads, head_dim=head_dim, attn_type=kind)
        return AttentionLayer(spec=spec, hidden_size=hidden, qkv_bias=True, out_bias=True)

    decodes = side == "decoder"
    width, act = c.count(f"{side}_ffn_dim"), c.choice("activation_function", ACTIVATIONS, "gelu")
    layer = LayerConfig(
        mixer=attention(side),
        cross=attention("encoder_decoder") if decodes else None,
        mlp=MLP(width=width, activation=act, gated=False, bias=True),
        attn_norm_sum=NORM,
        cross_norm_sum=NORM if decodes else None,
        mlp_norm_sum=NORM,
    )
    return ModelConfig(
        family="bart", vocab_size=c.count("vocab_size"), hidden_size=hidden,
        layers=(layer,) * c.count(f"{side}_layers", high=MOST_LAYERS), final_norm=None, embedding_norm=NORM,
        embedding_scale=hidden**0.5 if c.flag("scale_embedding", False) else 1.0,
        learned_positions=longest, max_positions=longest, **({"tied_embeddings": True} | more),
    )  # fmt: skip


def names(config: ModelConfig) -> dict[str, Source]:
    """model.decoder.layers.0.self_attn.q_proj and so on; the encoder's under 'encoder.'."""
    table = sources(config, outside("decoder"), "model.decoder.layers.{}.", lambda index: layer_names(cross=True))
    theirs = sources(config.encoder, outside("encoder"), "model.encoder.layers.{}.", lambda index: layer_names())
    shared = {"embed": Source(("model.shared.weight",), same)}
    shared["head.bias"] = Source(("final_logits_bias",), lambda x: x.reshape(-1))
    return table | {f"encoder.{path}": source for path, source in theirs.items()} | shared


def outside(side: str) -> dict[str, Any]:
    """Positions, whose first two rows are padding's, and the norm behind the embeddings."""
    positions = {"positions": (f"model.{side}.embed_positions.weight", without_padding)}
    return positions | norms({"embedding_norm": f"model.{side}.layernorm_embedding"}, bias=True)


def without_padding(x: np.ndarray) -> np.ndarray:
    return x[2:]


def layer_names(cross: bool = False) -> dict[str, Any]:
    """One layer of either half."""
    table: dict[str, Any] = linears({"mlp.up": "fc1", "mlp.down": "fc2"}, bias=True)
    table |= norms({"attn_norm_sum": "self_attn_layer_norm", "mlp_norm_sum": "final_layer_norm"}, bias=True)
    for ours, theirs in [("attn", "self_attn"), ("cross", "encoder_attn")][: 1 + cross]:
        projections = {f"{ours}.{n}": f"{theirs}.{'out' if n == 'o' else n}_proj" for n in "qkvo"}
        table |= linears(projections, bias=True)
    return table | (norms({"cross_norm_sum": "encoder_attn_layer_norm"}, bias=True) if cross else {})


UNUSED = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
BART = Family(bart, names, UNUSED, defaults=dict(bos_token_id=0, eos_token_id=2, pad_token_id=1))
