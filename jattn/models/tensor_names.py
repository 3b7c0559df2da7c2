"""Tables from the weights of a model to the tensors of a checkpoint: path in params -> tensor names and conversion."""

import collections
import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.weight_tree import layer_weight_specs, weight_paths, weight_specs


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """One weight: make(*tensors), of the tensors with these names. packed: the same weight in another stored form.

    form(shape): what `make` gives for a weight of this shape, with shapes for arrays; None: an array as stored.
    """

    names: tuple[str, ...]
    make: Callable[..., Any]  # a numpy array, or a QuantisedArray
    packed: "TensorSource | None" = None
    form: Callable[[tuple[int, ...]], Any] | None = None

    def stored_form(self, stored: Container[str]) -> "TensorSource":
        """`packed` if the checkpoint has all of its tensors, else this form."""
        packed = self.packed
        return packed if packed is not None and all(name in stored for name in packed.names) else self


def unchanged(x: np.ndarray) -> np.ndarray:
    """The tensor as it is stored."""
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """torch stores [out, in]; kernels here are [in, out]. A view: `placed` transposes when it copies."""
    return x.swapaxes(-1, -2) if x.ndim > 1 else x


def output_slice(start: int, stop: int) -> Callable[[np.ndarray], np.ndarray]:
    """Outputs start .. stop - 1 of a fused projection, transposed like a kernel; or those of its bias."""
    return lambda x: x[start:stop].T if x.ndim == 2 else x[start:stop]


def linear_rows(table: Mapping[str, str], bias: bool = False) -> dict[str, tuple[str, Callable]]:
    """Rows for torch Linear modules. table: path of the projection in params -> name of the module."""
    return _modules(table, bias, "kernel", transposed)


def norm_rows(table: Mapping[str, str], bias: bool = False) -> dict[str, tuple[str, Callable]]:
    """Rows for norm modules. table: path of the norm in params -> name of the module."""
    return _modules(table, bias, "scale", unchanged)


def _modules(table: Mapping[str, str], bias: bool, weight: str, make: Callable) -> dict:
    found: dict[str, tuple[str, Callable]] = {}
    for ours, theirs in table.items():
        found[f"{ours}.{weight}"] = (f"{theirs}.weight", make)
        if bias:
            found[f"{ours}.bias"] = (f"{theirs}.bias", unchanged)
    return found


def tensor_table(
    config: ModelConfig,
    outside: Mapping[str, tuple[Any, Callable]],
    prefix: str,
    layer: Callable[[int], Mapping[str, tuple[Any, Callable]]],
) -> dict[str, TensorSource]:
    """The whole table: 'embed', 'layers.3.attn.q.kernel' ... -> TensorSource.

    outside: rows of weights outside the layers. layer(index): rows of one layer, whose tensor names get `prefix` in
    front; its {} is replaced by the layer's index.
    """
    table = {path: TensorSource(_tuple(names), make) for path, (names, make) in outside.items()}
    for index in range(len(config.layers)):
        at = prefix.format(index)
        for path, (names, make) in layer(index).items():
            table[f"layers.{index}.{path}"] = TensorSource(tuple(at + name for name in _tuple(names)), make)
    return table


def named_tensors(
    names: Mapping[str, Any],
    prefix: str = "model.layers.{}.",
    fused: Callable[[LayerConfig], Mapping[str, Any]] = lambda layer: {},
) -> Callable[[ModelConfig], dict[str, TensorSource]]:
    """A function config -> the table of a family. The weights are those of `weight_specs`; `names` gives their tensors.

    names has two kinds of entries:
        a module     "attn.q" -> "self_attn.q_proj": attn.q.kernel is the tensor self_attn.q_proj.weight
        one weight   "mlp.router.correction" -> the name of its tensor, or (the name, a conversion)
    The modules of experts are "experts.gate", "experts.up" and "experts.down". If the name of a tensor contains {e},
    there is one tensor for each index of the weight's first axis, and these are stacked.
    prefix: in front of the names in layers; {} is the layer's index. fused(layer): more entries for that layer.
    """

    def tensors(config: ModelConfig) -> dict[str, TensorSource]:
        outside = _named_rows(names, weight_specs(dataclasses.replace(config, layers=())))

        def layer(index: int) -> dict[str, tuple[Any, Callable]]:
            config_of_layer = config.layers[index]
            rows = {**names, **fused(config_of_layer)}
            return _named_rows(rows, layer_weight_specs(config_of_layer, config.hidden_size))

        return tensor_table(config, outside, prefix, layer)

    return tensors


def _named_rows(names: Mapping[str, Any], specs: dict[str, Any]) -> dict[str, tuple[Any, Callable]]:
    """Rows for a tree of WeightSpecs."""
    table = {}
    for path, spec in weight_paths(specs).items():
        module, _, leaf = path.rpartition(".")
        make = transposed if leaf == "kernel" else unchanged
        if path in names:
            row = names[path]
            table[path] = (row, make) if isinstance(row, str) else row
            continue
        is_expert = leaf == "kernel" and len(spec.shape) == 3
        name = names[f"experts.{module.rpartition('.')[2]}" if is_expert else module]
        name = f"{name}.{'bias' if leaf == 'bias' else 'weight'}"
        table[path] = _stacked(name, spec.shape[0], make) if "{e}" in name else (name, make)
    return table


def _stacked(name: str, count: int, make: Callable) -> tuple[tuple[str, ...], Callable]:
    """The row of a weight that is stored as `count` tensors: name with {e} = 0 .. count - 1."""
    return tuple(name.replace("{e}", str(e)) for e in range(count)), lambda *parts: make(np.stack(parts))


def count_layer_tensors(config: ModelConfig, tensors: Callable[[ModelConfig], dict[str, TensorSource]]) -> int:
    """Number of tensors that all layers need. Only one layer of each distinct LayerConfig is listed, for speed.

    Layers can share tensors in pairs (LongCat Flash). Such are counted as half a tensor of each layer of their kind.
    """

    def count(*layers: LayerConfig) -> int:
        table = tensors(dataclasses.replace(config, layers=layers))
        return len({name for source in table.values() for name in source.names})

    kinds = collections.Counter(config.layers)
    return sum(times * (count(layer, layer, layer) - count(layer)) // 2 for layer, times in kinds.items())


def _tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)
