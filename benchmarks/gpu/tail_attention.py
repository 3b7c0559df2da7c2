"""A layer of few decodes in one launch, attention included, on a Hopper card: numbers, then times.

    python -m benchmarks.gpu.tail_attention [--write | --out DIR] [--only TEXT] [--seconds 60]

`us` is one layer after its projections of q, k and v, in a CUDA graph of LAYERS of them in a loop, each with weights of
its own: rotation, write, attention and the rest of the layer in one launch; `apart_us` the same by four launches
(rotation and write, attention, merge, the rest). `err` is the largest relative error of a token against float64 in the
first layer, `apart_err` that of the four launches; `same`: three repeats gave equal bits.
"""

import dataclasses
import functools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.gpu import jobs, layer_tail
from jattn.engine.xla_options import CUDA_OPTIONS
from jattn.nn import Rope
from jattn.nn import layer_tail as op
from pallas_kernels.gpu import tail_attention_sm90 as kernel
from pallas_kernels.gpu.layer_tail_config import SHARES, TailAttention

LAYERS, PAGE, ROWS, TURNS = 4, 64, 4, 50
SHAPES = {  # hidden, query heads, kv heads, their dimensions, width of the MLP
    "llama_1b": (2048, 32, 8, 64, 8192),
    "llama_8b": (4096, 32, 8, 128, 14336),
}
CASES = (
    ("llama_1b", (600,)), ("llama_1b", (600, 30, 1024, 333)), ("llama_8b", (600,)), ("llama_1b", (1,)),
    ("llama_1b", (950,)), ("llama_1b", (4000,)), ("llama_1b", (8000,)), ("llama_8b", (8000, 2, 500)),
    ("llama_1b", (2000,) * 4), ("llama_1b", (16000,)),
)  # fmt: skip


