"""`split`: a batch in two halves, decodes and prefills, each computed by the implementation chosen for it.

    tokens [T]   d p p p d p p .     --gather-->   d d .        decode half: query_len <= threshold
                                     --gather-->   p p p p p .  prefill half: the rest
    out    [T]   d p p p d p p 0     <--scatter--

Requests may stand in any order; the halves are made in the builder, with static shapes, in jit or not. New keys and
values are written once, before the halves look. The default halves are the best that the chip has;
`make_split_backend` names a pair. Packed attention and encoders have no decode half: there is no cache to decode from.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jattn import device
from jattn.backends import registry
from jattn.backends.backend import AttentionBackend
from jattn.backends.builder import AttentionMetadataBuilder
from jattn.backends.feature import EVERYTHING, Feature
from jattn.backends.impl import AttentionImpl
from jattn.cache import KVCacheSpec
from jattn.device import Chip
from jattn.metadata.common import CommonAttentionMetadata
from jattn.metadata.encoder import keys_of, queries_of
from jattn.metadata.subset import subset
from jattn.ops.attend import output_dtype
from jattn.ops.state import AttentionState
from jattn.spec import AttentionSpec
from jattn.types import PAD_SLOT_ID, AttentionCGSupport, AttentionType, pytree, static
from pallas_kernels.algebra import quant


@dataclasses.dataclass(frozen=True)
class Halves:
    """Which backend computes which half; None: the first in order of preference that can, other than a split."""

    decode: str | None = None
    prefill: str | None = None
    threshold: int = 1  # longest query of a decode

    def named(self, attn_type: AttentionType, cached: bool) -> dict[str, str | None]:
        """The halves that such a layer has, by name."""
        decodes = cached and attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
        return (dict(decode=self.decode) if decodes else {}) | dict(prefill=self.prefill)

    def chosen(
        self, spec: AttentionSpec, cache_spec: KVCacheSpec | None, chip: Chip
    ) -> dict[str, type[AttentionBackend]]:
        """The backends of this layer's halves; those that can were asked for at the door."""
        return {
            half: next((b for b in _candidates(name) if not b.reasons(spec, cache_spec, chip)), _candidates(name)[0])
            for half, name in self.named(spec.attn_type, cache_spec is not None).items()
        }

    def reasons(
        self, attn_type: AttentionType, cached: bool, ask: Callable[[type[AttentionBackend]], Iterable[str]]
    ) -> list[str]:
        """Why some half has nobody to compute it, half by half; `ask` gives one backend's reasons."""
        found = []
        for half, name in self.named(attn_type, cached).items():
            answers = {backend.get_name(): list(ask(backend)) for backend in _candidates(name)}
            if all(answers.values()):
                found += [f"{half} half ({who}): {why}" for who, reasons in answers.items() for why in reasons]
        return found


def _candidates(name: str | None) -> list[type[AttentionBackend]]:
    """The one named, or everybody who computes by himself."""
    if name is not None:
        return [registry.load(name)]
    loaded = (registry.load(other) for other in registry.list_backends())
    return [backend for backend in loaded if not issubclass(backend, SplitBackend)]


@pytree
class Half:
    """One half's plan, and where its tokens and requests stand in the batch; None: the half is the batch."""

    plan: Any
    tokens: jax.Array | None  # i32[tokens of the half], T for padding
    requests: jax.Array | None  # i32[R]


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

    builders: dict[str, AttentionMetadataBuilder] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        chosen = self.halves.chosen(self.spec, self.cache_spec, self.chip)
        builders = {half: b.get_builder_cls()(self.spec, self.cache_spec, self.chip) for half, b in chosen.items()}
        object.__setattr__(self, "builders", builders)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SplitMetadata:
        """Each half gets the whole hint: what all requests share, those of a half share too."""
        common = common_attn_metadata
        keys = keys_of(common, self.spec.attn_type)
        parts = self._parts(common)
        halves = {
            half: Half(
                plan=self.builders[half].build(common_prefix_len, part, fast_build), tokens=tokens, requests=requests
            )
            for half, (part, tokens, requests) in parts.items()
        }
        return SplitMetadata(
            halves=halves,
            block_table=keys.block_table,
            slot_mapping=keys.slot_mapping,
            num_tokens=queries_of(common, self.spec.attn_type).num_tokens,
        )

    def _parts(self, common: CommonAttentionMetadata):
        """(batch, its tokens, its requests) of each half; a batch that is all one half is not taken apart."""
        threshold = self.halves.threshold
        if "decode" not in self.builders:
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
            plan = self.builders[name].update_block_table(half.plan, table, slots)
            halves[name] = dataclasses.replace(half, plan=plan)
        return dataclasses.replace(metadata, halves=halves, block_table=blk_table, slot_mapping=slot_mapping)

    def for_layer(self, metadata: SplitMetadata, layer, blocks_per_layer: int) -> SplitMetadata:
        """Each half's pages move, and so do the slots of the whole."""
        halves = {
            name: dataclasses.replace(half, plan=self.builders[name].for_layer(half.plan, layer, blocks_per_layer))
            for name, half in metadata.halves.items()
        }
        table = jnp.asarray(metadata.block_table) + layer * blocks_per_layer
        slots = self.slots_of_layer(metadata, layer, blocks_per_layer)
        return dataclasses.replace(metadata, halves=halves, block_table=table, slot_mapping=slots)

    @classmethod
    def get_cudagraph_support(cls, spec: AttentionSpec, cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Decodes of one token are a uniform batch, so the prefill half alone decides whether any mix will do."""
        chosen = cls.halves.chosen(spec, cache_spec, device.detect())
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

    impls: dict[str, AttentionImpl] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        chosen = self.halves.chosen(self.spec, self.cache_spec, self.chip)
        given = (self.spec, self.cache_spec, self.chip, self.parallel)
        object.__setattr__(self, "impls", {half: b.get_impl_cls()(*given) for half, b in chosen.items()})

    def forward(self, q, cache, m: SplitMetadata, params) -> AttentionState:
        whole = [name for name, half in m.halves.items() if half.tokens is None]
        if whole:
            return self.impls[whole[0]].forward(q, cache, m.halves[whole[0]].plan, params)
        dtype = output_dtype(q.dtype)
        state = AttentionState.empty(m.num_tokens, self.spec.num_heads, self.spec.v_head_dim, jnp.dtype(dtype))
        for name, half in m.halves.items():
            rows = q.at[half.tokens].get(mode="fill", fill_value=0)
            part = self.impls[name].forward(rows, cache, half.plan, params)
            state = AttentionState(
                out=state.out.at[half.tokens].set(part.out.astype(dtype), mode="drop"),
                lse=state.lse.at[half.tokens].set(part.lse, mode="drop"),
            )
        return state

    def forward_packed(self, q, k, v, meta: CommonAttentionMetadata, params) -> AttentionState:
        return self.impls["prefill"].forward_packed(q, k, v, meta, params)


class SplitBackend(AttentionBackend):
    """What both halves can: the capabilities below are bounds, `reasons` asks the halves."""

    halves: ClassVar[Halves] = Halves()
    supported_dtypes = (*quant.FLOATS, *quant.QUANTISED)
    supported_kv_cache_dtypes = ()
    supported_block_sizes = ()
    attn_types = tuple(AttentionType)
    quant_modes = ("none", "per_tensor", "per_head", "per_token_head")
    features = EVERYTHING - {Feature.CASCADE}

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
