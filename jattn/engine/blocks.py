"""BlockPool: which blocks of a cache group are in use, and which full blocks later requests can share.

A block is held by one sequence or several, or it is free. A held or free block may also be cached: it is found by a
hash of all tokens up to its end, so that a sequence with the same beginning can hold it too. A free cached block keeps
its contents until allocate() needs it; the least recently freed block is used first. Only full blocks are shared, and a
full block is never written again, so there is no copy on write.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from jattn.errors import CacheFullError
from jattn.types import NULL_BLOCK_ID


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a full block: of its tokens and of `parent`, the hash of the block before it.

    The parent of a sequence's first block is made of the weights' version and the request's salt (tables.py). Requests
    that differ in either share no block.
    """
    return hashlib.blake2b(array("q", tokens).tobytes(), key=parent[:64], digest_size=32).digest()


def request_root(salt: bytes, rope_variant: Sequence[int]) -> bytes:
    """The salt, with the rope variant if the keys depend on the request's final length."""
    return block_hash(salt, rope_variant) if rope_variant else salt


class BlockPool:
    """Blocks 1 .. num_blocks-1. Block 0 is in unused columns of block tables and is never allocated."""

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"{num_blocks=} must be at least 2: block {NULL_BLOCK_ID} is never allocated")
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # least recently freed first
        self._holders = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}  # cached block -> hash
        self._cached: dict[bytes, int] = {}  # hash -> cached block
        self.evictions = 0  # cached blocks whose contents were replaced

    @property
    def num_free(self) -> int:
        """Free blocks, cached ones included."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that a sequence holds."""
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, now held once; CacheFullError, and none allocated, if there are fewer."""
        if count > len(self._free):
            raise CacheFullError(f"{count} blocks requested, {len(self._free)} of {self.num_blocks - 1} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
            if block in self._hash_of:
                self.evictions += 1
                self.forget(block)
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder of each block. The blocks given last stay cached longest."""
        for block in blocks:
            if self._holders[block] < 1:
                raise AssertionError(f"block {block} is released but not held")
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def find(self, digest: bytes) -> int | None:
        """The cached block with this hash; None if there is none."""
        return self._cached.get(digest)

    def hold(self, block: int) -> None:
        """Add a holder to a cached block."""
        self._holders[block] += 1
        self._free.pop(block, None)

    def publish(self, block: int, digest: bytes) -> None:
        """Make a held block cached. It must be full, or be filled before another sequence reads it.

        If a block with the same contents is cached already, that one remains the shared one.
        """
        if digest not in self._cached and block not in self._hash_of:
            self._cached[digest] = block
            self._hash_of[block] = digest

    def forget(self, block: int) -> None:
        """Make a block not cached, because its contents are replaced or wrong."""
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._cached[digest]

    def check(self, holders: dict[int, int]) -> None:
        """AssertionError unless exactly these blocks are held, with these numbers of holders."""
        counted = {block: count for block, count in enumerate(self._holders) if count}
        assert counted == holders, f"held {counted}, expected {holders}"
        free = set(self._free)
        assert free == set(range(1, self.num_blocks)) - set(holders), "a block is neither free nor held, or both"
        assert {digest: block for block, digest in self._hash_of.items()} == self._cached
