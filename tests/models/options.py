"""Families with the options of their configs: one table, from which tests draw configs that vary every option."""

import dataclasses
from typing import Any

COMMON: dict[str, Any] = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=24, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=100.0, eos_token_id=[],
)  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
FULL = ["full_attention"] * 2
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False)
LLAMA3 = dict(
    rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
LINEAR = dict(rope_type="linear", factor=2.0)
TUNED = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, llama_4_scaling_beta=0.5)
BOTH = [False, True]
LAYER_NORM = dict(rms_norm_eps=None, layer_norm_eps=1e-5)
SMALL = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4, layer_norm_epsilon=1e-5, eos_token_id=[])
FALCON = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, layer_norm_epsilon=1e-5,
    max_position_embeddings=64, rope_theta=100.0, eos_token_id=[],
)  # fmt: skip
NEO = dict(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, layer_norm_epsilon=1e-5, max_position_embeddings=64,
    eos_token_id=[],
)  # fmt: skip
OPT = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24, max_position_embeddings=64,
    eos_token_id=[],
)  # fmt: skip
NESTED = dict(
    full_attention=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=500.0),
    sliding_attention=dict(rope_type="default", rope_theta=90.0),
)
PROPORTIONAL = dict(
    full_attention=dict(rope_type="proportional", rope_theta=500.0, partial_rotary_factor=0.5, factor=2.0),
    sliding_attention=dict(rope_type="default", rope_theta=90.0),
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=3)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, n_shared_experts=1)
LATENT = ROUTED | dict(
    num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10,
    num_hidden_layers=3,
)  # fmt: skip
MSCALE = YARN | dict(mscale=0.7, mscale_all_dim=1.2)
GREEDY, LIMITED = (dict(topk_method="greedy"), dict(topk_method="group_limited_greedy", n_group=4, topk_group=2))
QWEN = EXPERTS | dict(moe_intermediate_size=12, num_hidden_layers=3)


