"""The logits of every family are those of transformers, in prefill, in chunks, in ragged batches and in decoding."""

import numpy as np
import pytest

from jattn import models
from tests.models.serving import Server
from tests.models.witness import Example, logits

pytest.importorskip("transformers", reason="the witness needs the extra 'parity': pip install -e '.[parity]'")

LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=4.0,
    truncate=False,
)  # fmt: skip
LONGROPE = dict(
    rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.5,
    short_factor=[1.0, 1.1], long_factor=[1.5, 2.5], original_max_position_embeddings=8,
)  # fmt: skip
GLOBAL_AND_LOCAL = dict(
    full_attention=dict(rope_type="linear", factor=2.0, rope_theta=50000.0),
    sliding_attention=dict(rope_type="default", rope_theta=100.0),
)
KINDS = ["sliding_attention", "full_attention"]
EXPERTS = dict(num_local_experts=3, num_experts_per_tok=2)
EXAMPLES = {
    "llama": Example("llama", dict(head_dim=12, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3)),
    "mistral": Example("mistral", dict(head_dim=16, num_attention_heads=3, num_key_value_heads=1, sliding_window=5)),
    "qwen2": Example(
        "qwen2", dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "qwen3": Example("qwen3", dict(head_dim=10)),
    "olmo2": Example("olmo2", dict(attention_bias=True)),
    "gemma2": Example(
        "gemma2",
        dict(head_dim=12, sliding_window=5, query_pre_attn_scalar=7, attn_logit_softcapping=2.0,
             final_logit_softcapping=3.0, initializer_range=0.1, layer_types=KINDS),
    ),
    "gemma3_text": Example(
        "gemma3_text",
        dict(head_dim=12, sliding_window=5, query_pre_attn_scalar=7, initializer_range=0.1, layer_types=KINDS,
             rope_parameters=GLOBAL_AND_LOCAL),
    ),
    "phi3": Example("phi3", dict(rope_parameters=LONGROPE, sliding_window=9, original_max_position_embeddings=8)),
    "mixtral": Example("mixtral", EXPERTS),
    "gpt_oss": Example(
        "gpt_oss", EXPERTS | dict(head_dim=10, sliding_window=5, layer_types=KINDS, rope_parameters=YARN)
    ),
    "bloom": Example(
        "bloom", dict(vocab_size=61, hidden_size=36, n_head=6, n_layer=2, initializer_range=0.3), common=False
    ),
    "mpt": Example(
        "mpt",
        dict(vocab_size=61, d_model=36, n_heads=3, n_layers=2, initializer_range=0.3, max_seq_len=64,
             attn_config=dict(clip_qkv=1.0, softmax_scale=0.2)),
        common=False,
    ),
    "llama4_text": Example(
        "llama4_text",
        EXPERTS | dict(head_dim=10, intermediate_size_mlp=40, interleave_moe_layer_step=2, no_rope_layers=[1, 0],
                       attention_chunk_size=8, floor_scale=4, attn_scale=0.5),
    ),
}  # fmt: skip
LONG, SHORT = 21, 13
SCHEDULES = {
    "prefill": [(LONG, 0), (0, SHORT)],
    "chunked and ragged": [(12, 10), (9, 3)],
    "decode": [(11, 9), *[(1, 1)] * 4, *[(1, 0)] * 6],
}


@pytest.fixture(scope="module", params=EXAMPLES)
def served(request, tmp_path_factory):
    """(config, params, prompts, transformers' logits) of a model that transformers saved and jattn loaded."""
    return prepared(request.param, tmp_path_factory.mktemp(request.param))


def prepared(name: str, folder):
    theirs = EXAMPLES[name].save(folder)
    config, params = models.load(folder)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, config.vocab_size, n) for n in (LONG, SHORT)]
    return config, params, prompts, [logits(theirs, p) for p in prompts]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_agree(served, schedule):
    config, params, prompts, wanted = served
    for mine, theirs in zip(Server(config, params).run(prompts, SCHEDULES[schedule]), wanted, strict=True):
        agree(mine, theirs)


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_the_backend_that_is_chosen_here_agrees_too(name, tmp_path):
    config, params, prompts, wanted = prepared(name, tmp_path)
    for mine, theirs in zip(Server(config, params, "auto").run(prompts, SCHEDULES["decode"]), wanted, strict=True):
        agree(mine, theirs)


def agree(mine: np.ndarray, theirs: np.ndarray) -> None:
    """Asserts equality up to 1e-4 of the logits' standard deviation."""
    worst, spread = np.abs(mine - theirs).max(), theirs.std()
    assert worst <= 1e-4 * spread, f"off by {worst / spread:.2e} of the spread {spread:.3f}"
