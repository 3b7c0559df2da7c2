"""The doors: PagedAttention for layers; attention, paged_attention and cascade_attention for a single call.

Doors check and choose, once; behind them an implementation trusts its inputs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jattn import device
from jattn.backends import checks
from jattn.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from jattn.backends.parallel import ContextParallel
from jattn.backends.registry import query_dtype_rule, resolve
from jattn.cache import KVCacheSpec, PagedKV
from jattn.device import Chip
from jattn.errors.arguments import boolean, check_kind, integer, integers, sequence_of
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.batch import BATCH, queries_of
from jattn.ops.layer import output_dtype
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec, with_arrays
from jattn.types import Feature


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """Attention of one layer over its paged cache: hashable, and equal where it computes the same.

    The backend is chosen at construction; UnsupportedError lists every backend's every reason. `dtype` is that of the
    queries, where it decides who computes; None: the cache's, unless that is quantised. `needs` names features that no
    spec can tell, so that 'auto' looks for them too, e.g. (Feature.NON_CAUSAL,).
    """

    spec: AttentionSpec
    cache_spec: KVCacheSpec
    backend: str = dataclasses.field(default="auto", compare=False)  # what was asked for; backend_name: what was chosen
    platform: str | Chip | None = dataclasses.field(default=None, compare=False)
    dtype: Any = dataclasses.field(default=None, compare=False)
    needs: tuple[Feature, ...] = dataclasses.field(default=(), compare=False, kw_only=True)
    parallel: ContextParallel = dataclasses.field(default=ContextParallel(), kw_only=True)  # see jattn.parallel
    chosen: type[AttentionBackend] = dataclasses.field(init=False, repr=False)
    impl: AttentionImpl = dataclasses.field(init=False, repr=False)
    builder: AttentionMetadataBuilder = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        checks.check_specs(self.spec, self.cache_spec)
        chip = device.resolve(self.platform)
        needs = (*sequence_of(checks.FEATURE)("needs", self.needs), *_parallel(self.parallel).needs)
        asked, guess = None if self.dtype is None else query_dtype_rule("dtype", self.dtype), _dtype_of(self.cache_spec)
        dtypes = dict(dtypes=(asked,)) if asked else dict(wished=(guess,)) if guess else {}
        chosen = resolve(self.spec, self.cache_spec, self.backend, chip, needs, **dtypes)
        object.__setattr__(self, "chosen", chosen)
        who = (self.spec, self.cache_spec, chip, self.parallel)
        object.__setattr__(self, "impl", chosen.get_impl_cls()(*who))
        object.__setattr__(self, "builder", chosen.get_builder_cls()(*who, asked or guess))

    @property
    def backend_name(self) -> str:
        """The backend that was chosen."""
        return self.chosen.get_name()

    def build(self, meta: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False) -> Any:
        """The backend's plan of this batch: once a step, for all layers of this spec; pure, on the host or in jit.

        common_prefix_len says how many first keys all requests share: a hint to be fast, never seen in a result.
        """
        meta = checks.check_batch(self.spec, self.cache_spec, meta, self.parallel.dcp_world_size)
        checks.check_reach(self.spec, meta)
        checks.check_causality(self.chosen, self.spec, meta)
        self.parallel.check(meta)
        common_prefix_len = _COUNT("common_prefix_len", common_prefix_len)
        return self.builder.build(common_prefix_len, meta, boolean("fast_build", fast_build))

    def build_cascade(self, levels: Sequence[CommonAttentionMetadata]) -> Any:
        """The plan of keys in levels: see cascade_attention. New tokens are written where the last level says."""
        levels = _LEVELS("levels", levels)
        if not levels:
            raise ValueError("a cascade needs at least one level: levels is empty")
        levels = tuple(checks.check_batch(self.spec, self.cache_spec, level) for level in levels)
        checks.check_reach(self.spec, levels[-1])
        checks.check_causality(self.chosen, self.spec, levels[-1])
        return self.builder.build_cascade(levels)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        cache: PagedKV,
        m: Any,
        params: AttentionParams | None = None,
    ) -> tuple[PagedKV, AttentionState]:
        """Write k [T K D], v [T K V] at the batch's slots, then attend with q [T H D].

        k = v = None writes nothing: a layer that shares another's cache, or cross attention after its first step.
        An encoder_decoder layer takes the encoder's packed k, v.
        """
        if k is None and v is None:
            return cache, self.attend(q, cache, m, params)
        q, params = self._checked(q, cache, m, params)
        k, v = checks.check_keys(self.spec, k, v, m.slot_mapping.shape[0])
        return _update_and_forward(self.impl, q, k, v, cache, m, params)

    def attend(self, q: jax.Array, cache: PagedKV, m: Any, params: AttentionParams | None = None) -> AttentionState:
        """Read only: q [T H D] over what the cache holds."""
        q, params = self._checked(q, cache, m, params)
        return _forward(self.impl, q, cache, m, params)

    def update_block_table(self, m: Any, block_table: jax.Array, slot_mapping: jax.Array) -> Any:
        """The same plan over other pages: for layers that share lengths, but not pages."""
        checks.check_built(m, self.chosen.get_metadata_cls())
        for name, new, old in (
            ("block_table", block_table, m.block_table),
            ("slot_mapping", slot_mapping, m.slot_mapping),
        ):
            if _TABLE(name, new).shape != old.shape:
                raise ValueError(f"{name}.shape={np.shape(new)} must stay {old.shape}; build anew for another shape")
        return self.builder.update_block_table(m, block_table, slot_mapping)

    def for_layer(self, m: Any, layer: jax.Array | int, blocks_per_layer: int) -> Any:
        """The plan of one layer where L layers share a pool of L * blocks_per_layer blocks (a lax.scan carry).

        Layer l's pages begin at l * blocks_per_layer. A slot outside a layer still writes nowhere.
        """
        checks.check_built(m, self.chosen.get_metadata_cls())
        pool = self.cache_spec.num_blocks
        blocks_per_layer = integer(1)("blocks_per_layer", blocks_per_layer)
        if pool % blocks_per_layer:
            raise ValueError(f"{blocks_per_layer=} must divide the pool's {pool} blocks")
        if (
            isinstance(_LAYER("layer", layer), (int, np.integer, np.ndarray))
            and not 0 <= layer < pool // blocks_per_layer
        ):
            raise ValueError(f"{layer=} must be one of the pool's {pool // blocks_per_layer} layers, counted from 0")
        return self.builder.for_layer(m, layer, blocks_per_layer)

    def _checked(self, q, cache: PagedKV, m: Any, params: AttentionParams | None) -> tuple[jax.Array, AttentionParams]:
        """The static checks of a call; returns q as an array and the params, none given being all None."""
        params = AttentionParams() if params is None else with_arrays(check_kind("params", params, AttentionParams))
        checks.check_built(m, self.chosen.get_metadata_cls())
        checks.check_cache(cache, self.cache_spec)
        checks.check_params(self.chosen, self.spec, self.cache_spec, params)
        q = checks.check_query(self.spec, q, m.num_tokens)
        checks.check_dtype(self.chosen, q, params)
        return q, params


_COUNT, _TABLE, _LAYER, _LEVELS = integer(0), integers(1, 2), integers(0), sequence_of(BATCH)


def _parallel(parallel: ContextParallel) -> ContextParallel:
    return check_kind("parallel", parallel, ContextParallel, "see jattn.parallel")


def _dtype_of(cache_spec: KVCacheSpec) -> str | None:
    """What its queries are of, most likely."""
    return None if cache_spec.is_quantized else cache_spec.dtype


def paged_attention(
    q: jax.Array,
    cache: PagedKV,
    meta: CommonAttentionMetadata,
    spec: AttentionSpec,
    params: AttentionParams | None = None,
    *,
    backend: str = "auto",
    platform: str | Chip | None = None,
) -> AttentionState:
    """One read-only call: q [T H D] over the pages of `meta`. A model makes a PagedAttention once instead."""
    cache_spec = checks.check_kind("cache", cache, PagedKV).spec
    attn = PagedAttention(spec, cache_spec, backend, platform, checks.query_dtype(q))
    return attn.attend(q, cache, attn.build(meta), params)


def cascade_attention(
    q: jax.Array,
    cache: PagedKV,
    levels: Sequence[CommonAttentionMetadata],
    spec: AttentionSpec,
    params: AttentionParams | None = None,
    *,
    backend: str = "auto",
) -> AttentionState:
    """q [T H D] over keys in levels, shared ones first, the requests' own last: the same numbers as one flat batch.

    Each level is a batch of the same T tokens whose requests lie within one request of the level before; its seq_lens
    count the keys of that level only. Positions run on from level to level, so every mask means what it means flat.
    """
    cache_spec = checks.check_kind("cache", cache, PagedKV).spec
    attn = PagedAttention(spec, cache_spec, backend, None, checks.query_dtype(q), needs=(Feature.CASCADE,))
    return attn.attend(q, cache, attn.build_cascade(levels), params)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    meta: CommonAttentionMetadata,
    spec: AttentionSpec,
    params: AttentionParams | None = None,
    *,
    backend: str = "auto",
) -> AttentionState:
    """Without a cache: q [T H D] over k [Tk K D], v [Tk K V], packed by request.

    Request r owns keys cumsum(seq_lens)[r-1] .. cumsum(seq_lens)[r]-1, which is q's own packing in self-attention;
    an encoder_decoder layer's keys are packed by the encoder's lengths. Where k and v are of two dtypes, both are read
    in the one that holds them exactly.
    """
    params = AttentionParams() if params is None else with_arrays(check_kind("params", params, AttentionParams))
    checks.check_kind("spec", spec, AttentionSpec)
    checks.check_lengths(spec, meta)
    meta = meta if meta.max_num_reqs else checks.with_a_row(meta)
    checks.check_reach(spec, meta)
    chip = device.detect()
    if k is None or v is None:
        raise ValueError("attention without a cache needs k and v; use PagedAttention to read cached ones")
    q = checks.check_query(spec, q, queries_of(meta, spec.attn_type).num_tokens)
    k, v = checks.as_one_dtype(*checks.check_keys(spec, k, v, None))
    chosen = resolve(spec, None, backend, chip, dtypes=(q.dtype.name, k.dtype.name))
    checks.check_causality(chosen, spec, meta)
    checks.check_packing(spec, meta, k.shape[0])
    checks.check_params(chosen, spec, None, params)
    checks.check_dtype(chosen, q, params)
    return _forward_packed(chosen.get_impl_cls()(spec, None, chip), q, k, v, meta, params)


# Behind the doors everything is traced once for each equal layer: within a model's own jit, and for a bare call in a
# notebook, which would otherwise compile operation by operation.


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward(impl: AttentionImpl, q, cache, m, params) -> AttentionState:
    checks.check_functions(impl.spec)
    return impl.forward(q, cache, m, params) if q.shape[0] else _no_tokens(impl, q)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _update_and_forward(impl: AttentionImpl, q, k, v, cache, m, params) -> tuple[PagedKV, AttentionState]:
    checks.check_functions(impl.spec)
    if q.shape[0]:
        return impl.update_and_forward(q, k, v, cache, m, params)
    return impl.do_kv_cache_update(cache, k, v, m, params) if k.shape[0] else cache, _no_tokens(impl, q)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _forward_packed(impl: AttentionImpl, q, k, v, meta, params) -> AttentionState:
    checks.check_functions(impl.spec)
    return impl.forward_packed(q, k, v, meta, params) if q.shape[0] else _no_tokens(impl, q)


def _no_tokens(impl: AttentionImpl, q) -> AttentionState:
    """Of a batch without a token: no kernel is asked about shapes of 0."""
    return AttentionState.empty(0, impl.num_heads, impl.spec.v_head_dim, output_dtype(q.dtype, impl.spec))
