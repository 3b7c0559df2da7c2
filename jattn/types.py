"""What all packages share: the names of axes, small enums, and how a pytree is declared.

Shape comments use these axes:

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
import numpy as np

C = TypeVar("C")

AnyArray = jax.Array | np.ndarray
"""An array that jit takes: of a device, or numpy's. A batch that is made on the host holds numpy arrays."""

PAD_SLOT_ID = -1
"""The slot of a padding token; it is not written."""

NULL_BLOCK_ID = 0
"""The block in unused columns of a block table; it is never allocated, and no result depends on its contents."""


class AttentionType(enum.StrEnum):
    """Which tokens are queries and which are keys."""

    DECODER = "decoder"  # self-attention of a decoder, over a cache
    ENCODER = "encoder"  # self-attention in the encoder of an encoder-decoder model
    ENCODER_ONLY = "encoder_only"  # self-attention of an encoder-only model such as BERT
    ENCODER_DECODER = "encoder_decoder"  # cross attention: queries of the decoder, keys of the encoder


class Feature(enum.StrEnum):
    """What a layer or a batch can need of a backend; the value is the feature's name in messages.

    The features of vLLM come first, in the order of its `validate_configuration`. A new feature is one line here. A
    backend that does not list it refuses it.
    """

    MM_PREFIX = "partial multimodal token full attention"
    SINK = "attention sinks"
    PER_HEAD_QUANT_SCALES = "per-head quant scales"
    SLIDING_WINDOW = "sliding window"
    RSWA = "R-SWA"
    NON_CAUSAL = "non-causal attention"  # in a decoder's batch; encoders are always non-causal
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
    DISTANCE_BIAS = "learned bias of the distance"
    PER_REQUEST_CAUSAL = "causal per request"
    DIFF_KV = "value head dim other than the key's"
    LSE = "log-sum-exp output"
    PACKED = "attention without a cache"
    CASCADE = "levels of keys shared between requests"
    FUSED_OUTPUT_QUANT = "fused output quantization"
    EIGHT_BIT_PRODUCTS = "products in 8 bits"
    DECODE_BATCH_INVARIANCE = "batch invariance of requests with one new token"


class AttentionCGSupport(enum.IntEnum):
    """Which batches one compiled step covers. vLLM: one captured CUDA graph. min() over layers is that of a model."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2  # every request has the same query length
    ALWAYS = 3  # any mix of prefill and decode


@dataclasses.dataclass(frozen=True)
class MultipleOf:
    """Any multiple of `base`, in a list of supported sizes."""

    base: int  # a positive integer


def static(**kwargs) -> Any:
    """A pytree field that is part of jit's cache key: each new value compiles a new program."""
    return dataclasses.field(metadata=dict(static=True), **kwargs)


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False, field_specifiers=(static,))
def pytree(cls: type[C]) -> type[C]:
    """Make the class a frozen, keyword-only dataclass and a JAX pytree.

    It must not validate its fields: JAX also builds it from tracers, shapes and shardings.
    """
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls))


def listed(values) -> str:
    """The values as text for a message, e.g. '16, 32' or 'multiples of 8'."""
    words = {MultipleOf: lambda v: f"multiples of {v.base}", AttentionType: lambda v: v.value}
    return ", ".join(words.get(type(v), str)(v) for v in values) or "none"


def bases_of(sizes: tuple[int | MultipleOf, ...]) -> tuple[int, ...]:
    """The sizes as numbers: a MultipleOf becomes its base."""
    return tuple(size.base if isinstance(size, MultipleOf) else size for size in sizes)
