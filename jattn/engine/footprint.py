"""The bytes of a model on each device of a layout, and the shortest time of a step: what a plan is made of."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jattn.engine.device_kinds import DeviceKind
from jattn.mla_spec import MLASpec
from jattn.models import ModelConfig, halves, weight_specs
from jattn.models.config import LayerConfig
from jattn.models.model_mesh import ModelMesh
from jattn.models.moe import MoE
from jattn.models.placing import quantised_shardings, regrouped
from jattn.models.quantising import quantised
from jattn.models.weight_tree import weight_paths
from jattn.nn.weight_spec import WeightSpec
from jattn.ops.product import NATIVE_MAX_ROWS
from jattn.ops.quantised import is_quantised
from jattn.spec import AttentionSpec

SAMPLING_ARRAYS = 9
"""Arrays f32[R vocab] that sampling needs, counted in dispatches compiled by XLA:CPU; so are the next three."""
MLP_ARRAYS = 2
"""Arrays f32[T width of the MLP]."""
HIDDEN_ARRAYS = 2
"""Arrays f32[T hidden]."""
MERGED_ARRAYS = 3
"""Arrays f32[T H V] of context ranks."""
TABLES = ("positions", "token_types", "task_types", "layer_inputs.embed")
"""The paths of tables of which a step reads one row for each token."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight, and its part on one device."""

    spec: WeightSpec
    path: str
    device_bytes: int
    share: float  # of the weight's numbers, on one device


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A model in a layout. model_mesh: None: one device."""

    config: ModelConfig
    dtype: str  # of the weights, before they are quantised
    quantization: str | None = None
    model_mesh: ModelMesh | None = None
    stored: Mapping[str, Any] | None = None  # jattn.models.load.stored_weights; None: all weights have this dtype

    @property
    def ranks(self) -> int:
        """The number of devices that share the weights: those of one data rank."""
        return 1 if self.model_mesh is None else self.model_mesh.size

    @property
    def context_ranks(self) -> int:
        """The number of devices that share the keys of a request, and attend with the same heads."""
        return 1 if self.model_mesh is None else self.model_mesh.context_ranks

    @property
    def expert_data_ranks(self) -> int:
        """The number of data ranks that share one set of experts."""
        return self.model_mesh.data_ranks if self.model_mesh is not None and self.model_mesh.experts_over_data else 1

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The leaves of params by path, as shapes: of each device's parts."""
        found = {}
        place = None if self.model_mesh is None else self.model_mesh.weight_sharding(self.config)
        for path, spec in weight_paths(weight_specs(self.config)).items():
            leaf = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(self.dtype)) if self.stored is None else self.stored[path]
            if self.quantization is not None:
                leaf = jax.eval_shape(lambda x, path=path: quantised(path, x, self.quantization or ""), leaf)
            found[path] = leaf if place is None else _part(leaf, place(path, spec))
        return found

    @functools.cached_property
    def weights(self) -> list[Weight]:
        """All weights."""
        specs = weight_paths(weight_specs(self.config))
        of_leaf = lambda leaf: sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(leaf))
        return [
            Weight(specs[path], path, of_leaf(leaf), math.prod(leaf.shape) / math.prod(specs[path].shape))
            for path, leaf in self.params.items()
        ]

    def weight_bytes(self) -> int:
        """On each device."""
        return sum(weight.device_bytes for weight in self.weights)

    def activation_bytes(self, max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> int:
        """An estimate of the temporary memory of the largest dispatch on each device.

        Sampling and the widest layer do not run at the same time. For many rows XLA:CPU copies weights of 16 bits and
        quantised ones to float32 before the loop over steps, but not those of experts.
        """
        vocab = self.config.vocab_size
        vocab = vocab if vocab % self.ranks else vocab // self.ranks  # replicated if not divisible: see ModelMesh
        sampling = SAMPLING_ARRAYS * 4 * max_num_seqs * vocab
        share = 0.5 if halves.serves(self.config, self.model_mesh, max_num_batched_tokens) else 1.0
        row_bytes = max((self._row_bytes(layer, share) for layer in self.config.layers), default=0)
        copied = self._copied_bytes(max_num_batched_tokens) if platform == "cpu" else 0
        return max(sampling, row_bytes * max_num_batched_tokens) + copied

    def _row_bytes(self, layer: LayerConfig, share: float) -> int:
        """Of one token in a layer. Each rank has a row for each expert that the token chooses, whichever rank has the
        expert. Not counted: the padding of experts' rows, and what XLA's ragged_dot copies on a GPU without a kernel.

        share: of the tokens, that the MLP computes at a time.
        """
        spec, mlp, moe = attention_of(layer, 1), layer.mlp, layer.moe
        heads = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        if self.context_ranks > 1:  # queries; outputs, the same weighted, and their sum over the context ranks
            heads = max(heads, spec.num_heads * (spec.head_dim + MERGED_ARRAYS * spec.v_head_dim))
        heads *= self.context_ranks / self.ranks
        dense = mlp.shared if isinstance(mlp, MoE) else mlp
        width = 0.0 if dense is None else share * MLP_ARRAYS * dense.width / self.ranks
        if moe is not None:
            of_row = MLP_ARRAYS * moe.width + HIDDEN_ARRAYS * self.config.hidden_size
            width = max(width, self.expert_data_ranks * moe.top_k * of_row)
        return int(4 * (HIDDEN_ARRAYS * self.config.hidden_size + max(width, heads)))

    def _copied_bytes(self, tokens: int) -> int:
        has_codes = self.quantization is not None or any(map(is_quantised, (self.stored or {}).values()))
        is_narrow = has_codes or jnp.dtype(self.dtype).itemsize == 2
        if not is_narrow or tokens <= NATIVE_MAX_ROWS:
            return 0
        copied = [w for w in self.weights if "expert" not in w.spec.axes and len(w.spec.shape) > 1]
        return sum(int(4 * math.prod(w.spec.shape) * w.share) for w in copied if w.path != "embed")

    # ------------------------------------------------------------------ the time of a step
    def step_seconds(self, kind: DeviceKind, cache_storage: dict[str, str], rows: int, query_len: int, context: int):
        """The shortest time of a step in which each of `rows` sequences computes its last `query_len` of `context`
        tokens.

        max(bytes / bandwidth, FLOP / peak) of one device, and the bytes that it sends over its link. Bytes: of the
        weights that the tokens need, once, and of the keys and values.
        """
        tokens = rows * query_len
        read, flop, sent = 0.0, 0.0, self._reduced_bytes(tokens)
        for weight in self.weights:
            one_read, one_flop = self._of_weight(weight, tokens, rows)
            read, flop = read + one_read, flop + one_flop
        cache_specs = self.config.cache_specs(2, self.context_ranks, **cache_storage)
        for index, layer in enumerate(self.config.layers):
            spec, cache_spec = attention_of(layer, query_len), cache_specs[self.config.cache_of(index)]
            of_rank = cache_spec if self.model_mesh is None else self.model_mesh.rank_cache_spec(cache_spec)
            seen, pairs = _visible(layer, query_len, context)
            read += rows * seen / self.context_ranks * of_rank.bytes_per_block
            sent += tokens * (self._context_bytes(layer, query_len) + self._expert_bytes(layer))
            flop += 2 * rows * pairs * spec.num_heads * (spec.head_dim + spec.v_head_dim) / self.ranks
            flop += 2 * rows * context * _numbers_to_materialise(layer, query_len) / self.ranks
        return max(read / kind.bandwidth, flop / kind.peak) + sent / kind.link

    def _of_weight(self, weight: Weight, tokens: int, rows: int) -> tuple[float, float]:
        """(bytes read, FLOP) of a weight on one device."""
        spec, numbers = weight.spec, math.prod(weight.spec.shape) * weight.share
        if weight.path == "embed" and not self.config.tied_embeddings or weight.path in TABLES:
            return tokens * weight.device_bytes / spec.shape[0], 0.0
        if "expert" in spec.axes:
            moe = self._moe(weight.path)
            tokens *= self.expert_data_ranks
            share = moe.top_k / moe.num_routes
            chosen = 1 - (1 - share) ** tokens  # the expected share, if all are equally likely
            return weight.device_bytes * chosen, 2.0 * tokens * numbers * share
        times = rows if weight.path == "embed" or weight.path.startswith("head") else tokens
        return weight.device_bytes, 2.0 * times * numbers if len(spec.shape) > 1 else 0.0

    def _moe(self, path: str) -> MoE:
        moe = self.config.layers[int(path.split(".")[1])].moe
        assert moe is not None
        return moe

    def _context_bytes(self, layer: LayerConfig, query_len: int) -> float:
        """Bytes of a token that a device sends to its context ranks in a ring: the queries, and in float32 the
        log-sum-exps of all ranks and the outputs."""
        of_query = layer.attention.qk_head_dim if isinstance(layer.attention, MLASpec) else layer.attention.head_dim
        spec, ranks = attention_of(layer, query_len), self.context_ranks
        of_head = of_query * jnp.dtype(self.dtype).itemsize + 4 * ranks + 2 * 4 * spec.v_head_dim
        return spec.num_heads * of_head * (ranks - 1) / self.ranks

    def _expert_bytes(self, layer: LayerConfig) -> float:
        """Bytes of a token that a device sends to the data ranks with which it shares experts: an all-gather of hidden
        states and a reduce-scatter."""
        size = self.config.hidden_size * jnp.dtype(self.dtype).itemsize
        return 2 * (self.expert_data_ranks - 1) * size if layer.moe is not None else 0.0

    def _reduced_bytes(self, tokens: int) -> float:
        """Bytes that a device sends in a ring: all-reduces of the embeddings and, in each layer, of the attention's and
        the MLP's outputs."""
        size = tokens * self.config.hidden_size * jnp.dtype(self.dtype).itemsize
        return (1 + 2 * len(self.config.layers)) * size * 2 * (self.ranks - 1) / self.ranks


def _part(leaf: Any, sharding: jax.sharding.Sharding) -> Any:
    """One device's part of a weight, which is a shape or a QuantisedArray of shapes."""
    part = lambda x, place: jax.ShapeDtypeStruct(place.shard_shape(x.shape), x.dtype)
    if not is_quantised(leaf):
        return part(leaf, sharding)
    leaf = jax.eval_shape(lambda x: regrouped(x, sharding), leaf)
    return jax.tree.map(part, leaf, quantised_shardings(leaf, sharding))


def attention_of(layer: LayerConfig, query_len: int) -> AttentionSpec:
    """The attention of a layer; of a latent layer, in the form that so many new tokens of a request take."""
    spec = layer.attention
    if not isinstance(spec, MLASpec):
        return spec
    return spec.absorbed if query_len <= spec.mha_threshold else spec.materialised


def _numbers_to_materialise(layer: LayerConfig, query_len: int) -> int:
    """The weights by which each cached row is multiplied, if its key and value are made for all heads."""
    spec = layer.attention
    if not isinstance(spec, MLASpec) or query_len <= spec.mha_threshold:
        return 0
    return spec.num_heads * spec.kv_lora_rank * (spec.qk_nope_head_dim + spec.v_head_dim)


def _visible(layer: LayerConfig, query_len: int, context: int) -> tuple[int, int]:
    """(keys that are read, pairs of a query and a key that it sees) of a sequence's last `query_len` tokens."""
    reach = min((n for n in layer.attention.retention if n is not None), default=context)
    seen: Iterator[int] = (min(length, reach) for length in range(context - query_len + 1, context + 1))
    return min(context, reach + query_len - 1), sum(seen)
