"""`jattn plan` needs a config.json, prints a table or JSON, and names what it cannot plan."""

import json

import pytest

from jattn import cli
from tests.models import tiny


@pytest.fixture
def folder(tmp_path):
    config = tiny.CONFIG | dict(vocab_size=32, dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_table_for_each_kind_of_device(folder, capsys):
    assert cli.main(["plan", "--model", str(folder), "--devices", "h200x2", "l4"]) == 0
    printed = capsys.readouterr().out
    assert "2 x h200: 131.3 GiB, 4800 GB/s" in printed and "1 x l4: 22.4 GiB" in printed
    assert "tensor 2, data 1, context 1" in printed and "tensor 1, data 1, context 2" in printed
    assert " MiB " in printed and "0.0 GiB" not in printed, "weights of a small model look like none"


def test_json_moves_with_every_option(folder, capsys):
    def planned(*options):
        assert cli.main(["plan", "--model", str(folder), "--devices", "h100", "--json", *options]) == 0
        (found,) = json.loads(capsys.readouterr().out)
        assert found["devices"]["count"] == 1 and found["dtype"] == ("float32" if "--dtype" in options else "bfloat16")
        return found["layouts"][0]

    plain = planned()
    assert plain["layout"] == dict(tensor=1, data=1, context=1) and set(plain["decode_seconds"]) == {"1", "4", "16"}
    options = dict(
        quantization="int8", cache_dtype="float32", max_model_len="32", max_num_seqs="2", max_num_batched_tokens="512",
        memory_fraction="0.0001", dtype="float32",
    )  # fmt: skip
    for name, value in options.items():
        assert planned(f"--{name.replace('_', '-')}", value) != plain, name
    assert planned("--cache-dtype", "float32")["cache_bytes"] == 2 * plain["cache_bytes"]


WRONG = {
    "h200z": (["--devices", "h200z"], "h200x8; the kinds are a100"),
    "digits": (["--devices", "h200x٢"], "devices='h200x٢' must be KIND or KINDxN"),
    "many digits": (["--devices", f"h200x{'1' * 5000}"], "must be KIND or KINDxN"),
    "empty": (["--devices", "l4", "--model", ""], "--model is empty"),
    "dtype": (["--devices", "l4", "--cache-dtype", "bf17"], "--cache-dtype"),
    "fraction": (["--devices", "l4", "--memory-fraction", "2"], "--memory-fraction 2.0 must be"),
    "seqs": (["--devices", "l4", "--max-num-seqs", "0"], "--max-num-seqs=0 must be a positive integer"),
    "tokens": (["--devices", "l4", "--max-num-batched-tokens", f"{10**400}"], "is outside int32"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_one_line(folder, name, capsys):
    options, message = WRONG[name]
    assert cli.main(["plan", "--model", str(folder), *options]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_model_that_fits_in_no_layout_is_an_exit_code(folder, capsys):
    asked = ["plan", "--model", str(folder), "--devices", "l4", "--max-model-len", "65"]
    assert cli.main(asked) == 1
    assert ": max_model_len=65 is more than the model's 64 positions" in capsys.readouterr().out


def test_weights_that_are_stored_quantised_need_their_headers(folder, capsys):
    config = tiny.CONFIG | dict(quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]))
    (folder / "config.json").write_text(json.dumps(config))
    assert cli.main(["plan", "--model", str(folder), "--devices", "l4"]) == 2
    assert "stored quantised (fp8); which, only the headers of its *.safetensors say" in capsys.readouterr().err
    assert cli.main(["plan", "--model", str(folder), "--devices", "l4", "--quantization", "int8"]) == 2
    assert "its weights are quantised (fp8); leave --quantization out" in capsys.readouterr().err


def weight_bytes(folder, capsys, *options):
    assert cli.main(["plan", "--model", str(folder), "--devices", "h100", "--json", *options]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    return found["dtype"], found["layouts"][0]["weight_bytes"]


def test_weights_that_are_there_have_the_dtype_in_which_they_are_stored(folder, capsys):
    """The engine loads them so, whatever config.json says; many folders say another dtype, or none."""
    told = weight_bytes(folder, capsys)
    config = json.loads((folder / "config.json").read_text())
    tiny.write(folder, config, made := tiny.tensors(config))
    stored = weight_bytes(folder, capsys)
    assert (told[0], stored[0]) == ("bfloat16", "float32")
    assert stored[1] == 2 * told[1] == sum(x.nbytes for x in made.values())
    assert weight_bytes(folder, capsys, "--quantization", "int8")[1] < told[1]
    assert weight_bytes(folder, capsys, "--dtype", "float16") == ("float16", stored[1] // 2)
    assert weight_bytes(folder, capsys, "--dtype", "auto") == stored
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert weight_bytes(folder, capsys) == told, "of a folder without its weights config.json is enough"
    assert cli.main(["plan", "--model", str(folder), "--devices", "h100", "--dtype", "float32"]) == 0
    assert "the dtype is that of config.json" not in capsys.readouterr().err
    assert weight_bytes(folder, capsys, "--dtype", "float32") == stored
