"""Attention inside the launch for the rest of a layer: every thread of it on the PTX model, against numpy float64."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.gpu import tail_attention_sm90 as kernel
from pallas_kernels.gpu import tail_sums_sm90 as sums
from pallas_kernels.gpu.layer_tail_config import PARTS, THREADS, TailAttention, choose, supports
from pallas_kernels.gpu.token_tile_sm90 import TokenTile
from tests.kernels.gpu.simt import Machine, emulated

BF16, PAGE, COLUMNS = ml_dtypes.bfloat16, 8, 40
LENS = (1, 100, 0, 40)  # one token each but for the third, a request without one
SHARED = 1024  # bytes before the arrays: shared memory


class Memory:
    """Named arrays in a Machine's memory."""

    def __init__(self, shared: int, **arrays):
        self.scratch, self.arrays, self.starts, size = SHARED, arrays, {}, SHARED + shared
        for name, array in arrays.items():
            self.starts[name], size = size, size + -(-array.nbytes // 256) * 256
        self.machine = Machine(THREADS, size)
        for name, array in arrays.items():
            self.machine.memory[self.starts[name] :][: array.nbytes] = array.view(np.uint8).ravel()

    def __getattr__(self, name):
        return self.starts[name]

    def seen(self, name):
        array = self.arrays[name]
        return self.machine.memory[self.starts[name] :][: array.nbytes].view(array.dtype).reshape(array.shape)


def rotated(x, angle):
    turn = np.exp(1j * angle)
    low, high = np.split(x, 2)
    pairs = (low + 1j * high) * turn
    return np.concatenate([pairs.real, pairs.imag]).astype(BF16).astype(np.float64)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "heads_first", "ctas", "count", "left", "normed", "biased"),
    [(8, 2, 64, True, 14, 0, -1, False, False), (8, 2, 64, False, 24, 3, 20, True, False),
     (5, 1, 128, True, 20, 2, -1, True, True), (6, 1, 64, True, 9, 0, -1, False, True),
     (2, 2, 128, False, 12, 1, 64, False, False)],
)  # fmt: skip
def test_new_tokens_attend_to_their_cached_keys_and_to_themselves(
    heads, kv_heads, dim, heads_first, ctas, count, left, normed, biased
):
    rng, blocks, tokens = np.random.default_rng(dim + heads), 60, 5
    a = TailAttention(
        heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, blocks=blocks, page=PAGE, columns=COLUMNS,
        heads_first=heads_first, sums=count, left=left, norm_eps=1e-3 if normed else None, norm_one_plus=count == 2,
        has_bias=biased,
    )  # fmt: skip
    cfg = choose(tokens, 1024, heads * dim, 1024, (), 132, attention=a)
    assert cfg is not None
    table = rng.permutation(blocks)[None].repeat(4, 0)[:, :COLUMNS].astype(np.int32)
    for r, first in enumerate((0, 2, 0, 42)):  # blocks of their own
        table[r] = np.roll(np.arange(blocks), -first)[:COLUMNS]
    used = [-(-n // PAGE) for n in LENS]
    for r, n in enumerate(used):
        table[r, n:] = 1 << 30  # whatever was there
    slots = [table[r, (n - 1) // PAGE] * PAGE + (n - 1) % PAGE for r, n in enumerate(LENS) if n] + [-1, -1]
    slots[1] = -1  # a request that has ended writes nothing
    slots = np.array(slots, np.int32)
    starts = np.array([0, 1, 2, 2, 3], np.int32)
    plan = np.asarray(kernel.plan(a, ctas, jnp.asarray(starts), jnp.asarray(LENS), jnp.asarray(slots)))
    longest = 100 if left < 0 else left + 1
    assert tuple(plan[-1, :2]) == (3, min(max(ctas // (3 * a.units), 1), PARTS, -(-longest // a.groups)))
    most = (plan[:-1, kernel.END] - plan[:-1, kernel.FIRST]).max()
    assert kernel.most_turns(a, ctas, int(starts[-1]), max(LENS)) == -(-most // a.keys_a_turn)
    order = (blocks, kv_heads, PAGE, dim) if heads_first else (blocks, PAGE, kv_heads, dim)
    pools = {name: np.full(order, np.nan, BF16) for name in ("k_pool", "v_pool")}
    place = lambda r, j: (
        (table[r, j // PAGE], slice(None), j % PAGE) if heads_first else (table[r, j // PAGE], j % PAGE)
    )
    for r, n in enumerate(LENS):
        for j in range(n - 1):
            for pool in pools.values() if left < 0 or j >= n - 1 - left else ():  # others stay NaN
                pool[place(r, j)] = rng.normal(size=(kv_heads, dim)).astype(BF16)
    projected = rng.normal(size=(tokens, a.width)).astype(BF16)
    angle = rng.uniform(0, 6, (tokens, dim // 2)).astype(np.float32)
    given, squares = projected, np.zeros((8, 4), np.float32)
    if count:  # of CTAs, before the norm's factor
        mean = rng.uniform(0.5, 2, tokens).astype(np.float32)
        squares[:tokens] = rng.dirichlet(np.ones(4), tokens) * (mean * cfg.hidden)[:, None]
        given = rng.normal(size=(count, 8, a.width)).astype(np.float32)
        given[0, :tokens] += projected.astype(np.float32) * np.sqrt(mean + a.eps)[:, None] - given[:, :tokens].sum(0)
        given = given.reshape(count * 8, a.width)
    q_norm, k_norm = (rng.normal(1, 0.3, dim).astype(BF16) for _ in range(2))
    bias = rng.normal(size=a.width).astype(BF16)
    q_bias, k_bias, v_bias = np.split(bias, [heads * dim, (heads + kv_heads) * dim])
    parts, stats = kernel.part_shapes(cfg)
    memory = Memory(
        4 * cfg.scratch_floats, rows=given, row_squares=squares, cos=np.cos(angle), sin=np.sin(angle),
        block_table=table, **pools, q_norm=q_norm, k_norm=k_norm,
        q_bias=q_bias, k_bias=k_bias, v_bias=v_bias,
        parts_of_heads=np.full(parts.shape, np.nan, np.float32), part_stats=np.full(stats.shape, np.nan, np.float32),
        x_tile=np.full((cfg.token_stages, cfg.rows8, 128), np.nan, BF16),
    )  # fmt: skip
    number, tile = 3, TokenTile(cfg, 0)  # the first stage
    with emulated(kernel, memory.machine), np.errstate(over="ignore", invalid="ignore"):
        for row in plan[:-1]:
            if row[kernel.TOKEN] >= 0:
                state = kernel._start(cfg, memory, row)
                for first in range(row[kernel.FIRST], row[kernel.END], a.keys_a_turn):
                    state = kernel._step(cfg, memory, state, np.int32(first), row)
                kernel._store_part(cfg, memory, state, row)
        merged = []
        each = tile.each
        for column in range(0, heads * dim, each * 128):
            tile.zero(memory.x_tile, np.int32(number))
            for token in range(3):
                kernel.merge_token(cfg, tile, memory, np.int32(number), np.int32(column), np.int32(token), plan[-1, 1])
            tiles = memory.seen("x_tile")
            for n in range(each):
                merged.append(unswizzled(tiles[(number + n) % cfg.token_stages]))
    found = np.concatenate(merged, axis=1).astype(np.float64)
    assert (found[3:] == 0).all()
    exact = (projected.astype(np.float64) + biased * bias.astype(np.float64)[None]).astype(BF16)
    exact = exact.astype(np.float64).reshape(tokens, -1, dim)
    for token, r in enumerate((0, 1, 3)):
        q, k, v = np.split(exact[token], [heads, heads + kv_heads])
        if normed:
            norm = lambda x, scale: x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-3) * (scale + (count == 2))
            q, k = (norm(x, scale.astype(np.float64)) for x, scale in ((q, q_norm), (k, k_norm)))
            q, k = (x.astype(BF16).astype(np.float64) for x in (q, k))
        q, k = ([rotated(x, angle[token]) for x in rows] for rows in (q, k))
        begin = 0 if left < 0 else max(LENS[r] - 1 - left, 0)
        for h in range(heads):
            kv = h // a.group
            past = [
                [pool[place(r, j)][kv].astype(np.float64) for j in range(begin, LENS[r] - 1)] for pool in pools.values()
            ]
            keys, values = np.array([*past[0], k[kv]]), np.array([*past[1], v[kv]])
            scores = keys @ q[h] * a.scale
            weights = np.exp(scores - scores.max())
            wanted = weights @ values / weights.sum()
            error = np.linalg.norm(found[token, h * dim :][:dim] - wanted) / np.linalg.norm(wanted)
            assert error < 4e-3, (token, h, error)
        for name, new in (("k_pool", k), ("v_pool", v)):
            now, before = memory.seen(name), pools[name]
            if slots[token] >= 0:
                before[place(r, LENS[r] - 1)] = np.array(new).astype(BF16)
    for name in ("k_pool", "v_pool"):
        now, before = memory.seen(name).astype(np.float32), pools[name].astype(np.float32)
        np.testing.assert_allclose(now, before, rtol=2**-8, atol=1e-6)  # and nothing else is written


def turns_of(a: TailAttention, ctas: int, lens: list[int]) -> int:
    """The turns of the CTA with the most keys, counted one after the other. lens: of requests with a new token each."""
    keys_at_once = THREADS // (a.head_dim // 8)  # one for each group of lanes
    seen = [n if a.left < 0 else min(n, a.left + 1) for n in lens]
    parts, most = 1, 0
    while parts < PARTS and (parts + 1) * len(lens) * a.units <= ctas and parts * keys_at_once < max(seen):
        parts += 1
    for keys in seen:
        turns, first = 0, 0
        while first < -(-(keys - 1) // parts):  # the new token's own key is beside its part
            turns, first = turns + 1, first + keys_at_once * a.unrolled
        most = max(most, turns)
    return most


def test_the_most_turns_of_ints_and_of_arrays_are_those_that_are_counted():
    rng, found = np.random.default_rng(11), set()
    for _ in range(200):
        group, kv_heads, rows = (int(rng.choice(sizes)) for sizes in ((1, 2, 3, 4, 5, 8), (1, 2, 4, 8), range(1, 9)))
        a = TailAttention(
            heads=group * kv_heads, kv_heads=kv_heads, head_dim=int(rng.choice([64, 128])), scale=0.1, blocks=8, page=8,
            columns=4, heads_first=True, left=int(rng.choice([-1, -1, 0, 1, 129, 1025, 4097])),
        )  # fmt: skip
        ctas = int(rng.integers(rows * a.units, 257)) if rows * a.units < 256 else rows * a.units
        bound = int(2 ** rng.uniform(0, 15))
        of_shape = kernel.most_turns(a, ctas, rows, bound)
        assert type(of_shape) is int and of_shape == turns_of(a, ctas, [bound] * rows)
        for none in (0, jnp.int32(0)):  # a batch of padding
            assert kernel.most_turns(a, ctas, none, none) == 0
        for live in {1, rows}:
            lens = [int(n) for n in rng.integers(1, bound + 1, live)]
            turns = kernel.most_turns(a, ctas, jnp.int32(live), jnp.int32(max(lens)))
            assert turns == turns_of(a, ctas, lens) == kernel.most_turns(a, ctas, live, max(lens)) <= of_shape
            found.add(int(turns))
    assert len(found) > 10  # 0 among them, if only the new token is seen


def test_the_most_turns_of_ints_are_an_int_inside_jit():
    a = TailAttention(heads=4, kv_heads=1, head_dim=64, scale=0.1, blocks=8, page=8, columns=4, heads_first=True)
    seen = []
    jax.eval_shape(lambda: seen.append(kernel.most_turns(a, 132, 4, 8193)))
    assert [(type(turns), turns) for turns in seen] == [(int, 8)]  # 16 parts of 512 cached keys


def unswizzled(stage):
    """[T8, 128] of a stage in pieces of 8 rows by 64 columns, whose 16-byte chunks are swizzled."""
    rows8, out = stage.shape[0], np.empty(stage.shape, stage.dtype)
    flat = stage.reshape(-1)
    for row in range(rows8):
        for chunk in range(16):
            piece = (row // 8 * 2 + chunk // 8) * 512
            at = piece + row % 8 * 64 + ((chunk % 8) ^ (row % 8)) * 8
            out[row, chunk * 8 : chunk * 8 + 8] = flat[at : at + 8]
    return out


@pytest.mark.parametrize(
    ("one_plus", "factor", "biased"), [(False, 1.0, 0), (True, 1.0, 0), (False, 0.22, 0), (False, 0.22, 1)]
)
def test_the_last_residual_is_added_up_where_it_is_multiplied(one_plus, factor, biased):
    rng, rows, live = np.random.default_rng(5), 3, 2
    a = TailAttention(
        heads=16, kv_heads=4, head_dim=64, scale=0.1, blocks=8, page=8, columns=4, heads_first=True, sums=2
    )
    cfg = choose(rows, 1024, 1024, 2048, (1024, 256, 256), 132, attention=a, one_plus=(False, one_plus),
                 factors=(3.0, factor))  # fmt: skip
    assert cfg is not None
    cfg = dataclasses.replace(cfg, adds_directly=True)
    assert not supports(cfg)
    width, splits, tile = cfg.hidden, cfg.products[2].splits, TokenTile(cfg, sums.LAST)
    x1, scale, bias = (rng.normal(size=shape).astype(BF16) for shape in ((8, width), width, width))
    parts = rng.normal(size=(splits * 8, width)).astype(np.float32)
    memory = Memory(
        256, parts=parts, x1=x1, scale=scale, bias=bias, x2=np.full((rows, width), np.nan, BF16),
        squares=np.full((8, 4), np.nan, np.float32), x_tile=np.full((cfg.token_stages, 8, 128), np.nan, BF16),
    )  # fmt: skip
    refs = types.SimpleNamespace(
        parts=(None, memory.parts), x1=memory.x1, x2=memory.x2, norms=(None, memory.scale), scratch=SHARED,
        squares=(None, memory.squares), x_tile=memory.x_tile, biases=((), (), (memory.bias,) * biased),
    )  # fmt: skip
    scalar, merged = np.int32, []
    blocks = cfg.products[sums.LAST].blocks
    with emulated(sums, memory.machine):
        for share in range(cfg.products[sums.LAST].splits):
            for column in range(share * blocks * 128, (share + 1) * blocks * 128, tile.each * 128):
                tile.zero(memory.x_tile, scalar(1))
                first = column == share * blocks * 128
                for token in range(live):
                    numbers = (scalar(n) for n in (1, column, token, 1, first))
                    sums.add_token(cfg, tile, refs, *numbers)
                merged += [unswizzled(memory.seen("x_tile")[(1 + n) % cfg.token_stages]) for n in range(tile.each)]
            sums.store_squares(cfg, refs, scalar(share), scalar(live))
    added = parts.reshape(splits, 8, width).astype(np.float64).sum(0)[:live].astype(BF16).astype(np.float64)
    added += biased * bias.astype(np.float64)[None]
    x2 = (x1[:live].astype(np.float64) + factor * added).astype(BF16).astype(np.float64)
    np.testing.assert_allclose(memory.seen("x2")[:live].astype(np.float64), x2, rtol=2**-7, atol=1e-6)
    assert np.isnan(memory.seen("x2")[live:].astype(np.float32)).all()
    seen = memory.seen("x2")[:live].astype(np.float64)
    np.testing.assert_allclose(memory.seen("squares")[:live].sum(1), (seen**2).sum(1), rtol=1e-5)
    tokens = np.concatenate(merged, axis=1).astype(np.float64)
    np.testing.assert_allclose(tokens[:live], seen * (scale.astype(np.float64) + one_plus), rtol=2**-8, atol=1e-6)
    assert (tokens[live:] == 0).all()
