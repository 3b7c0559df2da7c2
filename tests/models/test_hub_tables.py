"""Quantised weights that models do not multiply by, such as tables of positions, or that layers share."""

import json

import numpy as np
import pytest

from jattn import models
from jattn.models.checkpoint import Checkpoint
from jattn.models.families import FAMILIES
from jattn.models.load import stored_weights
from jattn.models.tensor_names import transposed
from jattn.models.weight_tree import weight_paths, weight_specs
from jattn.ops.quantised import QuantisedArray, plain
from tests.models import examples, tiny
from tests.models.test_hub_formats import compressed, fp8_pack, fp8_settings, save, weight_paths_of

RNG = np.random.default_rng(6)
TABLES = {
    "opt": {"model.decoder.embed_positions.weight": (66, 32)},
    "mpnet": {
        "mpnet.embeddings.position_embeddings.weight": (64, 32),
        "mpnet.encoder.relative_attention_bias.weight": (32, 4),
    },
    "gemma3n_text": {f"model.altup_{name}.0.weight": (32, 32) for name in ("projections", "unembed_projections")},
    "albert": {},
}
"""The shapes of tensors that do not follow from the weights'."""


def tensors(values):
    """Random tensors of every name that a folder with this config has."""
    config = models.config_of(values)
    table = FAMILIES[values["model_type"]].tensors(config)
    shapes = {}
    for path, spec in weight_paths(weight_specs(config)).items():
        shape = spec.shape[::-1] if table[path].make is transposed else spec.shape
        shapes |= {name: TABLES[values["model_type"]].get(name, shape) for name in table[path].names}
    return {name: RNG.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def rows_pack(x):
    codes, scales = np.round(x * 90).astype(np.int8), RNG.uniform(0.005, 0.01, (len(x), 1)).astype(np.float32)
    return dict(weight=codes, weight_scale=scales), codes * scales.astype(np.float64)


METHODS = {
    "int8": (compressed("int-quantized", 8, "int", "channel"), rows_pack),
    "fp8": (fp8_settings((16, 2)), lambda x: fp8_pack((16, 2), x)),
}


def folders(path, values, settings, pack):
    """The folders "packed", every matrix of which is quantised, and "plain" with the same numbers."""
    made, exact = {}, {}
    for name, x in tensors(values).items():
        if x.ndim == 2 and name.endswith(".weight"):
            parts, exact[name] = pack(x)
            made |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
        else:
            made[name] = exact[name] = x
    for name in ("packed", "plain"):
        (path / name).mkdir()
    (path / "packed" / "config.json").write_text(json.dumps(values | dict(quantization_config=settings)))
    save(path / "packed" / "model.safetensors", made)
    tiny.write(path / "plain", values, {name: x.astype(np.float32) for name, x in exact.items()})


@pytest.mark.parametrize("family", ["opt", "mpnet", "gemma3n_text"])
@pytest.mark.parametrize("method", METHODS)
def test_they_are_dequantised(tmp_path, family, method):
    """Matrices that the model multiplies by and embeddings stay packed."""
    folders(tmp_path, examples.ALL[family] | dict(torch_dtype="float32"), *METHODS[method])
    packed, wanted = (weight_paths_of(models.load(tmp_path / name)[1]) for name in ("packed", "plain"))
    told = stored_weights(tmp_path / "packed")
    for path, weight in packed.items():
        np.testing.assert_allclose(plain(weight), wanted[path], rtol=1e-5, atol=1e-6, err_msg=path)
        assert isinstance(told[path], QuantisedArray) == isinstance(weight, QuantisedArray), path
    unpacked = [path for path in packed if path.rpartition(".")[2] in ("positions", "distance_bias", "into", "out")]
    assert unpacked and not any(isinstance(packed[path], QuantisedArray) for path in unpacked)
    assert isinstance(packed["embed"], QuantisedArray)


@pytest.mark.parametrize("method", METHODS)
def test_a_module_that_is_not_used_may_be_quantised(tmp_path, method):
    """As the pooler of a BERT, where every Linear module is."""
    settings, pack = METHODS[method]
    folders(tmp_path, examples.ALL["mpnet"] | dict(torch_dtype="float32"), settings, pack)
    checkpoint, parts = Checkpoint(tmp_path / "packed"), pack(np.ones((32, 32), np.float32))[0]
    stored = {name: checkpoint.read(name).copy() for name in checkpoint.locations}
    save(tmp_path / "packed" / "model.safetensors", stored | {f"pooler.dense.{n}": x for n, x in parts.items()})
    models.load(tmp_path / "packed")
    save(tmp_path / "packed" / "model.safetensors", stored | {f"other.dense.{n}": x for n, x in parts.items()})
    with pytest.raises(ValueError, match=r"other\.dense\.weight_scale\w*' is not used by this model"):
        models.load(tmp_path / "packed")


def test_layers_that_share_weights_share_their_codes(tmp_path):
    folders(tmp_path, examples.ALL["albert"] | dict(torch_dtype="float32"), *METHODS["int8"])
    first, second = models.load(tmp_path / "packed")[1]["layers"][:2]
    assert first["mlp"]["up"]["kernel"].values is second["mlp"]["up"]["kernel"].values
