"""A tiny Llama folder made by hand: config.json and safetensors in transformers' names, without transformers."""

import json
import pathlib
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = dict(
    model_type="llama", vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=6, intermediate_size=20, rms_norm_eps=1e-5, max_position_embeddings=64,
    rope_theta=100.0, eos_token_id=2, hidden_act="silu",
)  # fmt: skip


def tensors(config: dict[str, Any] = CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of the model, [out, in] as torch stores them."""
    rng, c = np.random.default_rng(seed), config
    hidden, d, wide = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes = {"model.embed_tokens": (c["vocab_size"], hidden), "lm_head": (c["vocab_size"], hidden)}
    shapes |= {"model.norm": (hidden,)}
    for i in range(c["num_hidden_layers"]):
        parts = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
        parts |= {"self_attn.o_proj": (hidden, q), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
        parts |= {"mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}


def write(folder: pathlib.Path, config: dict[str, Any] = CONFIG, made: dict[str, np.ndarray] | None = None) -> None:
    """Write the folder with one file of tensors."""
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(config))
    made = tensors(config) if made is None else made
    save_file({name: np.ascontiguousarray(x) for name, x in made.items()}, folder / "model.safetensors")


def write_sharded(folder: pathlib.Path, config: dict[str, Any] = CONFIG) -> None:
    """Write the folder with two files of tensors and an index."""
    from safetensors.numpy import save_file

    (folder / "config.json").write_text(json.dumps(config))
    made = tensors(config)
    names = sorted(made)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, mine in parts.items():
        save_file({name: made[name] for name in mine}, folder / file)
    where = {name: file for file, mine in parts.items() for name in mine}
    (folder / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=where)))
