"""Block tables in other forms: for blocks of another size, and FlashInfer's CSR form.

    CSR: the pages of request r are indices[indptr[r] : indptr[r+1]]; the last one has last_page_len[r] tokens.

All functions take numpy arrays and also work inside jit. Sizes that depend on values are static arguments.
"""

from jattn.errors.arguments import integer, integers, optional, takes
from jattn.metadata.host import array_module, segment_of, starts_of
from jattn.types import NULL_BLOCK_ID
from pallas_kernels.algebra.paging import cdiv


def _starts(name: str, value):
    indptr = integers(1)(name, value)
    if not indptr.shape[0]:
        raise ValueError(f"{name} must have R + 1 entries, got none")
    return indptr


def _one_each(rows: int, **arrays) -> None:
    for name, x in arrays.items():
        if x.shape[0] != rows:
            raise ValueError(f"{name}.shape={tuple(x.shape)} must have one entry for each request, {rows}")


@takes(block_table=integers(2), ratio=integer(1))
def split_block_table(block_table, ratio: int):
    """i32[R B] -> i32[R, B*ratio]: each block b becomes `ratio` smaller ones, b*ratio .. b*ratio+ratio-1.

    For a kernel whose blocks are `ratio` times smaller than those of the pool. Negative ids remain negative.
    """
    xp = array_module(block_table)
    table = xp.asarray(block_table, xp.int32)
    small = table[:, :, None] * ratio + xp.arange(ratio, dtype=xp.int32)[None, None, :]
    return small.reshape(table.shape[0], table.shape[1] * ratio)


@takes(block_table=integers(2), seq_lens=integers(1), block_size=integer(1), num_indices=optional(integer(0)))
def csr_from_block_table(block_table, seq_lens, block_size: int, num_indices: int | None = None):
    """(indptr i32[R+1], indices i32[num_indices], last_page_len i32[R]). num_indices None: R*B.

    Indices from indptr[-1] on are NULL_BLOCK_ID. A request without tokens has no page, and its last_page_len is 0.
    """
    if not block_table.shape[1] or block_table.shape[0] != seq_lens.shape[0]:
        shapes = f"block_table.shape={tuple(block_table.shape)} and seq_lens.shape={tuple(seq_lens.shape)}"
        raise ValueError(f"{shapes} must be [R, B] with B > 0 and [R]")
    xp = array_module(block_table, seq_lens)
    table, lens = xp.asarray(block_table, xp.int32), xp.asarray(seq_lens, xp.int32)
    count = table.size if num_indices is None else num_indices
    pages = cdiv(lens, block_size)
    indptr = starts_of(pages, xp)
    entry = xp.arange(count, dtype=xp.int32)
    req = segment_of(indptr[1:], count, xp)
    column = xp.clip(entry - indptr[:-1][req], 0, table.shape[1] - 1)
    indices = xp.where(entry < indptr[-1], table[req, column], NULL_BLOCK_ID)
    return indptr, indices, lens - xp.maximum(pages - 1, 0) * block_size


@takes(indptr=_starts, indices=integers(1), max_blocks=integer(0))
def block_table_from_csr(indptr, indices, max_blocks: int):
    """The block table i32[R, max_blocks], padded with NULL_BLOCK_ID. Pages from max_blocks on are left out."""
    xp = array_module(indptr, indices)
    indptr, indices = xp.asarray(indptr, xp.int32), xp.asarray(indices, xp.int32)
    column = xp.arange(max_blocks, dtype=xp.int32)[None, :]
    entry = indptr[:-1, None] + column
    if indices.shape[0] == 0:
        return xp.full(entry.shape, NULL_BLOCK_ID, xp.int32)
    pages = indices[xp.clip(entry, 0, indices.shape[0] - 1)]
    return xp.where(entry < indptr[1:, None], pages, NULL_BLOCK_ID)


@takes(indptr=_starts, last_page_len=integers(1), page_size=integer(1))
def get_seq_lens(indptr, last_page_len, page_size: int):
    """i32[R] the tokens of each request: (pages - 1) * page_size + last_page_len, or 0 without pages."""
    _one_each(indptr.shape[0] - 1, last_page_len=last_page_len)
    xp = array_module(indptr, last_page_len)
    indptr = xp.asarray(indptr, xp.int32)
    pages = indptr[1:] - indptr[:-1]
    lens = (pages - 1) * page_size + xp.asarray(last_page_len, xp.int32)
    return xp.where(pages > 0, lens, 0)


@takes(append_indptr=_starts, seq_lens=integers(1), nnz=integer(0))
def get_batch_indices_positions(append_indptr, seq_lens, nnz: int):
    """(request i32[nnz], position i32[nnz]) of each appended token; -1 after the last one. seq_lens include them."""
    _one_each(append_indptr.shape[0] - 1, seq_lens=seq_lens)
    xp = array_module(append_indptr, seq_lens)
    indptr = xp.asarray(append_indptr, xp.int32)
    token = xp.arange(nnz, dtype=xp.int32)
    if not seq_lens.shape[0]:
        return xp.full_like(token, -1), xp.full_like(token, -1)
    req = segment_of(indptr[1:], nnz, xp)
    position = xp.asarray(seq_lens, xp.int32)[req] + token - indptr[1:][req]
    live = token < indptr[-1]
    return xp.where(live, req, -1), xp.where(live, position, -1)
