"""Where each weight of ours lies in a checkpoint: a table of paths, tensor names and what to do on the way."""

import collections
import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig


@dataclasses.dataclass(frozen=True)
class Source:
    """One weight made of one tensor, or of several (experts); `packed` is how else it may be stored."""

    names: tuple[str, ...]
    make: Callable[..., np.ndarray]
    packed: "Source | None" = None

    def within(self, stored: Container[str]) -> "Source":
        """The form that the checkpoint has; this one, if neither is there."""
        other = self.packed
        return other if other is not None and all(name in stored for name in other.names) else self


def same(x: np.ndarray) -> np.ndarray:
    """As it is stored."""
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """torch keeps [out, in]; ours is [in, out]."""
    return x.T


def rows(start: int, stop: int) -> Callable[[np.ndarray], np.ndarray]:
    """A slice of a fused projection's outputs."""
    return lambda x: x[start:stop].T if x.ndim == 2 else x[start:stop]


def linears(table: Mapping[str, str], bias: bool = False) -> dict[str, tuple[str, Callable]]:
    """Rows of a table for torch Linears: our part -> the module's name."""
    return _modules(table, bias, "kernel", transposed)


def norms(table: Mapping[str, str], bias: bool = False) -> dict[str, tuple[str, Callable]]:
    """Rows of a table for norms."""
    return _modules(table, bias, "scale", same)


def _modules(table: Mapping[str, str], bias: bool, ours_of_weight: str, make: Callable) -> dict:
    found: dict[str, tuple[str, Callable]] = {}
    for ours, theirs in table.items():
        found[f"{ours}.{ours_of_weight}"] = (f"{theirs}.weight", make)
        if bias:
            found[f"{ours}.bias"] = (f"{theirs}.bias", same)
    return found


def sources(
    config: ModelConfig,
    outside: Mapping[str, tuple[Any, Callable]],
    prefix: str,
    layer: Callable[[int], Mapping[str, tuple[Any, Callable]]],
) -> dict[str, Source]:
    """The whole table: 'embed', 'layers.3.attn.q.kernel' ... -> Source. `prefix` has a {} for the layer's number."""
    table = {path: Source(_tuple(names), make) for path, (names, make) in outside.items()}
    for index in range(len(config.layers)):
        at = prefix.format(index)
        for path, (names, make) in layer(index).items():
            table[f"layers.{index}.{path}"] = Source(tuple(at + name for name in _tuple(names)), make)
    return table


def tensors_of(config: ModelConfig, sources: Callable[[ModelConfig], dict[str, Source]]) -> int:
    """How many tensors a checkpoint has for the layers, counted from one layer of each kind: every other is alike."""

    def count(*layers: LayerConfig) -> int:
        table = sources(dataclasses.replace(config, layers=layers))
        return len({name for source in table.values() for name in source.names})

    kinds = collections.Counter(config.layers)
    return sum(times * (count(layer, layer) - count(layer)) for layer, times in kinds.items())


def _tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
