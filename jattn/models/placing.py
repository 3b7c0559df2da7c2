"""Weights from the host to devices. A weight is copied once, and transposed on its way if it is a transposed view."""

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jattn.ops.quantised import QuantisedArray
from jattn.parallel import put_local

ALIGNMENT = 64
"""Bytes. XLA:CPU takes host memory that is aligned so without copying it."""


def placed(weight: Any, sharding: Sharding | None) -> Any:
    """A weight on devices: a QuantisedArray, or a copy of a numpy array that shares no memory with it.

    sharding: None: uncommitted, on JAX's default device. For a QuantisedArray see `quantised_shardings`. Waits until
    the weight is there.
    """
    if isinstance(weight, QuantisedArray):
        if sharding is not None:
            weight = regrouped(weight, sharding)
            weight = jax.tree.map(put_local, weight, quantised_shardings(weight, sharding))
        return jax.block_until_ready(weight)
    swapped = weight.swapaxes(-1, -2) if weight.ndim > 1 else weight
    is_transposed = swapped.flags.c_contiguous and not weight.flags.c_contiguous
    if is_transposed and _is_accelerator(sharding):  # it transposes; a CPU would write the weight twice
        return jax.block_until_ready(_transposed_on_device(swapped, sharding))
    own = (lambda x: x) if _is_accelerator(sharding) else _unshared
    if sharding is None:
        return jax.block_until_ready(jax.device_put(own(weight)))
    made = jax.make_array_from_callback(weight.shape, sharding, lambda index: own(weight[index]))
    return jax.block_until_ready(made)


def regrouped(weight: QuantisedArray, sharding: Sharding) -> QuantisedArray:
    """The same numbers in groups that no device shares with another, if the sharding divides its inputs evenly."""
    axis = weight.ndim + weight.axis
    if weight.scales.shape[axis] == 1 or not isinstance(sharding, NamedSharding) or axis >= len(sharding.spec):
        return weight  # the only group is whole on each device
    inputs, rest = divmod(weight.shape[axis], _parts(sharding, sharding.spec[axis]))
    return weight if rest else weight.with_groups_of(math.gcd(weight.group_size, inputs))


def quantised_shardings(weight: QuantisedArray, sharding: Sharding) -> QuantisedArray:
    """The sharding of each array of a quantised weight: that of the weight, but an axis whose size is no multiple of
    its mesh axes is replicated, as that of the only group."""
    return jax.tree.map(lambda x: _fitting(sharding, x.shape), weight)


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
    axes = zip(sharding.spec, shape, strict=False)
    spec = PartitionSpec(*(None if size % _parts(sharding, entry) else entry for entry, size in axes))
    return NamedSharding(sharding.mesh, spec)


def _parts(sharding: NamedSharding, entry: Any) -> int:
    """The number of parts of an axis with this entry in the sharding's PartitionSpec."""
    names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
    return math.prod(sharding.mesh.shape[name] for name in names)
