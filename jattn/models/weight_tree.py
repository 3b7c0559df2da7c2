"""params of a model: the tree of its WeightSpecs, random initial values, and logical axes for sharding."""

from typing import Any

import jax

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.residual import norm_weight_specs
from jattn.nn.weight_spec import WeightSpec, is_weight_spec, linear_weight_specs, weight_path


def weight_specs(config: ModelConfig) -> dict[str, Any]:
    """The tree of WeightSpecs; `params` of forward has the same structure."""
    hidden, vocab, width = config.hidden_size, config.vocab_size, config.embedding_width
    tree: dict[str, Any] = {
        "embed": WeightSpec((vocab, width), ("vocab", "embed")),
        "layers": tuple(layer_weight_specs(layer, hidden) for layer in config.layers),
    }
    if config.token_types:
        tree["token_types"] = WeightSpec((config.token_types, width), (None, "embed"))
    if config.task_types:
        tree["task_types"] = WeightSpec((config.task_types, width), (None, "embed"))
    if config.learned_positions:
        tree["positions"] = WeightSpec((config.learned_positions, width), (None, "embed"))
    if config.embedding_size is not None:
        tree["embedding_projection"] = linear_weight_specs(width, hidden, ("embed", None), True)
    if config.layer_inputs is not None:
        tree["layer_inputs"] = config.layer_inputs.weight_specs(hidden, len(config.layers))
    if config.altup is not None:
        tree["altup"] = config.altup.model_weight_specs(hidden)
    tree |= norm_weight_specs(width, {"embedding_norm": config.embedding_norm})
    tree |= norm_weight_specs(hidden, {"final_norm": config.final_norm})
    kernel = config.has_head and not config.tied_embeddings
    head: dict[str, Any] = {} if not kernel else {"kernel": WeightSpec((hidden, vocab), ("embed", "vocab"))}
    if config.head_transform is not None:
        transform = config.head_transform
        head |= {"transform": linear_weight_specs(hidden, width, ("embed", None), transform.bias)}
        head |= norm_weight_specs(width, {"transform_norm": transform.norm})
    head |= {"bias": WeightSpec((vocab,), ("vocab",), 0.0)} if config.head_bias else {}
    if config.encoder is not None:  # encoder and decoder share the token embeddings
        tree["encoder"] = {name: part for name, part in weight_specs(config.encoder).items() if name != "embed"}
    return tree | ({"head": head} if head else {})


def weight_paths(specs: dict[str, Any]) -> dict[str, WeightSpec]:
    """The WeightSpecs of a tree by their paths, as "layers.0.attn.q.kernel"."""
    return {weight_path(path): spec for path, spec in jax.tree.leaves_with_path(specs, is_leaf=is_weight_spec)}


def init_params(config: ModelConfig, key: "jax.Array | int" = 0, dtype: Any = "float32") -> dict[str, Any]:
    """Random weights: for tests, benchmarks, and training from scratch."""
    key = jax.random.key(key) if isinstance(key, int) else key
    weights, structure = jax.tree.flatten(weight_specs(config), is_leaf=is_weight_spec)
    keys = jax.random.split(key, len(weights))
    return jax.tree.unflatten(structure, [w.draw(k, dtype) for w, k in zip(weights, keys, strict=True)])


def logical_axes(config: ModelConfig) -> dict[str, Any]:
    """The same tree with each array's logical axis names: 'vocab', 'embed', 'heads', 'kv_heads', 'mlp' or 'expert'."""
    return jax.tree.map(lambda weight: weight.axes, weight_specs(config), is_leaf=is_weight_spec)


def layer_weight_specs(layer: LayerConfig, hidden: int) -> dict[str, Any]:
    """The WeightSpecs of one layer."""
    tree = {"attn": layer.self_attn.weight_specs(), "mlp": layer.mlp.weight_specs(hidden)}
    for name, norms in (("attn", layer.attn_norms), ("cross", layer.cross_norms), ("mlp", layer.mlp_norms)):
        tree |= norms.weight_specs(name, hidden)
    if layer.experts is not None:
        tree |= layer.experts.weight_specs(hidden)
    if layer.output_scale:
        tree["output_scale"] = WeightSpec((1,), (None,), 1.0)
    branches = dict(laurel=layer.laurel, layer_input=layer.layer_input, altup=layer.altup)
    tree |= {name: branch.weight_specs(hidden) for name, branch in branches.items() if branch is not None}
    return tree if layer.cross_attn is None else tree | {"cross": layer.cross_attn.weight_specs()}
