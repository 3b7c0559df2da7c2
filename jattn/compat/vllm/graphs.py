"""Which batches a compiled step covers. In vLLM: which batches a captured CUDA graph covers."""

import numpy as np

from jattn.errors.arguments import kind, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.host import on_host
from jattn.types import AttentionCGSupport


@takes(meta=BATCH)
def required_support(meta: CommonAttentionMetadata) -> AttentionCGSupport:
    """The least support with which a step covers this batch."""
    start = on_host(meta.query_start_loc, "required_support", "call it before jit")
    query = np.diff(start)[: int(meta.num_reqs)]
    query = query[query > 0]
    if (query == 1).all():
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    return AttentionCGSupport.UNIFORM_BATCH if (query == query[0]).all() else AttentionCGSupport.ALWAYS


@takes(meta=BATCH, support=kind(AttentionCGSupport))
def can_run_in_cudagraph(meta: CommonAttentionMetadata, support: AttentionCGSupport) -> bool:
    """Does a step with this support cover this batch?"""
    return support >= required_support(meta)
