"""Wrong values in config.json give one sentence with the file and the key; absent keys have their defaults."""

import math

import pytest

from jattn import models
from jattn.errors import UnsupportedError
from jattn.models.families import FAMILIES
from jattn.nn import YarnRopeScaling
from tests.models import examples, options

BAD = {
    "text": "x", "empty text": "", "negative": -3, "not a number": math.nan, "infinite": math.inf, "object": {"x": 1},
    "nested": [["x"]], "a bool": True, "fraction": 1.5, "huge": 2**70, "zero": 0,
}  # fmt: skip
NUMBERS = {
    "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "attn_logit_softcapping", "floor_scale",
    "final_logit_softcapping", "rms_norm_eps", "layer_norm_epsilon", "softmax_scale", "clip_qkv", "factor",
    "low_freq_factor", "high_freq_factor", "attn_scale", "llama_4_scaling_beta",
    "logits_scaling", "attention_multiplier", "embedding_multiplier", "residual_multiplier", "routed_scaling_factor",
    "moe_norm_min", "router_jitter_noise", "alpha", "layer_norm_eps", "norm_epsilon", "norm_eps", "logit_scale",
    "rotary_emb_base", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
}  # fmt: skip
FLAGS = {"attention_bias", "mlp_bias", "use_sliding_window", "truncate", "alibi", "tie_word_embeddings"}
MAY_BE_ZERO = {"eos_token_id", "bos_token_id", "pad_token_id", "max_window_layers", "first_k_dense_replace"}
MAY_BE_ZERO |= {"moe_num_shared_experts", "moe_layer_start_index", "moe_layer_end_index", "zero_expert_num"}
MAY_BE_ZERO |= {"num_kv_shared_layers", "altup_active_idx", "router_jitter_noise"}


def allowed(key: str, kind: str, good: object = None) -> bool:
    """True for unusual values that are valid. good: the usual value."""
    signed = key in ("attn_scale", "llama_4_scaling_beta")
    is_zero = type(good) is int and good == 0
    return (
        (key in NUMBERS and kind == "fraction")
        or (signed and kind in ("negative", "zero"))
        or ((key in FLAGS or isinstance(good, bool)) and kind == "a bool")
        or ((key in MAY_BE_ZERO or key.startswith("mscale") or is_zero) and kind == "zero")
    )


def parts(values: dict):
    """(path, key) of every value, including those of nested objects."""
    for key, value in values.items():
        yield (), key
        if isinstance(value, dict):
            yield from (((key,), inner) for inner in value)


def changed(values: dict, path: tuple[str, ...], key: str, value) -> dict:
    return values | ({path[0]: values[path[0]] | {key: value}} if path else {key: value})


