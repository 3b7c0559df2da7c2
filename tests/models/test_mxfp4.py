"""Packed experts of gpt-oss are unpacked to the values that transformers gives."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import models
from tests.models.witness import Example

pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")

EXPERTS, HIDDEN, WIDTH = 2, 64, 32
PACKED = Example(
    "gpt_oss",
    dict(hidden_size=HIDDEN, intermediate_size=WIDTH, num_hidden_layers=1, num_local_experts=EXPERTS,
         num_experts_per_tok=1, head_dim=8, layer_types=["full_attention"]),
)  # fmt: skip


def test_a_packed_folder_holds_the_weights_that_transformers_would_unpack(tmp_path):
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng, plain, packed = np.random.default_rng(0), tmp_path / "plain", tmp_path / "packed"
    PACKED.save(plain)
    packed.mkdir()
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, rows, inputs in (("gate_up_proj", 2 * WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH)):
        at = f"model.layers.0.mlp.experts.{name}"
        blocks = rng.integers(0, 256, (EXPERTS, rows, inputs // 32, 16), np.uint8)
        scales = rng.integers(117, 132, (EXPERTS, rows, inputs // 32), np.uint8)
        real = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        assert real.shape == stored.pop(at).shape
        tensors[at] = np.ascontiguousarray(real.numpy())
        stored |= {f"{at}_blocks": blocks, f"{at}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    (packed / "config.json").write_text(json.dumps(config))
    (theirs, wanted), (mine, params) = models.load(plain), models.load(packed, dtype="float32")
    assert mine == theirs
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    assert models.load(packed)[1]["layers"][0]["mlp"]["up"]["kernel"].dtype == jnp.bfloat16
