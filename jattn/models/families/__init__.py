"""The supported families, by model_type of config.json."""

from jattn.models.families.albert import ALBERT
from jattn.models.families.alibi import BLOOM, MPT
from jattn.models.families.bart import BART
from jattn.models.families.bert import BERT, DISTILBERT, ELECTRA, ERNIE, MPNET, ROBERTA
from jattn.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE, MISTRAL4, YOUTU
from jattn.models.families.eurobert import EUROBERT
from jattn.models.families.experts import (
    DOTS1,
    ERNIE4_5_MOE,
    GLM4_MOE,
    MINIMAX_M2,
    OLMOE,
    PHIMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)
from jattn.models.families.family import Family
from jattn.models.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT
from jattn.models.families.gemma_nested import GEMMA3N_TEXT, GEMMA4_TEXT
from jattn.models.families.glm import GLM, GLM4
from jattn.models.families.gpt2 import GPT2, GPT_NEO, OPT
from jattn.models.families.gpt_oss import GPT_OSS
from jattn.models.families.granite import GRANITE, GRANITEMOE
from jattn.models.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from jattn.models.families.llama import (
    ERNIE4_5,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    QWEN2,
    QWEN3,
    SEED_OSS,
    SMOLLM3,
)
from jattn.models.families.llama4 import LLAMA4_TEXT
from jattn.models.families.longcat import LONGCAT_FLASH
from jattn.models.families.mixtral import MIXTRAL
from jattn.models.families.modernbert import MODERNBERT
from jattn.models.families.nomic_bert import NOMIC_BERT
from jattn.models.families.olmo import EXAONE4, OLMO2, OLMO3
from jattn.models.families.parallel import (
    COHERE,
    COHERE2,
    FALCON,
    GPT_NEOX,
    GPTJ,
    NEMOTRON,
    PHI,
    STABLELM,
    STARCODER2,
)
from jattn.models.families.phi3 import PHI3
from jattn.models.families.t5 import T5
from jattn.models.families.wrapper import GEMMA3, GEMMA3N, GEMMA4, KIMI_K25, LLAMA4, MISTRAL3, QWEN3_VL, QWEN3_VL_TEXT

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
    "seed_oss": SEED_OSS,
    "ernie4_5": ERNIE4_5,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "gemma3n_text": GEMMA3N_TEXT,
    "gemma4_text": GEMMA4_TEXT,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "exaone4": EXAONE4,
    "granite": GRANITE,
    "glm": GLM,
    "glm4": GLM4,
    "hunyuan_v1_dense": HUNYUAN,
    "phi3": PHI3,
    "phi": PHI,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
    "nemotron": NEMOTRON,
    "cohere": COHERE,
    "cohere2": COHERE2,
    "falcon": FALCON,
    "gpt_neox": GPT_NEOX,
    "gptj": GPTJ,
    "gpt2": GPT2,
    "gpt_neo": GPT_NEO,
    "opt": OPT,
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "granitemoe": GRANITEMOE,
    "dots1": DOTS1,
    "glm4_moe": GLM4_MOE,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "minimax_m2": MINIMAX_M2,
    "phimoe": PHIMOE,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "youtu": YOUTU,
    "mistral4": MISTRAL4,
    "longcat_flash": LONGCAT_FLASH,
    "gpt_oss": GPT_OSS,
    "llama4_text": LLAMA4_TEXT,
    "bloom": BLOOM,
    "mpt": MPT,
    "gemma3": GEMMA3,
    "gemma3n": GEMMA3N,
    "gemma4": GEMMA4,
    "llama4": LLAMA4,
    "mistral3": MISTRAL3,
    "kimi_k25": KIMI_K25,
    "qwen3_vl": QWEN3_VL,
    "qwen3_vl_text": QWEN3_VL_TEXT,
    "bert": BERT,
    "distilbert": DISTILBERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "mpnet": MPNET,
    "electra": ELECTRA,
    "ernie": ERNIE,
    "albert": ALBERT,
    "modernbert": MODERNBERT,
    "nomic_bert": NOMIC_BERT,
    "eurobert": EUROBERT,
    "bart": BART,
    "t5": T5,
}
RECURRENT = (
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "rwkv", "zamba", "zamba2",
)  # fmt: skip
"""model_types with layers of state-space, convolution or linear attention, which have a state instead of keys."""
GTE = "use gte-modernbert-base, bge-m3 or multilingual-e5 instead"
CODE_OF_FOLDERS = {
    "new": GTE, "gte": GTE, "gte_hf": GTE,  # gte v1.5, gte-multilingual, Stella 400M, Arctic M v2.0
    "nvembed": "use e5-mistral-7b-instruct or Qwen3-Embedding instead",
    "llama_bidirec": "its layers are those of Llama: set model_type to 'llama' and is_causal to false in config.json",
}  # fmt: skip
"""model_types of embedding models that their own folder's code defines -> what to use instead."""
