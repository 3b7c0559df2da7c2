"""Models with vision: their text part loads, under `text_config`; the tensors for images are skipped."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short
from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.deepseek import DEEPSEEK_V3, MISTRAL4
from jattn.models.families.family import Family
from jattn.models.families.gemma import GEMMA3_TEXT
from jattn.models.families.gemma_nested import GEMMA3N_TEXT, GEMMA4_TEXT
from jattn.models.families.llama import MINISTRAL3, MISTRAL, QWEN3, qwen3_vl_text
from jattn.models.families.llama4 import LLAMA4_TEXT
from jattn.models.tensor_names import TensorSource

RENAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
"""Beginnings of the names of text tensors, as several releases of transformers wrote them."""
PARTS = (
    "vision_tower", "multi_modal_projector", "mm_projector", "vision_model", "visual", "embed_vision", "audio_tower",
    "embed_audio",
)  # fmt: skip
VISION = tuple(f"{front}{name}." for front in ("", "model.") for name in PARTS)
"""Beginnings of the names of tensors for images and audio."""
IGNORED = (
    "vision_config", "image_token_index", "image_token_id", "boi_token_index", "boi_token_id", "eoi_token_index",
    "eoi_token_id", "mm_tokens_per_image", "projector_hidden_act", "vision_feature_layer", "multimodal_projector_bias",
    "spatial_merge_size", "video_token_id", "vision_start_token_id", "vision_end_token_id", "projection_hidden_size",
    "projection_layer_norm_eps", "ignore_index", "media_placeholder_token_id", "use_unified_vision_chunk",
    "video_placeholder", "audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index",
    "audio_soft_tokens_per_image", "vision_soft_tokens_per_image",
)  # fmt: skip
"""Keys that only images and audio need."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
OUTER = ("tie_word_embeddings", *TOKENS)
"""Keys that may also stand outside text_config."""


def wrapper(texts: Mapping[str, Family], outer_keys: tuple[str, ...] = OUTER, **defaults: Any) -> Family:
    """The family of a model with vision. texts: its text families by model_type, the usual one first.

    outer_keys: those of OUTER that take precedence over text_config; the others have no effect. defaults: values of
    keys that are absent from text_config, besides those of the text family.
    """

    def config(c: ConfigReader) -> ModelConfig:
        c.ignore(*IGNORED, *OUTER)
        text = c.section("text_config").given
        kind = text.get("model_type", next(iter(texts)))
        if not isinstance(kind, str) or kind not in texts:
            raise UnsupportedError(
                f"{c.where}, text_config: model_type={short(kind)} is not supported in a model of this model_type; "
                f"supported are {', '.join(texts)}"
            )
        outer = {key: c.get(key) for key in outer_keys}
        values = {**text, "model_type": kind, **{key: value for key, value in outer.items() if value is not None}}
        family = dataclasses.replace(texts[kind], defaults={**defaults, **texts[kind].defaults})
        return family.read(ConfigReader(values, f"{c.where}, text_config"))

    def tensors(config: ModelConfig) -> dict[str, TensorSource]:
        return texts[config.family].tensors(config)

    unused = next(iter(texts.values())).unused
    return Family(
        config, tensors, unused, skipped=lambda config: VISION, renames=RENAMES, texts=tuple(texts),
        outer_keys=outer_keys,
    )  # fmt: skip


def gemma3_with_vision(c: ConfigReader) -> ModelConfig:
    """Gemma 3 without a cap of its logits: the whole model of transformers leaves it out, other programs apply it."""
    c.only("final_logit_softcapping")
    return GEMMA3_TEXT.config(c)


QWEN3_VL_TEXT = dataclasses.replace(
    QWEN3, config=qwen3_vl_text, defaults=dict(num_key_value_heads=32, head_dim=128, rope_theta=500000.0)
)
GEMMA3 = wrapper(
    {"gemma3_text": dataclasses.replace(GEMMA3_TEXT, config=gemma3_with_vision)}, vocab_size=262208,
    num_attention_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-6, hidden_size=2304, intermediate_size=9216,
    num_hidden_layers=26,
)  # fmt: skip
GEMMA3N = wrapper(
    {"gemma3n_text": GEMMA3N_TEXT}, vocab_size=262400, hidden_size=2048, intermediate_size=16384, num_hidden_layers=35,
    num_attention_heads=8, max_position_embeddings=32768, rms_norm_eps=1e-6,
)  # fmt: skip
GEMMA4 = wrapper(
    {"gemma4_text": GEMMA4_TEXT}, vocab_size=262144, hidden_size=2304, intermediate_size=9216, num_hidden_layers=30,
    num_attention_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-6,
)  # fmt: skip
MISTRAL3 = wrapper({"mistral": MISTRAL, "ministral3": MINISTRAL3, "mistral4": MISTRAL4})
# transformers gives the outer tie_word_embeddings no effect, and writes its default there.
LLAMA4 = wrapper({"llama4_text": LLAMA4_TEXT}, outer_keys=TOKENS)
KIMI_K25 = dataclasses.replace(
    wrapper({"deepseek_v3": DEEPSEEK_V3, "kimi_k2": DEEPSEEK_V3}),
    renames=(("language_model.model.blocks.", "model.layers."), *RENAMES),  # as transformers 5 writes them
)
QWEN3_VL = wrapper({"qwen3_vl_text": QWEN3_VL_TEXT})