@dataclasses.dataclass
class Problem:
    """Layers of a decode step of requests with `lens` tokens, the new one included."""

    attn: jattn.PagedAttention
    config: Any  # LayerTailConfig without attention
    attending: Any  # and with it
    weights: list
    caches: list
    meta: jattn.CommonAttentionMetadata
    rows: jax.Array
    x: jax.Array

    @classmethod
    def of(cls, shape: tuple, lens: tuple, sums: bool = True, directly: bool = True, **changes) -> "Problem":
        hidden, heads, kv_heads, dim, wide = shape
        blocks = sum(-(-n // PAGE) for n in lens) + 5
        table = np.random.default_rng(0).permutation(blocks).astype(np.int32)
        tables = np.zeros((len(lens), -(-max(lens) // PAGE)), np.int32)
        for r, n in enumerate(lens):
            tables[r, : -(-n // PAGE)], table = np.split(table, [-(-n // PAGE)])
        meta = jattn.CommonAttentionMetadata.from_lengths(
            [1] * len(lens), list(lens), tables, PAGE, num_tokens=ROWS, num_reqs=ROWS
        )
        spec = jattn.AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        cache_spec = jattn.KVCacheSpec(num_blocks=blocks, block_size=PAGE, num_kv_heads=kv_heads, head_dim=dim)
        sizes = hidden, heads * dim, wide, (heads * dim, kv_heads * dim, kv_heads * dim)
        weights = [layer_tail.layer(sizes, seed) for seed in range(LAYERS)]
        keys = iter(jax.random.split(jax.random.key(1), 2 + 2 * LAYERS))
        normal = lambda like: jax.random.normal(next(keys), like.shape, jnp.bfloat16)
        empty = [jattn.empty_cache(cache_spec) for _ in range(LAYERS)]
        caches = [dataclasses.replace(cache, k=normal(cache.k), v=normal(cache.v)) for cache in empty]
        rows, x = (jax.random.normal(next(keys), (ROWS, n), jnp.bfloat16) for n in (sum(sizes[3]), hidden))
        attention = TailAttention(
            heads=heads, kv_heads=kv_heads, head_dim=dim, scale=spec.scale, blocks=blocks, page=PAGE,
            columns=tables.shape[1], heads_first=cache_spec.physical_layout == "HND",
        )  # fmt: skip
        one = functools.partial(op.config_of, ROWS, rows.dtype, *weights[0], layer_tail.FORMULA)
        configs: Any = [one(), one(attention)]
        configs = [dataclasses.replace(config, **changes) for config in configs]
        if sums:
            shares = SHARES if directly else configs[1].shares
            attention = dataclasses.replace(attention, sums=configs[1].products[3].splits, shares=shares)
            configs[1] = dataclasses.replace(configs[1], attention=attention, adds_directly=directly)
        attn = jattn.PagedAttention(spec, cache_spec, "pallas_gpu")
        return cls(attn, *configs, weights, caches, meta, rows, x)

    @property
    def arguments(self) -> tuple:
        return self.weights, self.caches, self.rows, self.x

    def loop(self, together: bool, turns: int):
        """A function, compiled: (weights, caches, rows, x) -> (caches, rows, x) after `turns` times all layers, by one
        CUDA graph."""
        launch: Any = op.launch
        rope = Rope(dim=self.attn.spec.head_dim)
        config = self.attending if together else self.config

        def layer(cache, rows, x, weights, scales, counters, plan, angles):
            if together:
                table = jnp.asarray(self.meta.block_table)
                keys = angles.cos, angles.sin, table, plan, cache.k, cache.v
                x, rows, counters, (k, v) = launch(rows, x, weights, scales, counters, config, keys)
                return dataclasses.replace(cache, k=k, v=v), rows, x, counters
            spec = self.attn.spec
            edges = np.cumsum([spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim])
            q, k, v = (y.reshape(len(y), -1, spec.head_dim) for y in jnp.split(rows, edges, axis=1))
            cache, state = self.attn(q, k, v, cache, plan, None, angles)
            a = state.out.reshape(len(x), -1).astype(x.dtype)
            after: Any = op.layer_tail(layer_tail.FORMULA, config, a, x, weights, scales, counters)
            x, rows, counters = after
            return cache, rows, x, counters

        def all_layers(layers, carry):
            caches, rows, x, counters, turn = carry
            meta = jax.tree.map(jnp.asarray, self.meta)
            angles = rope.angles(meta.positions())
            if together:
                lengths = meta.query_start_loc, meta.seq_lens, meta.slot_mapping
                plan = kernel.plan(config.attention, config.ctas, *lengths)
            else:
                plan = self.attn.build(meta)
            after = []
            for cache, (weights, scales) in zip(caches, layers, strict=True):
                cache, rows, x, counters = layer(cache, rows, x, weights, scales, counters, plan, angles)
                after.append(cache)
            return after, rows, x, counters, turn + 1

        def run(layers, caches, rows, x):
            if together and config.attention.sums:  # of one CTA, and squares with which the factor is 1
                rows = jnp.pad(rows.astype(jnp.float32), ((0, config.attention.sums * config.rows8 - ROWS), (0, 0)))
                squares = jnp.full(
                    (config.rows8, SHARES), (1 - config.attention.eps) * config.hidden / config.attention.shares
                )
                rows = rows, squares
            start = caches, rows, x, op.new_counters(), jnp.int32(0)
            return jax.lax.while_loop(lambda carry: carry[-1] < turns, functools.partial(all_layers, layers), start)[:3]

        return jax.jit(run).lower(*self.arguments).compile(compiler_options=CUDA_OPTIONS)

    def exactly(self) -> np.ndarray:
        """float64 x after the first layer's attention and MLP, for the live tokens."""
        spec, found = self.attn.spec, []
        f64 = lambda y: np.asarray(y).astype(np.float64)
        k_pool, v_pool = (f64(pool) for pool in (self.caches[0].k, self.caches[0].v))
        for token, n in enumerate(np.asarray(self.meta.seq_lens)[: int(self.meta.num_reqs)]):
            heads = f64(self.rows)[token].reshape(-1, spec.head_dim)
            q, k, v = np.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads])
            half = np.arange(spec.head_dim // 2)
            turn = np.exp(1j * (n - 1) * 10000.0 ** (-2 * half / spec.head_dim))
            q, k = ((y[:, : len(half)] + 1j * y[:, len(half) :]) * turn for y in (q, k))
            q, k = (np.concatenate([y.real, y.imag], 1) for y in (q, k))
            pages = np.asarray(self.meta.block_table)[token]
            keys, values = (
                pool[pages].transpose(1, 0, 2, 3).reshape(spec.num_kv_heads, -1, spec.head_dim)[:, :n].copy()
                for pool in (k_pool, v_pool)
            )
            keys[:, n - 1], values[:, n - 1] = k, v
            of_head = np.arange(spec.num_heads) // spec.group_size
            scores = np.einsum("hd,hnd->hn", q, keys[of_head]) * spec.scale
            weights = np.exp(scores - scores.max(1, keepdims=True))
            out = np.einsum("hn,hnd->hd", weights, values[of_head]) / weights.sum(1)[:, None]
            found.append(out.reshape(-1))
        live = len(found)
        x, rows = layer_tail.exactly(np.stack(found), self.x[:live], *self.weights[0])
        return np.concatenate([x, rows], axis=1)

    def first_layer(self, together: bool):
        """(live rows of x and of the next projections; the pools) after one layer."""
        one = dataclasses.replace(self, weights=self.weights[:1], caches=self.caches[:1])
        caches, rows, x = one.loop(together, 1)(*one.arguments)
        if isinstance(rows, tuple):
            sums, squares = (np.asarray(y, np.float64) for y in rows)
            factor = 1 / np.sqrt(
                squares[:ROWS, : self.attending.attention.shares].sum(1) / self.attending.hidden + 1e-5
            )
            sums = sums.reshape(-1, self.attending.rows8, sums.shape[1])[:, :ROWS].sum(0)
            rows = jnp.asarray(sums * factor[:, None], jnp.bfloat16)
        return jnp.concatenate([x, rows], axis=1)[: int(self.meta.num_reqs)], (caches[0].k, caches[0].v)


def _micros(compiled, *args) -> float:
    """Of a layer, by the clock: the best of three."""
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*args))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:]) / (TURNS * LAYERS) * 1e6


def measure(shape: tuple, lens: tuple, **changes) -> dict:
    problem = Problem.of(shape, lens, **changes)
    wanted, pools = problem.exactly(), {}
    errors = {}
    for name, together in (("err", True), ("apart_err", False)):
        found, pools[name] = problem.first_layer(together)
        error = np.linalg.norm(np.asarray(found, np.float64) - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
        errors[name] = float(np.nan_to_num(error, nan=np.inf).max())
    written = all(bool(jnp.array_equal(y, z)) for y, z in zip(pools["err"], pools["apart_err"], strict=True))
    us, ends = {}, []
    for name, together in (("us", True), ("apart_us", False)):
        loop, args = problem.loop(together, TURNS), problem.arguments
        us[name] = _micros(loop, *args)
        if together:
            ends = [loop(*args)[2][: len(lens)] for _ in range(3)]
    same = all(bool(jnp.array_equal(ends[0], other)) for other in ends[1:])
    numbers = us | errors
    print(
        "     ", {n: float(f"{x:.4g}") for n, x in numbers.items()}, f"pools equal {written}, same {same}", flush=True
    )
    ok = same and written and errors["err"] < 1.5 * errors["apart_err"] + 1e-3
    return numbers | dict(same=same, ok=ok)


def only_time(shape: tuple, lens: tuple, **changes) -> dict:
    """The time of another way to divide the work; its numbers are checked by repeats only."""
    problem = Problem.of(shape, lens, **changes)
    loop = problem.loop(True, TURNS)
    us = _micros(loop, *problem.arguments)
    ends = [loop(*problem.arguments)[2][: len(lens)] for _ in range(2)]
    print("     ", dict(us=round(us, 2)), flush=True)
    return dict(us=us, ok=bool(jnp.array_equal(*ends)))


def jobs_of():
    cases = [(name, lens, measure, {}) for name, lens in CASES]
    changes = dict(directly=False), dict(sums=False, directly=False), dict(in_flight=2), dict(in_flight=4)
    cases[2:2] = [("llama_1b", (600,), only_time, change) for change in changes]
    for name, lens, work, change in cases:
        more = "".join(f" {key} {value}" for key, value in change.items())
        names = dict(part="tail_attention", case=f"{name}_{'_'.join(map(str, lens))}{more}")
        yield names, functools.partial(work, SHAPES[name], lens, **change)


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    return jobs.main("tail_attention", __doc__, jobs_of, 60, argv)


if __name__ == "__main__":
    sys.exit(main())
