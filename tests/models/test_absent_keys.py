"""An absent or null key of config.json has the same meaning as in transformers, or is refused as missing."""

import copy

import pytest

from jattn import models
from jattn.errors import UnsupportedError
from tests.models import examples
from tests.models.witness import known

transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")

ASKED_FOR = {
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps",
    "max_position_embeddings", "num_local_experts", "num_experts_per_tok", "intermediate_size_mlp", "n_head",
    "n_layer", "layer_norm_epsilon", "d_model", "n_heads", "n_layers", "encoder_layers", "decoder_layers",
    "encoder_ffn_dim", "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads", "moe_intermediate_size",
    "num_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts", "moe_topk", "moe_k", "n_group",
    "topk_group",
    "shared_expert_intermediate_size", "rotary_dim", "n_embd", "n_positions", "num_layers", "num_heads", "ffn_dim",
    "norm_epsilon", "norm_eps", "layer_norm_eps", "attention_types", "dim", "hidden_dim", "d_ff",
    "ffn_hidden_size", "expert_ffn_hidden_size", "num_kv_shared_layers",
}  # fmt: skip
CONTRADICT = {("longcat_flash", "head_dim"), ("longcat_flash", "qk_rope_head_dim")}
"""Keys whose defaults do not fit the small examples. transformers accepts the config, and cannot make its model."""
MORE = {
    "gemma3_text, new keys": examples.of(
        "gemma3_text", head_dim=12, rope_theta=None, rope_local_base_freq=None, rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=2.0, rope_theta=7e5),
            sliding_attention=dict(rope_type="default", rope_theta=300.0),
        ),
    ),
    "gemma3_text, global only": examples.of(
        "gemma3_text", head_dim=12, rope_theta=None, rope_parameters=dict(full_attention=dict(rope_type="default"))
    ),
    "gpt_oss, new keys": examples.of("gpt_oss", **examples.EXPERTS, head_dim=10, rope_parameters=examples.YARN),
    "gpt_oss, no rope": examples.of("gpt_oss", **examples.EXPERTS, head_dim=10),
    "phi3, length beside": examples.of(
        "phi3", original_max_position_embeddings=24,
        rope_scaling=examples.LONGROPE | dict(original_max_position_embeddings=48),
    ),
    "llama, length beside": examples.of(
        "llama", original_max_position_embeddings=24, rope_scaling=examples.YARN
    ),
    "llama, no length": examples.of("llama", rope_scaling=dict(rope_type="yarn", factor=2.0)),
    "qwen2, types": examples.of(
        "qwen2", use_sliding_window=True, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "llama4_text, nothing chunked": examples.DECODERS["llama4_text"] | dict(
        layer_types=["full_attention"] * 2, attn_temperature_tuning=False
    ),
}  # fmt: skip
# Heads enough for every family's own number of kv heads.
EXAMPLES = {
    name: values | (dict(num_attention_heads=32, hidden_size=256) if "num_key_value_heads" in values else {})
    for name, values in (examples.ALL | MORE).items()
} | {name: values for name, values in (examples.ALL | MORE).items() if values["model_type"] == "phi3"}


def by_transformers(values: dict) -> dict:
    """The config with every key, as transformers writes it. (A copy, because transformers changes its input.)"""
    values = copy.deepcopy(values)
    name = values.pop("model_type")
    return transformers.CONFIG_MAPPING[known(name)](**values).to_dict() | dict(model_type=name)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("ignore")  # transformers has opinions on odd combinations
def test_dropping_or_nulling_any_key_means_what_transformers_means(name):
    values, compared = EXAMPLES[name], 0
    assert models.config_of(values) == models.config_of(by_transformers(values))
    for key in values.keys() - {"model_type"}:
        left = {k: v for k, v in values.items() if k != key}
        for some in (left, left | {key: None}):
            if some is not left and key in ("partial_rotary_factor", "rotary_pct"):
                continue  # transformers reads null as 1, but writes it as an absent key, which it reads as its default
            try:
                whole = by_transformers(some)
            except Exception:  # refused there: nothing to agree with
                continue
            try:
                mine = models.config_of(some)
            except ValueError as error:
                assert key in ASKED_FOR or key in some or (name, key) in CONTRADICT, (key, error)
                assert key in str(error), (key, error)
                continue
            assert mine == models.config_of(whole), (key, some is left)
            compared += 1
    assert compared >= 2 or name in examples.ENCODERS


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("ignore")
def test_the_fewest_keys_and_each_key_that_transformers_writes_agree(name):
    """Any one key may be missing from a complete config, as transformers writes it."""
    whole = by_transformers(EXAMPLES[name])
    needed = {key: value for key, value in whole.items() if key in ASKED_FOR | {"model_type"}}
    if name in examples.ALL:
        assert models.config_of(needed) == models.config_of(by_transformers(needed))
    for key in whole.keys() - ASKED_FOR - {"model_type"}:
        left = {k: v for k, v in whole.items() if k != key}
        try:
            again = by_transformers(left)
        except Exception:
            continue
        assert meaning(left) == meaning(again), key


def meaning(values: dict):
    """The ModelConfig; None if the config is refused, as some are whose keys contradict one another."""
    try:
        return models.config_of(values)
    except ValueError:
        return None


def test_what_transformers_ignores_and_we_would_not_is_refused():
    refused = [
        examples.of("llama", sliding_window=5),
        examples.of("llama", partial_rotary_factor=0.5),
        examples.of("mistral", sliding_window=5, layer_types=["full_attention", "sliding_attention"]),
        examples.of("mistral", sliding_window=5, use_sliding_window=False),
        examples.of("gemma3_text", rope_parameters=dict(rope_type="linear", factor=2.0)),
    ]
    for values in refused:
        with pytest.raises((UnsupportedError, ValueError), match=r"config\.json"):
            models.config_of(values)
