"""One launch for the rest of a layer: its tiles for many models, and its waits in a simulation."""

import dataclasses
import functools
import itertools
import random
import types
from unittest import mock

import jax
import numpy as np
import pytest

from pallas_kernels.gpu import layer_tail_arrivals_sm90 as arrivals
from pallas_kernels.gpu import layer_tail_pairs_sm90 as pairs
from pallas_kernels.gpu import layer_tail_sm90 as kernel
from pallas_kernels.gpu import tail_attention_sm90 as tail_attention
from pallas_kernels.gpu.layer_tail_config import (
    ChainProduct,
    LayerTailConfig,
    TailAttention,
    choose,
    supports,
)
from pallas_kernels.gpu.token_tile_sm90 import TokenTile

SHAPES = {  # hidden, width of the heads, of the MLP, of the next layer's projections
    "Llama 1B": (2048, 2048, 8192, (2048, 512, 512)),
    "Llama 3B": (3072, 3072, 8192, (3072, 1024, 1024)),
    "Llama 8B": (4096, 4096, 14336, (4096, 1024, 1024)),
    "Llama 7B": (4096, 4096, 11008, (4096, 4096, 4096)),
    "Llama 13B": (5120, 5120, 13824, (5120, 5120, 5120)),
    "Llama 70B": (8192, 8192, 28672, (8192, 1024, 1024)),
    "Llama 70B, one of 8": (8192, 1024, 3584, (1024, 128, 128)),
    "Llama 8B, one of 4": (4096, 1024, 3584, (1024, 256, 256)),
    "Llama 8B, one of 8": (4096, 512, 1792, (512, 128, 128)),
    "TinyLlama": (2048, 2048, 5632, (2048, 256, 256)),
    "Mistral Nemo": (5120, 4096, 14336, (4096, 1024, 1024)),
    "Qwen3 0.6B": (1024, 2048, 3072, (2048, 1024, 1024)),
    "Qwen3 4B": (2560, 4096, 9728, (4096, 1024, 1024)),
    "Qwen3 8B": (4096, 4096, 12288, (4096, 1024, 1024)),
    "Qwen3 14B": (5120, 5120, 17408, (5120, 1024, 1024)),
    "Gemma 2 9B": (3584, 4096, 14336, (4096, 2048, 2048)),
    "Gemma 2 9B, one of 4": (3584, 1024, 3584, (1024, 512, 512)),
    "OLMo 2 7B": (4096, 4096, 11008, (4096, 4096, 4096)),
    "OLMo 2 7B, one of 4": (4096, 1024, 2816, (1024, 1024, 1024)),
    "Qwen2.5 7B": (3584, 3584, 18944, (3584, 512, 512)),
    "Qwen2.5 32B": (5120, 5120, 27648, (5120, 1024, 1024)),
    "Gemma 7B": (3072, 4096, 24576, (4096, 4096, 4096)),
    "Granite 8B": (4096, 4096, 12800, (4096, 1024, 1024)),
    "hidden 896": (896, 896, 4864, (896, 128, 128)),
    "hidden 576": (576, 576, 1536, (576, 192, 192)),
    "fused": (3072, 3072, 8192, (9216,)),
    "one kv head": (2048, 2048, 16384, (2048, 64, 64)),
    "the last layer": (2048, 2048, 8192, ()),
    "small": (256, 256, 512, (256, 64, 64)),
}
NORMS_AFTER = dict(after_eps=(1e-6, 1e-5), after_one_plus=(False, True))
FIELDS = {  # of the config, beside the sizes
    "Gemma 2 9B": NORMS_AFTER | dict(activation="gelu_tanh"),
    "Gemma 2 9B, one of 4": NORMS_AFTER,
    "OLMo 2 7B": NORMS_AFTER | dict(eps=(None, None)),
    "OLMo 2 7B, one of 4": NORMS_AFTER | dict(eps=(None, None)),
}
NOT_SERVED = {"hidden 576"}  # not whole blocks of 128
ROWS = (1, 2, 5, 8, 9, 16, 17, 31, 32, 33, 40, 57, 64)
SHARED_BYTES = 226 * 1024  # of the 227 KB of a CTA on Hopper: a launch with 227 of Mosaic's failed on a card


