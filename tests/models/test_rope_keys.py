"""Rotary keys of config.json, old and new, give the frequencies that transformers computes from them."""

import numpy as np
import pytest

from jattn.errors import UnsupportedError
from jattn.models.config_reader import ConfigReader
from jattn.models.rope_config import rope_of, rope_of_layer_type

transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")

HEAD_DIM, LONGEST = 16, 128
COMMON = dict(hidden_size=64, num_attention_heads=4, max_position_embeddings=LONGEST)
LONG = dict(short_factor=[1.0 + i / 8 for i in range(8)], long_factor=[2.0 + i for i in range(8)])
PARAMETERS = {
    "linear": dict(rope_type="linear", factor=3.0),
    "dynamic": dict(rope_type="dynamic", factor=3.0),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=32,
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    "yarn, all said": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=16.0, beta_slow=2.0,
        mscale=0.7, mscale_all_dim=1.3, truncate=False,
    ),
    "yarn, trained on few positions": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=3, truncate=False
    ),
    "yarn, ends of the ramp exchanged": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=1.0, beta_slow=8.0
    ),
    "yarn, a factor of its own": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.25
    ),
    "longrope": dict(rope_type="longrope", original_max_position_embeddings=32, **LONG),
    "longrope, a factor of its own": dict(
        rope_type="longrope", original_max_position_embeddings=32, factor=2.0, attention_factor=1.5, **LONG
    ),
}  # fmt: skip


@pytest.mark.parametrize("length", [20, 100, 200])
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.filterwarnings("ignore")  # transformers has opinions on odd combinations
def test_frequencies_and_magnitude_are_those_of_transformers(name, length):
    values = PARAMETERS[name]
    theirs = transformers.LlamaConfig(**COMMON, rope_parameters=values | dict(rope_theta=500.0))
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[values["rope_type"]]
    wanted, magnitude = compute(theirs, "cpu", seq_len=length)
    for spelling in (
        dict(rope_parameters=values | dict(rope_theta=500.0)),
        dict(rope_theta=500.0, rope_scaling={("type" if k == "rope_type" else k): v for k, v in values.items()}),
    ):
        rope = rope_of(ConfigReader(COMMON | spelling), HEAD_DIM, LONGEST)
        mine = rope.scaling.frequencies(rope.dim, rope.theta, length)
        np.testing.assert_allclose(mine, wanted.numpy(), rtol=2e-6)
        np.testing.assert_allclose(rope.scaling.attention_factor, magnitude, rtol=1e-6)


@pytest.mark.parametrize("name", ["linear", "yarn", "llama3", "yarn, a factor of its own"])
def test_parameters_of_a_layer_type_give_their_frequencies_or_are_refused(name):
    """transformers looks for `truncate` beside the layer types, not inside."""
    values = PARAMETERS[name] | dict(rope_theta=500.0)
    nested = dict(full_attention=values, sliding_attention=dict(rope_type="default", rope_theta=90.0))
    kinds = ["full_attention", "sliding_attention"]
    theirs = transformers.Olmo3Config(**COMMON, num_hidden_layers=2, layer_types=kinds, rope_parameters=nested)
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[values["rope_type"]]
    wanted, magnitude = compute(theirs, "cpu", layer_type="full_attention")
    read = lambda more: rope_of_layer_type(
        ConfigReader(COMMON | dict(rope_parameters=nested | dict(full_attention=values | more))),
        "full_attention", 1e4, HEAD_DIM, LONGEST,
    )  # fmt: skip
    rope = read({})
    np.testing.assert_allclose(rope.scaling.frequencies(rope.dim, rope.theta), wanted.numpy(), rtol=2e-6)
    np.testing.assert_allclose(rope.scaling.attention_factor, magnitude, rtol=1e-6)
    with pytest.raises(UnsupportedError, match="rope_parameters of full_attention: truncate=False is not supported"):
        read(dict(truncate=False))
