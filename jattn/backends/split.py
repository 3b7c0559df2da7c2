"""`split`: a batch in two halves, decodes and prefills, each computed by the implementation chosen for it.

    tokens [T]   d p p p d p p .     --gather-->   d d .        decode half: query_len <= threshold
                                     --gather-->   p p p p p .  prefill half: the rest
    out    [T]   d p p p d p p 0     <--scatter--

Requests may stand in any order; the halves are made in the builder, with static shapes, in jit or not. New keys and
values are written once, before the halves look. The default halves are the best that the chip has;
`make_split_backend` names a pair. Packed attention and encoders have no decode half: there is no cache to decode from.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jattn import device
from jattn.backends import checks, registry
from jattn.backends.backend import AttentionBackend
from jattn.backends.builder import AttentionMetadataBuilder
from jattn.backends.halves import DividedBackend, Halves
from jattn.backends.impl import AttentionImpl
from jattn.cache import KVCacheSpec, PagedKV
from jattn.errors.arguments import integer, optional, takes, text
from jattn.metadata.batch import CommonAttentionMetadata, keys_of, queries_of
from jattn.metadata.subset import subset
from jattn.ops.attend import output_dtype
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from jattn.types import PAD_SLOT_ID, AttentionCGSupport, AttentionType, pytree, static


@pytree
class Half:
    """One half's plan, and where its tokens and requests stand in the batch; None: the half is the batch."""

    plan: Any
    tokens: jax.Array | None  # i32[tokens of the half], T for padding
    requests: jax.Array | None  # i32[R]
    backend: str = static()


@pytree
class SplitMetadata:
    """The halves that this batch has, and where its new tokens are written."""

    halves: dict[str, Half]
    block_table: jax.Array | None
    slot_mapping: jax.Array
    num_tokens: int = static()


