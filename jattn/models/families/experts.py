"""Families with a mixture of experts: Qwen 2 and 3, OLMoE, dots1, GLM 4.5, ERNIE 4.5, MiniMax-M2, Phi-3.5-MoE."""

import dataclasses
from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.config_reader import MAX_COUNT, MAX_MAGNITUDE, ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.llama import ERNIE_DEFAULTS, ERNIE_FIXED, first_chunk
from jattn.models.families.shared import (
    ENDS,
    EXPERT_NAMES,
    LLAMA_NAMES,
    MAX_EXPERTS,
    MAX_LAYERS,
    MIXTRAL_NAMES,
    UNUSED,
    attention_biases,
    dense_or_experts,
    experts_of,
    gated_mlp,
    heads_of,
    layer_norm,
    no_windows,
    rms_norm,
    rope_decoder,
    same_window,
    windows_by_type,
    without_windows,
)
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.rope_config import parameters_of, rope_of
from jattn.models.tensor_names import named_tensors
from jattn.nn import LongRopeScaling, Rope, RopeScaling
from jattn.nn.rope_scaling import FACTORS


def qwen_experts(c: ConfigReader, **shared: Any) -> list[MLP | MoE]:
    """Softmax over all experts; the chosen scores are divided by their sum if norm_topk_prob is true."""
    width, act = c.count("moe_intermediate_size"), c.choice("hidden_act", ACTIVATIONS, "silu")
    moe = MoE(**experts_of(c), scores=softmax_scores(c), width=width, activation=act, **shared)
    step, dense = c.count("decoder_sparse_step", 1), set(c.counts("mlp_only_layers", MAX_COUNT) or ())
    sparse = [index not in dense and (index + 1) % step == 0 for index in range(layers_of(c))]
    return dense_or_experts(c, moe, sparse)


def layers_of(c: ConfigReader) -> int:
    """The number of layers."""
    return c.count("num_hidden_layers", high=MAX_LAYERS)


def softmax_scores(c: ConfigReader) -> str:
    """MoE.scores. Softmax over all logits, divided by the sum of the chosen, is softmax over the chosen logits."""
    return "softmax" if c.flag("norm_topk_prob", False) else "softmax_over_all"


def qwen3_moe(c: ConfigReader) -> ModelConfig:
    """Norms on q and k, per head; the same window in all layers, if use_sliding_window is true."""
    c.only_these(dict(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0))  # of Qwen3 Coder
    used = c.flag("use_sliding_window", False)
    c.ignore("max_window_layers")
    window = c.count("sliding_window", None)
    return rope_decoder(
        c,
        mlp=qwen_experts(c),
        windows=lambda c, count: [window] * count if used else without_windows(c, count),
        model=first_chunk(c),
        qk_norm=rms_norm(c),
        **attention_biases(c),
    )


def qwen2_moe(c: ConfigReader) -> ModelConfig:
    """A shared expert with a gate of its own; windows in layers 0, 2, 4 and so on below max_window_layers."""
    used, below = c.flag("use_sliding_window", False), c.count("max_window_layers", low=0)
    shared = gated_mlp(c, width=c.count("shared_expert_intermediate_size"))

    def windows(c: ConfigReader, count: int) -> list[int | None]:
        if not used:
            c.count("sliding_window", None, low=0)  # 0 if transformers wrote it
            return without_windows(c, count)
        return windows_by_type(c, count, [i % 2 == 0 and i < below for i in range(count)])

    experts = qwen_experts(c, shared=shared, shared_gate=True)
    return rope_decoder(c, mlp=experts, windows=windows, qkv_bias=c.flag("qkv_bias", True))


def olmoe(c: ConfigReader) -> ModelConfig:
    """Norms of q and k over all heads, then clipping; experts in every layer."""
    act = c.choice("hidden_act", ACTIVATIONS, "silu")
    return rope_decoder(
        c,
        mlp=MoE(**experts_of(c), scores=softmax_scores(c), width=c.count("intermediate_size"), activation=act),
        windows=no_windows,
        qk_norm=rms_norm(c),
        qk_norm_all_heads=True,
        clip_qkv=c.number("clip_qkv", None, above=0),
        **attention_biases(c),
    )


