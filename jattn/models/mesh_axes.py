"""The axes of a mesh over which a model is distributed: those that a user names, and those that the model needs."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from jax.sharding import Mesh

from jattn import device
from jattn.errors import UnsupportedError
from jattn.errors.arguments import check_kind, integer
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.moe import MoE
from jattn.nn import AttentionConfig

CONTEXT = "context"
"""The axis over which the keys of a request are distributed."""
AXES = ("data", "tensor", CONTEXT)
"""The axes of a user's mesh, outermost first."""


def axes_of(
    config: ModelConfig, counts: tuple[int, ...], expert_parallel: bool
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes and the names of the axes; an error if the ranks cannot share the model. counts: of AXES."""
    data_ranks, tensor_ranks, context_ranks = counts
    if not isinstance(config, ModelConfig):
        raise TypeError(f"a mesh needs a jattn.models.ModelConfig, which lists the weights; got {type(config)}")
    if config.is_encoder or config.encoder is not None:
        raise UnsupportedError(f"{config.family} is not a decoder-only model: no other is distributed over a mesh")
    for index, layer in enumerate(config.layers):
        _check_layer(f"layer {index}", layer, tensor_ranks, context_ranks)
    if expert_parallel:
        _check_experts(config, data_ranks, tensor_ranks * context_ranks)
    sizes = _axis_sizes(tensor_ranks, (layer.attention.num_kv_heads for layer in config.layers))
    names = ("tensor",) if len(sizes) == 1 else tuple(f"tensor_{i}" for i in range(len(sizes)))
    sizes, names = (sizes, names) if context_ranks == 1 else ((*sizes, context_ranks), (*names, CONTEXT))
    return (sizes, names) if data_ranks == 1 else ((data_ranks, *sizes), ("data", *names))


def checked_sizes(sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of AXES; an error if there are other axes, or no "tensor"."""
    if "tensor" not in sizes or not set(sizes) <= set(AXES):
        raise ValueError(
            f'the mesh has the axes {tuple(sizes)}; they must be "tensor" and, if wanted, "data", "context"'
        )
    return tuple(integer(1)(f"sizes[{name!r}]", sizes.get(name, 1)) for name in AXES)


def ranks_of(mesh: Mesh) -> np.ndarray:
    """The devices by AXES, in order; an error if the mesh has others."""
    check_kind("mesh", mesh, Mesh, "make one with jax.sharding.Mesh(devices, axis_names)")
    if not mesh.devices.size:
        raise ValueError(f"the mesh has no device: its axes are {dict(mesh.shape)}, and each must have one or more")
    sizes = checked_sizes(mesh.shape)
    if len({d.id for d in mesh.devices.flat}) < mesh.devices.size:
        raise ValueError(f"the mesh has a device more than once: {[d.id for d in mesh.devices.flat]}")
    found = {d.platform for d in mesh.devices.flat}
    if found != {device.detect().platform}:
        raise ValueError(f"the mesh's devices are {sorted(found)}, but JAX's default device is {device.detect()}")
    order = [mesh.axis_names.index(name) for name in AXES if name in mesh.axis_names]
    return mesh.devices.transpose(order).reshape(sizes)


def _check_layer(name: str, layer: LayerConfig, tensor_ranks: int, context_ranks: int) -> None:
    """ValueError if the ranks cannot share a layer evenly; UnsupportedError for a fused projection."""
    spec, mlp, moe, ranks = layer.attention, layer.mlp, layer.moe, tensor_ranks * context_ranks
    if isinstance(layer.self_attn, AttentionConfig) and layer.self_attn.fused_qkv:
        raise UnsupportedError(
            f"{name} has one projection of q, k and v, in which a rank's heads do not lie together; an Engine splits "
            "it, and so does jattn.models.fused_qkv"
        )
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    told = f"{ranks} ranks" + (f" ({tensor_ranks} tensor x {context_ranks} context)" if context_ranks > 1 else "")
    if heads % ranks:
        raise ValueError(f"{name} has {heads} query heads, which {told} cannot share evenly; use a divisor of {heads}")
    if kv_heads % tensor_ranks and tensor_ranks % kv_heads:  # a latent layer has 1
        raise ValueError(
            f"{name} has {kv_heads} kv heads: {tensor_ranks} ranks can neither share them evenly nor have one each; "
            f"use a divisor or a multiple of {kv_heads}"
        )
    if moe is not None and moe.num_experts % ranks:
        raise ValueError(
            f"{name} has {moe.num_experts} experts, which {told} cannot share evenly; use a divisor of "
            f"{moe.num_experts}"
        )
    dense = mlp.shared if isinstance(mlp, MoE) else mlp
    if dense is not None and dense.width % ranks:
        raise ValueError(
            f"{name} has an MLP of width {dense.width}, which {told} cannot share evenly; use a divisor of "
            f"{dense.width}"
        )


def _check_experts(config: ModelConfig, data_ranks: int, ranks: int) -> None:
    """ValueError if the devices of all data ranks cannot share the experts of each layer evenly."""
    counts = {layer.moe.num_experts for layer in config.layers if layer.moe is not None}
    if not counts:
        raise ValueError(f"expert_parallel=True, but {config.family} has no experts in this config")
    if data_ranks == 1:
        raise ValueError(
            "expert_parallel=True distributes experts over data ranks, and the mesh has one; without it they are "
            "distributed over all devices of a data rank"
        )
    for count in counts:
        if count % (data_ranks * ranks):
            raise ValueError(
                f"expert_parallel=True: {data_ranks} x {ranks} devices cannot share {count} experts evenly; use a "
                f"divisor of {count}"
            )


def _axis_sizes(ranks: int, kv_heads: Iterable[int]) -> tuple[int, ...]:
    """The sizes of the mesh's axes. For each layer, the product of the first few is its number of kv heads, or `ranks`.

    `kv_heads`: of each layer. 8 ranks, layers with 2 and with 4 kv heads: sizes 2, 2 and 2.
    """
    sizes: list[int] = []
    for count in sorted({min(n, ranks) for n in kv_heads} | {ranks}):
        size, rest = divmod(count, math.prod(sizes))
        if rest:
            raise UnsupportedError(
                f"layers with {math.prod(sizes)} and with {count} kv heads cannot be distributed over {ranks} ranks "
                "together: the one number must divide the other"
            )
        sizes += [size] if size > 1 else []
    return tuple(sizes) or (1,)
