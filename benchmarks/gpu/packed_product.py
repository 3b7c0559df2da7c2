"""Products with packed matrices on a Hopper card: numbers against float64, then times beside bfloat16's product.

    python -m benchmarks.gpu.packed_product [--write | --out DIR] [--only TEXT] [--seconds 90]

`us` is one product with matrices that the L2 cache does not hold, `bf16_us` XLA's product with the same matrices in
bfloat16, `speed` their ratio, and `share` the time to read the packed bytes at 4.68 TB/s, the most that this memory
gives, over `us`. `err` is the largest error over the spread of the results, of sampled columns. `tune` rows time
the chosen way, the same with a slot more or less, and the best by `cost` of other divisions of the work.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.gpu import cupti, jobs
from jattn import device
from jattn.ops import product as product_ops
from jattn.ops.experts import expert_product
from jattn.ops.product import product, products
from jattn.ops.quantised import FORMATS, PLACES, QuantisedArray
from pallas_kernels.gpu import packed_product_config, packed_wgmma_config
from pallas_kernels.gpu.packed_product_sm90 import packed_product
from pallas_kernels.gpu.packed_wgmma_config import PackedWgmmaConfig
from pallas_kernels.gpu.packed_wgmma_sm90 import packed_product_wgmma

READ_RATE = 4.68e6  # bytes a microsecond
COLD_BYTES = 200e6  # of the matrices of a call: four times the L2 cache
SHAPES = {  # inputs, outputs of each matrix
    "8b_qkv": (4096, (4096, 1024, 1024)),
    "8b_gate_up": (4096, (14336, 14336)),
    "8b_down": (14336, (4096,)),
    "8b_o": (4096, (4096,)),
    "1b_gate_up": (2048, (8192, 8192)),
    "1b_o": (2048, (2048,)),
}
FORMS = {  # format, group, dtype of the scales, zero points, dtype of x
    "int4_g64": ("int4", 64, "bfloat16", False, "bfloat16"),
    "awq_g128": ("int4", 128, "float16", True, "bfloat16"),
    "int4_g32": ("int4", 32, "bfloat16", False, "bfloat16"),
    "mxfp4": ("fp4", 32, "bfloat16", False, "bfloat16"),
    "nvfp4": ("fp4", 16, "float8_e4m3fn", False, "bfloat16"),
    "int8": ("int8", None, "float32", False, "bfloat16"),
    "fp8_g128": ("fp8", 128, "float32", False, "bfloat16"),
    "awq_g128_float16": ("int4", 128, "float16", True, "float16"),
    "mxfp4_float16": ("fp4", 32, "bfloat16", False, "float16"),
    "nvfp4_float16": ("fp4", 16, "float8_e4m3fn", False, "float16"),
    "int8_float16": ("int8", None, "float32", False, "float16"),
    "fp8_g128_float16": ("fp8", 128, "float32", False, "float16"),
}


def draw(form: str, inner: int, width: int, seed: int) -> QuantisedArray:
    """Random codes. Scales of e4m3 have a size for each output, with subnormal ones too, and its factor undoes that."""
    format, group, scales, has_zeros, dtype = FORMS[form]
    group, keys = group or inner, jax.random.split(jax.random.key(seed), 4)
    if FORMATS[format].bits == 4:
        values = jax.random.bits(keys[0], (inner // 8, width), jnp.uint32)
    else:
        values = jax.random.bits(keys[0], (inner, width), jnp.uint8)
        values = jnp.where(values & 0x7F == 0x7F, 0, values).astype(jnp.uint8) if format == "fp8" else values
        values = values.view(jnp.int8) if format == "int8" else values
    of_groups = jax.random.uniform(keys[1], (inner // group, width), minval=0.5, maxval=1.5) / FORMATS[format].largest
    zeros, factor = jax.random.randint(keys[2], of_groups.shape, -8, 8, jnp.int8) if has_zeros else None, None
    if scales == "float8_e4m3fn":
        size = 2.0 ** jax.random.randint(keys[3], (1, width), -7, 11)  # the largest scale is 1.5 / 6 * 2 ** 10 = 256
        of_groups, factor = of_groups * size, 1 / size
    return QuantisedArray(
        values=values, scales=of_groups.astype(scales), zero_points=zeros, factor=factor, format=format,
        dtype=jnp.dtype(dtype),
    )  # fmt: skip


def numbers(weight: QuantisedArray, columns: np.ndarray) -> np.ndarray:
    """float64 [inputs, columns] from the definition of the codes."""
    own = lambda x: np.asarray(x[:, columns])
    values, format = own(weight.values), weight.format
    if FORMATS[format].bits == 4:
        nibbles = values[:, None, :] >> np.array([4 * p for p in PLACES], np.uint32)[None, :, None] & 15
        exact = np.array(FORMATS[format].numbers)[nibbles.reshape(-1, len(columns))]
    else:
        exact = values.astype(np.float64) if format == "int8" else values.view(ml_dtypes.float8_e4m3fn).astype(float)
    spread = lambda x: np.repeat(own(x).astype(np.float64), weight.group_size, axis=0)
    exact = exact if weight.zero_points is None else exact - spread(weight.zero_points)
    exact = exact * spread(weight.scales)
    return exact if weight.factor is None else exact * own(weight.factor).astype(np.float64)


@functools.partial(jax.jit, static_argnames="config")
def ours(x, groups, config=None):
    """Each group of matrices in one launch: its results side by side, as the launch writes them and models use them."""
    if config is None:
        return [jnp.concatenate(products(x, group, dtype=x.dtype), axis=1) for group in groups]
    flat = lambda group: tuple(w.arrays for w in group)
    kernel = packed_product_wgmma if isinstance(config, PackedWgmmaConfig) else packed_product
    return [jnp.concatenate(kernel(x, flat(group), config), axis=1) for group in groups]


@jax.jit
def theirs(x, groups):
    return [[product(x, w, dtype=x.dtype) for w in group] for group in groups]


def error(y: jax.Array, x: jax.Array, group: tuple) -> float:
    """The largest error over the spread, of some columns of each matrix; infinite if anything is NaN or infinite."""
    worst, rng = 0.0, np.random.default_rng(0)
    each = jnp.split(y, np.cumsum([weight.shape[1] for weight in group])[:-1], axis=1)
    for found, weight in zip(each, group, strict=True):
        columns = np.unique(np.r_[0, weight.shape[1] - 1, rng.integers(0, weight.shape[1], 250)])
        exact = np.asarray(x, np.float64) @ numbers(weight, columns)
        off = np.abs(np.asarray(found[:, columns], np.float64) - exact).max() / exact.std()
        worst = max(worst, float(off) if np.isfinite(np.asarray(found, np.float32)).all() else np.inf)
    return worst


def inputs(shape: str, form: str, rows: int) -> tuple:
    """(x, groups of matrices, bytes of a group)"""
    inner, widths = SHAPES[shape]
    one = tuple(draw(form, inner, width, seed) for seed, width in enumerate(widths))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(one))
    more = max(2, int(-(-COLD_BYTES // size)))
    groups = [one, *(jax.tree.map(jnp.copy, one) for _ in range(more - 1))]
    return jax.random.normal(jax.random.key(9), (rows, inner), FORMS[form][-1]), groups, size


@functools.cache
def bf16_micros(shape: str, rows: int) -> float:
    """Of XLA's product with these matrices in bfloat16."""
    inner, widths = SHAPES[shape]
    one = tuple(jax.random.normal(jax.random.key(i), (inner, w), jnp.bfloat16) for i, w in enumerate(widths))
    count = max(2, int(-(-COLD_BYTES // sum(w.nbytes for w in one))))
    groups = [one, *(jax.tree.map(jnp.copy, one) for _ in range(count - 1))]
    x = jax.random.normal(jax.random.key(9), (rows, inner), jnp.bfloat16)
    return cupti.micros(theirs, x, groups)[0] / count


def measure(shape: str, form: str, rows: int) -> dict:
    x, groups, size = inputs(shape, form, rows)
    kernel = product_ops._choose(x, groups[0], x.dtype).name
    given = product_ops._gpu_config(x, groups[0], x.dtype)
    y = ours(x, groups)
    err = error(y[0], x, groups[0])
    again = ours(x, groups)
    same = bool(jnp.array_equal(y[0], again[0]))
    us, parts = cupti.micros(ours, x, groups)
    us, bf16 = us / len(groups), bf16_micros(shape, rows)
    limit = 2.0**-8 * 5  # bfloat16 of a result five times the spread
    figures = dict(us=us, bf16_us=bf16, speed=bf16 / us, share=size / READ_RATE / us, err=err)
    print("     ", {name: float(f"{value:.4g}") for name, value in figures.items()}, kernel, list(parts), flush=True)
    way = None if given is None else name_of(given)
    return figures | dict(same=same, implementation=kernel, way=way, ok=same and err < limit and way is not None)


def name_of(way: product_ops.GpuConfig) -> str:
    """Its blocks of a step, slots, warps side by side and along, and CTAs of a cluster; by wgmma: see
    PackedWgmmaConfig."""
    if isinstance(way, PackedWgmmaConfig):
        return f"wgmma/{way.warpgroups}/{way.splits}/{way.depth}/{way.stages}"
    return "/".join(map(str, (way.unroll, way.ring, way.across, way.along, way.splits)))


def tune(shape: str, form: str, rows: int) -> dict:
    """Ways to share the work; prints the microseconds of each, of `choose`'s, and of the product in bfloat16."""
    x, groups, size = inputs(shape, form, rows)
    given = product_ops._gpu_config(x, groups[0], x.dtype)
    assert given is not None
    found: dict[str, float] = {}
    for way in dict.fromkeys(ways(given)):
        y = ours(x, groups, way)
        us = cupti.micros(ours, x, groups, way, iterations=5)[0] / len(groups)
        found[name_of(way)] = us if error(y[0], x, groups[0]) < 0.02 else np.inf
    bf16 = bf16_micros(shape, rows)
    best = sorted(found.items(), key=lambda item: item[1])
    print(f"      bf16 {bf16:.1f} chosen {name_of(given)} |", *(f"{way}={us:.2f}" for way, us in best), flush=True)
    figures = dict(us=best[0][1], bf16_us=bf16, share=size / READ_RATE / best[0][1], ways=found)
    return figures | dict(ok=bool(np.isfinite(list(found.values())).all()))


EXPERTS, TOP = 32, 4


def measure_experts(inner: int, width: int, form: str, tokens: int) -> dict:
    """Rows of random experts, beside XLA's ragged_dot with the same weights in bfloat16."""
    each = [draw(form, inner, width, e) for e in range(EXPERTS)]
    weight = jax.tree.map(lambda *x: jnp.stack(x), *each)
    chosen = np.sort(np.concatenate([np.random.default_rng(i).permutation(EXPERTS)[:TOP] for i in range(tokens)]))
    sizes = jnp.asarray(np.bincount(chosen, minlength=EXPERTS), jnp.int32)
    x = jax.random.normal(jax.random.key(9), (len(chosen), inner), jnp.bfloat16)
    run = jax.jit(expert_product)
    y, columns = np.asarray(run(x, weight, sizes), np.float64), np.unique(np.r_[0, width - 1, 7:width:37])
    rows = [(np.asarray(x[i], np.float64) @ numbers(each[e], columns)) for i, e in enumerate(chosen)]
    err = np.abs(y[:, columns] - np.stack(rows)).max() / np.std(rows)
    us, parts = cupti.micros(run, x, weight, sizes)
    peer = jnp.zeros((EXPERTS, inner, width), jnp.bfloat16)
    bf16 = cupti.micros(jax.jit(jax.lax.ragged_dot), x, peer, sizes)[0]
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(each[0])) * int((sizes > 0).sum())
    figures = dict(us=us, bf16_us=bf16, speed=bf16 / us, share=read / READ_RATE / us, err=float(err))
    print("     ", {name: float(f"{value:.4g}") for name, value in figures.items()}, parts, flush=True)
    return figures | dict(ok=bool(err < 2.0**-8 * 5))


def ways(given: product_ops.GpuConfig):
    """The chosen one, with a slot more or less, too, and the best of other divisions by `cost`."""
    processors = device.processors() or 132
    yield given
    if isinstance(given, PackedWgmmaConfig):
        cost = functools.partial(packed_wgmma_config.cost, processors=processors)
        every = packed_wgmma_config.ways(given)
        yield from [way for way in sorted(every, key=cost) if way != given][:7]
        return
    rings = (dataclasses.replace(given, ring=given.ring + more) for more in (-1, 1))
    yield from (way for way in rings if not packed_product_config.supports(way))
    best: dict[tuple, packed_product_config.PackedProductConfig] = {}
    cost_of = lambda way: packed_product_config.cost(way, processors, way.tiles)
    for way in sorted(packed_product_config.ways_of(given, processors), key=cost_of):
        best.setdefault((way.across, way.along), way)
    yield from [way for way in best.values() if way != given][:7]


def jobs_of():
    prefix = {"tune": "tune_"}  # one row is kept of each case
    label = lambda part, *of: prefix.get(part, "") + "_".join(map(str, of))
    named = lambda part, *of: dict(part=part, case=label(part, *of), form=of[-2], rows=of[-1])
    eight = list(SHAPES)[:4]
    measured = [(shape, "int4_g64", rows) for rows in (1, 16, 4) for shape in eight]
    tuned = [(shape, "int4_g64", rows) for rows in (64, 16, 1) for shape in eight]
    of_bf16, of_float16 = ([form for form in FORMS if form.endswith("float16") == is_half] for is_half in range(2))
    more = [("8b_gate_up", form, rows) for rows in (1, 16) for form in of_bf16[1:]]
    more += [(shape, "int4_g64", rows) for rows in (1, 16) for shape in list(SHAPES)[4:]]
    more += [(shape, form, rows) for rows in (1, 64, 8) for shape in ("8b_gate_up", "8b_down") for form in of_float16]
    more += [("8b_down", form, rows) for rows in (8, 100) for form in of_bf16] + [("8b_gate_up", "int4_g64", 8)]
    more += [(shape, "int4_g64", rows) for rows in (32, 64, 96, 128, 256) for shape in eight]
    more += [(shape, form, rows) for form in ("fp8_g128", "int8") for rows in (1, 16, 64) for shape in eight]
    case = lambda part, work, of: (named(part, *of), functools.partial(work, *of))
    yield from (case("packed_product", measure, of) for of in measured)
    yield from (case("tune", tune, of) for of in tuned)
    yield from (case("packed_product", measure, of) for of in more[:5])
    for of in ((2880, 2880, form, tokens) for form in ("mxfp4", "nvfp4") for tokens in (1, 8)):
        names = dict(zip(("inner", "width", "form", "tokens"), of, strict=True))
        yield dict(part="experts", case=label("experts", *of)) | names, functools.partial(measure_experts, *of)
    yield from (case("packed_product", measure, of) for of in dict.fromkeys(more[5:]) if of not in more[:5])


def main(argv: list[str] | None = None) -> int:
    """Run what the time allows; 1 if a result was wrong."""
    return jobs.main("packed_product", __doc__, jobs_of, 90, argv)


if __name__ == "__main__":
    sys.exit(main())
