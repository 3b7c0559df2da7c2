"""Layers under Flax's scan and remat: numbers, caches and gradients of the same layers one after the other."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.nn import apply_attention
from tests.nn.test_layer import FULL, HIDDEN, LENGTHS, batch, empty, tokens, weights_of

LAYERS = 3
X = np.concatenate(tokens(*LENGTHS))
WEIGHTS = [weights_of(FULL, seed) for seed in range(LAYERS)]


def stacked(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def one_by_one(weights, x, meta, caches=None):
    """(hidden states, stacked caches) of a residual decoder; weights: stacked."""
    kept = []
    for i in range(LAYERS):
        mine = jax.tree.map(lambda leaf, i=i: leaf[i], weights)
        cache, y = apply_attention(FULL, mine, x, meta, None if caches is None else caches[i])
        x, kept = x + y, [*kept, cache]
    return x, kept


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, cache, meta):
        cache, y = jattn.nn.linen.PagedAttention(FULL, name="attn")(x, meta, cache)
        return x + y, cache


def linen(block):
    """apply(weights, x, caches, meta) of LAYERS blocks under nn.scan; the caches are its scanned inputs and outputs."""
    model = nn.scan(
        block, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=(0, nn.broadcast), length=LAYERS,
        metadata_params={nn.PARTITION_NAME: "layers"},
    )()  # fmt: skip
    return lambda weights, x, caches, meta: model.apply({"params": {"attn": weights}}, x, caches, meta)


def flax_nnx(is_remat):
    """The same of flax.nnx."""
    options = {f.name: getattr(FULL, f.name) for f in dataclasses.fields(FULL) if f.name not in ("spec", "hidden_size")}

    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs):
        return jattn.nn.PagedAttention(FULL.spec, HIDDEN, rngs=rngs, **options)

    def apply(weights, x, caches, meta):
        def layer(module, x, cache):
            cache, y = module(x, meta, cache)
            return x + y, jnp.zeros(()) if cache is None else cache

        layer = nnx.remat(layer) if is_remat else layer
        axis = None if caches is None else 0
        scan = nnx.scan(
            layer, in_axes=(0, nnx.Carry, axis), out_axes=(nnx.Carry, 0),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )  # fmt: skip
        model = make(nnx.Rngs(0))
        nnx.update(model, weights)
        return scan(model, x, caches)

    return apply


MODELS = {
    "linen": linen(Block), "linen, remat": linen(nn.remat(Block)), "nnx": flax_nnx(False), "nnx, remat": flax_nnx(True),
}  # fmt: skip


STEPS = ((X, batch(LENGTHS)), (X[:2], batch((1, 1), (8, 5))))
"""(tokens, batch): two prompts, then a decode step of each."""


@functools.cache
def outputs_one_by_one() -> list:
    """(hidden states, keys of all layers) after each of STEPS."""
    apply, caches, found = jax.jit(one_by_one), [empty(FULL)] * LAYERS, []
    for x, meta in STEPS:
        y, caches = apply(stacked(WEIGHTS), x, meta, caches)
        found.append((y, stacked(caches).k))
    return found


def gradients(model):
    """Of the weights and of the tokens; model(weights, tokens): hidden states."""
    return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(model(*args))), (0, 1)))(stacked(WEIGHTS), X)


@functools.cache
def gradients_one_by_one():
    return gradients(lambda weights, x: one_by_one(weights, x, batch(LENGTHS, table=None))[0])


@pytest.mark.parametrize("name", MODELS)
def test_caches_go_through_a_scan(name):
    """The caches are stacked by layer."""
    apply, scanned = jax.jit(MODELS[name]), stacked([empty(FULL)] * LAYERS)
    for (x, meta), (wanted, keys) in zip(STEPS, outputs_one_by_one(), strict=True):
        y, scanned = apply(stacked(WEIGHTS), x, scanned, meta)
        np.testing.assert_allclose(y, wanted, atol=2e-5)
        np.testing.assert_allclose(scanned.k, keys, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_go_through_a_scan(name):
    mine = gradients(lambda weights, x: MODELS[name](weights, x, None, batch(LENGTHS, table=None))[0])
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(gradients_one_by_one()), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max())
