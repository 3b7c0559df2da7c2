"""Gemma 3n and 4 (text): per-layer embeddings, last layers that share keys; AltUp, or experts beside the MLP."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.errors import UnsupportedError
from jattn.models.altup import AltUp, Laurel
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import MAX_COUNT, ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    LLAMA_NAMES,
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    UNUSED,
    attention_biases,
    heads_of,
    model_config,
    rms_norm,
)
from jattn.models.layer_inputs import LayerInput, LayerInputs
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import LAYER_TYPES, rope_of_layer_type, theta_of
from jattn.models.side_experts import SideExperts
from jattn.models.tensor_names import named_tensors
from jattn.nn import AttentionConfig, Norm, ProportionalRopeScaling, Rope
from jattn.nn.rope_scaling import FACTORS
from jattn.spec import AttentionSpec

SLIDING, FULL = LAYER_TYPES[1], LAYER_TYPES[0]
MAX_STREAMS = 64


def gemma3n(c: ConfigReader) -> ModelConfig:
    """AltUp and Laurel in every layer; the gates of some layers are sparse."""
    c.ignore("altup_coef_clip", "altup_lr_multiplier")  # training
    c.ignore("query_pre_attn_scalar")  # the attention logits are not scaled
    count, heads, hidden = layers_of(c), heads_of(c), c.count("hidden_size")
    norm, longest = rms_norm(c), c.count("max_position_embeddings")
    kinds = c.choices("layer_types", (FULL, SLIDING), count)
    kinds = kinds or [SLIDING if (i + 1) % 5 else FULL for i in range(count)]
    theta, local = theta_of(c, "rope_theta", 1e6), theta_of(c, "rope_local_base_freq", 1e4)
    old = c.section("rope_scaling").given
    ropes = {
        FULL: rope_of_layer_type(c, FULL, theta, heads["head_dim"], longest, old),
        SLIDING: rope_of_layer_type(c, SLIDING, local, heads["head_dim"], longest),
    }
    streams = c.count("altup_num_inputs", high=MAX_STREAMS)
    altup = AltUp(
        streams=streams,
        active=c.count("altup_active_idx", 0, low=0, high=streams - 1),
        norm=norm,
        scales_active=c.flag("altup_correct_scale", True),
    )
    laurel = Laurel(rank=c.count("laurel_rank"), norm=norm)
    widths, sparsities = widths_of(c, count), sparsities_of(c, count)

    def layer(index: int, kv_from: int | None) -> LayerConfig:
        spec = AttentionSpec(**heads, scale=1.0, sliding_window=window_of(c, kinds[index]))
        mlp = MLP(width=widths[index], activation=activation_of(c), sparsity=sparsities[index])
        return LayerConfig(
            self_attn=attention_of(c, spec, ropes[kinds[index]], norm, kv_from),
            mlp=mlp,
            altup=altup,
            laurel=laurel,
            **layer_options(c, norm, kv_from, c.count("hidden_size_per_layer_input")),
        )

    layers = [layer(index, kv_from) for index, kv_from in enumerate(sources_of(c, kinds))]
    return with_layer_inputs(c, layers, norm, hidden, altup=altup)


def gemma4(c: ConfigReader) -> ModelConfig:
    """Global layers have heads of their own size, and perhaps no projection of v; experts may run beside the MLP."""
    c.only("use_bidirectional_attention", "vision")  # between tokens of an image
    count, heads, hidden = layers_of(c), heads_of(c), c.count("hidden_size")
    norm = rms_norm(c)
    kinds = c.choices("layer_types", (FULL, SLIDING), count)
    kinds = kinds or [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    kinds[-1] = FULL  # as transformers does
    k_is_v = c.flag("attention_k_eq_v", False)
    wide = wide_heads(c, heads, kinds, k_is_v)
    of_kind, ropes = {FULL: wide, SLIDING: heads}, gemma4_ropes(c, kinds, wide["head_dim"], heads["head_dim"])
    width, double = c.count("intermediate_size"), c.flag("use_double_wide_mlp", False)
    experts = experts_of(c, norm) if c.flag("enable_moe_block", False) else None
    if experts is None:
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            c.count(key, None)  # not used, but a wrong value is a mistake of its writer
    inputs_width = c.count("hidden_size_per_layer_input", 0, low=0)

    def layer(index: int, kv_from: int | None) -> LayerConfig:
        kind = kinds[index]
        spec = AttentionSpec(**of_kind[kind], scale=1.0, sliding_window=window_of(c, kind))
        has_k_as_v = k_is_v and kind == FULL and kv_from is None
        wide_mlp = double and kv_from is not None
        return LayerConfig(
            self_attn=attention_of(c, spec, ropes[kind], norm, kv_from, k_is_v=has_k_as_v),
            mlp=MLP(width=width * (1 + wide_mlp), activation=activation_of(c)),
            experts=experts,
            output_scale=True,
            **layer_options(c, norm, kv_from, inputs_width),
        )

    layers = [layer(index, kv_from) for index, kv_from in enumerate(sources_of(c, kinds))]
    return with_layer_inputs(c, layers, norm, hidden)


def wide_heads(c: ConfigReader, heads: dict[str, Any], kinds: Sequence[str], k_is_v: bool) -> dict[str, Any]:
    """`heads_of` for the global layers of Gemma 4. transformers writes per_layer_config in place of the two keys."""
    size, kv_heads = c.count("global_head_dim", 512, high=MAX_HEADS), c.count("num_global_key_value_heads", None)
    sizes = dict(head_dim=size) | (dict(num_kv_heads=kv_heads) if k_is_v and kv_heads is not None else {})
    by_layer = c.section("per_layer_config")
    if "per_layer_config" in c.given:  # even an empty one: then all layers have the same heads
        # Files have "5", or "05" beside "11".
        names = {str(i): tuple(str(i).zfill(n) for n in range(1, len(str(len(kinds))) + 1)) for i in range(len(kinds))}
        by_layer = ConfigReader(by_layer.given, by_layer.where, aliases=names)
        found = [overrides_of(by_layer.section(str(index))) for index in range(len(kinds))]
        by_layer.refuse_unread()
        sizes = found[kinds.index(FULL)]
        if any(some != (sizes if kind == FULL else {}) for some, kind in zip(found, kinds, strict=True)):
            raise UnsupportedError(f"{by_layer.where}: it must give the global layers equal values, and no other layer")
    wide = heads | sizes
    if heads["num_heads"] % wide["num_kv_heads"]:
        c.refuse("num_global_key_value_heads", f"must divide num_attention_heads={heads['num_heads']}")
    return wide


def overrides_of(layer: ConfigReader) -> dict[str, int]:
    """The sizes that per_layer_config gives a layer."""
    sizes = dict(
        head_dim=layer.count("head_dim", None, high=MAX_HEADS), num_kv_heads=layer.count("num_key_value_heads", None)
    )
    layer.refuse_unread()
    return {name: size for name, size in sizes.items() if size is not None}


def layers_of(c: ConfigReader) -> int:
    """The number of layers."""
    return c.count("num_hidden_layers", high=MAX_LAYERS)


def activation_of(c: ConfigReader) -> str:
    """The activation of MLPs and of per-layer embeddings."""
    c.ignore("hidden_act")  # transformers uses hidden_activation
    return c.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")


def window_of(c: ConfigReader, kind: str) -> int | None:
    """The window of a layer of this type."""
    window = c.count("sliding_window")
    return window if kind == SLIDING else None


def attention_of(
    c: ConfigReader, spec: AttentionSpec, rope: Rope, norm: Norm, kv_from: int | None, **options: Any
) -> AttentionConfig:
    """Norms of q, k and v, per head; that of v has no scale."""
    shares = kv_from is not None
    v_norm = None if shares else Norm(eps=norm.eps, has_scale=False)
    return AttentionConfig(
        spec=spec, hidden_size=c.count("hidden_size"), rope=rope, qk_norm=norm, v_norm=v_norm, shares_kv=shares,
        **attention_biases(c), **options,
    )  # fmt: skip


def layer_options(c: ConfigReader, norm: Norm, kv_from: int | None, width: int) -> dict[str, Any]:
    """The fields of LayerConfig that both families set alike. width: of per-layer embeddings; 0: there are none."""
    norms = ResidualNorms(before=norm, after=norm)
    layer_input = LayerInput(width=width, activation=activation_of(c), norm=norm) if width else None
    return dict(attn_norms=norms, mlp_norms=norms, kv_from=kv_from, layer_input=layer_input)


def sources_of(c: ConfigReader, kinds: Sequence[str]) -> list[int | None]:
    """For each layer the one whose cache it reads: the last of its type before the layers that share; None: its own."""
    own = len(kinds) - c.count("num_kv_shared_layers", 0, low=0)
    if own < 1 or not set(kinds[own:]) <= set(kinds[:own]):
        kinds_text = ", ".join(kinds[:8]) + (", ..." if len(kinds) > 8 else "")
        c.refuse("num_kv_shared_layers", f"must leave layers of each type before them; layer_types: {kinds_text}")
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    return [None] * own + [last[kind] for kind in kinds[own:]]


def with_layer_inputs(c: ConfigReader, layers: list[LayerConfig], norm: Norm, hidden: int, **model: Any) -> ModelConfig:
    """The ModelConfig, with per-layer embeddings if the layers read them."""
    vocab, cap = c.count("vocab_size_per_layer_input", None), c.number("final_logit_softcapping", None, above=0)
    width = 0 if layers[0].layer_input is None else layers[0].layer_input.width
    inputs = LayerInputs(vocab_size=vocab or c.count("vocab_size"), width=width, norm=norm) if width else None
    return model_config(
        c, layers, norm, tied=True, embedding_scale=hidden**0.5, logits_soft_cap=cap, layer_inputs=inputs, **model
    )


def widths_of(c: ConfigReader, count: int) -> list[int]:
    """The width of each layer's MLP: intermediate_size is one number, or a list."""
    if not isinstance(c.get("intermediate_size"), list | tuple):
        return [c.count("intermediate_size")] * count
    widths = c.counts("intermediate_size", MAX_COUNT) or []
    if len(widths) != count or 0 in widths:
        c.refuse("intermediate_size", f"must be a positive number, or a list of {count}")
    return widths


