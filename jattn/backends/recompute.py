"""The gradient of a forward-only kernel over pages: that of `sdpa`, recomputed in the backward pass."""

import jax

from jattn.metadata.batch import CommonAttentionMetadata
from jattn.ops.attend import Plan, attend_paged
from jattn.ops.levels import flat
from jattn.spec import AttentionSpec


def backward(spec: AttentionSpec, common: CommonAttentionMetadata, block_table, q, cache, params, cotangent):
    """(dq, dcache, dparams) of the state that `q` over these pages gives."""
    level = flat(common, spec.attn_type)
    plan = Plan(spec, common.is_causal, level.max_query_len, level.max_seq_len, on_cpu=False)
    call = lambda q, cache, params: attend_paged(plan, q, cache, block_table, level.batch, params)
    return jax.vjp(call, q, cache, params)[1](cotangent)
