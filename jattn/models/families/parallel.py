"""Families whose attention and MLP read the same input (a parallel residual), and others with layer norms and rope.

GPT-NeoX, GPT-J, Phi 1 and 2, StableLM, Cohere (Command R), Falcon; StarCoder 2, Nemotron.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.config_reader import ConfigReader
from jattn.models.families.family import Family
from jattn.models.families.shared import (
    LLAMA_NAMES,
    MAX_HEADS,
    UNUSED,
    attention_biases,
    default_head_dim,
    equal_heads,
    heads_of,
    layer_norm,
    no_windows,
    plain_mlp,
    rope_decoder,
    same_window,
    windows_by_type,
)
from jattn.models.mlp import ACTIVATIONS, MLP
from jattn.models.residual import ResidualNorms
from jattn.models.rope_config import rope_of
from jattn.models.tensor_names import named_tensors
from jattn.nn import Norm, Rope

NO_NORM = ResidualNorms()
"""The norms of an MLP that reads the normalised input of attention."""


def gpt_neox(c: ConfigReader) -> ModelConfig:
    """use_parallel_residual may be false; each sublayer has a norm of its own."""
    bias = c.flag("attention_bias", True)
    c.ignore("masked_softmax_fusion")  # of the 20B
    return rope_decoder(
        c,
        mlp=plain_mlp(c, default="gelu"),
        windows=no_windows,
        norm=layer_norm(c),
        heads=equal_heads(c),
        parallel=c.flag("use_parallel_residual", True),
        rope_options=dict(partial=True),
        qkv_bias=bias,
        out_bias=bias,
    )


def gptj(c: ConfigReader) -> ModelConfig:
    """One norm for both sublayers; neighbouring pairs of rotary_dim dimensions are rotated."""
    c.only("rotary", True)
    c.only("scale_attn_weights", True)
    c.ignore(*GPT2_UNUSED_KEYS)
    heads, hidden = equal_heads(c), c.count("hidden_size")
    dim = c.count("rotary_dim", None, high=MAX_HEADS)
    if dim is None or dim % 2 or dim > heads["head_dim"]:
        c.refuse("rotary_dim", f"must be an even number up to the head size, {heads['head_dim']}")
    rope = Rope(dim=dim, theta=10000.0, interleaved=True)
    return rope_decoder(
        c,
        mlp=inner_mlp(c, hidden),
        windows=no_windows,
        norm=layer_norm(c, "layer_norm_epsilon"),
        heads=heads,
        mlp_norms=NO_NORM,
        parallel=True,
        ropes=lambda index, window: rope,
        model=dict(head_bias=True),
    )


def inner_mlp(c: ConfigReader, hidden: int) -> MLP:
    """The plain MLP of GPT-2 and GPT-J; its width is n_inner, or four times the hidden size."""
    act = c.choice("activation_function", ACTIVATIONS, "gelu_new")
    return MLP(width=c.count("n_inner", 4 * hidden), activation=act, gated=False, bias=True)


GPT2_UNUSED_KEYS = (
    "n_ctx", "n_special", "predict_special_tokens", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout",
)  # fmt: skip
"""Keys of classification heads and of the first releases, which have no effect here."""


def phi(c: ConfigReader) -> ModelConfig:
    """One norm for both sublayers; layer norms of q and k are optional; every projection has a bias."""
    norm, size = layer_norm(c), heads_of(c)["head_dim"]
    c.ignore("attention_bias", "flash_rotary", "fused_dense")  # transformers does not use them
    rope = rope_of(c, size, c.count("max_position_embeddings"), partial=True)
    c.only("rotary_dim", rope.dim)  # of Phi 1
    return rope_decoder(
        c,
        mlp=plain_mlp(c),
        windows=no_windows,
        norm=norm,
        mlp_norms=NO_NORM,
        parallel=True,
        ropes=lambda index, window: rope,
        model=dict(head_bias=True),
        qk_norm=norm if c.flag("qk_layernorm", False) else None,
        qkv_bias=True,
        out_bias=True,
    )


def stablelm(c: ConfigReader) -> ModelConfig:
    """A parallel residual shares the norm; layer norms of q and k have scales of their own for each head."""
    c.only("rotary_scaling_factor", 1.0, 1)
    norm, parallel, normed = layer_norm(c), c.flag("use_parallel_residual", False), c.flag("qk_layernorm", False)
    qk_norm = layer_norm(c, has_bias=False) if normed else None
    return rope_decoder(
        c,
        windows=no_windows,
        norm=norm,
        mlp_norms=NO_NORM if parallel else None,
        parallel=parallel,
        rope_options=dict(partial=True),
        qk_norm=qk_norm,
        qk_norm_scale_per_head=normed,
        qkv_bias=c.flag("use_qkv_bias", False),
    )


def cohere(c: ConfigReader) -> ModelConfig:
    """Layer norms without bias, one for both sublayers; logits times logit_scale; optional norms of q and k."""
    normed = c.flag("use_qk_norm", False)
    norm = layer_norm(c, has_bias=False)
    return rope_decoder(
        c,
        windows=no_windows,
        rope_options=dict(interleaved=True),
        qk_norm=norm if normed else None,
        qk_norm_scale_per_head=normed,
        **shared_input(c, norm),
    )


def cohere2(c: ConfigReader) -> ModelConfig:
    """Cohere with windows in three of four layers; the others have no positions."""
    for name in ("use_gated_activation", "use_parallel_block"):
        c.only(name, True)
    c.only("use_qk_norm", False)
    c.ignore("use_parallel_embedding")  # of the training's devices
    c.only("rotary_pct", 1, 1.0)
    c.only("position_embedding_type", "rope_gptj")
    c.only("order_of_interleaved_layers", "local_attn_first")
    c.only("use_embedding_sharing", c.flag("tie_word_embeddings", True))
    c.only("head_dim", c.count("hidden_size") // c.count("num_attention_heads", high=MAX_HEADS))
    every = c.count("sliding_window_pattern", 4)
    c.only("layer_switch", every)
    rope = rope_of(c, heads_of(c)["head_dim"], c.count("max_position_embeddings"), interleaved=True)
    return rope_decoder(
        c,
        windows=lambda c, count: windows_by_type(c, count, [(index + 1) % every != 0 for index in range(count)]),
        ropes=lambda index, window: None if window is None else rope,
        **shared_input(c, layer_norm(c, has_bias=False)),
    )


def shared_input(c: ConfigReader, norm: Norm) -> dict[str, Any]:
    """Arguments of rope_decoder in both Cohere families."""
    model = dict(tied=True, logits_scale=c.number("logit_scale", 0.0625, above=0))
    return dict(norm=norm, mlp_norms=NO_NORM, parallel=True, model=model, **attention_biases(c))


def starcoder2(c: ConfigReader) -> ModelConfig:
    """Layer norms, a plain MLP, one key for all biases."""
    c.ignore("layer_norm_epsilon")  # norm_epsilon is the one
    c.ignore("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")  # of the 7B
    c.only("scale_attn_weights", True)
    bias = c.flag("use_bias", True)
    c.only("norm_type", "layer_norm")
    c.only("mlp_type", "default")
    return rope_decoder(
        c,
        mlp=plain_mlp(c, bias, "gelu_pytorch_tanh"),
        windows=same_window,
        norm=layer_norm(c, "norm_epsilon"),
        model=dict(tied=True),
        qkv_bias=bias,
        out_bias=bias,
    )


def nemotron(c: ConfigReader) -> ModelConfig:
    """Layer norms with scales stored minus 1; squared ReLU."""
    return rope_decoder(
        c,
        mlp=plain_mlp(c, c.flag("mlp_bias", False), "relu2"),
        windows=no_windows,
        norm=layer_norm(c, "norm_eps", one_plus=True),
        rope_options=dict(partial=True),
        **attention_biases(c),
    )


def falcon(c: ConfigReader) -> ModelConfig:
    """A parallel or sequential residual, with one norm or two, and any number of kv heads; ALiBi is refused."""
    heads, hidden = c.count("num_attention_heads", high=MAX_HEADS), c.count("hidden_size")
    new = c.flag("new_decoder_architecture", False)
    c.only("apply_residual_connection_post_layernorm", False)
    kv_heads, is_shared = c.count("num_key_value_heads", heads), c.flag("multi_query", True)
    if not new:
        kv_heads = 1 if is_shared else heads
    sizes = dict(num_heads=heads, num_kv_heads=kv_heads, head_dim=default_head_dim(c, "hidden_size", hidden, heads))
    if heads % kv_heads:
        c.refuse("num_key_value_heads", f"must divide num_attention_heads={heads}")
    parallel = c.flag("parallel_attn", True)
    norms = c.count("num_ln_in_parallel_attn", 2 if new else 1)
    if norms > 2 or (norms == 2 and not (new and parallel)) or (new and not parallel):
        c.refuse("num_ln_in_parallel_attn", "must be 1, or 2 with new_decoder_architecture, which needs parallel_attn")
    norm, bias = layer_norm(c, "layer_norm_epsilon"), c.flag("bias", False)
    width = c.count("ffn_hidden_size", 4 * hidden)
    c.only("ff_factor", width // hidden)  # of Falcon 2
    mlp = MLP(
        width=width,
        activation=c.choice("activation", ACTIVATIONS, "gelu"),
        gated=False,
        bias=bias,
    )
    c.only("alibi", False)  # transformers rounds its slopes to bfloat16
    return rope_decoder(
        c,
        mlp=mlp,
        windows=no_windows,
        norm=norm,
        heads=sizes,
        mlp_norms=NO_NORM if parallel and norms == 1 else None,
        parallel=parallel,
        model=dict(tied=True),
        qkv_bias=bias,
        out_bias=bias,
    )


def fused_qkv_rows(tensor: str) -> Callable[[LayerConfig], dict[str, Any]]:
    """q, k and v of one projection, whose outputs are [kv head, its q heads, then its k and its v, D]."""

    def rows(layer: LayerConfig) -> dict[str, Any]:
        spec = layer.attention
        group = spec.num_heads // spec.num_kv_heads
        parts = dict(q=slice(0, group), k=slice(group, group + 1), v=slice(group + 1, group + 2))

        def cut(part: slice) -> Callable[[np.ndarray], np.ndarray]:
            def make(x: np.ndarray) -> np.ndarray:
                y = x.reshape(spec.num_kv_heads, group + 2, spec.head_dim, *x.shape[1:])[:, part]
                return y.reshape(-1, *x.shape[1:]).T

            return make

        leaves = dict(kernel="weight", bias="bias")
        return {f"attn.{n}.{l}": (f"{tensor}.{t}", cut(part)) for n, part in parts.items() for l, t in leaves.items()}

    return rows


def falcon_rows(layer: LayerConfig) -> dict[str, Any]:
    """The rows of q, k and v, and of the norms of a parallel layer with two norms, which have other names."""
    own = {"attn_norm": "ln_attn", "mlp_norm": "ln_mlp"}
    has_two_norms = layer.parallel and not layer.shares_norm
    return fused_qkv_rows("self_attention.query_key_value")(layer) | (own if has_two_norms else {})


NORM_NAMES = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
MLP_NAMES = {"mlp.up": "mlp.dense_h_to_4h", "mlp.down": "mlp.dense_4h_to_h"}
GPT_NEOX_NAMES = {
    "embed": "gpt_neox.embed_in.weight", "final_norm": "gpt_neox.final_layer_norm", "head": "embed_out",
    "attn.o": "attention.dense", **NORM_NAMES, **MLP_NAMES,
}  # fmt: skip
GPTJ_NAMES = {
    "embed": "transformer.wte.weight", "final_norm": "transformer.ln_f", "head": "lm_head", "attn_norm": "ln_1",
    **{f"attn.{n}": f"attn.{n}_proj" for n in "qkv"}, "attn.o": "attn.out_proj", "mlp.up": "mlp.fc_in",
    "mlp.down": "mlp.fc_out",
}  # fmt: skip
PHI_NAMES = LLAMA_NAMES | {
    "final_norm": "model.final_layernorm", "attn.o": "self_attn.dense", "attn.q_norm": "self_attn.q_layernorm",
    "attn.k_norm": "self_attn.k_layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
}  # fmt: skip
STABLELM_NAMES = LLAMA_NAMES | {f"attn.{n}_norm": f"self_attn.{n}_layernorm.norms.{{e}}" for n in "qk"}
STARCODER2_NAMES = LLAMA_NAMES | {"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
FALCON_NAMES = {
    "embed": "transformer.word_embeddings.weight", "final_norm": "transformer.ln_f", "head": "lm_head",
    "attn.o": "self_attention.dense", **NORM_NAMES, **MLP_NAMES,
}  # fmt: skip
OLD_BUFFERS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "embed_positions")
"""Masks and tables of angles in old checkpoints."""
GPT2_KEYS = dict(
    hidden_size=("n_embd",), num_attention_heads=("n_head",), num_hidden_layers=("n_layer",),
    max_position_embeddings=("n_positions",),
)  # fmt: skip
GPT_NEOX = Family(
    gpt_neox, named_tensors(GPT_NEOX_NAMES, "gpt_neox.layers.{}.", fused_qkv_rows("attention.query_key_value")),
    (*UNUSED, *OLD_BUFFERS, "embed_out.weight"), prefix="gpt_neox.",
    # transformers 4.46 to 4.57 write both names of each.
    aliases=dict(
        rope_theta=("rotary_emb_base", "rope_theta"), partial_rotary_factor=("rotary_pct", "partial_rotary_factor")
    ),
    defaults=dict(rotary_emb_base=10000.0, rotary_pct=0.25, bos_token_id=0, eos_token_id=2),
)  # fmt: skip
GPTJ = Family(
    gptj, named_tensors(GPTJ_NAMES, "transformer.h.{}."), (*UNUSED, *OLD_BUFFERS), prefix="transformer.",
    aliases=GPT2_KEYS, defaults=dict(rotary_dim=64, bos_token_id=50256, eos_token_id=50256),
)  # fmt: skip
PHI = Family(
    phi, named_tensors(PHI_NAMES), UNUSED,
    defaults=dict(partial_rotary_factor=0.5, rope_theta=10000.0, bos_token_id=1, eos_token_id=2),
)  # fmt: skip
STABLELM = Family(
    stablelm, named_tensors(STABLELM_NAMES), UNUSED,
    aliases=dict(
        num_attention_heads=("num_attention_heads", "num_heads"), layer_norm_eps=("layer_norm_eps", "norm_eps"),
        partial_rotary_factor=("partial_rotary_factor", "rope_pct"),
    ),
    defaults=dict(
        num_key_value_heads=32, partial_rotary_factor=0.25, rope_theta=10000.0, bos_token_id=0, eos_token_id=0
    ),
)  # fmt: skip
COHERE_DEFAULTS = dict(rope_theta=500000.0, logit_scale=0.0625, bos_token_id=5, eos_token_id=255001, pad_token_id=0)
COHERE = Family(cohere, named_tensors(LLAMA_NAMES), UNUSED, defaults=COHERE_DEFAULTS)
COHERE2_DEFAULTS = COHERE_DEFAULTS | dict(sliding_window=4096, rope_theta=10000.0)
COHERE2 = Family(
    cohere2, named_tensors(LLAMA_NAMES), UNUSED, defaults=COHERE2_DEFAULTS,
    aliases=dict(sliding_window_pattern=("sliding_window_pattern", "_sliding_window_pattern")),
)  # fmt: skip
STARCODER2 = Family(
    starcoder2, named_tensors(STARCODER2_NAMES), UNUSED,
    defaults=dict(num_key_value_heads=2, rope_theta=10000.0, bos_token_id=50256, eos_token_id=50256),
)  # fmt: skip
NEMOTRON = Family(
    nemotron, named_tensors(LLAMA_NAMES), UNUSED,
    aliases=dict(
        head_dim=("head_dim", "kv_channels"),
        partial_rotary_factor=("partial_rotary_factor", "rope_percent", "rope_percentage"),
    ),
    defaults=dict(partial_rotary_factor=0.5, rope_theta=10000.0, bos_token_id=2, eos_token_id=3),
)  # fmt: skip
FALCON = Family(
    falcon, named_tensors(FALCON_NAMES, "transformer.h.{}.", falcon_rows), (*UNUSED, *OLD_BUFFERS),
    prefix="transformer.", aliases=dict(num_key_value_heads=("num_kv_heads",)),
    defaults=dict(rope_theta=10000.0, max_position_embeddings=2048, bos_token_id=11, eos_token_id=11),
)  # fmt: skip
