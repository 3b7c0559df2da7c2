"""The custom calls as JAX functions: attention over pages or packed keys, the write into the pool, products, the
draw of tokens, a fill.

They run on XLA's thread pool. Under vmap a call runs once per element (vmap_method='sequential'); inside shard_map it
runs once per device. They define no gradient: jattn/backends/cpu_native.py does.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels.cpu.native import library

_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")  # in the order of args.h
MAX_HEAD_DIM = 512
"""Largest head_dim and v_head_dim. For latent rows: the largest latent_dim, and the most numbers after the latent."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """The static arguments of attention; hashable."""

    scale: float
    kv_dtype: str  # dtype of the stored numbers; the array may hold them as unsigned integers of the same size
    out_dtype: str
    soft_cap: float = 0.0  # 0: off
    window_left: int = -1  # keys before and after the query's own; -1: unlimited
    window_right: int = -1
    chunk_size: int = 0  # 0: off
    latent_dim: int = 0  # V of latent rows: a key is its value (the latent), then D - V numbers of k; 0: no latents
    heads_first: bool = True  # pages are [N K S D]; False: [N S K D]
    isa: str = "auto"
    threads: int = 0  # 0: as many as XLA's pool has


@dataclasses.dataclass(frozen=True, kw_only=True)
class NativeBatch:
    """The requests of a call: over pages with block_table, over packed keys with kv_start; exactly one of the two."""

    query_start_loc: jax.Array  # i32[R+1]
    seq_lens: jax.Array  # i32[R]: query i of n is at position seq_len - n + i
    kv_lens: jax.Array  # i32[R]: number of keys; not seq_lens if the queries are no keys, or there are later ones
    block_table: jax.Array | None = None  # i32[R B]
    kv_start: jax.Array | None = None  # i32[R]: each request's first packed key
    causal: jax.Array | None = None  # i32[R]; None: no request is causal


def attend(
    config: NativeConfig,
    q: jax.Array,  # [T H D]
    k: jax.Array,  # a pool of pages, or packed [Tk K D]
    v: jax.Array,
    batch: NativeBatch,
    *,
    k_token_scale: jax.Array | None = None,  # f32, the shape of k without its last axis
    v_token_scale: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,  # f32[H]
    sinks: jax.Array | None = None,  # f32[H]
    q_scale: jax.Array | None = None,  # f32[] or [H]
    k_scale: jax.Array | None = None,  # f32[] or [K]
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out [T H V], lse f32[T H]). The order of operations on a logit is that of pallas_kernels.algebra.logits.

    With latent_dim, k and v are pages: k the rest of each row and v its latent, or both the same array of whole rows.
    The latent is read from v, also as the first part of a key. Only whole rows may have token scales.
    """
    (num_tokens, num_heads, _), v_head_dim = q.shape, config.latent_dim or v.shape[-1]
    num_kv_heads = k.shape[1] if k.ndim == 3 or config.heads_first else k.shape[2]
    results = (
        jax.ShapeDtypeStruct((num_tokens, num_heads, v_head_dim), jnp.dtype(config.out_dtype)),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
    )
    out, lse = _call(
        library.ATTEND,
        results,
        *(q, k, v, _floats(k_token_scale), _floats(v_token_scale)),
        *(_ints(batch.query_start_loc), _ints(batch.seq_lens), _ints(batch.kv_lens)),
        *(_ints(batch.block_table, (0, 0)), _ints(batch.kv_start), _ints(batch.causal)),
        *(_floats(alibi_slopes), _floats(sinks), _per_head(q_scale, num_heads)),
        *(_per_head(k_scale, num_kv_heads), _per_head(v_scale, num_kv_heads)),
        scale=np.float32(config.scale),
        soft_cap=np.float32(config.soft_cap),
        window_left=np.int32(config.window_left),
        window_right=np.int32(config.window_right),
        chunk_size=np.int32(config.chunk_size),
        latent_dim=np.int32(config.latent_dim),
        kv_dtype=np.int32(_DTYPES.index(config.kv_dtype)),
        heads_first=bool(config.heads_first),
        isa=config.isa,
        threads=config.threads,
    )
    return out, lse


