"""BlockTables: allocates, shares and frees the blocks of running sequences, for each cache group.

Layers that need the same tokens are a cache group and share one block table. A group with a sliding window or with
chunks frees a block as soon as no later token can see it; its table then has NULL_BLOCK_ID in that place.
"""

import hashlib
from array import array
from collections.abc import Sequence as Many
from typing import Protocol

from jattn.engine.blocks import BlockPool, block_hash
from jattn.engine.request import Sequence
from jattn.types import NULL_BLOCK_ID
from pallas_kernels.algebra.paging import cdiv


class Group(Protocol):
    """The tokens that a cache group needs: the last `sliding_window`, the query's own chunk, or all (both None)."""

    @property
    def sliding_window(self) -> int | None: ...

    @property
    def chunk_size(self) -> int | None: ...


def first_visible(group: Group, position: int) -> int:
    """The first position that a token at `position`, or a later one, can see."""
    first = 0
    if group.sliding_window is not None:
        first = max(first, position - group.sliding_window + 1)
    if group.chunk_size is not None:
        first = max(first, position // group.chunk_size * group.chunk_size)
    return first


def max_blocks_of_group(
    group: Group, block_size: int, num_seqs: int, num_new: int, burst: int, prefix_caching: bool = False
) -> int | None:
    """The most blocks that `num_seqs` sequences use in this group; None: it grows with their lengths.

    num_new: the most tokens that a step adds to all of them together. burst: the most that decoding adds to each.
    Before a step a sequence needs its last reach - 1 tokens; L tokens are in at most cdiv(L - 1, block_size) + 1
    blocks. With prefix caching the number is doubled, so that cached beginnings can stay in the pool.
    """
    reach = min((n for n in (group.sliding_window, group.chunk_size) if n is not None), default=None)
    if reach is None:
        return None
    held = num_seqs * (cdiv(max(reach - 2 + burst, 0), block_size) + 2) + num_new // block_size
    return 2 * held if prefix_caching else held


class BlockTables:
    """The block pools of all cache groups. Only this class changes the tables of a sequence, Sequence.tables."""

    def __init__(
        self,
        num_blocks: Many[int],
        block_size: int,
        groups: Many[Group],
        prefix_caching: bool = True,
        weights_version: int = 0,
    ):
        """num_blocks: of each group's pool. weights_version: part of the hash of every block."""
        self.block_size = block_size
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(count) for _, count in zip(self.groups, num_blocks, strict=True))
        self.prefix_caching = prefix_caching
        # groups that free blocks of running sequences
        self._forgetful = [g for g, group in enumerate(self.groups) if group.sliding_window or group.chunk_size]
        self.weights_version = weights_version

    @property
    def usage(self) -> float:
        """The share of blocks in use in the fullest group."""
        return max(share for _, share in self.group_usage)

    @property
    def evictions(self) -> int:
        """Cached blocks whose contents were replaced."""
        return sum(pool.evictions for pool in self.pools)

    @property
    def group_usage(self) -> tuple[tuple[str, float], ...]:
        """(name, share of blocks in use) of each group."""
        shares = [pool.num_held / (pool.num_blocks - 1) for pool in self.pools]
        return tuple((_name(group), share) for group, share in zip(self.groups, shares, strict=True))

    def admit(self, seq: Sequence) -> int:
        """Give a new sequence the cached blocks of its beginning; returns the number of their tokens."""
        seq.tables = [array("i") for _ in self.groups]
        seq.kept_from = [0] * len(self.groups)
        hits = self._longest_hit(seq)
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            kept = first_visible(group, hits * self.block_size) // self.block_size
            seq.kept_from[g] = kept
            found = [pool.find(digest) for digest in seq.block_hashes[kept:hits]]
            seq.tables[g].extend([NULL_BLOCK_ID] * kept + [block for block in found if block is not None])
            for block in seq.tables[g][kept:]:
                pool.hold(block)
        seq.num_shared = seq.num_published = hits
        seq.num_computed = hits * self.block_size
        return seq.num_computed

    def fits(self, wanted: Many[tuple[Sequence, int]]) -> bool:
        """Are there enough free blocks for every (sequence, number of tokens) together?"""
        for g, pool in enumerate(self.pools):
            missing = sum(max(cdiv(n, self.block_size) - len(seq.tables[g]), 0) for seq, n in wanted)
            if missing > pool.num_free:
                return False
        return True

    def extend(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate the blocks of the first `num_tokens` tokens; False, and none allocated, if too few are free."""
        if len(seq.tables[0]) * self.block_size >= num_tokens:  # the tables of all groups have the same length
            return True  # the usual case: the last block is not full
        return self.extend_all([(seq, num_tokens)])

    def extend_all(self, wanted: Many[tuple[Sequence, int]]) -> bool:
        """Like extend, for several sequences: all get their blocks, or none."""
        if not self.fits(wanted):
            return False
        for seq, num_tokens in wanted:
            for table, pool in zip(seq.tables, self.pools, strict=True):
                table.extend(pool.allocate(max(cdiv(num_tokens, self.block_size) - len(table), 0)))
        return True

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let other sequences share the blocks that the first `num_tokens` tokens fill.

        The tokens are computed already, or in the step that is being planned. In a step all keys are written before any
        are read, so its sequences can share each other's blocks.
        """
        if not self.prefix_caching or num_tokens < (seq.num_published + 1) * self.block_size:
            return
        full = num_tokens // self.block_size
        self._hash_blocks(seq, full)
        for i in range(seq.num_published, full):
            for table, pool in zip(seq.tables, self.pools, strict=True):
                if table[i] != NULL_BLOCK_ID:
                    pool.publish(table[i], seq.block_hashes[i])
        seq.num_published = full

    @property
    def settles(self) -> bool:
        """Can `settle` change anything? No if nothing is shared and no group frees blocks of running sequences."""
        return self.prefix_caching or bool(self._forgetful)

    def settle(self, seq: Sequence, num_computed: int) -> None:
        """After a step was read, with so many tokens computed: let others share full blocks, and free blocks that no
        later token of this sequence can see."""
        self.publish(seq, num_computed)
        for g in self._forgetful:
            group, pool = self.groups[g], self.pools[g]
            kept = min(first_visible(group, num_computed) // self.block_size, len(seq.tables[g]))
            for i in range(seq.kept_from[g], kept):
                pool.release([seq.tables[g][i]])
                seq.tables[g][i] = NULL_BLOCK_ID
            seq.kept_from[g] = max(seq.kept_from[g], kept)

    def release(self, seq: Sequence, *, trusted: bool = True) -> None:
        """Free all blocks of a sequence. Without `trusted`, blocks that it wrote are removed from the prefix cache."""
        for table, kept, pool in zip(seq.tables, seq.kept_from, self.pools, strict=True):
            held = table[kept:]
            if not trusted:
                for block in table[max(kept, seq.num_shared) :]:
                    pool.forget(block)
            pool.release(reversed(held))  # the first blocks last, to be reused last: they are shared most often
        seq.tables, seq.kept_from = [], []
        seq.num_computed = seq.num_shared = seq.num_published = 0

    def num_cached(self, seq: Sequence) -> int:
        """How many tokens at the beginning of a waiting sequence are cached."""
        return self._longest_hit(seq) * self.block_size

    def _longest_hit(self, seq: Sequence) -> int:
        """How many blocks at the beginning are cached in all groups. The last token is always computed."""
        if not self.prefix_caching:
            return 0
        limit = (len(seq.tokens) - 1) // self.block_size
        self._hash_blocks(seq, limit)
        for g, pool in enumerate(self.pools):
            if g not in self._forgetful:  # every block is needed
                limit = next((i for i in range(limit) if pool.find(seq.block_hashes[i]) is None), limit)
        runs = [(self.groups[g], _begins_of_runs(self.pools[g], seq.block_hashes[:limit])) for g in self._forgetful]
        for hits in range(limit, 0, -1):
            first = hits * self.block_size
            if all(begins[hits] <= first_visible(group, first) // self.block_size for group, begins in runs):
                return hits
        return 0

    def _first_parent(self, root_hash: bytes) -> bytes:
        """The parent hash of a sequence's first block: of the weights' version and the request's root hash."""
        return hashlib.blake2b(self.weights_version.to_bytes(8, "little") + root_hash).digest()

    def _hash_blocks(self, seq: Sequence, count: int) -> None:
        """Compute the hashes of the first `count` blocks. They remain valid after a preemption."""
        while len(seq.block_hashes) < count:
            i = len(seq.block_hashes)
            parent = seq.block_hashes[-1] if seq.block_hashes else self._first_parent(seq.root_hash)
            seq.block_hashes.append(block_hash(parent, seq.tokens[i * self.block_size : (i + 1) * self.block_size]))


def _begins_of_runs(pool: BlockPool, hashes: Many[bytes]) -> list[int]:
    """begins[i]: where the run of cached blocks begins that ends before block i; i if block i - 1 is not cached."""
    begins = [0]
    for i, digest in enumerate(hashes, 1):
        begins.append(i if pool.find(digest) is None else begins[-1])
    return begins


def _name(group: Group) -> str:
    parts = [] if group.sliding_window is None else [f"window {group.sliding_window}"]
    parts += [] if group.chunk_size is None else [f"chunk {group.chunk_size}"]
    return " ".join(parts) or "full"
