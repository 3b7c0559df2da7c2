"""Llama 2 and 3, and families that differ from it in one or two options."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    ENDS,
    MAX_LAYERS,
    UNUSED,
    attention_biases,
    gated_mlp,
    heads_of,
    no_windows,
    rms_norm,
    rope_decoder,
    rope_decoder_tensors,
    rope_layers,
    windows_by_type,
    without_windows,
)
from jattn.models.rope_config import parameters_of, rope_of


def llama(c: ConfigReader) -> ModelConfig:
    """Biases as in the config, no windows."""
    c.only("rope_interleaved", False)  # of SmolLM 2
    c.only("activation", "swiglu")  # of Falcon 3: what hidden_act="silu" means here
    c.only("rope_condense_ratio", 1)  # of LongChat
    return rope_decoder(c, mlp=gated_mlp(c, c.flag("mlp_bias", False)), windows=no_windows, **attention_biases(c))


def qwen2(c: ConfigReader) -> ModelConfig:
    """Biases on q, k and v."""
    c.ignore("seq_length")  # of CodeQwen 1.5
    return rope_decoder(c, windows=qwen_windows, model=first_chunk(c), qkv_bias=True)


def first_chunk(c: ConfigReader) -> dict[str, Any]:
    """Arguments of `model_config`. Dual chunk attention is the usual one within its first chunk, the limit here."""
    chunks = c.section("dual_chunk_attention_config")
    if not chunks.given:
        return {}
    size, local = chunks.count("chunk_size"), chunks.count("local_size")
    if local >= size:
        chunks.refuse("local_size", f"must be less than chunk_size={size}")
    trained = chunks.count("original_max_position_embeddings", size)  # logits are scaled from there on
    chunks.refuse_unread()
    return dict(max_positions=min(size - local, trained, c.count("max_position_embeddings")))


def qwen3(c: ConfigReader) -> ModelConfig:
    """Norms on q and k, per head."""
    return rope_decoder(c, windows=qwen_windows, qk_norm=rms_norm(c), **attention_biases(c))


def qwen3_vl_text(c: ConfigReader) -> ModelConfig:
    """Qwen 3 without windows. The three positions of a text token are equal, so the rotation is the usual one."""
    c.only("use_sliding_window", False)
    options = dict(unused=("mrope_section", "mrope_interleaved"))
    return rope_decoder(c, windows=no_windows, rope_options=options, qk_norm=rms_norm(c), **attention_biases(c))


def qwen_windows(c: ConfigReader, count: int) -> list[int | None]:
    """Windows if use_sliding_window is true, from layer max_window_layers on."""
    first, used = c.count("max_window_layers", low=0), c.flag("use_sliding_window", False)
    windows = windows_by_type(c, count, [index >= first for index in range(count)])
    return windows if used else [None] * count


def ministral(c: ConfigReader) -> ModelConfig:
    """Windows by layer_types; in all layers if that is absent."""
    return rope_decoder(c, windows=lambda c, count: windows_by_type(c, count, [True] * count))


def ministral3(c: ConfigReader) -> ModelConfig:
    """q is multiplied by a factor that grows with the logarithm of its position: llama_4_scaling_beta."""
    options = dict(default=MINISTRAL3_ROPE, unused=TUNING_KEYS)
    return rope_decoder(c, rope_options=options, **tuning_of(c, MINISTRAL3_ROPE))


def tuning_of(c: ConfigReader, default: dict[str, Any]) -> dict[str, Any]:
    """The options temperature_tuning of an attention config. default: parameters if the config has none."""
    c.only("original_max_position_embeddings")  # it is a parameter of the rotary embedding
    name, stored = parameters_of(c)
    r = ConfigReader(stored or default, f"{c.where}, {name}")
    has_default = r.get("rope_type", r.get("type")) in ("yarn", "llama3", "longrope")
    floor = r.count("original_max_position_embeddings", *([c.count("max_position_embeddings")] if has_default else []))
    return dict(temperature_tuning=(float(floor), r.number("llama_4_scaling_beta")), temperature_tuning_offset=0)


def seed_oss(c: ConfigReader) -> ModelConfig:
    """Biases of q, k and v, of the output, and of the MLP, each by its own key."""
    biases: dict[str, Any] = dict(qkv_bias=c.flag("attention_bias", True), out_bias=c.flag("attention_out_bias", False))
    return rope_decoder(c, mlp=gated_mlp(c, c.flag("mlp_bias", False)), windows=no_windows, **biases)


def ernie4_5(c: ConfigReader) -> ModelConfig:
    """Rotated pairs are neighbours; one key for all biases."""
    bias = c.flag("use_bias", False)
    c.only_these(ERNIE_FIXED)
    return rope_decoder(
        c, mlp=gated_mlp(c, bias), windows=no_windows, rope_options=dict(interleaved=True), qkv_bias=bias, out_bias=bias
    )


def smollm3(c: ConfigReader) -> ModelConfig:
    """Some layers have no positions; these may have a window."""
    count = c.count("num_hidden_layers", high=MAX_LAYERS)
    has_rope, used = rope_layers(c, count), c.flag("use_sliding_window", False)
    c.count("sliding_window", None)
    c.ignore("max_window_layers")
    rope = rope_of(c, heads_of(c)["head_dim"], c.count("max_position_embeddings"))
    return rope_decoder(
        c,
        mlp=gated_mlp(c, c.flag("mlp_bias", False)),
        windows=lambda c, count: (
            windows_by_type(c, count, [not positions for positions in has_rope]) if used else without_windows(c, count)
        ),
        ropes=lambda index, window: rope if has_rope[index] else None,
        **attention_biases(c),
    )


MINISTRAL3_ROPE = dict(
    rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
    beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip
TUNING_KEYS = ("llama_4_scaling_beta", "max_position_embeddings")
"""Keys of rope_parameters that are not parameters of the rotation."""
QWEN_DEFAULTS = dict(
    num_key_value_heads=32, use_sliding_window=False, sliding_window=4096, max_window_layers=28, rope_theta=10000.0
)
MISTRAL_DEFAULTS = ENDS | dict(sliding_window=4096, num_key_value_heads=8, rope_theta=10000.0)
MINISTRAL3_DEFAULTS = ENDS | dict(num_key_value_heads=8, head_dim=128, pad_token_id=11, rope_theta=10000.0)
SEED_OSS_DEFAULTS = dict(
    num_key_value_heads=8, head_dim=128, rope_theta=10000.0, bos_token_id=0, eos_token_id=2, pad_token_id=1
)
ERNIE_DEFAULTS = ENDS | dict(
    num_key_value_heads=2, head_dim=128, rope_theta=500000.0, pad_token_id=0, tie_word_embeddings=True
)
ERNIE_FIXED = dict(attention_bias=False, use_rmsnorm=True, compression_ratio=1.0)
SMOLLM3_DEFAULTS = dict(
    num_key_value_heads=4, rope_theta=2000000.0, bos_token_id=128000, eos_token_id=128001, pad_token_id=128004,
    tie_word_embeddings=True,
)  # fmt: skip


def _family(config: Callable[[ConfigReader], ModelConfig], defaults: dict[str, Any]) -> Family:
    return Family(config, rope_decoder_tensors, UNUSED, defaults=defaults)


LLAMA = _family(llama, ENDS | dict(rope_theta=10000.0, max_position_embeddings=2048))  # Llama 1 has no length
MISTRAL = _family(rope_decoder, MISTRAL_DEFAULTS)
QWEN2 = dataclasses.replace(
    _family(qwen2, QWEN_DEFAULTS),
    aliases=dict(rope_theta=("rope_theta", "rotary_emb_base")),  # of CodeQwen 1.5
)
QWEN3 = _family(qwen3, QWEN_DEFAULTS | dict(head_dim=128))
MINISTRAL = _family(ministral, MISTRAL_DEFAULTS)
MINISTRAL3 = _family(ministral3, MINISTRAL3_DEFAULTS)
SEED_OSS = _family(seed_oss, SEED_OSS_DEFAULTS)
ERNIE4_5 = _family(ernie4_5, ERNIE_DEFAULTS)
SMOLLM3 = _family(smollm3, SMOLLM3_DEFAULTS)
