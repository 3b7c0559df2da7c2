"""The products of a layer whose weights are distributed over a mesh: each rank multiplies by its part.

Some divide the outputs of a product, columns of its weight; some its inputs, and the sums of the ranks are added up. In
shard_map a rank uses the implementations of a single device (jattn.ops.product): those that read quantised weights as
they are, too.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jattn.models.mlp import MLP
from jattn.models.rank_sums import BY_XLA, RankSums
from jattn.nn.attention_layer import linear, multiply
from jattn.ops.product import Kernel, product
from jattn.ops.quantised import QuantisedArray, is_quantised

REPLICATED = PartitionSpec()
"""Of an array that is whole on every rank."""

AnyMesh = Mesh | AbstractMesh


def shard_map(mesh: AnyMesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """jax.shard_map over the ranks. A data axis is manual already where this is called."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(mesh.auto_axes), check_vma=False
    )


def is_divided(mesh: AnyMesh) -> bool:
    """Does the mesh have several ranks? With one a data rank, a sum over ranks would exchange nothing."""
    return any(mesh.shape[axis] > 1 for axis in mesh.auto_axes)


def columns(mesh: AnyMesh, weights: dict[str, dict], axes: dict[str, tuple[str, ...]], x: jax.Array) -> tuple:
    """jattn.nn.attention_layer.linears of x with each of the weights, whose outputs are distributed over `axes`."""
    names = tuple(weights)
    if not is_divided(mesh) or not _have_usual_axes(weights):
        return multiply(weights, names, x)
    outputs = {name: PartitionSpec(None, axes[name]) for name in names}
    places = {n: {"kernel": outputs[n], "bias": PartitionSpec(axes[n])} for n in names}
    places = {n: {part: places[n][part] for part in weights[n]} for n in names}
    on_rank = lambda weights, x: multiply(weights, names, x)
    return shard_map(mesh, on_rank, (places, REPLICATED), tuple(outputs.values()))(weights, x)


def summed_linear(mesh: AnyMesh, weights: dict, x: jax.Array, sums: RankSums = BY_XLA) -> jax.Array:
    """jattn.nn.attention_layer.linear of x [T, in], whose columns are distributed, as the rows of the kernel are.

    Each rank rounds its sums before they are added, unless there is a bias.
    """
    axes, kernel, bias = mesh.auto_axes, weights["kernel"], weights.get("bias")
    place = rows_partition(mesh, kernel) if is_divided(mesh) else None
    if place is None:
        return linear(weights, x)

    def on_rank(kernel, x, sums):
        return sums(product(x, kernel, dtype=x.dtype if bias is None else jnp.float32), axes)

    y = shard_map(mesh, on_rank, (place, PartitionSpec(None, axes), REPLICATED), REPLICATED)(kernel, x, sums)
    return y if bias is None else (y + bias[None, :]).astype(x.dtype)


def rows_partition(mesh: AnyMesh, kernel: Kernel) -> Any:
    """The partition of a kernel [in, out] whose inputs are distributed, as it is placed; None if the ranks share groups
    of a quantised one, which XLA must then divide."""
    rows, ranks = PartitionSpec(mesh.auto_axes), math.prod(mesh.shape[axis] for axis in mesh.auto_axes)
    if not isinstance(kernel, QuantisedArray):
        return rows
    words, groups = kernel.values.shape[-2], kernel.scales.shape[-2]
    if kernel.axis != -2 or words % ranks or (groups > 1 and groups % ranks):
        return None
    of_groups = REPLICATED if groups == 1 else rows
    zero_points = None if kernel.zero_points is None else of_groups
    factor = None if kernel.factor is None else REPLICATED
    return dataclasses.replace(kernel, values=rows, scales=of_groups, zero_points=zero_points, factor=factor)


def sharded_mlp(mesh: AnyMesh, mlp: MLP, sums: RankSums, weights: dict, x: jax.Array) -> jax.Array:
    """mlp(weights, x), each rank with a part of its width."""
    if mlp.sparsity or not is_divided(mesh) or not _have_usual_axes(weights):  # sparsity: the mean over the whole width
        return mlp(weights, x)
    into = {name: part for name, part in weights.items() if name != "down"}
    y = shard_map(mesh, mlp.inner, (_columns_of(mesh, into), REPLICATED), PartitionSpec(None, mesh.auto_axes))(into, x)
    return summed_linear(mesh, weights["down"], y, sums)


def shared_partition(mesh: AnyMesh, mlp: MLP, weights: dict) -> dict | None:
    """The partition of an MLP's weights whose sums over the ranks are added up with others; None if they cannot be."""
    if mlp.sparsity or mlp.bias or not _have_usual_axes(weights):
        return None
    down = rows_partition(mesh, weights["down"]["kernel"])
    into = {name: part for name, part in weights.items() if name != "down"}
    return None if down is None else _columns_of(mesh, into) | {"down": {"kernel": down}}


def over_vocabulary(mesh: AnyMesh, x: jax.Array, kernel: Kernel, transposed: bool) -> jax.Array:
    """jattn.ops.product.product f32[L, vocab]; kernel [in, vocab], or transposed [vocab, in]."""
    ranks, axis = math.prod(mesh.shape[name] for name in mesh.auto_axes), -2 if transposed else -1
    is_whole = ranks == 1 or kernel.shape[axis] % ranks
    if is_whole or (isinstance(kernel, QuantisedArray) and kernel.axis == axis):
        return product(x, kernel, transposed=transposed)
    outputs = PartitionSpec(None, mesh.auto_axes)
    place = PartitionSpec(mesh.auto_axes) if transposed else outputs
    on_rank = functools.partial(product, transposed=transposed)
    return shard_map(mesh, on_rank, (REPLICATED, place), outputs)(x, kernel)


def _columns_of(mesh: AnyMesh, weights: dict[str, dict]) -> dict:
    of_part = {"kernel": PartitionSpec(None, mesh.auto_axes), "bias": PartitionSpec(mesh.auto_axes)}
    return {name: {leaf: of_part[leaf] for leaf in part} for name, part in weights.items()}


def _have_usual_axes(weights: Any) -> bool:
    """Are the inputs of all quantised kernels their last axis but one?"""
    leaves: Iterable = jax.tree.leaves(weights, is_leaf=is_quantised)
    return all(leaf.axis == -2 for leaf in leaves if isinstance(leaf, QuantisedArray))
