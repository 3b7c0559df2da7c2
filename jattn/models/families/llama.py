"""Llama 2 and 3, and families that differ from it in one or two options: Mistral, Qwen 2, Qwen 3."""

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    ENDS,
    UNUSED,
    attention_biases,
    gated_mlp,
    no_windows,
    rms_norm,
    rope_decoder,
    rope_decoder_tensors,
    windows_by_type,
)


def llama(c: ConfigReader) -> ModelConfig:
    """Biases as in the config, no windows."""
    return rope_decoder(c, mlp=gated_mlp(c, c.flag("mlp_bias", False)), windows=no_windows, **attention_biases(c))


def qwen2(c: ConfigReader) -> ModelConfig:
    """Biases on q, k and v."""
    return rope_decoder(c, windows=qwen_windows, qkv_bias=True)


def qwen3(c: ConfigReader) -> ModelConfig:
    """Norms on q and k, per head."""
    return rope_decoder(c, windows=qwen_windows, qk_norm=rms_norm(c), **attention_biases(c))


def qwen_windows(c: ConfigReader, count: int) -> list[int | None]:
    """Windows if use_sliding_window is true, from layer max_window_layers on."""
    first, used = c.count("max_window_layers", low=0), c.flag("use_sliding_window", False)
    windows = windows_by_type(c, count, [index >= first for index in range(count)])
    return windows if used else [None] * count


QWEN = dict(
    num_key_value_heads=32, use_sliding_window=False, sliding_window=4096, max_window_layers=28, rope_theta=10000.0
)
LLAMA = Family(llama, rope_decoder_tensors, UNUSED, defaults=ENDS | dict(rope_theta=10000.0))
MISTRAL = Family(
    rope_decoder,
    rope_decoder_tensors,
    UNUSED,
    defaults=ENDS | dict(sliding_window=4096, num_key_value_heads=8, rope_theta=10000.0),
)
QWEN2 = Family(qwen2, rope_decoder_tensors, UNUSED, defaults=QWEN)
QWEN3 = Family(qwen3, rope_decoder_tensors, UNUSED, defaults=QWEN | dict(head_dim=128))
