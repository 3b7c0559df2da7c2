"""Packed experts of gpt-oss stay packed, and stand for the values that transformers unpacks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import models
from jattn.errors import UnsupportedError
from jattn.models.load import stored_weights
from jattn.models.mxfp4 import mxfp4
from tests.models import examples
from tests.models.witness import Example

pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")

EXPERTS, HIDDEN, WIDTH = 2, 64, 32
PACKED = Example(
    "gpt_oss",
    dict(hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=1, num_local_experts=EXPERTS,
         num_experts_per_tok=1, head_dim=8, layer_types=["full_attention"]),
)  # fmt: skip


def save(directory, exponents: tuple[int, int]):
    """The folders `plain` and `packed` of the same weights, whose scales have exponents of this range."""
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng, plain, packed = np.random.default_rng(0), directory / "plain", directory / "packed"
    PACKED.save(plain)
    packed.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, rows, inputs in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        at = f"model.layers.0.mlp.experts.{name}"
        blocks = rng.integers(0, 256, (EXPERTS, rows, inputs // 32, 16), np.uint8)
        scales = rng.integers(*exponents, (EXPERTS, rows, inputs // 32), np.uint8)
        real = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        assert real.shape == stored.pop(at).shape
        tensors[at] = np.ascontiguousarray(real.numpy())
        stored |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed


def test_a_packed_folder_holds_the_weights_that_transformers_would_unpack(tmp_path):
    plain, packed = save(tmp_path, (117, 132))
    (theirs, wanted), (mine, params) = models.load(plain), models.load(packed, dtype="float32")
    assert mine == theirs
    experts = params["layers"][0]["mlp"]
    for name in ("gate", "up", "down"):
        kernel = experts[name]["kernel"]
        assert kernel.format == "fp4" and kernel.group_size == 32 and kernel.dtype == jnp.float32
        assert 8 * sum(x.nbytes for x in jax.tree.leaves(kernel)) == 4.5 * np.prod(kernel.shape)
        np.testing.assert_array_equal(kernel.dequantise(), wanted["layers"][0]["mlp"][name]["kernel"])
    logits, exact = (models.prompt_logits(mine, p, np.arange(9), chunk=4) for p in (params, wanted))
    assert np.abs(logits - exact).max() < 1e-4 * np.std(exact)
    assert models.load(packed)[1]["layers"][0]["mlp"]["up"]["kernel"].dtype == jnp.bfloat16
    for dtype, made in ((None, "bfloat16"), ("auto", "bfloat16"), ("float16", "float16")):
        assert stored_weights(packed, dtype=dtype)["layers.0.mlp.up.kernel"].dtype == made
    with pytest.raises(UnsupportedError, match=r"its weights are quantised \(mxfp4\) already; leave quantization out"):
        models.load(packed, quantization="int8")


def test_scales_with_which_weights_do_not_fit_in_float16_are_refused(tmp_path):
    """As weights that are stored as floats: they would be infinite."""
    _, packed = save(tmp_path, (127, 142))
    models.load(packed, dtype="bfloat16")
    with pytest.raises(ValueError, match="_proj_blocks': a scale of 16384 gives weights that do not fit in float16"):
        models.load(packed, dtype="float16")


@pytest.mark.parametrize("exponent, power", [(0, 2.0**-127), (1, 2.0**-126), (127, 1.0), (190, 2.0**63)])
def test_one_block_by_hand(exponent, power):
    """The codes 0 to 15 twice, in the order of their bytes: 0x10, 0x32 and so on hold codes (0, 1), (2, 3)."""
    blocks = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8).reshape(1, 1, 1, 16)
    weight = mxfp4(slice(None), blocks, np.full((1, 1, 1), exponent, np.uint8))
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert weight.shape == (1, 32, 1) and float(weight.scales[0, 0, 0]) == power
    if exponent == 127:
        np.testing.assert_array_equal(
            np.asarray(weight.dequantise("float32")).ravel(), np.tile(np.r_[numbers, -numbers], 2) * power
        )


@pytest.mark.parametrize(
    "blocks, scales, sentence",
    [
        ((1, 2, 1, 16), 191, r"a scale of 2 \*\* 64: kernels of GPUs multiply by 2 \*\* 63 at most"),
        ((1, 2, 1, 16), 255, "255 is not a number"),
        ((1, 2, 2, 16), 127, "blocks must be"),
        ((1, 2, 1, 8), 0, "blocks must"),
    ],
)
def test_blocks_that_are_not_mxfp4(blocks, scales, sentence):
    with pytest.raises(ValueError, match=sentence):
        mxfp4(slice(None), np.zeros(blocks, np.uint8), np.full((1, 2, 1), scales, np.uint8))


def test_settings_that_are_not_known_are_refused():
    """As those of every other method."""
    known = dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"], dequantize=False)
    values = examples.DECODERS["gpt_oss"]
    models.config_of(values | dict(quantization_config=known))
    with pytest.raises(UnsupportedError, match="quantization_config has keys that are not used.*block_size=16"):
        models.config_of(values | dict(quantization_config=known | dict(block_size=16)))
