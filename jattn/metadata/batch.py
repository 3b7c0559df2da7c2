"""CommonAttentionMetadata: the batch that all layers of a step share, as an immutable pytree of int32 arrays.

Padding requests have query_len 0 and seq_len 0, padding tokens have slot -1, and unused columns of the block table may
hold any value: no result depends on them. Arrays made on the host are numpy arrays, which jit takes fastest.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import INT32, as_array, booleans, integer, integers, kind, optional, takes
from jattn.metadata.batch_checks import check_block_size, check_grows
from jattn.metadata.buckets import power_of_two, query_len_bound
from jattn.metadata.host import array_module, extended, is_traced, minimum
from jattn.metadata.lengths import (
    at_least,
    causal_of,
    check_new_tokens,
    final_lengths_of,
    lengths_of,
    mm_prefix_ranges_of,
    padded_to,
    slots_of_tokens,
    table_of,
)
from jattn.types import NULL_BLOCK_ID, PAD_SLOT_ID, AnyArray, pytree, static
from pallas_kernels.algebra.paging import slots_of

_SIZE = optional(integer(0))


@pytree
class CommonAttentionMetadata:
    """Lengths, blocks and slots of a ragged batch. Make it with from_lengths on the host, or from_traced inside jit."""

    query_start_loc: AnyArray  # i32[R+1] the new tokens of request r are packed tokens start[r] .. start[r+1]-1
    seq_lens: AnyArray  # i32[R] tokens of each request, computed and new
    block_table: AnyArray | None  # i32[R B] the blocks of each request, in order; None without a cache
    slot_mapping: AnyArray  # i32[T] the slot that each new token is written to; -1: none
    num_reqs: AnyArray  # i32[] requests that are not padding
    num_actual_tokens: AnyArray  # i32[] new tokens that are not padding
    causal_per_request: AnyArray | None = None  # bool[R] overrides is_causal; None: is_causal holds for all
    logits_indices: AnyArray | None = None  # i32[L] packed tokens whose logits are needed
    encoder_seq_lens: AnyArray | None = None  # i32[R] encoder tokens of each request
    dcp_local_seq_lens: AnyArray | None = None  # i32[R] keys of each request on this rank (context parallelism)
    mm_prefix_ranges: AnyArray | None = None  # i32[R n 2] inclusive (first, last) of each span that sees both ways
    rswa_prefix_lens: AnyArray | None = None  # i32[R] first keys of each request that a sliding window does not hide
    final_seq_lens: AnyArray | None = None  # i32[R] the most tokens that each request will have: see final_lens
    common_prefix_len: AnyArray | None = None  # i32[] first keys that all requests share: a hint; None: not known
    cross: "CommonAttentionMetadata | None" = None  # the encoder's tokens as a batch: lengths, block table and slots
    max_query_len: int = static()  # upper bound of the new tokens of a request; rounded up, so that few values occur
    max_seq_len: int = static()  # upper bound of seq_lens; rounded up
    is_causal: bool = static(default=True)  # no query sees a key at a later position
    is_all_new: bool = static(default=False)  # packed keys, and query_lens == seq_lens. False: unknown
    token_is_row: bool = static(default=False)  # T == R, and new token t is request t's only one. False: unknown
    block_size: int | None = static(default=None)  # tokens of a block of block_table; None: unknown and not checked

    @classmethod
    @takes(block_size=integer(1), num_tokens=_SIZE, num_reqs=_SIZE, max_blocks=_SIZE, num_encoder_tokens=_SIZE)
    def from_lengths(
        cls,
        query_lens,
        seq_lens,
        block_table,
        block_size: int,
        *,
        num_tokens: int | None = None,
        num_reqs: int | None = None,
        max_blocks: int | None = None,
        causal=True,
        encoder_seq_lens=None,
        cross_block_table=None,
        num_encoder_tokens: int | None = None,
        mm_prefix_ranges=None,
        rswa_prefix_lens=None,
        final_seq_lens=None,
    ) -> "CommonAttentionMetadata":
        """A ragged batch from lengths on the host.

        num_tokens, num_reqs, max_blocks (columns of the block table): static sizes to pad to; None: no padding.
        block_table: None without a cache. causal: one bool, or bool[R]. encoder_seq_lens: adds `.cross`, the encoder's
        tokens, with the blocks cross_block_table, padded to num_encoder_tokens. mm_prefix_ranges: pairs (first, last)
        for each request, or the array of compute_mm_prefix_range_tensor. rswa_prefix_lens: a number for each request.
        final_seq_lens: the most tokens that each request will have, needed if rotary angles depend on it (longrope,
        dynamic NTK).
        """
        q = lengths_of("query_lens", query_lens)
        s = lengths_of("seq_lens", seq_lens, like=q)
        num_live, total = len(q), int(q.sum(dtype=np.int64))
        if total > INT32:
            raise ValueError(f"query_lens add up to {total} tokens, which is outside int32; split the batch")
        padded_reqs = at_least("num_reqs", num_reqs, num_live)
        padded_tokens = at_least("num_tokens", num_tokens, total)
        per_request_causal = causal_of(causal, num_live)
        is_causal = bool(causal) if per_request_causal is None else True
        if block_table is not None and is_causal:
            check_new_tokens(q, s, per_request_causal)
        start = np.zeros(padded_reqs + 1, np.int32)
        np.cumsum(q, out=start[1 : num_live + 1])
        start[num_live + 1 :] = total
        table = table_of(block_table, s, block_size, padded_reqs, max_blocks)
        slots = np.full(padded_tokens, PAD_SLOT_ID, np.int32)
        if table is not None and total:
            slots[:total] = slots_of_tokens(q, s, start[:num_live], table, block_size)
        if table is not None:
            max_seq_len = table.shape[1] * block_size
        else:
            max_seq_len = power_of_two(int(s.max(initial=1)))
        encoder = None
        if encoder_seq_lens is not None:
            e = lengths_of("encoder_seq_lens", encoder_seq_lens, like=q)
            encoder = cls._encoder_batch(e, cross_block_table, block_size, num_encoder_tokens, padded_reqs)
        elif cross_block_table is not None or num_encoder_tokens is not None:
            raise ValueError("cross_block_table and num_encoder_tokens need encoder_seq_lens")
        if mm_prefix_ranges is not None:
            mm_prefix_ranges = mm_prefix_ranges_of(mm_prefix_ranges, num_live, padded_reqs)
        if rswa_prefix_lens is not None:
            rswa_prefix_lens = lengths_of("rswa_prefix_lens", rswa_prefix_lens, like=q)
        if final_seq_lens is not None:
            final_seq_lens = final_lengths_of(final_seq_lens, s)
        to_padded_reqs = lambda x: None if x is None else padded_to(x, padded_reqs)
        return cls(
            query_start_loc=start,
            seq_lens=padded_to(s, padded_reqs),
            block_table=table,
            slot_mapping=slots,
            num_reqs=np.asarray(num_live, np.int32),
            num_actual_tokens=np.asarray(total, np.int32),
            causal_per_request=to_padded_reqs(per_request_causal),
            encoder_seq_lens=None if encoder is None else encoder.seq_lens,
            cross=encoder,
            mm_prefix_ranges=mm_prefix_ranges,
            rswa_prefix_lens=to_padded_reqs(rswa_prefix_lens),
            final_seq_lens=to_padded_reqs(final_seq_lens),
            max_query_len=query_len_bound(int(q.max(initial=0)), padded_tokens),
            max_seq_len=max_seq_len,
            is_causal=is_causal,
            is_all_new=table is None and np.array_equal(q, s),
            block_size=None if table is None else block_size,
        )

    @classmethod
    @takes(
        query_start_loc=integers(1),
        seq_lens=integers(1),
        block_table=optional(integers(2)),
        block_size=integer(1),
        num_tokens=integer(0),
        max_query_len=optional(integer(0)),
        max_seq_len=optional(integer(0)),
        final_seq_lens=optional(integers(1)),
    )
    def from_traced(
        cls,
        query_start_loc,
        seq_lens,
        block_table,
        block_size: int,
        *,
        num_tokens: int,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
        causal=True,
        final_seq_lens=None,
    ) -> "CommonAttentionMetadata":
        """A ragged batch from arrays i32[R+1], i32[R], i32[R B], which may be traced. Their values are not checked.

        num_tokens: T, padding included. max_query_len, max_seq_len: static upper bounds; None: the largest possible.
        num_reqs becomes the number of requests up to the last one that has a token.
        """
        start = jnp.asarray(query_start_loc, jnp.int32)
        seq_lens = jnp.asarray(seq_lens, jnp.int32)
        rows = seq_lens.shape[0]
        if start.shape != (rows + 1,):
            raise ValueError(f"query_start_loc.shape={start.shape} must be (R + 1,) with seq_lens.shape=({rows},)")
        if block_table is not None and block_table.shape[0] != rows:
            raise ValueError(f"block_table.shape={block_table.shape} must have one row for each request, {rows}")
        is_one_bool = isinstance(causal, (bool, np.bool_))
        per_request_causal = None if is_one_bool else jnp.asarray(as_array("causal", causal, "bools", (1,)))
        if per_request_causal is not None and per_request_causal.shape != (rows,):
            shape = per_request_causal.shape
            raise ValueError(f"causal.shape={shape} must be ({rows},): one bool for each request, or one bool")
        if final_seq_lens is not None and final_seq_lens.shape != (rows,):
            raise ValueError(f"final_seq_lens.shape={final_seq_lens.shape} must be ({rows},): one for each request")
        if max_seq_len is None:
            max_seq_len = num_tokens if block_table is None else block_table.shape[1] * block_size
        used = (start[1:] > start[:-1]) | (seq_lens > 0)
        last = jnp.max(jnp.where(used, jnp.arange(1, rows + 1), 0), initial=0)
        meta = cls(
            query_start_loc=start,
            seq_lens=seq_lens,
            block_table=None if block_table is None else jnp.asarray(block_table, jnp.int32),
            slot_mapping=jnp.full(num_tokens, PAD_SLOT_ID, jnp.int32),
            num_reqs=last.astype(jnp.int32),
            num_actual_tokens=start[-1],
            causal_per_request=per_request_causal,
            final_seq_lens=None if final_seq_lens is None else jnp.asarray(final_seq_lens, jnp.int32),
            max_query_len=num_tokens if max_query_len is None else max_query_len,
            max_seq_len=max_seq_len,
            is_causal=bool(causal) if is_one_bool else True,
            block_size=None if block_table is None else block_size,
        )
        if meta.block_table is None or not rows:
            return meta
        slots = slots_of(jnp.asarray(meta.block_table), meta.token_to_req(), meta.positions(), block_size)
        return meta.replace(slot_mapping=jnp.where(meta.token_is_live(), slots, PAD_SLOT_ID).astype(jnp.int32))

    @classmethod
    def _encoder_batch(
        cls, lens: np.ndarray, table, block_size: int, num_tokens: int | None, rows: int
    ) -> "CommonAttentionMetadata":
        try:
            return cls.from_lengths(lens, lens, table, block_size, num_tokens=num_tokens, num_reqs=rows, causal=False)
        except ValueError as error:
            given = "encoder_seq_lens" if table is None else "encoder_seq_lens with cross_block_table"
            raise ValueError(f"{given} (num_tokens: num_encoder_tokens): {error}") from None

    @property
    def causal(self) -> "bool | AnyArray":
        """One static bool, or a traced bool[R]."""
        return self.is_causal if self.causal_per_request is None else self.causal_per_request

    @property
    def num_tokens(self) -> int:
        """Padded number of packed tokens, T."""
        return self.slot_mapping.shape[0]

    @property
    def max_num_reqs(self) -> int:
        """Padded number of requests, R."""
        return self.seq_lens.shape[0]

    def query_lens(self) -> jax.Array:
        """i32[R] new tokens of each request."""
        start = jnp.asarray(self.query_start_loc)
        return start[1:] - start[:-1]

    def num_computed_tokens(self) -> jax.Array:
        """i32[R] tokens of each request that are in the cache already: seq_lens - query_lens."""
        return jnp.asarray(self.seq_lens) - self.query_lens()

    def final_lens(self) -> AnyArray:
        """i32[R] the lengths that rotary angles depend on (longrope, dynamic NTK).

        final_seq_lens: the prompt and the most tokens that may be generated, the same in each step of a request. If it
        is None, seq_lens: correct only if all tokens of each request are computed in one call.
        """
        return self.seq_lens if self.final_seq_lens is None else self.final_seq_lens

    def token_to_req(self) -> jax.Array:
        """i32[T] the request of each token; that of a padding token is the last one."""
        tokens = jnp.arange(self.num_tokens, dtype=jnp.int32)
        if self.token_is_row:
            return jnp.where(self.token_is_live(), tokens, self.max_num_reqs - 1)
        req = jnp.searchsorted(jnp.asarray(self.query_start_loc)[1:], tokens, side="right", method="scan_unrolled")
        return jnp.clip(req, 0, max(self.max_num_reqs - 1, 0)).astype(jnp.int32)

    def token_is_live(self) -> jax.Array:
        """bool[T] False for padding tokens."""
        return jnp.arange(self.num_tokens) < jnp.asarray(self.query_start_loc)[-1]

    def positions(self) -> jax.Array:
        """i32[T] the position of each token in its request: the new tokens are the last ones. 0 for padding tokens."""
        if not self.max_num_reqs:
            return jnp.zeros(self.num_tokens, jnp.int32)
        if self.token_is_row:
            return jnp.where(self.token_is_live(), jnp.asarray(self.seq_lens) - 1, 0)
        req = self.token_to_req()
        start = jnp.asarray(self.query_start_loc)[:-1]
        first = self.num_computed_tokens() - start
        tokens = jnp.arange(self.num_tokens, dtype=jnp.int32)
        return jnp.where(self.token_is_live(), tokens + first.at[req].get(mode="fill", fill_value=0), 0)

    def logits_at_last_token(self) -> AnyArray:
        """i32[R] index of each request's last new token. A request without one has an index of no meaning."""
        if self.token_is_row:
            return np.arange(self.max_num_reqs, dtype=np.int32)  # a constant: models.forward sees that it takes all
        return jnp.maximum(jnp.asarray(self.query_start_loc)[1:] - 1, 0)

    def replace(self, **changes) -> "CommonAttentionMetadata":
        """A copy with other values of fields. `causal`, a bool or an array, sets is_causal and causal_per_request.

        With another block_table, common_prefix_len is dropped unless it is given too.
        """
        if "causal" in changes:
            causal = changes.pop("causal")
            is_one_bool = isinstance(causal, (bool, np.bool_))
            changes["is_causal"] = bool(causal) if is_one_bool else True
            changes["causal_per_request"] = None if is_one_bool else _CAUSAL("causal", causal)
        if changes.keys() & {"query_start_loc", "seq_lens", "block_table"}:
            changes = dict(is_all_new=False) | changes
        has_other_size = np.shape(changes.get("slot_mapping", self.slot_mapping)) != np.shape(self.slot_mapping)
        if "query_start_loc" in changes or has_other_size:
            changes = dict(token_is_row=False) | changes
        if "block_table" in changes:
            changes = dict(common_prefix_len=None) | changes
        if unknown := changes.keys() - self.__dataclass_fields__.keys():
            raise ValueError(f"{', '.join(sorted(unknown))}: not a field of a batch; use {', '.join(FIELDS)}, causal")
        return dataclasses.replace(self, **changes)

    @takes(num_tokens=integer(0), num_reqs=integer(0))
    def padded(self, num_tokens: int, num_reqs: int) -> "CommonAttentionMetadata":
        """The same batch, padded to larger static sizes."""
        if num_tokens < self.num_tokens or num_reqs < self.max_num_reqs:
            raise ValueError(
                f"cannot pad T={self.num_tokens}, R={self.max_num_reqs} to {num_tokens=}, {num_reqs=}; use unpadded"
            )
        more = num_reqs - self.max_num_reqs
        last = self.query_start_loc[-1]
        return self.replace(
            query_start_loc=extended(self.query_start_loc, more, last),
            is_all_new=self.is_all_new,
            slot_mapping=extended(self.slot_mapping, num_tokens - self.num_tokens, PAD_SLOT_ID),
            cross=None if self.cross is None else self.cross.padded(self.cross.num_tokens, num_reqs),
            **{name: extended(getattr(self, name), more, fill) for name, fill in PER_REQUEST.items()},
        )

    @takes(num_tokens=integer(0), num_reqs=integer(0))
    def unpadded(self, num_tokens: int, num_reqs: int) -> "CommonAttentionMetadata":
        """The first `num_reqs` requests and `num_tokens` tokens, as a batch of those static sizes.

        A request of which tokens are cut off has fewer new tokens, at the same positions. Tokens of other requests are
        padding.
        """
        if num_tokens > self.num_tokens or num_reqs > self.max_num_reqs:
            raise ValueError(
                f"cannot cut T={self.num_tokens}, R={self.max_num_reqs} up to {num_tokens=}, {num_reqs=}; use padded"
            )
        cut = {name: getattr(self, name) for name in PER_REQUEST}
        start, slots = self.query_start_loc[: num_reqs + 1], self.slot_mapping[:num_tokens]
        kept = minimum(start, num_tokens)
        lost = (start - kept)[1:] - (start - kept)[:-1]
        sees_others = self.dcp_local_seq_lens is not None or self.mm_prefix_ranges is not None
        if not is_traced(lost, self.causal) and lost.any() and (sees_others or not np.all(self.causal)):
            raise ValueError(
                f"{num_tokens=} cuts a request whose metadata depends on all of its tokens: it is not causal, or the "
                "batch has mm_prefix_ranges or dcp_local_seq_lens; cut between requests"
            )
        cut["seq_lens"] = cut["seq_lens"][:num_reqs] - lost
        xp = array_module(slots, kept)
        return self.replace(
            query_start_loc=kept,
            is_all_new=self.is_all_new,
            slot_mapping=xp.where(xp.arange(num_tokens) < kept[-1], slots, np.int32(PAD_SLOT_ID)),
            num_reqs=minimum(self.num_reqs, num_reqs),
            num_actual_tokens=kept[-1],
            cross=None if self.cross is None else self.cross.unpadded(self.cross.num_tokens, num_reqs),
            **{name: None if x is None else x[:num_reqs] for name, x in cut.items()},
        )

    @takes(block_size=integer(1))
    def advanced(self, block_size: int) -> "CommonAttentionMetadata":
        """The next decode step of a batch in which each request has one new token, e.g. in a `lax.while_loop`.

        Each seq_len grows by one. The slots are computed from the block table, which must contain the new blocks
        already; a token past the end of the table is not written.
        """
        if self.max_query_len != 1:
            raise ValueError(
                f"max_query_len={self.max_query_len} must be 1; only a decode batch can advance token by token"
            )
        check_block_size(self, block_size)
        check_grows(self)
        if not self.max_num_reqs:
            return self
        seq_lens = self.seq_lens + self.query_lens()
        req = self.token_to_req()
        slots = slots_of(jnp.asarray(self.block_table), req, (seq_lens - 1)[req], block_size)
        slots = jnp.where(self.token_is_live(), slots, PAD_SLOT_ID).astype(jnp.int32)
        return self.replace(seq_lens=seq_lens, slot_mapping=slots)


PER_REQUEST = dict(
    seq_lens=0, block_table=NULL_BLOCK_ID, causal_per_request=True, encoder_seq_lens=0, dcp_local_seq_lens=0,
    mm_prefix_ranges=0, rswa_prefix_lens=0, final_seq_lens=0,
)  # fmt: skip
"""Fields with one row for each request -> the value in rows of padding."""

BATCH = kind(CommonAttentionMetadata, way_out="make one with CommonAttentionMetadata.from_lengths(...)")
"""A rule of jattn.errors.arguments: a batch."""

FIELDS = tuple(field.name for field in dataclasses.fields(CommonAttentionMetadata))
_CAUSAL = booleans(1)
