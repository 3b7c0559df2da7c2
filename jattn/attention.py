"""The attention functions that users call: PagedAttention for layers; attention, paged_attention and cascade_attention
for a single call.

They check the arguments and choose the backend. The backend's implementation does not check them again.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import device
from jattn.backends import checks
from jattn.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from jattn.backends.parallel import ContextParallel
from jattn.backends.registry import name_of, query_dtype_rule, resolve
from jattn.cache import KVCacheSpec, PagedKV
from jattn.device import Chip, spec_of, with_auto_axes
from jattn.errors.arguments import boolean, check_kind, integer, integers, is_float, sequence_of
from jattn.metadata import CommonAttentionMetadata
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import BATCH
from jattn.ops.layer import output_dtype
from jattn.ops.rotation import Angles, check_angles, rotate
from jattn.ops.state import AttentionState, specs_of_state
from jattn.spec import AttentionParams, AttentionSpec, with_arrays
from jattn.types import Feature


@dataclasses.dataclass(frozen=True)
class PagedAttention:
    """Attention of one layer over its paged cache. Hashable; two that compute the same are equal.

    The backend is chosen at construction. If none supports the layer, UnsupportedError lists the reasons of each.
    """

    spec: AttentionSpec
    cache_spec: KVCacheSpec
    backend: str = dataclasses.field(
        default="auto", compare=False
    )  # a name, or "auto": see backend_name for the choice
    platform: str | Chip | None = dataclasses.field(default=None, compare=False)  # None: JAX's default device
    dtype: Any = dataclasses.field(default=None, compare=False)  # of the queries; None: the cache's, unless quantised
    needs: tuple[Feature, ...] = dataclasses.field(
        default=(), compare=False, kw_only=True
    )  # features that batches will need and that the spec does not show, e.g. (Feature.NON_CAUSAL,)
    parallel: ContextParallel = dataclasses.field(
        default=ContextParallel(), kw_only=True
    )  # mesh axes over which a request's keys are distributed: see jattn.parallel
    chosen: type[AttentionBackend] = dataclasses.field(init=False, repr=False)  # the chosen backend
    impl: AttentionImpl = dataclasses.field(init=False, repr=False)  # its implementation, for this layer
    builder: AttentionMetadataBuilder = dataclasses.field(init=False, repr=False)  # its builder, for this layer

    def __post_init__(self):
        checks.check_specs(self.spec, self.cache_spec)
        chip = device.chip_of(self.platform)
        needs = (*sequence_of(checks.FEATURE)("needs", self.needs), *_checked_parallel(self.parallel).needs)
        given = None if self.dtype is None else query_dtype_rule("dtype", self.dtype)
        likely = None if self.cache_spec.is_quantized else self.cache_spec.dtype
        dtypes = dict(dtypes=(given,)) if given else dict(preferred_dtypes=(likely,)) if likely else {}
        chosen = resolve(self.spec, self.cache_spec, self.backend, chip, needs, **dtypes)
        object.__setattr__(self, "chosen", chosen)
        layer = (self.spec, self.cache_spec, chip, self.parallel)
        object.__setattr__(self, "impl", chosen.get_impl_cls()(*layer))
        object.__setattr__(self, "builder", chosen.get_builder_cls()(*layer, given or likely))

    @property
    def backend_name(self) -> str:
        """The name of the chosen backend."""
        return name_of(self.chosen)

    def build(self, meta: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False) -> Any:
        """The backend's plan of a batch. Build it once per step for all layers of this spec, on the host or inside jit.

        common_prefix_len: how many first keys all requests share. It can make the step faster and changes no result.
        fast_build: prefer a plan that is built quickly over one that runs quickly.
        """
        meta = checks.check_batch(self.spec, self.cache_spec, meta, self.parallel.dcp_world_size)
        checks.check_mask_metadata(self.spec, meta)
        checks.check_causality(self.chosen, self.spec, meta)
        self.parallel.check(meta)
        prefix_len = checks.check_common_prefix(
            self.spec, self.cache_spec, meta, common_prefix_len, self.parallel.dcp_world_size
        )
        return self.builder.build(prefix_len, meta, boolean("fast_build", fast_build))

    def build_cascade(self, levels: Sequence[CommonAttentionMetadata]) -> Any:
        """The plan for keys in levels: see cascade_attention. New keys are written to the last level's slots."""
        levels = _LEVELS("levels", levels)
        if not levels:
            raise ValueError("a cascade needs at least one level: levels is empty")
        levels = tuple(checks.check_batch(self.spec, self.cache_spec, level) for level in levels)
        checks.check_mask_metadata(self.spec, levels[-1])
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
        angles: Angles | None = None,
    ) -> tuple[PagedKV, AttentionState]:
        """Write k [T K D] and v [T K V] to the batch's slots, then attend with q [T H D].

        k = v = None writes nothing: for a layer that reads another layer's cache, and for cross attention after its
        first step. An encoder_decoder layer takes the packed k and v of the encoder's tokens.
        angles: q and k are rotated by them first; some backends rotate and write in one kernel.
        """
        if k is None and v is None:
            q = q if angles is None else rotate(q, angles)
            return cache, self.attend(q, cache, m, params)
        q, params = self._checked(q, cache, m, params)
        k, v = checks.check_keys(self.spec, k, v, m.slot_mapping.shape[0])
        if angles is not None:
            check_angles(check_kind("angles", angles, Angles), q, k)
        call = functools.partial(_update_and_forward, self.impl)
        result = lambda: (jax.tree.map(spec_of, cache), specs_of_state(q))
        return with_auto_axes(call, result, q, k, v, cache, m, params, angles)

    def attend(self, q: jax.Array, cache: PagedKV, m: Any, params: AttentionParams | None = None) -> AttentionState:
        """Attention of q [T H D] over the cached keys; nothing is written."""
        q, params = self._checked(q, cache, m, params)
        return with_auto_axes(functools.partial(_forward, self.impl), lambda: specs_of_state(q), q, cache, m, params)

    def update_block_table(self, m: Any, block_table: jax.Array, slot_mapping: jax.Array) -> Any:
        """The same plan with another block table: for layers with the same lengths and other blocks."""
        checks.check_plan(m, self.chosen.get_metadata_cls())
        block_table, slot_mapping = _TABLE("block_table", block_table), _TABLE("slot_mapping", slot_mapping)
        for name, new, old in (
            ("block_table", block_table, m.block_table),
            ("slot_mapping", slot_mapping, m.slot_mapping),
        ):
            if new.shape != old.shape:
                raise ValueError(
                    f"{name}.shape={new.shape} must be {old.shape}, as in the plan; call build for another shape"
                )
        return self.builder.update_block_table(m, block_table, slot_mapping)

    def for_layer(self, m: Any, layer: jax.Array | int, blocks_per_layer: int) -> Any:
        """The plan of one layer if L layers share a pool of L * blocks_per_layer blocks, as the carry of a lax.scan.

        The blocks of layer l begin at l * blocks_per_layer. A token whose slot is outside its layer is not written.
        """
        checks.check_plan(m, self.chosen.get_metadata_cls())
        pool = self.cache_spec.num_blocks
        blocks_per_layer = integer(1)("blocks_per_layer", blocks_per_layer)
        if pool % blocks_per_layer:
            raise ValueError(f"{blocks_per_layer=} must divide the pool's {pool} blocks")
        layer = _LAYER("layer", layer)
        on_host = isinstance(layer, (int, np.integer, np.ndarray))
        layers = pool // blocks_per_layer
        if on_host and not 0 <= layer < layers:
            raise ValueError(f"layer={int(layer)} must be one of the pool's {layers} layers, counted from 0")
        return self.builder.for_layer(m, layer, blocks_per_layer)

    def _checked(self, q, cache: PagedKV, m: Any, params: AttentionParams | None) -> tuple[jax.Array, AttentionParams]:
        """Check the arguments; return q as an array, and the params (None becomes AttentionParams())."""
        params = AttentionParams() if params is None else with_arrays(check_kind("params", params, AttentionParams))
        checks.check_plan(m, self.chosen.get_metadata_cls())
        checks.check_cache(cache, self.cache_spec)
        checks.check_params(self.chosen, self.spec, self.cache_spec, params)
        q = checks.check_query(self.spec, q, m.num_tokens)
        checks.check_dtype(self.chosen, q, params)
        return q, params


