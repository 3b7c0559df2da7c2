"""Chunked-local attention as an ordinary batch: each chunk with queries becomes a request, called a virtual batch.

    chunk 4, request with 10 new of 17 tokens:      keys   0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13 14 15 | 16
                                                    query               7      8 .. 11      12 .. 15     16
    virtual batches (queries, keys, first key):     (1, 4, 4)  (4, 4, 8)  (4, 4, 12)  (1, 1, 16)

A kernel without chunked-local attention can compute it. A request without new tokens has no virtual batch. Distances
between tokens are unchanged (ALiBi, windows), but positions count from the start of the chunk, also in a mask_fn or
score_fn.
"""

from jattn.errors.arguments import integer, integers, takes
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.batch_checks import check_block_size
from jattn.metadata.host import array_module, inclusive_sum, on_host, segment_of, starts_of
from jattn.types import NULL_BLOCK_ID, AnyArray, pytree
from pallas_kernels.algebra.paging import cdiv


@pytree
class BlockTableRemap:
    """A function of a block table that gives that of the virtual batches.

    Groups of layers with block tables of their own share one remap.
    """

    req: AnyArray  # i32[virtual batches] the request of each
    column: AnyArray  # i32[virtual batches, chunk // block_size] the column of each entry in the request's block table
    live: AnyArray  # bool[virtual batches] False: padding

    def __call__(self, block_table):
        """i32[R B] -> i32[virtual, chunk // block_size]; rows of padding hold the null block."""
        block_table = integers(2)("block_table", block_table)
        if not block_table.shape[1]:
            raise ValueError(f"block_table.shape={tuple(block_table.shape)} must have at least one column")
        xp = array_module(block_table, self.req)
        table = xp.asarray(block_table)
        if not table.shape[0]:
            return xp.full(self.column.shape, NULL_BLOCK_ID, xp.int32)
        pages = table[self.req[:, None], xp.minimum(self.column, table.shape[1] - 1)]
        return xp.where(self.live[:, None], pages, NULL_BLOCK_ID).astype(xp.int32)


@takes(attn_chunk_size=integer(1), max_num_reqs=integer(0), max_num_tokens=integer(0))
def max_local_attention_virtual_batches(attn_chunk_size: int, max_num_reqs: int, max_num_tokens: int) -> int:
    """The most virtual batches of a batch of these sizes: min(2R + ceil(T / chunk), T)."""
    return min(2 * max_num_reqs + cdiv(max_num_tokens, attn_chunk_size), max_num_tokens)


def make_local_attention_virtual_batches(attn_chunk_size: int, batch, *args, **kwargs):
    """Chunked-local attention as a plain batch: each chunk that has new tokens becomes a request of its own.

    Call it with (chunk, CommonAttentionMetadata, block_size), see local_metadata, or with
    (chunk, query_start_loc, seq_lens, block_table, block_size), see local_arrays.
    """
    form = local_metadata if isinstance(batch, CommonAttentionMetadata) else local_arrays
    return form(attn_chunk_size, batch, *args, **kwargs)


_LENS = integers(1, host="pass a CommonAttentionMetadata instead")


@takes(
    attn_chunk_size=integer(),
    query_start_loc_np=_LENS,
    seq_lens_np=_LENS,
    block_table=integers(2, host="pass a CommonAttentionMetadata instead"),
    block_size=integer(),
)
def local_arrays(attn_chunk_size: int, query_start_loc_np, seq_lens_np, block_table, block_size: int = 0):
    """numpy (query lengths, query_start_loc, key lengths, block_table) of the virtual batches, without padding."""
    check_chunk(attn_chunk_size, block_size)
    start, lens, table = (
        on_host(x, "local_arrays", "pass a CommonAttentionMetadata")
        for x in (query_start_loc_np, seq_lens_np, block_table)
    )
    if len(start) != len(lens) + 1 or len(table) != len(lens):
        raise ValueError(
            f"query_start_loc_np, seq_lens_np and block_table have {len(start)}, {len(lens)} and {len(table)} rows: "
            "they must have R + 1, R and R"
        )
    capacity = max_local_attention_virtual_batches(attn_chunk_size, len(lens), int(start[-1]))
    q_local, k_local, remap, count = _virtual(attn_chunk_size, start, lens, block_size, capacity)
    q_local, k_local = q_local[:count], k_local[:count]
    return q_local, starts_of(q_local, array_module()), k_local, remap(table)[:count]


