"""Attention layers on one device and on several: tensor_parallel and decode_context_parallel of jattn.parallel.

    python -m benchmarks.gpu.context_parallel [--ranks 2] [--seconds 40] [--write | --out DIR] [--small]

dcp_1x128k   one request of 131072 keys, its keys distributed (decode_context_parallel)
dcp_16x16k   16 requests of 16384 keys, the same
tp_64x4k     64 requests of 4096 keys, the heads distributed (tensor_parallel)
tp_8x1k      8 requests of 1024 keys: the call's host time

32 query heads, 8 kv heads, head dim 128, bf16, pages of 16 (of each rank). `layer_us` is the time of a layer in one
program of LAYERS of them, merge included, each waiting for the one before; `to_one_device` is that over one device's.
`call_us` is the time of jitted calls of one layer sent one after the other, `host_us` until such a call returns;
`floor_us` is that of a program of the same arguments and results that adds 1 to the queries, JAX's own share. The cache
is donated, and the batch placed once. `differ` is the largest difference from one device's output, which other
benchmarks compare with float64.
"""

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jattn
from benchmarks import records
from jattn.engine.xla_options import COMMAND_BUFFERS, CUDA_OPTIONS

CASES = {  # requests, keys of each
    "dcp_1x128k": (1, 131072),
    "tp_8x1k": (8, 1024),
    "dcp_16x16k": (16, 16384),
    "tp_64x4k": (64, 4096),
}
LAYERS, PAGE, CALLS = 8, 16, 50
HEADS, KV_HEADS, DIM = 32, 8, 128


def batch_of(requests: int, keys: int, page: int) -> tuple[jattn.CommonAttentionMetadata, int]:
    """(one new token of each request, the number of blocks)"""
    blocks = -(-keys // page)
    table = np.random.default_rng(0).permutation(requests * blocks).astype(np.int32).reshape(requests, blocks)
    meta = jattn.CommonAttentionMetadata.from_lengths([1] * requests, [keys] * requests, table, page)
    return meta, requests * blocks


class Layer:
    """One layer of a case; ranks 1: on one device."""

    def __init__(self, case: str, ranks: int, small: bool):
        requests, keys = CASES[case]
        keys, dim = (keys // 64, 16) if small else (keys, DIM)
        dtype = jnp.float32 if small else jnp.bfloat16
        shares_keys = case.startswith("dcp")
        mesh = jax.make_mesh((ranks,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:ranks])
        spec = jattn.AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=dim)
        meta, blocks = batch_of(requests, keys, PAGE * (ranks if shares_keys else 1))
        cache_spec = jattn.KVCacheSpec(
            num_blocks=blocks * (ranks if shares_keys else 1), block_size=PAGE, num_kv_heads=KV_HEADS, head_dim=dim,
            dtype=jnp.dtype(dtype).name,
        )  # fmt: skip
        pools = PartitionSpec("x") if shares_keys else jattn.parallel.head_partition(cache_spec, "x")
        heads = PartitionSpec() if shares_keys else PartitionSpec(None, "x")
        place = lambda where: NamedSharding(mesh, where)
        if ranks == 1:
            attn = jattn.PagedAttention(spec, cache_spec, dtype=dtype)
            self.step = lambda q, k, v, cache, meta: attn(q, k, v, cache, attn.build(meta))
        else:
            parallel = jattn.parallel.decode_context_parallel if shares_keys else jattn.parallel.tensor_parallel
            self.step = parallel(spec, cache_spec, mesh, "x", dtype=dtype)
        self.meta = jax.device_put(meta, place(PartitionSpec()))
        draw = lambda i, heads: np.random.default_rng(i).normal(size=(requests, heads, dim)).astype(np.float32)
        self.tokens = tuple(
            jax.device_put(jnp.asarray(draw(i, n), dtype), place(heads))
            for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS))
        )
        empty = jax.jit(lambda: jattn.empty_cache(cache_spec), out_shardings=place(pools))
        self.cache = _filled(empty(), requests, keys, meta, PAGE, ranks if shares_keys else 1, place(pools))

    def compiled(self, layers: int, options: dict):
        """The program of so many layers, each with the outputs of the one before in its queries."""

        @functools.partial(jax.jit, donate_argnums=3, compiler_options=options or None)
        def program(q, k, v, cache, meta):
            for _ in range(layers):
                cache, state = self.step(q, k, v, cache, meta)
                q = (q + state.out * 0.01).astype(q.dtype)
            return cache, state.out

        return program.lower(*self.tokens, self.cache, self.meta).compile()

    def floor(self, options: dict):
        """A program with the arguments and results of one layer that computes next to nothing."""
        nothing = lambda q, k, v, cache, meta: (cache, q + 1)
        jitted = jax.jit(nothing, donate_argnums=3, keep_unused=True, compiler_options=options or None)
        return jitted.lower(*self.tokens, self.cache, self.meta).compile()

    def call(self, program) -> jax.Array:
        self.cache, out = program(*self.tokens, self.cache, self.meta)
        return out


