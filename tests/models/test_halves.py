"""Steps in two halves on several ranks: the logits of one device, for models of several kinds."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jattn
from jattn import models
from jattn.models import decoder, halves
from tests.models import examples
from tests.models.options import COMMON

SIZES = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
KEYS = {
    "llama": dict(attention_bias=True, mlp_bias=True),
    "gemma2": dict(query_pre_attn_scalar=8, sliding_window=8),
    "qwen3": dict(),
}


def logits(config, params, mesh=None, at=None):
    """f32 logits of a chunk of 16 tokens and of the 16 after them, of one request. at: of these tokens of each."""
    page, found = 4, []
    caches = config.make_caches(16, page, "float32")
    table = np.random.default_rng(3).permutation(16)[None].astype(np.int32)
    step = jax.jit(functools.partial(models.forward, config, backend="sdpa", model_mesh=mesh))
    ids = np.random.default_rng(4).integers(0, config.vocab_size, 32).astype(np.int32)
    for begin in (0, 16):
        meta = jattn.CommonAttentionMetadata.from_lengths([16], [begin + 16], table, page)
        caches, rows = step(params, ids[begin : begin + 16], caches, meta, logits_at=at)
        found.append(np.asarray(rows))
    return np.concatenate(found)


@pytest.mark.parametrize("family", KEYS)
def test_two_halves_give_the_logits_of_one_device(family, monkeypatch):
    config = models.config_of(COMMON | dict(model_type=family, vocab_size=64) | SIZES | KEYS[family])
    params = examples.params_of(config)
    calls, forward = [], halves.forward
    monkeypatch.setattr(halves, "LEAST_TOKENS", 16)
    monkeypatch.setattr(decoder.halves, "forward", lambda *args: calls.append(1) or forward(*args))
    mesh = models.ModelMesh.of(config, Mesh(np.array(jax.devices()[:2]), ("tensor",)))
    np.testing.assert_allclose(logits(config, params, mesh), logits(config, params), rtol=2e-5, atol=2e-5)
    assert calls


@pytest.mark.parametrize("at", [[15], [3, 9, 3]])
def test_the_wanted_tokens_of_both_halves(at, monkeypatch):
    config = models.config_of(COMMON | dict(model_type="gemma2", vocab_size=64) | SIZES | KEYS["gemma2"])
    params = examples.params_of(config)
    monkeypatch.setattr(halves, "LEAST_TOKENS", 16)
    mesh = models.ModelMesh.of(config, Mesh(np.array(jax.devices()[:2]), ("tensor",)))
    found = logits(config, params, mesh, np.array(at, np.int32))
    want = logits(config, params)[np.concatenate([at, np.add(at, 16)])]
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


def test_other_steps_are_computed_whole():
    config = models.config_of(COMMON | dict(model_type="llama", vocab_size=64) | SIZES)
    of = lambda count: models.ModelMesh.of(config, Mesh(np.array(jax.devices()[:count]), ("tensor",)))
    assert halves.serves(config, of(2), halves.LEAST_TOKENS)
    assert not halves.serves(config, of(2), halves.LEAST_TOKENS - 2)
    assert not halves.serves(config, of(2), halves.LEAST_TOKENS + 1)
    assert not halves.serves(config, of(1), halves.LEAST_TOKENS)
    assert not halves.serves(config, None, halves.LEAST_TOKENS)