def shared_bytes(c: LayerTailConfig) -> int:
    """Of a CTA: Mosaic aligns each array to 1 KB."""
    arrays = [c.slots * 128 * 64 * 2, c.token_stages * c.rows8 * 128 * 2, 4 * c.scratch_floats]
    arrays += [4 * pairs.received_floats(c)] * c.in_pairs
    return sum(-(-size // 1024) * 1024 for size in (*arrays, 8 * (c.ring_barriers + c.in_pairs)))


def choice(name: str, rows: int, ctas: int, **fields) -> LayerTailConfig | None:
    return choose(rows, *SHAPES[name], ctas, **FIELDS.get(name, {}), **fields)


def chosen(names=SHAPES, rows=ROWS, ctas=(78, 114, 132)):
    for name, t, count in itertools.product(names, rows, ctas):
        config = choice(name, t, count)
        if config is not None:
            yield name, config


def test_every_chosen_launch_is_one_that_the_kernel_serves():
    served = set()
    for name, c in chosen():
        served.add(name)
        assert not supports(c)
        assert all(p.strips * p.splits <= c.ctas for p in c.products)
        assert c.rows * c.shares <= c.ctas
        assert shared_bytes(c) <= SHARED_BYTES
    assert served == set(SHAPES) - NOT_SERVED
    assert {n for n, c in chosen(ctas=[132], rows=[1, 32])} == served


def test_groups_of_counters_hold_the_columns_that_a_reader_reads_and_no_counter_has_two_uses():
    for _, c in chosen():
        used = []
        for i, p in enumerate(c.products):
            groups, readers = arrivals.groups(c, i), c.products[2].splits if i == 1 else c.shares
            used += [arrivals.columns_stored(i, g) for g in range(groups)]
            used += [arrivals.share_added(i, s) for s in range(c.shares)] * (i != 1)
            assert groups in (1, readers)
            assert arrivals.group_size(c, i) * groups == p.strips * p.splits
            width = p.width // (2 if p.gated else 1)  # of the columns that the strips give
            of_strip = p.columns // (2 if p.gated else 1)
            for strip in range(p.strips):
                first, last = (min(of_strip * edge, width) for edge in (strip, strip + 1))
                group = strip // (p.strips // groups)
                assert width * group // groups <= first and last <= width * (group + 1) // groups
        assert len(set(used)) == len(used) and max(used) < arrivals.COUNTERS


def config_of(**changes):
    o = ChainProduct(inner=256, widths=(256,), pieces=1)
    gated = ChainProduct(inner=256, widths=(512, 512), gated=True, pieces=2)
    down = ChainProduct(inner=512, widths=(256,), pieces=1)
    return LayerTailConfig(**dict(rows=8, products=(o, gated, down)) | changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(rows=65), "65 rows"),
        (dict(rows=0), "0 rows"),
        (dict(rows=16, ctas=15), "16 rows: 15 CTAs"),
        (dict(slots=2), "3 blocks in flight"),
        (dict(ranks=9), "9 ranks"),
        (dict(activation="relu"), "activation 'relu'"),
        (dict(ctas=257), "257 CTAs"),
        (dict(token_stages=1), "2 blocks of tokens together"),
        (dict(ctas=3, rows=2), "4 units"),
        (dict(products=(ChainProduct(inner=192, widths=(256,)),)), "inner 192"),
        (dict(products=(ChainProduct(inner=256, widths=(200,)),)), "multiples of 64"),
        (dict(products=(ChainProduct(inner=256, widths=(256,), pieces=3),)), "a multiple of 192"),
        (
            dict(products=(ChainProduct(inner=2048, widths=(512,), pieces=8),)),
            "16 blocks of (512,) multiplied together",
        ),
        (dict(products=(ChainProduct(inner=256, widths=(256, 256), gated=True, splits=2),)), ""),
        (dict(products=(ChainProduct(inner=256, widths=(256, 256), gated=True, splits=2),), ctas=131), "by 2 of 131"),
        (dict(products=(ChainProduct(inner=512, widths=(256, 256), gated=True, splits=4),)), "shared by 4"),
        (dict(products=(ChainProduct(inner=256, widths=(256, 256), gated=True, pieces=4, splits=2),)), "4 pieces"),
        (dict(products=(ChainProduct(inner=256, widths=(192, 192), gated=True, pieces=3),)), "equal parts of both"),
        (dict(products=(ChainProduct(inner=256, widths=(192, 192), gated=True, pieces=6),)), ""),
        (dict(products=(ChainProduct(inner=256, widths=(320, 320), gated=True, pieces=4),)), ""),
    ],
)
def test_refusals_name_the_reason(changes, reason):
    assert not supports(config_of())
    assert any(reason in said for said in supports(config_of(**changes))) == bool(reason)