@takes(attn_chunk_size=integer(), meta=BATCH, block_size=integer())
def local_metadata(attn_chunk_size: int, meta: CommonAttentionMetadata, block_size: int = 0):
    """(CommonAttentionMetadata, BlockTableRemap), padded to max_local_attention_virtual_batches.

    Tokens and slots keep their order; only lengths and block tables change. Works on the host and inside jit.
    """
    check_chunk(attn_chunk_size, block_size)
    for name, why in (
        ("cross", "a cross-attention layer sees every encoder token"),
        ("dcp_local_seq_lens", "the keys of a chunk are distributed over ranks"),
        ("mm_prefix_ranges", "a span may be in several chunks"),
        ("rswa_prefix_lens", "a prefix may be in an earlier chunk"),
    ):
        if getattr(meta, name) is not None:
            raise ValueError(f"meta.{name} is set and {why}: virtual batches do not support it")
    if meta.block_table is None:
        raise ValueError("meta.block_table is None: without a cache use the mask instead (AttentionSpec.chunk_size)")
    check_block_size(meta, block_size)
    capacity = max_local_attention_virtual_batches(attn_chunk_size, meta.max_num_reqs, meta.num_tokens)
    xp = array_module(meta.query_start_loc, meta.seq_lens)
    q_local, k_local, remap, count = _virtual(
        attn_chunk_size, meta.query_start_loc, meta.seq_lens, block_size, max(capacity, 1)
    )
    causal, final = meta.causal_per_request, meta.final_seq_lens
    return meta.replace(
        query_start_loc=starts_of(q_local, xp),
        seq_lens=k_local,
        block_table=remap(meta.block_table),
        num_reqs=xp.asarray(count, xp.int32),
        causal_per_request=None if causal is None else xp.where(remap.live, xp.asarray(causal)[remap.req], True),
        encoder_seq_lens=None,
        final_seq_lens=None if final is None else xp.where(remap.live, xp.asarray(final)[remap.req], 0),
        max_query_len=min(meta.max_query_len, attn_chunk_size),
        max_seq_len=attn_chunk_size,
    ), remap


def check_chunk(attn_chunk_size: int, block_size: int) -> None:
    """ValueError unless a chunk is a whole number of blocks."""
    if block_size < 1:
        raise ValueError(f"{block_size=} must be >= 1: pass the cache's block size")
    if attn_chunk_size < 1 or attn_chunk_size % block_size:
        raise ValueError(
            f"attn_chunk_size {attn_chunk_size} is not divisible by block_size {block_size}; "
            "choose a block size that divides the chunk, or use the mask instead (AttentionSpec.chunk_size)"
        )


def _virtual(chunk: int, query_start_loc, seq_lens, block_size: int, capacity: int):
    """(query lengths, key lengths, remap, count) of `capacity` virtual batches; those from `count` on are empty."""
    xp = array_module(query_start_loc, seq_lens)
    start, k = xp.asarray(query_start_loc, xp.int32), xp.asarray(seq_lens, xp.int32)
    if not k.shape[0]:  # one request without tokens
        start, k = xp.zeros(2, xp.int32), xp.zeros(1, xp.int32)
    q = start[1:] - start[:-1]
    first = xp.minimum(chunk - (k - q) % chunk, q)  # queries in the first chunk
    last = chunk + k % -chunk  # keys in the last chunk, 1 .. chunk
    pieces = xp.where(q > 0, 1 + cdiv(q - first, chunk), 0)
    ends = inclusive_sum(pieces, xp)
    req = segment_of(ends, capacity, xp)
    index = xp.arange(capacity, dtype=xp.int32)
    live = index < ends[-1]
    piece = index - (ends - pieces)[req]
    after = pieces[req] - 1 - piece  # pieces of the same request after this one
    q_local = xp.where(piece == 0, first[req], xp.minimum(q[req] - first[req] - chunk * (piece - 1), chunk))
    k_start = k[req] - (after * chunk + last[req])
    k_local = xp.where(k_start < 0, 0, xp.where(after == 0, last[req], chunk))  # queries before key 0 see no key
    pages = xp.arange(chunk // block_size, dtype=xp.int32)
    column = xp.where(live & (k_start >= 0), k_start // block_size, 0)[:, None] + pages[None, :]
    zeroed = lambda x: xp.where(live, x, 0).astype(xp.int32)  # noqa: E731
    return zeroed(q_local), zeroed(k_local), BlockTableRemap(req=req, column=column, live=live), ends[-1]
