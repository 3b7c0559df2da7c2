"""LongCat Flash: latent attention, and pairs of layers in which experts run beside the second half of the pair."""

import dataclasses

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.deepseek import LATENT_NAMES, kv_b_rows, latent_config
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    EXPERT_NAMES,
    LLAMA_NAMES,
    MAX_EXPERTS,
    MAX_LAYERS,
    UNUSED,
    gated_mlp,
    model_config,
    rms_norm,
    without_windows,
)
from jattn.models.mlp import ACTIVATIONS
from jattn.models.moe import MoE
from jattn.models.residual import ResidualNorms
from jattn.models.side_experts import SideExperts
from jattn.models.tensor_names import TensorSource, named_tensors

MAX_PAIRS, MAX_IDENTITY = MAX_LAYERS // 2, 1024


def longcat_flash(c: ConfigReader) -> ModelConfig:
    """num_layers pairs of layers; the first of a pair has late experts, some of which only give their input."""
    c.only("attention_method", "MLA")
    c.only("zero_expert_type", "identity")
    c.only("mla_scale_q_lora", True)  # transformers scales in any case
    c.only("mla_scale_kv_lora", True)
    c.only("router_bias", False)  # transformers ignores the values of this bias
    c.only("norm_topk_prob", False)
    pairs = c.count("num_layers", high=MAX_PAIRS)
    c.only("num_hidden_layers", 2 * pairs)
    without_windows(c, 2 * pairs)
    hidden, attention = c.count("hidden_size"), latent_config(c, interleaved=True)
    spec = attention.spec
    if spec.q_lora_rank is None:
        c.refuse("q_lora_rank", "must be a number: the queries are scaled by (hidden_size / q_lora_rank) ** 0.5")
    attention = dataclasses.replace(
        attention,
        spec=dataclasses.replace(spec, scale=spec.scale * (hidden / spec.q_lora_rank) ** 0.5),
        kv_factor=(hidden / spec.kv_lora_rank) ** 0.5,
    )
    norm = rms_norm(c)
    norms = ResidualNorms(before=norm)
    first = LayerConfig(
        self_attn=attention,
        mlp=gated_mlp(c),
        attn_norms=norms,
        mlp_norms=norms,
        experts=SideExperts(moe=moe_of(c), is_late=True),
    )
    layers = [first, dataclasses.replace(first, experts=None)] * pairs
    return model_config(c, layers, norm)


def moe_of(c: ConfigReader) -> MoE:
    """Softmax over all experts, with a correction of the choice."""
    count = c.count("n_routed_experts", high=MAX_EXPERTS)
    identity, top_k = c.count("zero_expert_num", 0, low=0, high=MAX_IDENTITY), c.count("moe_topk")
    if top_k > count + identity:
        c.refuse("moe_topk", f"must be at most n_routed_experts + zero_expert_num = {count + identity}")
    return MoE(
        num_experts=count,
        identity_experts=identity,
        top_k=top_k,
        width=c.count("expert_ffn_hidden_size"),
        activation=c.choice("hidden_act", ACTIVATIONS, "silu"),
        scores="softmax_over_all",
        correction=True,
        float32_router=True,
        factor=c.number("routed_scaling_factor", 1.0, above=0),
    )


NAMES = {
    **{name: tensor for name, tensor in LLAMA_NAMES.items() if not name.startswith(("attn.", "mlp."))},
    **{name: tensor.replace("self_attn.", "self_attn.HALF.") for name, tensor in LATENT_NAMES.items()},
    **{f"attn.{n}": f"self_attn.HALF.{n}_proj" for n in "qo"},
    **{f"mlp.{n}": f"mlps.HALF.{n}_proj" for n in ("gate", "up", "down")},
    "attn_norm": "input_layernorm.HALF",
    "mlp_norm": "post_attention_layernorm.HALF",
    **{name: tensor for name, tensor in EXPERT_NAMES.items() if name.startswith("experts.")},
    "experts.router": "mlp.router.classifier",
    "experts.router.correction": "mlp.router.e_score_correction_bias",
}
"""HALF: 0 or 1, the place in the pair."""


def longcat_tensors(config: ModelConfig) -> dict[str, TensorSource]:
    """model.layers.0.self_attn.0.q_a_proj and so on, where model.layers.0 is the first pair."""
    half = lambda row: (row[0].replace("self_attn.", "self_attn.HALF."), row[1])
    rows = lambda layer: {path: half(row) for path, row in kv_b_rows(layer).items()}
    table = named_tensors(NAMES, "{}:", fused=rows)(config)
    return {
        path: dataclasses.replace(source, names=tuple(map(_in_pair, source.names))) for path, source in table.items()
    }


def unused_experts(config: ModelConfig) -> tuple[str, ...]:
    """transformers writes tensors of the identity experts, too, and never reads them."""
    moe = config.layers[0].moe
    assert moe is not None
    pairs, numbers = range(len(config.layers) // 2), range(moe.num_experts, moe.num_routes)
    return ("model.mtp.", *(f"model.layers.{pair}.mlp.experts.{e}." for pair in pairs for e in numbers))


def _in_pair(name: str) -> str:
    """ "5:self_attn.HALF.o_proj.weight", of layer 5 -> "model.layers.2.self_attn.1.o_proj.weight"."""
    index, is_of_layer, rest = name.partition(":")
    if not is_of_layer:
        return name
    return f"model.layers.{int(index) // 2}.{rest.replace('HALF', str(int(index) % 2))}"


LONGCAT_FLASH = Family(
    longcat_flash,
    longcat_tensors,
    UNUSED,
    skipped=unused_experts,
    aliases=dict(intermediate_size=("ffn_hidden_size",)),
    defaults=dict(
        kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        head_dim=64, zero_expert_num=256, routed_scaling_factor=6.0, rope_theta=1e7, bos_token_id=1, eos_token_id=2,
    ),
)  # fmt: skip