@pytest.mark.parametrize(
    ("rows", "sizes", "ctas"),
    [
        (65, SHAPES["Llama 1B"], 132),
        (0, SHAPES["Llama 1B"], 132),
        (64, SHAPES["small"], 16),  # more tokens than CTAs
        (8, SHAPES["Llama 8B"], 16),
        (8, SHAPES["hidden 576"], 132),
    ],
)
def test_sizes_that_are_not_served_get_no_launch(rows, sizes, ctas):
    assert choose(rows, *sizes, ctas) is None


def test_another_chip_is_refused():
    assert supports(config_of(), chip="sm_100") == ["chip sm_100: the kernel uses Hopper's wgmma, only sm_90 has it"]


def attention_of(heads: int, kv_heads: int, dim: int, **changes) -> TailAttention:
    sizes = dict(scale=0.1, blocks=32, page=16, columns=8, heads_first=True) | changes
    return TailAttention(heads=heads, kv_heads=kv_heads, head_dim=dim, **sizes)


ATTENDING = [  # name in SHAPES, attention, tokens, tokens that are not padding, their keys, CTAs
    ("Llama 1B", attention_of(32, 8, 64), 4, 1, 600, 132),
    ("Llama 1B", attention_of(32, 8, 64), 4, 4, 70, 132),
    ("Llama 8B", attention_of(32, 8, 128), 3, 2, 1, 114),
    ("Llama 70B, one of 8", attention_of(8, 1, 128), 8, 5, 3000, 132),
    ("Qwen3 14B", attention_of(40, 8, 128), 2, 0, 0, 132),
    ("small", attention_of(4, 1, 64), 8, 8, 9, 12),
]


def attending(name, attention, rows, live, keys, ctas):
    """(config, plan as numpy) of `live` requests of so many keys."""
    config = choose(rows, *SHAPES[name], ctas, attention=attention)
    assert config is not None
    starts = np.minimum(np.arange(rows + 1), live)
    plan = jax.jit(tail_attention.plan, static_argnums=(0, 1))  # one program, not one for each operation
    return config, np.asarray(plan(attention, ctas, starts, np.full(rows, keys), np.zeros(rows, np.int32)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(rows=9), "attention of 9 rows"),
        (dict(attention=attention_of(8, 2, 32)), "heads of 32"),
        (dict(attention=attention_of(4, 3, 64)), "4 heads over 3"),
        (dict(attention=attention_of(8, 2, 64)), "the projection has 256 rows"),
        (dict(attention=attention_of(4, 2, 64), rows=8, ctas=15), "16 units of attention"),
        (dict(attention=attention_of(4, 2, 64)), ""),
        (dict(adds_directly=True), "wanted attention with sums"),
        (dict(eps=(None, 1e-5)), "and no others"),
        (dict(after_eps=(None, 1e-5)), "and no others"),
    ],
)
def test_attention_that_a_launch_cannot_compute_is_refused(changes, reason):
    said = supports(config_of(**dict(attention=attention_of(4, 2, 64)) | changes))
    assert any(reason in why for why in said) if reason else not said


def test_each_key_of_each_unit_is_in_one_part():
    for case in ATTENDING:
        config, plan = attending(*case)
        assert not supports(config) and shared_bytes(config) <= SHARED_BYTES
        a, (live, count) = config.attention, plan[-1, :2]
        keys, seen = case[4], {}
        for token, unit, first, end, has_new, part, request, _ in plan[:-1]:
            if token >= 0:
                assert request == token and 0 <= part < count
                seen.setdefault((token, unit), []).extend([*range(first, end), *[keys - 1] * has_new])
        assert seen.keys() == set(itertools.product(range(live), range(a.units)))
        assert all(sorted(found) == list(range(keys)) for found in seen.values())