def refused(values: dict) -> str:
    """The error message of a config; '' if it is accepted."""
    try:
        models.config_of(values)
    except (ValueError, UnsupportedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", examples.ALL)
def test_a_bad_value_is_named_in_one_sentence(name):
    values = FAMILIES[examples.ALL[name]["model_type"]].defaults | examples.ALL[name]
    assert not refused(values)
    for path, key in parts(values):
        for kind, bad in BAD.items():
            said = refused(changed(values, path, key, bad))
            assert bool(said) != allowed(key, kind, values.get(key)), (key, kind, said)
            assert not said or (key in said and "config.json" in said and "\n" not in said), (key, kind, said)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mixtral", dict(num_experts_per_tok=5), "num_experts_per_tok=5 must be at most num_local_experts=4"),
        ("llama", dict(num_key_value_heads=3), "num_key_value_heads=3 must divide num_attention_heads=4"),
        ("llama", dict(hidden_size=33), "hidden_size=33 must be a multiple of the 4 heads"),
        ("llama", dict(head_dim=7), "the number of rotated dimensions, 7 of head_dim=7, must be even"),
        ("phi3, longrope", dict(head_dim=12), "short_factor and long_factor have 4 and 4 divisors; they must have 6"),
        ("llama", dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be an integer from 1 to 10000"),
        ("llama4_text", dict(no_rope_layers=[1]), "no_rope_layers=.1. must have one number for each of the 2 layers"),
        ("llama4_text", dict(moe_layers=[5]), "moe_layers=.5. must be a list of integers from 0 to 1"),
        ("llama4_text", dict(attention_chunk_size=None), "attention_chunk_size=None must be a number"),
        ("gemma2", dict(layer_types=["full_attention"]), "layer_types=.* must be a list of 2 .one per layer."),
        ("phimoe", dict(rope_scaling=options.LINEAR), "rope_scaling=.* is not supported"),
        ("falcon", dict(alibi=True), "alibi=True is not supported"),
        ("falcon", dict(num_ln_in_parallel_attn=2), "num_ln_in_parallel_attn=2 must be 1, or 2 with"),
        ("gpt_neox", dict(num_key_value_heads=2), "num_key_value_heads=2 is not supported; it must be 4"),
        ("gptj", dict(rotary_dim=5), "rotary_dim=5 must be an even number up to the head size, 8"),
        ("opt", dict(word_embed_proj_dim=16), "word_embed_proj_dim=16 is not supported; it must be 32"),
        ("gpt_neo", dict(attention_types=[[["global"], 3]]), "attention_types=.* 'local' to each of the 2 layers"),
        ("gemma3n_text", dict(altup_active_idx=3), "altup_active_idx=3 must be an integer from 0 to 1"),
        ("gemma3_text", dict(use_bidirectional_attention=True, is_causal=False), "is_causal=False is not supported"),
        ("gemma2", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True is not supported"),
        ("albert", dict(num_hidden_groups=2), "num_hidden_groups=2 is not supported; it must be 1"),
        ("albert", dict(num_hidden_layers=129), "num_hidden_layers=129 must be an integer from 1 to 128"),
        ("albert", dict(inner_group_num=2), "inner_group_num=2 is not supported; it must be 1"),
        ("ernie", dict(use_task_id=1), "use_task_id=1 must be true or false"),
        ("phimoe", dict(num_experts_per_tok=1), "num_experts_per_tok=1 is not supported; it must be 2"),
        ("phimoe", dict(router_jitter_noise=-0.5), "router_jitter_noise=-0.5 must be a number from 0 to 1e.18"),
        ("qwen3", dict(rms_norm_eps=0.0), "rms_norm_eps=0.0 must be a finite number above 0 up to 1e.18, with an abs"),
        ("glm4", dict(partial_rotary_factor=0.6), "7 of head_dim=12 with partial_rotary_factor=0.6, must be even"),
        ("gpt2", dict(quantization_config=dict(quant_method="gptq", bits=4)), "quantization_config=.* is not supp"),
        ("gemma4_text", dict(global_head_dim=7), "global_head_dim=7 must be even"),
        ("bloom", dict(pretraining_tp=4, slow_but_exact=True), "slow_but_exact=True is not supported"),
        ("dots1", dict(n_group=3), "n_group=3 must divide the 8 experts into groups"),
        ("qwen3_moe", dict(num_local_experts=9), "num_local_experts=9 is another name of num_experts"),
        (
            "gemma4_text",
            dict(rope_parameters=dict(full_attention=dict(rope_type="default"))),
            "rope_parameters=.* has no 'sliding_attention'",
        ),
        ("minimax_m2", dict(attn_type_list=[1, 0]), "attn_type_list=.* has layers of linear attention"),
        ("llama", dict(rope_scaling=dict(rope_type="linear")), "no 'factor'"),
        ("llama", dict(rope_scaling=dict(rope_type="yarn")), "no 'factor'"),
        ("llama", dict(model_type=["llama"]), "model_type=.'llama'. is not supported"),
    ],
)
def test_values_that_do_not_fit_one_another_are_named(family, changes, words):
    with pytest.raises((ValueError, UnsupportedError), match=rf"config\.json.*{words}"):
        models.config_of(examples.ALL[family] | changes)


SCALED = {
    "linear": ("llama, linear", ["factor"]),
    "dynamic": ("llama, dynamic", ["factor"]),
    "llama3": ("llama, llama3", ["factor", "low_freq_factor", "high_freq_factor"]),
    "yarn": ("llama, yarn", ["factor", "attention_factor", "beta_fast", "beta_slow"]),
    "longrope": ("phi3, longrope", ["factor", "attention_factor"]),
}


@pytest.mark.parametrize("kind", SCALED)
def test_numbers_of_which_no_frequency_can_be_made_are_refused_when_the_config_is_read(kind):
    """Otherwise the first request would stop the engine, or be computed from infinite frequencies."""
    family, keys = SCALED[kind]
    values = examples.ALL[family]
    for bad in (1e30, 1e-30, 1e-320, 5e-324, 1.7e308, 0, -1.0):
        for key in keys:
            said = refused(changed(values, ("rope_scaling",), key, bad))
            assert "config.json" in said and f"{key}=" in said and "\n" not in said, (key, bad, said)
        assert "rope_theta=" in refused(values | dict(rope_theta=bad))
    for key in ("short_factor", "long_factor") if kind == "longrope" else ():
        assert key in refused(changed(values, ("rope_scaling",), key, [1.0, 1e-30, 1.0, 1.0]))


@pytest.mark.parametrize(
    ("family", "key", "bad"),
    [
        ("llama", "rms_norm_eps", 1e-320),
        ("llama", "rms_norm_eps", 1e300),
        ("bloom", "layer_norm_epsilon", 1e300),
        ("gemma2", "attn_logit_softcapping", 1e-320),
        ("gemma2", "final_logit_softcapping", 1e300),
        ("gemma2", "query_pre_attn_scalar", 1e-320),
        ("gemma3_text", "rope_local_base_freq", 1e300),
        ("phi3, longrope", "partial_rotary_factor", 1e-320),
        ("llama4_text", "attn_scale", 1e300),
    ],
)
def test_numbers_that_float32_cannot_hold_are_refused_when_the_config_is_read(family, key, bad):
    said = refused(examples.ALL[family] | {key: bad})
    assert "config.json" in said and f"{key}=" in said and "\n" not in said, said


def test_yarn_refuses_what_would_make_its_magnitude_nothing_and_lengths_too_far_apart():
    yarn = dict(examples.YARN, mscale=1.0, mscale_all_dim=-7.2134752)
    assert "mscale_all_dim=" in refused(examples.of("llama", rope_scaling=yarn))
    apart = dict(rope_type="yarn", original_max_position_embeddings=2**31 - 1)
    assert "original_max_position_embeddings=2147483647" in refused(examples.of("llama", rope_scaling=apart))


def config(family: str, **changes):
    """A config of only the required keys, with changes."""
    asked = {k: v for k, v in examples.COMMON.items() if k not in ("rope_theta", "eos_token_id", "num_key_value_heads")}
    more = examples.EXPERTS if family in ("mixtral", "gpt_oss", "llama4_text") else {}
    more = more | (dict(intermediate_size_mlp=40) if family == "llama4_text" else {})
    return models.config_of(asked | more | dict(model_type=family, num_attention_heads=32, hidden_size=64) | changes)


def test_absent_keys_mean_what_they_mean_to_transformers():
    """Its defaults, written out here; tests/models/test_absent_keys.py compares with transformers, key by key."""
    gemma = config("gemma2")
    assert gemma.logits_soft_cap == 30 and gemma.layers[0].attention.logits_soft_cap == 50
    null = config("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert null.logits_soft_cap is None and null.layers[0].attention.logits_soft_cap is None
    for family in ("mistral", "gemma2", "gemma3_text"):
        assert config(family).layers[0].attention.window == (4095, 0)
        assert config(family, sliding_window=None).layers[0].attention.window == (-1, -1)
    for family in ("llama", "phi3", "mixtral", "qwen2", "qwen3"):
        assert config(family).layers[0].attention.window == (-1, -1)
    thetas = dict(llama=1e4, mistral=1e4, qwen2=1e4, qwen3=1e4, gemma2=1e4, phi3=1e4, mixtral=1e6, gpt_oss=1.5e5,
                  llama4_text=5e5)  # fmt: skip
    assert {family: config(family).layers[0].rope.theta for family in thetas} == thetas
    local, far = (config("gemma3_text", num_hidden_layers=6).layers[i].rope.theta for i in (0, 5))
    assert (local, far) == (1e4, 1e6)
    oss = config("gpt_oss").layers[0]
    assert oss.rope.scaling == YarnRopeScaling(factor=32.0, trained_length=4096, truncate=False)
    assert oss.self_attn.qkv_bias and oss.attention.window == (127, 0) and oss.attention.head_dim == 64
    ends = dict(llama=2, mistral=2, mixtral=2, llama4_text=2, gemma2=1, gemma3_text=1, phi3=32000)
    assert {family: config(family).eos_token_ids for family in ends} == {f: (end,) for f, end in ends.items()}
    assert config("qwen2").eos_token_ids == config("llama", eos_token_id=None).eos_token_ids == ()
    assert config("phi3", rope_scaling=examples.LONGROPE | dict(short_factor=[1.0], long_factor=[2.0])).layers[
        0
    ].rope.scaling.trained_length == 4096  # fmt: skip


def test_ends_of_a_folder_are_the_familys_own_only_where_it_names_none(tmp_path):
    import json

    values = {k: v for k, v in examples.DECODERS["llama"].items() if k != "eos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").write_text("{}")
    assert models.load_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[5, 7])))
    assert models.load_config(tmp_path).eos_token_ids == (5, 7)


def test_llama4_takes_the_keys_that_transformers_always_writes():
    plain = config("llama4_text", layer_types=["full_attention"] * 2, attn_temperature_tuning=False, floor_scale=8192,
                   attn_scale=0.1, attention_chunk_size=8192, no_rope_layers=[1, 0])  # fmt: skip
    assert [layer.attention.chunk_size for layer in plain.layers] == [None, None]
    assert plain.layers[1].self_attn.temperature_tuning is None and plain.layers[1].rope is None


def test_dynamic_ntk_makes_room_for_the_requests_it_is_there_for():
    values = examples.DECODERS["llama, dynamic"]
    assert models.config_of(values).max_positions == 3 * values["max_position_embeddings"]
    assert models.config_of(examples.DECODERS["llama, linear"]).max_positions == 64
