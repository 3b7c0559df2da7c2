"""The arrays of a dispatch, made from a plan: numpy arrays."""

import dataclasses
import functools
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Many

import jax
import numpy as np
from jax.sharding import Sharding

from jattn.engine.dispatch import Batch
from jattn.engine.packing import Packed, pack_ranks
from jattn.engine.request import Sequence
from jattn.engine.rules import is_penalised, penalties, rules_of, rules_of_batch, sampling_rows
from jattn.engine.scheduler import Row, StepPlan
from jattn.engine.shapes import StepShape, StepShapes
from jattn.metadata import CommonAttentionMetadata
from jattn.parallel import put_local
from jattn.types import NULL_BLOCK_ID

HOST_KNOWS = -1
"""In Batch.source: the host knows the row's tokens, so it continues no row of the dispatch before it."""
_UNKNOWN = array("i", [0])
"""In place of a token that only the device knows."""


def device_rows_of(plan: StepPlan, shapes: StepShapes) -> tuple[Row, ...]:
    """The rows of a rank's batch on the device: those of the plan; if shapes.deterministic, one row for each token.

    Attention may add in another order for a token in a long row than for a single token. With a row of its own, a token
    of a prompt gets the same bits as a generated one.
    """
    if not shapes.deterministic:
        return plan.rows
    return tuple(
        Row(row.id, row.start + i, 1, row.max_samples if i == row.num_new - 1 else 0, row.continues)
        for row in plan.rows
        for i in range(row.num_new)
    )


def batch_of(
    plan: StepPlan, device_rows: tuple[Row, ...], seqs: Many[Sequence], sources: Mapping[str, int],
    shapes: StepShapes, shape: StepShape, eos: tuple[int, ...], prefix_len: int = 0,
) -> Batch:  # fmt: skip
    """The input of a dispatch: the plan's tokens, metadata of each cache group, and each row's sampling rules.

    The plan is that of one data rank. seqs: of the rows. sources: sequence id -> its row in the dispatch before this
    one, for rows that continue it. shape: of the dispatch, see StepShapes.of. prefix_len: first tokens that all rows
    share, if shape.shares_prefix.
    """
    num_tokens, num_rows = shape.num_tokens, shape.num_rows
    count = len(device_rows)
    ids, starts, counts, max_samples, continues = zip(*device_rows, strict=True)
    tokens = array("i")
    for seq, first, num_new, is_unknown in zip(seqs, starts, counts, continues, strict=True):
        tokens += _UNKNOWN if is_unknown else seq.words(first, first + num_new)
        if not seq.rules:
            seq.rules = rules_of(seq.params, seq.seed, stop_ids_of(seq, eos), len(seq.prompt))
    token_ids, source = np.zeros(num_tokens, np.int32), np.full(num_rows, HOST_KNOWS, np.int32)
    token_ids[: len(tokens)] = np.frombuffer(tokens, np.int32)
    source[:count] = [sources[id] if on_device else HOST_KNOWS for id, on_device in zip(ids, continues, strict=True)]
    start, num_new, samples = (np.array(column, np.int32) for column in (starts, counts, max_samples))
    rules = rules_of_batch([seq.rules for seq in seqs], num_rows)
    penalised = is_penalised(rules)[:count]
    max_lens = np.array([seq.max_len for seq in seqs], np.int32)
    seq_lens = start + num_new
    metas = [
        meta_of(num_new, seq_lens, max_lens, table, shapes, shape, _shared_in(g, shape, shapes, prefix_len))
        for g, table in enumerate(tables_of(seqs, shapes))
    ]
    position, remaining = np.zeros((2, num_rows), np.int32)
    position[:count] = np.maximum(seq_lens - rules["prompt_len"][:count], 0)
    remaining[:count] = np.where(samples > 0, max_lens - seq_lens, 0)
    return Batch(
        token_ids=token_ids,
        source=source,
        metas=tuple(metas),
        rows=sampling_rows(rules, position, remaining),
        penalties=penalties(rules, _histories(seqs, penalised & (samples > 0), num_rows, shapes.limits.max_model_len)),
        needs_history=np.bool_(penalised.any()),
        needs_logprobs=np.bool_(any([seq.params.logprobs is not None for seq in seqs])),
        steps=np.int32(plan.burst),
        block_size=shapes.block_size,
    )


