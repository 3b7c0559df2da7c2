"""A randomly damaged model folder gives only the documented errors, and reading a folder executes nothing in it."""

import json
import random
import subprocess
import sys

import pytest

import jattn
from tests.models import folders
from tests.models.folders import INDEX, ONE, TWO, everything
from tests.rooms import tree


@pytest.fixture
def folder(tmp_path):
    return folders.make(tmp_path)


MUTABLE = [
    INDEX,
    ONE,
    TWO,
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
]


PIECES = [b"null", b"-1", b"[]", b"{}", b'"', b"\0", b"1e400", b"\xff", b","]


def mutated(content, rng):
    """The content with a few bytes changed, or a piece removed, duplicated, moved or taken from another file."""
    at, size = rng.randrange(len(content)), rng.randrange(1, 40)
    kinds = (
        lambda: content[:at],
        lambda: content[:at] + content[at + size :],
        lambda: content[:at] + content[at : at + size] * 2 + content[at + size :],
        lambda: content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
        lambda: content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        lambda: content[:at] + rng.choice(PIECES) + content[at:],
    )  # fmt: skip
    return rng.choice(kinds)()


def test_whatever_a_folder_holds_only_our_errors_come_out_and_name_a_file(folder):
    """500 random changes to the files of a good folder, the same ones on every run."""
    good = {name: (folder / name).read_bytes() for name in MUTABLE}
    rng, refused, read = random.Random(16), 0, 0
    for _ in range(500):
        name = rng.choice(MUTABLE)
        content = good[name]
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            content = mutated(content or b"x", rng)
        (folder / name).write_bytes(content)
        try:
            everything(folder)
            read += 1
        except (ValueError, FileNotFoundError, jattn.UnsupportedError) as error:
            assert any(text in str(error) for text in (name, str(folder), folder.name)), (name, content, error)
            assert type(error) in (ValueError, FileNotFoundError, jattn.UnsupportedError), (name, content, error)
            refused += 1
        (folder / name).write_bytes(good[name])
    assert refused > 400 and read > 20, "most changes are seen, and some bytes do not matter"


def test_loading_runs_nothing_of_the_folder(folder):
    """No module of it is imported, no pickle is read, no process is started, and no unexpected file is opened."""
    (folder / "modeling_evil.py").write_text("raise SystemExit('run')")
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch evil'\ntR.")
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((folder / name).read_text()) | {"auto_map": {"AutoModel": "modeling_evil.Model"}}
        (folder / name).write_text(json.dumps(values))
    program = f"""
import sys
from jattn import models
from jattn.text import load_chat_template, load_tokenizer
import safetensors, tokenizers, jax, numpy
jax.numpy.zeros(3)
seen = set()
def watch(event, args):
    if event == "open" and str(args[0]).startswith({str(folder)!r}):
        seen.add(str(args[0]).rpartition("/")[2])
    if event in ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "socket.connect"):
        print("ran", event, args)
sys.addaudithook(watch)
models.load({str(folder)!r}); load_tokenizer({str(folder)!r}); load_chat_template({str(folder)!r})
print(sorted(seen))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tree.ROOT)
    known = sorted(["config.json", "generation_config.json", INDEX, ONE, TWO, "special_tokens_map.json",
                    "tokenizer.json", "tokenizer_config.json"])  # fmt: skip
    assert done.stdout.strip() == str(known), done.stderr
