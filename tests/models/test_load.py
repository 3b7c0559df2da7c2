"""A folder is loaded as (config, params), or refused with an error that says what to do; nothing is ignored."""

import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import models
from jattn.models import checkpoint
from jattn.models.load import stored_weights
from tests.models import test_hub_formats as hub
from tests.models import textbook, tiny
from tests.rooms import tree

IDS = np.random.default_rng(5).integers(0, tiny.CONFIG["vocab_size"], 21)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny.write(path)
    return path


def test_a_prompt_paged_whole_or_in_chunks_or_without_a_cache_is_the_textbook(folder):
    config, params = models.load(folder)
    exact = textbook.llama(tiny.CONFIG, tiny.tensors(), IDS)
    mine = [models.prompt_logits(config, params, IDS, chunk=chunk, backend="sdpa") for chunk in (None, 8)]
    meta = jattn.CommonAttentionMetadata.from_lengths([len(IDS)], [len(IDS)], None, 1)
    mine.append(models.uncached_logits(config, params, IDS, meta))
    for logits in mine:
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, exact, atol=1e-4 * exact.std())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(head="no"), "head='no' must be True or False"),
        (dict(progress=5), "progress=5 must be callable"),
        (dict(sharding="cpu"), "the sharding of .* must be Sharding or NoneType, got str"),
        (dict(sharding=lambda path, spec: [1]), "the sharding of .* must be Sharding or NoneType, got list"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_its_name(folder, wrong, words):
    with pytest.raises((TypeError, ValueError), match=words):
        models.load(folder, **wrong)


def test_a_mesh_is_no_sharding_though_it_can_be_called(folder):
    where = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    with pytest.raises(TypeError, match=r"sharding of embed must be .*, got Mesh; on a mesh, pass ModelMesh.of"):
        models.load(folder, sharding=where)


def test_the_head_of_a_config_is_true_or_false(folder):
    with pytest.raises(ValueError, match="head='no' must be True or False"):
        models.load_config(folder, head="no")


def test_every_backend_that_is_chosen_here_agrees(folder):
    config, params = models.load(folder)
    auto, plain = (models.prompt_logits(config, params, IDS, chunk=8, backend=b) for b in ("auto", "sdpa"))
    np.testing.assert_allclose(auto, plain, atol=1e-4 * np.std(plain))


def test_logits_only_where_they_are_wanted(folder):
    config, params = models.load(folder)
    meta = jattn.CommonAttentionMetadata.from_lengths([3, 2], [3, 2], [[0], [1]], 4)
    run = jax.jit(models.forward, static_argnums=0, static_argnames="backend")
    args = config, params, np.arange(5), config.make_caches(2, 4, "float32"), meta
    _, every = run(*args, backend="sdpa")
    _, some = run(*args, logits_at=meta.logits_at_last_token(), backend="sdpa")
    np.testing.assert_allclose(some, every[jnp.array([2, 4])], atol=1e-5)


def test_shards_and_one_file_are_the_same_model(folder, tmp_path):
    tiny.write_sharded(tmp_path)
    one, many = models.load(folder), models.load(tmp_path)
    assert one[0] == many[0] and hash(one[0]) == hash(many[0])
    jax.tree.map(np.testing.assert_array_equal, one[1], many[1])


def test_weights_come_in_the_dtype_and_place_that_was_asked_for(folder):
    device = jax.devices()[1]
    place = jax.sharding.SingleDeviceSharding(device)
    _, stored = models.load(folder)
    told = []
    _, params = models.load(folder, dtype="bfloat16", sharding=place, progress=lambda *news: told.append(news))
    assert [news[:2] for news in told] == [(i, len(told)) for i in range(len(jax.tree.leaves(params)))]
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(stored), strict=True):
        assert x.dtype == jnp.bfloat16 and x.devices() == {device}
        np.testing.assert_array_equal(x, y.astype(jnp.bfloat16))


