"""Families with multi-head latent attention: DeepSeek V2 and V3, Kimi K2, GLM 4.7 Flash, Youtu, Mistral 4."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn.mla_spec import MLASpec
from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.experts import (
    ROUTED_EXPERTS_KEYS,
    experts_after_dense,
    extra_layer_prefixes,
    grouped_moe,
    groups_of,
    layers_of,
)
from jattn.models.families.family import Family
from jattn.models.families.llama import TUNING_KEYS, tuning_of
from jattn.models.families.shared import (
    ENDS,
    EXPERT_NAMES,
    LLAMA_NAMES,
    MAX_HEADS,
    UNUSED,
    dense_or_experts,
    experts_of,
    gated_mlp,
    model_config,
    rms_norm,
    without_windows,
)
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.moe import MoE
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import MSCALES, parameters_of, rope_of
from jattn.models.tensor_names import named_tensors
from jattn.nn import LatentConfig, Norm, Rope, YarnRopeScaling
from jattn.nn.rope_scaling import yarn_magnitude

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps is."""


def latent_decoder(c: ConfigReader, mlps: Sequence[MLP | MoE], attention: LatentConfig, **model: Any) -> ModelConfig:
    """The same attention in every layer, and norms before the sublayers. model: more arguments of `model_config`."""
    norm = rms_norm(c)
    norms = ResidualNorms(before=norm)
    without_windows(c, len(mlps))
    layers = [LayerConfig(self_attn=attention, mlp=mlp, attn_norms=norms, mlp_norms=norms) for mlp in mlps]
    return model_config(c, layers, norm, **model)


def latent_config(c: ConfigReader, interleaved: bool | None = None) -> LatentConfig:
    """The attention of every layer. num_key_value_heads has no effect: all heads share one latent.

    interleaved: None: as rope_interleave says. It chooses which elements are a rotated pair: neighbours, or those half
    of the rotated part apart.
    """
    rotated = c.count("qk_rope_head_dim", high=MAX_HEADS)
    _only_sizes(c, head_dim=rotated)
    rope = rope_of(
        c,
        rotated,
        c.count("max_position_embeddings"),
        interleaved=_is_interleaved(c) if interleaved is None else interleaved,
    )
    return _latent_config(c, rope, parameters_of(c)[1])


