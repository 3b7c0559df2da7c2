"""The work list of a batch for one layer's mask. It is computed once per step, on the host or inside jit."""

from jattn.errors import UnsupportedError
from jattn.errors.arguments import boolean, integer, kind, optional, takes
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import BATCH, CommonAttentionMetadata
from jattn.metadata.host import array_module
from jattn.spec import AttentionSpec
from jattn.types import AttentionType
from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.algebra.schedule import Schedule, SchedulePlan, make_schedule

_SIZES = dict(
    num_workers=integer(1), kv_tile=integer(1), max_query_rows=integer(1), max_split_queries=integer(0),
    fixed_split_tokens=optional(integer(1)),
)  # fmt: skip
_SPEC = kind(AttentionSpec)


@takes(meta=BATCH, spec=_SPEC, enable_kv_split=boolean, **_SIZES)
def get_scheduler_metadata(
    meta: CommonAttentionMetadata,
    spec: AttentionSpec,
    *,
    num_workers: int = 1,
    kv_tile: int = 16,
    max_query_rows: int = 32,
    enable_kv_split: bool = True,
    max_split_queries: int = 1,
    fixed_split_tokens: int | None = None,
) -> Schedule:
    """The work items (a tile of queries and a range of keys each) and reductions of a batch under the mask of `spec`.

    A tile has max_query_rows rows of one kv head: max_query_rows // G tokens, at least one. With enable_kv_split, the
    key ranges of tiles with at most max_split_queries tokens are divided among num_workers workers (threads, cores), in
    multiples of kv_tile keys. fixed_split_tokens divides them at this length instead, which does not depend on the rest
    of the batch. The attention result does not depend on these sizes, up to rounding.
    """
    if spec.use_mm_prefix or spec.use_rswa:
        raise UnsupportedError(
            "a work list has one range of keys for each tile: no use_mm_prefix, no use_rswa; use backend='sdpa'"
        )
    meta = meta if meta.max_num_reqs else meta.padded(meta.num_tokens, 1)
    plan = schedule_plan(
        spec,
        num_workers=num_workers,
        kv_tile=kv_tile,
        max_query_rows=max_query_rows,
        max_split_queries=max_split_queries if enable_kv_split else 0,
        fixed_split_tokens=fixed_split_tokens,
    )
    queries, keys = queries_of(meta, spec.attn_type), keys_of(meta, spec.attn_type)
    causal = meta.causal_per_request if spec.attn_type is AttentionType.DECODER else None
    xp = array_module(queries.query_start_loc, keys.seq_lens, causal)
    return make_schedule(
        xp.asarray(queries.query_start_loc, xp.int32),
        xp.asarray(keys.seq_lens, xp.int32),
        spec.mask_rule(meta.is_causal),
        plan,
        num_tokens=queries.num_tokens,
        max_seq_len=keys.max_seq_len,
        causal=None if causal is None else xp.asarray(causal),
        xp=xp,
    )


@takes(spec=_SPEC, **_SIZES)
def schedule_plan(
    spec: AttentionSpec,
    *,
    num_workers: int,
    kv_tile: int,
    max_query_rows: int,
    max_split_queries: int,
    fixed_split_tokens: int | None = None,
) -> SchedulePlan:
    """The static sizes of a work list. Each kv head has work of its own, so keys are divided for
    num_workers / num_kv_heads workers.
    """
    if fixed_split_tokens is not None and fixed_split_tokens % kv_tile:
        raise ValueError(f"{fixed_split_tokens=} must be a positive multiple of {kv_tile=}")
    return SchedulePlan(
        q_tile=max(max_query_rows // spec.group_size, 1),
        kv_tile=kv_tile,
        num_workers=cdiv(num_workers, spec.num_kv_heads),
        max_split_queries=max_split_queries,
        min_split=cdiv(4 * max_query_rows, kv_tile),
        fixed_split=None if fixed_split_tokens is None else fixed_split_tokens // kv_tile,
    )
