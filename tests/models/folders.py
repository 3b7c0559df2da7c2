"""A complete model folder made by hand, for tests that damage it, and all functions that read one."""

import json
import struct
from pathlib import Path

import tokenizers

from jattn import models
from jattn.text.chat import load_chat_template
from jattn.text.tokenizer import load_tokenizer
from tests.models import tiny

INDEX, ONE, TWO = "model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"


def make(parent: Path) -> Path:
    """Two shards, an index, and every settings file."""
    path = parent / "tinyfolder"
    path.mkdir()
    tiny.write_sharded(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    settings = {"chat_template": "{{ messages[0].content }}", "bos_token": "<s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "one": 1, "</s>": 2}, unk_token="<s>"))
    inner.save(str(path / "tokenizer.json"))
    return path


def everything(path):
    """Calls everything that reads a folder, and renders one chat."""
    models.load(path)
    load_tokenizer(path)
    if (template := load_chat_template(path)) is not None:
        template.render([{"role": "user", "content": "one"}])


def table(header, data=b"", length=None):
    """A *.safetensors file with this table."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data
