"""Quantised weights as folders of the hub store them: each method reads its quantization_config into a Scheme.

Activations are not quantised: products use the dequantised weights. Folders may ask for activations of 8 bits, or of
4-bit floats beside weights in NVFP4, and hold scales for them. They are taken, and activations stay as they are, which
is closer to the model that was quantised. Scales of cached keys and values are not used either: the engine chooses the
dtype of the cache, and computes the scales of an 8-bit one as it writes.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.errors import UnsupportedError
from jattn.errors.arguments import short
from jattn.models.config_reader import ConfigReader
from jattn.models.hub_codes import (
    as_uint32,
    check_matrices,
    check_word_of_inputs,
    groups_of_blocks,
    nibbles,
    of_blocks,
    of_outputs,
    of_tensor,
    one_group,
    unpacked,
)
from jattn.models.hub_compressed_tensors import compressed_tensors
from jattn.models.hub_modelopt import SETTINGS, modelopt
from jattn.models.hub_scheme import Decoded, Groups, Scheme, Zeros, check_groups
from jattn.models.hub_settings import USE_FLOATS, group_size
from jattn.ops.quantised import PACKED, PLACES, in_places


def method_of(values: dict[str, Any]) -> Any:
    """The quant_method of a config.json's quantization_config; None if it has none. Early ModelOpt wrote its own name
    alone."""
    given = values.get("quantization_config")
    if not isinstance(given, dict):
        return None
    producer = given.get("producer")
    is_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    return given.get("quant_method") or ("modelopt" if is_modelopt else None)


def scheme_of(values: dict[str, Any], where: str) -> Scheme | None:
    """The Scheme of a config.json's quantization_config; None if weights are floats. UnsupportedError for unknown
    methods."""
    if not (given := values.get("quantization_config") or {}) and not values.get("quantization"):  # MLX's name
        return None
    given = given if isinstance(given, dict) else {}
    c = ConfigReader(given, f"{where}, {'quantization_config' if 'quantization' not in given else SETTINGS}")
    c.ignore("quant_method")
    method = method_of(values)
    if not isinstance(method, str) or method not in METHODS:
        maker = " (the folder is for MLX)" if method is None and "quantization" in values else ""
        raise UnsupportedError(
            f"{c.where}: quant_method={short(method)} is not supported{maker}; known: {', '.join(METHODS)}; use one of "
            f"these, {USE_FLOATS}"
        )
    scheme = METHODS[method](c)
    c.refuse_unread()
    return scheme


def fp8(c: ConfigReader) -> Scheme:
    """e4m3 with a scale for each block of weight_block_size (outputs, inputs), as DeepSeek and Qwen, or with one for a
    whole tensor, as Mistral and, by another name, AutoFP8. The scales of activations ("static") are not needed."""
    blocks = c.counts("weight_block_size", 2**16)
    if blocks is not None and (len(blocks) != 2 or 0 in blocks):
        raise UnsupportedError(
            f"{c.where}: weight_block_size={short(blocks)} must be [outputs, inputs] of a block, or absent, where each "
            "tensor has one scale"
        )
    c.only("fmt", "e4m3", "float8_e4m3fn")
    c.only("activation_scheme", "dynamic", "static")
    c.only("expert_dtype", "fp8")
    c.ignore("modules_to_not_convert", "modules_to_convert", "ignored_layers", "scale_fmt", "dequantize")
    c.ignore("kv_cache_scheme")
    decode = of_tensor if blocks is None else functools.partial(of_blocks, False, blocks[0], blocks[1])
    groups = one_group if blocks is None else functools.partial(groups_of_blocks, blocks[1])
    others = ("activation_scale", "input_scale")
    return Scheme(
        "fp8", ("weight", "weight_scale_inv"), decode, groups, others, renamed=(("weight_scale_inv", "weight_scale"),)
    )


def fbgemm_fp8(c: ConfigReader) -> Scheme:
    """e4m3 with a scale for each output, as Meta's Llama 3.1. The upper bound of activations is not needed."""
    c.number("activation_scale_ub", None, above=0)
    c.ignore("modules_to_not_convert")
    return Scheme("fp8", ("weight", "weight_scale"), of_outputs, one_group, ("input_scale_ub",))


def awq(c: ConfigReader) -> Scheme:
    """AutoAWQ's `gemm`: words of eight outputs in the order 0 2 4 6 1 3 5 7, zero points."""
    c.only("bits", 4)
    c.only("zero_point", True)
    for key in ("version", "checkpoint_format", "format"):
        c.only(key, "gemm", "GEMM")
    c.only("method", "awq")
    size = group_size(c)
    c.ignore(*GPTQ_KEYS)  # GPTQModel and transformers write these, too
    c.ignore("modules_to_not_convert", "do_fuse", "fuse_max_seq_len", "modules_to_fuse")
    groups = lambda inputs, zeros, scales: Groups(len(scales), scales.dtype, True)
    return Scheme("int4", ("qweight", "qzeros", "scales"), _awq, groups, group_size=size)


AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the place of each output in its word