def test_a_fingerprint_is_of_the_weights(folder, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for path in (first, second):
        shutil.copytree(folder, path)
    assert checkpoint.fingerprint(first) == checkpoint.fingerprint(second) == checkpoint.fingerprint(folder)
    file = second / checkpoint.SINGLE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert checkpoint.fingerprint(first) != checkpoint.fingerprint(second)


@pytest.mark.parametrize("content", [b"", b"12", b"\xff" * 8 + b"x"], ids=["empty", "two bytes", "a huge header"])
def test_a_fingerprint_of_a_damaged_file_is_a_number_or_names_it(folder, tmp_path, content):
    shutil.copytree(folder, tmp_path / "a")
    file = tmp_path / "a" / checkpoint.SINGLE
    file.write_bytes(content)
    if content:
        assert checkpoint.fingerprint(tmp_path / "a") != checkpoint.fingerprint(folder)
    else:
        with pytest.raises(ValueError, match=f"{checkpoint.SINGLE} is empty"):
            checkpoint.fingerprint(tmp_path / "a")


def test_a_sharding_may_be_chosen_by_logical_axes(folder):
    mesh = jax.sharding.Mesh(jax.devices()[:2], "m")
    split = lambda path, weight: jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(*("m" if axis in ("heads", "mlp") else None for axis in weight.axes))
    )
    _, params = models.load(folder, sharding=split)
    assert params["layers"][0]["attn"]["q"]["kernel"].sharding.spec[1] == "m"
    assert params["embed"].sharding.is_fully_replicated


def test_random_params_have_the_loaded_ones_shapes(folder):
    config, params = models.load(folder)
    made = models.init_params(config, 1, "bfloat16")
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)
    assert {x.dtype for x in jax.tree.leaves(made)} == {jnp.dtype("bfloat16")}
    axes = models.logical_axes(config)
    assert axes["layers"][1]["mlp"]["down"]["kernel"] == ("mlp", "embed")


def test_more_end_tokens_come_from_the_generation_config(tmp_path):
    tiny.write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[2, 7])))
    assert models.load_config(tmp_path).eos_token_ids == (2, 7)


def test_an_end_token_of_minus_1_is_none_beside_a_generation_config_too(tmp_path):
    tiny.write(tmp_path, tiny.CONFIG | dict(eos_token_id=-1))
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[7, -1])))
    assert models.load_config(tmp_path).eos_token_ids == (7,)


@pytest.mark.parametrize("made_of", [jattn.Engine, jattn.Embedder])
def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_read(made_of, tmp_path, monkeypatch):
    tiny.write(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    monkeypatch.setattr(models, "load", lambda *args, **options: pytest.fail("its weights were read"))
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer.json \(it has tokenizer.model\).*save_pretrained"):
        made_of.from_pretrained(tmp_path, **({} if made_of is jattn.Engine else dict(pooling="mean")))


def test_a_bare_decoders_names_are_taken_too(folder, tmp_path):
    made = {name.removeprefix("model."): x for name, x in tiny.tensors().items() if name != "lm_head.weight"}
    tiny.write(tmp_path, tiny.CONFIG | dict(tie_word_embeddings=True), made)
    config, params = models.load(tmp_path)
    assert config.tied_embeddings and "head" not in params
    np.testing.assert_array_equal(params["embed"], models.load(folder)[1]["embed"])


WRONG_CONFIGS = {
    "an unknown key": (dict(mystery_scale=2.0), "mystery_scale=2.0"),
    "an unknown family": (dict(model_type="mamba"), "mamba.*supported are llama"),
    "an unknown rope": (dict(rope_scaling=dict(rope_type="spiral", factor=2.0)), "spiral.*supported are"),
    "an unknown rope key": (dict(rope_scaling=dict(rope_type="linear", factor=2.0, twist=1.0)), "twist"),
    "quantised weights": (dict(quantization_config=dict(quant_method="quanto")), "quantization_config"),
    "an unknown activation": (dict(hidden_act="cube"), "cube.*silu"),
    "a missing key": (dict(rms_norm_eps=None), "rms_norm_eps"),
    "another kind of layer": (dict(layer_types=["full_attention", "mamba"]), "mamba"),
}


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_a_config_that_asks_for_what_is_not_built_is_refused_by_name(name):
    change, message = WRONG_CONFIGS[name]
    with pytest.raises((jattn.UnsupportedError, ValueError), match=message):
        models.config_of(tiny.CONFIG | change)


def test_harmless_keys_pass():
    harmless = dict(torch_dtype="bfloat16", initializer_range=0.1, use_cache=False, architectures=["X"], mystery=None)
    assert models.config_of(tiny.CONFIG | harmless) == models.config_of(tiny.CONFIG)


def test_a_checkpoint_that_does_not_fit_says_what_is_wrong(tmp_path):
    made = tiny.tensors()
    made["model.layers.0.self_attn.q_norm.weight"] = made.pop("model.norm.weight")
    tiny.write(tmp_path, made=made)
    with pytest.raises(ValueError, match="(?s)model.norm.weight' is missing.*q_norm.weight' is not used by this model"):
        models.load(tmp_path)
    made = tiny.tensors()
    made["lm_head.weight"] = made["lm_head.weight"][:-1]
    tiny.write(tmp_path, made=made)
    with pytest.raises(ValueError, match=r"lm_head.weight.*head.kernel.*\(16, 30\).*\(16, 31\)"):
        models.load(tmp_path)


def test_a_folder_without_weights_or_config_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ValueError, match="not JSON"):
        models.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIG))
    with pytest.raises(FileNotFoundError, match="safetensors"):
        models.load(tmp_path)


