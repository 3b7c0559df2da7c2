"""Embedder reads a folder of the sentence-transformers library, and refuses what it would otherwise ignore."""

import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from jattn import Embedder, UnsupportedError, models
from jattn.models.sentence_folder import read_sentence_folder
from tests.models import tiny

WORDS = ["[UNK]", "one", "two", "three", "query:", "[END]"]
POOLING = dict(
    word_embedding_dimension=16, pooling_mode_cls_token=False, pooling_mode_mean_tokens=False,
    pooling_mode_max_tokens=False, pooling_mode_mean_sqrt_len_tokens=False, pooling_mode_weightedmean_tokens=False,
    pooling_mode_lasttoken=True, include_prompt=True,
)  # fmt: skip
MODULES = [
    dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer"),
    dict(idx=1, name="1", path="1_Pooling", type="sentence_transformers.models.Pooling"),
    dict(idx=2, name="2", path="2_Normalize", type="sentence_transformers.models.Normalize"),
]


def put(folder, name, values) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))


@pytest.fixture
def folder(tmp_path):
    """A decoder without a head, which embeds with its last token; its tokenizer ends every text with [END]."""
    made = {name.removeprefix("model."): x for name, x in tiny.tensors().items() if not name.startswith("lm_head")}
    tiny.write(tmp_path, made=made)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="$A [END]", special_tokens=[("[END]", 5)])
    inner.save(str(tmp_path / "tokenizer.json"))
    put(tmp_path, "modules.json", MODULES)
    put(tmp_path, "1_Pooling/config.json", POOLING)
    return tmp_path


def by_hand(folder, ids, size=None):
    config, params = models.load(folder, head=False)
    row = np.asarray(models.embed(config, params, ids, [len(ids)], "last"))[0, :size]
    return row / np.linalg.norm(row)


def test_a_folders_pooling_and_normalisation_are_applied(folder):
    served = Embedder.from_pretrained(folder)
    assert (served.pooling, served.normalize) == ("last", True)
    made = served.embed(["one two", [3, 2, 1], "three"])
    wanted = [by_hand(folder, ids) for ids in ([1, 2, 5], [3, 2, 1], [3, 5])]
    np.testing.assert_allclose(made, wanted, atol=2e-6)
    np.testing.assert_allclose(served.embed(["one two"], dim=6)[0], by_hand(folder, [1, 2, 5], 6), atol=2e-6)
    assert served.embed([]).shape == (0, 16)


@pytest.mark.parametrize("max_batched_tokens", [1, 7, 8192])
def test_inputs_come_back_in_their_order_however_they_are_batched(folder, max_batched_tokens):
    rows = [[1 + n % 3] * n for n in (1, 9, 2, 5, 3)]
    served = Embedder.from_pretrained(folder, max_batched_tokens=max_batched_tokens)
    np.testing.assert_allclose(served.embed(rows), [by_hand(folder, row) for row in rows], atol=2e-6)


def test_prompts_lower_case_and_limits_of_the_folder_are_honoured(folder):
    put(
        folder,
        "config_sentence_transformers.json",
        dict(prompts=dict(query="query: ", other=""), similarity_fn_name="cosine"),
    )
    put(folder, "sentence_bert_config.json", dict(max_seq_length=4, do_lower_case=True))
    served = Embedder.from_pretrained(folder)
    assert served.tokens_of("ONE") == [1, 5] and served.tokens_of("One", "query") == [4, 1, 5]
    with pytest.raises(ValueError, match="5 tokens, and this model reads up to 4"):
        served.embed(["one one one one"])
    with pytest.raises(ValueError, match="prompt='passage' must be one of query, other"):
        served.embed(["one"], prompt="passage")
    put(folder, "config_sentence_transformers.json", dict(prompts=dict(query="query: "), default_prompt_name="query"))
    assert Embedder.from_pretrained(folder).tokens_of("one") == [4, 1, 5]


