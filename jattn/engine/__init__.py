"""The engine: it generates tokens for many requests at once, over a paged cache."""

from jattn.engine.blocks import BlockPool
from jattn.engine.engine import Engine
from jattn.engine.lock_step import LockStepEngine
from jattn.engine.memory import keep_freed_memory
from jattn.engine.outputs import Completion, FinishReason, RequestOutput, TokenLogprob
from jattn.engine.params import SamplingParams
from jattn.engine.processes import Processes
from jattn.engine.request import Sequence
from jattn.engine.scheduler import Limits, Scheduler, StepPlan
from jattn.engine.stats import Stats
from jattn.engine.tables import BlockTables

__all__ = [
    "BlockPool",
    "BlockTables",
    "Completion",
    "Engine",
    "FinishReason",
    "Limits",
    "LockStepEngine",
    "Processes",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
    "Sequence",
    "Stats",
    "StepPlan",
    "TokenLogprob",
    "keep_freed_memory",
]
