"""The reference where transformers is not installed: decoders over one whole sequence, in float64 numpy."""

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


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def clamped(gate: np.ndarray, up: np.ndarray, alpha: float, limit: float) -> np.ndarray:
    """The gated unit of gpt-oss."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-alpha * gate))


def expert(weights: dict, e: int, x: np.ndarray, clamp=None) -> np.ndarray:
    """One token x [hidden] through expert e."""
    dot = lambda name, y: y @ weights[name]["kernel"][e] + (weights[name]["bias"][e] if "bias" in weights[name] else 0)
    gate, up = dot("gate", x), dot("up", x)
    return dot("down", silu(gate) * up if clamp is None else clamped(gate, up, *clamp))


def routed(logits: np.ndarray, scores: str, top_k: int, *, correction=0.0, groups=1, top_groups=1, best=2) -> dict:
    """Expert -> weight of one token, before `normalised` and `factor`, in the words of DeepSeek-V3 and Qwen."""
    every = 1 / (1 + np.exp(-logits)) if scores == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
    ranks = every + correction
    size = len(ranks) // groups
    worth = [sorted(ranks[g * size : (g + 1) * size])[::-1][:best] for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: -sum(worth[g]))[:top_groups]
    allowed = [e for e in range(len(ranks)) if e // size in kept]
    return {e: every[e] for e in sorted(allowed, key=lambda e: -ranks[e])[:top_k]}


def moe(weights: dict, x: np.ndarray, top_k: int, *, sigmoid=False, clamp=None) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, expert by expert, as it is defined: ([L hidden], the experts of each token [L top_k]).

    The top_k experts of the largest router logits; softmax over those weighs what they give, or the sigmoid of each
    logit weighs what its expert gets. A shared expert is added where there is one.
    """
    out, visited = np.zeros_like(x), []
    for t, row in enumerate(x):
        logits = dense.project(weights["router"], row)
        chosen = sorted(range(len(logits)), key=lambda e: -logits[e])[:top_k]
        visited.append(chosen)
        for e in chosen:
            if sigmoid:
                out[t] += expert(weights, e, row / (1 + np.exp(-logits[e])), clamp)
            else:
                share = np.exp(logits[e]) / sum(np.exp(logits[other]) for other in chosen)
                out[t] += share * expert(weights, e, row, clamp)
    if "shared" in weights:
        shared = {n: weights["shared"][n]["kernel"] for n in ("gate", "up", "down")}
        out = out + (silu(x @ shared["gate"]) * (x @ shared["up"])) @ shared["down"]
    return out, np.array(visited)


def mixture_decoder(config: dict, params: dict, ids: np.ndarray, windows: list[int | None], clamp=None) -> np.ndarray:
    """Logits [len, vocab] of a decoder with experts, from our params in float64. windows: one per layer."""
    eps, heads, kv = config["rms_norm_eps"], config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim", config["hidden_size"] // heads)
    x, at = params["embed"][ids], np.arange(len(ids))
    for layer, window in zip(params["layers"], windows, strict=True):
        back = at[:, None] - at[None]
        seen = (back >= 0) & (back < (window or len(ids)))
        y = dense.rms(x, layer["attn_norm"]["scale"], eps)
        attn = layer["attn"]
        x = x + dense.layer(
            attn, y, heads, kv, seen=seen, theta=config["rope_theta"], dim=size, sinks=attn.get("sinks")
        )
        y = dense.rms(x, layer["mlp_norm"]["scale"], eps)
        x = x + moe(layer["mlp"], y, config["num_experts_per_tok"], clamp=clamp)[0]
    return dense.rms(x, params["final_norm"]["scale"], eps) @ params["head"]["kernel"]
