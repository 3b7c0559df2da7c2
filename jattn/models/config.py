"""A model as pure data: made from config.json by a family's translator, and read by the decoder."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jattn.cache import KVCacheSpec, PagedKV, empty_cache
from jattn.models.mlp import MLP
from jattn.models.moe import MoE
from jattn.nn import AttentionLayer, Norm, Rope, Scaling
from jattn.spec import AttentionSpec
from jattn.types import AttentionType

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same tokens, so that one block table serves them all."""

    layers: tuple[int, ...]
    sliding_window: int | None = None  # older tokens are never read again
    chunk_size: int | None = None  # tokens of earlier chunks are never read again


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer. Each part computes norm_sum(x + norm_after(part(norm(x)))); a norm that is None is left out."""

    mixer: AttentionLayer
    mlp: MLP | MoE
    cross: AttentionLayer | None = None  # to the encoder's tokens, between the two
    attn_norm: Norm | None = None
    attn_norm_after: Norm | None = None
    attn_norm_sum: Norm | None = None
    cross_norm_sum: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_norm_after: Norm | None = None
    mlp_norm_sum: Norm | None = None

    @property
    def attention(self) -> AttentionSpec:
        """What its attention asks of a backend."""
        return self.mixer.spec

    @property
    def rope(self) -> Rope | None:
        """Its rotary embedding."""
        return self.mixer.rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model: hashable, a static argument under jit. With `encoder`, layers attend to its output too."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    final_norm: Norm | None
    embedding_norm: Norm | None = None
    embedding_scale: float = 1.0
    learned_positions: int = 0  # rows of a table of position embeddings, 0: none
    token_types: int = 0  # rows of a table of token type embeddings
    head_transform: str | None = None  # an activation: the head begins with norm(act(linear x))
    tied_embeddings: bool = False
    head_bias: bool = False
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    max_positions: int | None = None  # None: no limit (ALiBi)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    encoder: "ModelConfig | None" = None

    @property
    def is_encoder(self) -> bool:
        """Does every token see every other? Then there is no cache and no next token: see encode."""
        return all(layer.attention.attn_type in ENCODERS for layer in self.layers)

    @property
    def rope_depends_on_length(self) -> bool:
        """Do some rotary positions depend on a request's final length? Then batches need `final_seq_lens`."""
        return bool(self._length_scalings)

    def rope_variant(self, final_length: int) -> tuple[int, ...]:
        """The part of a request's final length that its keys depend on: equal variants may share pages."""
        return tuple(scaling.variant(final_length) for scaling in self._length_scalings)

    @property
    def _length_scalings(self) -> list[Scaling]:
        """The distinct scalings that depend on lengths, in layer order."""
        scalings = [layer.rope.scaling for layer in self.layers if layer.rope is not None]
        return list(dict.fromkeys(scaling for scaling in scalings if scaling.needs_lengths))

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """In order of their first layer."""
        groups: dict[tuple, list[int]] = {}
        for index, layer in enumerate(self.layers):
            groups.setdefault(layer.attention.retention, []).append(index)
        return tuple(CacheGroup(tuple(layers), *kept) for kept, layers in groups.items())

    def cache_specs(
        self, num_blocks: "int | Iterable[int]", block_size: int, dtype: Any, quant: str = "none"
    ) -> tuple[KVCacheSpec, ...]:
        """One for each layer, then one for each cross layer.

        num_blocks: of every pool, or one number for each cache group (cross layers take the first).
        """
        if self.is_encoder:
            raise ValueError(f"{self.family} is an encoder and keeps no cache: use jattn.models.encode")
        groups = self.cache_groups
        counts = (num_blocks,) * len(groups) if isinstance(num_blocks, int) else tuple(num_blocks)
        if len(counts) != len(groups):
            raise ValueError(f"{num_blocks=} must be one number or one for each of the {len(groups)} cache groups")
        blocks = {index: count for group, count in zip(groups, counts, strict=True) for index in group.layers}
        own = [_cache_spec(l.attention, blocks[i], block_size, dtype, quant) for i, l in enumerate(self.layers)]
        cross = [l.cross.spec for l in self.layers if l.cross is not None]
        return (*own, *(_cache_spec(spec, counts[0], block_size, dtype, quant) for spec in cross))

    def make_caches(
        self, num_blocks: "int | Iterable[int]", block_size: int, dtype: Any, quant: str = "none"
    ) -> tuple[PagedKV, ...]:
        """Empty caches, one for each layer, of those specs."""
        return tuple(empty_cache(spec) for spec in self.cache_specs(num_blocks, block_size, dtype, quant))


def _cache_spec(spec: AttentionSpec, num_blocks: int, block_size: int, dtype: Any, quant: str) -> KVCacheSpec:
    return KVCacheSpec(
        num_blocks=num_blocks, block_size=block_size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim, dtype=dtype, quant=quant,
    )  # fmt: skip
