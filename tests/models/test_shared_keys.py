"""Layers that read another layer's keys, have several residual streams, or experts beside the MLP: without a cache, on
the backend that is chosen here, quantised, and what their configs refuse."""

import dataclasses

import jax
import numpy as np
import pytest

import jattn
from jattn import models
from jattn.nn import Norm
from tests.models import examples, options

NAMES = [(name, draw) for name in ("gemma3n_text", "gemma4_text", "longcat_flash") for draw in (0, 1)]
IDS = np.random.default_rng(5).integers(0, 61, 17).astype(np.int32)


def made(name: str, draw: int):
    config = models.config_of(options.FAMILIES[name].config(draw))
    return config, examples.params_of(config)


def same(mine, theirs) -> None:
    np.testing.assert_allclose(mine, theirs, atol=1e-4 * float(np.std(theirs)), rtol=0)


@pytest.mark.parametrize(("name", "draw"), NAMES)
def test_the_logits_without_a_cache_are_those_with_one(name, draw):
    config, params = made(name, draw)
    meta = jattn.CommonAttentionMetadata.from_lengths([17], [17], None, 4)
    whole = jax.jit(models.uncached_logits, static_argnums=0)(config, params, IDS, meta)
    same(models.prompt_logits(config, params, IDS, chunk=5), whole)


@pytest.mark.parametrize(("name", "draw"), [("gemma3n_text", 0), ("gemma4_text", 1), ("longcat_flash", 0)])
def test_quantised_weights_give_the_logits_of_the_numbers_that_they_stand_for(name, draw):
    config, params = made(name, draw)
    quantised = models.quantise(params, "int8")
    plain = jax.tree.map(
        lambda x: x.dequantise() if hasattr(x, "dequantise") else x,
        quantised,
        is_leaf=lambda x: hasattr(x, "dequantise"),
    )
    assert hasattr(quantised["layers"][0]["mlp"]["down"]["kernel"], "dequantise")
    same(models.prompt_logits(config, quantised, IDS), models.prompt_logits(config, plain, IDS))


def test_a_shared_layer_has_no_projections_and_no_cache():
    config, params = made("gemma3n_text", 0)
    assert len(config.make_caches(3, 4, "float32")) == config.num_own_caches == 2 and len(config.layers) == 4
    assert [layer.kv_from for layer in config.layers] == [None, None, 0, 1]
    assert sorted(params["layers"][2]["attn"]) == ["o", "q", "q_norm"]


@pytest.mark.parametrize("choice", [dict(deterministic=True), dict(backend="sdpa")], ids=["deterministic", "named"])
def test_an_engine_finds_the_cache_of_a_shared_layer_when_its_backend_is_checked(choice):
    config, params = made("gemma3n_text", 0)
    sizes = dict(num_blocks=20, block_size=4, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)
    assert jattn.Engine(config, params, **sizes, **choice).runner.model.backend in jattn.list_backends()


def test_fields_that_contradict_one_another_are_refused():
    config, _ = made("gemma3n_text", 0)
    own, shared = config.layers[0], config.layers[2]
    for broken, words in (
        (lambda: dataclasses.replace(shared, kv_from=None), "if and only if"),
        (lambda: dataclasses.replace(own, kv_from=0), "if and only if"),
        (lambda: dataclasses.replace(own, output_scale=True), "no output_scale"),
        (lambda: dataclasses.replace(config, layers=config.layers[::-1]), "must be the last layers"),
        (lambda: dataclasses.replace(config, altup=None), "altup of the model"),
        (lambda: dataclasses.replace(config, layer_inputs=None), "need layer_inputs"),
        (lambda: dataclasses.replace(own.self_attn, v_norm=Norm()), "neither scale nor bias"),
        (lambda: dataclasses.replace(own.self_attn, shares_kv=True), "has no keys"),
        (lambda: dataclasses.replace(own.self_attn, k_is_v=True, fused_qkv=True), "separate projections"),
    ):
        with pytest.raises(ValueError, match=words):
            broken()
