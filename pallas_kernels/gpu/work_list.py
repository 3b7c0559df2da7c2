"""The work list of the attention kernel: which CTA computes what. Built from traced lengths, inside jit.

    block   config.block_kv keys, at most: one step of the softmax loop
    tile    up to 128 packed rows of one request, or 192 where three warpgroups compute: row p is token p // G and head
            p % G of a kv head's group. Where each CTA has two pipelines, up to 64 rows, and a pipeline stands for the
            CTA in all that is said here
    unit    one (tile, kv head). It costs its number of key blocks times the cost of a block, plus unit_cost; of a flat
            list, its number of key blocks plus unit_blocks
    piece   a range of a unit's key blocks: what a CTA computes at a time
    wave    C units, one for each of the C CTAs. In snake order: from CTA 0 on in even waves, from the last one back in
            odd ones
    line    units laid end to end, and cut into C parts, one for each CTA. A cut within a unit makes two pieces with
            partial results, which are merged

A CTA has one unit of each wave, then a part of the line. There are two ways to arrange a batch:

    ranked_list.py    any batch: tiles sorted by cost
    flat_list.py      where every request has one tile (decode): XLA makes fewer kernels of it

Tokens past query_start_loc[R] (padding) belong to a ghost request without keys, so that their rows are written as
(0, -inf). work_columns.py has the two arrays of a list and what kernels read of them.
"""

import jax.numpy as jnp

from pallas_kernels.gpu import flat_list, ranked_list
from pallas_kernels.gpu.config import GpuKernelConfig
from pallas_kernels.gpu.work_columns import GpuWorkList, with_token_ranges


def build_work_list(
    query_start_loc, seq_lens, num_tokens: int, config: GpuKernelConfig, causal=None, rank=None, local_lens=None,
    ranges=None, query_lens=None,
) -> GpuWorkList:  # fmt: skip
    """Once a step, for all layers of a config: i32[R+1] starts, i32[R] lengths -> GpuWorkList. No host sync.

    causal bool[R] replaces config.mask.causal request by request; it is given exactly when config.per_request_causal.
    rank, local_lens i32[R]: if several ranks hold the keys (config.shards), this one and its number of them.
    ranges i32[T, 2]: with config.mask.spans, the keys that each token sees, half open: see algebra/token_ranges.py.
    query_lens i32[R]: new tokens of each request, or 0 for one that is left out, whose rows nothing writes; None: all.
    """
    if (rank is not None, local_lens is not None) != (config.shards.world > 1,) * 2:
        raise ValueError(f"{config.shards=} needs {'rank and local_lens' if config.shards.world > 1 else 'no rank'}")
    if (causal is not None) != config.per_request_causal:
        raise ValueError(f"{config.per_request_causal=} but causal {'was' if causal is not None else 'was not'} given")
    if (ranges is not None) != config.mask.spans:
        raise ValueError(f"{config.mask.spans=} but ranges {'were' if ranges is not None else 'were not'} given")
    query_lens = jnp.diff(query_start_loc.astype(jnp.int32)) if query_lens is None else query_lens
    args = (query_start_loc, query_lens, seq_lens, num_tokens, config, causal, rank, local_lens, ranges)
    kind = flat_list if config.flat_list else ranked_list
    return with_token_ranges(kind.build(*args), ranges)
