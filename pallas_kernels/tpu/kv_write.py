"""Writes rows of keys and values to their slots: one Mosaic launch for both pools, in place.

A row of a token and head lies among others in a tile of VMEM, so what is fetched and written back is a pack of a pool
(config.PACK is another: of rows of queries): 8 words of 32 bits for each lane, of all heads at once. Slots are put into
order by XLA; those that share a pack are a group, one after the other in the launch, so a pack is fetched and written
once and two groups never touch the same memory. Groups go through a ring of buffers: copies in and out of several are
in flight while the rows of one are put in place.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.algebra.paging import cdiv
from pallas_kernels.tpu.config import LANES, largest_divisor
from pallas_kernels.tpu.pools import BLOCK as POOL
from pallas_kernels.tpu.pools import launch as launch_with_pools
from pallas_kernels.tpu.supports import KV_DTYPES, SMEM, reasons_of_chip

WORD = 4
"""Bytes of a word; rows are handed to the kernel as words, in each of which a value is repeated."""

SUBLANES = 8
RING = 16  # groups whose copies may be in flight, at most
RING_BYTES = 12 << 20  # of the buffers of all of them, at most
SPARE_BYTES = 4 << 20  # of VMEM that is asked for beside the buffers
NEW_BYTES = 4 << 20  # of new rows that are held in VMEM whole, at most
ROW, SUPERSEDED, WHOLE, ALONE = range(4)
"""What a row is: one of a group; not written, because a later row has its slot; the first of consecutive tokens that
fill a pack; the only one of its group."""

ROW_BITS, KIND_BITS = 8, 2
NO_PACK = -1
NOWHERE = 2**31 - 1  # the slot of a row that is not written, behind all others


@dataclasses.dataclass(frozen=True, kw_only=True)
class KvWriteConfig:
    """What is static about one launch; hashable. Not checked here: see supports_write."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    kv_dtype: str  # as stored
    layout: str = "HND"  # HND: a page is [K S D]; HND128: [K S*D/128 128]

    @property
    def beside(self) -> int:
        """Tokens that lie side by side in a row of the pool."""
        return LANES // self.head_dim if self.layout == "HND128" else 1

    @property
    def dims(self) -> tuple[int, int]:
        """Numbers of a row of each pool."""
        return self.head_dim * self.beside, self.v_head_dim * self.beside

    @property
    def packing(self) -> int:
        """Values of a word."""
        return WORD // jnp.dtype(self.kv_dtype).itemsize

    @property
    def page_rows(self) -> int:
        """Rows of a head's page."""
        return self.page_size // self.beside

    @property
    def pack_rows(self) -> int:
        """Rows of a head that are fetched together."""
        return min(SUBLANES * self.packing, self.page_rows)

    @property
    def pack_tokens(self) -> int:
        """Slots of a pack."""
        return self.pack_rows * self.beside

    @property
    def sublanes(self) -> int:
        """Words of a pack in each lane."""
        return self.pack_rows // self.packing

    @property
    def slot_bytes(self) -> int:
        """Bytes of VMEM of one place in the ring: a pack of each pool, and its rows."""
        wide = sum(cdiv(dim, LANES) * LANES for dim in self.dims)
        heads = cdiv(self.num_kv_heads, SUBLANES) * SUBLANES
        return wide * WORD * (self.num_kv_heads * SUBLANES + self.pack_tokens * heads)

    def new_bytes(self, tokens: int) -> int:
        """Bytes of VMEM of all new rows as words."""
        wide = sum(cdiv(dim, LANES) * LANES for dim in self.dims)
        return tokens * wide * WORD * cdiv(self.num_kv_heads, SUBLANES) * SUBLANES

    def holds(self, tokens: int) -> bool:
        """Are all new rows held in VMEM? If not, those of a group are fetched with its pack."""
        return self.new_bytes(tokens) <= NEW_BYTES

    @property
    def ring(self) -> int:
        """Places of the ring, a power of two."""
        most = max(min(RING, RING_BYTES // self.slot_bytes), 1)
        return 1 << (most.bit_length() - 1)

    @property
    def ahead(self) -> int:
        """Groups that are fetched ahead; the other half of the ring is written back meanwhile."""
        return self.ring // 2


class SortedRows(NamedTuple):
    """The rows that are written, in the order of their slots."""

    number: jax.Array  # i32[1], of rows that are written
    packs: jax.Array  # i32[T + 1] packs of the pools; NO_PACK from `number` on
    rows: jax.Array  # i32[T]: the new row, its slot in the pack and what it is, in bits from the highest


def supports_write(config: KvWriteConfig, tokens: int = 1, *, chip: str = "") -> list[str]:
    """Every reason why the kernel cannot write this cache; an empty list if it can."""
    c, found = config, reasons_of_chip(chip)
    refuse = found.refuse
    refuse(c.kv_dtype not in KV_DTYPES, f"stored dtype {c.kv_dtype}: wanted one of {', '.join(KV_DTYPES)}")
    if c.layout not in ("HND", "HND128"):
        return [*found, f"layout {c.layout}: wanted HND or HND128"]
    for what, dim in zip(("head_dim", "v_head_dim"), c.dims, strict=True):
        # XLA lays a pool of narrower rows out in another order, and would copy it to this one and back
        refuse(dim % LANES != 0 or not LANES <= dim <= 512, f"{what} {dim}: wanted rows of 128, 256, 384 or 512")
    even = c.page_size % c.beside == 0 and c.page_rows % SUBLANES == 0
    wanted = f"whole packs of {c.pack_rows} rows" if even else f"a multiple of {SUBLANES} rows"
    refuse(
        not even or c.page_rows % c.pack_rows != 0,
        f"pages of {c.page_size} tokens and {c.page_rows} rows: wanted {wanted}",
    )
    refuse(c.ring < 2, f"{c.num_kv_heads} kv heads: {2 * c.slot_bytes} bytes of VMEM, at most {RING_BYTES}")
    scalars = WORD * (2 * tokens + 2)
    refuse(scalars > SMEM, f"{tokens} tokens: {scalars} bytes of SMEM, there are {SMEM} on every generation")
    return found


def sort_rows(slots: jax.Array, num_slots: int, config: KvWriteConfig) -> SortedRows:
    """Those of slots [T] inside 0 .. num_slots - 1, in order. The last of equal ones counts."""
    inside, keys, tokens = _in_order(slots, num_slots)
    packs = jnp.where(keys == NOWHERE, NO_PACK, keys // config.pack_tokens)
    at = keys % config.pack_tokens
    return SortedRows(
        number=jnp.sum(inside, dtype=jnp.int32).reshape(1),
        packs=jnp.pad(packs, (0, 1), constant_values=NO_PACK),
        rows=(tokens << ROW_BITS | at) << KIND_BITS | _kinds(keys, tokens, packs, config.pack_tokens),
    )


def _in_order(slots: jax.Array, num_slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(bool[T] is the slot inside; in ascending order: i32[T] slots, NOWHERE for those outside; i32[T] tokens)."""
    slots = slots.astype(jnp.int32) if slots.dtype.itemsize < WORD else slots
    inside = (slots >= 0) & (slots < num_slots)
    keys = jnp.where(inside, jnp.where(inside, slots, 0).astype(jnp.int32), NOWHERE)
    tokens = jnp.arange(slots.shape[0], dtype=jnp.int32)
    keys, tokens = lax.sort((keys, tokens), num_keys=1, is_stable=True)
    return inside, keys, tokens


def _kinds(keys, tokens, packs, group: int) -> jax.Array:
    """What each row is: i32[T]. group: slots of a pack."""
    after = jnp.pad(keys[1:], (0, 1), constant_values=NOWHERE)
    first = packs != jnp.pad(packs[:-1], (1, 0), constant_values=NO_PACK)
    last = packs != jnp.pad(packs[1:], (0, 1), constant_values=NO_PACK)
    kinds = jnp.where(first & last, ALONE, jnp.where(keys == after, SUPERSEDED, ROW))
    if not 1 < group <= keys.shape[0]:
        return kinds
    linked = (after == keys + 1) & (jnp.roll(tokens, -1) == tokens + 1)
    fits = jnp.arange(keys.shape[0]) + group <= keys.shape[0]  # what is rolled over the end does not count
    whole = first & jnp.roll(last, 1 - group) & (keys % group == 0) & _all_of_next(linked, group - 1) & fits
    return jnp.where(whole, WHOLE, kinds)


def _all_of_next(x, number: int) -> jax.Array:
    """Are x[i] .. x[i + number - 1] true? Wrapped around the end."""
    found, length = x, 1
    while length < number:
        step = min(length, number - length)
        found, length = found & jnp.roll(found, -step), length + step
    return found


def as_words(rows: jax.Array, config: KvWriteConfig) -> jax.Array:
    """i32[T K D]: stored rows [T K D] with each value repeated in its word; in HND128 repeated over the lanes, too."""
    rows = jnp.tile(rows, (1, 1, config.beside)) if config.beside > 1 else rows
    if config.packing == 1:
        return lax.bitcast_convert_type(rows, jnp.int32)
    bits = lax.bitcast_convert_type(rows, jnp.dtype(f"uint{32 // config.packing}")).astype(jnp.uint32)
    every = sum(1 << (i * 32 // config.packing) for i in range(config.packing))
    return lax.bitcast_convert_type(bits * jnp.uint32(every), jnp.int32)


def write_rows(rows, slots: jax.Array, pools, config: KvWriteConfig, *, interpret: Any = False):
    """The pools [N K S D], [N K S V] with the stored rows [T K D], [T K V] at slots [T]; in place if they are donated.

    A slot outside the pools is not written; of rows with the same slot the last one is.
    """
    c = config
    if reasons := supports_write(c, slots.shape[0]):
        raise NotImplementedError("; ".join(reasons))
    if slots.shape[0] == 0:
        return tuple(pools)
    plan = sort_rows(slots, pools[0].shape[0] * c.page_size, c)
    words = [as_words(x, c) for x in rows]
    held = c.holds(slots.shape[0])
    new = pl.BlockSpec(memory_space=pltpu.VMEM if held else pl.ANY)
    scalars = len(SortedRows._fields)
    vmem = c.ring * c.slot_bytes + (2 * NEW_BYTES if held else 0) + SPARE_BYTES
    kernel = pl.pallas_call(
        functools.partial(_kernel, config=c),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=(1,),
            in_specs=[new] * 2 + [POOL] * 2,
            out_specs=[POOL] * 2,
            scratch_shapes=_scratch(c, [x.dtype for x in pools], held),
        ),
        out_shape=[pltpu.HBM(x.shape, x.dtype) for x in pools],
        input_output_aliases={scalars + 2: 0, scalars + 3: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=vmem, disable_bounds_checks=True
        ),
        interpret=interpret,
        name="write_keys_and_values",
    )
    return tuple(launch_with_pools(kernel, (*plan, *words), pools))


def _scratch(c: KvWriteConfig, dtypes, held: bool) -> list:
    """Buffers of Ring, in order."""
    packs = [pltpu.VMEM((c.ring, c.num_kv_heads, c.pack_rows, d), t) for d, t in zip(c.dims, dtypes, strict=True)]
    rows = [pltpu.VMEM((c.ring, c.pack_tokens, c.num_kv_heads, dim), jnp.int32) for dim in c.dims if not held]
    return [pltpu.SemaphoreType.DMA((3, 2, c.ring)), *packs, *rows]


@dataclasses.dataclass(frozen=True)
class Ring:
    """The copies of one launch. place: of a row among the sorted ones; side: a place of the ring."""

    config: KvWriteConfig
    sorted: SortedRows  # in SMEM
    new: tuple  # i32[T K D] of each pool
    pools: tuple  # [N K rows D] in HBM
    sems: Any  # DMA[3 2 ring]: of packs fetched, rows fetched and packs written; of each pool; one for each side
    packs: tuple  # [ring K pack_rows D] in VMEM
    rows: tuple = ()  # i32[ring pack_tokens K D] in VMEM; none if the new rows are held there

    def fetch(self, place, side):
        """Starts to fetch the group that begins at a place; the place after it."""
        kind, token, row = self._row_at(place)

        def whole():
            self._do("start", self._whole_rows(token, side))
            return place + self.config.pack_tokens

        def alone():
            self._do("start", self._fetched(place, side), self._row(token, row, side))
            return place + 1

        def some():
            self._do("start", self._fetched(place, side))
            return self._each_row(place, lambda token, row: self._do("start", self._row(token, row, side)))

        return self._by_kind(kind, whole, alone, some)

    def merge(self, place, side):
        """Puts its rows in place and starts to write the pack back; the place after it."""
        kind, token, row = self._row_at(place)

        def whole():
            self._do("wait", self._whole_rows(0, side))
            for pool in range(2):
                self._fill(pool, token, side)
            return place + self.config.pack_tokens

        def alone():
            self._do("wait", self._fetched(place, side), self._row(0, row, side))
            self._put(token, row, side)
            return place + 1

        def some():
            self._do("wait", self._fetched(place, side))
            if self.rows:  # all of them before the first is read: copies that share a semaphore end in any order
                self._each_row(place, lambda token, row: self._do("wait", self._row(0, row, side)))
            return self._each_row(place, lambda token, row: self._put(token, row, side))

        after = self._by_kind(kind, whole, alone, some)
        self._do("start", self._written(place, side))
        return after

    def wait_written(self, side):
        """Waits until the pack is in the pools; its side may then be used again."""
        self._do("wait", self._written(0, side))

    def _by_kind(self, kind, whole, alone, some):
        if self.new[0].shape[0] < self.config.pack_tokens:  # no pack is whole, and JAX refuses slices past the end
            return lax.cond(kind == ALONE, alone, some)
        return lax.cond(kind == ALONE, alone, lambda: lax.cond(kind == WHOLE, whole, some))

    def _row_at(self, place):
        """(what it is, new row, slot in its pack)."""
        row = self.sorted.rows[place]
        bits = (row >> KIND_BITS) & ((1 << ROW_BITS) - 1)
        return row & ((1 << KIND_BITS) - 1), row >> (ROW_BITS + KIND_BITS), bits

    def _each_row(self, place, do):
        """do(new row, slot in its pack) for the group that begins at a place; the place after it."""
        pack = self.sorted.packs[place]

        def one(at):
            kind, token, row = self._row_at(at)
            pl.when(kind == ROW)(lambda: do(token, row))
            return at + 1

        return lax.while_loop(lambda at: self.sorted.packs[at] == pack, one, place)

    def _do(self, what: str, *copies):
        for copy in itertools.chain(*copies):
            getattr(copy, what)()

    def _pack_of(self, pool: int, place):
        c, pack = self.config, self.sorted.packs[place]
        page, at = _split(pack, c.page_rows // c.pack_rows)
        if c.pack_rows == c.page_rows:
            return self.pools[pool].at[page]
        return self.pools[pool].at[page, :, pl.ds(pl.multiple_of(at * c.pack_rows, c.pack_rows), c.pack_rows)]

    def _fetched(self, place, side):
        for pool in range(2):
            target = self.packs[pool].at[side]
            yield pltpu.make_async_copy(self._pack_of(pool, place), target, self.sems.at[0, pool, side])

    def _written(self, place, side):
        for pool in range(2):
            source = self.packs[pool].at[side]
            yield pltpu.make_async_copy(source, self._pack_of(pool, place), self.sems.at[2, pool, side])

    def _row(self, token, row, side):
        for pool, rows in enumerate(self.rows):
            source, target = self.new[pool].at[token], rows.at[side, row]
            yield pltpu.make_async_copy(source, target, self.sems.at[1, pool, side])

    def _whole_rows(self, token, side):
        for pool, rows in enumerate(self.rows):
            source = self.new[pool].at[pl.ds(token, self.config.pack_tokens)]
            yield pltpu.make_async_copy(source, rows.at[side], self.sems.at[1, pool, side])

    def _words(self, pool: int, token, row, side):
        """(ref, index in it of the new row `token`, which has the slot `row` of its pack)."""
        return (self.rows[pool].at[side], row) if self.rows else (self.new[pool], token)

    def _put(self, token, row, side):
        """Replaces one token's row in the packs of both pools."""
        c = self.config
        at, lane = _split(row, c.beside)
        sublane, part = _split(at, c.packing)
        bits = 32 // c.packing
        ones = lax.shift_left(jnp.int32(-1 if c.packing == 1 else (1 << bits) - 1), part * bits)
        masks = {}
        for dim in c.dims:
            shape = (c.sublanes, dim)
            here = lax.broadcasted_iota(jnp.int32, shape, 0) == sublane
            if c.beside > 1:
                here &= _split(lax.broadcasted_iota(jnp.int32, shape, 1), c.head_dim)[0] == lane
            masks[dim] = jnp.where(here, ones, 0)
        at_once = largest_divisor(c.num_kv_heads, SUBLANES)

        def some_heads(i, _):
            for head in range(at_once):
                k = i * at_once + head
                for pool, dim in enumerate(c.dims):
                    pack, (new, index) = self.packs[pool], self._words(pool, token, row, side)
                    old, word = pltpu.bitcast(pack[side, k], jnp.int32), new[index, pl.ds(k, 1)]
                    pack[side, k] = pltpu.bitcast(old ^ ((old ^ word) & masks[dim]), pack.dtype)
            return ()

        if c.num_kv_heads == at_once:
            some_heads(0, ())
        else:
            lax.fori_loop(0, c.num_kv_heads // at_once, some_heads, ())

    def _fill(self, pool: int, token, side):
        """Makes a pack of one pool of the rows of all its tokens, from `token` on."""
        c, (new, first) = self.config, self._words(pool, token, 0, side)
        bits, step = 32 // c.packing, c.packing * c.beside
        lanes = lax.broadcasted_iota(jnp.int32, (c.sublanes, c.num_kv_heads, c.dims[pool]), 2)
        rows = new[pl.ds(first, c.pack_tokens)].reshape(c.sublanes, step, c.num_kv_heads, c.dims[pool])
        words = rows[:, 0]
        for part, place in itertools.product(range(c.packing), range(c.beside)):
            if part == place == 0:
                continue
            row = rows[:, part * c.beside + place]
            if c.packing > 1:
                row = words ^ ((words ^ row) & _signed(((1 << bits) - 1) << (part * bits)))
            words = row if c.beside == 1 else jnp.where(_split(lanes, c.head_dim)[0] == place, row, words)
        self.packs[pool][side] = pltpu.bitcast(jnp.swapaxes(words, 0, 1), self.packs[pool].dtype)


def _split(number, by: int):
    """(number // by, number % by) of a number that is not negative."""
    if by & (by - 1) == 0:
        return lax.shift_right_logical(number, by.bit_length() - 1), number & (by - 1)
    return lax.div(number, by), lax.rem(number, by)


def _signed(bits: int) -> int:
    """The i32 of these 32 bits."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def _kernel(count, packs, rows, k_new, v_new, _k, _v, k_pool, v_pool, sems, *buffers, config: KvWriteConfig):
    c = config
    ring = Ring(c, SortedRows(count, packs, rows), (k_new, v_new), (k_pool, v_pool), sems, buffers[:2], buffers[2:])
    total = count[0]
    side_of = lambda group: group & (c.ring - 1)

    def fetch(place, group):
        """Starts to fetch a group if there is one; the place after it."""

        def start():
            pl.when(group >= c.ring)(lambda: ring.wait_written(side_of(group)))
            return ring.fetch(place, side_of(group))

        return lax.cond(place < total, start, lambda: place)

    fetched = lax.fori_loop(0, c.ahead, lambda group, place: fetch(place, group), jnp.int32(0))

    def step(state):
        fetched, merged, group = state
        fetched = fetch(fetched, group + c.ahead)
        return fetched, ring.merge(merged, side_of(group)), group + 1

    _, _, groups = lax.while_loop(lambda state: state[1] < total, step, (fetched, jnp.int32(0), jnp.int32(0)))

    def drain(group, _):
        ring.wait_written(side_of(group))
        return ()

    lax.fori_loop(jnp.maximum(groups - c.ring, 0), groups, drain, ())
