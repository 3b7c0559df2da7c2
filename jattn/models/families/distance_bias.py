"""The learned bias of the distance of T5 and MPNet: stored per bucket of distances and head, used per distance."""

import functools
import math

import numpy as np

from jattn.models.config import ModelConfig
from jattn.models.tensor_names import TensorSource
from jattn.nn import AttentionConfig


def buckets_of(distances: np.ndarray, count: int, max_distance: int, both_sides: bool) -> np.ndarray:
    """The bucket of each distance kv_pos - q_pos, in float32, as in the library that trained the models.

    Half of the buckets are one distance each; the others grow by a constant factor up to max_distance. both_sides: half
    of all buckets are for keys after the query; else those share the bucket of the query itself.
    """
    sides, size = (2, np.abs(distances)) if both_sides else (1, np.maximum(-distances, 0))
    count //= sides
    exact = count // 2
    ratio = np.log(np.maximum(size, 1).astype(np.float32) / np.float32(exact))
    grown = ratio / np.float32(math.log(max_distance / exact)) * np.float32(count - exact)
    far = np.minimum(exact + grown.astype(np.int64), count - 1)
    return np.where(size < exact, size, far) + (distances > 0) * (count if both_sides else 0)


def distance_bias_rows(config: ModelConfig, tensor: str) -> dict[str, TensorSource]:
    """One tensor [buckets, heads], which all layers of the checkpoint share, as the bias of each layer."""
    rows = {}
    for index, layer in enumerate(config.layers):
        assert isinstance(layer.self_attn, AttentionConfig) and layer.self_attn.max_distance is not None
        most = layer.self_attn.max_distance
        make = functools.partial(
            by_distance, max_distance=most, both_sides=config.is_encoder, count=config.distance_buckets
        )
        rows[f"layers.{index}.attn.distance_bias"] = TensorSource((tensor,), make)
    return rows


def by_distance(x: np.ndarray, max_distance: int, both_sides: bool, count: int | None) -> np.ndarray:
    """[buckets, heads] -> [heads, 2 * max_distance + 1]. count: the number of buckets that config.json gives."""
    if len(x) != count:
        raise ValueError(f"the bias has {len(x)} buckets, and relative_attention_num_buckets={count}")
    if len(x) < 4 or max_distance <= len(x) // 2:
        raise ValueError(f"the bias has {len(x)} buckets; it must have at least 4 and fewer than {2 * max_distance}")
    return x[buckets_of(np.arange(-max_distance, max_distance + 1), len(x), max_distance, both_sides)].T