_TABLE, _LAYER, _LEVELS = integers(1, 2), integers(0), sequence_of(BATCH)


def _checked_parallel(parallel: ContextParallel) -> ContextParallel:
    return check_kind("parallel", parallel, ContextParallel, "see jattn.parallel")


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
    """Attention of q [T H D] over the blocks of `meta`, in one call. A model makes one PagedAttention instead."""
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
    """Attention of q [T H D] over keys in levels: shared keys first, each request's own keys last.

    The result is that of one batch with all keys. Each level is a batch of the same T tokens. Each of its requests lies
    within one request of the level before. Its seq_lens count the keys of that level only; positions continue from
    level to level, so masks and biases do not change.
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
    """Attention of q [T H D] over packed k [Tk K D] and v [Tk K V], without a cache.

    The keys of request r are cumsum(seq_lens)[r-1] .. cumsum(seq_lens)[r]-1. In self-attention without computed tokens
    they are packed like q. The keys of an encoder_decoder layer are packed by the encoder's lengths. If k and v have
    different dtypes, both are converted to the smallest dtype that holds them exactly.

    Keys that lengths count and k lacks are an error, or if the lengths are traced, the result of such requests is NaN.
    """
    params = AttentionParams() if params is None else with_arrays(check_kind("params", params, AttentionParams))
    checks.check_kind("spec", spec, AttentionSpec)
    meta = checks.check_lengths(spec, meta)
    meta = meta if meta.max_num_reqs else checks.with_padding_row(meta)
    checks.check_mask_metadata(spec, meta)
    chip = device.detect()
    if k is None or v is None:
        raise ValueError("attention without a cache needs k and v; use PagedAttention to read cached keys")
    q = checks.check_query(spec, q, queries_of(meta, spec.attn_type).num_tokens)
    k, v = checks.as_one_dtype(*checks.check_keys(spec, k, v, None))
    chosen = resolve(spec, None, backend, chip, dtypes=(q.dtype.name, k.dtype.name))
    checks.check_causality(chosen, spec, meta)
    checks.check_packing(spec, meta, k.shape[0])
    checks.check_params(chosen, spec, None, params)
    checks.check_dtype(chosen, q, params)
    impl = chosen.get_impl_cls()(spec, None, chip).for_batch(meta)
    call = functools.partial(_forward_packed, impl, checks.may_lack_keys(spec, meta, k.shape[0]))
    return with_auto_axes(call, lambda: specs_of_state(q), q, k, v, meta, params)


# Each of these functions is traced once for equal layers. Without jit, a call in a notebook would be compiled operation
# by operation. Not with inline=True: a gradient outside jit would be compiled so, and its loops again in every call.
# Inside a model's own jit XLA inlines them.


@functools.partial(jax.jit, static_argnums=0)
def _forward(impl: AttentionImpl, q, cache, m, params) -> AttentionState:
    checks.check_functions(impl.spec)
    return impl.forward(q, cache, m, params) if q.shape[0] else _no_tokens(impl, q)


@functools.partial(jax.jit, static_argnums=0)
def _update_and_forward(impl: AttentionImpl, q, k, v, cache, m, params, angles) -> tuple[PagedKV, AttentionState]:
    checks.check_functions(impl.spec)
    if q.shape[0] and angles is not None:
        return impl.rotate_update_and_forward(q, k, v, angles, cache, m, params)
    k = k if angles is None else rotate(k, angles)
    if q.shape[0]:
        return impl.update_and_forward(q, k, v, cache, m, params)
    return impl.do_kv_cache_update(cache, k, v, m, params) if k.shape[0] else cache, _no_tokens(impl, q)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward_packed(impl: AttentionImpl, may_lack_keys: bool, q, k, v, meta, params) -> AttentionState:
    checks.check_functions(impl.spec)
    if not q.shape[0]:
        return _no_tokens(impl, q)
    state = impl.forward_packed(q, k, v, meta, params)
    return _nan_without_keys(state, meta, impl.spec, k.shape[0]) if may_lack_keys else state


def _nan_without_keys(state: AttentionState, meta, spec: AttentionSpec, num_keys: int) -> AttentionState:
    """The state with NaN in rows of requests of which some keys are past the end of the packed ones.

    An integer out has no NaN; its lse has.
    """
    queries, lengths = queries_of(meta, spec.attn_type), jnp.asarray(keys_of(meta, spec.attn_type).seq_lens)
    lacking = jnp.cumsum(lengths) > num_keys
    rows = lacking[queries.token_to_req()] & queries.token_is_live()

    def marked(x):
        axes = tuple(range(1, x.ndim))
        return jnp.where(jnp.expand_dims(rows, axes), jnp.nan, x) if is_float(x.dtype) else x

    return jax.tree.map(marked, state)


def _no_tokens(impl: AttentionImpl, q) -> AttentionState:
    """The state of a batch without tokens; kernels need not support arrays of size 0."""
    return AttentionState.empty(0, impl.num_heads, impl.spec.v_head_dim, output_dtype(q.dtype, impl.spec))
