"""Folders of compressed-tensors (llm-compressor), whose config has groups of modules with settings of their own."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short
from jattn.models.config_reader import ConfigReader
from jattn.models.hub_codes import (
    NVFP4_GROUP,
    as_uint32,
    check_matrices,
    check_word_of_inputs,
    codes_of_8_bits,
    groups_of_blocks,
    nvfp4,
    nvfp4_groups,
    of_blocks,
    unpacked,
)
from jattn.models.hub_scheme import WHOLE, Decoded, Groups, Scheme, Zeros
from jattn.models.hub_settings import USE_FLOATS, check_activations, config_groups, group_size, ignore_calibration
from jattn.ops.quantised import in_places


def compressed_tensors(c: ConfigReader) -> Scheme | None:
    """The groups must have one form of weights, because a tensor does not say which group it is of. None: groups may
    quantise activations alone, as those of attention do, and then weights are floats."""
    layout, found = c.get("format"), {}
    for name, g in config_groups(c).items():
        weights = _weights(g, layout)
        check_activations(g, is_fp4=weights is not None and weights.layout == NVFP4)
        g.ignore("targets")
        g.refuse_unread()
        if weights is not None:
            found[name] = weights
    c.only("quantization_status", "compressed", "frozen")
    for key in ("sparsity_config", "transform_config"):
        # "dense": zeros are stored like any other number.
        if c.get(key) and not (key == "sparsity_config" and c.section(key).get("format") == "dense"):
            raise UnsupportedError(f"{c.where}: {key}={short(c.get(key))} is not supported")
    c.ignore("ignore", "version", "global_compression_ratio", "kv_cache_scheme")
    weights = next(iter(found.values()), None)
    if any(other != weights for other in found.values()):
        raise UnsupportedError(
            f"{c.where}: config_groups {short(', '.join(found))} have weights with different settings, which is not "
            f"supported: use a folder with the same for all modules, {USE_FLOATS}"
        )
    return None if weights is None else _scheme(weights, c.where)


NVFP4 = "nvfp4-pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
"""Formats that store a code as an element."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """The settings of a group's weights."""

    layout: Any  # the format
    kind: str
    bits: int
    strategy: str
    is_symmetric: bool
    group_size: int | None
    blocks: tuple[int, ...] | None


def _weights(g: ConfigReader, layout: Any) -> Weights | None:
    """The settings of a group's weights; None if they are not quantised. layout: the folder's format."""
    own = g.get("format")
    if g.get("weights") is None:
        return None
    w = g.section("weights")
    kind, bits = w.choice("type", ("int", "float")), w.count("num_bits")
    w.only("dynamic", False)
    if w.get("actorder") not in (None, False, "static", "weight"):  # "group" stores g_idx
        raise UnsupportedError(
            f"{w.where}: actorder={short(w.get('actorder'))} is not supported, because it gives inputs of one group "
            f"different places: use a folder with actorder 'static', 'weight' or null, {USE_FLOATS}"
        )
    is_symmetric, size = w.flag("symmetric", True), group_size(w)
    of_size = "tensor" if size is None else "channel" if size == WHOLE else "group"
    strategy = w.choice("strategy", ("tensor", "channel", "group", "tensor_group", "block"), of_size)
    size = WHOLE if size is None and strategy in ("channel", "tensor") else size
    blocks = _blocks(w) if strategy == "block" else w.only("block_structure")
    ignore_calibration(w)
    w.refuse_unread()
    return Weights(layout if own is None else own, kind, bits, strategy, is_symmetric, size, blocks)


def _blocks(w: ConfigReader) -> tuple[int, ...]:
    """The key block_structure: outputs and inputs of a block, as [128, 128] or "128x128"."""
    given = w.get("block_structure")
    found = [int(x) if x.isdecimal() else x for x in given.split("x")] if isinstance(given, str) else given
    sizes = tuple(x for x in found if type(x) is int and 0 < x <= 2**16) if isinstance(found, list) else ()
    if len(sizes) != 2 or len(found) != 2:
        raise UnsupportedError(f"{w.where}: block_structure={short(given)} must be [outputs, inputs] of a block")
    return sizes


