"""Models on a mesh whose sums over ranks are launches, with XLA's sums in their place: which sums, and numbers."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jattn
from jattn import models
from jattn.device import Chip
from jattn.models import quantising, rank_sums
from jattn.ops.quantised import plain, table_rows
from jattn.ops.rank_launches import VMAPS_SINCE
from pallas_kernels.gpu.rank_sum_sm90 import RankSum, sum_ranks
from tests.kernels.gpu.test_layer_tail_lowering import lowered_on
from tests.models import examples
from tests.models.test_model_mesh import FAMILIES, FURTHER, LATENT, logits_of, model_mesh, same

SLOW = {name: FAMILIES[name] for name in ("llama", "gpt_oss", "llama4_text")} | {"gemma3n": FURTHER["gemma3n_text"]}


@pytest.fixture
def summed(monkeypatch):
    """The shapes and dtypes that launches of pretended H100s add up."""
    arrays = []

    def in_float32(config: RankSum, y, peers):
        arrays.append((y.shape, y.dtype.name, config.ranks))
        axes = jax.sharding.get_abstract_mesh().manual_axes
        return jax.lax.psum(y.astype(jnp.float32), axes).astype(y.dtype)

    monkeypatch.setattr(rank_sums, "sum_ranks", in_float32)
    monkeypatch.setattr(rank_sums, "exchange", lambda config: (jnp.zeros(1),) * 3)
    on_hopper(monkeypatch)
    return arrays


def on_hopper(monkeypatch) -> None:
    monkeypatch.setattr(rank_sums, "device", types.SimpleNamespace(detect=lambda: Chip("gpu", "sm_90")))


def check(keys: dict, summed: list, ranks: int = 2, backend: str = "sdpa") -> None:
    config = models.config_of(keys | dict(vocab_size=64))
    params = examples.params_of(config)
    same(logits_of(config, params, backend, model_mesh(config, ranks)), logits_of(config, params, backend))
    assert {shape for shape, *_ in summed} == {(14, config.hidden_size)} and {n for *_, n in summed} == {ranks}


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "bloom"])
def test_all_sums_of_a_step_are_launches(name, summed, monkeypatch):
    """One of the embeddings and two of each layer, counted as they run: equal layers share a trace."""
    ran, launch = [], rank_sums.sum_ranks

    def counted(config, y, peers):
        jax.debug.callback(lambda: ran.append(y.shape))
        return launch(config, y, peers)

    monkeypatch.setattr(rank_sums, "sum_ranks", counted)
    check(FAMILIES[name], summed)
    jax.effects_barrier()
    steps, ranks, layers = 2, 2, len(models.config_of(FAMILIES[name]).layers)
    assert len(ran) == steps * ranks * (1 + 2 * layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_sums_of_layers_that_differ(name, summed):
    check(SLOW[name], summed)


def test_latent_attention_on_four_ranks(summed):
    check(LATENT, summed, ranks=4, backend="mla_sdpa")


def test_quantised_weights(summed):
    config = models.config_of(FAMILIES["llama"] | dict(vocab_size=64, hidden_size=256, intermediate_size=256))
    params = quantising.quantise(examples.params_of(config), "int4")
    same(logits_of(config, params, mesh=model_mesh(config, 2)), logits_of(config, params))
    assert summed


@pytest.mark.parametrize("dtype", ["int32", "int8"])
@pytest.mark.parametrize("format", [None, "int4"])
def test_ids_outside_the_vocabulary_have_its_first_or_its_last_row(format, dtype, summed):
    config = models.config_of(FAMILIES["llama"] | dict(vocab_size=200, hidden_size=64))
    table = examples.params_of(config)["embed"]
    table = table if format is None else quantising.quantise({"embed": table}, format)["embed"]
    ids, rows = jnp.array([3, 127, -1, -100, -128], dtype), [3, 127, 0, 0, 0]
    if dtype == "int32":
        ids, rows = jnp.append(ids, jnp.array([199, 200, -300, 2**31 - 1])), [*rows, 199, 199, 0, 199]
    mesh = model_mesh(config, 2)

    def on_mesh(table, ids):
        with mesh.context():
            return mesh.table_rows(mesh.sums(len(ids), 64), table, ids)

    for found in (table_rows(table, ids), jax.jit(on_mesh)(table, ids)):
        np.testing.assert_array_equal(found, plain(table)[np.array(rows)])
    assert len(summed) == 1


def step_of(config, names: tuple[str, ...], tokens: int = 4) -> list:
    """Traces a step on a mesh of 4 devices, the last axis of 2."""
    mesh = models.ModelMesh.of(config, Mesh(np.array(jax.devices()[:4]).reshape(2, 2), names))
    meta = jattn.CommonAttentionMetadata.from_lengths([tokens], [tokens], [[0] * 64], 16)
    caches = jax.eval_shape(lambda: mesh.empty_caches(config.cache_specs(8, 16, "float32")))
    run = mesh.each_data_rank(
        lambda params, caches: models.forward(
            config, params, jnp.zeros(tokens, jnp.int32), caches, meta, backend="sdpa", model_mesh=mesh
        ),
        (None, 0), (0, 0),
    )  # fmt: skip
    return jax.eval_shape(run, examples.params_of(config), caches)


def test_data_ranks_and_many_tokens_are_left_to_xla(summed):
    config = models.config_of(FAMILIES["gemma2"] | dict(vocab_size=64))
    step_of(config, ("data", "tensor"))
    assert not summed
    mesh = model_mesh(config, 2)
    for tokens, is_launch in ((256, True), (512, False)):
        with mesh.context():
            found = jax.eval_shape(lambda tokens=tokens: mesh.sums(tokens, 4096))
        assert (found.config is not None) == is_launch


def test_ranks_whose_memory_is_apart_are_left_to_xla(summed):
    config = models.config_of(FAMILIES["gemma2"] | dict(vocab_size=64))
    backwards = models.ModelMesh.of(config, Mesh(np.array(jax.devices()[1::-1]), ("tensor",)))
    for mesh in (model_mesh(config, 1), backwards):
        with mesh.context():
            assert mesh.sums(8, 64) == rank_sums.BY_XLA


def on_two(gradient: bool = False, mapped: bool = False) -> str:
    """The module of three sums on two Hopper GPUs of one host."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def on_rank():
        sums = rank_sums.rank_sums(2, 8, 64)
        run = lambda y: sums(sums(sums(y, ("x",)) * 2, ("x",)) * 3, ("x",))
        if gradient:
            return jax.grad(lambda y: run(y).sum())(jnp.ones((8, 64)))
        return jax.vmap(run)(jnp.ones((2, 8, 64))) if mapped else run(jnp.ones((8, 64)))

    return lowered_on(mesh, on_rank)


def test_addresses_are_told_once_and_no_collective_is_left(monkeypatch):
    on_hopper(monkeypatch)
    text = on_two()
    assert text.count("custom_call @mosaic_gpu_v2") == 4 and text.count("uses_xla_collective_metadata = true") == 1
    assert "all_reduce" not in text
    assert sum_ranks is rank_sums.sum_ranks


def test_a_gradient_adds_up_by_collectives(monkeypatch):
    on_hopper(monkeypatch)
    text = on_two(gradient=True)
    assert text.count("all_reduce") >= 3


@pytest.mark.skipif(jax.__version_info__ < VMAPS_SINCE, reason="JAX before 0.12 cannot vmap the kernels")
def test_vmap_adds_up_by_collectives(monkeypatch):
    on_hopper(monkeypatch)
    text = on_two(mapped=True)
    assert text.count("all_reduce") >= 3 and text.count("custom_call @mosaic_gpu_v2") <= 1
