"""OLMo 2 and 3, and EXAONE 4: norms after the sublayers only, and norms of q and k."""

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    LLAMA_NAMES,
    MAX_LAYERS,
    UNUSED,
    attention_biases,
    heads_of,
    no_windows,
    rms_norm,
    rope_decoder,
    windows_by_type,
)
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import rope_of, rope_of_layer_type, theta_of
from jattn.models.tensor_names import named_tensors


def olmo2(c: ConfigReader) -> ModelConfig:
    """Norms of q and k over all heads together."""
    norm = rms_norm(c)
    norms = ResidualNorms(after=norm)
    return rope_decoder(c, windows=no_windows, norms=norms, qk_norm=norm, qk_norm_all_heads=True, **attention_biases(c))


def olmo3(c: ConfigReader) -> ModelConfig:
    """OLMo 2 with windows in three of four layers, which have a rotary embedding of their own."""
    norm, size, longest = rms_norm(c), heads_of(c)["head_dim"], c.count("max_position_embeddings")
    own = ConfigReader(c.given, c.where).section("rope_parameters").given  # per layer type
    theta = theta_of(c, "rope_theta", THETA)
    global_rope = rope_of_layer_type(c, "full_attention", theta, size, longest, c.section("rope_scaling").given)
    # transformers gives rope_theta to the global layers alone, unless these have their own.
    has_own = (own.get("full_attention") or {}).get("rope_theta") is not None
    local_rope = rope_of_layer_type(c, "sliding_attention", theta if has_own else THETA, size, longest)
    return rope_decoder(
        c,
        windows=lambda c, count: windows_by_type(c, count, [(index + 1) % 4 != 0 for index in range(count)]),
        norms=ResidualNorms(after=norm),
        ropes=lambda index, window: global_rope if window is None else local_rope,
        qk_norm=norm,
        qk_norm_all_heads=True,
        **attention_biases(c),
    )


def exaone4(c: ConfigReader) -> ModelConfig:
    """Norms of q and k per head; if some layers have a window, the others have no positions."""
    count, norm = c.count("num_hidden_layers", high=MAX_LAYERS), rms_norm(c)
    has_window = c.count("sliding_window", None) is not None
    if c.get("layer_types") is None:
        every = c.count("sliding_window_pattern", 4) if has_window else 1
    else:
        c.ignore("sliding_window_pattern")
        every = 1
    windows = windows_by_type(c, count, [(index + 1) % every != 0 for index in range(count)])
    rope = rope_of(c, heads_of(c)["head_dim"], c.count("max_position_embeddings"))
    return rope_decoder(
        c,
        windows=lambda c, count: windows,
        norms=ResidualNorms(after=norm),
        ropes=lambda index, window: rope if window is not None or not has_window else None,
        qk_norm=norm,
    )


THETA = 500000.0
NAMES = LLAMA_NAMES | {"attn_norm_after": "post_attention_layernorm", "mlp_norm_after": "post_feedforward_layernorm"}
OLMO_DEFAULTS = dict(eos_token_id=50279, pad_token_id=1)
OLMO2 = Family(olmo2, named_tensors(NAMES), UNUSED, defaults=OLMO_DEFAULTS | dict(rope_theta=10000.0))
OLMO3 = Family(olmo3, named_tensors(NAMES), UNUSED, defaults=OLMO_DEFAULTS | dict(sliding_window=4096))
EXAONE4 = Family(
    exaone4,
    named_tensors(NAMES),
    UNUSED,
    defaults=dict(
        num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4, rope_theta=10000.0, bos_token_id=0,
        eos_token_id=2,
    ),
)  # fmt: skip
