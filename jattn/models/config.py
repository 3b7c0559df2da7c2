"""ModelConfig: a model as data. A family makes it from config.json; the forward pass follows it layer by layer."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jattn.cache import KVCacheSpec, PagedKV, empty_cache
from jattn.cache.latent import mla_cache_spec
from jattn.mla_spec import MLASpec
from jattn.models.altup import AltUp, Laurel
from jattn.models.layer_inputs import LayerInput, LayerInputs
from jattn.models.mlp import MLP
from jattn.models.moe import MoE
from jattn.models.residual import ResidualNorms
from jattn.models.side_experts import SideExperts
from jattn.nn import AttentionConfig, LatentConfig, Norm, Rope, RopeScaling
from jattn.spec import AttentionSpec
from jattn.types import AttentionType

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclasses.dataclass(frozen=True)
class CacheGroup:
    """Layers that need the same tokens of a request, so that they share one block table."""

    layers: tuple[int, ...]
    sliding_window: int | None = None  # keys further back are never read again
    chunk_size: int | None = None  # keys of earlier chunks are never read again


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer: self-attention, cross attention (decoders of encoder-decoder models), MLP, each with its norms.

    parallel: attention and MLP both read the layer's input x, and both are added to it. The MLP then reads
    mlp_norms.before(x), or attn_norms.before(x) if it has no norm of its own.
    """

    self_attn: AttentionConfig | LatentConfig
    mlp: MLP | MoE
    cross_attn: AttentionConfig | None = None
    attn_norms: ResidualNorms = ResidualNorms()
    cross_norms: ResidualNorms = ResidualNorms()
    mlp_norms: ResidualNorms = ResidualNorms()
    parallel: bool = False
    kv_from: int | None = None  # the index of the layer whose cache it reads; None: it has its own
    laurel: Laurel | None = None
    experts: SideExperts | None = None  # beside the MLP
    layer_input: LayerInput | None = None
    output_scale: bool = False  # the output, with all residuals, is multiplied by a weight [1]
    altup: AltUp | None = None

    def __post_init__(self):
        attn = self.self_attn
        if (self.kv_from is not None) != (isinstance(attn, AttentionConfig) and attn.shares_kv):
            raise ValueError(f"kv_from={self.kv_from!r} must be given if and only if self_attn has shares_kv")
        if self.parallel and (self.laurel is not None or self.experts is not None):
            raise ValueError("a parallel layer has neither laurel nor side experts")
        if self.altup is not None and self.output_scale:
            raise ValueError("a layer with altup has no output_scale")
        if self.parallel and (self.cross_attn is not None or self.attn_norms.of_sum is not None):
            raise ValueError("a parallel layer has no cross attention and no norm of attention's sum")

    @property
    def shares_norm(self) -> bool:
        """True if the MLP of a parallel layer reads the same normalised input as attention."""
        return self.parallel and self.mlp_norms.before is None

    @property
    def moe(self) -> MoE | None:
        """Its mixture of experts: the MLP, or beside the MLP."""
        if isinstance(self.mlp, MoE):
            return self.mlp
        return None if self.experts is None else self.experts.moe

    @property
    def is_late(self) -> bool:
        """True if the output of its side experts is added after the next layer."""
        return self.experts is not None and self.experts.is_late

    @property
    def attention(self) -> AttentionSpec | MLASpec:
        """The spec of its self-attention."""
        return self.self_attn.spec

    @property
    def rope(self) -> Rope | None:
        """The rotary embedding of its self-attention."""
        return self.self_attn.rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTransform:
    """What the head of a masked language model does before its product: norm(activation(linear(x)))."""

    activation: str
    norm: Norm
    bias: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A whole model. It is hashable: a static argument under jit. encoder: for encoder-decoder models."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    final_norm: Norm | None
    embedding_norm: Norm | None = None
    embedding_size: int | None = (
        None  # of token embeddings, which a linear layer maps to hidden_size; None: hidden_size
    )
    embedding_scale: float = 1.0
    learned_positions: int = 0  # rows of the table of position embeddings; 0: none
    token_types: int = 0  # rows of the table of token type embeddings; 0: none
    task_types: int = 0  # rows of the table of task embeddings, of which the first is added; 0: none
    distance_buckets: int | None = None  # rows of the stored bias of the distance: see AttentionConfig.max_distance
    layer_inputs: LayerInputs | None = None  # for layers with layer_input
    altup: AltUp | None = None  # the same as that of every layer
    has_head: bool = True  # False: the model gives hidden states alone, as for embeddings
    head_transform: HeadTransform | None = None
    tied_embeddings: bool = False
    head_bias: bool = False
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    max_positions: int | None = None  # tokens of the longest request; None: no limit (ALiBi)
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    encoder: "ModelConfig | None" = None

    def __post_init__(self):
        if any(layer.altup != self.altup for layer in self.layers):
            raise ValueError("every layer must have the altup of the model")
        if any(layer.layer_input is not None for layer in self.layers) and self.layer_inputs is None:
            raise ValueError("layers with layer_input need layer_inputs of the model")
        own = [layer.kv_from is None for layer in self.layers]
        if own != sorted(own, reverse=True):
            raise ValueError("layers with kv_from must be the last layers")

    def without_head(self) -> "ModelConfig":
        """The same model without the weights that only logits need."""
        return dataclasses.replace(self, has_head=False, head_transform=None, head_bias=False)

    @property
    def embedding_width(self) -> int:
        """The width of the tables of embeddings."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def is_encoder(self) -> bool:
        """True if every token attends to every other. Such a model has no cache and no next token: see `encode`."""
        return all(layer.attention.attn_type in ENCODERS for layer in self.layers)

    @property
    def rope_depends_on_length(self) -> bool:
        """True if rotary angles depend on a request's final length. Batches then need `final_seq_lens`."""
        return bool(self._length_scalings)

    def rope_variant(self, final_length: int) -> tuple[int, ...]:
        """What the keys of a request depend on in its final length. Requests with equal variants can share pages."""
        return tuple(scaling.variant(final_length) for scaling in self._length_scalings)

    @property
    def _length_scalings(self) -> list[RopeScaling]:
        """The distinct rope scalings that depend on the final length, in layer order."""
        scalings = [layer.rope.scaling for layer in self.layers if layer.rope is not None]
        return list(dict.fromkeys(scaling for scaling in scalings if scaling.needs_lengths))

    @property
    def num_own_caches(self) -> int:
        """The number of layers that have a cache; they come first."""
        return sum(layer.kv_from is None for layer in self.layers)

    def cache_of(self, index: int) -> int:
        """The index of the cache that layer `index` reads."""
        kv_from = self.layers[index].kv_from
        return index if kv_from is None else kv_from

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers with a cache, grouped by which keys they need, in order of each group's first layer."""
        groups: dict[tuple, list[int]] = {}
        for index, layer in enumerate(self.layers[: self.num_own_caches]):
            groups.setdefault(layer.attention.retention, []).append(index)
        return tuple(CacheGroup(tuple(layers), *kept) for kept, layers in groups.items())

    def cache_specs(
        self, num_blocks: "int | Iterable[int]", block_size: int, dtype: Any, quant: str = "none"
    ) -> tuple[KVCacheSpec, ...]:
        """One spec per layer that has its own cache, then one per cross-attention layer.

        num_blocks: of every cache, or one number per cache group (cross-attention layers use the first).
        """
        if self.is_encoder:
            raise ValueError(f"{self.family} is an encoder, which has no cache; use jattn.models.encode")
        groups = self.cache_groups
        counts = (num_blocks,) * len(groups) if isinstance(num_blocks, int) else tuple(num_blocks)
        if len(counts) != len(groups):
            raise ValueError(f"{num_blocks=} must be one number, or one per cache group ({len(groups)})")
        blocks = {index: count for group, count in zip(groups, counts, strict=True) for index in group.layers}
        own = self.layers[: self.num_own_caches]
        self_attn = [_cache_spec(l.attention, blocks[i], block_size, dtype, quant) for i, l in enumerate(own)]
        cross = [l.cross_attn.spec for l in self.layers if l.cross_attn is not None]
        return (*self_attn, *(_cache_spec(spec, counts[0], block_size, dtype, quant) for spec in cross))

    def make_caches(
        self, num_blocks: "int | Iterable[int]", block_size: int, dtype: Any, quant: str = "none"
    ) -> tuple[PagedKV, ...]:
        """Empty caches of `cache_specs`."""
        return tuple(empty_cache(spec) for spec in self.cache_specs(num_blocks, block_size, dtype, quant))


def _cache_spec(spec: AttentionSpec | MLASpec, num_blocks: int, block_size: int, dtype: Any, quant: str) -> KVCacheSpec:
    if isinstance(spec, MLASpec):
        return mla_cache_spec(spec, num_blocks, block_size, dtype=dtype, quant=quant)
    return KVCacheSpec(
        num_blocks=num_blocks, block_size=block_size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim, dtype=dtype, quant=quant,
    )  # fmt: skip
