"""What an operation that needs the blocks of a batch, or its next token, asks of it first.

meta is a CommonAttentionMetadata, whose module imports this one."""

from typing import Any


def check_block_size(meta: Any, block_size: int, of: str = "block_size") -> int:
    """Return the block size; ValueError if the batch has no block table, or one for blocks of another size."""
    if meta.block_table is None:
        raise ValueError("meta.block_table is None: this needs the blocks of a cache; give from_lengths block_table=")
    if meta.block_size not in (None, block_size):
        raise ValueError(
            f"{of}={block_size} but the batch was made for blocks of meta.block_size={meta.block_size} tokens: "
            f"its slots are in other blocks; make the batch with block_size={block_size}"
        )
    return block_size


def check_grows(meta: Any) -> None:
    """ValueError if a field counts the keys of this step only: with one more token it would hide the last key."""
    if meta.dcp_local_seq_lens is not None:
        raise ValueError(
            "meta.dcp_local_seq_lens counts this step's keys: give the next batch its own, or leave it None, and each "
            "rank counts its keys itself"
        )
