"""The families that are known, by config.json's model_type."""

from jattn.models.families.family import Family
from jattn.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
}