def _latent_config(c: ConfigReader, rope: Rope, parameters: dict[str, Any], **options: Any) -> LatentConfig:
    """parameters: those of `rope`, of which mscale_all_dim also scales the attention logits."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    sizes = {name: c.count(name, high=MAX_HEADS) for name in names}
    _only_sizes(c, qk_head_dim=sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"])
    c.count("num_key_value_heads", None, high=MAX_HEADS)
    c.ignore("num_key_value_heads")
    spec = MLASpec(
        num_heads=c.count("num_attention_heads", high=MAX_HEADS),
        kv_lora_rank=c.count("kv_lora_rank"),
        q_lora_rank=c.count("q_lora_rank", None),
        **sizes,
    )
    if isinstance(rope.scaling, YarnRopeScaling):
        weight = ConfigReader(parameters, c.where).number_within("mscale_all_dim", MSCALES, 0.0)
        spec = dataclasses.replace(spec, scale=spec.scale * yarn_magnitude(rope.scaling.factor, weight) ** 2)
    return LatentConfig(
        spec=spec,
        hidden_size=c.count("hidden_size"),
        rope=rope,
        norm=Norm(eps=LATENT_EPS),
        bias=c.flag("attention_bias", False),
        **options,
    )


def _is_interleaved(c: ConfigReader) -> bool:
    return c.flag("rope_interleave", False)  # False if null; an absent key has the family's default


def _only_sizes(c: ConfigReader, **sizes: int) -> None:
    """ValueError if a key has another value than the one that follows from other keys."""
    for name, size in sizes.items():
        if c.count(name, size) != size:
            c.refuse(name, f"must be {size}, which follows from qk_nope_head_dim and qk_rope_head_dim")
    c.ignore(*sizes)


def training_keys(c: ConfigReader) -> None:
    """Keys of the published configs that have no effect: layers that are skipped, training, expert parallelism."""
    c.ignore("num_nextn_predict_layers", "num_mtp_layers", "seq_aux", "aux_loss_alpha", "ep_size")


def deepseek_v2(c: ConfigReader) -> ModelConfig:
    """Softmax scores over all experts; the best experts, or those of the groups with the best single experts."""
    training_keys(c)
    c.only("scoring_func", "softmax")
    c.only("norm_topk_prob", False)  # transformers ignores it
    c.only("moe_layer_freq", 1)
    experts, bias = experts_of(c), c.flag("mlp_bias", False)
    width = c.count("moe_intermediate_size")
    limited = c.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy") == "group_limited_greedy"
    groups = groups_of(c, **experts, group_best=1)  # of 'greedy': checked, and not used
    moe = MoE(
        **experts,
        **(groups if limited else {}),
        width=width,
        activation=c.choice("hidden_act", ACTIVATIONS, "silu"),
        scores="softmax_over_all",
        factor=c.number("routed_scaling_factor", 1.0, above=0),
        float32_router=True,
        shared=gated_mlp(c, bias, width * c.count("n_shared_experts")),
    )
    return latent_decoder(c, experts_after_dense(c, moe, bias), latent_config(c, interleaved=True))


def deepseek_v3(c: ConfigReader) -> ModelConfig:
    """Sigmoid scores with a correction, in groups; for rope_interleave see latent_config."""
    training_keys(c)
    return latent_decoder(c, experts_after_dense(c, grouped_moe(c)), latent_config(c))


def glm4_moe_lite(c: ConfigReader) -> ModelConfig:
    """The layers of mlp_layer_types 'dense' have a gated MLP; without the key that is the first."""
    training_keys(c)
    count = layers_of(c)
    c.only("first_k_dense_replace", 1)  # transformers ignores it
    kinds = c.choices("mlp_layer_types", ("dense", "sparse"), count) or ["dense"] + ["sparse"] * (count - 1)
    mlps = dense_or_experts(c, grouped_moe(c), [kind == "sparse" for kind in kinds])
    return latent_decoder(c, mlps, latent_config(c))


def youtu(c: ConfigReader) -> ModelConfig:
    """A gated MLP in every layer."""
    c.ignore("embedding_initializer_range")
    return latent_decoder(c, [gated_mlp(c)] * layers_of(c), latent_config(c), tied=True)


def mistral4(c: ConfigReader) -> ModelConfig:
    """Softmax scores in groups; queries that grow with their position; the rotated part of a head is a fraction."""
    training_keys(c)
    experts, width = experts_of(c), c.count("moe_intermediate_size")
    moe = MoE(
        **experts,
        **groups_of(c, **experts, group_best=2),
        width=width,
        activation=c.choice("hidden_act", ACTIVATIONS, "silu"),
        scores="softmax_over_all",
        normalised=c.flag("norm_topk_prob", False),
        factor=c.number("routed_scaling_factor", above=0),
        shared=gated_mlp(c, width=width * c.count("n_shared_experts")),
    )
    rotated = c.count("qk_rope_head_dim", high=MAX_HEADS)
    size = rotated + c.count("qk_nope_head_dim", high=MAX_HEADS)
    _only_sizes(c, head_dim=size)
    name, stored = parameters_of(c)
    stored = stored or MISTRAL4_ROPE
    fraction = ConfigReader(stored, f"{c.where}, {name}").number(
        "partial_rotary_factor", rotated / size, above=0, most=1
    )
    if int(size * fraction) != rotated:
        raise ValueError(f"{c.where}, {name}: partial_rotary_factor={fraction} must be qk_rope_head_dim / head_dim")
    rope = rope_of(
        c, rotated, c.count("max_position_embeddings"), interleaved=_is_interleaved(c), default=MISTRAL4_ROPE,
        unused=(*TUNING_KEYS, "partial_rotary_factor"),
    )  # fmt: skip
    attention = _latent_config(c, rope, stored, **tuning_of(c, MISTRAL4_ROPE))
    return latent_decoder(c, experts_after_dense(c, moe), attention)


def kv_b_rows(layer: LayerConfig) -> dict[str, Any]:
    """w_uk [H nope L] and w_uv [H L V], the two parts of kv_b_proj [H * (nope + V), L]."""
    config = layer.self_attn
    assert isinstance(config, LatentConfig)
    heads, nope = config.spec.num_heads, config.spec.qk_nope_head_dim

    def per_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(heads, -1, x.shape[-1])

    tensor = "self_attn.kv_b_proj.weight"
    return {
        "attn.w_uk": (tensor, lambda x: per_head(x)[:, :nope]),
        "attn.w_uv": (tensor, lambda x: per_head(x)[:, nope:].swapaxes(1, 2)),
    }


def mistral4_rows(layer: LayerConfig) -> dict[str, Any]:
    """All experts in one tensor: gate and up [E, 2 * width, hidden], down [E, hidden, width]."""
    if not isinstance(layer.mlp, MoE):
        return kv_b_rows(layer)
    both, part = "mlp.experts.gate_up_proj", lambda index: lambda x: np.split(x, 2, axis=1)[index].swapaxes(1, 2)
    return kv_b_rows(layer) | {
        "mlp.gate.kernel": (both, part(0)),
        "mlp.up.kernel": (both, part(1)),
        "mlp.down.kernel": ("mlp.experts.down_proj", lambda x: x.swapaxes(1, 2)),
    }


LATENT_NAMES: dict[str, Any] = {
    "attn.q_a": "self_attn.q_a_proj",
    "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj",
    "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm",
}
NAMES = LLAMA_NAMES | EXPERT_NAMES | LATENT_NAMES
DIMS = dict(kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)

MISTRAL4_ROPE = dict(
    rope_type="yarn", rope_theta=1e4, factor=128.0, original_max_position_embeddings=8192, beta_fast=32.0,
    beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip

DEEPSEEK_V2 = Family(
    deepseek_v2,
    named_tensors(NAMES, fused=kv_b_rows),
    UNUSED,
    aliases=ROUTED_EXPERTS_KEYS | dict(num_local_experts=("n_routed_experts", "num_experts")),
    skipped=extra_layer_prefixes,
    defaults=DIMS | dict(n_shared_experts=2, rope_theta=10000.0, bos_token_id=1, eos_token_id=2),
)
DEEPSEEK_V3 = Family(
    deepseek_v3,
    named_tensors(NAMES, fused=kv_b_rows),
    UNUSED,
    aliases=ROUTED_EXPERTS_KEYS,
    skipped=extra_layer_prefixes,
    defaults=DIMS
    | dict(n_shared_experts=1, n_group=8, topk_group=4, first_k_dense_replace=3, norm_topk_prob=True)
    | dict(routed_scaling_factor=2.5, rope_interleave=True, rope_theta=10000.0, bos_token_id=0, eos_token_id=1),
)
GLM4_MOE_LITE = Family(
    glm4_moe_lite,
    named_tensors(NAMES, fused=kv_b_rows),
    UNUSED,
    aliases=ROUTED_EXPERTS_KEYS,
    skipped=extra_layer_prefixes,
    defaults=DIMS
    | dict(q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_shared_experts=1, norm_topk_prob=True)
    | dict(routed_scaling_factor=1.8, rope_interleave=True, rope_theta=10000.0, bos_token_id=0, eos_token_id=1),
)
YOUTU = Family(
    youtu,
    named_tensors(NAMES, fused=kv_b_rows),
    UNUSED,
    defaults=DIMS | dict(rope_interleave=True, rope_theta=10000.0, bos_token_id=128000, eos_token_id=128001),
)
MISTRAL4 = Family(
    mistral4,
    named_tensors(NAMES, fused=mistral4_rows),
    UNUSED,
    aliases=ROUTED_EXPERTS_KEYS,
    defaults=ENDS
    | DIMS
    | dict(kv_lora_rank=256, q_lora_rank=1024, qk_nope_head_dim=64, n_shared_experts=1, norm_topk_prob=True)
    | dict(routed_scaling_factor=1.0, rope_interleave=True, rope_theta=10000.0, pad_token_id=11),
)
