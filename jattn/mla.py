"""MLAAttention: multi-head latent attention of one layer over its paged cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn import device
from jattn.backends import checks
from jattn.backends.base import AttentionBackend
from jattn.backends.mla import MLAImpl, MLAMetadataBuilder
from jattn.backends.parallel import ContextParallel
from jattn.backends.registry import name_of, resolve
from jattn.cache import KVCacheSpec, PagedKV, empty_cache
from jattn.cache.latent import check_latent
from jattn.device import Chip, spec_of, with_auto_axes
from jattn.errors.arguments import as_array, boolean, integers
from jattn.metadata import CommonAttentionMetadata
from jattn.mla_spec import MLAParams, MLASpec, check_mla_params
from jattn.ops.mla import MLAMetadata
from jattn.ops.state import AttentionState, specs_of_state
from pallas_kernels.algebra import quant


@dataclasses.dataclass(frozen=True)
class MLAAttention:
    """Latent attention of one layer over its paged cache. Hashable; two that compute the same are equal.

    q is [T H nope+rope], its rope part rotated; kv_c [T L] is normed; k_pe [T R] is rotated. A state's out is [T H V].
    """

    spec: MLASpec
    cache_spec: KVCacheSpec  # from mla_cache_spec(spec, ...), or one with spec.head_dim elements in a row
    backend: str = dataclasses.field(
        default="auto", compare=False
    )  # a name, or "auto": see backend_name for the choice
    platform: str | Chip | None = dataclasses.field(default=None, compare=False)  # chosen for; None: JAX's device
    parallel: ContextParallel = dataclasses.field(
        default=ContextParallel(), kw_only=True
    )  # mesh axes over which a request's keys are distributed: see jattn.parallel
    chosen: type[AttentionBackend] = dataclasses.field(init=False, repr=False)  # the chosen backend
    impl: MLAImpl = dataclasses.field(init=False, repr=False)  # its implementation, for this layer
    builder: MLAMetadataBuilder = dataclasses.field(init=False, repr=False)  # its builder, for this layer

    def __post_init__(self):
        checks.check_kind("spec", self.spec, MLASpec, "jattn.PagedAttention takes an AttentionSpec")
        checks.check_kind("cache_spec", self.cache_spec, KVCacheSpec, "make one with jattn.mla_cache_spec(...)")
        check_latent(self.spec, self.cache_spec)
        checks.check_kind("parallel", self.parallel, ContextParallel, "see jattn.parallel")
        chip = device.chip_of(self.platform)
        chosen = resolve(self.spec, self.cache_spec, self.backend, chip, self.parallel.needs)
        object.__setattr__(self, "chosen", chosen)
        layer = (self.spec, self.cache_spec, chip, self.parallel)
        impl_cls: Any = chosen.get_impl_cls()  # those of a backend for latent caches take an MLASpec
        builder_cls: Any = chosen.get_builder_cls()
        object.__setattr__(self, "impl", impl_cls(*layer))
        object.__setattr__(self, "builder", builder_cls(*layer))

    @property
    def backend_name(self) -> str:
        """The name of the chosen backend."""
        return name_of(self.chosen)

    def empty_cache(self, fill: float = 0.0, *, storage: str | None = None) -> PagedKV:
        """An empty cache for this layer: see jattn.empty_cache."""
        return empty_cache(self.cache_spec, fill, platform=self.platform, storage=storage)

    def prepare_params(self, params: MLAParams) -> MLAParams:
        """Split kv_b_proj into w_uk and w_uv, once after loading. With kv_b_proj each call is slower."""
        check_mla_params(self.spec, params)
        return self.impl.prepare_params(params)

    def build(self, meta: CommonAttentionMetadata, common_prefix_len: int = 0, fast_build: bool = False) -> MLAMetadata:
        """The plan of a batch. Build it once per step for all layers of this spec, on the host or inside jit.

        common_prefix_len: how many first keys all requests share. It can make the step faster and changes no result.
        fast_build: prefer a plan that is built quickly over one that runs quickly.
        """
        meta = checks.check_batch(self.spec, self.cache_spec, meta, self.parallel.dcp_world_size)
        checks.check_causality(self.chosen, self.spec, meta)
        self.parallel.check(meta)
        prefix_len = checks.check_common_prefix(
            self.spec, self.cache_spec, meta, common_prefix_len, self.parallel.dcp_world_size
        )
        return self.builder.build(prefix_len, meta, boolean("fast_build", fast_build))

    def write(
        self, kv_c: jax.Array, k_pe: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams | None = None
    ) -> PagedKV:
        """Write the new tokens' rows. Of params, only the scales are used."""
        params = MLAParams() if params is None else checks.check_kind("params", params, MLAParams)
        checks.check_plan(m, self.chosen.get_metadata_cls())
        checks.check_cache(cache, self.cache_spec)
        kv_c, k_pe = self._rows(kv_c, k_pe, m)
        write, result = self.impl.do_kv_cache_update, lambda: jax.tree.map(spec_of, cache)
        return with_auto_axes(write, result, cache, kv_c, k_pe, m, params)

    def __call__(
        self,
        q: jax.Array,
        kv_c: jax.Array | None,
        k_pe: jax.Array | None,
        cache: PagedKV,
        m: MLAMetadata,
        params: MLAParams,
        topk_indices: jax.Array | None = None,
    ) -> tuple[PagedKV, AttentionState]:
        """Write kv_c and k_pe, unless both are None; then attend."""
        if kv_c is None and k_pe is None:
            return cache, self.attend(q, cache, m, params, topk_indices)
        q = self._checked(q, cache, m, params)
        if topk_indices is not None:
            cache = self.write(kv_c, k_pe, cache, m, params)  # pyright: ignore[reportArgumentType]  neither is None
            return cache, self.attend(q, cache, m, params, topk_indices)
        call = functools.partial(_traced, self.impl, "update_and_forward")
        result = lambda: (jax.tree.map(spec_of, cache), specs_of_state(q))
        return with_auto_axes(call, result, q, *self._rows(kv_c, k_pe, m), cache, m, params)

    def attend(
        self,
        q: jax.Array,
        cache: PagedKV,
        m: MLAMetadata,
        params: MLAParams,
        topk_indices: jax.Array | None = None,
    ) -> AttentionState:
        """Attention over the cache; nothing is written. Each request is computed in the cheaper form.

        topk_indices i32[T n]: sparse attention. Each token attends to the keys at these positions of its own request,
        as far as it would see them otherwise; an entry below 0 names no key, and a repeated one counts once. A token
        without a key has out 0 and lse -inf. Sparse attention is computed in the absorbed form.
        """
        q = self._checked(q, cache, m, params)
        if topk_indices is None:
            return self._attend("forward", q, cache, m, params)
        listed = _INDICES("topk_indices", topk_indices)
        if listed.shape[0] != m.num_tokens:
            raise ValueError(f"topk_indices.shape={listed.shape} must be [T, n] with T={m.num_tokens}")
        return self._attend("forward_listed", q, cache, m, params, jnp.asarray(listed, jnp.int32))

    def forward_mqa(self, q: jax.Array, cache: PagedKV, m: MLAMetadata, params: MLAParams) -> AttentionState:
        """Attention over the cache in the absorbed form: W_UK is multiplied into q, W_UV into the result."""
        return self._attend("forward_mqa", self._checked(q, cache, m, params), cache, m, params)

    def prefill_mha(
        self,
        q: jax.Array,
        cache: PagedKV,
        m: MLAMetadata,
        params: MLAParams,
        kv_c: jax.Array | None = None,
        k_pe: jax.Array | None = None,
    ) -> AttentionState:
        """Attention over the cache in the materialised form: rows are projected to keys and values by kv_b_proj.

        Cached rows are projected and attended to in pieces of bounded size, whose states are merged. If kv_c and k_pe
        are given, the new tokens' rows are read from them instead of from the cache, which may have rounded them.
        """
        q = self._checked(q, cache, m, params)
        new = () if kv_c is None and k_pe is None else self._rows(kv_c, k_pe, m)
        return self._attend("prefill_mha", q, cache, m, params, *new)

    def _attend(self, method: str, q: jax.Array, *args) -> AttentionState:
        return with_auto_axes(functools.partial(_traced, self.impl, method), lambda: specs_of_state(q), q, *args)

    def _checked(self, q, cache: PagedKV, m: MLAMetadata, params: MLAParams) -> jax.Array:
        checks.check_plan(m, self.chosen.get_metadata_cls())
        checks.check_cache(cache, self.cache_spec)
        check_mla_params(self.spec, params)
        check_latent(self.spec, self.cache_spec, params)
        q = checks.check_query(self.spec.materialised, q, m.num_tokens)
        if not self.chosen.supports_dtype(q.dtype):
            raise ValueError(f"q.dtype={q.dtype} must be one of {', '.join(self.chosen.get_supported_dtypes())}")
        return q

    def _rows(self, kv_c, k_pe, m: MLAMetadata) -> tuple[jax.Array, jax.Array]:
        if kv_c is None or k_pe is None:
            raise ValueError("give both kv_c and k_pe, or neither to read only the cache")
        kv_c, k_pe = jnp.asarray(as_array("kv_c", kv_c)), jnp.asarray(as_array("k_pe", k_pe))
        k_pe = k_pe[:, 0] if k_pe.ndim == 3 and k_pe.shape[1] == 1 else k_pe  # [T 1 R], the output of many projections
        for name, x, width in (
            ("kv_c", kv_c, self.spec.kv_lora_rank),
            ("k_pe", k_pe, self.spec.qk_rope_head_dim),
        ):
            if x.shape != (m.num_tokens, width):
                raise ValueError(f"{name}.shape={x.shape} must be [T, width] = {(m.num_tokens, width)}")
            if x.dtype.name not in quant.FLOATS:
                raise ValueError(f"{name}.dtype={x.dtype} must be one of {', '.join(quant.FLOATS)}")
        return kv_c, k_pe


_INDICES = integers(2)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _traced(impl: MLAImpl, method: str, *args):
    """Call a method of the implementation; traced once for equal layers (see the end of jattn.attention)."""
    checks.check_functions(impl.spec)
    return getattr(impl, method)(*args)
