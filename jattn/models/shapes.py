"""What weights a model has: one tree of shapes and logical axes, which loading checks and sharding reads."""

from typing import Any

import jax

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.parts import PARTS, norms_of
from jattn.nn.weights import Weight, attention_weights, is_weight, linear_weights, norm_weights


def weights_of(config: ModelConfig) -> dict[str, Any]:
    """The tree of Weights; `params` of forward has the same structure."""
    hidden, vocab = config.hidden_size, config.vocab_size
    tree: dict[str, Any] = {
        "embed": Weight((vocab, hidden), ("vocab", "embed")),
        "layers": tuple(_layer(layer, hidden) for layer in config.layers),
    }
    if config.token_types:
        tree["token_types"] = Weight((config.token_types, hidden), (None, "embed"))
    if config.learned_positions:
        tree["positions"] = Weight((config.learned_positions, hidden), (None, "embed"))
    tree |= norm_weights(hidden, "embed", embedding_norm=config.embedding_norm, final_norm=config.final_norm)
    head = {} if config.tied_embeddings else {"kernel": Weight((hidden, vocab), ("embed", "vocab"))}
    if config.head_transform is not None:
        head |= {"transform": linear_weights(hidden, hidden, ("embed", None), bias=True)}
    head |= {"bias": Weight((vocab,), ("vocab",), 0.0)} if config.head_bias else {}
    if config.encoder is not None:  # both halves share one table of tokens
        tree["encoder"] = {name: part for name, part in weights_of(config.encoder).items() if name != "embed"}
    return tree | ({"head": head} if head else {})


def init_params(config: ModelConfig, key: "jax.Array | int" = 0, dtype: Any = "float32") -> dict[str, Any]:
    """Random weights of this model: for tests, benchmarks, and training from the start."""
    key = jax.random.key(key) if isinstance(key, int) else key
    weights, structure = jax.tree.flatten(weights_of(config), is_leaf=is_weight)
    keys = jax.random.split(key, len(weights))
    return jax.tree.unflatten(structure, [w.draw(k, dtype) for w, k in zip(weights, keys, strict=True)])


def logical_axes(config: ModelConfig) -> dict[str, Any]:
    """The same tree with each array's logical axis names: 'vocab', 'embed', 'heads', 'kv_heads', 'mlp', 'expert'."""
    return jax.tree.map(lambda weight: weight.axes, weights_of(config), is_leaf=is_weight)


def _layer(layer: LayerConfig, hidden: int) -> dict[str, Any]:
    tree = {"attn": attention_weights(layer.mixer), "mlp": layer.mlp.weights(hidden)}
    tree |= norm_weights(hidden, "embed", **{name: norm for part in PARTS for name, norm in norms_of(layer, part)})
    return tree if layer.cross is None else tree | {"cross": attention_weights(layer.cross)}