def _filled(cache, requests: int, keys: int, meta, page: int, ranks: int, place):
    """The cache with the same random keys and values of every request's positions for any number of ranks."""
    spec = cache.spec
    positions = jnp.arange(requests * keys)
    request, at = positions // keys, positions % keys
    table = jnp.asarray(meta.block_table)
    whole = page * ranks  # tokens of a block id
    block, inside = table[request, at // whole], at % whole
    rank, slot = inside % ranks, inside // ranks  # one key on each rank in turn
    place_of = (rank * (spec.num_blocks // ranks) + block) * page + slot

    @functools.partial(jax.jit, out_shardings=place)
    def write(key, place_of):
        dims = (requests * keys, spec.num_kv_heads, spec.head_dim)
        k, v = (jax.random.normal(one, dims, spec.dtype) for one in jax.random.split(key))
        rows = lambda x: jnp.zeros((spec.num_blocks * page, *x.shape[1:]), x.dtype).at[place_of].set(x)
        by_page = lambda x: rows(x).reshape(spec.num_blocks, page, *x.shape[1:])
        order = (lambda x: by_page(x).swapaxes(1, 2)) if spec.physical_layout == "HND" else by_page
        return order(k), order(v)

    k, v = write(jax.random.key(1), place_of.astype(jnp.int32))
    return jax.tree.unflatten(jax.tree.structure(cache), [k, v])


def wall_us(layer: Layer, program, calls: int) -> tuple[float, float]:
    """(microseconds of a call, of many sent one after the other; until one returns)"""
    for _ in range(3):
        jax.block_until_ready(layer.call(program))
    begin, returned = time.perf_counter(), []
    for _ in range(calls):
        sent = time.perf_counter()
        out = layer.call(program)
        returned.append(time.perf_counter() - sent)
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / calls * 1e6, float(np.median(returned)) * 1e6


def measure(case: str, ranks: int, small: bool, variant: str) -> tuple[dict, np.ndarray]:
    """(the figures, the output of the first layer)"""
    options = {} if small else dict(CUDA_OPTIONS)
    if variant == "graph":
        options["xla_gpu_enable_command_buffer"] = COMMAND_BUFFERS + ",COLLECTIVES"
    layer = Layer(case, ranks, small)
    one, many = layer.compiled(1, options), layer.compiled(LAYERS, options)
    out = np.asarray(layer.call(one).astype(jnp.float32))
    call, host = wall_us(layer, one, CALLS)
    _, floor = wall_us(layer, layer.floor(options), CALLS)
    each = min(wall_us(layer, many, 10)[0] for _ in range(3)) / LAYERS
    figures = dict(layer_us=each, call_us=call, host_us=host, floor_us=floor, host_to_floor=host / floor)
    return figures, out


def main(argv: list[str] | None = None) -> None:
    """Print and keep a row for each case and number of devices."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.context_parallel", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--small", action="store_true", help="small shapes, for a CPU")
    parser.add_argument("--ranks", type=int, default=2, help="devices beside one (default: 2)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--variants", nargs="+", choices=("default", "graph"), default=["default"],
                        help="graph: with collectives in CUDA graphs")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600, help="nothing begins after them (default: 600)")
    records.add_options(parser)
    args, began = parser.parse_args(argv), time.perf_counter()
    for case in args.cases:
        alone = wanted = None
        variants = args.variants if case.startswith("dcp") else ["default"]
        for ranks, variant in ((1, "default"), *((args.ranks, name) for name in variants)):
            if time.perf_counter() - began > args.seconds:
                print(f"skipped for time: {case}, {ranks} devices", flush=True)
                continue
            row, out = measure(case, ranks, args.small, variant)
            name = f"{ranks} devices" if variant == "default" else f"{ranks} devices, {variant}"
            row = dict(case=case, variant=name, ranks=ranks) | row
            if ranks == 1:
                alone, wanted = row, out
            elif alone is not None and wanted is not None:
                row["to_one_device"] = row["layer_us"] / alone["layer_us"]
                row["host_to_one_device"] = row["host_us"] / alone["host_us"]
                row["floor_to_one_device"] = row["floor_us"] / alone["floor_us"]
                row["differ"] = float(np.abs(out - wanted).max())
            print(json.dumps(row), flush=True)
            records.write([row | records.provenance()], "context_parallel", records.folder_of(args))


if __name__ == "__main__":
    main()
