"""Weights from the host to devices. A weight is copied once, and transposed on its way if it is a transposed view."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jattn.ops.quantised import QuantisedArray

ALIGNMENT = 64
"""Bytes. XLA:CPU takes host memory that is aligned so without copying it."""


def placed(weight: Any, sharding: Sharding | None) -> Any:
    """A weight on devices: a QuantisedArray, or a copy of a numpy array that shares no memory with it.

    sharding: None: uncommitted, on JAX's default device. For a QuantisedArray, an axis whose size is no multiple of its
    mesh axes is replicated. Waits until the weight is there.
    """
    if isinstance(weight, QuantisedArray):
        put = lambda x: x if sharding is None else jax.device_put(x, _fitting(sharding, x.shape))
        return jax.block_until_ready(jax.tree.map(put, weight))
    swapped = weight.swapaxes(-1, -2) if weight.ndim > 1 else weight
    is_transposed = swapped.flags.c_contiguous and not weight.flags.c_contiguous
    if is_transposed and _is_accelerator(sharding):  # it transposes; a CPU would write the weight twice
        return jax.block_until_ready(_transposed_on_device(swapped, sharding))
    own = (lambda x: x) if _is_accelerator(sharding) else _unshared
    if sharding is None:
        return jax.block_until_ready(jax.device_put(own(weight)))
    made = jax.make_array_from_callback(weight.shape, sharding, lambda index: own(weight[index]))
    return jax.block_until_ready(made)


def _unshared(x: np.ndarray) -> np.ndarray:
    """An array from which device_put makes one that shares no memory with x, in one copy.

    On a CPU, device_put copies an array that is not contiguous, transposing it in blocks; it shares the memory of a
    contiguous and aligned one, so that is copied here.
    """
    if not x.flags.c_contiguous and x.flags.aligned:
        return x
    buffer = np.empty(x.nbytes + ALIGNMENT, np.uint8)
    begin = -buffer.ctypes.data % ALIGNMENT
    made = buffer[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


def _is_accelerator(sharding: Sharding | None) -> bool:
    """Does the sharding name devices other than CPUs?"""
    if sharding is None:
        return jax.device_put(np.int8(0)).device.platform != "cpu"
    is_known = isinstance(sharding, (NamedSharding, SingleDeviceSharding))
    return is_known and next(iter(sharding.device_set)).platform != "cpu"


def _transposed_on_device(x: np.ndarray, sharding: Sharding | None) -> jax.Array:
    """x with its last two axes swapped, placed by `sharding`. The device has x for a moment, too."""
    if sharding is None:
        return _swapped(sharding)(jax.device_put(x))
    stored = sharding
    if isinstance(sharding, NamedSharding):
        *axes, inputs, outputs = (*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))
        stored = NamedSharding(sharding.mesh, PartitionSpec(*axes, outputs, inputs))
    return _swapped(sharding)(jax.make_array_from_callback(x.shape, stored, lambda index: x[index]))


@functools.lru_cache(maxsize=64)
def _swapped(sharding: Sharding | None) -> Any:
    """A compiled function that swaps the last two axes."""
    return jax.jit(lambda x: x.swapaxes(-1, -2), out_shardings=sharding)


def _fitting(sharding: Sharding, shape: tuple[int, ...]) -> Sharding:
    if not isinstance(sharding, NamedSharding):
        return sharding
    sizes = sharding.mesh.shape
    shards = lambda axis: math.prod(sizes[name] for name in (axis if isinstance(axis, tuple) else (axis,)))
    axes = (
        None if axis is None or size % shards(axis) else axis for axis, size in zip(sharding.spec, shape, strict=False)
    )
    return NamedSharding(sharding.mesh, PartitionSpec(*axes))