def sparsities_of(c: ConfigReader, count: int) -> list[float]:
    """activation_sparsity_pattern: a number for each layer; without it 0.95 in the first 10 of more than 10 layers."""
    if c.get("activation_sparsity_pattern") is None:
        return [0.95 if count > 10 and index < 10 else 0.0 for index in range(count)]
    found = list(c.numbers_within("activation_sparsity_pattern", (0.0, 1 - 1e-6)))
    if len(found) != count:
        c.refuse("activation_sparsity_pattern", f"must have {count} numbers, one for each layer")
    return found


def gemma4_ropes(c: ConfigReader, kinds: Sequence[str], wide: int, narrow: int) -> dict[str, Rope]:
    """The rotation of layers of each type; rope_parameters has an object for each type in `kinds`."""
    c.only("rope_scaling")
    stored = c.section("rope_parameters").given or GEMMA4_ROPE
    if unknown := sorted(set(stored) - {FULL, SLIDING}):
        raise UnsupportedError(f"{c.where}: rope_parameters has {unknown[0]!r}; it has {FULL} and {SLIDING} here")
    if missing := sorted(set(kinds) - set(stored)):
        c.refuse("rope_parameters", f"has no {missing[0]!r}, which is the type of some layers: add its object")
    section = ConfigReader(stored, f"{c.where}, rope_parameters")
    return {
        kind: gemma4_rope(c, section, kind, dim) for kind, dim in ((FULL, wide), (SLIDING, narrow)) if kind in stored
    }


