"""Which layers of a model `jattn.nn.layer_tail` serves, and a step of few tokens through them.

Where a step has one new token for each of a few requests (see tail_attention.py), the launch for a layer's rest begins
with its attention: one launch a layer.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jattn.models.config import LayerConfig, ModelConfig
from jattn.models.mlp import KERNEL_GATES, MLP
from jattn.models.model_mesh import ModelMesh
from jattn.models.residual import ResidualNorms, normed
from jattn.models.sharded_products import REPLICATED
from jattn.models.tail_attention import attending
from jattn.nn import AttentionConfig
from jattn.nn import layer_tail as op
from jattn.nn.attention_layer import attend_projected, by_heads, linears, projections, rows_apart
from jattn.ops.product import products
from jattn.ops.quantised import is_quantised
from pallas_kernels.gpu.layer_tail_config import MAX_ROWS, SHARES, LayerTailConfig


def configs_of(
    config: ModelConfig, params: dict[str, Any], x: jax.Array, model_mesh: ModelMesh | None = None
) -> list[LayerTailConfig] | None:
    """The launch of each layer's tail for hidden states x [T, hidden]; None if one of them cannot be served."""
    if x.shape[0] > MAX_ROWS or not all(_has_formula(layer) for layer in config.layers):
        return None
    if model_mesh is not None and (model_mesh.context_ranks > 1 or not model_mesh.has_one_memory):
        return None  # launches of context ranks have not been tried
    if any(is_quantised(leaf) for leaf in jax.tree.leaves(params["layers"], is_leaf=is_quantised)):
        return None
    configs = []
    for i in range(len(config.layers)):
        weights, scales = _weights_of(params["layers"], config.layers, i)
        options: dict[str, Any] = dict(biases=_biases_of(params["layers"], config.layers, i))
        if model_mesh is not None:
            options |= dict(ranks=model_mesh.size, kv_ranks=_kv_ranks(config, model_mesh, i))
        configs.append(op.config_of(x.shape[0], x.dtype, weights, scales, _formula(config.layers, i), **options))
    return None if None in configs else configs


def _kv_ranks(config: ModelConfig, model_mesh: ModelMesh, i: int) -> int:
    """The number of parts of k and v in the layer after layer i."""
    axes = _next_kv_axes(config, model_mesh, i)
    return math.prod(model_mesh.mesh.shape[name] for name in axes)


def _next_kv_axes(config: ModelConfig, model_mesh: ModelMesh, i: int) -> tuple[str, ...]:
    return model_mesh.kv_axes(_following(config.layers, i).attention.num_kv_heads)


def _following(layers: Sequence[Any], i: int) -> Any:
    """Of layer i the next one; of the last the last itself, whose launch has no next projections."""
    return layers[min(i + 1, len(layers) - 1)]


def _has_formula(layer: LayerConfig) -> bool:
    """Whether the layer is x + factor norm(attention(norm(x))), then x + factor norm(MLP(norm(x))).

    Each norm is RMS or absent; the MLP has a gate that kernels compute.
    """
    attn, mlp = layer.self_attn, layer.mlp
    if not isinstance(attn, AttentionConfig) or not isinstance(mlp, MLP) or layer.cross_attn is not None:
        return False
    is_gated = mlp.gated and mlp.activation in KERNEL_GATES
    branches = (layer.kv_from, layer.laurel, layer.experts, layer.layer_input, layer.altup)
    is_usual = not any(branch is not None for branch in branches) and not layer.output_scale and not layer.parallel
    has_qkv = projections(attn) in (("qkv",), ("q", "k", "v"))
    has_rms_norms = all(map(_has_rms_norms, (layer.attn_norms, layer.mlp_norms)))
    return is_gated and not mlp.sparsity and is_usual and has_qkv and has_rms_norms


