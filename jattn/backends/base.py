"""What a backend is: it says what it can do (AttentionBackend), plans a batch (its builder), computes (its impl).

A new backend subclasses all three and names a metadata pytree; docs/how_to_add.md shows one. vLLM's further methods
are inherited from jattn.compat.vllm.backend_methods.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp

from jattn.backends.capability import Question, cache_dtype_name, reasons_against
from jattn.backends.parallel import ContextParallel
from jattn.cache import KVCacheSpec, PagedKV, write_kv
from jattn.compat.vllm.backend_methods import BackendMethods, BuilderMethods, ImplMethods
from jattn.device import Chip
from jattn.errors import UnsupportedError
from jattn.metadata import CommonAttentionMetadata
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import PAD_SLOT_ID, AttentionType, Feature, MultipleOf, bases_of


class AttentionMetadata(Protocol):
    """A pytree, made by the backend's builder once a step: its queries, the pages it reads, the slots it writes."""

    @property
    def num_tokens(self) -> int:
        """Padded query tokens, T."""
        ...

    @property
    def block_table(self) -> jax.Array | None:
        """i32[R B]; the encoder's for an encoder_decoder layer, the last level's for a cascade; None: packed keys."""
        ...

    @property
    def slot_mapping(self) -> jax.Array:
        """i32[T] where k, v are written: one a row of k; the encoder's for an encoder_decoder layer."""
        ...


M = TypeVar("M", bound=AttentionMetadata)


@dataclasses.dataclass(frozen=True)
class AttentionMetadataBuilder(BuilderMethods, abc.ABC, Generic[M]):
    """Holds no state: build is pure and may run on the host or inside jit."""

    supports_update_block_table: ClassVar[bool] = False  # of M's fields block_table and slot_mapping, or its own way
    spec: AttentionSpec
    cache_spec: KVCacheSpec  # packed attention needs no plan
    chip: Chip
    parallel: ContextParallel = ContextParallel()
    dtype: str | None = None  # of the queries, where it decides who computes; None: not known

    @abc.abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """The plan of this batch; fast_build favours a quick plan over a fast kernel.

        Every request's first common_prefix_len keys are the same pages: a hint, results do not depend on it.
        """

    def update_block_table(self, metadata: M, block_table: jax.Array, slot_mapping: jax.Array) -> M:
        """The same plan over other pages: for layers that share lengths but not pages."""
        if not self.supports_update_block_table:
            raise UnsupportedError(f"{type(self).__name__} cannot exchange the block table of a plan; build it anew")
        fields = {"block_table": block_table, "slot_mapping": slot_mapping}
        return dataclasses.replace(metadata, **fields)  # pyright: ignore[reportArgumentType]

    def for_layer(self, metadata: M, layer: jax.Array | int, blocks_per_layer: int) -> M:
        """The plan of layer l where layers share one pool: its pages begin at l * blocks_per_layer."""
        table = jnp.asarray(metadata.block_table) + layer * blocks_per_layer
        return self.update_block_table(metadata, table, self.slots_of_layer(metadata, layer, blocks_per_layer))

    def slots_of_layer(self, metadata: M, layer: jax.Array | int, blocks_per_layer: int) -> jax.Array:
        """The slots of for_layer; one that lies outside a layer's own pages still writes nowhere."""
        slots, per_layer = jnp.asarray(metadata.slot_mapping), blocks_per_layer * self.cache_spec.block_size
        return jnp.where((slots >= 0) & (slots < per_layer), slots + layer * per_layer, PAD_SLOT_ID)

    def build_cascade(self, levels: tuple[CommonAttentionMetadata, ...]) -> M:
        """The plan of queries whose keys come in levels, each level's requests within one of the level before."""
        raise UnsupportedError(f"{type(self).__name__} has no cascade; use backend='sdpa'")


