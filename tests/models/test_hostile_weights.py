"""Weights of a model folder are not trusted: an error names the file and tensor that cannot be used."""

import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import models
from jattn.models.checkpoint import Checkpoint, is_finite
from jattn.models.families import FAMILIES
from jattn.models.tensor_names import count_layer_tensors
from tests.models import examples, folders, tiny
from tests.models.folders import INDEX, LFS, ONE, TWO, table


@pytest.fixture
def folder(tmp_path):
    return folders.make(tmp_path)


def index(path, change):
    """The index, changed by a function of its weight_map."""
    values = json.loads((path / INDEX).read_text())
    change(values["weight_map"])
    (path / INDEX).write_text(json.dumps(values))


def test_the_index_and_the_files_agree_on_where_each_tensor_is(folder):
    from safetensors.numpy import load_file, save_file

    first = sorted(load_file(folder / ONE))[0]
    index(folder, lambda table: table.update({first: TWO}))
    with pytest.raises(ValueError, match=f"'{first}' is in {TWO}.*{ONE} has"):
        models.load(folder)
    index(folder, lambda table: table.pop(first))
    with pytest.raises(ValueError, match=f"{ONE} has a tensor '{first}' that {INDEX} does not list"):
        models.load(folder)
    index(folder, lambda table: table.update({first: ONE, "model.ghost": ONE}))
    with pytest.raises(ValueError, match="'model.ghost' is in .*no file has it"):
        models.load(folder)
    save_file(load_file(folder / TWO) | {first: np.zeros(1, np.float32)}, folder / TWO)
    with pytest.raises(ValueError, match=f"'{first}' is in .*{ONE} and in {TWO} too"):
        models.load(folder)
    (folder / TWO).unlink()
    with pytest.raises(FileNotFoundError, match=f"{TWO} is listed in .*download is not complete"):
        models.load(folder)


@pytest.mark.parametrize(
    "asked",
    [
        dict(model_type="mixtral", num_hidden_layers=10_000, num_local_experts=10_000, num_experts_per_tok=2),
        dict(model_type="mixtral", num_hidden_layers=2, num_local_experts=65_536, num_experts_per_tok=2),
        dict(num_hidden_layers=10_000),
    ],
    ids=["layers times experts", "experts", "layers"],
)
def test_a_config_that_asks_for_far_more_than_the_files_have_is_refused_at_once(folder, asked):
    """Its table of tensors would have 300,000,000 names."""
    (folder / "config.json").write_text(json.dumps(tiny.CONFIG | asked))
    began = time.perf_counter()
    with pytest.raises(
        ValueError, match=r"config.json asks for \d+ tensors .* have 21: they are not of the same model"
    ) as said:
        models.load(folder)
    assert time.perf_counter() - began < 60 and "\n" not in str(said.value)


@pytest.mark.parametrize("name", examples.ALL)
def test_the_layers_are_counted_as_they_are_listed(name):
    """The count equals the number of tensors in the whole table that belong to layers."""
    values = examples.ALL[name]
    config, family = models.config_of(values), FAMILIES[values["model_type"]]
    listed = {name for source in family.tensors(config).values() for name in source.names}
    # by all layers; of an encoder beside the decoder
    shared = re.compile(r"relative_attention_bias|^encoder\.|albert\.encoder")
    of_layer = re.compile(r"(?<!encoder\.)(layers?|h|blocks)\.\d+\.|(berta?|mpnet|electra|ernie)\.encoder")
    inside = {name for name in listed if of_layer.search(name) and not shared.search(name)}
    of_pairs = [n for n in inside if config.family == "longcat_flash" and re.search(r"mlp\.(experts|router)\.", n)]
    assert count_layer_tensors(config, family.tensors) == len(inside) - len(of_pairs) // 2  # each counts as a half


def test_two_checkpoints_in_one_folder_are_not_mixed(folder):
    (folder / INDEX).unlink()
    (folder / "copy.safetensors").write_bytes((folder / ONE).read_bytes())
    with pytest.raises(ValueError, match=f"copy.safetensors and in {ONE} too"):
        models.load(folder)