def _has_rms_norms(norms: ResidualNorms) -> bool:
    is_rms = lambda norm: norm is None or (norm.kind == "rms" and norm.has_scale and not norm.has_bias)
    return norms.of_sum is None and is_rms(norms.before) and is_rms(norms.after)


def _formula(layers: Sequence[LayerConfig], i: int) -> op.TailFormula:
    layer = layers[i]
    assert isinstance(layer.mlp, MLP)  # _has_formula
    of_attention, of_mlp = layer.attn_norms, layer.mlp_norms
    return op.TailFormula(
        of_mlp.before, _following(layers, i).attn_norms.before, KERNEL_GATES[layer.mlp.activation],
        factors=(of_attention.factor, of_mlp.factor), after=(of_attention.after, of_mlp.after),
    )  # fmt: skip


def _weights_of(params: Sequence[dict], layers: Sequence[LayerConfig], i: int) -> tuple[tuple, tuple]:
    """(weights of each product of layer i's tail, scales of its norms: see jattn.nn.layer_tail)"""
    own, following = params[i], _following(params, i)
    kernels = lambda *projections: tuple(weights["kernel"] for weights in projections)
    scale = lambda weights, name: weights[name]["scale"] if name in weights else None
    scales = scale(own, "mlp_norm"), scale(following, "attn_norm"), *(
        scale(own, name) for name in ("attn_norm_after", "mlp_norm_after")
    )  # fmt: skip
    mlp = own["mlp"]
    groups = kernels(own["attn"]["o"]), kernels(mlp["gate"], mlp["up"]), kernels(mlp["down"])
    if i + 1 == len(layers):
        return groups, scales
    names = projections(_attention_config(layers[i + 1]))
    return (*groups, kernels(*(following["attn"][name] for name in names))), scales


def _biases_of(params: Sequence[dict], layers: Sequence[LayerConfig], i: int) -> tuple[tuple, ...]:
    """The biases of each product of layer i's tail: see jattn.nn.layer_tail."""
    biases = lambda own, *names: tuple(own[name]["bias"] for name in names if "bias" in own[name])
    attn, mlp = params[i]["attn"], params[i]["mlp"]
    groups = biases(attn, "o"), biases(mlp, "gate", "up"), biases(mlp, "down")
    if i + 1 == len(layers):
        return groups
    return *groups, biases(params[i + 1]["attn"], *projections(_attention_config(layers[i + 1])))


def forward(
    config: ModelConfig, params: dict[str, Any], x: jax.Array, configs: list[LayerTailConfig], attention_of: Callable,
    model_mesh: ModelMesh | None = None,
) -> tuple[Sequence[Any], jax.Array]:  # fmt: skip
    """(caches, x after the last layer). attention_of(i) -> (attention of layer i, the arguments of `_attention`)."""
    layers, weights = config.layers, params["layers"]
    attns, arguments = zip(*((attn, args) for attn, *args in map(attention_of, range(len(layers)))), strict=True)
    if model_mesh is not None:
        step = _Step(layers, attns, tuple(configs), ())
        on_ranks = lambda launch, i, biases: _on_ranks(
            launch, model_mesh, _next_kv_axes(config, model_mesh, i), configs[i], biases
        )
        return _apart(step, weights, x, arguments, on_ranks, _counters_on_ranks(model_mesh, configs[0]))
    launches = attending(layers, weights, configs, attns, arguments, _weights_of, functools.partial(_formula, layers))
    step = _Step(layers, attns, tuple(configs), () if launches is None else tuple(launches.configs))
    if launches is None:
        return _apart(step, weights, x, arguments)
    together = lambda: _together(step, weights, x, arguments, (launches.plans(), launches.vectors))
    if launches.has_few_keys is None:
        return together()
    apart = lambda: _apart(step, weights, x, _with_new_metadata(attns, arguments))
    return jax.lax.cond(launches.has_few_keys, together, apart)