@dataclasses.dataclass(frozen=True)
class AttentionImpl(ImplMethods, abc.ABC, Generic[M]):
    """A layer on a chip: equal values share one trace. Inputs were checked at the door (jattn.attention)."""

    spec: AttentionSpec
    cache_spec: KVCacheSpec | None  # None: packed attention only
    chip: Chip
    parallel: ContextParallel = ContextParallel()

    @abc.abstractmethod
    def forward(self, q: jax.Array, cache: PagedKV, m: M, params: AttentionParams) -> AttentionState:
        """q [T H D] over the pages that m names; m is what the backend's builder made."""

    def forward_packed(
        self, q: jax.Array, k: jax.Array, v: jax.Array, meta: CommonAttentionMetadata, params: AttentionParams
    ) -> AttentionState:
        """q [T H D] over packed k [Tk K D], v [Tk K V]; request r owns keys cumsum(seq_lens)[r-1] onwards."""
        raise UnsupportedError(f"{type(self).__name__} attends over pages only; use backend='sdpa' for packed k, v")

    def do_kv_cache_update(self, cache: PagedKV, k: jax.Array, v: jax.Array, m: M, params: AttentionParams) -> PagedKV:
        """Store k, v at m's slots; a cache layout of the backend's own overrides it."""
        return write_kv(cache, k, v, m.slot_mapping, params)

    def update_and_forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: PagedKV, m: M, params: AttentionParams
    ) -> tuple[PagedKV, AttentionState]:
        """Write, then attend; a kernel that does both at once overrides it."""
        cache = self.do_kv_cache_update(cache, k, v, m, params)
        return cache, self.forward(q, cache, m, params)

    def prepare_params(self, params: AttentionParams) -> AttentionParams:
        """Once after loading, before serving: a layer that folds its weights (MLA) does it here."""
        return params


