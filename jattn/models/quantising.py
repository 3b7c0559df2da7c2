"""Quantising the weights of a model: which ones, in which format."""

from typing import Any

import jax

from jattn.errors import UnsupportedError
from jattn.nn.weight_spec import weight_path
from jattn.ops.quantised import QuantisedArray, is_quantised
from jattn.ops.quantised import quantise as quantise_array

QUANTIZATIONS = ("int8", "int4", "fp8")
"""int8: one scale for each output. fp8 (e4m3): one for 128 inputs of an output. int4: one for 64 inputs of an output.

With int4, embeddings and head are int8, because every token passes through them. A table of embeddings has one scale
for each row. A projection whose inputs are no multiple of the group has smaller groups, down to 32 inputs; then one
scale for each output, and int8 in place of int4."""
GROUPS = {"int4": (64, 32), "fp8": (128, 64, 32)}
PROJECTIONS = ("q", "k", "v", "qkv", "q_a", "q_b", "kv_a", "o", "gate", "up", "down", "head")
"""The last part but one of the paths of kernels that are quantised. Norms, biases, routers and other small weights stay
as they are."""


def quantise(params: dict[str, Any], quantization: str) -> dict[str, Any]:
    """The params of a model with its large weights quantised, e.g. for Engine.update_weights."""
    check_quantization(quantization)
    leaves, structure = jax.tree.flatten_with_path(params, is_leaf=is_quantised)
    return jax.tree.unflatten(structure, [quantised(weight_path(path), leaf, quantization) for path, leaf in leaves])


def check_quantization(quantization: str) -> None:
    """ValueError for an unknown name."""
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"{quantization=} is not known; use one of {', '.join(QUANTIZATIONS)}")


def quantised(path: str, weight: Any, quantization: str) -> Any:
    """The weight at this path of params, quantised if it is one of those that are. Waits until that is done."""
    *_, module, name = ("", *path.split("."))
    is_table = name == "embed"
    if not is_table and not (name == "kernel" and module in PROJECTIONS):
        return weight
    if isinstance(weight, QuantisedArray):
        raise UnsupportedError(f"{path} is stored as {weight.format}: it is not quantised a second time")
    axis = -1 if is_table else -2
    inputs = weight.shape[axis]
    wanted = "int8" if quantization == "int4" and (is_table or module == "head") else quantization
    sizes = () if is_table else GROUPS.get(wanted, ())
    group = next((size for size in sizes if inputs % size == 0), None)
    if group is None:  # one scale for each output
        wanted, group = "fp8" if wanted == "fp8" else "int8", inputs
    return jax.block_until_ready(quantise_array(weight, wanted, group, axis))
