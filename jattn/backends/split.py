"""`split`: divides a batch into decodes and prefills; a backend is chosen for each half.

    tokens [T]   d p p p d p p .     --gather-->   d d .        decode half: query_len <= threshold
                                     --gather-->   p p p p p .  prefill half: the rest
    out    [T]   d p p p d p p 0     <--scatter--

The requests may be in any order. The builder makes the halves, with static shapes, on the host or inside jit. New keys
and values are written once, before either half is computed. `split` takes the first backends that support each half;
`make_split_backend` registers a split of two named backends. Attention without a cache, and encoders, have no decode
half: every request is a prefill.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jattn import device
from jattn.backends import checks, registry
from jattn.backends.base import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from jattn.backends.capability import Question, reasons_against, supports_feature
from jattn.cache import KVCacheSpec, PagedKV
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.errors.arguments import dtype_name, integer, optional, takes, text
from jattn.metadata.attention_type import keys_of, queries_of
from jattn.metadata.batch import CommonAttentionMetadata
from jattn.metadata.subset import subset
from jattn.ops.layer import output_dtype
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from jattn.types import PAD_SLOT_ID, AnyArray, AttentionCGSupport, AttentionType, Feature, MultipleOf, pytree, static

Backend = type[AttentionBackend]


@dataclasses.dataclass(frozen=True)
class Halves:
    """The names of two backends. None: the first in order of preference that supports the half and is not a split."""

    decode: str | None = None  # backend of the decodes
    prefill: str | None = None  # backend of the prefills
    threshold: int = 1  # the most new tokens of a decode

    def names(self, attn_type: AttentionType | str, cached: bool = True) -> dict[str, str | None]:
        """The halves of a layer's batches -> backend names; without a cache and for encoders only 'prefill'."""
        decodes = cached and attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        return (dict(decode=self.decode) if decodes else {}) | dict(prefill=self.prefill)

    def choose(
        self,
        spec: AttentionSpec,
        cache_spec: KVCacheSpec | None,
        chip: Chip,
        needs: tuple[Feature, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> dict[str, Backend]:
        """A backend for each half of this layer; UnsupportedError with every reason if there is none.

        dtypes: of queries and packed keys. If no backend supports them, they are ignored here, and the call raises
        the error.
        """
        dtypes = tuple(dtype_name("dtypes", dtype) for dtype in dtypes)
        layer = (spec, cache_spec, chip, needs, dtypes, registry.entries())
        names = self.names(spec.attn_type, cache_spec is not None)
        return {half: _choose(half, name, *layer) for half, name in names.items()}

    def reasons(self, names: dict[str, str | None], reasons_of: Callable[[Backend], Iterable[str]]) -> list[str]:
        """For each half that no backend supports: the reasons of every backend, as `reasons_of` gives them."""
        found = []
        for half, name in names.items():
            refusals = {registry.name_of(backend): list(reasons_of(backend)) for backend in candidates(name)}
            if all(refusals.values()):
                found += [f"{half} half ({name}): {why}" for name, reasons in refusals.items() for why in reasons]
        return found

    def both(self, supports: Callable[[Backend], bool]) -> bool:
        """Is there, for each half, a backend for which `supports` is true?"""
        return all(any(map(supports, candidates(name))) for name in (self.decode, self.prefill))


def candidates(name: str | None) -> list[Backend]:
    """The named backend; None: all but split backends and those for latent caches."""
    if name is not None:
        return [registry.load(name)]
    backends = map(registry.load, registry.list_backends())
    return [backend for backend in backends if not issubclass(backend, DividedBackend) and not backend.is_mla()]


class DividedBackend(AttentionBackend):
    """A backend that computes each half of a batch with another backend.

    It supports what both halves support and the class attributes below list.
    """

    halves: ClassVar[Halves] = Halves()
    supported_dtypes = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
    supported_kv_cache_dtypes = (
        *("auto", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "float8_e4m3fnuz"),
    )
    supported_block_sizes = (MultipleOf(1),)
    attn_types = (
        AttentionType.DECODER,
        AttentionType.ENCODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    platforms = ("cpu", "gpu", "tpu")
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
    features = frozenset(
        {
            Feature.MM_PREFIX,
            Feature.SINK,
            Feature.PER_HEAD_QUANT_SCALES,
            Feature.SLIDING_WINDOW,
            Feature.RSWA,
            Feature.NON_CAUSAL,
            Feature.BATCH_INVARIANCE,
            Feature.TWO_SIDED_WINDOW,
            Feature.CHUNK,
            Feature.CHUNK_LOOKBACK,
            Feature.ALIBI,
            Feature.ALIBI_SQRT,
            Feature.SOFT_CAP,
            Feature.MASK_FN,
            Feature.SCORE_FN,
            Feature.QQ_BIAS,
            Feature.DISTANCE_BIAS,
            Feature.PER_REQUEST_CAUSAL,
            Feature.DIFF_KV,
            Feature.LSE,
            Feature.PACKED,
            Feature.FUSED_OUTPUT_QUANT,
        }
    )

    @classmethod
    def supports(cls, feature: Feature) -> bool:
        return super().supports(feature) and cls.halves.both(lambda backend: supports_feature(backend, feature))

    @classmethod
    def supports_dtype(cls, dtype) -> bool:
        return super().supports_dtype(dtype) and cls.halves.both(lambda backend: backend.supports_dtype(dtype))

    @classmethod
    def supports_platform(cls, platform: str, generation: str = "") -> bool:
        halves_run = cls.halves.both(lambda backend: backend.supports_platform(platform, generation))
        return super().supports_platform(platform, generation) and halves_run

    @classmethod
    def validate_configuration(cls, head_size: int, **flags) -> list[str]:
        names = cls.halves.names(flags.get("attn_type", AttentionType.DECODER))
        halves = cls.halves.reasons(names, lambda backend: backend.validate_configuration(head_size, **flags))
        return [*cls._own_reasons(Question.from_flags(head_size, **flags)), *halves]

    @classmethod
    def reasons(cls, spec, cache_spec, chip, needs=(), dtypes=()) -> tuple[str, ...]:
        names = cls.halves.names(spec.attn_type, cache_spec is not None)
        layer = (spec, cache_spec, chip, needs, dtypes)
        halves = cls.halves.reasons(names, lambda backend: backend.reasons(*layer))
        own = cls.layer_reasons(spec, cache_spec, chip)
        return (*cls._own_reasons(Question.of(spec, cache_spec, chip, needs), own), *halves)

    @classmethod
    def _own_reasons(cls, question: Question, own: tuple[str, ...] = ()) -> list[str]:
        """Reasons of the split's own lists, without those of its halves."""
        return reasons_against(_own_lists(cls), question, own)


@functools.cache
def _own_lists(backend: type[DividedBackend]) -> Backend:
    """A class with the lists of the split, whose predicates do not ask its halves."""
    own = {}
    for name in ("supports", "supports_dtype", "supports_platform"):
        if getattr(backend, name).__func__ is getattr(DividedBackend, name).__func__:
            own[name] = classmethod(getattr(AttentionBackend, name).__func__)
    return type(backend.__name__, (backend,), own)


@functools.lru_cache(maxsize=256)
def _choose(half: str, name: str | None, spec, cache_spec, chip: Chip, needs, dtypes, table) -> Backend:
    """`table` is part of the key, so a newly registered backend is found."""
    refusals: dict[Backend, tuple[str, ...]] = {}
    for given in dict.fromkeys((dtypes, ())):
        refusals = {backend: backend.reasons(spec, cache_spec, chip, needs, given) for backend in candidates(name)}
        supporting = [backend for backend, reasons in refusals.items() if not reasons]
        if supporting:
            return supporting[0]
    raise UnsupportedError(
        f"no backend supports the {half} half of this batch: {registry.layer_text(spec, cache_spec)}",
        {registry.name_of(backend): reasons for backend, reasons in refusals.items()},
    )


@pytree
class Half:
    """One half: its plan, and the indices of its tokens and requests in the batch (None: it is the whole batch)."""

    plan: Any  # made by the builder of `backend`
    tokens: jax.Array | None  # i32[tokens of the half] index in the batch; T: padding
    requests: jax.Array | None  # i32[R] index in the batch
    backend: str = static()  # the name of the backend that computes it


@pytree
class SplitMetadata:
    """The plans of a batch's halves, and where its new tokens are written."""

    halves: dict[str, Half]  # "decode", "prefill", or both
    block_table: AnyArray | None  # i32[R B] of the whole batch
    slot_mapping: AnyArray  # i32[T] of the whole batch
    num_tokens: int = static()  # T


@dataclasses.dataclass(frozen=True)
class SplitMetadataBuilder(AttentionMetadataBuilder[SplitMetadata]):
    """Makes two batches of one, and the plan of each."""

    halves: ClassVar[Halves] = Halves()
    cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SplitMetadata:
        """common_prefix_len is passed to both builders: it is common to all requests, so also to those of each half."""
        common = common_attn_metadata
        needs = tuple(feature for feature, _ in checks.causal_needs(self.spec, common))
        dtypes = () if self.dtype is None else (self.dtype,)
        chosen = self.halves.choose(self.spec, self.cache_spec, self.chip, needs, dtypes)
        halves = {}
        for half, (part, tokens, requests) in self._parts(common, "decode" in chosen).items():
            plan = self._builder(chosen[half]).build(common_prefix_len, part, fast_build)
            halves[half] = Half(plan=plan, tokens=tokens, requests=requests, backend=registry.name_of(chosen[half]))
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
        """(batch, tokens, requests) of each half: see Half. A batch with one half only is not divided."""
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

    def update_block_table(self, metadata: SplitMetadata, block_table, slot_mapping) -> SplitMetadata:
        """The builder of each half replaces that half's rows and slots."""
        halves = {}
        for name, half in metadata.halves.items():
            table, slots = block_table, slot_mapping
            if half.requests is not None:
                table = jnp.asarray(block_table)[half.requests]
            if half.tokens is not None and self.spec.attn_type is not AttentionType.ENCODER_DECODER:
                slots = jnp.asarray(slots).at[half.tokens].get(mode="fill", fill_value=PAD_SLOT_ID)
            plan = self._builder(half.backend).update_block_table(half.plan, table, slots)
            halves[name] = dataclasses.replace(half, plan=plan)
        return dataclasses.replace(metadata, halves=halves, block_table=block_table, slot_mapping=slot_mapping)

    def for_layer(self, metadata: SplitMetadata, layer, blocks_per_layer: int) -> SplitMetadata:
        """The plan of each half for that layer, and the slots of the whole batch."""
        halves = {}
        for name, half in metadata.halves.items():
            plan = self._builder(half.backend).for_layer(half.plan, layer, blocks_per_layer)
            halves[name] = dataclasses.replace(half, plan=plan)
        table = jnp.asarray(metadata.block_table) + layer * blocks_per_layer
        slots = self.slots_of_layer(metadata, layer, blocks_per_layer)
        return dataclasses.replace(metadata, halves=halves, block_table=table, slot_mapping=slots)

    @classmethod
    def get_cudagraph_support(cls, spec: AttentionSpec, cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """ALWAYS if the prefill half covers any batch and the decode half covers every batch of decodes."""
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
    """Gathers each half, computes it with its backend, and scatters the results. The gradient is that of the halves."""

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
        """Write the whole batch at once: by the halves' method if both have the same one, else by write_kv."""
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
    """The split of the first backends that support each half."""

    name = "split"
    impl_cls = SplitImpl
    builder_cls = SplitMetadataBuilder
    metadata_cls = SplitMetadata


@takes(name=text, decode=optional(text), prefill=optional(text), decode_threshold=integer(1), before=optional(text))
def make_split_backend(
    name: str,
    *,
    decode: str | None = None,
    prefill: str | None = None,
    decode_threshold: int = 1,
    before: str | None = None,
) -> type[SplitBackend]:
    """Register `name` as a split of two named backends (None: the first that supports the half), and return it.

    A request with at most decode_threshold new tokens is a decode. With speculative decoding give 1 + drafted tokens.
    """
    for half in (decode, prefill):
        if half is not None and issubclass(registry.load(half), DividedBackend):
            raise ValueError(f"backend {half!r} is itself a split; name backends that are not splits")
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