def write(
    k: jax.Array,  # [T K D] float
    v: jax.Array,  # [T K V]
    slot_mapping: jax.Array,  # i32[T]; a token whose slot is outside the pool is not written
    pools: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None],  # k, v and their token scales
    *,
    kv_dtype: str,
    heads_first: bool,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    isa: str = "auto",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """The pools with the new tokens; written in place if the pools are donated or not used afterwards."""
    arrays = tuple(_floats(None) if pool is None else pool for pool in pools)
    k_pool, v_pool, k_token_scale, v_token_scale = _call(
        library.WRITE,
        tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in arrays),
        *(k, v, _ints(slot_mapping), _per_head(k_scale, k.shape[1]), _per_head(v_scale, v.shape[1]), *arrays),
        kv_dtype=np.int32(_DTYPES.index(kv_dtype)),
        heads_first=bool(heads_first),
        isa=isa,
        threads=threads,
        aliases={5: 0, 6: 1, 7: 2, 8: 3},
    )
    k_token_scale = None if pools[2] is None else k_token_scale
    v_token_scale = None if pools[3] is None else v_token_scale
    return k_pool, v_pool, k_token_scale, v_token_scale


def product(
    x: jax.Array,  # [T in]
    matrices: Sequence[jax.Array],  # each [in out], or [out in] if transposed; the dtype of x
    *,
    out_dtype,
    transposed: bool = False,
    isa: str = "auto",
    threads: int = 0,
) -> tuple[jax.Array, ...]:
    """x @ matrix for each of them, summed in float32. The bits of a row depend neither on the other rows nor on T."""
    results = _results(x, [matrix.shape[0 if transposed else 1] for matrix in matrices], out_dtype)
    y = _call(library.PRODUCT, results, x, *matrices, transposed=transposed, silu=False, isa=isa, threads=threads)
    return tuple(y)


def head_product(
    x: jax.Array,  # [T H in]
    w: jax.Array,  # [H in out]; the dtype of x
    *,
    out_dtype,
    isa: str = "auto",
    threads: int = 0,
) -> jax.Array:
    """[T H out] x[:, h] @ w[h] for each head, summed in float32. The bits of a row depend on that row only."""
    result = jax.ShapeDtypeStruct((x.shape[1], x.shape[0], w.shape[2]), jnp.dtype(out_dtype))
    y = _call(library.HEAD_PRODUCT, result, jnp.swapaxes(x, 0, 1), w, isa=isa, threads=threads)
    return jnp.swapaxes(y, 0, 1)


def expert_product(
    x: jax.Array,  # [N in], in the order of the rows' experts
    w: jax.Array,  # [experts in out]; the dtype of x
    sizes: jax.Array,  # i32[experts]: rows of each
    *,
    out_dtype,
    isa: str = "auto",
    threads: int = 0,
) -> jax.Array:
    """[N out] each row @ the matrix of its expert, summed in float32; weights of experts without rows are not read.

    The bits of a row depend on that row only. Rows beyond the sum of the sizes are undefined.
    """
    (result,) = _results(x, [w.shape[2]], out_dtype)
    return _call(library.EXPERT_PRODUCT, result, x, w, _ints(sizes), isa=isa, threads=threads)


def silu_product(
    x: jax.Array, gate: jax.Array, up: jax.Array, *, out_dtype, isa: str = "auto", threads: int = 0
) -> jax.Array:
    """silu(x @ gate) * (x @ up); each product is rounded to out_dtype, the rest is float32 up to the result."""
    results = _results(x, [gate.shape[1]], out_dtype)
    return _call(library.PRODUCT, results, x, gate, up, transposed=False, silu=True, isa=isa, threads=threads)[0]


Packed = tuple[jax.Array, jax.Array, "jax.Array | None", "jax.Array | None"]
"""values, scales, zero points, factor: those of a QuantisedArray (jattn/ops/quantised.py)."""
PACKED_FORMATS = ("int8", "fp8", "int4", "fp4")  # in the order of product_args.h


def packed_product(
    x: jax.Array,  # [T in]
    matrices: Sequence[Packed],  # of one format, group size and dtype of scales, all with zero points or none
    format: str,
    *,
    out_dtype,
    transposed: bool = False,  # only weights of 8 bits with one scale for each output
    isa: str = "auto",
    threads: int = 0,
) -> tuple[jax.Array, ...]:
    """x @ the dequantised matrix for each of them, in float32. The bits of a row depend on that row only."""
    arrays = []
    for values, scales, zero_points, factor in matrices:
        arrays += [values, scales, jnp.zeros((0, 0), jnp.int8) if zero_points is None else zero_points, _floats(factor)]
    results = _results(x, [values.shape[0 if transposed else 1] for values, *_ in matrices], out_dtype)
    form = np.int32(PACKED_FORMATS.index(format))
    y = _call(library.PACKED_PRODUCT, results, x, *arrays, format=form, transposed=transposed, isa=isa, threads=threads)
    return tuple(y)


