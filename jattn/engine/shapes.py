"""The few static shapes that a server compiles for, all known in advance; one program each."""

import dataclasses

from jattn.engine.scheduler import Limits, StepPlan
from jattn.metadata import Buckets
from pallas_kernels.algebra.paging import cdiv

SMALLEST_MIXED = 16
"""Tokens of the smallest bucket for batches that hold a prompt."""


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """Static sizes of a dispatch: decodes pad T and R to the same size; other batches pad T, and R is max_num_seqs.

    deterministic: one shape for every batch, and a row for every token. A matrix product may sum in another order when
    its number of rows changes, so only equal shapes give a token the same bits in every batch.
    """

    limits: Limits
    block_size: int
    deterministic: bool = False
    with_final_lens: bool = False  # the model's rotary positions depend on them

    @property
    def buckets(self) -> Buckets:
        """Powers of two, and the width that the longest sequence needs."""
        top, rows = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        ladder = Buckets.powers_of_two(top, rows, 1)
        if self.deterministic:
            return Buckets((top,), (top,), (self.max_blocks,))
        smallest = min(max(SMALLEST_MIXED, rows), top)  # a mixed batch has a token for each of its rows at least
        tokens = tuple(n for n in ladder.tokens if n >= smallest)
        return Buckets(tokens, ladder.reqs, (self.max_blocks,))

    @property
    def max_blocks(self) -> int:
        """Columns of the block table."""
        return cdiv(self.limits.max_model_len, self.block_size)

    def of(self, plan: StepPlan) -> tuple[int, int, bool]:
        """(T, R, is every row a single token?) of a plan's dispatch."""
        if self.deterministic:
            return self.all()[0]
        if plan.is_decode:
            rows = self.buckets.sizes(1, len(plan.rows), 1)["num_reqs"]
            return rows, rows, True
        return self.buckets.sizes(plan.num_tokens, 1, 1)["num_tokens"], self.limits.max_num_seqs, False

    def all(self) -> tuple[tuple[int, int, bool], ...]:
        """Every shape that `of` can return."""
        decode = tuple((rows, rows, True) for rows in self.buckets.reqs)
        if self.deterministic:
            return decode
        return (*decode, *((tokens, self.limits.max_num_seqs, False) for tokens in self.buckets.tokens))
