"""From a plan to the arrays of a dispatch: numpy only, pure."""

from collections.abc import Mapping

import numpy as np

from jattn.engine.sampling import SamplingRows, sampling_rows
from jattn.engine.scheduler import StepPlan, remaining_tokens
from jattn.engine.sequence import Sequence
from jattn.engine.shapes import StepShapes
from jattn.engine.step import Batch
from jattn.metadata import CommonAttentionMetadata
from jattn.types import NULL_BLOCK_ID


def batch_of(plan: StepPlan, seqs: Mapping[str, Sequence], shapes: StepShapes, eos: tuple[int, ...]) -> Batch:
    """The plan's tokens, one metadata a cache group, and every row's rules, in the plan's bucket."""
    num_tokens, num_rows = shapes.of(plan)
    chosen = [seqs[row.id] for row in plan.rows]
    token_ids = np.zeros(num_tokens, np.int32)
    new = [seq.tokens[row.start : row.start + row.num_new] for seq, row in zip(chosen, plan.rows, strict=True)]
    token_ids[: plan.num_tokens] = np.concatenate(new)
    return Batch(
        token_ids=token_ids,
        metas=_metas(plan, chosen, shapes, num_tokens, num_rows),
        rows=_rows(plan, chosen, shapes, eos, num_rows),
        steps=np.int32(plan.burst),
        until_any=np.bool_(plan.until_any),
        block_size=shapes.block_size,
    )


def empty_batch(shape: tuple[int, int, bool], num_groups: int, shapes: StepShapes) -> Batch:
    """A batch of padding in a bucket: what warming up compiles with; it writes nowhere."""
    num_tokens, num_rows, decode = shape
    meta = CommonAttentionMetadata.from_lengths(
        [], [], np.zeros((0, 1), np.int32), shapes.block_size,
        num_tokens=num_tokens, num_reqs=num_rows, max_blocks=shapes.max_blocks,
    )  # fmt: skip
    meta = meta.replace(max_query_len=1 if decode else num_tokens)
    return Batch(
        token_ids=np.zeros(num_tokens, np.int32),
        metas=(meta,) * num_groups,
        rows=sampling_rows([], [], [], [], [], num_rows),
        steps=np.int32(1),
        until_any=np.bool_(False),
        block_size=shapes.block_size,
    )


def stop_ids_of(seq: Sequence, eos: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end this sequence."""
    return (*(() if seq.params.ignore_eos else eos), *seq.params.stop_token_ids)


def _metas(plan, chosen, shapes: StepShapes, num_tokens: int, num_rows: int):
    query_lens = [row.num_new for row in plan.rows]
    seq_lens = [row.start + row.num_new for row in plan.rows]
    decode = plan.is_decode and not shapes.deterministic
    metas = []
    for g in range(len(chosen[0].tables)):
        table = np.full((len(chosen), shapes.max_blocks), NULL_BLOCK_ID, np.int32)
        for line, seq in zip(table, chosen, strict=True):
            line[: len(seq.tables[g])] = seq.tables[g]
        meta = CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, shapes.block_size,
            num_tokens=num_tokens, num_reqs=num_rows, max_blocks=shapes.max_blocks,
        )  # fmt: skip
        metas.append(meta.replace(max_query_len=1 if decode else num_tokens))  # one trace a bucket
    return tuple(metas)


def _rows(plan, chosen, shapes: StepShapes, eos, num_rows: int) -> SamplingRows:
    limit = shapes.limits.max_model_len
    return sampling_rows(
        [seq.params for seq in chosen],
        [seq.seed for seq in chosen],
        [seq.num_output for seq in chosen],
        [remaining_tokens(seq, limit) if row.samples else 0 for seq, row in zip(chosen, plan.rows, strict=True)],
        [stop_ids_of(seq, eos) for seq in chosen],
        num_rows,
    )
