"""Settings files of a model folder are not trusted: anything wrong gives one sentence with the name of the file."""

import json
import os

import pytest

import jattn
from jattn import models
from jattn.models.files import read_json
from jattn.text.tokenizer import load_tokenizer
from tests.models import folders, tiny
from tests.models.folders import INDEX, LFS, ONE, everything


@pytest.fixture
def folder(tmp_path):
    return folders.make(tmp_path)


def index(path, change):
    """The index, changed by a function of its weight_map."""
    values = json.loads((path / INDEX).read_text())
    change(values["weight_map"])
    (path / INDEX).write_text(json.dumps(values))


def test_the_good_folder_is_read(folder):
    everything(folder)
    assert models.load_config(folder).eos_token_ids == (2, 7)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "..", "", ".", "config.json",
     "\0.safetensors", "x" * 300 + ".safetensors", 7, None, ["a"]],
)  # fmt: skip
def test_an_index_leads_nowhere_but_to_files_beside_it(folder, name):
    (folder.parent / "secret.safetensors").write_bytes((folder / ONE).read_bytes())
    index(folder, lambda table: table.update({"model.norm.weight": name}))
    with pytest.raises((ValueError, FileNotFoundError), match="(?s)index.json"):
        models.load(folder)


@pytest.mark.parametrize("there", [ONE, "config.json", "tokenizer.json", "tokenizer_config.json", INDEX])
def test_only_regular_files_are_opened(folder, there):
    """Reading a pipe would block, and reading a device might never end."""
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path), lambda path: os.symlink(path, path)):
        kept = (folder / there).read_bytes()
        (folder / there).unlink()
        make(folder / there)
        with pytest.raises(ValueError, match=f"{there}.*(regular|cannot be read)"):
            everything(folder)
        os.rmdir(folder / there) if (folder / there).is_dir() else (folder / there).unlink()
        (folder / there).write_bytes(kept)


def test_links_of_a_download_cache_are_followed(folder):
    """A download cache stores files elsewhere, named by their contents."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../blobs/{number}")
    everything(folder)


SETTINGS = ["config.json", "generation_config.json", INDEX, "tokenizer_config.json", "special_tokens_map.json"]
BROKEN_JSON = {
    "empty": (b"", "is empty"),
    "a pointer": (LFS, "Git LFS"),
    "not JSON": (b"{oops", "not JSON"),
    "cut": (b'{"a": [1, 2', "not JSON"),
    "latin-1": ('{"a": "é"}'.encode("latin-1"), "not UTF-8"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
    "a list": (b"[]", "must hold a JSON object"),
    "a word": (b'"x"', "must hold a JSON object"),
    "a key twice": (b'{"a": 1, "a": 2}', "'a' appears twice"),
    "nested": (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "64 deep"),
    "nested a little": (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "64 deep"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
    "infinity": (b'{"a": 1e999}', "1e999.* is not a JSON number"),
    "a long number": (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    "half a pair": (b'{"a": "\\ud800"}', "surrogates"),
    "half a pair as a key": (b'{"a\\udc00": 1}', "surrogates"),
}


@pytest.mark.parametrize("broken", BROKEN_JSON)
@pytest.mark.parametrize("there", SETTINGS)
def test_settings_that_cannot_be_read_are_one_sentence_with_the_files_name(folder, there, broken):
    content, message = BROKEN_JSON[broken]
    (folder / there).write_bytes(content)
    with pytest.raises(ValueError, match=f"{there}.*{message}") as caught:
        everything(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_settings_file_has_a_largest_size_and_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(ValueError, match="config.json has 104857600 bytes, more than"):
        read_json(path)
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a": "\\ud83d\\ude00"}')
    assert read_json(path) == {"a": "😀"}


WRONG_INDEX = {
    "no table": ({}, "weight_map.*None"),
    "an empty table": ({"weight_map": {}}, "weight_map.*{}"),
    "a list": ({"weight_map": [["a", "b"]]}, "weight_map"),
}


@pytest.mark.parametrize("name", WRONG_INDEX)
def test_an_index_of_another_shape_is_refused(folder, name):
    values, message = WRONG_INDEX[name]
    (folder / INDEX).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"index.json.*{message}"):
        models.load(folder)


WRONG_IDS = [True, -2, "2", 2.0, [2, None], [[2]], {"a": 1}]


@pytest.mark.parametrize("there", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", WRONG_IDS, ids=str)
def test_end_tokens_are_ids(folder, there, ids):
    values = json.loads((folder / there).read_text()) | {"eos_token_id": ids}
    (folder / there).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"{there}: eos_token_id="):
        models.load_config(folder)


@pytest.mark.parametrize("kind", [None, 7, ["llama"], {}, "llama2", "x\ny" * 50], ids=str)
def test_a_model_type_that_is_none_is_refused_in_one_line(folder, kind):
    values = tiny.CONFIG | {"model_type": kind, "auto_map": {"AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(jattn.UnsupportedError, match="model_type=.*auto_map names is never run") as caught:
        models.load(folder)
    assert "\n" not in str(caught.value)


def test_a_name_that_is_no_folder_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="org/model is not a folder.*`hf download NAME --local-dir DIR`"):
        models.load("org/model")
    os.symlink("nowhere", tmp_path / "config.json")
    with pytest.raises(FileNotFoundError, match="config.json is missing"):
        models.load(tmp_path)


def test_a_folder_of_the_hubs_cache_names_the_folder_in_it_that_has_the_model(tmp_path):
    snapshot = tmp_path / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="and \\*.safetensors$"):
        models.load(tmp_path)
    (snapshot / "config.json").touch()
    with pytest.raises(FileNotFoundError, match=f"config.json is missing.*; pass {snapshot}$"):
        models.load(tmp_path)


WRONG_TOKENIZER = {
    "empty": (b"", "is empty"),
    "a pointer": (LFS, "Git LFS"),
    "not JSON": (b"{", "not a tokenizer"),
    "another object": (b'{"a": 1}', "not a tokenizer"),
    "latin-1": (b"\xe9", "not UTF-8"),
    "nested": (b"[" * 100_000, "not a tokenizer"),
}


@pytest.mark.parametrize("name", WRONG_TOKENIZER)
def test_a_tokenizer_that_cannot_be_read_is_named(folder, name):
    content, message = WRONG_TOKENIZER[name]
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"tokenizer.json.*{message}"):
        load_tokenizer(folder)


WRONG_TOKENS = {
    "a number": {"bos_token": 7},
    "no content": {"pad_token": {"text": "x"}},
    "no list": {"additional_special_tokens": "x"},
    "a list of numbers": {"additional_special_tokens": [1]},
    "no object": {"added_tokens_decoder": ["x"]},
    "no id": {"added_tokens_decoder": {"one": {"content": "x"}}},
    "no flag": {"added_tokens_decoder": {"3": {"content": "x", "lstrip": "yes"}}},
    "another id": {"added_tokens_decoder": {"300": {"content": "x"}}},
}


@pytest.mark.parametrize("name", WRONG_TOKENS)
def test_special_tokens_that_are_none_are_refused_with_file_and_key(folder, name):
    (folder / "tokenizer_config.json").write_text(json.dumps(WRONG_TOKENS[name]))
    with pytest.raises(ValueError, match=r"tokenizer(_config)?\.json.*(token|x)"):
        load_tokenizer(folder)
