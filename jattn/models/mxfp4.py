"""MXFP4: weights of 4-bit floats with a power of two for every 32 of them, as folders of the hub store them."""

from typing import Any

import jax
import ml_dtypes
import numpy as np

from jattn.models.placing import placed
from jattn.ops.quantised import PACKED, QuantisedArray, in_places

LARGEST = 127 + 63  # of the stored scales, see packed_codes_sm90.unit_of_scaled


def mxfp4(outputs: slice, blocks: np.ndarray, scales: np.ndarray) -> QuantisedArray:
    """Some outputs of blocks u8[experts, out, groups, 16] and scales u8[experts, out, groups]; kept packed.

    MXFP4: 4-bit floats, two in a byte with the first in the low bits, and a power of two for every 32 of them.
    """
    exponents = scales[:, outputs]
    if blocks.shape != (*scales.shape, 16) or blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise ValueError("blocks must be uint8[experts, outputs, groups, 16], scales uint8[experts, outputs, groups]")
    if (largest := int(exponents.max(initial=0))) == 255:
        raise ValueError("a scale of 255 is not a number")
    if largest > LARGEST:
        raise ValueError(f"a scale of 2 ** {largest - 127}: kernels of GPUs multiply by 2 ** 63 at most")
    stored = np.ascontiguousarray(blocks[:, outputs]).view("<u4").reshape(*exponents.shape[:2], -1)
    of_bits = np.where(exponents == 0, 64, exponents.astype(np.uint16) << 7).astype(np.uint16)  # 2 ** -127 is subnormal
    turned = lambda x: placed(x.swapaxes(1, 2), None)
    powers = turned(of_bits.view(ml_dtypes.bfloat16))
    values, dtype = turned(in_places(stored)), np.dtype(ml_dtypes.bfloat16)
    return QuantisedArray(values=values, scales=powers, format="fp4", dtype=dtype)


def mxfp4_form(shape: tuple[int, ...]) -> QuantisedArray:
    """What `mxfp4` makes of a weight of this shape [experts, inputs, outputs], with shapes for arrays."""
    experts, inputs, outputs = shape
    array: Any = lambda per, dtype: jax.ShapeDtypeStruct((experts, inputs // per, outputs), dtype)
    dtype = np.dtype(ml_dtypes.bfloat16)
    return QuantisedArray(values=array(PACKED, np.uint32), scales=array(32, dtype), format="fp4", dtype=dtype)
