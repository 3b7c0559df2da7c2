"""Configs of published models, with their old keys: every key is read, and the ModelConfig describes the model."""

import math

import pytest

from jattn import UnsupportedError, models
from jattn.nn import AttentionConfig, DynamicNTKRopeScaling, Llama3RopeScaling, LongRopeScaling, YarnRopeScaling
from tests.models import examples, options, published

LLAMA_31_8B = dict(
    architectures=["LlamaForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=128000,
    eos_token_id=[128001, 128008, 128009], hidden_act="silu", hidden_size=4096, initializer_range=0.02,
    intermediate_size=14336, max_position_embeddings=131072, mlp_bias=False, model_type="llama",
    num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, pretraining_tp=1, rms_norm_eps=1e-05,
    rope_scaling=dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, rope_type="llama3",
                      original_max_position_embeddings=8192),
    rope_theta=500000.0, tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.42.3",
    use_cache=True, vocab_size=128256,
)  # fmt: skip
QWEN_25 = dict(
    architectures=["Qwen2ForCausalLM"], attention_dropout=0.0, bos_token_id=151643, eos_token_id=151645,
    hidden_act="silu", hidden_size=896, initializer_range=0.02, intermediate_size=4864, max_position_embeddings=32768,
    max_window_layers=21, model_type="qwen2", num_attention_heads=14, num_hidden_layers=24, num_key_value_heads=2,
    rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=32768, tie_word_embeddings=True, torch_dtype="bfloat16",
    transformers_version="4.43.1", use_cache=True, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
OLMO_2_7B = dict(
    architectures=["Olmo2ForCausalLM"], attention_bias=False, attention_dropout=0.0, eos_token_id=100257,
    hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=11008,
    max_position_embeddings=4096, model_type="olmo2", num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=32, pad_token_id=100277, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=500000,
    tie_word_embeddings=False, torch_dtype="float32", transformers_version="4.47.0.dev0", use_cache=False,
    vocab_size=100352,
)  # fmt: skip
GEMMA_2 = dict(
    architectures=["Gemma2ForCausalLM"], attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=50.0,
    bos_token_id=2, cache_implementation="hybrid", eos_token_id=[1, 107], final_logit_softcapping=30.0, head_dim=256,
    hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", hidden_size=2304, initializer_range=0.02,
    intermediate_size=9216, max_position_embeddings=8192, model_type="gemma2", num_attention_heads=8,
    num_hidden_layers=26, num_key_value_heads=4, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06,
    rope_theta=10000.0, sliding_window=4096, torch_dtype="bfloat16", transformers_version="4.42.4", use_cache=True,
    vocab_size=256000,
)  # fmt: skip
GEMMA_3 = dict(
    architectures=["Gemma3ForCausalLM"], attention_bias=False, attention_dropout=0.0, attn_logit_softcapping=None,
    bos_token_id=2, cache_implementation="hybrid", eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256,
    hidden_activation="gelu_pytorch_tanh", hidden_size=1152, initializer_range=0.02, intermediate_size=6912,
    max_position_embeddings=32768, model_type="gemma3_text", num_attention_heads=4, num_hidden_layers=26,
    num_key_value_heads=1, pad_token_id=0, query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_local_base_freq=10000,
    rope_scaling=None, rope_theta=1000000, sliding_window=512, sliding_window_pattern=6, torch_dtype="bfloat16",
    transformers_version="4.50.0.dev0", use_cache=True, vocab_size=262144,
)  # fmt: skip
PHI_3_128K = dict(
    _name_or_path="Phi-3-mini-128k-instruct", architectures=["Phi3ForCausalLM"], attention_dropout=0.0,
    auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, bos_token_id=1, embd_pdrop=0.0, eos_token_id=32000,
    hidden_act="silu", hidden_size=3072, initializer_range=0.02, intermediate_size=8192,
    max_position_embeddings=131072, model_type="phi3", num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=32, original_max_position_embeddings=4096, pad_token_id=32000, resid_pdrop=0.0,
    rms_norm_eps=1e-05, rope_scaling=dict(long_factor=[2.0] * 48, short_factor=[1.0] * 48, type="longrope"),
    rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=False, torch_dtype="bfloat16",
    transformers_version="4.40.2", use_cache=True, attention_bias=False, vocab_size=32064,
)  # fmt: skip
PHI_4_MINI = dict(
    architectures=["Phi3ForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=199999,
    auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, embd_pdrop=0.0, eos_token_id=199999, full_attn_mod=1,
    hidden_act="silu", hidden_size=3072, initializer_range=0.02, intermediate_size=8192, interpolate_factor=1,
    lm_head_bias=False, max_position_embeddings=131072, mlp_bias=False, model_type="phi3", num_attention_heads=24,
    num_hidden_layers=32, num_key_value_heads=8, original_max_position_embeddings=4096, pad_token_id=199999,
    partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-05,
    rope_scaling=dict(long_factor=[2.0] * 48, short_factor=[1.0] * 48, type="longrope"), rope_theta=10000.0,
    sliding_window=262144, tie_word_embeddings=True, torch_dtype="bfloat16", transformers_version="4.45.0",
    use_cache=True, vocab_size=200064,
)  # fmt: skip
GPT_OSS_20B = dict(
    architectures=["GptOssForCausalLM"], attention_bias=True, attention_dropout=0.0, eos_token_id=200002,
    experts_per_token=4, head_dim=64, hidden_act="silu", hidden_size=2880, initial_context_length=4096,
    initializer_range=0.02, intermediate_size=2880, layer_types=["sliding_attention", "full_attention"] * 12,
    max_position_embeddings=131072, model_type="gpt_oss", num_attention_heads=64, num_experts_per_tok=4,
    num_hidden_layers=24, num_key_value_heads=8, num_local_experts=32, output_router_logits=False,
    pad_token_id=199999, quantization_config=dict(quant_method="mxfp4", modules_to_not_convert=["lm_head"]),
    rms_norm_eps=1e-05,
    rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096,
                      rope_type="yarn", truncate=False),
    rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128, swiglu_limit=7.0, tie_word_embeddings=False,
    transformers_version="4.55.0.dev0", use_cache=True, vocab_size=201088,
)  # fmt: skip
BLOOM_560M = dict(
    apply_residual_connection_post_layernorm=False, attention_dropout=0.0, attention_softmax_in_fp32=True,
    bias_dropout_fusion=True, bos_token_id=1, eos_token_id=2, pad_token_id=3, unk_token_id=0, hidden_dropout=0.0,
    initializer_range=0.02, layer_norm_epsilon=1e-05, masked_softmax_fusion=True, model_type="bloom", n_embed=1024,
    n_inner=None, n_layer=24, num_attention_heads=16, offset_alibi=100, pretraining_tp=1, seq_length=2048,
    skip_bias_add=True, skip_bias_add_qkv=False, slow_but_exact=False, transformers_version="4.20.0", use_cache=True,
    vocab_size=250880,
)  # fmt: skip
MPT_7B = dict(
    architectures=["MPTForCausalLM"],
    attn_config=dict(alibi=True, alibi_bias_max=8, attn_impl="torch", attn_pdrop=0, attn_type="multihead_attention",
                     attn_uses_sequence_id=False, clip_qkv=None, prefix_lm=False, qk_ln=False, softmax_scale=None),
    d_model=4096, emb_pdrop=0, embedding_fraction=1.0, expansion_ratio=4, init_config=dict(name="kaiming_normal_"),
    init_device="cpu", learned_pos_emb=True, logit_scale=None, max_seq_len=2048, model_type="mpt", n_heads=32,
    n_layers=32, no_bias=True, norm_type="low_precision_layernorm", resid_pdrop=0,
    tokenizer_name="EleutherAI/gpt-neox-20b", torch_dtype="bfloat16", transformers_version="4.28.1", use_cache=False,
    verbose=0, vocab_size=50432,
)  # fmt: skip
PUBLISHED = dict(
    llama=LLAMA_31_8B, qwen2=QWEN_25, olmo2=OLMO_2_7B, gemma2=GEMMA_2, gemma3_text=GEMMA_3, phi3=PHI_3_128K,
    gpt_oss=GPT_OSS_20B, bloom=BLOOM_560M, mpt=MPT_7B,
) | published.PUBLISHED  # fmt: skip


LLAMA_4_SCOUT = dict(
    rope_type="llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=8192
)
HARMLESS_IN = {  # of published models -> a value that would ask for something else
    "SmolLM 2": ("llama", dict(is_llama_config=True, rope_interleaved=False), dict(rope_interleaved=True)),
    "SmolLM 2 Instruct": ("llama", {"transformers.js_config": dict(kv_cache_dtype=dict(fp16="float16"))}, {}),
    "Falcon 3": ("llama", dict(activation="swiglu"), dict(activation="relu")),
    "Vicuna": ("llama", dict(max_sequence_length=4096), {}),
    "Qwen 2.5 0.5B": ("qwen2", dict(use_mrope=False), dict(use_mrope=True)),
    "BERT, multilingual": (
        "bert",
        dict(directionality="bidi", pooler_fc_size=768, pooler_num_attention_heads=12, pooler_num_fc_layers=3,
             pooler_size_per_head=128, pooler_type="first_token_transform"),
        {},
    ),
    "Gemma 2 9B": ("gemma2", dict(sliding_window_size=4096), dict(sliding_window_size=512)),
    "Qwen3 Coder": (
        "qwen3_moe", dict(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0), dict(qkv_bias=True)
    ),
    "Dolly 2": ("gpt_neox", dict(custom_pipelines={"text-generation": dict(impl="x.Y")}), {}),
    "GPT2 Medium": ("gpt2", dict(n_special=0, predict_special_tokens=True), {}),
    "StarCoder2 7B": (
        "starcoder2",
        dict(scale_attn_weights=True, activation_function="gelu", attention_softmax_in_fp32=True,
             scale_attention_softmax_in_fp32=True),
        dict(scale_attn_weights=False),
    ),
    "DistilGPT2": ("gpt2", dict(_num_labels=1), {}),
    "StableLM 3B": (
        "stablelm", dict(num_heads=32, rope_pct=0.25, norm_eps=1e-05, rotary_scaling_factor=1.0), dict(rope_pct=0.5)
    ),
    "LongChat": ("llama", dict(rope_condense_ratio=1), dict(rope_condense_ratio=8)),
    "LLaVA's Vicuna": ("llama", dict(tokenizer_model_max_length=4096, tokenizer_padding_side="right"), {}),
    "another dropout": ("olmoe", dict(residual_dropout=0.1, mlp_dropout=0.0, router_z_loss_coef=0.001), {}),
    "ALLaM": ("llama", dict(internal_version="7b-alpha-v2.33.0.30"), {}),
    "Llama with causal attention": ("llama", dict(is_causal=True), {}),
    "Jina code embeddings": ("qwen2", dict(matryoshka_dims=[64], prompt_names=["q"], task_names=["nl2code"]), {}),
    "GPT-Neo with causal attention": ("gpt_neo", dict(is_causal=True), dict(is_causal=False)),
    "gte-Qwen2": ("qwen2", dict(is_causal=True), dict(is_causal=0)),
    "CodeQwen 1.5": (
        "qwen2", dict(rotary_emb_base=1000000, seq_length=65536, use_flash_attn=True), dict(rotary_emb_base=10000)
    ),
    "Qwen3-30B": ("qwen3_moe", dict(layer_types=["full_attention"] * 48), dict(layer_types=["sliding_attention"] * 48)),
    "Phi 1": ("phi", dict(attention_bias=False, rotary_dim=32), dict(rotary_dim=16)),
    "Dolphin 2.6 Phi 2": ("phi", dict(flash_attn=False, flash_rotary=False, fused_dense=False), {}),
    "Phi-mini-MoE": ("phimoe", dict(expert_dropout=0.0), {}),
    "Falcon 2": ("falcon", dict(ff_factor=4), dict(ff_factor=3)),
    "GPT-NeoX 20B": (
        "gpt_neox", dict(masked_softmax_fusion=True, attention_probs_dropout_prob=0, hidden_dropout_prob=0), {}
    ),
    "Pythia, saved by transformers 4.46": (
        "gpt_neox", dict(partial_rotary_factor=0.25, rope_theta=10000), dict(rope_theta=500)
    ),
    "Galactica": ("opt", dict(learned_embeddings=True, scale_embeddings=False), dict(scale_embeddings=True)),
    "KoGPT 2": ("gpt2", dict(author="A. Name", created_date="2021-04-28", license="CC-BY-NC-SA 4.0"), {}),
    "GPT-J": ("gptj", dict(n_ctx=2048, n_special=0, predict_special_tokens=True), {}),
    "Command A": ("cohere2", dict(use_parallel_embedding=True, use_qk_norm=False), dict(use_qk_norm=True)),
    "Command R7B, saved by transformers 4.53": (
        "cohere2", dict(_sliding_window_pattern=4), dict(_sliding_window_pattern=2)
    ),
    "Minitron": ("nemotron", dict(kv_channels=128, rope_percent=0.5), dict(kv_channels=64)),
    "MS MARCO MiniLM": (
        "bert", dict(sbert_ce_default_activation_function="torch.nn.modules.linear.Identity",
                     sentence_transformers=dict(activation_fn="torch.nn.modules.linear.Identity", version="4.1")), {}
    ),
    "TinyBERT": ("bert", dict(cell={}, emb_size=312, pre_trained="", structure=[], training=""), {}),
    "Legal BERT": ("bert", dict(eos_token_ids=0), {}),
    "RoBERTa for SQuAD": ("roberta", dict(language="english", name="Roberta"), {}),
    "mmBERT": ("modernbert", dict(mask_token_id=4, position_embedding_type="sans_pos"), {}),
    "Ettin": ("modernbert", dict(causal_mask=False, is_causal=False), dict(causal_mask=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS_IN)
def test_keys_of_published_models_that_change_nothing_are_taken(name):
    family, keys, other = HARMLESS_IN[name]
    assert models.config_of(PUBLISHED[family] | keys) == models.config_of(PUBLISHED[family])
    if other:
        with pytest.raises((ValueError, UnsupportedError), match=next(iter(other))):
            models.config_of(PUBLISHED[family] | other)


def test_the_keys_of_ernie_granite_moe_eurobert_and_distilbart_that_change_nothing_are_taken():
    no_effect = {
        "ernie4_5": (dict(use_rmsnorm=True, compression_ratio=1.0), dict(use_rmsnorm=False)),
        "ernie4_5_moe": (dict(use_rmsnorm=True, num_nextn_predict_layers=1), dict(compression_ratio=2.0)),
        "granitemoe": (dict(position_embedding_type="rope"), dict(position_embedding_type="nope")),
        "eurobert": (dict(bos_token="<s>", eos_token="</s>", pad_token="</s>"), dict(is_causal=True)),
        "bart": (
            dict(save_step=58, replacing_rate=0, student_decoder_layers=None, kobart_version=2.0,
                 do_blenderbot_90_layernorm=False),
            dict(do_blenderbot_90_layernorm=True),
        ),
    }  # fmt: skip
    for family, (keys, other) in no_effect.items():
        plain = examples.ALL[family]
        assert models.config_of(plain | keys) == models.config_of(plain)
        with pytest.raises(UnsupportedError, match=next(iter(other))):
            models.config_of(plain | other)


def test_llama_1_has_no_length_and_takes_that_of_transformers():
    first = {key: value for key, value in LLAMA_31_8B.items() if key not in ("max_position_embeddings", "rope_scaling")}
    assert models.config_of(first | dict(max_sequence_length=2048, pad_token_id=-1)).max_positions == 2048


def test_dual_chunk_attention_limits_requests_to_the_first_chunk():
    chunks = dict(chunk_size=262144, local_size=8192, original_max_position_embeddings=262144)
    for family in ("qwen2", "qwen3_moe"):
        long = PUBLISHED[family] | dict(max_position_embeddings=1010000)
        config = models.config_of(long | dict(dual_chunk_attention_config=chunks))
        assert config.max_positions == 262144 - 8192
        assert config.layers == models.config_of(long).layers
        for wrong in (dict(chunk_size=4096), dict(sparse_attention_enabled=True)):
            with pytest.raises((ValueError, UnsupportedError), match="chunk_size|sparse_attention"):
                models.config_of(long | dict(dual_chunk_attention_config=chunks | wrong))


def test_deepseeks_qwen_3_multiplies_yarns_magnitude_to_1():
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768)
    scaling = lambda **more: models.config_of(QWEN_25 | dict(rope_scaling=yarn | more)).layers[0].rope.scaling
    assert scaling().attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert scaling(attn_factor=0.8782488562869419).attention_factor == pytest.approx(1)
    assert scaling(attn_factor=2.0, attention_factor=3.0).attention_factor == 6
    assert scaling(finetuned=True, extrapolation_factor=1.0) == scaling()
    with pytest.raises(UnsupportedError, match="extrapolation_factor"):
        models.config_of(QWEN_25 | dict(rope_scaling=yarn | dict(extrapolation_factor=0.5)))


@pytest.mark.parametrize(
    ("scaling", "same"),
    [
        (dict(type="linear", factor=2, original_max_position_embeddings=4096), dict(rope_type="linear", factor=2.0)),
        (dict(rope_type="default", factor=1.0), None),
        (dict(type="default"), None),
        ({}, None),
    ],
)
def test_rope_scaling_with_more_keys_than_its_type_has(scaling, same):
    values = PUBLISHED["qwen2"]
    assert models.config_of(values | dict(rope_scaling=scaling)) == models.config_of(values | dict(rope_scaling=same))


def test_phi_3_5_moe_has_a_magnitude_for_short_and_one_for_long_requests():
    scaling = dict(
        long_factor=[2.0] * 64, short_factor=[1.0] * 64, type="longrope", long_mscale=1.5, short_mscale=1.25,
        original_max_position_embeddings=4096,
    )  # fmt: skip
    read = lambda **more: models.config_of(
        PUBLISHED["phimoe"] | dict(max_position_embeddings=131072, rope_scaling=scaling | more)
    )
    config = read()
    found = config.layers[0].rope.scaling
    assert (found.magnitude, found.long_magnitude, found.trained_length) == (1.25, 1.5, 4096)
    assert config.rope_variant(4096) != config.rope_variant(4097) and config.max_positions == 131072
    with pytest.raises(ValueError, match="has no 'long_mscale'"):
        read(long_mscale=None)
    with pytest.raises(ValueError, match="short_mscale=0 must be"):
        read(short_mscale=0)
    with pytest.raises(UnsupportedError, match="attention_factor"):
        read(attention_factor=1.5)


def test_a_config_without_model_type_says_so():
    with pytest.raises(UnsupportedError, match="has no model_type"):
        models.config_of({key: value for key, value in PUBLISHED["bert"].items() if key != "model_type"})


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("bert", dict(position_embedding_type="alibi"), "jina-embeddings-v2.*use bge-m3"),
        ("xlm-roberta", dict(position_embedding_type="rotary"), "jina-embeddings-v3.*use bge-m3"),
        (
            "bert",
            dict(position_embedding_type="relative_key"),
            "'relative_key' is not supported; it must be 'absolute'",
        ),
        ("bert", dict(model_type="new", auto_map={}), "model_type='new' .* never run; use gte-modernbert-base"),
        ("llama", dict(model_type="llama_bidirec"), "set model_type to 'llama' and is_causal to false"),
    ],
)
def test_models_of_code_in_their_folders_are_refused_and_say_what_to_use(family, keys, words):
    with pytest.raises(UnsupportedError, match=words):
        models.config_of(PUBLISHED[family] | keys)


