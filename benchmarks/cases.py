"""The named cases of `benchmarks.run` and `benchmarks.cpu`: 32 query heads, 8 kv heads, head dim 128.

dec_16x4k_p128_bf16 decodes 16 requests of 4096 tokens, pages of 128, in bfloat16; pre_4x512_f32 prefills four prompts.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """A ragged batch over a paged cache."""

    name: str
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    page: int = 16
    dtype: str = "bfloat16"  # of the queries, and of the cache unless it is quantised
    cache_dtype: str | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values: what attention reads at least."""
        item = {"bfloat16": 2, "float16": 2, "float32": 4}.get(self.cache_dtype or self.dtype, 1)
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_dim * item

    @property
    def flop(self) -> int:
        """Multiply-adds of both products over the visible (causal) pairs, times two."""
        pairs = sum(q * s - q * (q - 1) // 2 for q, s in zip(self.query_lens, self.seq_lens, strict=True))
        return 4 * pairs * self.num_heads * self.head_dim


def decode(name: str, reqs: int, length: int, **options) -> Case:
    """One new token for each of `reqs` requests of `length` tokens."""
    return Case(name, (1,) * reqs, (length,) * reqs, **options)


def prefill(name: str, reqs: int, length: int, **options) -> Case:
    """`reqs` whole prompts."""
    return Case(name, (length,) * reqs, (length,) * reqs, **options)


_SHORT = {"bfloat16": "bf16", "float32": "f32"}

CPU = (
    *(
        decode(f"dec_{reqs}x{length // 1024}k_p{page}_{_SHORT[dtype]}", reqs, length, page=page, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for reqs in (16, 64)
        for length in (1024, 4096)
        for page in (16, 128)
    ),
    decode("dec_1x32k_bf16", 1, 32768),
    *(prefill(f"pre_1x2k_{_SHORT[d]}", 1, 2048, dtype=d) for d in ("bfloat16", "float32")),
    *(prefill(f"pre_4x512_{_SHORT[d]}", 4, 512, dtype=d) for d in ("bfloat16", "float32")),
    Case("mixed_16d_2p_bf16", (1,) * 16 + (512,) * 2, (2048,) * 16 + (512,) * 2),
    decode("dec_16x4k_p128_fp8", 16, 4096, page=128, cache_dtype="float8_e4m3fn"),
)


def find(pattern: str, among: tuple[Case, ...] = CPU) -> list[Case]:
    """Cases whose name contains `pattern`; ValueError names them all where there is none."""
    found = [case for case in among if pattern in case.name]
    if not found:
        raise ValueError(f"no case contains {pattern!r}; there are {', '.join(case.name for case in among)}")
    return found