@dataclasses.dataclass(frozen=True)
class SplitMetadataBuilder(AttentionMetadataBuilder[SplitMetadata]):
    """Two batches out of one; no request has to move for it."""

    halves: ClassVar[Halves] = Halves()
    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SplitMetadata:
        """Each half gets the whole hint: what all requests share, those of a half share too."""
        common = common_attn_metadata
        needs = tuple(feature for feature, _ in checks.causal_needs(self.spec, common))
        dtypes = () if self.dtype is None else (self.dtype,)
        chosen = self.halves.choose(self.spec, self.cache_spec, self.chip, needs, dtypes)
        halves = {}
        for half, (part, tokens, requests) in self._parts(common, "decode" in chosen).items():
            plan = self._builder(chosen[half]).build(common_prefix_len, part, fast_build)
            halves[half] = Half(plan=plan, tokens=tokens, requests=requests, backend=chosen[half].get_name())
        keys = keys_of(common, self.spec.attn_type)
        return SplitMetadata(
            halves=halves,
            block_table=keys.block_table,
            slot_mapping=keys.slot_mapping,
            num_tokens=queries_of(common, self.spec.attn_type).num_tokens,
        )

    def _builder(self, backend: "type[AttentionBackend] | str") -> AttentionMetadataBuilder:
        backend = registry.load(backend) if isinstance(backend, str) else backend
        return backend.get_builder_cls()(self.spec, self.cache_spec, self.chip, self.parallel, self.dtype)

    def _parts(self, common: CommonAttentionMetadata, decodes: bool):
        """(batch, its tokens, its requests) of each half; a batch that is all one half is not taken apart."""
        threshold = self.halves.threshold
        if not decodes:
            return dict(prefill=(common, None, None))
        if common.max_query_len <= threshold:
            return dict(decode=(common, None, None))
        lens = common.query_lens()
        decode_tokens = min(common.num_tokens, common.max_num_reqs * threshold)
        return dict(
            decode=subset(common, (lens > 0) & (lens <= threshold), decode_tokens, threshold),
            prefill=subset(common, lens > threshold, common.num_tokens, common.max_query_len),
        )

    def update_block_table(self, metadata: SplitMetadata, blk_table, slot_mapping) -> SplitMetadata:
        """Each half's builder exchanges the rows and slots that are its own."""
        halves = {}
        for name, half in metadata.halves.items():
            table, slots = blk_table, slot_mapping
            if half.requests is not None:
                table = jnp.asarray(blk_table)[half.requests]
            if half.tokens is not None and self.spec.attn_type is not AttentionType.ENCODER_DECODER:
                slots = jnp.asarray(slots).at[half.tokens].get(mode="fill", fill_value=PAD_SLOT_ID)
            plan = self._builder(half.backend).update_block_table(half.plan, table, slots)
            halves[name] = dataclasses.replace(half, plan=plan)
        return dataclasses.replace(metadata, halves=halves, block_table=blk_table, slot_mapping=slot_mapping)

    def for_layer(self, metadata: SplitMetadata, layer, blocks_per_layer: int) -> SplitMetadata:
        """Each half's pages move, and so do the slots of the whole."""
        halves = {}
        for name, half in metadata.halves.items():
            plan = self._builder(half.backend).for_layer(half.plan, layer, blocks_per_layer)
            halves[name] = dataclasses.replace(half, plan=plan)
        table = jnp.asarray(metadata.block_table) + layer * blocks_per_layer
        slots = self.slots_of_layer(metadata, layer, blocks_per_layer)
        return dataclasses.replace(metadata, halves=halves, block_table=table, slot_mapping=slots)

    @classmethod
    def get_cudagraph_support(cls, spec: AttentionSpec, cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Decodes of one token are a uniform batch, so the prefill half alone decides whether any mix will do."""
        chosen = cls.halves.choose(spec, cache_spec, device.detect())
        support = {half: b.get_builder_cls().get_cudagraph_support(spec, cache_spec) for half, b in chosen.items()}
        single = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        enough = single if cls.halves.threshold == 1 else AttentionCGSupport.ALWAYS
        decode = support.get("decode", AttentionCGSupport.ALWAYS)
        if support["prefill"] is AttentionCGSupport.ALWAYS and decode >= enough:
            return AttentionCGSupport.ALWAYS
        return min(decode, single)


@dataclasses.dataclass(frozen=True)
class SplitImpl(AttentionImpl[SplitMetadata]):
    """Gather, attend by halves, scatter; the halves' own gradients make its gradient."""

    halves: ClassVar[Halves] = Halves()
    can_return_lse_for_decode = True
    supports_quant_query_input = True

    def forward(self, q, cache, m: SplitMetadata, params) -> AttentionState:
        state = AttentionState.empty(
            m.num_tokens, self.num_heads, self.spec.v_head_dim, output_dtype(q.dtype, self.spec)
        )
        for half in m.halves.values():
            backend = registry.load(half.backend)
            checks.check_params(backend, self.spec, self.cache_spec, params)
            checks.check_dtype(backend, q, params)
            impl = self._impl(backend)
            if half.tokens is None:
                return impl.forward(q, cache, half.plan, params)
            rows = q.at[half.tokens].get(mode="fill", fill_value=0)
            part = impl.forward(rows, cache, half.plan, params)
            state = AttentionState(
                out=state.out.at[half.tokens].set(part.out, mode="drop"),
                lse=state.lse.at[half.tokens].set(part.lse, mode="drop"),
            )
        return state

    def do_kv_cache_update(self, cache: PagedKV, k, v, m: SplitMetadata, params) -> PagedKV:
        """Once for the whole batch: the halves' own way where they share one."""
        impls = [self._impl(registry.load(half.backend)) for half in m.halves.values()]
        if len({type(impl).do_kv_cache_update for impl in impls}) == 1:
            return impls[0].do_kv_cache_update(cache, k, v, m, params)
        return super().do_kv_cache_update(cache, k, v, m, params)

    def forward_packed(self, q, k, v, meta: CommonAttentionMetadata, params) -> AttentionState:
        needs = tuple(feature for feature, _ in checks.causal_needs(self.spec, meta))
        backend = self.halves.choose(self.spec, None, self.chip, needs, (q.dtype.name, k.dtype.name))["prefill"]
        checks.check_params(backend, self.spec, None, params)
        checks.check_dtype(backend, q, params)
        return self._impl(backend).forward_packed(q, k, v, meta, params)

    def _impl(self, backend: type[AttentionBackend]) -> AttentionImpl:
        return backend.get_impl_cls()(self.spec, self.cache_spec, self.chip, self.parallel)


class SplitBackend(DividedBackend):
    """The default pair."""

    @classmethod
    def get_name(cls) -> str:
        return "split"

    @classmethod
    def get_impl_cls(cls) -> type[SplitImpl]:
        return SplitImpl

    @classmethod
    def get_builder_cls(cls) -> type[SplitMetadataBuilder]:
        return SplitMetadataBuilder

    @classmethod
    def get_metadata_cls(cls) -> type[SplitMetadata]:
        return SplitMetadata


@takes(name=text, decode=optional(text), prefill=optional(text), decode_threshold=integer(1), before=optional(text))
def make_split_backend(
    name: str,
    *,
    decode: str | None = None,
    prefill: str | None = None,
    decode_threshold: int = 1,
    before: str | None = None,
) -> type[SplitBackend]:
    """Register `name` as a split of two named backends (None: the best that can), and return it.

    A request with at most decode_threshold new tokens is a decode: 1 + drafts, where tokens are speculated.
    """
    for half in (decode, prefill):
        if half is not None and issubclass(registry.load(half), DividedBackend):
            raise ValueError(f"backend {half!r} is itself a split; name backends that compute")
    halves = dict(halves=Halves(decode, prefill, decode_threshold), __module__=__name__)
    impl = type(f"{name}:impl", (SplitImpl,), halves)
    builder = type(f"{name}:builder", (SplitMetadataBuilder,), halves)
    methods = dict(
        get_name=classmethod(lambda cls: name),
        get_impl_cls=classmethod(lambda cls: impl),
        get_builder_cls=classmethod(lambda cls: builder),
    )
    backend = type(name, (SplitBackend,), halves | methods)
    registry.register_backend(name, backend, before=before)
    return backend