GPTQ = dict(quant_method="gptq", bits=4, group_size=128, desc_act=False, sym=True)
AWQ = dict(quant_method="awq", bits=4, group_size=128, version="gemm", zero_point=True)
GROUP = dict(num_bits=4, group_size=128, strategy="group", symmetric=True, type="int")
PACKED = dict(
    quant_method="compressed-tensors", format="pack-quantized", config_groups=dict(group_0=dict(weights=GROUP))
)
QUANTISED = {  # -> keys that change nothing, and one with a value that would
    "transformers 4.33": (GPTQ, dict(disable_exllama=False, use_cuda_fp16=True, dataset="c4"), {}),
    "AutoRound as GPTQ": (
        GPTQ,
        dict(amp=True, autoround_version="0.3.1", data_type="int", enable_minmax_tuning=True,
             enable_norm_bias_tuning=False, enable_quanted_input=True, gradient_accumulate_steps=1, iters=512,
             low_gpu_mem_usage=False, lr=0.00195, minmax_lr=0.00195, nsamples=512, scale_dtype="torch.float16",
             seqlen=2048, train_bs=8),
        dict(data_type="mx_fp"),
    ),
    "GPTQModel": (
        GPTQ,
        dict(act_group_aware=True, checkpoint_format="gptq", dynamic={"-:.*gate": {}}, format="gptq", hyb_act=False,
             lm_head=False, meta={}, method="gptq", pack_dtype="int32"),
        dict(dynamic={"+:.*gate": dict(bits=8)}),
    ),
    "AWQ by GPTQModel": (
        AWQ, dict(checkpoint_format="gemm", desc_act=False, format="gemm", lm_head=False, meta={}, method="awq",
                  pack_dtype="int32", sym=True), dict(format="gemv"),
    ),
    "LLM Compressor 0.6": (
        PACKED, dict(sparsity_config=dict(format="dense", global_sparsity=0.14, sparsity_structure="unstructured")),
        dict(sparsity_config=dict(format="sparse-24-bitmask")),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_settings_of_the_making_of_quantised_weights_are_taken(name):
    plain, keys, other = QUANTISED[name]
    taken = lambda settings: models.config_of(LLAMA_31_8B | dict(quantization_config=settings))
    assert taken(plain | keys) == taken(plain)
    if other:
        with pytest.raises(UnsupportedError, match=next(iter(other))):
            taken(plain | keys | other)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (dict(quantization=dict(group_size=64, bits=4)), "for MLX"),
        (dict(quantization=dict(bits=4), quantization_config=dict(group_size=64, bits=4)), "for MLX"),
        (dict(quantization_config=dict(quant_algo="INT4_AWQ", producer=dict(name="modelopt"))), "INT4_AWQ"),
        *(
            (dict(quantization_config=dict(quant_method=name, bits=4)), f"quant_method='{name}' is not supported")
            for name in ("bitsandbytes", "hqq", "torchao", "exl2", "aqlm", "quip", "quark", "vptq")
        ),
        (
            dict(quantization_config=PACKED | dict(config_groups=dict(g=dict(weights=GROUP | dict(actorder="group"))))),
            "actorder",
        ),
    ],
)
def test_quantised_folders_that_are_refused_say_what_to_use(keys, why):
    with pytest.raises(UnsupportedError, match=f"{why}.*a folder that is not quantised"):
        models.config_of(LLAMA_31_8B | keys)


