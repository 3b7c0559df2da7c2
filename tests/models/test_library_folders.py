"""Folders written by compressed-tensors, the library of the format: the logits are those of what it decompresses."""

import copy
import json

import numpy as np
import pytest

from jattn import models
from jattn.errors import UnsupportedError
from jattn.models.config_reader import ConfigReader
from jattn.models.hub_formats import METHODS
from jattn.ops.quantised import QuantisedArray, unpacked
from tests.models import test_hub_formats, witness

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
DYNAMIC = dict(num_bits=8, type="int", strategy="token", dynamic=True)
STATIC = dict(num_bits=8, type="float", strategy="tensor", dynamic=False)
FP4 = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
GROUPS = dict(type="int", strategy="group", group_size=32)
SCHEMES = {  # of weights and perhaps of activations -> the format here
    "w4a16": (GROUPS | dict(num_bits=4, symmetric=True), None, "int4"),
    "w4a16 with zero points": (GROUPS | dict(num_bits=4, symmetric=False), None, "int4"),
    "w4a16 by channel": (dict(num_bits=4, type="int", strategy="channel", symmetric=True), None, "int4"),
    "w8a16": (dict(num_bits=8, type="int", strategy="channel", symmetric=True), None, "int8"),
    "w8a16 with zero points": (GROUPS | dict(num_bits=8, symmetric=False), None, "int8"),
    "fp8": (dict(num_bits=8, type="float", strategy="channel", symmetric=True), None, "fp8"),
    "w8a8": (dict(num_bits=8, type="int", strategy="channel", symmetric=True), DYNAMIC, "int8"),
    "w8a8 of floats": (dict(num_bits=8, type="float", strategy="tensor", symmetric=True), STATIC, "fp8"),
    "fp8 blocks": (
        dict(num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
        DYNAMIC | dict(type="float"),
        "fp8",
    ),
    "w4a8": (GROUPS | dict(num_bits=4, symmetric=True), DYNAMIC, "int8"),
    "nvfp4": (FP4, FP4 | dict(dynamic="local"), "fp4"),
    "nvfp4a16": (FP4, None, "fp4"),
}


def written(directory, weights, activations):
    """The model as the library decompresses it, after it wrote it to a folder."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
        disable_quantization,
    )
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = witness.Example(
        "llama", dict(hidden_size=64, intermediate_size=96, head_dim=16, num_key_value_heads=1)
    ).save(directory)
    args = QuantizationArgs(**weights)
    of_inputs = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=of_inputs)
    cache = QuantizationArgs(num_bits=8, type="float") if of_inputs is not None else None
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], kv_cache_scheme=cache)
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            of_group, whole = _grouped(module.weight.data, weights), None
            if hasattr(module, "weight_global_scale"):
                whole = generate_gparam(module.weight.data.min(), module.weight.data.max())
                module.weight_global_scale.data.copy_(whole)
            scale, zero = calculate_qparams(of_group.amin(-1), of_group.amax(-1), args, global_scale=whole)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
            for name in ("input_scale", "input_global_scale"):
                if hasattr(module, name):
                    getattr(module, name).data.fill_(0.01)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    stored = {name: x.contiguous() for name, x in copy.deepcopy(model).state_dict().items()}
    torch_save(directory, stored)
    compressor.update_config(directory)
    compressor.decompress_model(model)
    model.float().apply(disable_quantization)  # of activations
    if weights["type"] == "float" and weights["num_bits"] == 4:  # which the library rounds to bfloat16
        for name, module in model.named_modules():
            if f"{name}.weight_packed" in stored:
                module.weight.data = nvfp4_of(stored, name, args)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()


def nvfp4_of(stored, name, args):
    """The library's codes times its scales in float32."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, scale, whole = (stored[f"{name}.{end}"] for end in ("weight_packed", "weight_scale", "weight_global_scale"))
    codes = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1]).float()
    return dequantize(codes, scale.float(), args=args, dtype=codes.dtype, global_scale=whole)


def _grouped(weight, weights):
    """A weight [out, in] with the elements that share a scale along the last axis."""
    if weights["strategy"] == "tensor":
        return weight.reshape(1, -1)
    if weights["strategy"] != "block":
        return weight.reshape(len(weight), -1, weights.get("group_size", weight.shape[1]))
    rows, columns = weights["block_structure"]
    blocks = weight.reshape(len(weight) // rows, rows, weight.shape[1] // columns, columns)
    return blocks.swapaxes(1, 2).reshape(*blocks.shape[::2], -1)


def torch_save(directory, tensors):
    from safetensors.torch import save_file

    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_folder_of_the_library_loads_packed(tmp_path, name):
    weights, activations, format = SCHEMES[name]
    wanted = written(tmp_path, weights, activations)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    config, params = models.load(tmp_path)
    kernel = params["layers"][0]["mlp"]["down"]["kernel"]
    assert isinstance(kernel, QuantisedArray) and kernel.format == format
    seen = models.prompt_logits(config, params, IDS)
    assert np.abs(seen - wanted).max() < 1e-3 * np.std(wanted)


SETTINGS = {  # the class of settings in transformers, and its arguments
    "fp8": ("FineGrainedFP8Config", {}),
    "fp8 of whole tensors": ("FineGrainedFP8Config", dict(weight_block_size=None, activation_scheme="static")),
    "fp8 with more modules": ("FineGrainedFP8Config", dict(modules_to_convert=["embed_tokens"])),
    "fbgemm_fp8": ("FbgemmFp8Config", {}),
    "awq": ("AwqConfig", dict(bits=4)),
    "gptq": ("GPTQConfig", dict(bits=4)),
    "gptq of 8 bits": ("GPTQConfig", dict(bits=8, group_size=-1, desc_act=True, sym=False)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_as_transformers_writes_them_are_read(name):
    import transformers

    kind, options = SETTINGS[name]
    settings = json.loads(json.dumps(getattr(transformers, kind)(**options).to_dict()))
    assert models.config_of(test_hub_formats.CONFIG | dict(quantization_config=settings))


def test_experts_of_4_bits_in_fp8_are_refused():
    settings = dict(quant_method="fp8", weight_block_size=[128, 128], expert_dtype="fp4")
    with pytest.raises(UnsupportedError, match="expert_dtype='fp4' is not supported; it must be 'fp8'"):
        models.config_of(test_hub_formats.CONFIG | dict(quantization_config=settings))


def test_words_of_the_library_are_decoded_to_its_codes_and_zero_points():
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # pyright: ignore

    rng = np.random.default_rng(0)
    codes, zeros = (rng.integers(-8, 8, shape).astype(np.int8) for shape in ((16, 64), (16, 2)))
    packed = pack_to_int32(torch.from_numpy(codes), 4).numpy()
    packed_zeros = pack_to_int32(torch.from_numpy(zeros), 4, packed_dim=0).contiguous().numpy()
    settings = test_hub_formats.compressed("pack-quantized", 4, "int", "group", group_size=32, symmetric=False)
    scheme = METHODS["compressed-tensors"](ConfigReader(settings))
    decoded = scheme.decode(packed, np.ones((16, 2), np.float32), np.array(codes.shape), packed_zeros)
    np.testing.assert_array_equal(np.asarray(unpacked(decoded.codes, 1)).astype(int) - 8, codes)
    np.testing.assert_array_equal(decoded.zero_points, zeros)
