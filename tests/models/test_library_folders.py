"""Folders written by compressed-tensors, the library of the format: the logits are those of what it decompresses."""

import copy
import json

import numpy as np
import pytest

from jattn import models
from jattn.models.config_reader import ConfigReader
from jattn.models.hub_formats import METHODS
from jattn.ops.quantised import QuantisedArray, unpacked
from tests.models import test_hub_formats, witness

pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
SCHEMES = {  # bits, type, strategy, group, symmetric -> the format here
    "w4a16": (dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True), "int4"),
    "w4a16 with zero points": (dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False), "int4"),
    "w4a16 by channel": (dict(num_bits=4, type="int", strategy="channel", symmetric=True), "int4"),
    "w8a16": (dict(num_bits=8, type="int", strategy="channel", symmetric=True), "int8"),
    "w8a16 with zero points": (dict(num_bits=8, type="int", strategy="group", group_size=32, symmetric=False), "int8"),
    "fp8": (dict(num_bits=8, type="float", strategy="channel", symmetric=True), "fp8"),
}


def written(directory, weights):
    """The model as the library decompresses it, after it wrote it to a folder."""
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = witness.Example(
        "llama", dict(hidden_size=64, intermediate_size=96, head_dim=16, num_key_value_heads=1)
    ).save(directory)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            of_group = module.weight.data.reshape(len(module.weight), -1, weights.get("group_size", module.in_features))
            scale, zero = calculate_qparams(of_group.amin(-1), of_group.amax(-1), args)
            module.weight_scale.data.copy_(scale)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    stored = {name: x.contiguous() for name, x in copy.deepcopy(model).state_dict().items()}
    torch_save(directory, stored)
    compressor.update_config(directory)
    compressor.decompress_model(model)
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float().numpy()


def torch_save(directory, tensors):
    from safetensors.torch import save_file

    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_folder_of_the_library_loads_packed(tmp_path, name):
    weights, format = SCHEMES[name]
    wanted = written(tmp_path, weights)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
    config, params = models.load(tmp_path)
    kernel = params["layers"][0]["mlp"]["down"]["kernel"]
    assert isinstance(kernel, QuantisedArray) and kernel.format == format
    seen = models.prompt_logits(config, params, IDS)
    assert np.abs(seen - wanted).max() < 1e-3 * np.std(wanted)


def test_words_of_the_library_are_decoded_to_its_codes_and_zero_points():
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32  # pyright: ignore

    rng = np.random.default_rng(0)
    codes, zeros = (rng.integers(-8, 8, shape).astype(np.int8) for shape in ((16, 64), (16, 2)))
    packed = pack_to_int32(torch.from_numpy(codes), 4).numpy()
    packed_zeros = pack_to_int32(torch.from_numpy(zeros), 4, packed_dim=0).contiguous().numpy()
    settings = test_hub_formats.compressed("pack-quantized", 4, "int", "group", group_size=32)
    scheme = METHODS["compressed-tensors"](ConfigReader(settings))
    decoded = scheme.decode(packed, np.ones((16, 2), np.float32), np.array(codes.shape), packed_zeros)
    np.testing.assert_array_equal(np.asarray(unpacked(decoded.codes, 1)).astype(int) - 8, codes)
    np.testing.assert_array_equal(decoded.zero_points, zeros)