def test_hunyuans_keys_of_other_models_are_taken():
    keys = dict(
        add_classification_head=False, attention_head_dim=128, cla_share_factor=2, class_num=0, dense_list=[4096, 0],
        im_end_id=5, im_newline_id=11, im_start_id=4, mask_init_id=12, mlp_bias=False, norm_type="rms", num_experts=1,
        org_vocab_size=128167, pad_id=127961, pool_type="last", sep_token_id=127962, text_end_id=7, text_start_id=6,
        enable_lm_head_fp32=True,
    )  # fmt: skip
    plain = options.FAMILIES["hunyuan_v1_dense"].config() | dict(head_dim=128)
    assert models.config_of(plain | keys) == models.config_of(plain)
    for other in (dict(attention_head_dim=64), dict(num_experts=2), dict(norm_type="layer"), dict(use_cla=True)):
        with pytest.raises((ValueError, UnsupportedError), match=next(iter(other))):
            models.config_of(plain | keys | other)


def test_llama_4_scouts_frequencies_have_no_ramp():
    values = options.COMMON | dict(model_type="llama", rope_scaling=LLAMA_4_SCOUT)
    assert models.config_of(values).layers[0].rope.scaling.high_freq_factor == 1.0


def test_phi_4_turns_three_quarters_of_a_head_by_its_requests_final_length():
    config = models.config_of(PHI_4_MINI)
    assert config.layers[0].rope.dim == 96 and config.max_positions == 131072 and config.tied_embeddings
    assert config.rope_depends_on_length
    assert [config.rope_variant(length) for length in (1, 4096, 4097, 131072)] == [(0,), (0,), (1,), (1,)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_key_of_a_published_config_is_read_or_known(name):
    config = models.config_of(PUBLISHED[name])
    assert config.family in (name, f"{name}_text")
    assert hash(config) == hash(models.config_of(PUBLISHED[name]))
    assert sum(len(group.layers) for group in config.cache_groups) == config.num_own_caches


def of(name: str):
    config = models.config_of(PUBLISHED[name])
    return config, config.layers[0]


def test_llama_has_several_ends_and_its_own_scaling():
    config, layer = of("llama")
    assert config.eos_token_ids == (128001, 128008, 128009) and isinstance(layer.rope.scaling, Llama3RopeScaling)
    assert layer.attention.num_kv_heads == 8 and layer.attention.head_dim == 128


def test_qwens_window_is_switched_off_and_its_head_tied():
    config, layer = of("qwen2")
    assert layer.attention.sliding_window is None and config.tied_embeddings and layer.self_attn.qkv_bias


def test_gemmas_alternate_windows_by_their_own_rule():
    for name, every in (("gemma2", 2), ("gemma3_text", 6)):
        config, _ = of(name)
        full = [i for i, layer in enumerate(config.layers) if layer.attention.sliding_window is None]
        assert full == list(range(every - 1, 26, every)) and config.tied_embeddings
    third, _ = of("gemma3_text")
    assert {layer.rope.theta for layer in third.layers} == {10000.0, 1000000.0}
    assert third.cache_groups[0].sliding_window == 512 and third.cache_groups[1].sliding_window is None


def test_phi_stretches_and_gpt_oss_warms():
    _, phi = of("phi3")
    assert isinstance(phi.rope.scaling, LongRopeScaling) and phi.rope.scaling.trained_length == 4096
    assert abs(phi.rope.scaling.attention_factor - 1.19) < 0.01
    config, layer = of("gpt_oss")
    assert (
        isinstance(layer.rope.scaling, YarnRopeScaling)
        and layer.attention.has_sinks
        and layer.mlp.clamp == (1.702, 7.0)
    )
    assert [group.sliding_window for group in config.cache_groups] == [128, None]


def test_alibi_models_have_no_positions_and_no_limit():
    for name in ("bloom", "mpt"):
        config, layer = of(name)
        assert layer.rope is None and layer.attention.has_alibi and config.max_positions is None


def test_a_robertas_positions_begin_after_its_padding():
    for name, longest in (("roberta", 512), ("xlm-roberta", 8192)):
        config, _ = of(name)
        assert config.max_positions == config.learned_positions == longest and config.token_types == 1


def test_modernberts_layers_see_64_tokens_on_each_side_except_every_third():
    config, first = of("modernbert")
    wide = [i for i, layer in enumerate(config.layers) if layer.attention.sliding_window is None]
    assert wide == list(range(0, 22, 3)) and config.layers[1].attention.sliding_window == (64, 64)
    assert (first.rope.theta, config.layers[1].rope.theta) == (160000.0, 10000.0)
    assert first.attn_norms.before is None and config.layers[1].attn_norms.before is not None


def test_nomics_own_keys_mean_what_the_usual_ones_mean():
    old = PUBLISHED["nomic_bert"]
    usual = dict(
        model_type="nomic_bert", hidden_size=768, num_attention_heads=12, num_hidden_layers=12, intermediate_size=3072,
        max_position_embeddings=8192, layer_norm_eps=1e-12, hidden_act="silu", vocab_size=30528, type_vocab_size=2,
        rope_parameters=dict(rope_type="default", rope_theta=1000.0), bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    assert models.config_of(old) == models.config_of(usual)
    stretched = models.config_of(old | dict(rotary_scaling_factor=2.0))
    assert stretched.layers[0].rope.scaling == DynamicNTKRopeScaling(factor=2.0, trained_length=2048)
    assert stretched.max_positions == 8192


def test_deepseeks_attention_is_latent_and_its_logits_scaled_by_yarn():
    config, layer = of("deepseek_v3")
    spec, magnitude = layer.attention, 0.1 * math.log(40) + 1
    assert (spec.num_heads, spec.q_lora_rank, spec.head_dim, spec.qk_head_dim) == (128, 1536, 576, 192)
    assert spec.scale == pytest.approx(192**-0.5 * magnitude**2) and layer.rope.interleaved
    assert layer.rope.scaling.attention_factor == 1
    experts = [isinstance(each.mlp, models.MoE) for each in config.layers]
    assert experts == [False] * 3 + [True] * 58
    (group,), (one, *_) = config.cache_groups, config.cache_specs(1, 64, "bfloat16")
    assert len(group.layers) == 61 and one.bytes_per_block == 64 * 576 * 2
    assert of("deepseek_v2")[1].attention.q_lora_rank is None and of("kimi_k2")[1].mlp.width == 18432


def test_gemma_3ns_last_15_layers_read_the_caches_of_two_others():
    config, last = of("gemma3n")[0], of("gemma3n")[0].layers[-1]
    assert config.num_own_caches == len(config.cache_specs(1, 16, "bfloat16")) == 20
    assert {layer.kv_from for layer in config.layers[20:]} == {18, 19} and last.kv_from == 19
    assert [group.sliding_window for group in config.cache_groups] == [512, None]
    assert [layer.mlp.sparsity for layer in config.layers[9:11]] == [0.95, 0] and config.altup.streams == 4


def test_longcats_experts_run_beside_every_second_layer():
    config, first = of("longcat_flash")
    assert len(config.layers) == 56 and [layer.is_late for layer in config.layers[:3]] == [True, False, True]
    assert (first.moe.num_experts, first.moe.num_routes, first.self_attn.kv_factor) == (512, 768, 12**0.5)
    assert first.attention.scale == pytest.approx(192**-0.5 * 2)


@pytest.mark.parametrize(
    ("by_layer", "sizes"),
    [
        ({"05": dict(head_dim=16), "11": dict(head_dim=16, num_key_value_heads=None)}, (16, 2)),
        ({"5": dict(head_dim=16, num_key_value_heads=1), "11": dict(head_dim=16, num_key_value_heads=1)}, (16, 1)),
        ({}, (8, 2)),
        (None, (8, 2)),
    ],
    ids=["padded", "plain", "empty", "null"],
)
def test_the_numbers_of_layers_in_per_layer_config_are_padded_or_not_and_an_empty_one_changes_no_layer(by_layer, sizes):
    values = options.FAMILIES["gemma4_text"].config() | dict(num_hidden_layers=12, head_dim=8)
    del values["global_head_dim"]
    specs = [layer.attention for layer in models.config_of(values | dict(per_layer_config=by_layer)).layers]
    assert (specs[5].head_dim, specs[5].num_kv_heads) == (specs[11].head_dim, specs[11].num_kv_heads) == sizes
    assert (specs[4].head_dim, specs[4].num_kv_heads) == (8, 2)


@pytest.mark.parametrize("most", [8, 16])
def test_the_slopes_of_mpt_follow_alibi_bias_max(most):
    """As in MosaicML's code; transformers takes 8 in any case."""
    config = models.config_of(MPT_7B | dict(attn_config=MPT_7B["attn_config"] | dict(alibi_bias_max=most)))
    attn = config.layers[0].self_attn
    assert isinstance(attn, AttentionConfig) and attn.alibi_slopes is not None
    assert attn.alibi_slopes[-1] == 2.0**-most
