"""T5, an encoder-decoder: RMS norms before sublayers, no positions but a learned bias of the distance, no scale."""

import dataclasses
from typing import Any

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.distance_bias import distance_bias_rows
from jattn.models.families.family import Family, token_ids
from jattn.models.families.shared import MAX_HEADS, MAX_LAYERS
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.tensor_names import TensorSource, named_tensors
from jattn.nn import AttentionConfig, Norm
from jattn.spec import AttentionSpec

MAX_BUCKETS = 65_536
UNUSED_KEYS = ("n_positions", "is_gated_act", "dense_act_fn")


def t5(c: ConfigReader) -> ModelConfig:
    """The decoder, with the encoder as a field; both share the token embeddings."""
    c.only("is_encoder_decoder", True)
    c.ignore(*UNUSED_KEYS)
    tied = c.flag("tie_word_embeddings", True)
    hidden = c.count("d_model")
    scale = hidden**-0.5 if c.flag("scale_decoder_outputs", tied) else 1.0
    encoder = encoder_config(c)
    count = c.count("num_decoder_layers", len(encoder.layers), high=MAX_LAYERS)
    return side_config(c, "decoder", count, encoder=encoder, tied_embeddings=tied, logits_scale=scale, **token_ids(c))


def t5_encoder(c: ConfigReader) -> ModelConfig:
    """The encoder alone, as for embeddings (Sentence-T5, GTR)."""
    c.only("is_encoder_decoder", True, False)
    c.ignore(*UNUSED_KEYS, "tie_word_embeddings", "scale_decoder_outputs", "num_decoder_layers")
    return dataclasses.replace(encoder_config(c), **token_ids(c))


def encoder_config(c: ConfigReader) -> ModelConfig:
    """The side whose tokens attend to every other."""
    return side_config(c, "encoder", c.count("num_layers", high=MAX_LAYERS), tied_embeddings=True)


def side_config(c: ConfigReader, side: str, count: int, **more: Any) -> ModelConfig:
    """The ModelConfig of one side, 'encoder' or 'decoder'. more: other fields."""
    hidden, norm = c.count("d_model"), Norm(eps=c.number("layer_norm_epsilon", above=0))
    heads = dict(num_heads=c.count("num_heads", high=MAX_HEADS), head_dim=c.count("d_kv", high=MAX_HEADS), scale=1.0)

    def attention(attn_type: str, most: int | None = None) -> AttentionConfig:
        spec = AttentionSpec(**heads, attn_type=attn_type, use_distance_bias=most is not None)
        return AttentionConfig(spec=spec, hidden_size=hidden, max_distance=most)

    before, is_decoder = ResidualNorms(before=norm), side == "decoder"
    layer = LayerConfig(
        self_attn=attention(side, max_distance(c)),
        cross_attn=attention("encoder_decoder") if is_decoder else None,
        mlp=mlp_of(c),
        attn_norms=before,
        cross_norms=before if is_decoder else ResidualNorms(),
        mlp_norms=before,
    )
    return ModelConfig(
        family="t5", vocab_size=c.count("vocab_size"), hidden_size=hidden, layers=(layer,) * count, final_norm=norm,
        distance_buckets=c.count("relative_attention_num_buckets", 32), **more,
    )  # fmt: skip


def max_distance(c: ConfigReader) -> int:
    """The distance from which on all keys share a bucket."""
    buckets = c.count("relative_attention_num_buckets", 32, low=4, high=MAX_BUCKETS)
    most = c.count("relative_attention_max_distance", 128, low=2, high=MAX_BUCKETS)
    if most <= buckets // 2:
        c.refuse("relative_attention_max_distance", f"must be more than half of the {buckets} buckets")
    return most


def mlp_of(c: ConfigReader) -> MLP:
    """feed_forward_proj is an activation, after "gated-" if there is a gate; "gated-gelu" means gelu_new."""
    name = c.choice("feed_forward_proj", (*ACTIVATIONS, *(f"gated-{act}" for act in ACTIVATIONS)), "relu")
    act = "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
    return MLP(width=c.count("d_ff"), activation=act, gated=name.startswith("gated-"))


def t5_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """decoder.block.0.layer.0.SelfAttention.q and so on; the paths of the encoder start with 'encoder.'."""
    assert config.encoder is not None
    return side_tensors(config, "decoder", 2) | {
        f"encoder.{path}": source for path, source in side_tensors(config.encoder, "encoder", 1).items()
    }


def side_tensors(config: ModelConfig, side: str, mlp_at: int) -> dict[str, TensorSource]:
    """One side. mlp_at: the number of the MLP's sublayer."""
    mlp = f"layer.{mlp_at}.DenseReluDense"
    is_gated = any(isinstance(layer.mlp, MLP) and layer.mlp.gated for layer in config.layers)
    names = {
        "embed": "shared.weight",
        "final_norm": f"{side}.final_layer_norm",
        "head": "lm_head",
        **{f"attn.{n}": f"layer.0.SelfAttention.{n}" for n in "qkvo"},
        "attn_norm": "layer.0.layer_norm",
        **{f"cross.{n}": f"layer.1.EncDecAttention.{n}" for n in "qkvo"},
        "cross_norm": "layer.1.layer_norm",
        "mlp.gate": f"{mlp}.wi_0",
        "mlp.up": f"{mlp}.{'wi_1' if is_gated else 'wi'}",
        "mlp.down": f"{mlp}.wo",
        "mlp_norm": f"layer.{mlp_at}.layer_norm",
        "attn.distance_bias": "",  # below: all layers share the first layer's
    }
    own = dataclasses.replace(config, encoder=None)
    table = named_tensors(names, f"{side}.block.{{}}.")(own)
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return table | distance_bias_rows(config, bias)


UNUSED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
          "layer.1.EncDecAttention.relative_attention_bias.weight")  # fmt: skip
DEFAULTS = dict(
    d_kv=64, layer_norm_epsilon=1e-6, relative_attention_num_buckets=32, relative_attention_max_distance=128,
    pad_token_id=0, eos_token_id=1,
)  # fmt: skip
ENCODER = Family(
    t5_encoder,
    lambda config: side_tensors(config, "encoder", 1),
    UNUSED,
    skipped=lambda config: ("decoder.", "lm_head."),
    prefix="",
    defaults=DEFAULTS,
)
T5 = Family(t5, t5_tensors, UNUSED, prefix="", defaults=DEFAULTS, encoder=ENCODER)
