"""The text part of a model with vision loads and agrees with transformers; tensors for images are skipped by name."""

import json

import numpy as np
import pytest
import safetensors.numpy

from jattn import models
from jattn.errors import UnsupportedError
from tests.models import examples, options
from tests.models.serving import Server
from tests.models.witness import logits, shake

TEXTS = {
    "gemma3": examples.DECODERS["gemma3_text"],
    "gemma3n": options.FAMILIES["gemma3n_text"].config(0),
    "gemma4": options.FAMILIES["gemma4_text"].config(0),
    "llama4": examples.DECODERS["llama4_text"],
    "mistral3": examples.DECODERS["mistral"],
    "mistral3 of ministral3": options.FAMILIES["ministral3"].config(0),
    "mistral3 of mistral4": options.FAMILIES["mistral4"].config(1),
    "kimi_k25": options.FAMILIES["kimi_k2"].config(0),
    "qwen3_vl": examples.of(
        "qwen3_vl_text", head_dim=16, rope_theta=None,
        rope_parameters=dict(rope_type="default", rope_theta=90.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
    ),
}  # fmt: skip
SMALL = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
VISION = {
    "gemma3": SMALL, "mistral3": SMALL | dict(head_dim=8),
    "llama4": SMALL | dict(vision_output_dim=16, projector_input_dim=16, projector_output_dim=16),
    "gemma3n": dict(hidden_size=16, vocab_size=8, vocab_offset=61, model_args=None),
    "gemma4": dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
                   num_key_value_heads=2, patch_size=4, position_embedding_size=16),
    "kimi_k25": dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=4,
        pos_emb_height=4, pos_emb_width=4,
    ),
    "qwen3_vl": dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32, patch_size=4,
                     num_position_embeddings=16, deepstack_visual_indexes=[0]),
}  # fmt: skip


def values_of(name: str, **outer) -> dict:
    """The config.json of a wrapper."""
    kind = name.split()[0]
    text = {key: value for key, value in TEXTS[name].items() if value is not None}
    return dict(model_type=kind, text_config=text, vision_config=VISION[kind], tie_word_embeddings=False) | outer


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_part_is_theirs_under_old_and_new_names(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")
    import copy

    import torch

    values = values_of(name)
    given = {key: value for key, value in copy.deepcopy(values).items() if key != "model_type"}
    given["text_config"] |= dict(initializer_range=0.3, pad_token_id=0)
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[values["model_type"]](**given, attn_implementation="eager")
    if name == "gemma3n":  # its part for images needs another library
        config.text_config.tie_word_embeddings = False
        theirs = transformers.AutoModelForCausalLM.from_config(config.text_config, attn_implementation="eager")
    else:
        theirs = transformers.AutoModelForImageTextToText.from_config(config)
    theirs = theirs.eval().float()
    shake(theirs)
    theirs.save_pretrained(tmp_path)
    if name == "llama4":  # without an image, the whole model of transformers 5.24 stops at `image_outputs`
        theirs = theirs.language_model
    (tmp_path / "config.json").write_text(json.dumps(values))
    prompts = [np.random.default_rng(3).integers(3, 61, n) for n in (21, 13)]
    stored = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    if name == "gemma3n":
        stored = {n.replace("model.", "model.language_model.", 1): x for n, x in stored.items()}
        stored |= {f"model.{part}.weight": np.zeros(1) for part in ("vision_tower", "audio_tower", "embed_audio")}
    for renamed in (stored, other_names(stored)):
        safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
        config, params = models.load(tmp_path)
        for mine, prompt in zip(Server(config, params).run(prompts, [(12, 10), (9, 3)]), prompts, strict=True):
            exact = logits(theirs, prompt)
            assert np.abs(mine - exact).max() <= 1e-4 * exact.std()


def other_names(stored: dict) -> dict:
    """The names that another release of transformers writes."""
    old = any(name.startswith("language_model.") for name in stored)
    pairs = [("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head.")]
    renamed = {}
    for name, value in stored.items():
        for one, other in pairs if old else [(b, a) for a, b in pairs]:
            if name.startswith(one):
                name = other + name.removeprefix(one)
                break
        renamed[name.replace(".blocks.", ".layers.")] = value
    return renamed


def test_a_wrapper_gives_its_text_the_outer_ends_and_head():
    config = models.config_of(values_of("mistral3", eos_token_id=[7, 9], tie_word_embeddings=True))
    assert config.eos_token_ids == (7, 9) and config.tied_embeddings
    sparse = dict(model_type="gemma3", text_config=dict(model_type="gemma3_text", num_hidden_layers=2))
    config = models.config_of(sparse)  # as gemma-3-4b-it leaves out most keys
    assert (config.vocab_size, config.layers[0].attention.num_heads, config.max_positions) == (262208, 8, 131072)


def test_the_head_of_llama4_is_tied_by_its_text_config_alone():
    """As in transformers, which gives the outer key no effect and writes its default there."""
    text = TEXTS["llama4"] | dict(tie_word_embeddings=True)
    assert models.config_of(values_of("llama4", text_config=text)).tied_embeddings
    assert not models.config_of(values_of("llama4", tie_word_embeddings=True)).tied_embeddings


def test_soft_caps_of_gemma3_with_vision_are_refused():
    """The whole model of transformers leaves the cap out, its text model and other programs apply it."""
    text = TEXTS["gemma3"] | dict(final_logit_softcapping=7.0)
    with pytest.raises(UnsupportedError, match="text_config: final_logit_softcapping=7.0 is not supported"):
        models.config_of(values_of("gemma3", text_config=text))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(text_config=dict(model_type="mamba")), "text_config: model_type='mamba'"),
        (dict(mystery=1), "mystery=1"),
        (dict(text_config=TEXTS["mistral3"] | dict(mystery=1)), "text_config has keys.*mystery=1"),
    ],
)
def test_what_a_wrapper_cannot_have_is_refused(changes, words):
    with pytest.raises(UnsupportedError, match=words):
        models.config_of(values_of("mistral3") | changes)


@pytest.mark.parametrize("name", ["mamba", "jamba", "qwen3_next", "lfm2", "minimax", "kimi_linear", "granitemoehybrid"])
def test_models_with_a_state_are_refused_with_the_reason(name):
    with pytest.raises(UnsupportedError, match=f"{name}.*state-space or linear attention.*supported are llama"):
        models.config_of(dict(model_type=name))