class Barrier:
    """An mbarrier: phases that complete after a number of arrivals, of which a waiting thread sees the parity."""

    def __init__(self, arrivals: int):
        self.wanted, self.arrived, self.completed = arrivals, 0, 0

    def arrive(self):
        self.arrived += 1
        if self.arrived == self.wanted:
            self.arrived, self.completed = 0, self.completed + 1

    def seen(self, phase: int) -> bool:
        return self.completed % 2 != phase % 2


class Ring:
    def __init__(self, stages: int):
        self.full, self.free = ([Barrier(1) for _ in range(stages)] for _ in range(2))
        self.held = [None] * stages

    def place(self, number: int) -> tuple[int, int]:
        """(stage, turn)"""
        return number % len(self.held), number // len(self.held)


class Launch:
    """One launch: every CTA's three warpgroups as generators, which yield what they wait for.

    Arrays are sets of the names of the parts that have been written; reading one that is not there fails. `use` notes
    each weight block.
    """

    def __init__(self, config: LayerTailConfig, plan=None):
        self.c, self.counters, self.written, self.used, self.parts = config, {}, set(), {}, plan
        self.ranks = [self]  # the launches of all ranks

    def run(self, late: int, seed: int) -> None:
        """Until all have ended. The CTA `late` of the last rank runs only when no other can."""
        threads = []
        for launch, cta in itertools.product(self.ranks, range(self.c.ctas)):
            rings = Ring(self.c.slots), Ring(self.c.token_stages)
            roles = launch.load_weights(cta, rings[0]), launch.load_tokens(cta, rings[1]), launch.compute(cta, *rings)
            is_late = launch is self.ranks[-1] and cta == late
            threads += [[is_late, role, lambda: True] for role in roles]
        random.Random(seed).shuffle(threads)
        while threads:
            moved = self.advance([t for t in threads if not t[0]])
            if not moved and not self.advance([t for t in threads if t[0]]):
                raise AssertionError(f"deadlock: {len(threads)} warpgroups wait")
            threads = [t for t in threads if t[2] is not None]

    @staticmethod
    def advance(threads) -> bool:
        moved = False
        for thread in threads:
            while thread[2] is not None and thread[2]():
                thread[2], moved = next(thread[1], None), True
        return moved

    def plan(self, cta: int):
        """(i, product, strip, split) of the CTA's units."""
        for i, p in enumerate(self.c.products):
            if cta < p.strips * p.splits:
                yield i, p, *(divmod(cta, 2) if p.gated and p.splits > 1 else (cta % p.strips, cta // p.strips))

    def arrive(self, counter: int):
        self.counters[counter] = self.counters.get(counter, 0) + 1

    def arrived(self, counter: int, count: int):
        return lambda: self.counters.get(counter, 0) >= count

    def load_weights(self, cta: int, ring: Ring):
        number = 0
        for i, p, strip, split in self.plan(cta):
            for b, piece in itertools.product(range(p.blocks), range(p.pieces)):
                stage, turn = ring.place(number)
                if turn:
                    yield lambda s=stage, t=turn: ring.free[s].seen(t - 1)
                if number >= self.c.in_flight:
                    s, t = ring.place(number - self.c.in_flight)
                    yield lambda s=s, t=t: ring.full[s].seen(t)
                ring.held[stage] = i, strip, split * p.blocks + b, piece
                ring.full[stage].arrive()
                number += 1

    def load_tokens(self, cta: int, ring: Ring):
        number, blocks = 0, self.c.hidden // 128
        for i, p, _, split in self.plan(cta):
            if i == 0 and self.parts is not None:
                yield from self.load_merged(p, split, ring)
                number += p.blocks
                continue
            if i == 2:
                group = split if arrivals.groups(self.c, 1) > 1 else 0
                yield self.arrived(arrivals.columns_stored(1, group), arrivals.group_size(self.c, 1))
            if i == 3 and self.c.adds_directly:
                yield from self.load_added(p, split, ring, number)
                number += p.blocks
                continue
            for b in range(p.blocks):
                stage, turn = ring.place(number)
                if turn:
                    yield lambda s=stage, t=turn: ring.free[s].seen(t - 1)
                block = split * p.blocks + b
                if i in (1, 3):  # a norm's rows, block by block of the hidden size
                    share = block * self.c.shares // blocks
                    yield self.arrived(arrivals.share_added(i - 1, share), self.c.rows)
                    assert {("norm", i, row, share) for row in range(self.c.rows)} <= self.written
                if p.gated and p.splits > 1 and b == p.blocks - 1:
                    for share in range(self.c.shares):
                        yield self.arrived(arrivals.share_added(0, share), self.c.rows)
                if i == 2:
                    width = self.c.products[1].columns // 2  # of h that a strip gives
                    for strip in range(block * 128 // width, -(-(block + 1) * 128 // width)):
                        assert {("h", strip, half) for half in range(self.c.products[1].splits)} <= self.written
                ring.held[stage] = i, block
                ring.full[stage].arrive()
                number += 1

    def load_merged(self, p: ChainProduct, split: int, ring: Ring):
        """The tokens of the first product: the parts of the heads in its columns, several blocks at a time."""
        a, each, (live, count) = self.c.attention, TokenTile(self.c, 0).each, self.parts[-1, :2]
        for first in range(0, p.blocks, each):
            for number in range(first, first + each):
                stage, turn = ring.place(number)
                if turn:
                    yield lambda s=stage, t=turn: ring.free[s].seen(t - 1)
            block = split * p.blocks + first
            for column in range(block * 128, (block + each) * 128, a.head_dim):
                head = column // (a.head_dim * a.group)
                yield self.arrived(arrivals.attended(int(head)), live * count * a.chunks)
                unit = column // a.head_dim // a.together
                assert {("part", t, unit, s) for t in range(live) for s in range(count)} <= self.written
            for n in range(each):
                stage, _ = ring.place(first + n)
                ring.held[stage] = 0, block + n
                ring.full[stage].arrive()

    def load_added(self, p: ChainProduct, split: int, ring: Ring, number: int):
        """The tokens of the last product: the sums of the one before, several blocks at a time."""
        each, before = TokenTile(self.c, 3).each, self.c.products[2]
        for first in range(0, p.blocks, each):
            for n in range(first, first + each):
                stage, turn = ring.place(number + n)
                if turn:
                    yield lambda s=stage, t=turn: ring.free[s].seen(t - 1)
            block = split * p.blocks + first
            groups = arrivals.groups(self.c, 2)
            for column in range(block * 128, (block + each) * 128, 4):
                group = column // (self.c.hidden // groups)
                yield self.arrived(arrivals.columns_stored(2, group), arrivals.group_size(self.c, 2))
                strip = column // before.columns
                assert {("part", 2, s, strip) for s in range(before.splits)} <= self.written
                assert ("norm", 1, 0, column * self.c.shares // self.c.hidden) in self.written  # x1
            for n in range(each):
                stage, _ = ring.place(number + first + n)
                ring.held[stage] = 3, block + n
                ring.full[stage].arrive()

    def compute(self, cta: int, weights: Ring, tokens: Ring):
        if self.parts is not None and self.parts[cta, 0] >= 0:
            token, unit, *_, part, _, _ = self.parts[cta]
            self.written.add(("part", token, unit, part))
            self.arrive(arrivals.attended(int(unit) // self.c.attention.chunks))
        w_number = x_number = 0
        units = {i: (p, strip, split) for i, p, strip, split in self.plan(cta)}
        for i, p in enumerate(self.c.products):
            if i in units:
                _, strip, split = units[i]
                for first in range(0, p.blocks, p.together):
                    taken = []
                    for b in range(first, first + p.together):
                        taken.append((tokens, x_number, (i, split * p.blocks + b)))
                        taken += [(weights, w_number + j, (i, strip, split * p.blocks + b, j)) for j in range(p.pieces)]
                        x_number, w_number = x_number + 1, w_number + p.pieces
                    for ring, number, wanted in taken:
                        stage, turn = ring.place(number)
                        yield lambda r=ring, s=stage, t=turn: r.full[s].seen(t)
                        assert ring.held[stage] == wanted
                        if ring is weights:
                            assert wanted not in self.used
                            self.used[wanted] = True
                    if p.gated and first + p.together == p.blocks:  # the factors need the squares of whole tokens
                        shares = range(self.c.shares)
                        assert {("norm", i, row, s) for row in range(self.c.rows) for s in shares} <= self.written
                    for ring, number, _ in taken:
                        ring.free[ring.place(number)[0]].arrive()
                if p.gated and p.splits > 1:  # each of a pair sends what the other finishes
                    self.written.add(("half", strip, split))
                    yield lambda strip=strip, split=split: ("half", strip, 1 - split) in self.written
                self.written.add(("h", strip, split) if p.gated else ("part", i, split, strip))
                group = strip // (p.strips // arrivals.groups(self.c, i))
                self.arrive(arrivals.columns_stored(i, group))
            if (i == 2 and self.c.adds_directly) or (i == 3 and self.c.gives_sums):
                continue
            if not p.gated and cta < self.c.rows * self.c.shares:
                yield from self.add(i, p, cta % self.c.rows, cta // self.c.rows)

    def add(self, i: int, p: ChainProduct, row: int, share: int):
        """A share of a token's columns: the sums of all splits of all strips under them."""
        group = share if arrivals.groups(self.c, i) > 1 else 0
        yield self.arrived(arrivals.columns_stored(i, group), arrivals.group_size(self.c, i))
        for strip in range(p.strips):
            if strip * self.c.shares < (share + 1) * p.strips and (strip + 1) * self.c.shares > share * p.strips:
                assert {("part", i, split, strip) for split in range(p.splits)} <= self.written
        if i != 3 and self.c.ranks > 1:
            for launch in self.ranks:
                launch.written.add(("sent", i, row, share, self))
            sent = {("sent", i, row, share, launch) for launch in self.ranks}
            yield lambda: sent <= self.written  # a word tells by its own number that it has come
            assert sent <= self.written
        if i == 3:  # the factor of the token's norm needs the squares of all shares
            assert {("norm", 3, row, s) for s in range(self.c.shares)} <= self.written
            self.written.add(("row", row, share))
        else:
            self.written.add(("norm", i + 1, row, share))
            self.arrive(arrivals.share_added(i, share))


def check_launch(config: LayerTailConfig, late: int = 0, seed: int = 0, plan=None) -> None:
    launch, *others = ranks = [Launch(config, plan) for _ in range(config.ranks)]
    for each in ranks:
        each.ranks = ranks
    launch.run(late, seed)
    assert all(other.used.keys() == launch.used.keys() for other in others)
    blocks = sum(p.strips * p.pieces * p.inner // 128 for p in config.products)
    assert len(launch.used) == blocks  # every block of every weight, each once
    if len(config.products) == 4 and not config.gives_sums:
        rows = {("row", row, share) for row in range(config.rows) for share in range(config.shares)}
        assert rows <= launch.written


@pytest.mark.parametrize("name", ["Llama 8B", "Llama 8B, one of 4", "Llama 70B, one of 8"])
@pytest.mark.parametrize("rows", [1, 64])
def test_the_last_tokens_of_a_gated_product_come_after_the_squares_of_all_shares(name, rows):
    """The norm's factors are computed then, also by a CTA of a pair, which reads half of each token."""
    config = choose(rows, *SHAPES[name], 132)
    assert config is not None and config.shares > 1
    first, gated, *_ = config.products
    for cta in (0, 1, gated.units - 1):
        done = loaded_tokens(config, cta)
        places = [n for n, event in enumerate(done) if event == "copy"]
        last = places[first.blocks * (cta < first.units) + gated.blocks - 1]
        assert {arrivals.share_added(0, share) for share in range(config.shares)} <= set(done[:last])


def loaded_tokens(config: LayerTailConfig, cta: int) -> list:
    """What the warpgroup that loads tokens does: the number of each counter that it waits for, and each copy."""
    done: list = []
    loop = lambda first, end, body, carry: functools.reduce(lambda carry, b: body(b, carry), range(first, end), carry)
    lax = types.SimpleNamespace(fori_loop=loop, rem=lambda a, b: a % b, div=lambda a, b: a // b)
    with (
        mock.patch.object(kernel, "lax", lax), mock.patch.object(kernel, "jnp", np),
        mock.patch.object(kernel, "when", lambda condition: lambda run: run() if condition else None),
        mock.patch.object(pairs, "number", lambda _: np.int32(cta)),
        mock.patch.object(arrivals, "wait_before_tma", lambda _, counter, count: done.append(int(counter))),
        mock.patch.object(kernel.Ring, "wait"), mock.patch.object(kernel.Ring, "copy", lambda *_: done.append("copy")),
    ):  # fmt: skip
        kernel._load_tokens(config, mock.MagicMock())
    return done


SIMULATED = [
    ("Llama 1B", 1, 132), ("Llama 1B", 33, 132), ("Llama 1B", 64, 114), ("Llama 8B", 8, 78), ("Llama 7B", 57, 132),
    ("Llama 70B, one of 8", 16, 114), ("Qwen3 0.6B", 32, 132), ("hidden 896", 5, 132), ("small", 57, 132),
    ("the last layer", 40, 132), ("Llama 8B, one of 4", 33, 132), ("Llama 8B, one of 8", 2, 114),
    ("Qwen2.5 7B", 5, 132), ("Gemma 2 9B", 1, 132), ("Gemma 2 9B, one of 4", 17, 132), ("OLMo 2 7B", 64, 114),
    ("OLMo 2 7B, one of 4", 3, 132),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "ctas"), SIMULATED)
def test_a_launch_ends_and_reads_only_what_was_written(name, rows, ctas):
    config = choice(name, rows, ctas)
    assert config is not None
    for seed, late in enumerate((0, ctas // 2, config.products[0].units - 1)):
        check_launch(config, late, seed)


@pytest.mark.parametrize("case", ATTENDING)
@pytest.mark.parametrize("directly", [None, True])
def test_a_launch_with_attention_ends_and_reads_only_what_was_written(case, directly):
    config, plan = attending(*case)
    if directly is not None:
        attention = dataclasses.replace(config.attention, sums=2)
        changed = dataclasses.replace(config, attention=attention, adds_directly=directly)
        config = config if supports(changed) else changed
    check_launch(config, config.ctas // 2 if directly else config.products[0].units - 1, 0, plan)


@pytest.mark.parametrize("ranks", [2, 3])
def test_launches_of_several_ranks_end_and_read_only_what_was_sent(ranks):
    config = choose(33, *SHAPES["hidden 896"], 114, ranks=ranks)
    assert config is not None and config.ranks == ranks
    for seed, late in enumerate((0, 40)):
        check_launch(config, late, seed)


def caught(config: LayerTailConfig) -> str:
    """The message with which some launch fails; "" if none does."""
    for late in range(0, config.ctas, 9):
        try:
            check_launch(config, late)
        except AssertionError as error:
            return str(error) or "read too early"
    return ""


def test_the_simulation_sees_a_count_that_is_one_too_small_or_too_large(monkeypatch):
    config = choose(8, *SHAPES["small"], 16)
    assert config is not None and not caught(config)
    right = arrivals.group_size
    monkeypatch.setattr(arrivals, "group_size", lambda cfg, i: right(cfg, i) - (i == 0))
    assert caught(config)
    monkeypatch.setattr(arrivals, "group_size", lambda cfg, i: right(cfg, i) + (i == 1))
    assert caught(config).startswith("deadlock")


def test_the_simulation_sees_more_blocks_together_than_stages():
    """As of Llama 70B on the 114 SMs of an H100 PCIe, of which 2 * 8 were wanted and 13 are there."""
    product = ChainProduct(inner=2048, widths=(512,), pieces=8)
    gated = ChainProduct(inner=512, widths=(512, 512), gated=True, pieces=2)
    down = ChainProduct(inner=512, widths=(512,), pieces=1)
    config = LayerTailConfig(rows=4, products=(product, gated, down), ctas=16, slots=13)
    assert supports(config) and caught(config).startswith("deadlock")
    assert not caught(dataclasses.replace(config, slots=16))