def packed_batch(batches: Many[Batch], shapes: StepShapes) -> Packed:
    """The batches of all data ranks as one argument of `dispatch`. Their histories are one separate array."""
    histories, num_rows = [batch.penalties.history for batch in batches], len(batches[0].source)
    width = shapes.limits.max_model_len
    if any(map(len, histories)):
        filled = [x if len(x) else np.full((num_rows, width), -1, np.int32) for x in histories]
        history = put_local(filled[0] if len(filled) == 1 else np.concatenate(filled), shapes.place)
    else:
        history = _no_history(len(batches) * num_rows, width, shapes.place)
    of_all = lambda batch: dataclasses.replace(batch, penalties=dataclasses.replace(batch.penalties, history=history))
    return pack_ranks([of_all(batch) for batch in batches])


def _histories(seqs: Many[Sequence], wanted: np.ndarray, num_rows: int, width: int) -> np.ndarray:
    """i32[num_rows width]: the known tokens of each sequence that is `wanted`; -1: unused. No row if none is wanted.

    wanted: bool[len(seqs)].
    """
    if not wanted.any():
        return np.zeros((0, width), np.int32)
    history = np.full((num_rows, width), -1, np.int32)
    for row in np.flatnonzero(wanted).tolist():
        known = seqs[row].history()
        history[row, : len(known)] = known
    return history


@functools.cache
def _no_history(num_rows: int, width: int, place: Sharding | None) -> jax.Array:
    """An unused history, made once: most batches have no penalties, and it is as wide as the longest sequence."""
    return put_local(np.full((num_rows, width), -1, np.int32), place)


def tables_of(seqs: Many[Sequence], shapes: StepShapes) -> list[np.ndarray]:
    """The block table of each cache group, i32[len(seqs) B]."""
    tables, columns = [], np.arange(shapes.max_blocks)
    for each in zip(*[seq.tables for seq in seqs], strict=True):  # the blocks of every sequence in one group
        table = np.full((len(seqs), shapes.max_blocks), NULL_BLOCK_ID, np.int32)
        used = columns < np.array([len(blocks) for blocks in each])[:, None]
        table[used] = np.frombuffer(b"".join(each), np.int32)
        tables.append(table)
    return tables


def empty_batch(shape: StepShape, num_groups: int, shapes: StepShapes) -> Batch:
    """A batch of padding only, with the shape of a bucket: to compile a dispatch with, or for a data rank without rows.
    It writes to no slot."""
    num_tokens, num_rows = shape.num_tokens, shape.num_rows
    rules, none = rules_of_batch([], num_rows), np.zeros(num_rows, np.int32)
    return Batch(
        token_ids=np.zeros(num_tokens, np.int32),
        source=np.full(num_rows, HOST_KNOWS, np.int32),
        metas=tuple(
            meta_of([], [], [], np.zeros((0, 1), np.int32), shapes, shape, _shared_in(g, shape, shapes, 0))
            for g in range(num_groups)
        ),
        rows=sampling_rows(rules, none, none),
        penalties=penalties(rules, np.zeros((0, shapes.limits.max_model_len), np.int32)),
        needs_history=np.bool_(False),
        needs_logprobs=np.bool_(False),
        steps=np.int32(1),
        block_size=shapes.block_size,
    )


def stop_ids_of(seq: Sequence, eos: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end this sequence."""
    return (*(() if seq.params.ignore_eos else eos), *seq.params.stop_token_ids)


def meta_of(
    query_lens, seq_lens, final_lens, table, shapes: StepShapes, shape: StepShape, prefix_len: int | None = None
) -> CommonAttentionMetadata:
    """The metadata of one cache group, padded to a shape. prefix_len: first keys that all rows share."""
    meta = CommonAttentionMetadata.from_lengths(
        query_lens, seq_lens, table, shapes.block_size,
        num_tokens=shape.num_tokens, num_reqs=shape.num_rows, max_blocks=shapes.max_blocks,
        final_seq_lens=final_lens if shapes.with_final_lens else None,
    )  # fmt: skip
    return meta.replace(
        max_query_len=1 if shape.is_decode else shape.num_tokens,  # one program for each shape
        token_is_row=shape.is_decode,
        common_prefix_len=None if prefix_len is None else np.int32(prefix_len),
    )


def _shared_in(group: int, shape: StepShape, shapes: StepShapes, prefix_len: int) -> int | None:
    """The prefix_len of a cache group: None in a flat program, and in groups whose rows may share other blocks."""
    return prefix_len if shape.shares_prefix and group == shapes.sharing_group else None
