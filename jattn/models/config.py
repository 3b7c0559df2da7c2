"""A model as pure data: what a family's translator makes of config.json, and all that the decoder reads."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jattn.cache import KVCacheSpec, PagedKV, empty_cache
from jattn.models.mlp import MLP
from jattn.models.moe import MoE
from jattn.nn import AttentionLayer, Norm, Rope
from jattn.spec import AttentionSpec


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same tokens, so that one block table serves them all."""

    layers: tuple[int, ...]
    sliding_window: int | None = None  # tokens further back are never read again
    chunk_size: int | None = None  # nor those of earlier chunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One decoder layer. Each half is  x + after(half(before(x))); norms that are None are not there."""

    mixer: AttentionLayer
    mlp: MLP | MoE
    attn_norm: Norm | None = None
    attn_norm_after: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_norm_after: Norm | None = None

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
    """A whole decoder: hashable, a static argument under jit."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    final_norm: Norm | None
    embedding_norm: Norm | None = None
    embedding_scale: float = 1.0
    learned_positions: int = 0  # rows of a table of position embeddings, 0: none
    tied_embeddings: bool = False
    head_bias: bool = False
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    max_positions: int | None = None  # None: no limit (ALiBi)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """In order of their first layer."""
        groups: dict[tuple, list[int]] = {}
        for index, layer in enumerate(self.layers):
            left, chunk = layer.attention.window[0], layer.attention.chunk_size
            groups.setdefault((None if left < 0 else left + 1, chunk), []).append(index)
        return tuple(CacheGroup(tuple(layers), *kept) for kept, layers in groups.items())

    def cache_specs(
        self, num_blocks: "int | Iterable[int]", block_size: int, dtype: Any, quant: str = "none"
    ) -> tuple[KVCacheSpec, ...]:
        """One for each layer. num_blocks: of every pool, or one number for each cache group."""
        groups = self.cache_groups
        counts = (num_blocks,) * len(groups) if isinstance(num_blocks, int) else tuple(num_blocks)
        if len(counts) != len(groups):
            raise ValueError(f"{num_blocks=} must be one number or one for each of the {len(groups)} cache groups")
        blocks = {index: count for group, count in zip(groups, counts, strict=True) for index in group.layers}
        return tuple(
            KVCacheSpec(
                num_blocks=blocks[index],
                block_size=block_size,
                num_kv_heads=layer.attention.num_kv_heads,
                head_dim=layer.attention.head_dim,
                v_head_dim=layer.attention.v_head_dim,
                dtype=dtype,
                quant=quant,
            )
            for index, layer in enumerate(self.layers)
        )

    def make_caches(
        self, num_blocks: "int | Iterable[int]", block_size: int, dtype: Any, quant: str = "none"
    ) -> tuple[PagedKV, ...]:
        """Empty caches, one for each layer, of those specs."""
        return tuple(empty_cache(spec) for spec in self.cache_specs(num_blocks, block_size, dtype, quant))
