"""A model whose layers have one projection of q, k and v, as one whose layers have three: each device needs its heads.

Folders with one matrix are split when they are read (jattn.models.families), so this is for a config made by hand.
"""

import dataclasses
from typing import Any

import jax

from jattn.models.config import ModelConfig
from jattn.models.weight_tree import weight_paths, weight_specs
from jattn.nn import AttentionConfig
from jattn.nn.weight_spec import is_weight_spec, weight_path
from jattn.ops.quantised import is_quantised


def without_fused_qkv(config: ModelConfig) -> ModelConfig:
    """The same model with three projections in each layer."""
    layers = []
    for layer in config.layers:
        attn = layer.self_attn
        if isinstance(attn, AttentionConfig) and attn.fused_qkv:
            layer = dataclasses.replace(layer, self_attn=dataclasses.replace(attn, fused_qkv=False))
        layers.append(layer)
    return dataclasses.replace(config, layers=tuple(layers))


def split_qkv(config: ModelConfig, params: Any) -> Any:
    """params of the model with fused projections as those of `config`, which has none; any others as they are."""
    specs = weight_specs(config)
    leaves = {weight_path(path): x for path, x in jax.tree.leaves_with_path(params, is_leaf=is_quantised)}
    made, used = [], set()
    for path in weight_paths(specs):
        fused, part = _fused(config, path)
        source = fused if fused in leaves else path
        if source not in leaves:
            return params
        used.add(source)
        made.append(leaves[path] if source == path else jax.tree.map(lambda x, part=part: x[..., part], leaves[fused]))
    structure = jax.tree.structure(specs, is_leaf=is_weight_spec)
    return params if used != leaves.keys() else jax.tree.unflatten(structure, made)


def _fused(config: ModelConfig, path: str) -> tuple[str, slice]:
    """The path of the fused weight, and the outputs of it that are the weight of this path; "" if it is no part."""
    module, _, leaf = path.rpartition(".")
    *layer, name = module.split(".")
    if layer[:1] != ["layers"] or layer[2:] != ["attn"] or name not in ("q", "k", "v"):
        return "", slice(0)
    attn = config.layers[int(layer[1])].self_attn
    if not isinstance(attn, AttentionConfig):  # the q of a latent layer
        return "", slice(0)
    first = sum(attn.widths[other] for other in "qkv"[: "qkv".index(name)])
    return f"{'.'.join(layer)}.qkv.{leaf}", slice(first, first + attn.widths[name])
