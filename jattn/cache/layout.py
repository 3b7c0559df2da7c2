"""The paged KV cache: its description (KVCacheSpec) and its storage (PagedKV, opaque)."""

import dataclasses
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jattn.cache.pool import filled
from jattn.device import Chip, chip_of
from jattn.errors.arguments import (
    as_array,
    check_fields,
    check_kind,
    choice,
    dtype_name,
    integer,
    kind,
    number,
    short,
    takes,
)
from jattn.spec import AttentionParams, check_positive, with_arrays
from jattn.types import pytree, static
from pallas_kernels.algebra import quant

LAYOUTS = ("auto", "NHD", "HND", "HND128")
LANES = 128
"""Width of a row of HND128, and of a vector register of a TPU."""

QUANT_MODES = ("none", "per_tensor", "per_head", "per_token_head")


def _storage(name: str, value):
    if value is not None and (not isinstance(value, str) or value not in ("native", "bits")):
        raise ValueError(f"{name}={short(value)} is not known; use 'native', 'bits' or None to let the platform choose")
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Size, dtype, physical layout and quantisation of one layer's cache. Hashable."""

    num_blocks: int  # N, blocks of the pool
    block_size: int  # S, tokens of a block
    num_kv_heads: int  # K
    head_dim: int  # D
    v_head_dim: int = cast(int, None)  # V; None: head_dim
    dtype: str = "bfloat16"  # of stored keys and values
    layout: str = "auto"  # "NHD": [N S K D]; "HND", "auto": [N K S D]; "HND128": [N K S*D/128 128], see filled_lanes
    quant: str = "none"  # or the scales: one "per_tensor", one "per_head", or one "per_token_head"

    if TYPE_CHECKING:  # the constructor also accepts None as v_head_dim

        def __init__(
            self,
            *,
            num_blocks: int,
            block_size: int,
            num_kv_heads: int,
            head_dim: int,
            v_head_dim: int | None = None,
            dtype: str = "bfloat16",
            layout: str = "auto",
            quant: str = "none",
        ) -> None: ...

    def __post_init__(self):
        if self.v_head_dim is None:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        sizes = ("num_blocks", "block_size", "num_kv_heads", "head_dim", "v_head_dim")
        check_fields(self, **dict.fromkeys(sizes, integer(1)), dtype=_dtype_name)
        check_fields(self, layout=choice(*LAYOUTS), quant=choice(*QUANT_MODES))
        if (self.quant != "none") != (self.dtype in quant.QUANTISED):
            raise ValueError(
                f"dtype={self.dtype!r} with quant={self.quant!r}: {', '.join(quant.QUANTISED)} go with quant "
                f"{', '.join(QUANT_MODES[1:])}; {', '.join(quant.FLOATS)} go with quant='none'"
            )
        if self.layout == "HND128" and not self.fills_lanes:
            raise ValueError(
                f"layout='HND128' with head_dim={self.head_dim}, v_head_dim={self.v_head_dim}, "
                f"block_size={self.block_size}: wanted equal dims of 16, 32 or 64, and whole rows of {LANES} numbers"
            )
        if self.capacity_tokens >= 2**31:
            raise ValueError(f"num_blocks={self.num_blocks} x block_size={self.block_size} slots must stay below 2**31")

    @property
    def is_quantized(self) -> bool:
        """Are stored values scaled int8 or fp8?"""
        return self.quant != "none"

    @property
    def capacity_tokens(self) -> int:
        """N * S, the most tokens that it can hold."""
        return self.num_blocks * self.block_size

    @property
    def physical_layout(self) -> str:
        """'NHD', 'HND' or 'HND128'; 'auto' is 'HND'."""
        return "HND" if self.layout == "auto" else self.layout

    @property
    def heads_first(self) -> bool:
        """Is it HND or HND128?"""
        return self.physical_layout != "NHD"

    @property
    def fills_lanes(self) -> bool:
        """Can the layout be HND128?"""
        dim = self.head_dim
        return dim == self.v_head_dim and dim in (16, 32, 64) and self.block_size * dim % LANES == 0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Physical shape of the key pool; the value pool's differs in its last axis only (`v_shape`)."""
        return self._physical(self.head_dim)

    @property
    def v_shape(self) -> tuple[int, int, int, int]:
        """Physical shape of the value pool."""
        return self._physical(self.v_head_dim)

    @property
    def token_scale_shape(self) -> tuple[int, int, int]:
        """Physical shape of the scales of quant='per_token_head': [N K S] or [N S K]."""
        if self.heads_first:
            return (self.num_blocks, self.num_kv_heads, self.block_size)
        return (self.num_blocks, self.block_size, self.num_kv_heads)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys, values and token scales."""
        per_slot_head = (self.head_dim + self.v_head_dim) * jnp.dtype(self.dtype).itemsize
        if self.quant == "per_token_head":
            per_slot_head += 2 * 4
        return self.block_size * self.num_kv_heads * per_slot_head

    def _physical(self, dim: int) -> tuple[int, int, int, int]:
        if self.physical_layout == "HND128":
            return (self.num_blocks, self.num_kv_heads, self.block_size * dim // LANES, LANES)
        if self.physical_layout == "HND":
            return (self.num_blocks, self.num_kv_heads, self.block_size, dim)
        return (self.num_blocks, self.block_size, self.num_kv_heads, dim)


def filled_lanes(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec with the layout HND128 where heads are narrow, if its layout is 'auto' and pages are 8 rows or more.

    A TPU pads the last axis of an array to 128. The rows of consecutive tokens lie side by side instead, so a pool of
    heads of 64 takes half the memory, and XLA's own layout of it is the one that the kernel reads.
    """
    rows = spec.block_size * spec.head_dim // LANES
    if spec.layout != "auto" or not spec.fills_lanes or rows % 8 or spec.quant == "per_token_head":
        return spec
    return dataclasses.replace(spec, layout="HND128")


