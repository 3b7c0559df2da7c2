"""The witness without transformers: a Llama written out over one whole sequence in float64 numpy."""

import numpy as np

from tests.nn import dense


def llama(config: dict, made: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits [len, vocab] from tensors in transformers' names."""
    get = lambda name: np.asarray(made[f"{name}.weight"], np.float64)
    eps, d = config["rms_norm_eps"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    x, at = get("model.embed_tokens")[ids], np.arange(len(ids))
    for i in range(config["num_hidden_layers"]):
        part = lambda name, i=i: get(f"model.layers.{i}.{name}")
        weights = {n: {"kernel": part(f"self_attn.{n}_proj").T} for n in "qkvo"}
        y = dense.rms(x, part("input_layernorm"), eps)
        x = x + dense.layer(weights, y, heads, kv, seen=at[None] <= at[:, None], theta=config["rope_theta"], dim=d)
        y = dense.rms(x, part("post_attention_layernorm"), eps)
        gate = y @ part("mlp.gate_proj").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ part("mlp.up_proj").T)) @ part("mlp.down_proj").T
    return dense.rms(x, get("model.norm"), eps) @ get("lm_head").T