def packed_expert_product(
    x: jax.Array,  # [N in], in the order of the rows' experts
    weights: Packed,  # each with a leading axis of experts
    sizes: jax.Array,  # i32[experts]: rows of each
    format: str,
    *,
    out_dtype,
    isa: str = "auto",
    threads: int = 0,
) -> jax.Array:
    """[N out] each row times the dequantised matrix of its expert, in float32. Rows beyond the sizes are undefined."""
    values, scales, zero_points, factor = weights
    zero_points = jnp.zeros((0, 0, 0), jnp.int8) if zero_points is None else zero_points
    (result,) = _results(x, [values.shape[2]], out_dtype)
    operands = x, values, scales, zero_points, _floats(factor), _ints(sizes)
    form = np.int32(PACKED_FORMATS.index(format))
    return _call(library.PACKED_EXPERT_PRODUCT, result, *operands, format=form, isa=isa, threads=threads)


def draw(
    logits: jax.Array,  # f32[R vocab]
    temperature: ArrayLike,  # f32[R]; 0: the first likeliest token
    top_k: ArrayLike,  # i32[R]; 0: off
    top_p: ArrayLike,  # f32[R]; 1: off
    min_p: ArrayLike,  # f32[R]; 0: off
    keys: ArrayLike,  # u32[R 2] of threefry
    *,
    isa: str = "auto",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """(token i32[R], floor f32[R]). The token has the row's largest sum of scaled logit and noise.

    A scaled logit is the logit minus the maximum of its row, divided by the temperature. The noise is
    jax.random.gumbel(key, [vocab], float32). Tokens below min_p of the largest probability are left out first, then all
    but the top_k most likely, then all but the fewest that reach top_p of the sum of those. Ties are kept.
    floor: the least scaled logit that top_k and top_p keep; -inf if they keep all.
    A row with a NaN, or whose maximum is infinite, gives -1 and -inf. Both results depend on the row only.
    """
    shapes = [jax.ShapeDtypeStruct(logits.shape[:1], dtype) for dtype in (jnp.int32, jnp.float32)]
    rules = _floats(temperature), _ints(top_k), _floats(top_p), jnp.log(_floats(min_p))
    token, floor = _call(library.DRAW, shapes, _floats(logits), *rules, keys, isa=isa, threads=threads)
    return token, floor


def first_largest(logits: jax.Array, *, isa: str = "auto", threads: int = 0) -> jax.Array:
    """i32[R] the first of the largest of f32[R vocab]; -1 for a row with a NaN, or whose maximum is infinite."""
    zeros, keys = jnp.zeros(len(logits), jnp.float32), jnp.zeros((len(logits), 2), jnp.uint32)
    return draw(logits, zeros, zeros, zeros, zeros, keys, isa=isa, threads=threads)[0]  # of temperature 0


def full(shape: tuple[int, ...], value: jax.Array) -> jax.Array:
    """jnp.full(shape, value), in 2 MiB OS pages where Linux grants them: fewer TLB misses."""
    return jax.ffi.ffi_call(library.FILL, jax.ShapeDtypeStruct(shape, value.dtype), vmap_method="sequential")(value)


def _call(name: str, results, *operands, isa: str, threads: int, aliases: dict[int, int] | None = None, **attributes):
    """The results of a custom call. aliases: numbers of operands, in whose memory results may be written."""
    library.check_isa(isa)
    call = jax.ffi.ffi_call(name, results, vmap_method="sequential", input_output_aliases=aliases)
    return call(*operands, **attributes, isa=isa, threads=np.int32(threads))


def _results(x: jax.Array, widths: Sequence[int], dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Those of products: as many rows as x."""
    return tuple(jax.ShapeDtypeStruct((x.shape[0], width), jnp.dtype(dtype)) for width in widths)


def _ints(x, empty_shape: tuple[int, ...] = (0,)) -> jax.Array:
    """int32; the calls take an empty array for None."""
    return jnp.zeros(empty_shape, jnp.int32) if x is None else jnp.asarray(x, jnp.int32)


def _floats(x) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if x is None else jnp.asarray(x, jnp.float32)


def _per_head(x, heads: int) -> jax.Array:
    return _floats(None) if x is None else jnp.broadcast_to(jnp.asarray(x, jnp.float32), (heads,))
