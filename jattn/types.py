"""The words everybody shares: axis names, small enums, and how a pytree is declared.

Axes, written once and used in every shape comment:

    T  packed query tokens (padded)      H  query heads
    R  requests (padded)                 K  key/value heads
    B  block-table width                 G  query heads of one kv head (H // K)
    N  blocks in the pool                D  head dim of queries and keys
    S  slots of a block                  V  head dim of values
"""

import dataclasses
import enum
from typing import Any, TypeVar, dataclass_transform

import jax

C = TypeVar("C")

PAD_SLOT_ID = -1
"""Slot of a padding token: a write to it goes nowhere."""

NULL_BLOCK_ID = 0
"""Block that schedulers keep free to fill unused table columns with; nothing here depends on its contents."""


class AttentionType(enum.StrEnum):
    """Who attends to whom."""

    DECODER = "decoder"  # self-attention over a cache
    ENCODER = "encoder"  # the encoder half of an encoder-decoder
    ENCODER_ONLY = "encoder_only"  # BERT-like
    ENCODER_DECODER = "encoder_decoder"  # decoder queries, encoder keys


class Feature(enum.StrEnum):
    """A need that a backend either declares or refuses; the value is how a sentence names it.

    vLLM's come first, in the order of its `validate_configuration`; ours follow. A new feature is one line
    here, and every backend that does not name it refuses it.
    """

    MM_PREFIX = "partial multimodal token full attention"
    SINK = "attention sinks"
    PER_HEAD_QUANT_SCALES = "per-head quant scales"
    SLIDING_WINDOW = "sliding window"
    RSWA = "R-SWA"
    NON_CAUSAL = "non-causal attention"  # in a decoder's batch; encoders are non-causal by type
    NON_CAUSAL_DCP = "non-causal MLA attention with DCP"
    BATCH_INVARIANCE = "batch invariance"
    KV_CONNECTOR = "KV connector"
    PCP = "PCP"  # prefill context parallel
    DCP = "DCP"  # decode context parallel
    QUERY_LENS_MISMATCH = "device-cpu query lens mismatch"
    TWO_SIDED_WINDOW = "window to the right of the query"
    CHUNK = "chunked-local attention"
    CHUNK_LOOKBACK = "lookback of chunked-local attention"
    ALIBI = "ALiBi"
    ALIBI_SQRT = "ALiBi with square-root distances"
    SOFT_CAP = "logits soft cap"
    MASK_FN = "user mask_fn"
    SCORE_FN = "user score_fn"
    QQ_BIAS = "bias among the new tokens"
    PER_REQUEST_CAUSAL = "causal per request"
    DIFF_KV = "value head dim other than the key's"
    LSE = "log-sum-exp output"
    PACKED = "attention without a cache"
    CASCADE = "levels of keys shared between requests"
    FUSED_OUTPUT_QUANT = "fused output quantization"


class AttentionCGSupport(enum.IntEnum):
    """Which batches one compiled step covers (the JAX reading of 'captured graph'); min() over layers is sound."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2  # every request has the same query length
    ALWAYS = 3  # any mix of prefill and decode


@dataclasses.dataclass(frozen=True)
class MultipleOf:
    """'Any multiple of base', where a list of sizes is expected."""

    base: int


def static(**kwargs) -> Any:
    """A pytree field that is part of the trace key: few values in a server's life."""
    return dataclasses.field(metadata=dict(static=True), **kwargs)


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(static,))
def pytree(cls: type[C]) -> type[C]:
    """Declare a frozen, keyword-only dataclass that JAX flattens; it holds no validation (JAX rebuilds it freely)."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls))


def listed(values) -> str:
    """'16, 32' or 'multiples of 8': how a sentence names what is supported."""
    words = {MultipleOf: lambda v: f"multiples of {v.base}", AttentionType: lambda v: v.value}
    return ", ".join(words.get(type(v), str)(v) for v in values) or "none"


def bases_of(sizes: tuple[int | MultipleOf, ...]) -> tuple[int, ...]:
    """The sizes as numbers, a multiple by its base."""
    return tuple(size.base if isinstance(size, MultipleOf) else size for size in sizes)