@pytree
class PagedKV:
    """One layer's pools of blocks. Opaque: logical() returns the values, write_kv() writes."""

    k: jax.Array  # spec.shape
    v: jax.Array  # spec.v_shape
    k_token_scale: jax.Array | None  # f32 spec.token_scale_shape; None unless quant='per_token_head'
    v_token_scale: jax.Array | None  # the same of the values; not negative
    spec: KVCacheSpec = static()

    def logical(self) -> tuple[jax.Array, jax.Array]:
        """(k [N S K D], v [N S K V]) as float32, times their token scales. For tests and notebooks."""
        check_alive(self)
        return self._logical(self.k, self.k_token_scale), self._logical(self.v, self.v_token_scale)

    def _logical(self, pool, token_scale):
        x = quant.decode(by_token(pool, self.spec), self.spec.dtype)
        if token_scale is not None:
            x = x * token_scale[..., None]
        return jnp.swapaxes(x, 1, 2) if self.spec.heads_first else x

    @classmethod
    @takes(spec=kind(KVCacheSpec))
    def from_logical(cls, spec: KVCacheSpec, k, v, params=None, *, storage: str | None = None) -> "PagedKV":
        """A cache with the values k [N S K D], v [N S K V] (floats), encoded as by write_kv. For tests and imports."""
        k, v = as_array("k", k), as_array("v", v)
        if k.shape != (spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim):
            raise ValueError(f"{k.shape=} must be [N S K D] of {spec}")
        if v.shape != (*k.shape[:3], spec.v_head_dim):
            raise ValueError(f"{v.shape=} must be [N S K V] of {spec}")
        check_scales(params, spec)
        empty = empty_cache(spec, storage=storage)
        params = params and with_arrays(params)
        scales = (None, None) if params is None else (params.k_scale, params.v_scale)
        k, k_token = encode_rows(jnp.asarray(k), spec, empty.k.dtype, scales[0])
        v, v_token = encode_rows(jnp.asarray(v), spec, empty.v.dtype, scales[1])
        order = (lambda x: jnp.swapaxes(x, 1, 2)) if spec.heads_first else (lambda x: x)
        return cls(
            k=order(k).reshape(spec.shape),
            v=order(v).reshape(spec.v_shape),
            k_token_scale=None if k_token is None else order(k_token),
            v_token_scale=None if v_token is None else order(v_token),
            spec=spec,
        )


