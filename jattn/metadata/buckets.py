"""Static sizes, rounded up so that few of them occur. A step is compiled for each combination."""

import dataclasses

from jattn.errors.arguments import check_fields, integer, integers, sequence_of, takes
from pallas_kernels.algebra.paging import cdiv

SHORT_QUERY = 8
"""The most new tokens of a request that get a bound of their own (speculative decoding); the next bound is T."""


def power_of_two(n: int) -> int:
    """The smallest power of two >= n (1 for n <= 1)."""
    return 1 << max(n - 1, 0).bit_length()


def query_len_bound(longest: int, num_tokens: int) -> int:
    """max_query_len of a batch whose longest query is `longest`, padded to num_tokens: 1, SHORT_QUERY or num_tokens."""
    if longest <= 1:
        return 1
    return SHORT_QUERY if longest <= SHORT_QUERY else max(num_tokens, SHORT_QUERY)


_LENS = integers(1, host="buckets are chosen on the host")


def _sizes_of(name: str, value) -> tuple[int, ...]:
    sizes = sequence_of(integer(1))(name, value)
    if not sizes:
        raise ValueError(f"{name} must hold at least one size")
    return sizes


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The static sizes that a server compiles steps for. A batch is padded to the smallest that it fits."""

    tokens: tuple[int, ...]  # numbers of packed tokens, T
    reqs: tuple[int, ...]  # numbers of requests, R
    blocks: tuple[int, ...]  # widths of the block table, B

    def __post_init__(self):
        check_fields(self, tokens=_sizes_of, reqs=_sizes_of, blocks=_sizes_of)

    @classmethod
    @takes(max_tokens=integer(1), max_reqs=integer(1), max_blocks=integer(1))
    def powers_of_two(cls, max_tokens: int, max_reqs: int, max_blocks: int) -> "Buckets":
        """1, 2, 4 ... and the maximum itself, for each size."""
        powers = lambda most: tuple(sorted({min(1 << i, most) for i in range((most - 1).bit_length() + 1)}))
        return cls(powers(max_tokens), powers(max_reqs), powers(max_blocks))

    @takes(num_tokens=integer(0), num_reqs=integer(0), num_blocks=integer(0))
    def sizes(self, num_tokens: int, num_reqs: int, num_blocks: int) -> dict[str, int]:
        """The arguments num_tokens, num_reqs and max_blocks of from_lengths for a batch of this size."""
        return dict(
            num_tokens=_fit("num_tokens", num_tokens, self.tokens),
            num_reqs=_fit("num_reqs", num_reqs, self.reqs),
            max_blocks=_fit("num_blocks", num_blocks, self.blocks),
        )

    @takes(query_lens=_LENS, seq_lens=_LENS, block_size=integer(1))
    def sizes_for(self, query_lens, seq_lens, block_size: int) -> dict[str, int]:
        """The same for a batch of these lengths."""
        if len(query_lens) != len(seq_lens) or (query_lens < 0).any() or (seq_lens < 0).any():
            raise ValueError(f"{query_lens=} and {seq_lens=} must be lengths >= 0, one of each for each request")
        total, longest = int(query_lens.sum(dtype="int64")), int(seq_lens.max(initial=0))
        return self.sizes(total, len(seq_lens), cdiv(max(longest, 1), block_size))

    @property
    def budget(self) -> int:
        """The most steps that are compiled: one for each combination of sizes, times three bounds of max_query_len."""
        return len(self.tokens) * len(self.reqs) * len(self.blocks) * 3


_UNITS = dict(num_tokens="tokens", num_reqs="requests", num_blocks="blocks of a request")


def _fit(name: str, n: int, sizes: tuple[int, ...]) -> int:
    for size in sorted(sizes):
        if n <= size:
            return size
    raise ValueError(
        f"{name}: {n} {_UNITS[name]} do not fit the largest bucket {max(sizes)}; split the batch or add a bucket"
    )
