"""The arrays of a dispatch, made from a plan: numpy arrays that are read-only once they are made."""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import TypeVar

import jax
import numpy as np

from jattn.engine.dispatch import Batch
from jattn.engine.request import Sequence, final_length
from jattn.engine.sampling import penalties_of, sampling_rows
from jattn.engine.scheduler import Row, StepPlan, remaining_tokens
from jattn.engine.shapes import StepShapes
from jattn.metadata import CommonAttentionMetadata
from jattn.types import NULL_BLOCK_ID

T = TypeVar("T")


def device_rows_of(plan: StepPlan, shapes: StepShapes) -> tuple[Row, ...]:
    """The rows of the batch on the device: the plan's, or, if shapes.deterministic, a row for each token.

    Attention may add in another order for a token in a long row than for a single token. With a row of its own, a token
    of a prompt gets the same bits as a generated one.
    """
    if not shapes.deterministic:
        return plan.rows
    return tuple(
        Row(row.id, row.start + i, 1, row.samples and i == row.num_new - 1)
        for row in plan.rows
        for i in range(row.num_new)
    )


def batch_of(
    plan: StepPlan, device_rows: tuple[Row, ...], seqs: Mapping[str, Sequence], shapes: StepShapes, eos: tuple[int, ...]
) -> Batch:
    """The input of a dispatch: the plan's tokens, metadata of each cache group, and each row's sampling rules."""
    num_tokens, num_rows, decode = shapes.of(plan)
    chosen = [seqs[row.id] for row in device_rows]
    token_ids = np.zeros(num_tokens, np.int32)
    new = [seq.tokens[row.start : row.start + row.num_new] for seq, row in zip(chosen, device_rows, strict=True)]
    token_ids[: plan.num_tokens] = np.concatenate(new)
    query_lens = [row.num_new for row in device_rows]
    seq_lens = [row.start + row.num_new for row in device_rows]
    shape = num_tokens, num_rows, decode
    tables = tables_of(chosen, len(chosen), shapes)
    final_lens = [final_length(seq.prompt, seq.params, shapes.limits.max_model_len) for seq in chosen]
    metas = [_meta(query_lens, seq_lens, final_lens, table, shapes, shape) for table in tables]
    limit, params = shapes.limits.max_model_len, [seq.params for seq in chosen]
    rows = sampling_rows(
        params,
        [seq.seed for seq in chosen],
        [seq.num_output for seq in chosen],
        [remaining_tokens(seq, limit) if row.samples else 0 for seq, row in zip(chosen, device_rows, strict=True)],
        [stop_ids_of(seq, eos) for seq in chosen],
        num_rows,
    )
    histories = [seq.tokens if row.samples else () for seq, row in zip(chosen, device_rows, strict=True)]
    batch = Batch(
        token_ids=token_ids,
        metas=tuple(metas),
        rows=rows,
        penalties=penalties_of(params, histories, [len(seq.prompt) for seq in chosen], num_rows, limit),
        needs_history_or_logprobs=np.bool_(any(p.needs_history_or_logprobs for p in params)),
        steps=np.int32(plan.burst),
        until_any=np.bool_(plan.until_any),
        continues=np.bool_(False),
        block_size=shapes.block_size,
    )
    return read_only(batch)


def read_only(tree: T) -> T:
    """The same tree, with its numpy arrays made read-only.

    JAX on a CPU reads them in place while it computes: a write before the dispatch has finished would change its input.
    """
    for leaf in jax.tree.leaves(tree):
        while isinstance(leaf, np.ndarray):  # a view, then the array that it views
            leaf.setflags(write=False)
            leaf = leaf.base
    return tree


def tables_of(seqs: Many[Sequence], num_rows: int, shapes: StepShapes) -> list[np.ndarray]:
    """The block table of each cache group, i32[num_rows B]."""
    tables = []
    for g in range(len(seqs[0].tables)):
        tables.append(np.full((num_rows, shapes.max_blocks), NULL_BLOCK_ID, np.int32))
        for line, seq in zip(tables[g], seqs, strict=False):
            line[: len(seq.tables[g])] = seq.tables[g]
    return read_only(tables)


def empty_batch(shape: tuple[int, int, bool], num_groups: int, shapes: StepShapes) -> Batch:
    """A batch of padding only, with the shape of a bucket, to compile a dispatch with. It writes to no slot."""
    num_tokens, num_rows, _ = shape
    return Batch(
        token_ids=np.zeros(num_tokens, np.int32),
        metas=(_meta([], [], [], np.zeros((0, 1), np.int32), shapes, shape),) * num_groups,
        rows=sampling_rows([], [], [], [], [], num_rows),
        penalties=penalties_of([], [], [], num_rows, shapes.limits.max_model_len),
        needs_history_or_logprobs=np.bool_(False),
        steps=np.int32(1),
        until_any=np.bool_(False),
        continues=np.bool_(False),
        block_size=shapes.block_size,
    )


def stop_ids_of(seq: Sequence, eos: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end this sequence."""
    return (*(() if seq.params.ignore_eos else eos), *seq.params.stop_token_ids)


def _meta(
    query_lens, seq_lens, final_lens, table, shapes: StepShapes, shape: tuple[int, int, bool]
) -> CommonAttentionMetadata:
    num_tokens, num_rows, decode = shape
    meta = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table, shapes.block_size,
        num_tokens=num_tokens, num_reqs=num_rows, max_blocks=shapes.max_blocks,
        final_seq_lens=final_lens if shapes.with_final_lens else None,
    )  # fmt: skip
    return meta.replace(max_query_len=1 if decode else num_tokens)  # one program for each bucket