def by_token(pages: jax.Array, spec: KVCacheSpec) -> jax.Array:
    """Blocks of a pool, or of token scales, with a row for each token: [N K S ..], or [N S K ..] in the layout NHD."""
    if spec.physical_layout != "HND128" or pages.ndim == 3:
        return pages
    return pages.reshape(pages.shape[0], spec.num_kv_heads, spec.block_size, -1)


def check_alive(cache: PagedKV, name: str = "cache") -> PagedKV:
    """The cache itself; TypeError for anything else, ValueError if it was donated to an earlier call."""
    check_kind(name, cache, PagedKV, "make one with jattn.empty_cache(cache_spec)")
    for pool in (cache.k, cache.v):
        if isinstance(pool, jax.Array) and not isinstance(pool, Tracer) and pool.is_deleted():
            raise ValueError(f"{name} was donated to an earlier call and is deleted; use the cache that it returned")
    return cache


def check_scales(params, spec: KVCacheSpec) -> None:
    """k_scale and v_scale must be None, a scalar or f32[K]. f32[K] is refused with quant='per_tensor'."""
    if params is not None:
        check_kind("params", params, AttentionParams)
    for name in ("k_scale", "v_scale"):
        scale = None if params is None else getattr(params, name)
        if scale is None:
            continue
        shape = as_array(f"params.{name}", scale).shape
        if shape not in ((), (spec.num_kv_heads,)):
            raise ValueError(f"params.{name}.shape={shape} must be () or ({spec.num_kv_heads},)")
        check_positive(params, name)
        if shape and spec.quant == "per_tensor":
            raise ValueError(
                f"params.{name} has one scale per head but {spec.quant=}; use quant='per_head' or a scalar"
            )


def encode_rows(x: jax.Array, spec: KVCacheSpec, stored_dtype, scale):
    """x [..., K, D] -> (stored rows, their token scales [..., K] or None). `scale` is None, scalar or [K]."""
    if scale is not None and jnp.ndim(scale) == 1:
        scale = jnp.asarray(scale, jnp.float32).reshape((1,) * (x.ndim - 2) + (-1, 1))
    token_scale = None
    if spec.quant == "per_token_head":
        x = x.astype(jnp.float32) if scale is None else x.astype(jnp.float32) / scale
        scale = token_scale = quant.token_head_scale(x, spec.dtype)
    stored = quant.encode(x, spec.dtype, stored_dtype, scale)
    return stored, None if token_scale is None else token_scale[..., 0]


@takes(spec=kind(KVCacheSpec), fill=number(finite=False), storage=_storage)
def empty_cache(
    spec: KVCacheSpec, fill: float = 0.0, *, platform: "str | Chip | None" = None, storage: str | None = None
) -> PagedKV:
    """A new cache in which every value is `fill`.

    storage: 'native' stores the dtype itself. 'bits' stores unsigned integers of the same width: on a CPU, XLA would
    copy a whole bf16 or fp8 pool at each write; such a write has no gradient. None: 'bits' on a CPU, else 'native'.
    """
    chip = chip_of(platform)
    bits = chip.platform == "cpu" if storage is None else storage == "bits"
    stored = quant.storage_dtype(spec.dtype, bits)
    token_scale = fill_value = None
    if spec.quant == "per_token_head":
        row = jnp.full((1, 1), fill, jnp.float32)
        scale = quant.token_head_scale(row, spec.dtype)
        fill_value = quant.encode(row, spec.dtype, stored, scale)[0, 0]
        token_scale = jnp.broadcast_to(scale[0, 0], spec.token_scale_shape)
    else:
        fill_value = quant.encode(jnp.asarray(fill, jnp.float32), spec.dtype, stored)
    copy = lambda x: None if x is None else jnp.array(x, copy=True)  # noqa: E731  two donated leaves must not share a buffer
    return PagedKV(
        k=filled(spec.shape, fill_value, chip),
        v=filled(spec.v_shape, fill_value, chip),
        k_token_scale=copy(token_scale),
        v_token_scale=copy(token_scale),
        spec=spec,
    )


def _dtype_name(name: str, dtype) -> str:
    try:
        found = dtype_name(name, dtype)
    except ValueError:
        found = None
    known = (*quant.FLOATS, *quant.QUANTISED)
    if found not in known:
        raise ValueError(f"cache dtype {short(dtype)} is not known; use one of {', '.join(known)}")
    return found
