"""The three classes of a backend: AttentionBackend lists what it supports, AttentionMetadataBuilder plans a batch,
AttentionImpl computes.

A new backend subclasses all three and has a metadata class of its own; docs/how_to_add.md shows one. The other methods
of vLLM's classes are inherited from jattn.compat.vllm.backend_methods.
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
from jattn.ops.rotation import Angles, rotate
from jattn.ops.state import AttentionState
from jattn.spec import AttentionParams, AttentionSpec
from jattn.types import PAD_SLOT_ID, AnyArray, AttentionType, Feature, MultipleOf, bases_of
from pallas_kernels.algebra.checks import Subject, subjects


class AttentionMetadata(Protocol):
    """The plan of a batch: a pytree that the backend's builder makes once per step."""

    @property
    def num_tokens(self) -> int:
        """T, the number of query tokens, padding included."""
        ...

    @property
    def block_table(self) -> AnyArray | None:
        """i32[R B] the blocks of the keys; of a cascade, those of the last level. None: the keys are packed."""
        ...

    @property
    def slot_mapping(self) -> AnyArray:
        """i32[T] the slot that each row of k and v is written to; T: of the encoder for an encoder_decoder layer."""
        ...


M = TypeVar("M", bound=AttentionMetadata)


@dataclasses.dataclass(frozen=True)
class AttentionMetadataBuilder(BuilderMethods, abc.ABC, Generic[M]):
    """Makes the plan of a batch for one layer. It holds no state: build runs on the host or inside jit."""

    # True: update_block_table replaces the fields block_table and slot_mapping of M, or is overridden.
    supports_update_block_table: ClassVar[bool] = False
    spec: AttentionSpec  # the layer
    cache_spec: KVCacheSpec  # its cache; attention without a cache has no plan
    chip: Chip  # the chip that will compute
    parallel: ContextParallel = ContextParallel()  # mesh axes over which keys are distributed
    dtype: str | None = None  # of the queries; None: not known

    @property
    def shares_prefixes(self) -> bool:
        """Do plans of this layer read the keys once that a batch's common_prefix_len says are shared?"""
        return False

    @abc.abstractmethod
    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> M:
        """The plan of this batch.

        common_prefix_len: the first keys that all requests share, in the same blocks. Results must not depend on it.
        The batch has an array of this name, for a number that is not static.
        fast_build: prefer a plan that is built quickly over one that runs quickly.
        """

    def update_block_table(self, metadata: M, block_table: jax.Array, slot_mapping: jax.Array) -> M:
        """The same plan with another block table: for layers with the same lengths and other blocks."""
        if not self.supports_update_block_table:
            raise UnsupportedError(f"{type(self).__name__} cannot exchange the block table of a plan; build a new plan")
        plan: Any = metadata  # a dataclass with these fields, which the protocol does not say
        return dataclasses.replace(plan, block_table=block_table, slot_mapping=slot_mapping)

    def for_layer(self, metadata: M, layer: jax.Array | int, blocks_per_layer: int) -> M:
        """The plan of layer l if all layers share one pool: its blocks begin at l * blocks_per_layer."""
        table = jnp.asarray(metadata.block_table) + layer * blocks_per_layer
        return self.update_block_table(metadata, table, self.slots_of_layer(metadata, layer, blocks_per_layer))

    def slots_of_layer(self, metadata: M, layer: jax.Array | int, blocks_per_layer: int) -> jax.Array:
        """The slot_mapping of for_layer. A slot outside the layer's blocks becomes PAD_SLOT_ID."""
        slots, per_layer = jnp.asarray(metadata.slot_mapping), blocks_per_layer * self.cache_spec.block_size
        return jnp.where((slots >= 0) & (slots < per_layer), slots + layer * per_layer, PAD_SLOT_ID)

    def build_cascade(self, levels: tuple[CommonAttentionMetadata, ...]) -> M:
        """The plan of queries with keys in levels: see jattn.cascade_attention."""
        raise UnsupportedError(f"{type(self).__name__} has no cascade; use backend='sdpa'")


