"""Families with multi-head latent attention: DeepSeek V2 and V3, Kimi K2."""

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
)
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    MAX_HEADS,
    UNUSED,
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
from jattn.models.tensor_names import OfNumbers, named_tensors
from jattn.nn import LatentConfig, Norm, YarnRopeScaling
from jattn.nn.rope_scaling import yarn_magnitude

LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever rms_norm_eps is."""


def latent_decoder(c: ConfigReader, mlps: Sequence[MLP | MoE], interleaved: bool) -> ModelConfig:
    """Latent attention in every layer, and norms before the sublayers."""
    norm, config = rms_norm(c), latent_config(c, interleaved)
    norms = ResidualNorms(before=norm)
    without_windows(c, len(mlps))
    layers = [LayerConfig(self_attn=config, mlp=mlp, attn_norms=norms, mlp_norms=norms) for mlp in mlps]
    return model_config(c, layers, norm)


def latent_config(c: ConfigReader, interleaved: bool) -> LatentConfig:
    """The attention of every layer. num_key_value_heads has no effect: all heads share one latent."""
    sizes = {name: c.count(name, high=MAX_HEADS) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    heads, rank = c.count("num_attention_heads", high=MAX_HEADS), c.count("kv_lora_rank")
    rotated = sizes["qk_rope_head_dim"]
    c.count("num_key_value_heads", None, high=MAX_HEADS)
    for name, size in dict(head_dim=rotated, qk_head_dim=rotated + sizes["qk_nope_head_dim"]).items():
        if c.count(name, size) != size:
            c.refuse(name, f"must be {size}, which the other keys say")
    c.ignore("num_key_value_heads", "head_dim", "qk_head_dim")
    rope = rope_of(c, rotated, c.count("max_position_embeddings"), interleaved=interleaved)
    spec = MLASpec(num_heads=heads, kv_lora_rank=rank, q_lora_rank=c.count("q_lora_rank", None), **sizes)
    scale = spec.scale
    if isinstance(rope.scaling, YarnRopeScaling):
        stored = ConfigReader(parameters_of(c)[1], c.where)
        scale *= yarn_magnitude(rope.scaling.factor, stored.number_within("mscale_all_dim", MSCALES, 0.0)) ** 2
    return LatentConfig(
        spec=MLASpec(num_heads=heads, kv_lora_rank=rank, q_lora_rank=spec.q_lora_rank, scale=scale, **sizes),
        hidden_size=c.count("hidden_size"),
        rope=rope,
        norm=Norm(eps=LATENT_EPS),
        bias=c.flag("attention_bias", False),
    )


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
    return latent_decoder(c, experts_after_dense(c, moe, bias), interleaved=True)


def deepseek_v3(c: ConfigReader) -> ModelConfig:
    """Sigmoid scores with a correction, in groups; the rotated pairs may be halves of the head."""
    training_keys(c)
    return latent_decoder(c, experts_after_dense(c, grouped_moe(c)), interleaved=c.flag("rope_interleave", False))


def kv_b_rows(layer: LayerConfig) -> dict[str, Any]:
    """w_uk [H nope L] and w_uv [H L V], the two parts of kv_b_proj [H * (nope + V), L]."""
    config = layer.self_attn
    assert isinstance(config, LatentConfig)
    heads, nope = config.spec.num_heads, config.spec.qk_nope_head_dim

    def per_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(heads, -1, x.shape[-1])

    tensor = "self_attn.kv_b_proj.weight"
    return {
        "attn.w_uk": (tensor, OfNumbers(lambda x: per_head(x)[:, :nope])),
        "attn.w_uv": (tensor, OfNumbers(lambda x: per_head(x)[:, nope:].swapaxes(1, 2))),
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