def _scheme(w: Weights, where: str) -> Scheme:
    code = (w.kind, w.bits)
    zero, of_activations = ("weight_zero_point",), ("input_scale", "input_zero_point")
    needed_zero, optional_zero = ((), zero) if w.is_symmetric else (zero, ())  # decoders have it at the same place
    optional, is_by_group = optional_zero + of_activations, w.strategy in ("group", "tensor_group")
    if w.layout == "pack-quantized" and code in (("int", 4), ("int", 8)) and w.strategy in ("channel", "group"):
        of_packed = lambda inputs, scales, *_: Groups(scales.shape[1], scales.dtype, not w.is_symmetric)
        needed = ("weight_packed", "weight_scale", "weight_shape", *needed_zero)
        decode, format = functools.partial(_packed, w.bits, w.is_symmetric), "int4" if w.bits == 4 else "int8"
        return Scheme(format, needed, decode, of_packed, optional, group_size=w.group_size)
    if w.layout == NVFP4 and code == ("float", 4) and is_by_group and w.is_symmetric and w.group_size == NVFP4_GROUP:
        needed = ("weight_packed", "weight_scale", "weight_global_scale")
        decode = functools.partial(nvfp4, "weight_global_scale", True)
        return Scheme("fp4", needed, decode, nvfp4_groups, ("input_global_scale",), group_size=w.group_size)
    is_plain = w.layout in PLAIN and code in (("int", 4), ("int", 8), ("float", 8))  # int8 holds codes of 4 bits, too
    needed, format = ("weight", "weight_scale", *needed_zero), "int8" if w.kind == "int" else "fp8"
    if is_plain and w.blocks is not None and w.is_symmetric:
        decode = functools.partial(_in_blocks, w.kind == "int", *w.blocks)
        return Scheme(format, needed, decode, functools.partial(groups_of_blocks, w.blocks[1]), optional)
    if is_plain and w.strategy in ("tensor", "channel", "group"):
        decode = functools.partial(_plain, w.kind == "int", w.is_symmetric, w.strategy == "tensor")
        zeros = None if w.is_symmetric else Zeros(*zero, _any_nonzero)
        return Scheme(format, needed, decode, _plain_groups, optional, group_size=w.group_size, zeros=zeros)
    symmetry = "" if w.is_symmetric else ", with zero points,"
    seen = f"format={short(w.layout)} with {w.kind} weights of {w.bits} bits by {w.strategy}{symmetry}"
    raise UnsupportedError(
        f"{where}: {seen} is not supported; pack-quantized of 4 or 8 bits, 8-bit weights and {NVFP4} in groups of "
        f"{NVFP4_GROUP} are; use one of these, {USE_FLOATS}"
    )


def _packed(
    bits: int, is_symmetric: bool, words: np.ndarray, scales: np.ndarray, shape: np.ndarray, zeros: np.ndarray | None,
    *of_activations,
) -> Decoded:  # fmt: skip
    """Codes of consecutive inputs in a word, and zero points of consecutive outputs."""
    if not np.issubdtype(shape.dtype, np.integer) or shape.shape != (2,):
        raise ValueError(f"weight_shape is {shape.dtype}{list(shape.shape)}, which must be int64[2]")
    check_matrices(weight_packed=words, weight_scale=scales)
    outputs, inputs = (int(n) for n in shape)
    if len(words) != outputs or words.shape[1] != math.ceil(inputs * bits / 32):
        raise ValueError(f"packed codes {words.shape} do not fit weight_shape {shape.tolist()}")
    if bits == 4:
        check_word_of_inputs(inputs)
        codes = in_places(as_uint32(words))
    else:
        codes = (unpacked(8, words).reshape(outputs, -1)[:, :inputs] ^ 128).view(np.int8)
    if zeros is not None:
        check_matrices(weight_zero_point=zeros)
        if len(zeros) != math.ceil(outputs * bits / 32):
            raise ValueError(f"packed zero points {zeros.shape} do not fit weight_shape {shape.tolist()}")
        zeros = unpacked(bits, zeros).swapaxes(1, 2).reshape(-1, zeros.shape[1])[:outputs]
        zeros = zeros.astype(np.int8) - 8 if bits == 4 else (zeros ^ 128).view(np.int8)
    return Decoded(codes, scales, _checked_zeros(zeros, is_symmetric))


def _plain(
    is_int: bool, is_symmetric: bool, is_of_tensor: bool, weight: np.ndarray, scales: np.ndarray,
    zeros: np.ndarray | None, *of_activations,
) -> Decoded:  # fmt: skip
    """Scales [out, groups]; or one for the tensor [1], if is_of_tensor."""
    codes = codes_of_8_bits(weight, is_int)

    def spread(x: np.ndarray) -> np.ndarray:
        is_one = is_of_tensor and x.size == 1
        if not is_one and (x.ndim != 2 or len(x) != len(weight) or not x.size):
            wanted = f"{'[1] or ' if is_of_tensor else ''}[{len(weight)}, groups]"
            raise ValueError(f"scales or zero points {x.shape} must be {wanted}")
        x = x.reshape(1, 1) if is_one else x
        return np.broadcast_to(x, (len(weight), x.shape[1]))

    zeros = _checked_zeros(zeros, is_symmetric)
    zero_points = None if zeros is None else spread(zeros)
    if zero_points is not None and not _any_nonzero(zero_points):
        zero_points = None
    if zero_points is not None and zero_points.dtype != np.int8:
        raise ValueError(f"zero points have dtype {zero_points.dtype}, which must be int8")
    return Decoded(codes, spread(scales), zero_points)


def _plain_groups(inputs: int, scales: np.ndarray, zeros: np.ndarray | None, *of_activations) -> Groups:
    return Groups(1 if scales.size == 1 else scales.shape[1], scales.dtype, zeros is not None and _any_nonzero(zeros))


def _any_nonzero(zeros: np.ndarray) -> bool:
    """Is a zero point other than zero?"""
    return bool((zeros != 0).any())


def _checked_zeros(zeros: np.ndarray | None, is_symmetric: bool) -> np.ndarray | None:
    """The zero points; None for symmetric weights, with which some folders store zeros. ValueError for others."""
    if is_symmetric and zeros is not None and _any_nonzero(zeros):
        raise ValueError("weight_zero_point has other numbers than 0, but the config says that weights are symmetric")
    return None if is_symmetric else zeros


def _in_blocks(
    is_int: bool, out_block: int, in_block: int, weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None,
    *of_activations,
) -> Decoded:  # fmt: skip
    _checked_zeros(zeros, is_symmetric=True)
    return of_blocks(is_int, out_block, in_block, weight, scales)
