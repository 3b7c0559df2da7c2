"""The batch that all layers of a step share, as an immutable pytree of int32 arrays.

Padding has no effect: padding requests have query_len 0 and seq_len 0, padding tokens have slot -1, and unused table
columns may hold anything. Arrays made on the host are numpy, which jit takes directly and fastest.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn.errors.arguments import booleans, integer, kind, takes
from jattn.types import NULL_BLOCK_ID, PAD_SLOT_ID, pytree, static
from pallas_kernels.algebra.paging import slots_of


@pytree
class CommonAttentionMetadata:
    """Lengths, pages and slots of a ragged batch; make it with from_lengths (host) or from_traced (in jit)."""

    query_start_loc: jax.Array  # i32[R+1] request r owns packed tokens start[r] .. start[r+1]-1
    seq_lens: jax.Array  # i32[R] computed + new
    block_table: jax.Array | None  # i32[R B]
    slot_mapping: jax.Array  # i32[T] where each new token is written, -1 = nowhere
    num_reqs: jax.Array  # i32[] live requests
    num_actual_tokens: jax.Array  # i32[] live tokens
    causal_per_request: jax.Array | None = None  # bool[R], overrules is_causal
    logits_indices: jax.Array | None = None  # i32[L] tokens whose logits are wanted
    encoder_seq_lens: jax.Array | None = None  # i32[R]
    dcp_local_seq_lens: jax.Array | None = None  # i32[R] keys of each request that this rank holds
    mm_prefix_ranges: jax.Array | None = None  # i32[R n 2] inclusive spans that see both ways: see ranges.py
    rswa_prefix_lens: jax.Array | None = None  # i32[R] first keys that no window hides
    final_seq_lens: jax.Array | None = None  # i32[R] the most tokens that each request will have; see final_lens
    cross: "CommonAttentionMetadata | None" = None  # the encoder's tokens: own lengths, pages, slots
    max_query_len: int = static()  # upper bound, bucketed
    max_seq_len: int = static()  # upper bound, bucketed
    is_causal: bool = static(default=True)
    block_size: int | None = static(default=None)  # tokens per page of block_table; None: unknown, not checked

    @property
    def causal(self) -> "bool | jax.Array":
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
        """i32[R] tokens already in the cache: seq_lens - query_lens."""
        return self.seq_lens - self.query_lens()

    def final_lens(self) -> jax.Array:
        """i32[R] the lengths that rotary angles are computed for (longrope, dynamic NTK).

        `final_seq_lens`: prompt plus the most that may be generated, the same in every call for a request. If it is
        None, seq_lens: right only if each request is whole in one call.
        """
        return self.seq_lens if self.final_seq_lens is None else self.final_seq_lens

    def token_to_req(self) -> jax.Array:
        """i32[T] the request of each token; pad tokens get the last request."""
        tokens = jnp.arange(self.num_tokens, dtype=jnp.int32)
        req = jnp.searchsorted(jnp.asarray(self.query_start_loc)[1:], tokens, side="right")
        return jnp.clip(req, 0, max(self.max_num_reqs - 1, 0)).astype(jnp.int32)

    def token_is_live(self) -> jax.Array:
        """bool[T] False for pad tokens."""
        return jnp.arange(self.num_tokens) < jnp.asarray(self.query_start_loc)[-1]

    def positions(self) -> jax.Array:
        """i32[T] position of each token in its request, bottom-right aligned; 0 for pad tokens."""
        req = self.token_to_req()
        start = jnp.asarray(self.query_start_loc)[:-1]
        first = self.num_computed_tokens() - start
        tokens = jnp.arange(self.num_tokens, dtype=jnp.int32)
        return jnp.where(self.token_is_live(), tokens + first.at[req].get(mode="fill", fill_value=0), 0)

    def logits_at_last_token(self) -> jax.Array:
        """i32[R] index of each request's last new token (0 where there is none: mask those by query_lens)."""
        return jnp.maximum(jnp.asarray(self.query_start_loc)[1:] - 1, 0)

    def replace(self, **changes) -> "CommonAttentionMetadata":
        """A copy with some fields changed; `causal` takes a bool or an array and keeps the two forms apart."""
        if "causal" in changes:
            causal = changes.pop("causal")
            one = isinstance(causal, (bool, np.bool_))
            causal = causal if one else _CAUSAL("causal", causal)
            changes |= dict(is_causal=bool(causal) if one else True, causal_per_request=None if one else causal)
        if unknown := changes.keys() - self.__dataclass_fields__.keys():
            raise ValueError(f"{', '.join(sorted(unknown))}: no field of a batch; use {', '.join(FIELDS)} or causal")
        return dataclasses.replace(self, **changes)

    @takes(num_tokens=integer(0), num_reqs=integer(0))
    def padded(self, num_tokens: int, num_reqs: int) -> "CommonAttentionMetadata":
        """The same batch in larger static sizes."""
        if num_tokens < self.num_tokens or num_reqs < self.max_num_reqs:
            raise ValueError(
                f"cannot pad T={self.num_tokens}, R={self.max_num_reqs} to {num_tokens=}, {num_reqs=}; use unpadded"
            )
        more = num_reqs - self.max_num_reqs
        last = self.query_start_loc[-1]
        return self.replace(
            query_start_loc=_extend(self.query_start_loc, more, last),
            slot_mapping=_extend(self.slot_mapping, num_tokens - self.num_tokens, PAD_SLOT_ID),
            cross=None if self.cross is None else self.cross.padded(self.cross.num_tokens, num_reqs),
            **{name: _extend(getattr(self, name), more, fill) for name, fill in PER_REQUEST.items()},
        )

    @takes(num_tokens=integer(0), num_reqs=integer(0))
    def unpadded(self, num_tokens: int, num_reqs: int) -> "CommonAttentionMetadata":
        """The first `num_reqs` requests and `num_tokens` tokens, in those static sizes."""
        if num_tokens > self.num_tokens or num_reqs > self.max_num_reqs:
            raise ValueError(
                f"cannot cut T={self.num_tokens}, R={self.max_num_reqs} up to {num_tokens=}, {num_reqs=}; use padded"
            )
        cut = {name: getattr(self, name) for name in PER_REQUEST}
        return self.replace(
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            slot_mapping=self.slot_mapping[:num_tokens],
            num_reqs=_minimum(self.num_reqs, num_reqs),
            num_actual_tokens=_minimum(self.num_actual_tokens, num_tokens),
            cross=None if self.cross is None else self.cross.unpadded(self.cross.num_tokens, num_reqs),
            **{name: None if x is None else x[:num_reqs] for name, x in cut.items()},
        )

    @takes(block_size=integer(1))
    def advanced(self, block_size: int) -> "CommonAttentionMetadata":
        """The next decode step of a batch in which every live request has one new token: for `lax.while_loop`.

        seq_lens grow by one; the new slots come from the block table, which must already hold the new pages
        (a request past its table writes nowhere).
        """
        if self.max_query_len != 1:
            raise ValueError(f"{self.max_query_len=} must be 1: only a decode batch can advance token by token")
        check_block_size(self, block_size)
        seq_lens = self.seq_lens + self.query_lens()
        req = self.token_to_req()
        slots = slots_of(jnp.asarray(self.block_table), req, (seq_lens - 1)[req], block_size)
        slots = jnp.where(self.token_is_live(), slots, PAD_SLOT_ID).astype(jnp.int32)
        return self.replace(seq_lens=seq_lens, slot_mapping=slots)

    @classmethod
    def from_lengths(cls, query_lens, seq_lens, block_table, block_size, **options) -> "CommonAttentionMetadata":
        """From host lengths, in numpy: see metadata.from_lengths.from_lengths for the options."""
        from jattn.metadata.from_lengths import from_lengths

        return from_lengths(query_lens, seq_lens, block_table, block_size, **options)

    @classmethod
    def from_traced(cls, query_start_loc, seq_lens, block_table, block_size, **options) -> "CommonAttentionMetadata":
        """From device arrays, inside jit: see metadata.from_lengths.from_traced for the options."""
        from jattn.metadata.from_lengths import from_traced

        return from_traced(query_start_loc, seq_lens, block_table, block_size, **options)