@dataclasses.dataclass(frozen=True)
class Varied:
    """One family: its changes to COMMON (None: without that key), and the values of each of its options.

    The values of `together` are objects of several options.
    """

    family: str
    base: dict[str, Any]
    options: dict[str, list[Any]]
    common: bool = True  # False: the family has other keys than COMMON

    def config(self, draw: int | None = None) -> dict[str, Any]:
        """The contents of a config.json. draw: takes another value of every option; None: the base."""
        values = (COMMON if self.common else {}) | dict(model_type=self.family) | self.base
        values = {key: value for key, value in values.items() if value is not None}
        if draw is None:
            return values
        chosen = {key: some[(draw + at // 2) % len(some)] for at, (key, some) in enumerate(self.options.items())}
        return values | chosen.pop("together", {}) | chosen

    @property
    def draws(self) -> int:
        """As many as it takes to use every value."""
        return max(2, *(len(some) for some in self.options.values()))


def varied(family: str, base: dict[str, Any] | None = None, common: bool = True, **options: list[Any]) -> Varied:
    return Varied(family, base or {}, options, common)


TABLE = [
    varied(
        "gemma", dict(head_dim=12), attention_bias=BOTH, hidden_act=["gelu", "silu"], tie_word_embeddings=BOTH,
        rms_norm_eps=[1e-5, 1e-2],
    ),
    varied(
        "gemma3n_text",
        dict(
            head_dim=12, num_hidden_layers=4, rope_theta=None, sliding_window=5, vocab_size_per_layer_input=50,
            hidden_size_per_layer_input=6, laurel_rank=5,
        ),
        layer_types=[[*KINDS, *KINDS], ["full_attention", "sliding_attention"] * 2], num_kv_shared_layers=[2, 0],
        altup_num_inputs=[3, 2], altup_active_idx=[0, 1], altup_correct_scale=BOTH, attention_bias=BOTH,
        intermediate_size=[[24, 20, 24, 28], 24], activation_sparsity_pattern=[[0.0, 0.7, 0.0, 0.9], None],
        final_logit_softcapping=[3.0, 30.0], hidden_activation=["silu", "gelu_pytorch_tanh"],
        rope_parameters=[NESTED, None], tie_word_embeddings=BOTH, rms_norm_eps=[1e-5, 1e-2],
    ),
    varied(
        "gemma4_text",
        dict(
            head_dim=12, global_head_dim=16, num_hidden_layers=4, rope_theta=None, sliding_window=5,
            vocab_size_per_layer_input=61,
        ),
        layer_types=[None, [*KINDS, *KINDS]], num_kv_shared_layers=[0, 2], attention_k_eq_v=BOTH,
        num_global_key_value_heads=[None, 1], hidden_size_per_layer_input=[0, 6], enable_moe_block=BOTH,
        num_experts=[5], top_k_experts=[2], moe_intermediate_size=[12], use_double_wide_mlp=BOTH,
        final_logit_softcapping=[3.0, None], hidden_activation=["silu", "gelu_pytorch_tanh"],
        rope_parameters=[PROPORTIONAL, None], tie_word_embeddings=BOTH, rms_norm_eps=[1e-5, 1e-2],
        attention_bias=BOTH,
    ),
    varied(
        "ministral", dict(sliding_window=5), layer_types=[KINDS, FULL, None], head_dim=[10, 16],
        rope_scaling=[LINEAR, None],
    ),
    varied(
        "ministral3", dict(rope_parameters=TUNED), sliding_window=[None, 7], head_dim=[10, 8],
        tie_word_embeddings=BOTH,
    ),
    varied("ernie4_5", dict(head_dim=12), use_bias=BOTH, tie_word_embeddings=BOTH, rope_scaling=[None, YARN]),
    varied(
        "seed_oss", dict(head_dim=10), attention_bias=BOTH, attention_out_bias=BOTH, mlp_bias=BOTH,
        rope_scaling=[None, LLAMA3],
    ),
    varied(
        "smollm3", {}, no_rope_layers=[[1, 0], None], no_rope_layer_interval=[3, 2], attention_bias=BOTH,
        use_sliding_window=BOTH, sliding_window=[5], mlp_bias=BOTH, tie_word_embeddings=BOTH,
    ),
    varied(
        "qwen3_moe", QWEN | dict(head_dim=10), norm_topk_prob=BOTH, decoder_sparse_step=[1, 2],
        mlp_only_layers=[[1], []], attention_bias=BOTH, use_sliding_window=BOTH, sliding_window=[5],
    ),
    varied(
        "qwen2_moe", QWEN | dict(shared_expert_intermediate_size=20, max_window_layers=2), norm_topk_prob=BOTH,
        qkv_bias=BOTH, use_sliding_window=BOTH, sliding_window=[5], decoder_sparse_step=[1, 2],
        mlp_only_layers=[[], [0]],
    ),
    varied("olmoe", EXPERTS, norm_topk_prob=BOTH, clip_qkv=[0.9, None], attention_bias=BOTH, tie_word_embeddings=BOTH),
    varied(
        "granitemoe", dict(num_local_experts=5, num_experts_per_tok=2), attention_multiplier=[0.4, 1.0],
        embedding_multiplier=[1.5, 1.0], residual_multiplier=[0.6, 0.3], logits_scaling=[2.0, 0.5], attention_bias=BOTH,
        tie_word_embeddings=BOTH,
    ),
    varied(
        "olmo3", dict(rope_theta=None, sliding_window=5), rope_parameters=[NESTED, None], layer_types=[KINDS, None],
        attention_bias=BOTH,
    ),
    varied(
        "exaone4", dict(head_dim=10), sliding_window=[5, None, 5], layer_types=[None, FULL, KINDS],
        sliding_window_pattern=[2], tie_word_embeddings=BOTH,
    ),
    varied(
        "hunyuan_v1_dense", dict(head_dim=10), rope_scaling=[None, dict(rope_type="dynamic", alpha=3.0, factor=1.0)],
        attention_bias=BOTH, tie_word_embeddings=BOTH,
    ),
    varied(
        "granite", dict(attention_multiplier=0.4), embedding_multiplier=[1.5, 1.0], residual_multiplier=[0.6, 0.3],
        logits_scaling=[2.0, 0.5], attention_bias=BOTH, mlp_bias=BOTH, tie_word_embeddings=BOTH,
    ),
    varied(
        "glm", dict(head_dim=12), attention_bias=[True, False], partial_rotary_factor=[0.5, 1.0],
        rope_scaling=[LINEAR, None],
    ),
    varied(
        "glm4", dict(head_dim=12), attention_bias=[True, False], partial_rotary_factor=[0.5, 0.34],
        tie_word_embeddings=BOTH,
    ),
    varied(
        "dots1", ROUTED | dict(num_hidden_layers=3, sliding_window=5), n_group=[4, 1], topk_group=[2, 1],
        norm_topk_prob=BOTH, routed_scaling_factor=[1.5, 0.7], first_k_dense_replace=[1, 0], attention_bias=BOTH,
        max_window_layers=[1, 62],
    ),
    varied(
        "glm4_moe", ROUTED | dict(head_dim=12), n_group=[4, 1], topk_group=[2, 1], norm_topk_prob=BOTH,
        routed_scaling_factor=[1.5, 0.7], first_k_dense_replace=[1, 0], use_qk_norm=BOTH, attention_bias=BOTH,
    ),
    varied(
        "ernie4_5_moe", dict(moe_num_experts=6, moe_k=2, moe_intermediate_size=12, num_hidden_layers=3),
        moe_num_shared_experts=[2, 0], moe_layer_start_index=[0, 1], moe_layer_end_index=[-1, 1],
        moe_layer_interval=[1, 2], use_bias=BOTH, tie_word_embeddings=BOTH, moe_norm_min=[1e-12, 0.9],
    ),
    varied(
        "hunyuan_v1_moe", dict(num_experts=6, head_dim=10), moe_topk=[2, [1, 3]], attention_bias=BOTH,
        tie_word_embeddings=BOTH,
    ),
    varied(
        "minimax_m2", dict(num_local_experts=6, num_experts_per_tok=2, head_dim=12), rotary_dim=[6, None],
        tie_word_embeddings=BOTH,
    ),
    varied(
        "phimoe", dict(num_local_experts=6, num_experts_per_tok=2), router_jitter_noise=[0.01, 0.6, 0.0],
        attention_bias=BOTH, lm_head_bias=BOTH, sliding_window=[None, 6],
    ),
    varied(
        "deepseek_v2", LATENT, together=[GREEDY, LIMITED], first_k_dense_replace=[1, 0], q_lora_rank=[None, 20],
        rope_scaling=[None, MSCALE, LINEAR], attention_bias=BOTH, mlp_bias=BOTH, routed_scaling_factor=[1.5, 0.7],
        tie_word_embeddings=BOTH, kv_lora_rank=[16, 6], rms_norm_eps=[1e-2, 1e-5],
    ),
    varied(
        "deepseek_v3", LATENT, n_group=[4, 1], topk_group=[2, 1], norm_topk_prob=BOTH, rope_interleave=[True, False],
        rope_scaling=[MSCALE, YARN, None], q_lora_rank=[20, None], first_k_dense_replace=[1, 0], attention_bias=BOTH,
        routed_scaling_factor=[1.5, 0.7], n_shared_experts=[1, 2], tie_word_embeddings=BOTH, rms_norm_eps=[1e-2, 1e-5],
    ),
    varied(
        "kimi_k2", LATENT | dict(n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1),
        rope_scaling=[dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=1.0,
                           beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0), None],
        routed_scaling_factor=[2.827, 0.7], norm_topk_prob=[True, False],
    ),
    varied(
        "glm4_moe_lite", LATENT, n_group=[4, 1], topk_group=[2, 1], rope_interleave=[True, False],
        rope_scaling=[MSCALE, None], mlp_layer_types=[["dense", "sparse", "dense"], None], q_lora_rank=[20, None],
        attention_bias=BOTH, norm_topk_prob=BOTH, routed_scaling_factor=[1.5, 0.7],
    ),
    varied(
        "youtu", {key: value for key, value in LATENT.items() if key not in ROUTED}, rope_interleave=[True, False],
        rope_scaling=[MSCALE, None], q_lora_rank=[20, None], attention_bias=BOTH, tie_word_embeddings=BOTH,
    ),
    varied(
        "mistral4", LATENT | dict(rope_parameters=TUNED),
        n_group=[4, 1], topk_group=[2, 1], norm_topk_prob=BOTH, rope_interleave=[True, False],
        rope_parameters=[TUNED | dict(mscale=0.7, mscale_all_dim=1.2), TUNED],
        first_k_dense_replace=[1, 0], q_lora_rank=[20, None], routed_scaling_factor=[1.5, 0.7], attention_bias=BOTH,
    ),
    varied(
        "longcat_flash",
        dict(
            num_hidden_layers=None, intermediate_size=None, num_layers=2, ffn_hidden_size=24, num_key_value_heads=4,
            kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, head_dim=4,
            n_routed_experts=6, expert_ffn_hidden_size=12, moe_topk=3,
        ),
        zero_expert_num=[3, 0], routed_scaling_factor=[1.5, 0.7], rope_scaling=[MSCALE, None],
        attention_bias=BOTH, tie_word_embeddings=BOTH, rms_norm_eps=[1e-2, 1e-5],
    ),
    varied(
        "gpt_neox", LAYER_NORM | dict(rope_theta=None, rotary_emb_base=100.0, num_key_value_heads=None),
        use_parallel_residual=BOTH, rotary_pct=[0.5, 1.0],
        attention_bias=BOTH, hidden_act=["gelu_fast", "gelu"], tie_word_embeddings=BOTH,
    ),
    varied(
        "gptj", SMALL | dict(n_positions=64, n_inner=40), common=False, rotary_dim=[4, 8],
        activation_function=["gelu_new", "silu"], tie_word_embeddings=BOTH,
    ),
    varied(
        "phi", LAYER_NORM, qk_layernorm=BOTH, partial_rotary_factor=[0.5, 1.0], rope_scaling=[None, LINEAR],
        num_key_value_heads=[2, 4], tie_word_embeddings=BOTH,
    ),
    varied(
        "stablelm", LAYER_NORM, use_parallel_residual=BOTH, qk_layernorm=BOTH, use_qkv_bias=BOTH,
        partial_rotary_factor=[0.25, 1.0], tie_word_embeddings=BOTH, num_key_value_heads=[2, 4],
    ),
    varied(
        "cohere", LAYER_NORM, use_qk_norm=BOTH, logit_scale=[0.5, 2.0], attention_bias=BOTH, tie_word_embeddings=BOTH,
    ),
    varied(
        "cohere2", LAYER_NORM | dict(sliding_window=5), layer_types=[KINDS, None], sliding_window_pattern=[2],
        logit_scale=[0.5, 2.0], attention_bias=BOTH, tie_word_embeddings=BOTH,
    ),
    varied(
        "starcoder2", dict(rms_norm_eps=None, norm_epsilon=1e-5), use_bias=BOTH, sliding_window=[5, None],
        tie_word_embeddings=BOTH, hidden_act=["gelu_pytorch_tanh", "relu"],
    ),
    varied(
        "nemotron", dict(rms_norm_eps=None, norm_eps=1e-5, head_dim=12), attention_bias=BOTH, mlp_bias=BOTH,
        partial_rotary_factor=[0.5, 1.0], hidden_act=["relu2", "silu"], tie_word_embeddings=BOTH,
    ),
    varied(
        "falcon", FALCON, common=False, together=[
            dict(multi_query=True), dict(multi_query=False, parallel_attn=False),
            dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
            dict(new_decoder_architecture=True, num_kv_heads=2),
        ], bias=BOTH, ffn_hidden_size=[24, None], tie_word_embeddings=BOTH,
    ),
    varied(
        "gpt2", SMALL | dict(n_positions=64), common=False, n_inner=[24, None], scale_attn_weights=BOTH,
        scale_attn_by_inverse_layer_idx=BOTH, activation_function=["gelu_new", "relu"], tie_word_embeddings=BOTH,
    ),
    varied(
        "gpt_neo", NEO, common=False, attention_types=[[[["global", "local"], 1]], [[["local"], 2]]],
        intermediate_size=[24, None], window_size=[5], activation_function=["gelu_new", "relu"],
        tie_word_embeddings=BOTH,
    ),
    varied(
        "opt", OPT, common=False, do_layer_norm_before=[True, False], enable_bias=[True, False],
        layer_norm_elementwise_affine=[True, False], activation_function=["relu", "gelu"],
        _remove_final_layer_norm=[False, True], tie_word_embeddings=BOTH,
    ),
]  # fmt: skip
FAMILIES = {row.family: row for row in TABLE}

BERT = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
    max_position_embeddings=64, layer_norm_eps=1e-5,
)  # fmt: skip
DISTILBERT = dict(vocab_size=61, dim=32, n_layers=2, n_heads=4, hidden_dim=24, max_position_embeddings=64)
MODERNBERT = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=24,
    max_position_embeddings=64, norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
BY_TYPE = dict(
    full_attention=dict(rope_type="linear", factor=2.0, rope_theta=500.0),
    sliding_attention=dict(rope_type="default", rope_theta=50.0),
)
ROBERTA = dict(
    hidden_act=["gelu", "relu", "gelu_new"], layer_norm_eps=[1e-12, 1e-3], type_vocab_size=[1, 2],
    pad_token_id=[1, 0, 2],
)  # fmt: skip
ENCODERS = [
    varied("bert", BERT, False, hidden_act=["gelu", "gelu_new", "relu"], layer_norm_eps=[1e-5, 1e-2],
           type_vocab_size=[2, 3]),
    varied("distilbert", DISTILBERT, False, activation=["gelu", "relu"]),
    varied("roberta", BERT, False, **ROBERTA),
    varied("xlm-roberta", BERT, False, **ROBERTA),
    varied("camembert", BERT, False, **ROBERTA),
    varied("electra", BERT, False, hidden_act=["gelu", "relu"], layer_norm_eps=[1e-12, 1e-3], type_vocab_size=[2, 3],
           embedding_size=[20, 32]),
    varied("ernie", BERT, False, hidden_act=["gelu", "relu"], layer_norm_eps=[1e-12, 1e-3], type_vocab_size=[2, 4],
           use_task_id=[True, False], task_type_vocab_size=[3, 5]),
    varied("albert", BERT, False, hidden_act=["gelu_new", "relu"], layer_norm_eps=[1e-12, 1e-3],
           type_vocab_size=[2, 3], embedding_size=[20, 32]),
    varied("mpnet", BERT, False, hidden_act=["gelu", "relu"], layer_norm_eps=[1e-12, 1e-3]),
    varied(
        "modernbert", MODERNBERT, False, local_attention=[6, 9, 128], hidden_activation=["gelu", "silu"],
        norm_bias=BOTH, norm_eps=[1e-5, 1e-2], attention_bias=[True, False], mlp_bias=BOTH, decoder_bias=BOTH,
        classifier_bias=BOTH, classifier_activation=["gelu", "relu"], global_attn_every_n_layers=[2, 3],
        layer_types=[None, KINDS * 2], rope_parameters=[None, BY_TYPE], tie_word_embeddings=BOTH,
    ),
    varied(
        "nomic_bert", BERT, False, hidden_act=["silu", "gelu"], head_dim=[8, 10], type_vocab_size=[2, 3],
        layer_norm_eps=[1e-12, 1e-3], rope_parameters=[None, LINEAR | dict(rope_theta=90.0)],
    ),
    varied(
        "eurobert", {}, num_key_value_heads=[2, 4], head_dim=[8, 10], attention_bias=BOTH, mlp_bias=BOTH,
        hidden_act=["silu", "gelu"], tie_word_embeddings=BOTH, rope_scaling=[None, LINEAR], rms_norm_eps=[1e-5, 1e-2],
    ),
]  # fmt: skip
"""Encoders, which tests/models/test_encoders.py compares."""
BY_NAME = FAMILIES | {row.family: row for row in ENCODERS}