@dataclasses.dataclass(frozen=True)
class AttentionImpl(ImplMethods, abc.ABC, Generic[M]):
    """Computes one layer on one chip. Equal ones share one trace. jattn.attention checks the arguments."""

    spec: AttentionSpec  # the layer
    cache_spec: KVCacheSpec | None  # its cache; None: attention without a cache only
    chip: Chip  # the chip that computes
    parallel: ContextParallel = ContextParallel()  # mesh axes over which keys are distributed

    @abc.abstractmethod
    def forward(self, q: jax.Array, cache: PagedKV, m: M, params: AttentionParams) -> AttentionState:
        """Attention of q [T H D] over the cached keys of the plan m, which the backend's builder made."""

    def forward_packed(
        self, q: jax.Array, k: jax.Array, v: jax.Array, meta: CommonAttentionMetadata, params: AttentionParams
    ) -> AttentionState:
        """Attention of q [T H D] over packed k [Tk K D], v [Tk K V]. Those of request r begin at sum(seq_lens[:r])."""
        raise UnsupportedError(f"{type(self).__name__} attends over pages only; use backend='sdpa' for packed k, v")

    def for_batch(self, meta: CommonAttentionMetadata) -> "AttentionImpl":
        """The impl of a packed batch, given it before a trace hides its lengths: a backend may use what they show."""
        return self

    def do_kv_cache_update(self, cache: PagedKV, k: jax.Array, v: jax.Array, m: M, params: AttentionParams) -> PagedKV:
        """Write k and v to the slots of m. A backend with a cache layout of its own overrides this."""
        return write_kv(cache, k, v, jnp.asarray(m.slot_mapping), params)

    def update_and_forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, cache: PagedKV, m: M, params: AttentionParams
    ) -> tuple[PagedKV, AttentionState]:
        """Write k and v, then attend. A backend whose kernel does both overrides this."""
        cache = self.do_kv_cache_update(cache, k, v, m, params)
        return cache, self.forward(q, cache, m, params)

    def rotate_update_and_forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, angles: Angles, cache: PagedKV, m: M, params: AttentionParams
    ) -> tuple[PagedKV, AttentionState]:
        """The same after rotating q and k. A backend with a kernel that rotates and writes overrides this."""
        return self.update_and_forward(rotate(q, angles), rotate(k, angles), v, cache, m, params)

    def prepare_params(self, params: AttentionParams) -> AttentionParams:
        """Transform the weights once after loading, e.g. split MLA's kv_b_proj."""
        return params


