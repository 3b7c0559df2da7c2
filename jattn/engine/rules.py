"""The sampling rules of a sequence as bytes: packed once when it is first computed, joined for each batch."""

import numpy as np

from jattn.engine.params import SamplingParams
from jattn.engine.sampling import STOP_IDS, Penalties, SamplingRows
from jattn.types import AnyArray

RULES = np.dtype([
    ("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("min_p", np.float32),
    ("seed", np.uint32, 2), ("stop_ids", np.int32, STOP_IDS),
    ("repetition", np.float32), ("presence", np.float32), ("frequency", np.float32), ("prompt_len", np.int32),
])  # fmt: skip
"""One row of SamplingRows and Penalties, without what changes from step to step."""


def rules_of(params: SamplingParams, seed: int, stop_ids: tuple[int, ...], prompt_len: int) -> bytes:
    """The rules of one sequence."""
    stops = (*stop_ids[:STOP_IDS], *[-1] * (STOP_IDS - len(stop_ids)))
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    row = (params.temperature, params.top_k, params.top_p, params.min_p, (seed & 0xFFFFFFFF, seed >> 32), stops)
    return np.array((*row, *penalties, prompt_len), RULES).tobytes()


PADDING = rules_of(SamplingParams(temperature=0), 0, (), 0)
"""The rules of a row of padding: greedy, and never a token."""


def rules_of_batch(rows: list[bytes], num_rows: int) -> np.ndarray:
    """RULES[num_rows]: those of the rows, then padding."""
    return np.frombuffer(b"".join(rows) + PADDING * (num_rows - len(rows)), RULES)


def is_penalised(rules: np.ndarray) -> np.ndarray:
    """bool[R]: does the choice of a row's token depend on those before it, beyond the logits?"""
    return (rules["repetition"] != 1) | (rules["presence"] != 0) | (rules["frequency"] != 0)


def sampling_rows(rules: np.ndarray, position: np.ndarray, remaining: np.ndarray) -> SamplingRows:
    """The rows with their positions and remaining tokens, i32[R] each."""
    names = "temperature", "top_k", "top_p", "min_p", "seed", "stop_ids"
    columns = {name: np.ascontiguousarray(rules[name]) for name in names}
    return SamplingRows(**columns, position=position, remaining=remaining)


def penalties(rules: np.ndarray, history: AnyArray) -> Penalties:
    """The penalties of the rows, with their tokens i32[R L]."""
    names = "repetition", "presence", "frequency", "prompt_len"
    return Penalties(**{name: np.ascontiguousarray(rules[name]) for name in names}, history=history)
