"""The supported families, by model_type of config.json."""

from jattn.models.families.alibi import BLOOM, MPT
from jattn.models.families.bart import BART
from jattn.models.families.bert import BERT
from jattn.models.families.family import Family
from jattn.models.families.gemma import GEMMA2, GEMMA3_TEXT
from jattn.models.families.gpt_oss import GPT_OSS
from jattn.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from jattn.models.families.llama4 import LLAMA4_TEXT
from jattn.models.families.mixtral import MIXTRAL
from jattn.models.families.olmo2 import OLMO2
from jattn.models.families.phi3 import PHI3

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "olmo2": OLMO2,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "phi3": PHI3,
    "mixtral": MIXTRAL,
    "gpt_oss": GPT_OSS,
    "bloom": BLOOM,
    "mpt": MPT,
    "llama4_text": LLAMA4_TEXT,
    "bert": BERT,
    "bart": BART,
}
