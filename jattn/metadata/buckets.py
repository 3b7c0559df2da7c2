"""Static sizes rounded up, so that a server meets few of them: each bucket is one compiled step."""

import dataclasses

from pallas_kernels.algebra.paging import cdiv

SHORT_QUERY = 8
"""Longest query that counts as short (speculative decoding); between this and the whole batch there is no bucket."""


def power_of_two(n: int) -> int:
    """The smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def query_len_bound(longest: int, num_tokens: int) -> int:
    """Static bound of the query lengths of a batch padded to `num_tokens`: 1, 8 or the whole batch."""
    if longest <= 1:
        return 1
    return SHORT_QUERY if longest <= SHORT_QUERY else max(num_tokens, SHORT_QUERY)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The static sizes that a server compiles for; a batch takes the smallest that holds it."""

    tokens: tuple[int, ...]
    reqs: tuple[int, ...]
    blocks: tuple[int, ...]

    @classmethod
    def powers_of_two(cls, max_tokens: int, max_reqs: int, max_blocks: int) -> "Buckets":
        """1, 2, 4 ... up to and including each maximum."""
        ladder = lambda top: tuple(sorted({min(1 << i, top) for i in range((top - 1).bit_length() + 1)}))  # noqa: E731
        return cls(ladder(max_tokens), ladder(max_reqs), ladder(max_blocks))

    def sizes(self, num_tokens: int, num_reqs: int, num_blocks: int) -> dict[str, int]:
        """from_lengths' padding arguments for a batch of this size."""
        return dict(
            num_tokens=_fit("tokens", num_tokens, self.tokens),
            num_reqs=_fit("requests", num_reqs, self.reqs),
            max_blocks=_fit("blocks of a request", num_blocks, self.blocks),
        )

    def sizes_for(self, query_lens, seq_lens, block_size: int) -> dict[str, int]:
        """The same from a batch's lengths."""
        longest = max(map(int, seq_lens), default=0)
        return self.sizes(int(sum(query_lens)), len(seq_lens), cdiv(max(longest, 1), block_size))

    @property
    def budget(self) -> int:
        """At most this many traces: every size, times the three bounds of query length."""
        return len(self.tokens) * len(self.reqs) * len(self.blocks) * 3


def _fit(what: str, n: int, sizes: tuple[int, ...]) -> int:
    for size in sorted(sizes):
        if n <= size:
            return size
    raise ValueError(f"{n} {what} do not fit the largest bucket {max(sizes)}; split the batch or add a bucket")
