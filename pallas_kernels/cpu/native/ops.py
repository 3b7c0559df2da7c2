"""The custom calls as JAX functions: attention over pages or packed keys, the write into the pool, and a new pool.

Under vmap a call runs once per element (vmap_method='sequential'); they have no gradient of their own (the caller
gives one); inside shard_map every device runs its own. Both use XLA's thread pool.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.native import library

_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
MAX_DIM = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything static about attention: hashable."""

    scale: float
    kv_dtype: str  # what the pool's bytes mean, whatever array dtype holds them
    out_dtype: str
    soft_cap: float = 0.0  # 0: off
    left: int = -1  # extra keys on each side, -1: unlimited
    right: int = -1
    chunk: int = 0  # 0: off
    heads_first: bool = True  # pages are [N K S D], not [N S K D]
    isa: str = "auto"
    threads: int = 0  # 0: those of XLA's pool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Who attends to what; pages where block_table is given, else packed keys that begin at kv_start."""

    query_start_loc: jax.Array  # i32[R+1]
    seq_lens: jax.Array  # i32[R] query i of q_len stands at seq_len - q_len + i
    kv_lens: jax.Array  # i32[R] keys that the request holds
    block_table: jax.Array | None = None  # i32[R B]
    kv_start: jax.Array | None = None  # i32[R]
    causal: jax.Array | None = None  # i32[R], None: nobody is


def attend(
    config: Config,
    q: jax.Array,  # [T H D]
    k: jax.Array,  # a pool of pages, or packed [Tk K D]
    v: jax.Array,
    batch: Batch,
    *,
    k_token_scale: jax.Array | None = None,  # the pool's shape without its last axis
    v_token_scale: jax.Array | None = None,
    slopes: jax.Array | None = None,  # f32[H]
    sinks: jax.Array | None = None,  # f32[H]
    q_scale: jax.Array | None = None,  # f32[] or [H]
    k_scale: jax.Array | None = None,  # f32[] or [K]
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out [T H V], lse f32[T H]): the order of operations is that of pallas_kernels.algebra.logits."""
    library.check_isa(config.isa)
    (num_tokens, num_heads, _), value_dim = q.shape, v.shape[-1]
    num_kv = k.shape[1] if k.ndim == 3 or config.heads_first else k.shape[2]
    call = jax.ffi.ffi_call(
        library.ATTEND,
        (
            jax.ShapeDtypeStruct((num_tokens, num_heads, value_dim), jnp.dtype(config.out_dtype)),
            jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        ),
        vmap_method="sequential",
    )
    return call(
        *(q, k, v, _floats(k_token_scale), _floats(v_token_scale)),
        *(_ints(batch.query_start_loc), _ints(batch.seq_lens), _ints(batch.kv_lens)),
        *(_ints(batch.block_table, (0, 0)), _ints(batch.kv_start), _ints(batch.causal)),
        *(_floats(slopes), _floats(sinks), _per_head(q_scale, num_heads)),
        *(_per_head(k_scale, num_kv), _per_head(v_scale, num_kv)),
        scale=np.float32(config.scale),
        soft_cap=np.float32(config.soft_cap),
        left=np.int32(config.left),
        right=np.int32(config.right),
        chunk=np.int32(config.chunk),
        kv_type=np.int32(_DTYPES.index(config.kv_dtype)),
        heads_first=bool(config.heads_first),
        isa=config.isa,
        threads=np.int32(config.threads),
    )


def write(
    k: jax.Array,  # [T K D] float
    v: jax.Array,  # [T K V]
    slots: jax.Array,  # i32[T]; outside the pool: nothing is written
    pools: tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None],  # k, v and their token scales
    *,
    dtype: str,
    heads_first: bool,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    isa: str = "auto",
    threads: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
    """The pools with new rows, in place where they are donated or not needed afterwards."""
    library.check_isa(isa)
    full = tuple(_floats(None) if pool is None else pool for pool in pools)
    call = jax.ffi.ffi_call(
        library.WRITE,
        tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in full),
        input_output_aliases={5: 0, 6: 1, 7: 2, 8: 3},
        vmap_method="sequential",
    )
    written = call(
        *(k, v, _ints(slots), _per_head(k_scale, k.shape[1]), _per_head(v_scale, v.shape[1]), *full),
        kv_type=np.int32(_DTYPES.index(dtype)),
        heads_first=bool(heads_first),
        isa=isa,
        threads=np.int32(threads),
    )
    return tuple(None if old is None else new for old, new in zip(pools, written, strict=True))


def full(shape: tuple[int, ...], value: jax.Array) -> jax.Array:
    """jnp.full(shape, value), on large pages where the system has them."""
    return jax.ffi.ffi_call(library.FILL, jax.ShapeDtypeStruct(shape, value.dtype), vmap_method="sequential")(value)


def _ints(x, empty: tuple[int, ...] = (0,)) -> jax.Array:
    return jnp.zeros(empty, jnp.int32) if x is None else jnp.asarray(x, jnp.int32)


def _floats(x) -> jax.Array:
    return jnp.zeros((0,), jnp.float32) if x is None else jnp.asarray(x, jnp.float32)


def _per_head(x, heads: int) -> jax.Array:
    return _floats(None) if x is None else jnp.broadcast_to(jnp.asarray(x, jnp.float32), (heads,))
