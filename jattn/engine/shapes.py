"""StepShapes: the static shapes of dispatches. They are few and known in advance; each is one compiled program."""

import dataclasses
import functools
from typing import NamedTuple

import jax

from jattn.engine.scheduler import Limits, StepPlan
from jattn.metadata import Buckets
from pallas_kernels.algebra.paging import cdiv

MIN_MIXED_TOKENS = 16
"""The tokens of the smallest bucket for batches with a prompt."""

MIN_MIXED_TOKENS_COARSE = 256
"""The same on an accelerator, where reading the weights takes longer than multiplying them by so many tokens: on an
H200 a step of 64 tokens takes 2.1 ms, one of 512 takes 3.0 (1.1e9 parameters in bf16)."""

LEAST_ROWS, FEW_ROWS = 4, 16
"""On an accelerator decodes are padded to 4 rows, and more than 4 to 16 (or to max_num_seqs, if that is less). A step
of few rows takes as long as the weights take to read: on an H200 1.01 ms for 4 rows, 1.16 for 16, 1.32 for 32 (1.1e9
parameters in bf16). One row takes 1.02 ms: each product duplicates it, see jattn/ops/product.py. Each further size is
a program, which takes 5 s to compile."""


class StepShape(NamedTuple):
    """The static sizes of a dispatch."""

    num_tokens: int  # T
    num_rows: int  # R
    is_decode: bool  # every row has a single token
    shares_prefix: bool = False  # keys that all rows share are read once; their number is not static


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """The static sizes of dispatches. Decodes have T = R, padded; other batches a padded T and R = max_num_seqs.

    With several data ranks these are the sizes of each rank's batch: large enough for the fullest one.

    deterministic: all batches have one shape, and a row for each token. A matrix product may add in another order if
    its number of rows changes, so only equal shapes give a token the same bits in every batch.
    """

    limits: Limits
    block_size: int  # tokens of a block
    deterministic: bool = False
    with_final_lens: bool = False  # batches have final_seq_lens, because the model's rotary angles depend on them
    place: jax.sharding.Sharding | None = None  # of arrays of rows on the device; None: JAX's default device
    # Decodes of so many rows or more have a second shape, in which a shared prefix is read once; None: no decodes have.
    least_sharing_rows: int | None = None
    sharing_group: int = 0  # the cache group whose keys are shared then
    # Fewer shapes: see LEAST_ROWS and MIN_MIXED_TOKENS_COARSE.
    is_coarse: bool = dataclasses.field(default_factory=lambda: jax.default_backend() != "cpu")

    @functools.cached_property  # every dispatch asks for it
    def buckets(self) -> Buckets:
        """Powers of two for T and R, of which some are left out; the block table always has all columns."""
        max_tokens, max_rows = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        powers = Buckets.powers_of_two(max_tokens, max_rows, 1)
        if self.deterministic:
            return Buckets((max_tokens,), (max_tokens,), (self.max_blocks,))
        least = MIN_MIXED_TOKENS_COARSE if self.is_coarse else MIN_MIXED_TOKENS
        smallest = min(max(least, max_rows), max_tokens)  # a batch has at least one token for each row
        tokens = tuple(n for n in powers.tokens if n >= smallest)
        rows = powers.reqs
        if self.is_coarse:
            used = (n for n in rows if n <= LEAST_ROWS or n >= FEW_ROWS or n == rows[-1])
            rows = tuple(dict.fromkeys(max(n, LEAST_ROWS) for n in used))
        return Buckets(tokens, rows, (self.max_blocks,))

    @property
    def max_blocks(self) -> int:
        """Columns of the block table."""
        return cdiv(self.limits.max_model_len, self.block_size)

    @property
    def max_rows(self) -> int:
        """R of the largest batch."""
        return max(shape.num_rows for shape in self.all())

    def of(self, plan: StepPlan, shares_prefix: bool = False) -> StepShape:
        """The shape of a plan's dispatch. shares_prefix: that of a decode, if there is one, reads a prefix once."""
        if self.deterministic:
            return self.all()[0]
        if plan.is_decode:
            rows = self.buckets.sizes(1, max([len(part.rows) for part in plan.parts]), 1)["num_reqs"]
            return StepShape(rows, rows, True, shares_prefix and self._may_share(rows))
        num_tokens = max([part.num_tokens for part in plan.parts])
        return StepShape(self.buckets.sizes(num_tokens, 1, 1)["num_tokens"], self.limits.max_num_seqs, False)

    def all(self) -> tuple[StepShape, ...]:
        """Every shape that `of` can return."""
        decode = tuple(StepShape(rows, rows, True) for rows in self.buckets.reqs)
        if self.deterministic:
            return decode
        sharing = tuple(shape._replace(shares_prefix=True) for shape in decode if self._may_share(shape.num_rows))
        mixed = tuple(StepShape(tokens, self.limits.max_num_seqs, False) for tokens in self.buckets.tokens)
        return (*decode, *sharing, *mixed)

    def _may_share(self, rows: int) -> bool:
        return self.least_sharing_rows is not None and rows >= self.least_sharing_rows