def _with_new_metadata(attns: Sequence, arguments: Sequence) -> list:
    """The arguments, with metadata of attention that is built inside the branch which needs it.

    The caller's would be computed before `lax.cond`, whichever branch it takes.
    """
    given = {id(m): (attn, m.common) for attn, (_, m, *_) in zip(attns, arguments, strict=True)}
    built = {key: attn.build(common) for key, (attn, common) in given.items()}
    return [(cache, built[id(m)], *others) for cache, m, *others in arguments]


@dataclasses.dataclass(frozen=True)
class _Step:
    """What is static about `forward`, layer by layer."""

    layers: tuple[LayerConfig, ...]
    attns: tuple
    configs: tuple[LayerTailConfig, ...]
    attending: tuple[LayerTailConfig, ...]  # of the launches with attention


def _apart(
    step: _Step, weights: Sequence[dict], x: jax.Array, arguments: Sequence, on_ranks: Callable | None = None,
    counters: op.Counters | None = None,
) -> tuple[list, jax.Array]:  # fmt: skip
    """`forward` with launches of their own for attention. arguments: of `_attention`, for each layer.

    on_ranks: with a mesh, makes the launch of layer i one on each rank. counters: then those of the ranks.
    """
    rows: Any = _first_rows(step.layers[0], weights[0], x)
    rows = jnp.concatenate(rows, axis=1) if on_ranks is None else rows
    caches, counters = [], op.new_counters() if counters is None else counters
    for i, (layer, attn, config) in enumerate(zip(step.layers, step.attns, step.configs, strict=True)):
        cache, a = _attention(layer, attn, weights[i]["attn"], rows, *arguments[i])
        caches.append(cache)
        kernels, scales = _weights_of(weights, step.layers, i)
        launch: Any = functools.partial(op.layer_tail, _formula(step.layers, i), config)
        biases = _biases_of(weights, step.layers, i)
        launch = launch if on_ranks is None else on_ranks(launch, i, biases)
        after: Any = launch(a, x, kernels, scales, counters, biases)
        x, rows, counters = after
    return caches, x


def _counters_on_ranks(model_mesh: ModelMesh, config: LayerTailConfig) -> op.Counters:
    """The counters of each rank. They differ, but XLA, which never compares them, may take them for replicated."""
    make = functools.partial(op.new_counters, config)
    return jax.shard_map(
        make, mesh=model_mesh.inner_mesh, in_specs=(), out_specs=REPLICATED, axis_names=set(model_mesh.axes),
        check_vma=False,
    )()  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _together(step: _Step, weights: Sequence[dict], x: jax.Array, arguments: Sequence, own: tuple) -> Any:
    """`_apart` with one launch a layer, and with its gradient. own: plans and vectors of Attending."""
    rows: Any = _first_sums(step, weights[0], x)
    caches, counters = [], op.new_counters()
    for i, (cache, m, _, angles) in enumerate(arguments):
        table, (plan, vectors) = jnp.asarray(m.block_table, jnp.int32), (each[i] for each in own)
        keys = angles.cos, angles.sin, table, plan, *vectors, cache.k, cache.v
        kernels, scales = _weights_of(weights, step.layers, i)
        biases = *_biases_of(weights, step.layers, i)[:3], ()  # the next launch adds those of q, k and v
        x, rows, counters, (k, v) = op.launch(rows, x, kernels, scales, counters, step.attending[i], keys, biases)
        caches.append(dataclasses.replace(cache, k=k, v=v))
    return caches, x


def _together_forward(step: _Step, weights, x, arguments, own):
    return _together(step, weights, x, arguments, own), (weights, x, arguments)


def _together_backward(step: _Step, saved: tuple, cotangent):
    weights, x, arguments = saved

    def apart(weights, x, caches):
        return _apart(step, weights, x, [(cache, *args[1:]) for cache, args in zip(caches, arguments, strict=True)])

    weights, x, caches = jax.vjp(apart, weights, x, [cache for cache, *_ in arguments])[1](cotangent)
    return weights, x, type(arguments)([cache, None, None, None] for cache in caches), None


