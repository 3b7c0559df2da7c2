"""What a layer may need beyond plain causal attention: one name each, in the order of refusals."""

import enum


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
