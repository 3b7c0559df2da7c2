"""Serving: requests in, tokens out, over a paged cache."""

from jattn.engine.blocks import BlockPool
from jattn.engine.chat import ChatTemplate, chat_prompt
from jattn.engine.engine import Engine
from jattn.engine.memory import keep_freed_memory
from jattn.engine.outputs import Completion, FinishReason, RequestOutput, TokenLogprob
from jattn.engine.params import SamplingParams
from jattn.engine.scheduler import Limits, Scheduler, StepPlan
from jattn.engine.sequence import Sequence
from jattn.engine.stats import Stats
from jattn.engine.tables import BlockTables
from jattn.engine.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "BlockPool",
    "BlockTables",
    "ByteTokenizer",
    "ChatTemplate",
    "Completion",
    "Engine",
    "FinishReason",
    "Limits",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "Stats",
    "StepPlan",
    "TokenLogprob",
    "Tokenizer",
    "chat_prompt",
    "keep_freed_memory",
    "load_tokenizer",
]