class OnlyA:
    """A tokenizer whose table has one character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [{"a": 1}[character] for character in text]

    def decode(self, token_ids) -> str:
        return "a" * len(token_ids)


def test_a_text_that_the_tokenizer_cannot_encode_is_refused(folder):
    served = dataclasses.replace(Embedder.from_pretrained(folder), tokenizer=OnlyA())
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text"):
        served.tokens_of("é")


def test_a_model_in_a_folder_of_its_own_is_found(folder):
    inside = folder / "0_Transformer"
    inside.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).rename(inside / name)
    put(folder, "modules.json", [MODULES[0] | dict(path="0_Transformer"), *MODULES[1:2]])
    served = Embedder.from_pretrained(folder)
    assert not served.normalize and len(served.embed(["one"])[0]) == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(pooling_mode_max_tokens=True), r"asks for 2 poolings \(last, max\)"),
        (
            dict(pooling_mode_lasttoken=False, pooling_mode_mean_tokens=True, include_prompt=False),
            "include_prompt=False is not supported",
        ),
        (dict(pooling_mode_cls_token=True), r"asks for 2 poolings \(cls, last\)"),
        (dict(pooling_mode_lasttoken=False), "asks for 0 poolings"),
        (dict(pooling_mode_new=True), "pooling_mode_new=True"),
    ],
)
def test_another_pooling_is_refused_by_name(folder, changes, words):
    put(folder, "1_Pooling/config.json", POOLING | changes)
    with pytest.raises(UnsupportedError, match=words):
        Embedder.from_pretrained(folder)


@pytest.mark.parametrize(
    ("mode", "pooling"),
    [("cls", "cls"), ("mean", "mean"), ("lasttoken", "last"), ("max", "max"), ("weightedmean", "weighted_mean"),
     ("mean_sqrt_len_tokens", "mean_sqrt_len")],
)  # fmt: skip
def test_either_key_of_a_pooling_is_read(folder, mode, pooling):
    put(folder, "1_Pooling/config.json", dict(embedding_dimension=16, pooling_mode=mode, include_prompt=True))
    assert read_sentence_folder(folder).pooling == pooling
    flag = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "weightedmean": "weightedmean_tokens"}
    old = POOLING | dict(pooling_mode_lasttoken=False) | {f"pooling_mode_{flag.get(mode, mode)}": True}
    put(folder, "1_Pooling/config.json", old)
    assert read_sentence_folder(folder).pooling == pooling


def test_both_keys_may_name_the_same_pooling(folder):
    put(folder, "1_Pooling/config.json", POOLING | dict(pooling_mode="lasttoken"))
    assert read_sentence_folder(folder).pooling == "last"
    put(folder, "1_Pooling/config.json", POOLING | dict(pooling_mode="mean"))
    with pytest.raises(UnsupportedError, match=r"asks for 2 poolings \(last, mean\)"):
        read_sentence_folder(folder)


def test_the_settings_of_a_normalisation_are_read(folder):
    put(folder, "2_Normalize/config.json", dict(module_input_name="sentence_embedding"))
    assert read_sentence_folder(folder).normalize
    for settings in (dict(module_input_name="token_embeddings"), dict(module_output_name="x"), dict(p=1)):
        put(folder, "2_Normalize/config.json", settings)
        with pytest.raises(UnsupportedError, match=f"2_Normalize/config.json.*{next(iter(settings))}="):
            read_sentence_folder(folder)


@pytest.mark.parametrize("kind", ["SparseEncoder", "CrossEncoder", 5])
def test_another_kind_of_model_is_refused(folder, kind):
    put(folder, "config_sentence_transformers.json", dict(model_type=kind))
    with pytest.raises(UnsupportedError, match="model_type=.* must be 'SentenceTransformer'"):
        read_sentence_folder(folder)


def test_a_last_token_is_never_of_the_prompt(folder):
    put(folder, "1_Pooling/config.json", POOLING | dict(include_prompt=False))
    assert read_sentence_folder(folder).pooling == "last"


IDENTITY, TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
KERNEL = np.random.default_rng(4).normal(size=(6, 16)).astype(np.float32)
DENSE = dict(in_features=16, out_features=6, bias=True, activation_function=TANH)


def put_dense(folder, name="2_Dense", tensors=None, **changes):
    """A Dense module between the pooling and the normalisation."""
    settings = {key: value for key, value in (DENSE | changes).items() if value is not ...}
    put(folder, f"{name}/config.json", settings)
    made = {"linear.weight": KERNEL, "linear.bias": np.arange(6, dtype=np.float32) / 6} if tensors is None else tensors
    save_file(made, folder / name / "model.safetensors")
    module = dict(path=name, type="sentence_transformers.models.Dense")
    put(folder, "modules.json", [*MODULES[:2], module, MODULES[2]])


def test_dense_modules_of_a_folder_are_applied(folder):
    rows = [[1, 2, 5], [3, 5], [3, 2, 1, 1, 5]]
    pooled = np.asarray(models.embed(*models.load(folder, head=False), np.concatenate(rows), [3, 2, 5], "last"))
    put_dense(folder)
    served = Embedder.from_pretrained(folder)
    assert served.size == 6 and served.embed([]).shape == (0, 6)
    wanted = np.tanh(pooled @ KERNEL.T + np.arange(6) / 6)
    unit = lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(served.embed(rows), unit(wanted), atol=2e-6)
    np.testing.assert_allclose(served.embed(rows, dim=3), unit(wanted[:, :3]), atol=2e-6)
    with pytest.raises(ValueError, match="dim=7 must be an integer from 1 to 6"):
        served.embed(rows, dim=7)
    twice = [dict(path=name, type="sentence_transformers.models.Dense") for name in ("2_Dense", "3_Dense")]
    back = np.ascontiguousarray(KERNEL.T)
    put_dense(folder, "3_Dense", {"linear.weight": back}, in_features=6, out_features=16, bias=False,
              activation_function=IDENTITY, module_input_name="sentence_embedding")  # fmt: skip
    put(folder, "modules.json", [*MODULES[:2], *twice, MODULES[2]])
    np.testing.assert_allclose(Embedder.from_pretrained(folder).embed(rows), unit(wanted @ KERNEL), atol=2e-6)
    half = Embedder.from_pretrained(folder, dtype="float16").dense
    assert {layer.kernel.dtype.name for layer in half} == {"float16"} and half[1].bias is None
    assert {layer.kernel.dtype.name for layer in Embedder.from_pretrained(folder, dtype="auto").dense} == {"float32"}
    with pytest.raises(ValueError, match="dtype=int8 of weights must be None or one of"):
        Embedder.from_pretrained(folder, dtype="int8")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (dict(activation_function="torch.nn.modules.activation.Hardtanh"), UnsupportedError, "activation_function="),
        (dict(activation_function="os.system"), UnsupportedError, "activation_function='os.system'"),
        (dict(activation_function=["Tanh"]), UnsupportedError, "activation_function="),
        (dict(use_residual=True), UnsupportedError, "use_residual=True"),
        (dict(module_input_name="token_embeddings"), UnsupportedError, "module_input_name="),
        (dict(rank=4), UnsupportedError, "rank=4"),
        (dict(in_features=...), ValueError, "has no 'in_features'"),
        (dict(out_features=-6), ValueError, "out_features=-6"),
        (dict(out_features=2**31), ValueError, "out_features=2147483648"),
        (dict(bias="no"), ValueError, "bias='no'"),
        (dict(out_features=7), ValueError, r"linear.weight has the shape \(6, 16\)"),
        (dict(bias=False), ValueError, "has the tensors 'linear.bias', 'linear.weight'"),
        (dict(tensors={"linear.weight": KERNEL}), ValueError, "asks for linear.weight, linear.bias"),
        (dict(tensors={}), ValueError, "asks for linear.weight, linear.bias"),
        (dict(bias=False, tensors={"linear.weight": KERNEL * np.nan}), ValueError, "NaN or infinity"),
        (dict(bias=False, tensors={"linear.weight": KERNEL.astype(np.int8)}), ValueError, "has the dtype int8"),
        (dict(bias=False, in_features=8, tensors={"linear.weight": KERNEL[:, :8]}), ValueError, "gets 16"),
    ],
    ids=str,
)
def test_a_dense_module_that_cannot_be_read_is_refused(folder, changes, error, words):
    tensors = changes.pop("tensors", None)
    put_dense(folder, tensors=None if tensors is None else {k: np.ascontiguousarray(x) for k, x in tensors.items()},
              **changes)  # fmt: skip
    with pytest.raises(error, match=words):
        Embedder.from_pretrained(folder)


def test_a_dense_module_that_does_not_fit_is_refused_before_weights_are_read(folder):
    put_dense(folder, tensors={"linear.weight": np.ones((6, 8), np.float32)}, in_features=8, bias=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"dense\[0\] reads 8 dimensions, but it gets 16"):
        Embedder.from_pretrained(folder)


def test_dimensions_that_the_folder_cannot_keep_are_refused_before_weights_are_read(folder):
    put(folder, "config_sentence_transformers.json", dict(truncate_dim=17))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="dim=17 must be an integer from 1 to 16"):
        Embedder.from_pretrained(folder)


def test_a_dense_module_without_safetensors_says_what_writes_them(folder):
    put_dense(folder)
    (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="never opened.*save"):
        Embedder.from_pretrained(folder)
    (folder / "2_Dense/config.json").unlink()
    with pytest.raises(FileNotFoundError, match="2_Dense/config.json is missing"):
        Embedder.from_pretrained(folder)


@pytest.mark.parametrize(
    ("modules", "error", "words"),
    [
        ([*MODULES, dict(path="3_Dense", type="sentence_transformers.models.Dense")], UnsupportedError, "Dense"),
        ([*MODULES, dict(path="3_LayerNorm", type="sentence_transformers.models.LayerNorm")], UnsupportedError, "Laye"),
        ([MODULES[0] | dict(type="custom_st.Transformer"), MODULES[1]], UnsupportedError, "never run"),
        ([MODULES[0] | dict(path="../other"), MODULES[1]], ValueError, "name of its folder"),
        ([MODULES[0] | dict(path=".."), MODULES[1]], ValueError, "name of its folder"),
        ([MODULES[0] | dict(path="a" * 5000), MODULES[1]], ValueError, "name of its folder"),
        ([MODULES[0] | dict(path="a\0b"), MODULES[1]], ValueError, "name of its folder"),
        ({"a": 1}, ValueError, "must be a list of objects"),
        ([3], ValueError, "must be a list of objects"),
        ([], UnsupportedError, r"has the modules \(none\); supported"),
    ],
)
def test_other_modules_are_refused_by_name(folder, modules, error, words):
    put(folder, "modules.json", modules)
    with pytest.raises(error, match=rf"modules\.json.*{words}"):
        Embedder.from_pretrained(folder)


@pytest.mark.parametrize(
    "field",
    [
        dict(normalize="no"), dict(max_batched_tokens=1.5), dict(max_tokens=0), dict(prompts=None),
        dict(prompts={"a": 5}), dict(dense=[1]), dict(dim=17), dict(lower_case=1), dict(default_prompt="b"),
        dict(dtype="bogus"), dict(dtype="int8"),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_field_is_refused_by_name(folder, field):
    with pytest.raises((ValueError, TypeError), match=next(iter(field)).split("_")[0].removesuffix("s")):
        Embedder.from_pretrained(folder, **field)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(config_args=dict(is_causal=False)), "config_args.*is_causal=False"),
        (dict(config_kwargs=dict(rope_theta=1.0)), "config_kwargs.*rope_theta"),
        (dict(model_args=dict(sliding_window=4)), "model_args.*sliding_window=4"),
        (dict(tokenizer_args=dict(do_lower_case=True)), "tokenizer_args.*do_lower_case=True"),
        (dict(processing_kwargs=dict(text=dict(max_length=3))), "processing_kwargs="),
        (dict(modality_config=dict(text=dict(method="get_text_features"))), "method='get_text_features'"),
        (dict(modality_config=dict(message=dict(method="forward"))), "message="),
        (dict(modality_config=[1]), r"modality_config=\[1\] must be an object"),
        (dict(chunk=3), "chunk=3"),
    ],
)
def test_settings_of_the_first_module_are_not_ignored(folder, settings, words):
    put(folder, "sentence_bert_config.json", settings)
    with pytest.raises((UnsupportedError, ValueError), match=f"sentence_bert_config.json.*{words}"):
        read_sentence_folder(folder)


def test_settings_that_the_library_writes_are_taken(folder):
    text = dict(method="forward", method_output_name="last_hidden_state")
    put(
        folder,
        "sentence_bert_config.json",
        dict(
            transformer_task="feature-extraction", module_output_name="token_embeddings", unpad_inputs=True,
            modality_config=dict(text=text), model_args=dict(torch_dtype="bfloat16", attn_implementation="sdpa"),
            config_args={}, tokenizer_args=dict(padding_side="left"),
        ),
    )  # fmt: skip
    assert read_sentence_folder(folder).max_tokens is None


@pytest.mark.parametrize(("stored", "most"), [(3, 3), (10**30, None), (1e30, None), (None, None)])
def test_the_longest_text_may_be_in_the_tokenizers_settings(folder, stored, most):
    """sentence-transformers 6 saves it there alone, and cuts longer texts."""
    put(folder, "tokenizer_config.json", dict(model_max_length=stored))
    assert read_sentence_folder(folder).max_tokens == most
    put(folder, "sentence_bert_config.json", dict(max_seq_length=4))
    assert read_sentence_folder(folder).max_tokens == 4
    put(folder, "sentence_bert_config.json", dict(max_seq_length=4, tokenizer_args=dict(model_max_length=5)))
    assert read_sentence_folder(folder).max_tokens == 5


@pytest.mark.parametrize("wrong", ["512", True, 0, -1, [512]])
def test_a_wrong_length_in_the_tokenizers_settings_is_refused(folder, wrong):
    put(folder, "tokenizer_config.json", dict(model_max_length=wrong))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: model_max_length="):
        read_sentence_folder(folder)


@pytest.mark.parametrize(
    ("directory", "error", "words"),
    [
        (None, TypeError, "directory must be str or PathLike, got NoneType"),
        (b"x", TypeError, "directory must be str or PathLike, got bytes"),
        ("nowhere", FileNotFoundError, "nowhere is not a folder"),
        ("model.gguf", UnsupportedError, "GGUF is not supported"),
    ],
)
def test_what_is_no_folder_is_said_so(directory, error, words):
    with pytest.raises(error, match=words):
        Embedder.from_pretrained(directory)


def test_an_unreadable_list_of_modules_is_said_once(folder):
    (folder / "modules.json").unlink()
    (folder / "modules.json").mkdir()
    with pytest.raises(ValueError, match=r"^[^:]*modules\.json is a folder") as error:
        Embedder.from_pretrained(folder)
    assert "is not JSON" not in str(error.value)


def test_unknown_settings_are_refused(folder):
    put(folder, "config_sentence_transformers.json", {"__version__": {}, "prompts": {}, "rerank": 4})
    with pytest.raises(UnsupportedError, match="rerank"):
        Embedder.from_pretrained(folder)
    for name, value in (("transformer_task", "fill-mask"), ("module_output_name", "logits"), ("query_length", 32)):
        put(folder, "sentence_bert_config.json", {name: value})
        with pytest.raises(UnsupportedError, match=f"{name}={value!r}"):
            read_sentence_folder(folder)


def test_the_dimensions_of_a_folder_are_kept_unless_a_call_says(folder):
    settings = dict(truncate_dim=4, prompts=dict(query=None, document="query: "))
    put(folder, "config_sentence_transformers.json", settings)
    served = Embedder.from_pretrained(folder)
    assert served.prompts == dict(document="query: ")
    np.testing.assert_allclose(served.embed(["one two"])[0], by_hand(folder, [1, 2, 5], 4), atol=2e-6)
    np.testing.assert_allclose(served.embed(["one two"], dim=6)[0], by_hand(folder, [1, 2, 5], 6), atol=2e-6)
    for wrong, words in ((17, "dim=17 must be an integer from 1 to 16"), ("4", "truncate_dim='4' must be")):
        put(folder, "config_sentence_transformers.json", dict(truncate_dim=wrong))
        with pytest.raises(ValueError, match=words):
            Embedder.from_pretrained(folder)


@pytest.mark.parametrize("name", ["score.weight", "classifier.out_proj.weight", "classifier.bias", "qa_outputs.bias"])
def test_a_reranker_is_refused_by_one_sentence(folder, name):
    """Its head gives scores, which are not computed."""
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: np.ones((1, 16), np.float32)}, folder / "model.safetensors")
    for read in (models.load, Embedder.from_pretrained):
        with pytest.raises(UnsupportedError, match=f"head of a classifier .tensor '{name}'"):
            read(folder)


def test_an_option_that_an_embedder_does_not_have_is_named_before_a_weight_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(models, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(
        TypeError, match="^Embedder.from_pretrained has no argument max_token, params; did you mean max_tokens[?]$"
    ):
        Embedder.from_pretrained(folder, max_token=3, params={})


def test_a_folder_that_does_not_say_its_pooling_needs_one(folder):
    (folder / "modules.json").unlink()
    with pytest.raises(ValueError, match="pass pooling="):
        Embedder.from_pretrained(folder)
    assert len(Embedder.from_pretrained(folder, pooling="mean").embed(["one"])) == 1


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ("one", "put a single input in a list"),
        ([5, 6, 7], "put a single input in a list"),
        (None, "put a single input in a list"),
        (b"one", "put a single input in a list"),
        (bytearray(b"one"), "put a single input in a list"),
        ([memoryview(b"one")], "must have one text, or one list of token ids"),
        ([np.array(5)], "put a single input in a list"),
        ([[]], "has no tokens"),
        ([[31]], "token id 31 must be an integer from 0 to 30"),
        ([[True]], "token id True"),
        ([[1] * 65], "65 tokens, and this model reads up to 64"),
    ],
)
def test_inputs_that_cannot_be_embedded_are_refused(folder, inputs, words):
    with pytest.raises(ValueError, match=words):
        Embedder.from_pretrained(folder).embed(inputs)