def gemma4_rope(c: ConfigReader, section: ConfigReader, kind: str, dim: int) -> Rope:
    """'proportional' rotates the first partial_rotary_factor of the pairs, with the frequencies of the whole head."""
    if dim % 2:
        c.refuse("global_head_dim" if kind == FULL else "head_dim", "must be even: dimensions are rotated in pairs")
    r = section.section(kind, GEMMA4_ROPE[kind] if kind == SLIDING else None)
    if r.get("rope_type") != "proportional":
        default = GEMMA4_ROPE[kind]["rope_theta"]
        values = ConfigReader(dict(rope_parameters={kind: r.given}), c.where)
        return rope_of_layer_type(values, kind, default, dim, c.count("max_position_embeddings"))
    r.ignore("rope_type")
    fraction = r.number("partial_rotary_factor", 1.0, above=0, most=1)
    scaling = ProportionalRopeScaling(rotated=int(fraction * dim // 2), factor=r.number_within("factor", FACTORS, 1.0))
    theta = theta_of(r, "rope_theta", GEMMA4_ROPE[kind]["rope_theta"])
    r.refuse_unread()
    return Rope(dim=dim, theta=theta, scaling=scaling)


def experts_of(c: ConfigReader, norm: Norm) -> SideExperts:
    """Softmax over all experts, the chosen scores divided by their sum, then times a weight of each expert."""
    count, top_k = c.count("num_experts", high=MAX_EXPERTS), c.count("top_k_experts")
    if top_k > count:
        c.refuse("top_k_experts", f"must be at most num_experts={count}")
    moe = MoE(
        num_experts=count, top_k=top_k, width=c.count("moe_intermediate_size"), activation=activation_of(c),
        router_norm=norm, expert_scale=True,
    )  # fmt: skip
    return SideExperts(moe=moe, before=norm, after=norm, mlp_after=norm)


NAMES: dict[str, Any] = LLAMA_NAMES | {
    "attn_norm_after": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_norm_after": "post_feedforward_layernorm",
    "layer_input.gate": "per_layer_input_gate",
    "layer_input.down": "per_layer_projection",
    "layer_input.norm": "post_per_layer_input_norm",
    "layer_inputs.embed": "model.embed_tokens_per_layer.weight",
    "layer_inputs.projection": "model.per_layer_model_projection",
    "layer_inputs.norm": "model.per_layer_projection_norm",
}
GEMMA3N_NAMES = NAMES | {
    **{f"altup.{ours}": f"altup.{theirs}" for ours, theirs in dict(
        router="modality_router", norm="router_norm", prediction="prediction_coefs", correction="correction_coefs",
    ).items()},
    "altup.active_scale": "altup.correct_output_scale",
    **{f"laurel.{n}": f"laurel.linear_{n}" for n in ("left", "right")},
    "laurel.norm": "laurel.post_laurel_norm",
}  # fmt: skip


def stacked(*matrices: np.ndarray) -> np.ndarray:
    """Matrices [out, in] as one array [n, in, out]."""
    return np.stack([matrix.T for matrix in matrices])


def gemma3n_tensors(config: ModelConfig) -> dict:
    """As in Gemma 3, with the weights of AltUp, Laurel and per-layer embeddings."""
    assert config.altup is not None
    others = range(config.altup.streams - 1)
    rows = dict(into="altup_projections", out="altup_unembed_projections")
    names = {
        f"altup.{ours}": (tuple(f"model.{theirs}.{n}.weight" for n in others), stacked) for ours, theirs in rows.items()
    }
    return named_tensors(GEMMA3N_NAMES | names)(config)


def gemma4_expert_rows(layer: LayerConfig) -> dict[str, Any]:
    """All experts in one tensor: gate and up [E, 2 * width, hidden], down [E, hidden, width].

    The router's input is normalised, and then times scale / sqrt(hidden): here the scale of its norm.
    """
    part = lambda index: lambda x: np.split(x, 2, axis=1)[index].swapaxes(1, 2)
    return {
        "experts.gate.kernel": ("experts.gate_up_proj", part(0)),
        "experts.up.kernel": ("experts.gate_up_proj", part(1)),
        "experts.down.kernel": ("experts.down_proj", lambda x: x.swapaxes(1, 2)),
        "experts.router.norm.scale": (
            "router.scale",
            lambda x: (x.astype(np.float32) * len(x) ** -0.5).astype(x.dtype),
        ),
    }


GEMMA4_NAMES = NAMES | {
    "output_scale": "layer_scalar",
    "experts.router": "router.proj",
    "experts.router.expert_scale": "router.per_expert_scale",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_norm_after": "post_feedforward_layernorm_2",
    "mlp_norm_own": "post_feedforward_layernorm_1",
}
GEMMA4_ROPE: dict[str, dict[str, Any]] = {
    SLIDING: dict(rope_type="default", rope_theta=1e4),
    FULL: dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=1e6),
}


def unread_keys(config: ModelConfig) -> tuple[str, ...]:
    """Checkpoints may have the projections of k and v of layers that share those of another layer."""
    shared = (index for index, layer in enumerate(config.layers) if layer.kv_from is not None)
    parts = ("k_proj", "v_proj", "k_norm", "v_norm")
    return tuple(f"model.layers.{index}.self_attn.{name}." for index in shared for name in parts)


RENAMES = (("language_model.", "model."), ("model.language_model.", "model."))
"""transformers writes the text part alone under names of the model with vision."""
IDS = dict(pad_token_id=0, eos_token_id=1, bos_token_id=2)
GEMMA3N_TEXT = Family(
    gemma3n,
    gemma3n_tensors,
    (*UNUSED, "altup.correct_output_scale"),
    skipped=unread_keys,
    renames=RENAMES,
    defaults=IDS
    | dict(num_key_value_heads=2, head_dim=256, sliding_window=512, final_logit_softcapping=30.0, laurel_rank=64)
    | dict(vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256, altup_num_inputs=4)
    | dict(num_kv_shared_layers=15),
)
GEMMA4_TEXT = Family(
    gemma4,
    named_tensors(GEMMA4_NAMES, fused=gemma4_expert_rows),
    UNUSED,
    skipped=unread_keys,
    renames=RENAMES,
    defaults=IDS
    | dict(num_key_value_heads=4, head_dim=256, global_head_dim=512, sliding_window=512)
    | dict(vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256),
)
