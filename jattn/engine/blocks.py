"""The block pool of one cache group: who holds which block, and which full blocks a later request may share.

A block is free (nobody holds it), held (by one request or several), and, whether free or held, it may be cached: its
contents are known by a hash of all tokens up to its end, so that a request with the same beginning can hold it too.
A free cached block keeps its contents until the pool needs it: the least recently freed goes first. Only full blocks
are ever shared, and nobody writes into a full block again, so there is no copy on write.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from jattn.errors import CacheFullError
from jattn.types import NULL_BLOCK_ID


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block: its tokens and, through `parent`, everything before them.

    The parent of a request's first block is made of the weights' version and the request's salt (tables.py): requests
    that differ in either share nothing.
    """
    return hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), key=parent[:64], digest_size=32).digest()


def request_root(salt: bytes, rope_variant: Sequence[int]) -> bytes:
    """The salt, combined with the rope variant where the keys depend on the request's final length."""
    return block_hash(salt, rope_variant) if rope_variant else salt


class BlockPool:
    """Blocks 1 .. num_blocks-1 (block 0 fills unused table columns and is never dealt out)."""

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"{num_blocks=} must be at least 2: block {NULL_BLOCK_ID} is never dealt out")
        self.num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # least recently freed first
        self._holders = [0] * num_blocks
        self._name: dict[int, bytes] = {}  # cached block -> hash
        self._cached: dict[bytes, int] = {}  # hash -> cached block
        self.evictions = 0  # cached blocks whose contents were given up

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can deal out, free cached ones included."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks that nobody else holds; all or none."""
        if count > len(self._free):
            raise CacheFullError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks - 1} free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.evictions += block in self._name
            self.forget(block)
            self._holders[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """One holder less; the blocks given last are kept in the cache longest."""
        for block in blocks:
            if self._holders[block] < 1:
                raise AssertionError(f"block {block} is released but nobody holds it")
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free[block] = None

    def find(self, name: bytes) -> int | None:
        """The cached block of this hash."""
        return self._cached.get(name)

    def hold(self, block: int) -> None:
        """One holder more of a cached block."""
        self._holders[block] += 1
        self._free.pop(block, None)

    def publish(self, block: int, name: bytes) -> None:
        """Let others share a held block that is full, or will be before anyone reads it. If the same contents are
        cached already, the first copy stays the shared one."""
        if name not in self._cached and block not in self._name:
            self._cached[name] = block
            self._name[block] = name

    def forget(self, block: int) -> None:
        """The block's contents are gone, or not to be trusted: nobody new may share it."""
        name = self._name.pop(block, None)
        if name is not None:
            del self._cached[name]

    def check(self, holders: dict[int, int]) -> None:
        """AssertionError unless exactly these blocks are held, by so many: no leak, no double free."""
        counted = {block: count for block, count in enumerate(self._holders) if count}
        assert counted == holders, f"held {counted}, expected {holders}"
        free = set(self._free)
        assert free == set(range(1, self.num_blocks)) - set(holders), "a block is neither free nor held, or both"
        assert {name: block for block, name in self._name.items()} == self._cached