class AttentionBackend(BackendMethods):
    """What a backend supports, and its other two classes. A backend sets the class attributes below.

    An empty list supports nothing. A backend refuses what it does not list, so a feature, dtype or layout that is added
    later is refused by every older backend. A backend overrides a method only if a list cannot say what it supports.
    """

    name: ClassVar[str]  # the name under which it is registered
    impl_cls: ClassVar[type[AttentionImpl]]  # computes
    builder_cls: ClassVar[type[AttentionMetadataBuilder]]  # plans
    metadata_cls: ClassVar[type[AttentionMetadata]]  # the plan: a pytree that builder_cls makes and impl_cls takes

    supported_dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")  # of the queries
    supported_kv_cache_dtypes: ClassVar[tuple[str, ...]] = ("auto", "float16", "bfloat16")  # "auto": the queries' dtype
    supported_head_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(1),)  # head_dim and v_head_dim
    supported_block_sizes: ClassVar[tuple[int | MultipleOf, ...]] = (MultipleOf(1),)  # tokens of a block
    attn_types: ClassVar[tuple[AttentionType, ...]] = (AttentionType.DECODER,)
    kv_cache_layouts: ClassVar[tuple[str, ...]] = ("NHD", "HND")  # see KVCacheSpec.layout
    quant_modes: ClassVar[tuple[str, ...]] = ("none",)  # see KVCacheSpec.quant
    platforms: ClassVar[tuple[str, ...]] = ("cpu", "gpu", "tpu")
    min_compute_capability: ClassVar[int] = 0  # of a GPU: 90 for sm_90
    features: ClassVar[frozenset[Feature]] = frozenset()
    mla: ClassVar[bool] = False  # True: supports latent caches and no other
    sparse: ClassVar[bool] = False  # True: attends to listed tokens only
    ssm: ClassVar[bool] = False  # True: has a recurrent state instead of a cache

    def __new__(cls, *args, **kwargs):
        raise TypeError(f"{cls.__name__} is never instantiated: use its get_impl_cls() and get_builder_cls()")

    @classmethod
    def get_name(cls) -> str:
        """The name under which the backend is registered."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """The class that computes."""
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        """The class that plans a batch."""
        return cls.builder_cls

    @classmethod
    def get_metadata_cls(cls) -> type[AttentionMetadata]:
        """The class of the plan."""
        return cls.metadata_cls

    @classmethod
    def supports_dtype(cls, dtype) -> bool:
        """Does it support queries of this dtype, given by name or as a dtype?"""
        return jnp.dtype(dtype).name in cls.get_supported_dtypes()

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Does it support this head_dim or v_head_dim?"""
        return any(
            head_size % size.base == 0 if isinstance(size, MultipleOf) else head_size == size
            for size in cls.get_supported_head_sizes()
        )

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Does it support caches of this dtype? vLLM's names are accepted too; None: True."""
        return kv_cache_dtype is None or cache_dtype_name(kv_cache_dtype) in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Does a supported size divide this block size, so that blocks can be split? None: True."""
        bases = bases_of(cls.get_supported_kernel_block_sizes())
        return block_size is None or any(block_size % base == 0 for base in bases)

    @classmethod
    def supports(cls, feature: Feature) -> bool:
        """Does it support this feature?"""
        return feature in cls.features

    @classmethod
    def supports_attn_type(cls, attn_type: AttentionType | str) -> bool:
        """Does it support layers of this type?"""
        return attn_type in cls.attn_types

    @classmethod
    def supports_platform(cls, platform: str, generation: str = "") -> bool:
        """Does it run on this platform ('cpu', 'gpu', 'tpu') and generation (see Chip)?"""
        return platform in cls.platforms

    @classmethod
    def supports_compute_capability(cls, capability: int) -> bool:
        """Does it run on a GPU of this compute capability (90: sm_90)? 0, for an unknown one: True."""
        return not capability or capability >= cls.min_compute_capability

    @classmethod
    def supports_combination(cls, question: Question) -> str | None:
        """The reason against a combination whose parts are supported one by one; None: it is supported."""
        return None

    @classmethod
    def layer_reasons(cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip) -> tuple[str, ...]:
        """Reasons against a layer that the lists cannot express, e.g. alignments, or a library that is missing."""
        return ()

    @classmethod
    def query_reasons(
        cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip, dtype: str, keys: str | None = None
    ) -> tuple[str, ...]:
        """Reasons against queries of this dtype over this cache; without a cache, over packed keys of dtype `keys`."""
        reasons = []
        if not cls.supports_dtype(dtype):
            known = ", ".join(cls.get_supported_dtypes())
            reasons.append(f"dtype not supported: {dtype} seen, {known} supported")
        if keys is not None and not cls.supports_kv_cache_dtype(keys):
            known = ", ".join(cls.supported_kv_cache_dtypes)
            reasons.append(f"dtype of packed keys not supported: {keys} seen, {known} supported")
        return tuple(reasons)

    @classmethod
    def gradient_by(
        cls, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip, dtypes: tuple[str, ...] = ()
    ) -> str:
        """What computes the gradient of a layer that is supported, and why: for jattn.explain. "": there is one way."""
        return ""

    @classmethod
    def kernel_name(cls, chip: Chip, cache_spec: KVCacheSpec | None) -> str:
        """Which kernel computes a layer with this cache on this chip; empty: the backend has only one."""
        return ""

    @classmethod
    def validate_configuration(cls, head_size: int, **flags) -> list[str]:
        """Every reason against a configuration given in vLLM's keywords (see Question.from_flags), in a fixed order."""
        return reasons_against(cls, Question.from_flags(head_size, **flags))

    @classmethod
    def reasons(
        cls,
        spec: AttentionSpec,
        cache_spec: KVCacheSpec | None,
        chip: Chip,
        needs: tuple[Feature, ...] = (),
        dtypes: tuple[str, ...] = (),
    ) -> tuple[str, ...]:
        """Every reason against this layer over this cache (None: packed keys) on this chip. Empty: it is supported.

        dtypes: of the queries and, without a cache, of the packed keys. Empty: they are not checked.
        """
        of_queries = cls.query_reasons(spec, cache_spec, chip, *dtypes) if dtypes else ()
        told = subjects(of_queries)  # layer_reasons would say the same of queries of the default dtype
        if cache_spec is not None and not cls.supports_block_size(cache_spec.block_size):
            told.add(Subject.PAGE_SIZE)  # reasons_against says it, from the list of sizes
        of_layer = (why for why in cls.layer_reasons(spec, cache_spec, chip) if not subjects([why]) & told)
        return tuple(reasons_against(cls, Question.of(spec, cache_spec, chip, needs), (*of_layer, *of_queries)))


def fits(program: CommonAttentionMetadata, batch: CommonAttentionMetadata) -> bool:
    """Does `batch` have the trace key of `program` (of arrays or ShapeDtypeStructs), so that no step is compiled?"""
    key = lambda meta: [(x.shape, x.dtype) for x in jax.tree.leaves(meta)]  # noqa: E731
    return jax.tree.structure(program) == jax.tree.structure(batch) and key(program) == key(batch)


@runtime_checkable
class AttentionLayer(Protocol):
    """A layer object with a static spec and traced params. A call takes the cache and returns the new one."""

    spec: AttentionSpec
    params: AttentionParams

    def __call__(
        self, q: jax.Array, k: jax.Array | None, v: jax.Array | None, cache: PagedKV, m: Any
    ) -> tuple[PagedKV, AttentionState]:
        """Write k and v, unless they are None; then attend."""
        ...