def test_prompts_that_cannot_be_served_are_refused(folder):
    config, params = models.load(folder)
    for ids, chunk, message in ((range(65), None, "max_positions"), ([], None, "at least one"), ([1], 0, "chunk")):
        with pytest.raises(ValueError, match=message):
            models.prompt_logits(config, params, list(ids), chunk=chunk)


def test_importing_the_library_reads_no_checkpoint_library():
    program = "import jattn, sys; print(sorted({'safetensors', 'transformers', 'torch', 'flax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tree.ROOT)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("directory", [None, 3, b"folder"])
def test_a_folder_that_is_no_path_is_named(directory):
    for read in (models.load, models.load_config):
        with pytest.raises(TypeError, match="directory must be str or PathLike, got .*pass the path of a folder"):
            read(directory)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_beside_tied_embeddings_must_repeat_them(tmp_path, is_equal):
    """transformers 5 would use a head with other numbers, and other programs would not."""
    config = tiny.CONFIG | dict(tie_word_embeddings=True)
    made = tiny.tensors(config)
    if is_equal:
        made["lm_head.weight"] = made["model.embed_tokens.weight"]
    tiny.write(tmp_path, config, made)
    if is_equal:
        assert models.load(tmp_path)[0].tied_embeddings
        return
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'lm_head.weight' differs.*tie_word_embeddings"):
        models.load(tmp_path)
    models.load(tmp_path, head=False)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_tied_embeddings_may_be_stored_as_the_head_alone(tmp_path, is_sharded):
    """safetensors.torch.save_model keeps the first of a tensor's names in alphabetical order."""
    config = tiny.CONFIG | dict(tie_word_embeddings=True)
    made = tiny.tensors(config)
    made["lm_head.weight"] = embed = made.pop("model.embed_tokens.weight")
    tiny.write(tmp_path, config, made)
    if is_sharded:
        index = dict(metadata={}, weight_map=dict.fromkeys(made, "model.safetensors"))
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for head in (True, False):
        np.testing.assert_array_equal(models.load(tmp_path, head=head)[1]["embed"], embed)
    assert stored_weights(tmp_path)["embed"].shape == embed.shape


def test_a_head_alone_is_no_table_of_embeddings_where_they_are_not_tied(tmp_path):
    made = tiny.tensors()
    del made["model.embed_tokens.weight"]
    tiny.write(tmp_path, tiny.CONFIG, made)
    with pytest.raises(ValueError, match=r"tensor 'model.embed_tokens.weight' is missing"):
        models.load(tmp_path)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_head_beside_tied_embeddings_that_are_quantised_is_refused(tmp_path, has_head):
    """Its floats do not repeat them."""
    config = hub.CONFIG | dict(tie_word_embeddings=True, quantization_config=hub.AWQ)
    made = tiny.tensors(config)
    parts, _ = hub.awq_pack(made.pop("model.embed_tokens.weight"))
    made |= {f"model.embed_tokens.{end}": x for end, x in parts.items()}
    if not has_head:
        made.pop("lm_head.weight")
    (tmp_path / "config.json").write_text(json.dumps(config))
    hub.save(tmp_path / "model.safetensors", made)
    if not has_head:
        assert models.load(tmp_path)[1]["embed"].format == "int4"
        return
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'lm_head.weight' differs.*tie_word_embeddings"):
        models.load(tmp_path)
