"""Quantised weights as folders of the hub store them: each method reads its quantization_config into a Scheme.

Activations are not quantised: products use the dequantised weights. fp8 folders may ask for it (`dynamic`) or hold
scales for it (`static`); both are taken, as unrounded activations are closer to the model that was quantised. Folders
of compressed-tensors that ask for rounded activations (w8a8) are refused.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short
from jattn.models.config_reader import ConfigReader
from jattn.models.hub_scheme import WHOLE, Decoded, Groups, Scheme, check_groups
from jattn.ops.quantised import PACKED, PLACES, in_places


def scheme_of(values: dict[str, Any], where: str) -> Scheme | None:
    """The Scheme of a config.json's quantization_config; None if it has none. UnsupportedError for unknown methods."""
    if not (given := values.get("quantization_config") or {}) and not values.get("quantization"):  # MLX's name
        return None
    c = ConfigReader(given if isinstance(given, dict) else {}, f"{where}, quantization_config")
    method = c.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise UnsupportedError(
            f"{c.where}: quant_method={short(method)} is not supported{_maker(values)}; known: {', '.join(METHODS)}; "
            f"use one of these, {USE_FLOATS}"
        )
    scheme = METHODS[method](c)
    c.refuse_unread()
    return scheme


USE_FLOATS = "or a folder that is not quantised, with quantization='int8', 'int4' or 'fp8'"


def _maker(values: dict[str, Any]) -> str:
    """The program that wrote a quantization_config without quant_method, where it is known."""
    given = values.get("quantization_config") or {}
    if not isinstance(given, dict) or "quant_method" in given:
        return ""
    if "quantization" in values:
        return " (the folder is for MLX)"
    producer = given.get("producer")
    return f" (the folder is of {short(producer.get('name'))})" if isinstance(producer, dict) else ""