_together.defvjp(_together_forward, _together_backward)


def _first_sums(step: _Step, weights: dict, x: jax.Array) -> Any:
    """The projections of the first layer, without biases, as the launches give those of the others."""
    config, norm = step.attending[0], step.layers[0].attn_norms.before
    assert norm is not None and config.attention is not None
    kernels = [weights["attn"][name]["kernel"] for name in projections(_attention_config(step.layers[0]))]
    if not config.attention.sums:
        return jnp.concatenate(products(norm(weights["attn_norm"], x), kernels, dtype=x.dtype), axis=1)
    y, scale = x.astype(jnp.float32), weights["attn_norm"]["scale"].astype(jnp.float32) + norm.one_plus
    sums = jnp.concatenate(products((y * scale[None]).astype(x.dtype), kernels, dtype=jnp.float32), axis=1)
    squares = jnp.sum(y**2, axis=1, keepdims=True)
    missing, height = config.rows8 - config.rows, config.attention.sums * config.rows8
    pad = lambda y, rows, columns: jnp.pad(y, ((0, rows), (0, columns)))
    return pad(sums, height - config.rows, 0), pad(squares, missing, SHARES - 1)


def _on_ranks(
    launch: Callable, model_mesh: ModelMesh, kv_axes: tuple[str, ...], config: LayerTailConfig, biases: tuple
) -> Callable:
    """The launch on each rank, with global arrays; it returns q, k and v of the next layer apart."""
    columns, inputs, kv_columns = (PartitionSpec(None, model_mesh.axes), PartitionSpec(model_mesh.axes),
                                   PartitionSpec(None, kv_axes))  # fmt: skip
    *_, last = config.products
    has_next = len(config.products) == 4
    following = (columns, kv_columns, kv_columns) if has_next else ()
    places = ((inputs,), (columns, columns), (inputs,), *((following,) if has_next else ()))
    kv = PartitionSpec(kv_axes)
    # The biases of o and down are added to the sums of all ranks.
    bias_places = REPLICATED, inputs, REPLICATED, *((inputs, kv, kv) if group else () for group in biases[3:])

    def on_rank(a, x, kernels, scales, counters, biases):
        x, rows, counters = launch(a, x, kernels, scales, counters, biases)
        edges = list(itertools.accumulate(last.widths))[:-1]
        return x, tuple(jnp.split(rows, edges, axis=1)) if has_next else (), counters

    return jax.shard_map(
        on_rank, mesh=model_mesh.inner_mesh,
        in_specs=(columns, REPLICATED, places, REPLICATED, REPLICATED, bias_places),
        out_specs=(REPLICATED, following, REPLICATED), axis_names=set(model_mesh.axes), check_vma=False,
    )  # fmt: skip


def _first_rows(layer: LayerConfig, weights: dict, x: jax.Array) -> tuple[jax.Array, ...]:
    """The projections of the first layer, [T, width] each."""
    y = normed(layer.attn_norms.before, weights, "attn_norm", x)
    return linears([weights["attn"][name] for name in projections(_attention_config(layer))], y)


@functools.partial(jax.jit, static_argnums=(0, 1))  # layers with equal configs share one trace
def _attention(layer: LayerConfig, attn: Any, weights, rows, cache, plan, positions, angles) -> tuple:
    config = _attention_config(layer)
    attend = lambda q, k, v, params, angles: attn(q, k, v, cache, plan, params, angles)
    at = dict(positions=positions, angles=angles)
    rows = rows if isinstance(rows, tuple) else rows_apart(config, rows)
    return attend_projected(config, weights, by_heads(config, rows), rows[0].dtype, attend, **at)


def _attention_config(layer: LayerConfig) -> AttentionConfig:
    assert isinstance(layer.self_attn, AttentionConfig)  # _has_formula
    return layer.self_attn
