"""The warp-level products of narrow tiles: every lane and every fragment on the PTX model, against numpy."""

import math
import types

import numpy as np
import pytest

from pallas_kernels.gpu import warp_mma_sm80 as warps
from tests.kernels.gpu.simt import EIGHT, HALF, Machine, emulated

LOG2E = math.log2(math.e)
BLOCKS, GROUP, HEADS, TOKENS = 2, 3, 6, 9


def place_tile(memory, base, tile):
    """Writes [rows, D] the way TMA swizzles it: pieces of 8 rows, 16-byte chunks xored with the 128-byte line."""
    rows, width = tile.shape[0], tile.shape[1] * tile.dtype.itemsize
    swizzle = math.gcd(width, 128)
    raw = np.ascontiguousarray(tile).view(np.uint8).reshape(rows, width)
    for r in range(rows):
        for c in range(0, width, 16):
            piece = (r // 8) * (width // swizzle) + c // swizzle
            inside = (r % 8) * swizzle + c % swizzle
            inside ^= (inside >> 7 & swizzle // 16 - 1) << 4
            at = base + piece * 8 * swizzle + inside
            memory[at : at + 16] = raw[r, c : c + 16]


CASES = [
    # warpgroups, D, V, source, query type, rows8, is a part, sinks,
    # operands of a weight times its value's scale (0: no scale)
    (2, 128, 128, "float8_e4m3fn", "bf16", 1, False, False, 0),
    (2, 64, 32, "float8_e5m2", "f16", 2, False, True, 0),
    (2, 96, 96, "int8", "bf16", 1, True, True, 0),
    (2, 64, 64, "float8_e4m3fn", "bf16", 2, False, True, 1),
    (2, 64, 64, "int8", "f16", 1, True, True, 2),
    (1, 128, 128, "bfloat16", "bf16", 1, False, True, 0),
    (1, 80, 48, "float16", "f16", 2, True, True, 0),
    (1, 16, 16, "bfloat16", "bf16", 2, False, False, 0),
    (1, 64, 64, "int8", "bf16", 1, False, True, 1),
    (1, 160, 32, "int8", "f16", 2, False, True, 2),
]


@pytest.mark.parametrize(("wgs", "dim", "v_dim", "source", "half", "rows8", "is_part", "has_sinks", "scaled"), CASES)
def test_products_softmax_and_join_are_attention(
    wgs, dim, v_dim, source, half, rows8, is_part, has_sinks, scaled
):  # fmt: skip
    warpgroup, threads, BLOCK = np.arange(128 * wgs) // 128, 128 * wgs, 64 * wgs
    rng = np.random.default_rng(dim)
    rows, seen = 8 * rows8 - 2, BLOCK * BLOCKS - 50
    q = np.zeros((64, dim), HALF[half])
    q[:rows] = rng.normal(size=(rows, dim))
    whole, decoded = {"int8": 30}.get(source, 1), source in EIGHT
    kv_type = EIGHT[source] if decoded else HALF[half]
    draw = lambda d: (rng.normal(size=(BLOCK * BLOCKS, d)) * whole).astype(kv_type)
    k, v = draw(dim), draw(v_dim)
    tiny = 10.0 ** -rng.uniform(6, 8, BLOCK * BLOCKS).astype(np.float32)  # of values: below what float16 can hold
    scale, v_scale, sinks = dim**-0.5 / whole, 1e7 if scaled else 0.5, 1.5 * np.arange(HEADS)
    # memory: queries (later the scratch), keys, values, stats, then the global arrays
    at, size = {}, 0
    slot, tok0, head0, row0 = 1, 2, 3, 4
    for name, nbytes in dict(
        q=256 * dim, packed=TOKENS * HEADS * dim * 2, k=BLOCK * dim * k.itemsize, v=BLOCK * v_dim * v.itemsize,
        stats=2048, heads=8 * HEADS, out=TOKENS * HEADS * v_dim * 2,
        lse=TOKENS * HEADS * 4, part=2 * 128 * v_dim * 4, part_lse=2 * 128 * 4,
    ).items():  # fmt: skip
        at[name], size = size, size + -(-nbytes // 1024) * 1024
    machine = Machine(threads, size)
    memory = machine.memory
    memory[at["out"] :] = 0xEE  # must stay where nothing is written
    memory[at["heads"] : at["heads"] + 8 * HEADS] = (
        np.stack([sinks * 0, sinks], 1).astype(np.float32).view(np.uint8).ravel()
    )
    place_tile(memory, at["q"], q)
    row = np.arange(rows) + row0
    token, head = tok0 + row // GROUP, head0 + row % GROUP
    packed = np.full((TOKENS, HEADS, dim), np.nan, q.dtype)
    packed[token, head] = q[:rows]
    memory[at["packed"] : at["packed"] + packed.nbytes] = packed.reshape(-1).view(np.uint8)
    name = {"bf16": "bfloat16", "f16": "float16"}[half]
    with emulated(warps, machine):
        kind = dict(rows8=rows8, dim=dim, dtype=name)
        if wgs == 2:
            queries = warps.read_queries(at["q"], **kind)
        else:
            kind |= dict(group=GROUP, heads=HEADS, decoded=decoded)
            queries = warps.load_queries(at["packed"], *(np.int32(n) for n in (tok0, head0, row0, rows)), **kind)
        stored = wgs == 1 and rows8 == 2
        if stored:
            warps.put_queries(at["q"], queries, dim=dim, dtype=name)
            queries = at["q"]
        state = warps.start_state(rows8=rows8, dim=v_dim)
        for b in range(BLOCKS):
            place_tile(memory, at["k"], k[b * BLOCK :][:BLOCK])
            place_tile(memory, at["v"], v[b * BLOCK :][:BLOCK])
            mine = 64 * warpgroup.astype(np.int32)
            kind = dict(rows8=rows8, dim=dim, source=source, target=name, stored=stored)
            x = warps.keys_times_queries(at["k"], queries, mine, **kind)
            key = b * BLOCK + mine + machine.lane % 128 // 32 * 16 + machine.lane % 32 // 4
            quads = [
                [np.where(key + 8 * (i // 2) < seen, y, -np.inf).astype(np.float32) for i, y in enumerate(quad)]
                for quad in warps.quads_of(x)
            ]
            x = warps.fragment_of_quads(quads)
            factor = np.full(threads, scale * LOG2E, np.float32)
            kind = dict(
                rows8=rows8, dim=v_dim, source=source, target="bfloat16" if scaled else "float16" if decoded else name
            )
            kind |= dict(parts=max(scaled, 1), hidden=wgs == 1)  # of the warp-level kernel's one warpgroup
            kind |= dict(shuffles=wgs > 1 or rows8 == 2, apart=stored)
            own = types.SimpleNamespace(registers=np.empty(2, object))
            own.registers[:] = [(tiny[key + 8 * i],) for i in range(2)]
            state = warps.softmax_times_values(at["v"], x, factor, *state, mine, own if scaled else None, **kind)
        kind = dict(dim=v_dim, q_dim=dim, q_dtype=name, warps=4 * wgs)
        scratch = at["q"] if wgs == 2 else at["k"]
        refs = types.SimpleNamespace(
            **{n: np.full(threads, at[n], np.int64) for n in ("out", "lse", "part", "part_lse")},
            per_head=np.full(threads, at["heads"], np.int64),
        )
        number = lambda n: np.full(threads, n, np.int32)
        for n in range(rows8):
            own = dict(rows8=rows8, decoded=decoded, shuffles=wgs > 1 or rows8 == 2)
            warps.put_state(scratch, at["stats"], *state, warpgroup, n, **own, **kind)
            part, where = (
                (number(is_part), number(slot)),
                (*map(number, (tok0, head0, row0, rows)), warpgroup.astype(np.int32)),
            )
            for line in range(2 // wgs):
                warps.merge_and_store(
                    scratch, at["stats"], refs, part, np.full(threads, v_scale, np.float32), 1, where,
                    n=n, line=line, group=GROUP, heads=HEADS, has_sinks=has_sinks, out_dtype=name, **kind,
                )  # fmt: skip
    logits = (q[:rows].astype(float) @ k[:seen].astype(float).T) * scale
    weights = np.exp(logits)
    total = weights.sum(1) + (np.exp(sinks[head]) if has_sinks and not is_part else 0)
    values = v[:seen] * (tiny[:seen, None].astype(float) if scaled else 1.0)
    want, lse = weights @ values / total[:, None] * v_scale, np.log(total)
    read = lambda n, shape, kind: memory[at[n] :].view(kind)[: math.prod(shape)].reshape(shape)
    out = read("out", (TOKENS, HEADS, v_dim), HALF[half])
    got_lse = read("lse", (TOKENS, HEADS), np.float32)
    untouched = np.ones((TOKENS, HEADS), bool)
    if is_part:
        np.testing.assert_allclose(
            read("part", (2, 128, v_dim), np.float32)[slot, :rows],
            want,
            atol=(2e-5 if scaled == 2 else 2e-3) * abs(want).max(),
        )
        np.testing.assert_allclose(read("part_lse", (2, 128), np.float32)[slot, :rows], lse * LOG2E, atol=1e-4)
    else:
        np.testing.assert_allclose(out[token, head].astype(float), want, atol=6e-3 * abs(want).max())
        np.testing.assert_allclose(got_lse[token, head], lse, atol=1e-4)
        untouched[token, head] = False
    assert (got_lse.view(np.uint32)[untouched] == 0xEEEEEEEE).all()
    assert (np.ascontiguousarray(out).view(np.uint16)[untouched] == 0xEEEE).all()
