"""Quantising at load: which weights, and that the model computes with what they stand for."""

import functools

import jax
import numpy as np
import pytest

from jattn import Engine, SamplingParams, models
from jattn.errors import UnsupportedError
from jattn.models import quantising
from jattn.nn.weight_spec import is_weight_spec
from jattn.ops.quantised import QuantisedArray, is_quantised, plain, quantise
from tests.models import examples, tiny

CONFIG = tiny.CONFIG | dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=24, vocab_size=40)
IDS = [3, 1, 4, 1, 5, 9, 2, 6]
SIZES = dict(num_blocks=40, block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_burst=2)


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    config = CONFIG | dict(tie_word_embeddings=request.param)
    made = {name: x for name, x in tiny.tensors(config).items() if not (request.param and name == "lm_head.weight")}
    tiny.write(path, config, made)
    return path


def dequantised(params):
    return jax.tree.map(plain, params, is_leaf=is_quantised)


def close(a, b) -> None:
    assert np.abs(np.asarray(a) - np.asarray(b)).max() < 1e-3 * np.std(b)


@pytest.mark.parametrize("quantization", models.QUANTIZATIONS)
def test_logits_are_those_of_the_dequantised_weights(folder, quantization):
    config, params = models.load(folder, quantization=quantization)
    exact = models.load(folder)[1]
    logits = models.prompt_logits(config, params, IDS, chunk=3)
    close(logits, models.prompt_logits(config, dequantised(params), IDS))
    error = np.abs(logits - models.prompt_logits(config, exact, IDS)).mean()
    assert 0 < error < 0.4 * np.std(logits)


def test_large_weights_are_quantised_and_the_others_are_as_stored(folder):
    exact = models.load(folder)[1]
    for name in models.QUANTIZATIONS:
        params = models.load(folder, quantization=name)[1]
        leaves = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised)
        forms = {jax.tree_util.keystr(path): x for path, x in leaves if is_quantised(x)}
        assert len(forms) == sum(x.ndim == 2 for x in jax.tree.leaves(exact))
        groups = dict(int8=(64, 96, 96), int4=(64, 32, 32), fp8=(64, 32, 32))[name]  # inputs 64, 96, 96
        layer = params["layers"][1]
        assert (layer["attn"]["q"]["kernel"].group_size, layer["attn"]["o"]["kernel"].group_size) == groups[:2]
        assert layer["mlp"]["down"]["kernel"].group_size == groups[2]
        assert forms["['embed']"].group_size == 64  # a row
        outer = {x.format for path, x in forms.items() if "layers" not in path}
        assert outer == {"int8" if name == "int4" else name}
        assert {x.format for path, x in forms.items() if "layers" in path} == {name}
        assert all(x.dtype == np.float32 for x in forms.values())
        norms = jax.tree.map(np.array_equal, params["final_norm"], exact["final_norm"])
        assert jax.tree.all(norms)


def test_projections_of_latent_attention_are_quantised_and_both_halves_of_kv_b_are_not():
    config = models.config_of(examples.FURTHER["deepseek_v3"])
    params = models.quantise(examples.params_of(config), "int8")
    attn = params["layers"][0]["attn"]
    assert {name for name, x in attn.items() if isinstance(x, dict) and is_quantised(x.get("kernel"))} == {
        "q_a", "q_b", "kv_a", "o"
    }  # fmt: skip
    close(models.prompt_logits(config, params, IDS, chunk=3), models.prompt_logits(config, dequantised(params), IDS))


def test_inputs_that_no_group_divides_are_int8():
    made = models.quantise({"mlp": {"up": {"kernel": np.ones((40, 8), np.float32)}}}, "int4")["mlp"]["up"]["kernel"]
    assert made.format == "int8" and made.group_size == 40


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "path, shape", [("mlp.up.kernel", (64, 33)), ("embed", (33, 64)), ("mlp.up.kernel", (5, 32, 7))]
)
def test_a_weight_is_quantised_by_slices_to_the_same_bits(path, shape, dtype, monkeypatch):
    weight = np.random.default_rng(0).standard_normal(shape).astype(jax.numpy.dtype(dtype))
    for name in models.QUANTIZATIONS:
        monkeypatch.setattr(quantising, "SLICE", 1 << 22)
        wanted = quantising.quantised(path, jax.numpy.asarray(weight), name)
        monkeypatch.setattr(quantising, "SLICE", 300)
        for given in (jax.numpy.asarray(weight), weight):
            seen = quantising.quantised(path, given, name)
            assert jax.tree.structure(seen) == jax.tree.structure(wanted)
            assert all(map(np.array_equal, jax.tree.leaves(seen), jax.tree.leaves(wanted)))