PER_REQUEST = dict(
    seq_lens=0, block_table=NULL_BLOCK_ID, causal_per_request=True, encoder_seq_lens=0, dcp_local_seq_lens=0,
    mm_prefix_ranges=0, rswa_prefix_lens=0, final_seq_lens=0,
)  # fmt: skip
"""Fields with one row per request -> the value in padding rows."""


BATCH = kind(CommonAttentionMetadata, way_out="make one with CommonAttentionMetadata.from_lengths(...)")
FIELDS = tuple(field.name for field in dataclasses.fields(CommonAttentionMetadata))
_CAUSAL = booleans(1)


def check_block_size(meta: CommonAttentionMetadata, block_size: int, of: str = "block_size") -> int:
    """Returns the block size; ValueError if the batch has no pages, or pages of another size."""
    if meta.block_table is None:
        raise ValueError("meta.block_table is None: this needs the pages of a cache; give from_lengths block_table=")
    if meta.block_size not in (None, block_size):
        raise ValueError(
            f"{of}={block_size} but the batch was made for pages of meta.block_size={meta.block_size} tokens: "
            f"its slots mean other pages; make the batch with block_size={block_size}"
        )
    return block_size


def _minimum(x, bound: int):
    """min(x, bound) that stays numpy on the host."""
    return np.minimum(x, np.int32(bound)) if isinstance(x, (np.ndarray, np.generic)) else jnp.minimum(x, bound)


def _extend(x, more: int, fill):
    """x with `more` rows of `fill` behind it; None stays None, numpy stays numpy."""
    if x is None or more == 0:
        return x
    xp = np if isinstance(x, np.ndarray) else jnp
    return xp.concatenate([x, xp.broadcast_to(xp.asarray(fill, x.dtype), (more, *x.shape[1:]))])
