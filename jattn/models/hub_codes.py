"""Codes and scales of a weight, as tensors of hub folders hold them, to a Decoded."""

import math

import ml_dtypes
import numpy as np

from jattn.models.hub_scheme import SCALES, Decoded, Groups
from jattn.ops.quantised import PACKED, in_places


def check_matrices(**parts: np.ndarray) -> None:
    """ValueError unless all are matrices with elements."""
    for name, part in parts.items():
        if part.ndim != 2 or not part.size:
            raise ValueError(f"{name} {part.shape} must be a matrix with elements")


def check_word_of_inputs(inputs: int) -> None:
    """ValueError unless so many inputs fill words of 4-bit codes."""
    if inputs % PACKED:
        raise ValueError(f"its {inputs} inputs must be a multiple of {PACKED} to be kept in 4 bits")


def codes_of_8_bits(weight: np.ndarray, is_int: bool) -> np.ndarray:
    """int8, or the bits of float8_e4m3fn as uint8; ValueError for another dtype."""
    check_matrices(codes=weight)
    wanted = np.dtype(np.int8 if is_int else ml_dtypes.float8_e4m3fn)
    if weight.dtype != wanted:
        raise ValueError(f"codes have dtype {weight.dtype}, which must be {wanted}")
    return weight if is_int else weight.view(np.uint8)


def of_tensor(weight: np.ndarray, scale: np.ndarray, *of_activations) -> Decoded:
    """e4m3 with one scale."""
    codes = codes_of_8_bits(weight, False)
    if scale.size != 1:
        raise ValueError(f"scales {scale.shape} must be one number, as the config has no blocks (weight_block_size)")
    return Decoded(codes, np.full((len(weight), 1), scale.reshape(()), scale.dtype))


def of_outputs(weight: np.ndarray, scales: np.ndarray, *of_activations) -> Decoded:
    """e4m3 with a scale for each output."""
    codes, outputs = codes_of_8_bits(weight, False), len(weight)
    if scales.shape not in ((outputs,), (outputs, 1)):
        raise ValueError(f"scales {scales.shape} must be one for each of the {outputs} outputs")
    return Decoded(codes, scales.reshape(outputs, 1))


def of_blocks(
    is_int: bool, out_block: int, in_block: int, weight: np.ndarray, scales: np.ndarray, *of_activations
) -> Decoded:
    """int8 or e4m3 with a scale for each block of outputs and inputs."""
    codes = codes_of_8_bits(weight, is_int)
    check_matrices(scales=scales)
    outputs, inputs = weight.shape
    if scales.shape != (math.ceil(outputs / out_block), math.ceil(inputs / in_block)):
        raise ValueError(f"scales {scales.shape} do not fit blocks of {out_block} x {in_block}")
    group = math.gcd(inputs, in_block)  # a block may be cut at the end; groups are not
    columns = np.arange(0, inputs, group) // in_block
    return Decoded(codes, scales[np.arange(outputs) // out_block][:, columns])


def one_group(inputs: int, scales: np.ndarray, *_) -> Groups:
    """The groups of `of_tensor` and `of_outputs`."""
    return Groups(1, scales.dtype)


def groups_of_blocks(in_block: int, inputs: int, scales: np.ndarray, *_) -> Groups:
    """The groups of `of_blocks`."""
    return Groups(inputs // math.gcd(inputs, in_block), scales.dtype)


NVFP4_GROUP = 16
"""Inputs that share a scale of NVFP4."""


def nvfp4(
    name: str, is_divisor: bool, codes: np.ndarray, scales: np.ndarray, of_whole: np.ndarray, *of_activations
) -> Decoded:
    """NVFP4: e2m1, two in a byte with the first in the low bits; e4m3 scales of groups, and one of the whole weight.

    name: the ending of the last one. is_divisor: are scales of groups divided by it? Else they are multiplied by it.
    """
    check_matrices(codes=codes, scales=scales)
    if codes.dtype != np.uint8:
        raise ValueError(f"codes have dtype {codes.dtype}, which must be uint8: two codes of 4 bits in a byte")
    if scales.dtype != ml_dtypes.float8_e4m3fn:
        raise ValueError(f"scales have dtype {scales.dtype}, which must be float8_e4m3fn")
    if of_whole.size != 1 or of_whole.dtype.name not in SCALES:
        raise ValueError(f"{name} is {of_whole.dtype}{list(of_whole.shape)}, which must be one float32")
    if not (whole := np.float32(of_whole.reshape(()))) > 0:
        raise ValueError(f"{name} is {whole:g}, which must be above 0")
    check_word_of_inputs(2 * codes.shape[1])
    with np.errstate(over="ignore"):
        factor = 1 / whole if is_divisor else whole
    if not np.finfo(np.float32).tiny <= factor < np.inf:  # XLA:CPU takes subnormal numbers for 0
        raise ValueError(f"{name} is {whole:g}: the factor {factor:g} of the weight is no normal float32")
    of_outputs = np.full((len(codes), 1), factor, np.float32)
    return Decoded(in_places(np.ascontiguousarray(codes).view("<u4")), scales, factor=of_outputs)


def nvfp4_groups(inputs: int, scales: np.ndarray, *_) -> Groups:
    """The groups of `nvfp4`."""
    return Groups(scales.shape[1], scales.dtype, has_factor=True)


def unpacked(bits: int, words: np.ndarray) -> np.ndarray:
    """int32 [...] -> the codes of each word, from the lowest bits on: uint8[..., 32 / bits]."""
    return nibbles(words) if bits == 4 else as_uint32(words)[..., None].view(np.uint8)


def nibbles(words: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """int32 [...] -> the eight codes of each word, uint8[..., 8], from the lowest bits on or in another order."""
    shifts = 4 * (np.arange(PACKED) if order is None else order).astype(np.uint32)
    return (as_uint32(words)[..., None] >> shifts & 15).astype(np.uint8)


def as_uint32(words: np.ndarray) -> np.ndarray:
    """Words of packed codes, contiguous; ValueError unless they are integers of 32 bits."""
    if words.dtype not in (np.int32, np.uint32):
        raise ValueError(f"packed codes have dtype {words.dtype}, which must be int32")
    return np.ascontiguousarray(words).view(np.uint32)
