"""A decoder that is distributed over a mesh gives the logits of one device: every family, every backend."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jattn
from jattn import models
from jattn.models import moe
from tests.models import examples, options, serving

BLOCK_SIZE, BLOCKS = 4, 12
FAMILIES = {name: config for name, config in examples.DECODERS.items() if not name.startswith("llama, ")}
FURTHER = {name: row.config(i % 2) for i, (name, row) in enumerate(options.FAMILIES.items())}
LATENT = examples.FURTHER["deepseek_v3"] | dict(vocab_size=64)


def model_mesh(config, ranks: int) -> models.ModelMesh:
    return models.ModelMesh.of(config, Mesh(np.array(jax.devices()[:ranks]), ("tensor",)))


def logits_of(config, params, backend: str = "sdpa", mesh: models.ModelMesh | None = None) -> np.ndarray:
    """f32[16, vocab] of two requests: of their prompts, then of one more token each."""
    if mesh is not None:
        params = jax.device_put(params, mesh.weight_shardings(config))
    specs = config.cache_specs(BLOCKS, BLOCK_SIZE, "float32")
    caches = tuple(map(jattn.empty_cache, specs)) if mesh is None else mesh.empty_caches(specs)
    options = dict(config=config, backend=backend) | (dict(model_mesh=mesh) if mesh else {})
    step = jax.jit(functools.partial(models.forward, **options))
    rng, rows = np.random.default_rng(0), []
    tables = [rng.permutation(BLOCKS).reshape(2, -1).astype(np.int32) for _ in config.cache_groups]
    for new, lens in (((9, 5), (9, 5)), ((1, 1), (10, 6))):
        metas = tuple(
            jattn.CommonAttentionMetadata.from_lengths(
                new, lens, table, BLOCK_SIZE, num_tokens=14, final_seq_lens=(10, 6)
            ).replace(max_query_len=14)
            for table in tables
        )
        ids = rng.integers(0, config.vocab_size, 14).astype(np.int32)
        caches, logits = step(params=params, token_ids=ids, caches=caches, meta=metas)
        rows.append(np.asarray(logits)[: sum(new)])
    return np.concatenate(rows)


def same(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max(), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_two_ranks(family):
    """The vocabulary of 64 is distributed, that of 61 is replicated."""
    odd = {"vocab_size": 61 if family in ("llama", "gemma2") else 64}
    config = models.config_of(FAMILIES[family] | odd)
    params = examples.params_of(config)
    same(logits_of(config, params, mesh=model_mesh(config, 2)), logits_of(config, params))


@pytest.mark.parametrize("name", FURTHER)
def test_every_further_family_on_two_ranks(name):
    odd = {key: 6 for key in ("num_experts", "num_local_experts") if key in FURTHER[name]}
    config = models.config_of(FURTHER[name] | odd)
    params = examples.params_of(config)
    backend = serving.reference(config)
    same(logits_of(config, params, backend, model_mesh(config, 2)), logits_of(config, params, backend))


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_expert_computes_padding(ranks, monkeypatch):
    """Of each layer as many choices as the tokens have: two batches of 14 and 2 tokens, padded to 14."""
    config = models.config_of(FAMILIES["mixtral"] | dict(intermediate_size=44))  # a shape that nothing else has traced
    counts, arrange = [], moe.arrange

    def counting(expert, experts, tile_rows=1):
        jax.debug.callback(lambda count: counts.append(int(count)), (expert < experts).sum())
        return arrange(expert, experts, tile_rows)

    monkeypatch.setattr(moe, "arrange", counting)
    logits_of(config, examples.params_of(config), mesh=model_mesh(config, ranks) if ranks > 1 else None)
    jax.effects_barrier()
    top_k = config.layers[0].mlp.top_k
    assert sum(counts) == len(config.layers) * top_k * (14 + 2)


@pytest.mark.parametrize("backend", ["split", "cpu_native", "pallas_cpu"])
def test_every_backend_with_two_ranks_for_each_kv_head(backend):
    config = models.config_of(FAMILIES["gemma2"] | {"head_dim": 16})
    params = examples.params_of(config)
    same(logits_of(config, params, backend, model_mesh(config, 4)), logits_of(config, params))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["mla_sdpa", "mla_cpu_native"])
def test_the_heads_of_latent_attention_over_a_whole_cache_on_each_rank(backend, ranks):
    config = models.config_of(LATENT)
    params = examples.params_of(config)
    same(logits_of(config, params, backend, model_mesh(config, ranks)), logits_of(config, params, "mla_sdpa"))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_in_bfloat16_the_logits_differ_by_its_rounding(family):
    """Both are as far from those of float32."""
    config = models.config_of(FAMILIES[family] | {"vocab_size": 64})
    params = examples.params_of(config)
    wanted = logits_of(config, params)
    params = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    errors = [np.abs(logits_of(config, params, mesh=mesh) - wanted).max() for mesh in (None, model_mesh(config, 2))]
    assert 0 < errors[1] < 2 * errors[0]


@pytest.mark.slow
def test_layers_with_different_numbers_of_kv_heads():
    """4, 2 and 1 kv heads on four ranks: axes of 2 and 2; one layer is on both, one on the first, one on none."""
    config = models.config_of(FAMILIES["llama"] | {"num_hidden_layers": 3})
    layers = []
    for layer, kv_heads in zip(config.layers, (4, 2, 1), strict=True):
        spec = dataclasses.replace(layer.attention, num_kv_heads=kv_heads)
        layers.append(dataclasses.replace(layer, self_attn=dataclasses.replace(layer.self_attn, spec=spec)))
    config = dataclasses.replace(config, layers=tuple(layers))
    mesh, params = model_mesh(config, 4), examples.params_of(config)
    assert mesh.mesh.shape == {"tensor_0": 2, "tensor_1": 2}
    assert [mesh.kv_axes(n) for n in (4, 2, 1)] == [("tensor_0", "tensor_1"), ("tensor_0",), ()]
    same(logits_of(config, params, mesh=mesh), logits_of(config, params))