def _awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> Decoded:
    check_matrices(qweight=qweight, qzeros=qzeros, scales=scales)
    zeros = nibbles(qzeros, AWQ_ORDER).reshape(len(qzeros), -1)
    return Decoded(_words_of_inputs(qweight).T, scales.T, (zeros.astype(np.int8) - 8).T)


def _words_of_inputs(qweight: np.ndarray) -> np.ndarray:
    """AWQ's words of eight outputs [in, out / 8] -> words of eight inputs [in / 8, out], with codes in their places."""
    check_word_of_inputs(len(qweight))
    stored = as_uint32(qweight).reshape(-1, PACKED, qweight.shape[1])
    words = np.empty((len(stored), stored.shape[2], PACKED), np.uint32)
    for output, shift in enumerate(AWQ_ORDER):
        word = np.zeros(words.shape[:2], np.uint32)
        for i, place in enumerate(PLACES):
            word |= (stored[:, i] >> np.uint32(4 * shift) & np.uint32(15)) << np.uint32(4 * place)
        words[:, :, output] = word
    return words.reshape(len(stored), -1)


def gptq(c: ConfigReader) -> Scheme:
    """AutoGPTQ, GPTQModel: words of consecutive inputs; `gptq` stores zero points less one, `gptq_v2` as they are."""
    bits, v2 = c.count("bits"), c.choice("checkpoint_format", ("gptq", "gptq_v2"), "gptq") == "gptq_v2"
    if bits not in (4, 8):
        raise UnsupportedError(f"{c.where}: bits={bits} is not supported; it must be 4 or 8")
    c.only("format", "gptq_v2" if v2 else "gptq")
    c.only("method", "gptq")
    c.only("data_type", "int")
    size = group_size(c)
    rules = c.section("dynamic").given  # of modules; those that begin with "-:" are not quantised
    if other := next((rule for rule in rules if not rule.startswith("-:")), None):
        raise UnsupportedError(
            f"{c.where}: dynamic gives {short(other)} settings of its own, which is not supported: use a folder with "
            f"the same for all modules, {USE_FLOATS}"
        )
    c.ignore(*GPTQ_KEYS, *AUTOROUND_KEYS)
    offset, needed = 0 if v2 else 1, ("qweight", "qzeros", "scales")

    def groups(inputs: int, qzeros: np.ndarray, scales: np.ndarray, g_idx: np.ndarray | None) -> Groups:
        return Groups(len(scales), scales.dtype, bool(_gptq_zeros(bits, offset, qzeros, scales.shape).any()))

    decode, format = functools.partial(_gptq, bits, offset), "int4" if bits == 4 else "int8"
    zeros = Zeros("qzeros", lambda qzeros: bool((_signed_zeros(bits, offset, qzeros) != 0).any()))
    return Scheme(format, needed, decode, groups, ("g_idx",), (".bias",), size, zeros=zeros)


GPTQ_KEYS = (
    "desc_act", "sym", "static_groups", "true_sequential", "damp_percent", "model_name_or_path", "model_file_base_name",
    "lm_head", "meta", "pack_dtype", "dataset", "tokenizer", "backend", "use_cuda_fp16", "model_seqlen",
    "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id", "use_exllama",
    "max_input_length", "exllama_config", "cache_block_outputs", "modules_in_block_to_quantize", "is_marlin_format",
    "hessian", "disable_exllama", "act_group_aware", "hyb_act", "mse",
)  # fmt: skip
"""How AutoGPTQ, GPTQModel and transformers found the codes, and how they compute with them."""
AUTOROUND_KEYS = (
    "amp", "autoround_version", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input",
    "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr", "nsamples", "scale_dtype", "seqlen",
    "train_bs",
)  # fmt: skip
"""How AutoRound found the codes that it stores as GPTQ."""


def _gptq(bits: int, offset: int, qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, g_idx) -> Decoded:
    check_matrices(qweight=qweight, qzeros=qzeros, scales=scales)
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
        codes = in_places(as_uint32(qweight))
    else:
        codes = (unpacked(8, qweight).swapaxes(1, 2).reshape(inputs, outputs) ^ 128).view(np.int8)
    return Decoded(codes.T, scales.T, zeros.astype(np.int8).T if zeros.any() else None)


def _gptq_zeros(bits: int, offset: int, qzeros: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """int16[groups, out] zero points of signed codes. offset: added to each stored one."""
    if qzeros.ndim != 2 or len(shape) != 2 or (len(qzeros), qzeros.shape[1] * 32 // bits) != tuple(shape):
        raise ValueError(f"qzeros {qzeros.shape} does not fit scales {shape}")
    return _signed_zeros(bits, offset, qzeros).reshape(shape)


def _signed_zeros(bits: int, offset: int, qzeros: np.ndarray) -> np.ndarray:
    """int16[groups, out / codes of a word, codes of a word] of the words."""
    return unpacked(bits, qzeros).astype(np.int16) + offset - 2 ** (bits - 1)


METHODS: dict[str, Callable[[ConfigReader], Scheme | None]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,  # vLLM's and SGLang's name of NVFP4
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
}