def test_a_slice_needs_memory_for_its_own_numbers_only():
    """In one call, XLA:CPU (JAX 0.10) converts the whole bfloat16 weight to float32: twice its bytes."""
    weight = jax.ShapeDtypeStruct((1024, 2048), jax.numpy.bfloat16)
    for axis, at in ((-2, 1), (-1, 0)):
        group = weight.shape[axis]
        form = jax.eval_shape(functools.partial(quantise, format="int8", group_size=group, axis=axis), weight)
        compiled = quantising._with_slice.lower(form, weight, 0, 64, at, group).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < weight.size // 2


@pytest.mark.parametrize("quantization", models.QUANTIZATIONS)
def test_the_engine_serves_replaces_and_moves_them(folder, quantization):
    ask = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    config, params = models.load(folder)
    made = models.quantise(params, quantization)
    wanted = Engine(config, dequantised(made), **SIZES).generate([IDS], ask)[0].token_ids
    engine = Engine(config, jax.tree.map(jax.numpy.zeros_like, made), **SIZES)
    engine.update_weights(made)
    assert engine.generate([IDS], ask)[0].token_ids == wanted
    engine.sleep()
    engine.wake()
    assert engine.generate([IDS], ask)[0].token_ids == wanted
    with pytest.raises(ValueError, match="do not fit this model"):
        engine.update_weights(params)
    assert {x.dtype for x in jax.tree.leaves(models.load(folder, quantization=quantization)[1])} == {
        x.dtype for x in jax.tree.leaves(made)
    }


def test_sharded_like_any_weight(folder):
    """The axes of values and scales are those of the weight."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("tensor",))
    names = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    place = lambda path, spec: jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*(names.get(axis) for axis in spec.axes))
    )
    for name in models.QUANTIZATIONS:
        config, params = models.load(folder, sharding=place, quantization=name)
        kernel = params["layers"][0]["mlp"]["up"]["kernel"]
        assert isinstance(kernel, QuantisedArray) and len(kernel.values.sharding.device_set) == 2
        plainly = models.load(folder, quantization=name)[1]
        close(models.prompt_logits(config, params, IDS), models.prompt_logits(config, plainly, IDS))


def test_unknown_names_and_a_second_time_are_refused(folder):
    with pytest.raises(ValueError, match="quantization='int3' is not known; use one of int8, int4, fp8"):
        models.load(folder, quantization="int3")
    with pytest.raises(UnsupportedError, match="embed is stored as int8: it is not quantised a second time"):
        models.quantise(models.load(folder, quantization="int8")[1], "int4")


@pytest.mark.parametrize("quantization", models.QUANTIZATIONS)
def test_experts_are_quantised_and_their_router_is_not(quantization):
    moe = models.MoE(num_experts=3, top_k=2, width=96, shared=models.MLP(width=64))
    draw = lambda spec, key: spec.draw(jax.random.key(key))
    specs, structure = jax.tree.flatten(moe.weight_specs(64), is_leaf=is_weight_spec)
    weights = jax.tree.unflatten(structure, [draw(spec, key) for key, spec in enumerate(specs)])
    made = models.quantise({"layers": [{"mlp": weights}]}, quantization)["layers"][0]["mlp"]
    assert [is_quantised(made[name]["kernel"]) for name in ("gate", "up", "down", "router")] == [True] * 3 + [False]
    assert made["gate"]["kernel"].shape == (3, 64, 96) and is_quantised(made["shared"]["up"]["kernel"])
    x = jax.random.normal(jax.random.key(9), (5, 64))
    close(moe(made, x), moe(dequantised(made), x))
