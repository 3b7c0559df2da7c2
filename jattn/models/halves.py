"""A step of many tokens on several ranks, in two halves: while the ranks add up the one, they compute the other.

Everything but attention treats each token alone. The two halves are separate arrays through all layers, so that XLA can
compute one while an all-reduce of the other is under way; attention has both.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.layers import mlp_sublayer
from jattn.models.mlp import MLP
from jattn.models.model_mesh import ModelMesh
from jattn.models.residual import normed, plus
from jattn.nn import AttentionConfig
from jattn.nn.attention_layer import attend_projected, project

LEAST_TOKENS = 2048
"""Of fewer tokens, two products of half the rows take longer than the all-reduces that they hide."""


def serves(config: ModelConfig, model_mesh: ModelMesh | None, tokens: int) -> bool:
    """Is the step computed so?"""
    if model_mesh is None or model_mesh.size == 1 or tokens < LEAST_TOKENS or tokens % 2:
        return False
    return config.altup is None and config.layer_inputs is None and all(map(_is_served, config.layers))


def _is_served(layer: LayerConfig) -> bool:
    """x + attention(norm(x)), then x + MLP(norm(x)), with norms anywhere."""
    branches = (layer.laurel, layer.experts, layer.layer_input, layer.altup, layer.cross_attn)
    is_usual = all(branch is None for branch in branches) and not layer.output_scale and not layer.parallel
    return isinstance(layer.self_attn, AttentionConfig) and isinstance(layer.mlp, MLP) and is_usual


def forward(
    config: ModelConfig, params: dict[str, Any], x: jax.Array, caches, step: Any, model_mesh: ModelMesh,
    logits_at: jax.Array | None,
):  # fmt: skip
    """(caches, x after the last layer). step: the attention plans of this step, as decoder.py has them.

    logits_at: the tokens that are wanted after the last layer, which ends with its attention for the others; None: all.
    """
    caches, halves, positions = list(caches), tuple(jnp.split(x, 2)), step.batches[0].positions()
    for i, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        at, angles = config.cache_of(i), step.angles(layer.rope)
        wanted = logits_at if i == len(config.layers) - 1 else None
        caches[at], halves = _layer(
            layer, step.attns[i], model_mesh, weights, halves, caches[at], step.plan(i), positions, angles, wanted
        )
    return caches, jnp.concatenate(halves)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # layers with equal configs share one trace
def _layer(
    layer: LayerConfig, attn: Any, model_mesh: ModelMesh, weights, halves, cache, plan, positions, angles, wanted
):
    """(cache, the halves after the layer, or a single part with the `wanted` tokens)."""
    config, own = layer.self_attn, weights["attn"]
    assert isinstance(config, AttentionConfig)  # _is_served
    normed_halves = [normed(layer.attn_norms.before, weights, "attn_norm", x) for x in halves]
    each = [project(config, own, y, multiply=attn.multiply) for y in normed_halves]
    rows = tuple(None if y[0] is None else jnp.concatenate(y) for y in zip(*each, strict=True))
    attend = lambda q, k, v, params, angles: attn(q, k, v, cache, plan, params, angles)
    cache, out = attend_projected(config, own, rows, halves[0].dtype, attend, positions=positions, angles=angles)
    parts, outs, results = halves, jnp.split(out, 2), []
    if wanted is not None:
        parts, outs = [jnp.concatenate(halves)[wanted]], [out[wanted]]
    for x, of_part in zip(parts, outs, strict=True):
        attended = plus(layer.attn_norms, "attn", weights, x, attn.multiply(own, ("o",), of_part)[0])
        results.append(mlp_sublayer(layer, weights, x, attended, model_mesh))
    return cache, tuple(results)