def fp8(c: ConfigReader) -> Scheme:
    """e4m3 with a scale for each block of weight_block_size (outputs, inputs), as DeepSeek and Qwen, or with one for a
    whole tensor, as Mistral. Activations are not quantised here, so their scales ("static") are not needed."""
    blocks = c.counts("weight_block_size", 2**16)
    if blocks is not None and (len(blocks) != 2 or 0 in blocks):
        raise UnsupportedError(
            f"{c.where}: weight_block_size={short(blocks)} must be [outputs, inputs] of a block, or absent, where each "
            "tensor has one scale"
        )
    c.only("fmt", "e4m3", "float8_e4m3fn")
    c.only("activation_scheme", "dynamic", "static")
    c.ignore("modules_to_not_convert", "ignored_layers", "scale_fmt", "dequantize")
    size = lambda inputs: inputs if blocks is None else math.gcd(inputs, blocks[1])  # of a group
    groups = lambda inputs, scales, *_: Groups(inputs // size(inputs), scales.dtype)
    decode = _fp8_tensor if blocks is None else functools.partial(_fp8_blocks, blocks[0], blocks[1])
    return Scheme("fp8", ("weight", "weight_scale_inv"), decode, groups, ("activation_scale", "input_scale"))


def _check_matrices(**parts: np.ndarray) -> None:
    """ValueError unless all are matrices with elements."""
    for name, part in parts.items():
        if part.ndim != 2 or not part.size:
            raise ValueError(f"{name} {part.shape} must be a matrix with elements")


def _check_fp8(weight: np.ndarray) -> None:
    _check_matrices(codes=weight)
    if weight.dtype != ml_dtypes.float8_e4m3fn:
        raise ValueError(f"codes have dtype {weight.dtype}, which must be float8_e4m3fn")


def _fp8_tensor(weight: np.ndarray, scale: np.ndarray, *of_activations) -> Decoded:
    _check_fp8(weight)
    if scale.size != 1:
        raise ValueError(f"scales {scale.shape} must be one number, as the config has no weight_block_size")
    return Decoded(weight.view(np.uint8), np.full((len(weight), 1), scale.reshape(()), scale.dtype))


def _fp8_blocks(out_block: int, in_block: int, weight: np.ndarray, scales: np.ndarray, *of_activations) -> Decoded:
    _check_fp8(weight)
    _check_matrices(scales=scales)
    outputs, inputs = weight.shape
    if scales.shape != (math.ceil(outputs / out_block), math.ceil(inputs / in_block)):
        raise ValueError(f"scales {scales.shape} do not fit blocks of {out_block} x {in_block}")
    group = math.gcd(inputs, in_block)  # a block may be cut at the end; groups are not
    columns = np.arange(0, inputs, group) // in_block
    return Decoded(weight.view(np.uint8), scales[np.arange(outputs) // out_block][:, columns])


def _group_size(c: ConfigReader) -> int | None:
    """The key group_size: a count, WHOLE, or None if it is absent."""
    return WHOLE if c.get("group_size") == WHOLE else c.count("group_size", None)


def awq(c: ConfigReader) -> Scheme:
    """AutoAWQ's `gemm`: words of eight outputs in the order 0 2 4 6 1 3 5 7, zero points."""
    c.only("bits", 4)
    c.only("zero_point", True)
    for key in ("version", "checkpoint_format", "format"):
        c.only(key, "gemm", "GEMM")
    c.only("method", "awq")
    size = _group_size(c)
    c.ignore("desc_act", "lm_head", "meta", "pack_dtype", "sym")  # GPTQModel writes its own keys, too
    c.ignore("modules_to_not_convert", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse")
    groups = lambda inputs, zeros, scales: Groups(len(scales), scales.dtype, True)
    return Scheme("int4", ("qweight", "qzeros", "scales"), _awq, groups, group_size=size)


AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the place of each output in its word


def _awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> Decoded:
    _check_matrices(qweight=qweight, qzeros=qzeros, scales=scales)
    zeros = _nibbles(qzeros, AWQ_ORDER).reshape(len(qzeros), -1)
    return Decoded(_words_of_inputs(qweight).T, scales.T, (zeros.astype(np.int8) - 8).T)


def _words_of_inputs(qweight: np.ndarray) -> np.ndarray:
    """AWQ's words of eight outputs [in, out / 8] -> words of eight inputs [in / 8, out], with codes in their places."""
    _check_word_of_inputs(len(qweight))
    stored = _as_uint32(qweight).reshape(-1, PACKED, qweight.shape[1])
    words = np.empty((len(stored), stored.shape[2], PACKED), np.uint32)
    for output, shift in enumerate(AWQ_ORDER):
        word = np.zeros(words.shape[:2], np.uint32)
        for i, place in enumerate(PLACES):
            word |= (stored[:, i] >> np.uint32(4 * shift) & np.uint32(15)) << np.uint32(4 * place)
        words[:, :, output] = word
    return words.reshape(len(stored), -1)


def _check_word_of_inputs(inputs: int) -> None:
    """ValueError unless so many inputs fill words of 4-bit codes."""
    if inputs % PACKED:
        raise ValueError(f"its {inputs} inputs must be a multiple of {PACKED} to be kept in 4 bits")


def gptq(c: ConfigReader) -> Scheme:
    """AutoGPTQ, GPTQModel: words of consecutive inputs; `gptq` stores zero points less one, `gptq_v2` as they are."""
    bits, v2 = c.count("bits"), c.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq_v2"
    if bits not in (4, 8):
        raise UnsupportedError(f"{c.where}: bits={bits} is not supported; it must be 4 or 8")
    c.only("format", "gptq_v2" if v2 else "gptq")
    c.only("method", "gptq")
    c.only("data_type", "int")
    size = _group_size(c)
    rules = c.section("dynamic").given  # of modules; those that begin with "-:" are not quantised
    if other := next((rule for rule in rules if not rule.startswith("-:")), None):
        raise UnsupportedError(
            f"{c.where}: dynamic gives {short(other)} settings of its own, which is not supported: use a folder with "
            f"the same for all modules, {USE_FLOATS}"
        )
    c.ignore(*AUTOROUND_KEYS)
    c.ignore(
        "desc_act", "sym", "static_groups", "true_sequential", "damp_percent", "model_name_or_path",
        "model_file_base_name", "lm_head", "meta", "pack_dtype", "dataset", "tokenizer", "backend", "use_cuda_fp16",
        "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id",
        "use_exllama", "max_input_length", "exllama_config", "cache_block_outputs", "modules_in_block_to_quantize",
        "is_marlin_format", "hessian", "disable_exllama", "act_group_aware", "hyb_act", "mse",
    )  # fmt: skip
    offset, needed = 0 if v2 else 1, ("qweight", "qzeros", "scales")

    def groups(inputs: int, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray | None) -> Groups:
        return Groups(len(scales), scales.dtype, bool(_gptq_zeros(bits, offset, qzeros, scales.shape).any()))

    decode, format = functools.partial(_gptq, bits, offset), "int4" if bits == 4 else "int8"
    return Scheme(format, needed, decode, groups, ("g_idx",), (".bias",), size)


AUTOROUND_KEYS = (
    "amp", "autoround_version", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples", "scale_dtype", "seqlen",
    "train_bs",
)  # fmt: skip
"""How AutoRound found the codes that it stores as GPTQ."""


def _gptq(bits: int, offset: int, qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx) -> Decoded:
    _check_matrices(qweight=qweight, qzeros=qzeros, scales=scales)
    groups, outputs = scales.shape
    if qweight.shape[1] != outputs:
        raise ValueError(f"qweight {qweight.shape} does not fit scales {scales.shape}")
    inputs = len(qweight) * 32 // bits
    zeros = _gptq_zeros(bits, offset, qzeros, scales.shape)
    check_groups(groups, inputs, scales.dtype, None)
    if g_idx is not None and (g_idx.shape != (inputs,) or not np.issubdtype(g_idx.dtype, np.integer)):
        raise ValueError(f"g_idx {g_idx.dtype}{g_idx.shape} must be an integer for each of the {inputs} inputs")
    if g_idx is not None and not np.array_equal(g_idx, np.arange(inputs) // (inputs // groups)):
        raise UnsupportedError(
            "its g_idx (desc_act) gives inputs of one group different places, which is not supported: use a folder "
            f"with desc_act=false, {USE_FLOATS}"
        )
    if zeros.max(initial=0) >= 2 ** (bits - 1):
        raise UnsupportedError(
            f"a zero point is stored as {2**bits - 1} in checkpoint_format='gptq', which some programs read as "
            f"{2**bits} and others as 0; quantise the model again, with sym=True or as gptq_v2"
        )
    if bits == 4:
        codes = in_places(_as_uint32(qweight))
    else:
        codes = (_unpacked(8, qweight).swapaxes(1, 2).reshape(inputs, outputs) ^ 128).view(np.int8)
    return Decoded(codes.T, scales.T, zeros.astype(np.int8).T if zeros.any() else None)


def _gptq_zeros(bits: int, offset: int, qzeros: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """int16[groups, out] zero points of signed codes. offset: added to each stored one."""
    if qzeros.ndim != 2 or len(shape) != 2 or (len(qzeros), qzeros.shape[1] * 32 // bits) != tuple(shape):
        raise ValueError(f"qzeros {qzeros.shape} does not fit scales {shape}")
    return _unpacked(bits, qzeros).reshape(shape).astype(np.int16) + offset - 2 ** (bits - 1)


def _unpacked(bits: int, words: np.ndarray) -> np.ndarray:
    """int32 [...] -> the codes of each word, from the lowest bits on: uint8[..., 32 / bits]."""
    return _nibbles(words) if bits == 4 else _as_uint32(words)[..., None].view(np.uint8)


def compressed_tensors(c: ConfigReader) -> Scheme:
    """llm-compressor: one group of settings for all Linear modules; weights alone are quantised."""
    groups = c.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise UnsupportedError(f"{c.where}: config_groups={short(groups)} must have one group; more are not supported")
    name, group = next(iter(groups.items()))
    g = ConfigReader(group if isinstance(group, dict) else {}, f"{c.where}, {name}")
    for key in ("input_activations", "output_activations"):
        if g.get(key) is not None:
            raise UnsupportedError(
                f"{g.where}: {key}={short(g.get(key))} is not supported: activations are not quantised (w8a8); use a "
                f"folder in which weights alone are (w8a16, w4a16), {USE_FLOATS}"
            )
    g.ignore("targets", "format")
    w = g.section("weights")
    kind, bits, layout = w.choice("type", ("int", "float")), w.count("num_bits"), c.get("format")
    w.only("dynamic", False)
    if w.get("actorder") not in (None, "static", "weight"):  # "group" stores g_idx
        raise UnsupportedError(
            f"{w.where}: actorder={short(w.get('actorder'))} is not supported, because it gives inputs of one group "
            f"different places: use a folder with actorder 'static', 'weight' or null, {USE_FLOATS}"
        )
    strategy = w.choice("strategy", ("tensor", "channel", "group", "block"), "tensor")
    is_symmetric, zero = w.flag("symmetric", True), ("weight_zero_point",)  # stored if it is not
    size = _group_size(w)
    size = WHOLE if size is None and strategy in ("channel", "tensor") else size
    w.ignore("block_structure", "observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    g.refuse_unread()
    w.refuse_unread()
    c.only("kv_cache_scheme")
    c.only("quantization_status", "compressed", "frozen")
    for key in ("sparsity_config", "transform_config"):
        # "dense": zeros are stored like any other number.
        if c.get(key) and not (key == "sparsity_config" and c.section(key).get("format") == "dense"):
            raise UnsupportedError(f"{c.where}: {key}={short(c.get(key))} is not supported")
    c.ignore("ignore", "version", "global_compression_ratio")
    if strategy in ("channel", "group") and kind == "int" and bits in (4, 8) and layout == "pack-quantized":
        of_packed = lambda inputs, scales, shape, zeros=None: Groups(scales.shape[1], scales.dtype, zeros is not None)
        decode, format = functools.partial(_ct_packed, bits), "int4" if bits == 4 else "int8"
        needed = ("weight_packed", "weight_scale", "weight_shape", *(() if is_symmetric else zero))
        return Scheme(format, needed, decode, of_packed, zero if is_symmetric else (), group_size=size)
    if strategy != "block" and (kind, bits) in (("int", 8), ("float", 8)) and layout in CT_LAYOUTS:
        decode = functools.partial(_ct_plain, kind == "int")
        format, needed = "int8" if kind == "int" else "fp8", ("weight", "weight_scale", *(() if is_symmetric else zero))
        return Scheme(format, needed, decode, _ct_plain_groups, zero if is_symmetric else (), group_size=size)
    seen = f"format={short(layout)} with {kind} weights of {bits} bits by {strategy}"
    raise UnsupportedError(f"{c.where}: {seen} is not supported; pack-quantized of 4 or 8 bits and 8-bit weights are")


CT_LAYOUTS = ("int-quantized", "float-quantized", "naive-quantized")


def _ct_packed(
    bits: int, words: np.ndarray, scales: np.ndarray, shape: np.ndarray, zeros: np.ndarray | None = None
) -> Decoded:
    """Codes of consecutive inputs in a word, and zero points of consecutive outputs."""
    if not np.issubdtype(shape.dtype, np.integer) or shape.shape != (2,):
        raise ValueError(f"weight_shape is {shape.dtype}{list(shape.shape)}, which must be int64[2]")
    _check_matrices(weight_packed=words, weight_scale=scales)
    outputs, inputs = (int(n) for n in shape)
    if len(words) != outputs or words.shape[1] != math.ceil(inputs * bits / 32):
        raise ValueError(f"packed codes {words.shape} do not fit weight_shape {shape.tolist()}")
    if bits == 4:
        _check_word_of_inputs(inputs)
        codes = in_places(_as_uint32(words))
    else:
        codes = (_unpacked(8, words).reshape(outputs, -1)[:, :inputs] ^ 128).view(np.int8)
    if zeros is not None:
        _check_matrices(weight_zero_point=zeros)
        if len(zeros) != math.ceil(outputs * bits / 32):
            raise ValueError(f"packed zero points {zeros.shape} do not fit weight_shape {shape.tolist()}")
        zeros = _unpacked(bits, zeros).swapaxes(1, 2).reshape(-1, zeros.shape[1])[:outputs]
        zeros = zeros.astype(np.int8) - 8 if bits == 4 else (zeros ^ 128).view(np.int8)
    return Decoded(codes, scales, zeros)


def _ct_plain(is_int: bool, weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> Decoded:
    """One scale for the tensor [1], or scales [out, groups]; zero points of symmetric weights are zeros."""
    if weight.ndim != 2 or weight.dtype != (np.int8 if is_int else ml_dtypes.float8_e4m3fn):
        raise ValueError(f"codes must be {'int8' if is_int else 'float8_e4m3fn'} [outputs, inputs]")

    def spread(x: np.ndarray) -> np.ndarray:
        if x.size != 1 and (x.ndim != 2 or len(x) != len(weight) or not x.size):
            raise ValueError(f"scales or zero points {x.shape} must be [1] or [{len(weight)}, groups]")
        x = x.reshape(1, 1) if x.size == 1 else x
        return np.broadcast_to(x, (len(weight), x.shape[1]))

    zero_points = None if zeros is None else spread(zeros)
    if zero_points is not None and not _any_nonzero(zero_points):
        zero_points = None
    if zero_points is not None and zero_points.dtype != np.int8:
        raise ValueError(f"zero points have dtype {zero_points.dtype}, which must be int8")
    return Decoded(weight if is_int else weight.view(np.uint8), spread(scales), zero_points)


def _ct_plain_groups(inputs: int, scales: np.ndarray, zeros: np.ndarray | None = None) -> Groups:
    return Groups(1 if scales.size == 1 else scales.shape[1], scales.dtype, zeros is not None and _any_nonzero(zeros))


def _any_nonzero(zeros: np.ndarray) -> bool:
    """Is a zero point other than zero?"""
    return bool((zeros != 0).any())


def _nibbles(words: np.ndarray, order: np.ndarray | None = None) -> np.ndarray:
    """int32 [...] -> the eight codes of each word, uint8[..., 8], from the lowest bits on or in another order."""
    shifts = 4 * (np.arange(PACKED) if order is None else order).astype(np.uint32)
    return (_as_uint32(words)[..., None] >> shifts & 15).astype(np.uint8)


def _as_uint32(words: np.ndarray) -> np.ndarray:
    """Words of packed codes, contiguous; ValueError unless they are integers of 32 bits."""
    if words.dtype not in (np.int32, np.uint32):
        raise ValueError(f"packed codes have dtype {words.dtype}, which must be int32")
    return np.ascontiguousarray(words).view(np.uint32)


METHODS: dict[str, Callable[[ConfigReader], Scheme]] = {
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
}
