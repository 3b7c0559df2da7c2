"""Hunyuan, dense and with experts: norms of q and k after the rotation."""

from typing import Any

from jattn.models.config import ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    ENDS,
    EXPERT_NAMES,
    LLAMA_NAMES,
    MAX_HEADS,
    MAX_LAYERS,
    UNUSED,
    attention_biases,
    experts_of,
    gated_mlp,
    heads_of,
    no_windows,
    rms_norm,
    rope_decoder,
)
from jattn.models.mlp import ACTIVATIONS
from jattn.models.moe import MoE
from jattn.models.rope_config import parameters_of, rope_of, theta_of
from jattn.models.tensor_names import named_tensors
from jattn.nn import Rope
from jattn.nn.rope_scaling import FACTORS


def hunyuan(c: ConfigReader, mlp: Any = None) -> ModelConfig:
    """`rope_decoder` with norms of q and k after the rotation. mlp: see `rope_decoder`."""
    c.ignore(*NOT_OF_THE_DECODER)
    c.only_these(FIXED)
    rope = rope_by_alpha(c)
    return rope_decoder(
        c,
        mlp=mlp,
        windows=no_windows,
        ropes=lambda index, window: rope,
        qk_norm=rms_norm(c),
        qk_norm_after_rope=True,
        **attention_biases(c),
    )


def hunyuan_dense(c: ConfigReader) -> ModelConfig:
    """Without experts."""
    c.only("num_experts", 1)
    return hunyuan(c)


def rope_by_alpha(c: ConfigReader) -> Rope:
    """Type dynamic with alpha: theta * alpha ** (D / (D - 2)), at every length; other types as usual."""
    size, longest = heads_of(c)["head_dim"], c.count("max_position_embeddings")
    name, stored = parameters_of(c)
    if stored.get("rope_type", stored.get("type")) != "dynamic" or "alpha" not in stored:
        return rope_of(c, size, longest)
    if c.count("head_dim", high=MAX_HEADS) < 4:
        c.refuse("head_dim", "must be at least 4 with alpha")
    r = ConfigReader({"rope_theta": c.get("rope_theta")} | stored, f"{c.where}, {name}")
    r.ignore("rope_type", "type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    theta = theta_of(r, "rope_theta") * r.number_within("alpha", FACTORS) ** (size / (size - 2))
    r.refuse_unread()
    return Rope(dim=size, theta=theta)


def hunyuan_moe(c: ConfigReader) -> ModelConfig:
    """Experts in every layer, softmax over the chosen ones, and a shared expert. moe_topk may be a list."""
    count, act = c.count("num_hidden_layers", high=MAX_LAYERS), c.choice("hidden_act", ACTIVATIONS, "silu")
    several = c.get("num_experts_per_tok")
    if not isinstance(several, list | tuple):
        return hunyuan(c, mlp=moe(c, act))
    if len(several) != count:
        c.refuse("num_experts_per_tok", f"must be a number, or one for each of the {count} layers")
    return hunyuan(c, mlp=[moe(with_top_k(c, top_k), act) for top_k in several])


def moe(c: ConfigReader, act: str) -> MoE:
    """The experts of one layer."""
    return MoE(**experts_of(c), width=c.count("intermediate_size"), activation=act, shared=gated_mlp(c))


def with_top_k(c: ConfigReader, top_k: Any) -> ConfigReader:
    """The config, in which `top_k` stands for the list."""
    c.ignore("intermediate_size", "num_experts", "num_local_experts", "moe_topk")
    return ConfigReader({**c.values, "moe_topk": top_k}, c.where, aliases=c.aliases)


FIXED = dict(
    use_qk_norm=True, use_rotary_pos_emb=True, use_cla=False, use_mla=False, norm_type="rms",
    add_classification_head=False,
)  # fmt: skip
"""Keys with the only value that is implemented."""
NOT_OF_THE_DECODER = (
    "cla_share_factor", "class_num", "dense_list", "eod_token_id", "im_end_id", "im_newline_id", "im_start_id",
    "mask_init_id", "org_vocab_size", "pad_id", "pool_type", "text_end_id", "text_start_id", "enable_lm_head_fp32",
)  # fmt: skip
"""Keys of options that are off (FIXED), and ids of special tokens. Logits are float32 in any case."""
HEAD_KEYS = dict(head_dim=("head_dim", "attention_head_dim"))
NAMES = LLAMA_NAMES | {"attn.q_norm": "self_attn.query_layernorm", "attn.k_norm": "self_attn.key_layernorm"}
EXPERTS = EXPERT_NAMES | {"mlp.router": "mlp.gate.wg"}
EXPERTS |= {f"mlp.shared.{n}": f"mlp.shared_mlp.{n}_proj" for n in ("gate", "up", "down")}
DEFAULTS = ENDS | dict(rope_theta=10000.0, pad_token_id=0)
HUNYUAN = Family(hunyuan_dense, named_tensors(NAMES), UNUSED, aliases=HEAD_KEYS, defaults=DEFAULTS)
HUNYUAN_MOE = Family(
    hunyuan_moe,
    named_tensors(NAMES | EXPERTS),
    UNUSED,
    aliases=HEAD_KEYS
    | dict(num_local_experts=("num_experts", "num_local_experts"))
    | dict(num_experts_per_tok=("moe_topk", "num_experts_per_tok")),
    defaults=DEFAULTS,
)
