"""EuroBERT, an encoder: Llama whose tokens attend to every other."""

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    LLAMA_NAMES,
    UNUSED,
    attention_biases,
    gated_mlp,
    heads_of,
    no_windows,
    rope_decoder,
)
from jattn.models.tensor_names import named_tensors


def eurobert(c: ConfigReader) -> ModelConfig:
    """mlp_bias is also the bias of the head."""
    c.ignore("classifier_pooling", "clf_pooling", "bos_token", "eos_token", "mask_token", "pad_token")
    bias = c.flag("mlp_bias", False)
    return rope_decoder(
        c,
        mlp=gated_mlp(c, bias),
        windows=no_windows,
        heads=heads_of(c) | dict(attn_type="encoder_only"),
        model=dict(head_bias=bias),
        **attention_biases(c),
    )


EUROBERT = Family(
    eurobert,
    named_tensors(LLAMA_NAMES | {"head.bias": "lm_head.bias"}),
    UNUSED,
    defaults=dict(rms_norm_eps=1e-5, rope_theta=10000.0, bos_token_id=128000, eos_token_id=128001, pad_token_id=128001),
)
