"""Chats give the same prompts, as text and tokens, as transformers with the same folder."""

import copy
import json

import pytest
import tokenizers

from jattn.text import chat_prompt, load_tokenizer
from jattn.text.chat import ChatTemplate, load_chat_template
from tests.text.templates import CHATS, TEMPLATES

transformers = pytest.importorskip("transformers", reason="the witness needs the extra 'parity'")

TOKENS = dict(
    bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>", sep_token="<sep>", image_token="<image>"
)
EXTRA = dict(additional_special_tokens=["<a>", "<b>"], extra_special_tokens={"boi_token": "<boi>"})


def make(folder, settings, *, truncation=False):
    """A folder with a byte-level tokenizer that adds <s> in front of a prompt, and these settings files."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    inner.train_from_iterator(["Hello there, what is the weather in Paris? The answer is 4."] * 4, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    if truncation:
        inner.enable_truncation(4)
        inner.enable_padding(length=64, pad_id=2, pad_token="</s>")
    inner.save(str(folder / "tokenizer.json"))
    for name, values in settings.items():
        (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_the_text_that_transformers_makes(theirs, name, chat):
    messages, options = copy.deepcopy(CHATS[chat])
    begins = not options.get("continue_final_message")
    given = dict(add_generation_prompt=begins) | {k: v for k, v in options.items() if k != "variables"}
    try:
        wanted = theirs.apply_chat_template(
            copy.deepcopy(messages),
            chat_template=TEMPLATES[name],
            tokenize=False,
            **given,
            **options.get("variables", {}),
        )
    except Exception:
        wanted = None
    mine = ChatTemplate(TEMPLATES[name], TOKENS | {"boi_token": "<boi>"})
    if wanted is None:
        with pytest.raises(ValueError, match="the chat template|continue_final_message"):
            mine.render(messages, **options)
    else:
        assert mine.render(messages, **options) == wanted


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return make(tmp_path_factory.mktemp("chat"), {"tokenizer_config.json": TOKENS | EXTRA})


TURNS = TEMPLATES["turns, every special token, the prompt's beginning"]
NAMED = [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": "T" + TURNS}]
VOCABULARY = 293  # of the trained tokenizer
ADDED = {
    str(VOCABULARY + i): dict(
        content=text, lstrip=False, rstrip=i == 1, normalized=False, single_word=False, special=i < 2
    )
    for i, text in enumerate(("<pad>", "<sep>", "<think>"))
}
FOLDERS = {
    "in the settings": {"tokenizer_config.json": TOKENS | EXTRA | {"chat_template": TURNS}},
    "templates by name": {"tokenizer_config.json": TOKENS | {"chat_template": NAMED}},
    "tokens in their own map": {
        "tokenizer_config.json": {"chat_template": TURNS, "eos_token": "<unk>"},
        "special_tokens_map.json": {name: {"content": text} for name, text in TOKENS.items()},
    },
    "tokens by id": {"tokenizer_config.json": TOKENS | {"chat_template": TURNS, "added_tokens_decoder": ADDED}},
    "a file": {
        "tokenizer_config.json": TOKENS | {"chat_template": "not this one"},
        "chat_template.jinja": TURNS,
    },
}


@pytest.mark.parametrize("truncation", [False, True])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folders_chats_and_texts_are_the_tokens_that_transformers_makes(tmp_path, name, truncation):
    """A chat begins with one <s>, not two; long texts are not truncated, short ones not padded."""
    theirs = make(tmp_path, FOLDERS[name], truncation=truncation)
    code, template = load_tokenizer(tmp_path), load_chat_template(tmp_path)
    for messages, options in (CHATS["one"], CHATS["several"], CHATS["tools"]):
        wanted = theirs.apply_chat_template(
            copy.deepcopy(messages), tokenize=True, return_dict=False, add_generation_prompt=True, **options
        )
        ids = chat_prompt(code, template, messages, **options)
        assert ids == wanted and ids.count(1) == 1
        assert code.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    for text in ("Hello there", "<pad>x<sep> <think> y</s>", "<a><image><boi> Paris " * 9):
        for add in (True, False):
            assert code.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)


def test_templates_of_a_folder_of_templates_are_there_by_name(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    files = {"chat_template.jinja": TURNS, "additional_chat_templates/rag.jinja": "RAG{{ messages[0].content }}"}
    theirs = make(tmp_path, {"tokenizer_config.json": TOKENS} | files)
    mine = load_chat_template(tmp_path)
    messages, _ = CHATS["one"]
    for name in ("default", "rag"):
        wanted = theirs.apply_chat_template(messages, chat_template=name, tokenize=False, add_generation_prompt=True)
        assert mine.render(messages, template=name) == wanted


ROLES = {
    "a name": dict(pad_token="<x>"),
    "a list": dict(additional_special_tokens=["<x>"]),
    "a list of newer folders": dict(extra_special_tokens=["<x>"]),
    "a name of the model's own": dict(extra_special_tokens={"x_token": "<x>"}),
}


@pytest.mark.parametrize("where", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("flag", ["rstrip", "lstrip", "single_word", "normalized"])
@pytest.mark.parametrize("role", ROLES)
def test_a_token_that_is_there_keeps_its_flags_and_is_special_only_by_a_name(tmp_path, role, flag, where):
    """A list of special tokens adds those that are missing; it does not hide others, such as <tool_call>."""
    make(tmp_path, {"tokenizer_config.json": TOKENS})
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False) | {flag: True}
    added = {str(inner.get_vocab_size()): dict(content="<x>", special=False, **flags)}
    if where == "tokenizer.json":
        inner.add_tokens([tokenizers.AddedToken("<x>", **flags)])
        inner.save(str(tmp_path / "tokenizer.json"))
    more = {} if where == "tokenizer.json" else dict(added_tokens_decoder=added)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS | ROLES[role] | more))
    theirs, mine = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    for text in ("Hello <x> there", "a<x>b", "<x>"):
        ids = theirs.encode(text)
        assert mine.encode(text) == ids
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
