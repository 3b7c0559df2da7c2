"""Decode context parallelism: which of a request's keys each rank holds.

Keys go round the ranks in runs of `interleave`: rank = (position // interleave) % size.
"""

from jattn.errors.arguments import integer, integers, optional, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.host import array_module

_RANK = integers(0)


@takes(seq_lens=integers(), dcp_size=integer(1), rank=optional(_RANK), interleave=integer(1))
def get_dcp_local_seq_lens(seq_lens, dcp_size: int = 1, rank=None, interleave: int = 1):
    """i32[R] keys that `rank` holds of each request, or i32[R, size] for all ranks (rank None).

        base = L // I // N * I        local = base + clip(L - base*N - rank*I, 0, I)

    The ranks' lengths sum to L. rank may be traced: jax.lax.axis_index inside shard_map.
    """
    xp = array_module(seq_lens, rank)
    lens = xp.asarray(seq_lens, xp.int32)
    if rank is None and lens.ndim != 1:
        raise ValueError(f"seq_lens.shape={lens.shape} must be (R,), or rank must be given")
    if rank is None:
        lens, rank = lens[:, None], xp.arange(dcp_size, dtype=xp.int32)[None, :]
    base = lens // interleave // dcp_size * interleave
    return (base + xp.clip(lens - base * dcp_size - rank * interleave, 0, interleave)).astype(xp.int32)


@takes(meta=BATCH, dcp_size=integer(1), rank=_RANK, interleave=integer(1))
def with_dcp(meta: CommonAttentionMetadata, dcp_size: int, rank, interleave: int = 1) -> CommonAttentionMetadata:
    """The batch with this rank's dcp_local_seq_lens filled in."""
    return meta.replace(dcp_local_seq_lens=get_dcp_local_seq_lens(meta.seq_lens, dcp_size, rank, interleave))