FLOAT = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN_SHARD = {
    "empty": (b"", "is empty"),
    "a pointer": (LFS, "Git LFS"),
    "a few bytes": (b"123", "not a complete"),
    "a huge table": (table({}, length=2**63), "not a complete"),
    "no table": (table(b"PK\3\4 a zip or a pickle"), "not a complete"),
    "overlapping": (table({"a": FLOAT, "b": FLOAT}, bytes(8)), "not a complete"),
    "cut": (table({"a": FLOAT}, bytes(7)), "not a complete"),
    "too long": (table({"a": FLOAT}, bytes(9)), "not a complete"),
    "another size": (table({"a": FLOAT | {"shape": [3]}}, bytes(8)), "not a complete"),
    "overflowing": (table({"a": FLOAT | {"shape": [2**40, 2**40]}}, bytes(8)), "not a complete"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_SHARD)
def test_a_shard_that_cannot_be_read_is_named(folder, name):
    content, message = BROKEN_SHARD[name]
    (folder / TWO).write_bytes(content)
    with pytest.raises(ValueError, match=f"{TWO}.*{message}"):
        models.load(folder)


def test_two_tensors_of_one_name_in_a_table_are_refused(folder):
    """Parsers differ in which one they take."""
    content = (folder / TWO).read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    rows = json.loads(content[8:begin])
    name = next(iter(rows.keys() - {"__metadata__"}))
    again = json.dumps(rows)[:-1] + f', "{name}": {json.dumps(rows[name])}}}'
    (folder / TWO).write_bytes(table(again.encode(), content[begin:]))
    with pytest.raises(ValueError, match=f"{TWO}: its table of tensors cannot be read: the key '{name}' appears twice"):
        models.load(folder)


NAME = "model.layers.0.mlp.up_proj.weight"
WRONG_TENSORS = {
    "integers": (lambda x: x.astype(np.int32), "int32.*must be one of float16"),
    "bytes": (lambda x: x.astype(np.uint8), "uint8.*must be one of float16"),
    "complex": (lambda x: x.astype(np.complex64), "complex64.*must be one of float16"),
    "NaN": (lambda x: np.where(x == x.max(), np.nan, x), "NaN or infinity"),
    "infinity": (lambda x: np.where(x == x.max(), -np.inf, x).astype(np.float16), "NaN or infinity"),
    "another shape": (lambda x: x[:, :-1], r"up.kernel the shape \(15, 20\) but config.json says \(16, 20\)"),
    "one axis": (lambda x: x.ravel(), "shape"),
    "no axis": (lambda x: x.ravel()[0], "shape"),
    "nothing": (lambda x: x[:0], "shape"),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_a_tensor_that_is_no_weight_is_named(tmp_path, name):
    change, message = WRONG_TENSORS[name]
    made = tiny.tensors()
    made[NAME] = change(made[NAME])
    tiny.write(tmp_path, made=made)
    with pytest.raises(ValueError, match=f"model.safetensors: tensor '{NAME}'.*{message}"):
        models.load(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E5M2", "F8_E8M0", "F4"])
def test_a_dtype_without_a_name_in_numpy_is_refused(folder, dtype):
    end = 2 if dtype == "F4" else 4
    content = table({"a": {"dtype": dtype, "shape": [2, 2], "data_offsets": [0, end]}}, bytes(end))
    (folder / INDEX).unlink(), (folder / ONE).unlink(), (folder / TWO).unlink()
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="model.safetensors: tensor 'a' cannot be read"):
        Checkpoint(folder).read("a")


def test_a_dtype_that_is_asked_for_holds_the_weights_or_is_refused(tmp_path):
    made = tiny.tensors()
    made[NAME][3, 4] = 1e5
    tiny.write(tmp_path, made=made)
    assert models.load(tmp_path, dtype="bfloat16")
    with pytest.raises(ValueError, match=f"'{NAME}' does not fit in float16"):
        models.load(tmp_path, dtype="float16")
    with pytest.raises(ValueError, match="dtype=int8 of weights must be None or one of float16"):
        models.load(tmp_path, dtype="int8")
    _, stored = models.load(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path, dtype="auto")[1], stored)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16", "bfloat16", "float32", "float64"])
def test_finite_is_what_numpy_says_it_is(dtype):
    kind = jnp.dtype(dtype)
    rng = np.random.default_rng(0)
    for _ in range(300):  # any bits at all: numbers, both zeros, tiny ones, NaNs of both signs
        x = rng.integers(0, 256, (rng.integers(1, 4), kind.itemsize), np.uint8).view(kind)
        with np.errstate(invalid="ignore"):
            assert is_finite(x) == np.isfinite(x.astype(np.float64)).all()
    assert is_finite(np.zeros((0, 3), kind)) and is_finite(np.ones((), kind)) and is_finite(np.ones(3, np.uint8))