def groups_of(c: ConfigReader, num_experts: int, top_k: int, group_best: int) -> dict[str, Any]:
    """The options groups, top_groups and group_best of MoE."""
    groups, top_groups = c.count("n_group", 1, high=MAX_EXPERTS), c.count("topk_group", 1)
    if num_experts % groups or (groups > 1 and num_experts < group_best * groups):
        c.refuse("n_group", f"must divide the {num_experts} experts into groups of at least {group_best}")
    if top_groups > groups or top_k > top_groups * (num_experts // groups):
        c.refuse("topk_group", f"must be at most n_group={groups}, and these groups must have enough experts")
    return dict(groups=groups, top_groups=top_groups, group_best=group_best)


def grouped_moe(c: ConfigReader, normalised: bool = False) -> MoE:
    """As in DeepSeek-V3: sigmoid scores, a correction added for the choice only, groups of experts, shared experts."""
    c.only("scoring_func", "sigmoid", "noaux_tc")
    c.only("topk_method", "noaux_tc")
    c.only("moe_layer_freq", 1)
    experts, width = experts_of(c), c.count("moe_intermediate_size")
    return MoE(
        **experts,
        **groups_of(c, **experts, group_best=2),
        width=width,
        activation=c.choice("hidden_act", ACTIVATIONS, "silu"),
        scores="sigmoid",
        correction=True,
        normalised=c.flag("norm_topk_prob", normalised),
        factor=c.number("routed_scaling_factor", 1.0, above=0),
        float32_router=True,
        shared=gated_mlp(c, width=width * c.count("n_shared_experts")),
    )


def experts_after_dense(c: ConfigReader, moe: MoE, bias: bool = False) -> list[MLP | MoE]:
    """A gated MLP in the first first_k_dense_replace layers, then the experts (DeepSeek). bias: of the gated MLP."""
    first = c.count("first_k_dense_replace", 0, low=0)
    return dense_or_experts(c, moe, [index >= first for index in range(layers_of(c))], bias)


def dots1(c: ConfigReader) -> ModelConfig:
    """Norms on q and k, per head; windows from layer max_window_layers on."""
    first = c.count("max_window_layers", low=0)
    return rope_decoder(
        c,
        mlp=experts_after_dense(c, grouped_moe(c)),
        windows=lambda c, count: windows_by_type(c, count, [index >= first for index in range(count)]),
        qk_norm=rms_norm(c),
        **attention_biases(c),
    )


def glm4_moe(c: ConfigReader) -> ModelConfig:
    """Half of a head is rotated; norms on q and k are optional."""
    c.ignore("num_nextn_predict_layers", "num_mtp_layers")  # layers for multi-token prediction are skipped
    norm = rms_norm(c) if c.flag("use_qk_norm", False) else None
    return rope_decoder(
        c,
        mlp=experts_after_dense(c, grouped_moe(c, normalised=True)),
        windows=no_windows,
        rope_options=dict(partial=True),
        qk_norm=norm,
        qkv_bias=c.flag("attention_bias", False),
        out_bias=False,
    )


def ernie4_5_moe(c: ConfigReader) -> ModelConfig:
    """Softmax scores, with a correction for the choice only; use_bias applies to all projections and the head."""
    c.only("moe_gate", "topk")
    c.only("moe_use_aux_free", True)
    c.ignore("moe_capacity", "num_nextn_predict_layers")  # see extra_layer_prefixes
    c.only_these(ERNIE_FIXED)
    bias, width, count = c.flag("use_bias", False), c.count("moe_intermediate_size"), layers_of(c)
    shared = c.count("moe_num_shared_experts", low=0)
    moe = MoE(
        **experts_of(c),
        width=width,
        activation=c.choice("hidden_act", ACTIVATIONS, "silu"),
        correction=True,
        least_sum=c.number("moe_norm_min", above=0),
        float32_router=True,
        shared=gated_mlp(c, bias, width * shared) if shared else None,
    )
    first, every = c.count("moe_layer_start_index", low=0), c.count("moe_layer_interval")
    last = c.count("moe_layer_end_index", low=-1)
    last = count - 1 if last == -1 else last
    sparse = [(index + 1) % every == 0 and first <= index <= last for index in range(count)]
    return rope_decoder(
        c,
        mlp=dense_or_experts(c, moe, sparse, bias),
        windows=no_windows,
        rope_options=dict(interleaved=True),
        qkv_bias=bias,
        out_bias=bias,
        model=dict(head_bias=bias),
    )


def minimax_m2(c: ConfigReader) -> ModelConfig:
    """Sigmoid scores; norms of q and k over all heads; rotary_dim dimensions of a head are rotated."""
    c.only_these(dict(qk_norm_type="per_layer", scoring_func="sigmoid", shared_intermediate_size=0))
    for part in ("full_attention", "linear_attention", "mlp"):
        c.only(f"layernorm_{part}_beta", 1.0, 1)
    for name in ("use_routing_bias", "use_qk_norm"):
        c.only(name, True)
    c.ignore("use_mtp", "num_mtp_modules", "mtp_transformer_layers")  # see extra_layer_prefixes
    kinds = c.counts("attn_type_list", 1)
    if kinds is not None and set(kinds) - {1}:
        c.refuse("attn_type_list", "has layers of linear attention, which are not supported")
    moe = MoE(
        **experts_of(c),
        width=c.count("intermediate_size"),
        activation=c.choice("hidden_act", ACTIVATIONS, "silu"),
        scores="sigmoid",
        correction=True,
        normalised=True,
    )
    rotated, size = c.count("rotary_dim", None), heads_of(c)["head_dim"]
    if rotated is not None and rotated > size:
        c.refuse("rotary_dim", f"must be at most head_dim={size}")
    options = dict(partial=True, fraction=None if rotated is None else rotated / size)
    return rope_decoder(
        c, mlp=moe, windows=no_windows, rope_options=options, qk_norm=rms_norm(c), qk_norm_all_heads=True
    )


def phimoe(c: ConfigReader) -> ModelConfig:
    """Two experts, chosen by sparsemixer; layer norms; the head may have a bias."""
    c.only("num_experts_per_tok", 2)
    moe = MoE(
        **experts_of(c),
        width=c.count("intermediate_size"),
        activation=c.choice("hidden_act", ACTIVATIONS, "silu"),
        scores="sparsemixer",
        jitter=c.number_within("router_jitter_noise", (0.0, MAX_MAGNITUDE), 0.01),
    )
    c.ignore("input_jitter_noise")
    size, longest = heads_of(c)["head_dim"], c.count("max_position_embeddings")
    rope = with_magnitudes(c, rope_of(c, size, longest, unused=PHIMOE_MAGNITUDES))
    return rope_decoder(
        c,
        mlp=moe,
        windows=same_window,
        ropes=lambda index, window: rope,
        norm=layer_norm(c, "rms_norm_eps"),
        model=dict(head_bias=c.flag("lm_head_bias", False)),
        **attention_biases(c),
    )


PHIMOE_MAGNITUDES = ("short_mscale", "long_mscale")


def with_magnitudes(c: ConfigReader, rope: Rope) -> Rope:
    """The rope of phimoe: longrope with a magnitude for requests up to the trained length, and one for longer ones.

    Longer requests take the long divisors, as in transformers 4 and vLLM. transformers 5 gives them long_mscale, but
    keeps the short divisors.
    """
    if type(rope.scaling) is RopeScaling:
        return rope
    name, stored = parameters_of(c)
    if not isinstance(rope.scaling, LongRopeScaling):
        c.refuse(name, "is not supported for this model_type; its rope_type must be default or longrope")
    r = ConfigReader(stored, f"{c.where}, {name}")
    r.only("attention_factor")  # transformers does not use it
    short, long = (r.number_within(key, FACTORS) for key in PHIMOE_MAGNITUDES)
    return dataclasses.replace(rope, scaling=dataclasses.replace(rope.scaling, magnitude=short, long_magnitude=long))


NAMES = LLAMA_NAMES | EXPERT_NAMES
SHARED_EXPERT_NAMES = {f"mlp.shared.{n}": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")}
CORRECTION = ("mlp.moe_statics.e_score_correction_bias", lambda x: x.reshape(-1))
NUM_EXPERTS_KEYS = dict(num_local_experts=("num_experts", "num_local_experts"))
ROUTED_EXPERTS_KEYS = dict(num_local_experts=("n_routed_experts", "num_local_experts"))
ERNIE_KEYS = dict(
    num_local_experts=("moe_num_experts", "num_experts"), num_experts_per_tok=("moe_k", "num_experts_per_tok")
)


def extra_layer_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """Beginnings of the tensor names of layers for multi-token prediction, which follow the last layer."""
    return tuple(f"model.layers.{len(config.layers) + more}." for more in range(4)) + ("model.mtp",)


QWEN3_MOE = Family(
    qwen3_moe,
    named_tensors(NAMES),
    UNUSED,
    aliases=NUM_EXPERTS_KEYS,
    defaults=dict(num_key_value_heads=4, use_sliding_window=False, sliding_window=4096, rope_theta=10000.0),
)
QWEN2_MOE = Family(
    qwen2_moe,
    named_tensors(NAMES | SHARED_EXPERT_NAMES | {"mlp.shared_gate": "mlp.shared_expert_gate"}),
    UNUSED,
    aliases=NUM_EXPERTS_KEYS,
    defaults=dict(num_key_value_heads=16, sliding_window=4096, max_window_layers=28, rope_theta=10000.0),
)
OLMOE = Family(
    olmoe,
    named_tensors(NAMES),
    UNUSED,
    aliases=NUM_EXPERTS_KEYS,
    defaults=dict(rope_theta=10000.0, eos_token_id=50279, pad_token_id=1),
)
DOTS1 = Family(
    dots1,
    named_tensors(NAMES),
    UNUSED,
    aliases=ROUTED_EXPERTS_KEYS,
    defaults=dict(num_key_value_heads=32, sliding_window=4096, max_window_layers=62, rope_theta=10000.0),
)
GLM4_MOE = Family(
    glm4_moe,
    named_tensors(NAMES),
    UNUSED,
    aliases=ROUTED_EXPERTS_KEYS,
    skipped=extra_layer_prefixes,
    defaults=dict(num_key_value_heads=8, n_shared_experts=1, partial_rotary_factor=0.5, rope_theta=10000.0)
    | dict(first_k_dense_replace=1),
)
ERNIE4_5_MOE = Family(
    ernie4_5_moe,
    named_tensors(NAMES | {"mlp.router.correction": CORRECTION}),
    UNUSED,
    aliases=ERNIE_KEYS,
    skipped=extra_layer_prefixes,
    defaults={key: value for key, value in ERNIE_DEFAULTS.items() if key != "head_dim"}
    | dict(num_key_value_heads=4, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=-1)
    | dict(moe_layer_interval=1, moe_norm_min=1e-12),
)
MINIMAX_M2 = Family(
    minimax_m2,
    named_tensors(LLAMA_NAMES | MIXTRAL_NAMES),
    UNUSED,
    aliases=dict(num_local_experts=("num_local_experts", "num_experts")),
    skipped=extra_layer_prefixes,
    defaults=dict(num_key_value_heads=8, head_dim=128, rope_theta=5000000.0, bos_token_id=200034, eos_token_id=200020),
)
PHIMOE = Family(
    phimoe,
    named_tensors(LLAMA_NAMES | MIXTRAL_NAMES),
    UNUSED,
    defaults=ENDS | dict(num_key_value_heads=8, rope_theta=1e6),
)
