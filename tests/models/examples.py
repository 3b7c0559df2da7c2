"""A tiny config.json of every family and every rope scaling, written by hand, so that transformers is not needed."""

from typing import Any

import jax
import numpy as np

from jattn import models
from jattn.nn.weight_spec import is_weight_spec
from tests.models import options
from tests.models.options import COMMON, KINDS, LLAMA3, YARN

EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
TRAINED = 20
SHORT, LONG = [1.0, 1.25, 1.5, 2.0], [2.0, 3.0, 5.0, 8.0]
LONGROPE = dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG)


def of(family: str, **changes: Any) -> dict[str, Any]:
    """COMMON of this family, with changes."""
    return COMMON | dict(model_type=family) | changes


DECODERS: dict[str, dict[str, Any]] = {
    "llama": of("llama", attention_bias=True, mlp_bias=True),
    "llama, linear": of("llama", rope_scaling=dict(rope_type="linear", factor=2.0)),
    "llama, dynamic": of("llama", max_position_embeddings=TRAINED, rope_scaling=dict(rope_type="dynamic", factor=3.0)),
    "llama, yarn": of("llama", rope_scaling=YARN),
    "llama, llama3": of("llama", rope_scaling=LLAMA3),
    "mistral": of("mistral", sliding_window=5),
    "qwen2": of("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "qwen3": of("qwen3", head_dim=10),
    "olmo2": of("olmo2"),
    "gemma2": of(
        "gemma2", head_dim=12, sliding_window=5, query_pre_attn_scalar=7, attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": of(
        "gemma3_text", head_dim=12, sliding_window=5, query_pre_attn_scalar=7, layer_types=KINDS,
        rope_local_base_freq=50.0, rope_scaling=dict(rope_type="linear", factor=2.0),
    ),
    "phi3, longrope": of(
        "phi3", partial_rotary_factor=1.0, original_max_position_embeddings=TRAINED, rope_scaling=LONGROPE
    ),
    "mixtral": of("mixtral", **EXPERTS),
    "gpt_oss": of("gpt_oss", **EXPERTS, head_dim=10, sliding_window=5, rope_scaling=YARN),
    "bloom": dict(
        model_type="bloom", vocab_size=61, hidden_size=32, n_head=4, n_layer=2, layer_norm_epsilon=1e-5, eos_token_id=[]
    ),
    "mpt": dict(
        model_type="mpt", vocab_size=61, d_model=32, n_heads=4, n_layers=2, eos_token_id=[],
        attn_config=dict(alibi=True, clip_qkv=1.0, softmax_scale=0.2),
    ),
    "llama4_text": of(
        "llama4_text", **EXPERTS, head_dim=10, intermediate_size_mlp=40, interleave_moe_layer_step=2,
        no_rope_layers=[1, 0], attention_chunk_size=8, floor_scale=4, attn_scale=0.5,
    ),
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    **{row.family: row.config() for row in options.ENCODERS},
    "bart": dict(
        model_type="bart", vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=24,
        decoder_ffn_dim=24, encoder_attention_heads=2, decoder_attention_heads=4, max_position_embeddings=64,
    ),
    "t5": dict(
        model_type="t5", vocab_size=61, d_model=32, d_kv=10, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=40, feed_forward_proj="gated-gelu",
    ),
}  # fmt: skip
FURTHER = {name: row.config(0) for name, row in options.FAMILIES.items()}
"""Families whose runs tests/models/test_families.py compares; here for tests of reading configs."""
ALL = DECODERS | FURTHER | ENCODERS


def params_of(config: models.ModelConfig, seed: int = 0) -> Any:
    """Random float32 weights from numpy, without compiling. Every norm, bias and sink has an effect."""
    rng = np.random.default_rng(seed)

    def draw(weight):
        spread = 0.3 if len(weight.shape) == 1 else weight.shape[-2] ** -0.5
        return (rng.normal(size=weight.shape) * spread + (weight.fill or 0.0)).astype(np.float32)

    return jax.tree.map(draw, models.weight_specs(config), is_leaf=is_weight_spec)
