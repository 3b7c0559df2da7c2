"""Quantising the weights of a model: which ones, in which format."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

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
SLICE = 1 << 22
"""Numbers of a weight that are quantised at once: XLA:CPU keeps them in float32, twice the bytes of bfloat16."""
PROJECTIONS = ("q", "k", "v", "qkv", "q_a", "q_b", "kv_a", "o", "gate", "up", "down", "head")
"""The last part but one of the paths of kernels that are quantised. Norms, biases, routers and other small weights stay
as they are."""


def quantise(params: dict[str, Any], quantization: str) -> dict[str, Any]:
    """The params of a model with its large weights quantised, e.g. for Engine.update_weights."""
    check_quantization(quantization)
    leaves, structure = jax.tree.flatten_with_path(params, is_leaf=is_quantised)
    return jax.tree.unflatten(structure, [quantised(weight_path(path), leaf, quantization) for path, leaf in leaves])


def check_quantization(quantization: str) -> str:
    """The name; ValueError for an unknown one."""
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"{quantization=} is not known; use one of {', '.join(QUANTIZATIONS)}")
    return quantization


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
    make = _quantised_by_slices if weight.size > SLICE and _is_on_one_device(weight) else quantise_array
    return jax.block_until_ready(make(weight, wanted, group, axis))


def _is_on_one_device(weight: Any) -> bool:
    """Is it an array of numbers on one device, or of numpy? XLA divides the others as they are."""
    if not isinstance(weight, jax.Array):
        return isinstance(weight, np.ndarray)
    return not isinstance(weight, Tracer) and len(weight.sharding.device_set) == 1


def _quantised_by_slices(weight: jax.Array, format: str, group: int, axis: int) -> QuantisedArray:
    """`quantise` of about SLICE numbers at a time: some experts, or some outputs. The last slice may repeat some."""
    at = 0 if weight.ndim > 2 or axis == -1 else 1
    weight, size = jnp.asarray(weight), weight.shape[at]
    step = min(max(SLICE * size // weight.size, 1), size)
    forms = jax.eval_shape(lambda x: quantise_array(x, format, group, axis), weight)
    made = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), forms)
    for begin in range(0, size, step):
        made = _with_slice(made, weight, min(begin, size - step), step, at, group)
    return made


@functools.partial(jax.jit, static_argnums=(3, 4, 5), donate_argnums=0)
def _with_slice(
    made: QuantisedArray, weight: jax.Array, begin: jax.Array, step: int, at: int, group: int
) -> QuantisedArray:
    """`made` with the numbers from `begin` on. Integers are cut: XLA:CPU would convert all of a bfloat16 weight."""
    bits = weight.view(np.uint16) if weight.dtype.itemsize == 2 else weight
    part = jax.lax.dynamic_slice_in_dim(bits, begin, step, at).view(weight.dtype)
    put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, begin, at)
    return jax.tree.map(put, made, quantise_array(part, made.format, group, made.axis))