class AttentionBackend(BackendMethods):
    """Capability is data: a backend sets the class attributes below, and overrides a method only for a rule.

    Every attribute lists what is supported; an empty list supports nothing. What a backend does not list it refuses, so
    a feature, a dtype or a layout added later is refused by every older backend.
    """

    name: ClassVar[str]  # under which it is registered
    impl_cls: ClassVar[type[AttentionImpl]]
    builder_cls: ClassVar[type[AttentionMetadataBuilder]]
    metadata_cls: ClassVar[type[AttentionMetadata]]

    supported_dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")  # of the query
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto", "float16", "bfloat16")
    supported_head_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(1),)
    supported_block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(1),)
    attn_types: ClassVar[tuple[AttentionType, ...]] = (AttentionType.DECODER,)
    kv_cache_layouts: ClassVar[tuple[str, ...]] = ("NHD", "HND")
    quant_modes: ClassVar[tuple[str, ...]] = ("none",)
    platforms: ClassVar[tuple[str, ...]] = ("cpu", "gpu", "tpu")
    min_compute_capability: ClassVar[int] = 0  # 90 for sm_90; only GPUs have one
    features: ClassVar[frozenset[Feature]] = frozenset()
    mla: ClassVar[bool] = False  # latent caches only
    sparse: ClassVar[bool] = False  # attends to listed tokens only
    ssm: ClassVar[bool] = False  # a state, not a cache

    def __new__(cls, *args, **kwargs):
        raise TypeError(f"{cls.__name__} is never instantiated: it only hands out get_impl_cls() and get_builder_cls()")

    @classmethod
    def get_name(cls) -> str:
        """The name under which it is registered."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """What computes."""
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        """What turns common metadata into the backend's own."""
        return cls.builder_cls

    @classmethod
    def get_metadata_cls(cls) -> type[AttentionMetadata]:
        """The pytree that the builder makes and the impl takes."""
        return cls.metadata_cls

    @classmethod
    def supports_dtype(cls, dtype) -> bool:
        """By name or by dtype object."""
        return jnp.dtype(dtype).name in cls.supported_dtypes

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """True where the list holds it, or a number that it is declared a multiple of."""
        return any(
            head_size % size.base == 0 if isinstance(size, MultipleOf) else head_size == size
            for size in cls.get_supported_head_sizes()
        )

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """None: not asked; else membership, after vLLM's spellings are made ours."""
        return kv_cache_dtype is None or cache_dtype_name(kv_cache_dtype) in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """None: not asked; else some listed size divides it, as pages can be split."""
        bases = bases_of(cls.get_supported_kernel_block_sizes())
        return block_size is None or any(block_size % base == 0 for base in bases)

    @classmethod
    def supports(cls, feature: Feature) -> bool:
        """The one place where a feature is looked up."""
        return feature in cls.features

    @classmethod
    def supports_attn_type(cls, attn_type: AttentionType | str) -> bool:
        """Decoders, unless more is declared."""
        return attn_type in cls.attn_types

    @classmethod
    def supports_platform(cls, platform: str, generation: str = "") -> bool:
        """'cpu', 'gpu' or 'tpu', and where it matters a generation."""
        return platform in cls.platforms

    @classmethod
    def supports_compute_capability(cls, capability: int) -> bool:
        """90 for sm_90; 0 where it is unknown, which is no reason to refuse."""
        return not capability or capability >= cls.min_compute_capability

    @classmethod
    def supports_combination(cls, question: Question) -> str | None:
        """A reason where each part is supported but not all together."""
        return None

    @classmethod
    def layer_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip) -> tuple[str, ...]:
        """Further reasons that only this backend has: alignments, sizes, a library that is not there."""
        return ()

    @classmethod
    def query_reasons(
        cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip, dtype: str, keys: str | None = None
    ) -> tuple[str, ...]:
        """Why not queries of this dtype over this cache, or (cache_spec None) over packed keys of dtype `keys`."""
        reasons = []
        if not cls.supports_dtype(dtype):
            known = ", ".join(cls.get_supported_dtypes())
            reasons.append(f"dtype not supported: {dtype} seen, {known} supported")
        if keys is not None and not cls.supports_kv_cache_dtype(keys):
            known = ", ".join(cls.supported_kv_cache_dtypes)
            reasons.append(f"dtype of packed keys not supported: {keys} seen, {known} supported")
        return tuple(reasons)

    @classmethod
    def validate_configuration(cls, head_size: int, **asked) -> list[str]:
        """Every reason against, in a fixed order. Keywords are vLLM's: see Question.from_flags."""
        return reasons_against(cls, Question.from_flags(head_size, **asked))

    @classmethod
    def reasons(
        cls,
        spec: AttentionSpec,
        cache_spec: KVCacheSpec | None,
        chip: Chip,
        needs: tuple[Feature, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> tuple[str, ...]:
        """Every reason against this layer over this cache (None: packed) on this chip; empty: it runs.

        dtypes: of the queries and, where there is no cache, of the packed keys; (): not asked.
        """
        own = cls.layer_reasons(spec, cache_spec, chip)
        own += cls.query_reasons(spec, cache_spec, chip, *dtypes) if dtypes else ()
        return tuple(reasons_against(cls, Question.of(spec, cache_spec, chip, needs), own))


def fits(program: CommonAttentionMetadata, batch: CommonAttentionMetadata) -> bool:
    """Would `batch` run on the step compiled for `program` (arrays or ShapeDtypeStructs)? Same trace key."""
    key = lambda meta: [(x.shape, x.dtype) for x in jax.tree.leaves(meta)]  # noqa: E731
    return jax.tree.structure(program) == jax.tree.structure(batch) and key(program) == key(batch)


@runtime_checkable
class AttentionLayer(Protocol):
    """Static spec, traced params (whose scales are None for exactly 1), state in and state out."""

    spec: AttentionSpec
    params: AttentionParams

    def __call__(
        self, q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: PagedKV, m: Any
    ) -> tuple[PagedKV, AttentionState]:
        """Write k, v unless they are None, then attend."""
        ...
