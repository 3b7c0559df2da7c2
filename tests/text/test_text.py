"""Tokens to text without unfinished characters, stop strings, and a folder's tokenizer and chat template."""

import base64
import json

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st

from jattn.text import ByteTokenizer, ChatTemplate, load_tokenizer
from jattn.text.chat import load_chat_template
from jattn.text.detokenizer import Detokenizer, find_stop, held_back

CODE = ByteTokenizer()


@hypothesis.given(st.text(), st.lists(st.integers(1, 4), max_size=30))
def test_a_stream_is_the_text_and_never_half_a_character(text, sizes):
    tokens, stream, parts = CODE.encode(text), Detokenizer(CODE), []
    while tokens:
        size = sizes.pop() if sizes else 1
        parts.append(stream.add(tokens[:size]))
        tokens = tokens[size:]
    parts.append(stream.finish())
    assert "".join(parts) == stream.text == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@hypothesis.given(
    st.lists(st.sampled_from([*b"a \xe2\x82\xac\xff", 300, 301]), max_size=40),
    st.lists(st.integers(1, 16), max_size=40),
)
def test_a_bursts_text_is_the_text_of_its_tokens_one_by_one(octets, sizes):
    """Also for bytes that are not valid text, and among tokens without text, as 300 is."""
    tokens, ones, bursts = [octet + CODE.num_special for octet in octets], Detokenizer(CODE), Detokenizer(CODE)
    for token in tokens:
        ones.add([token])
    while tokens:
        size = sizes.pop() if sizes else 1
        bursts.add(tokens[:size])
        tokens = tokens[size:]
    ones.finish(), bursts.finish()
    assert bursts.text == ones.text


def test_an_unfinished_character_is_shown_when_nothing_more_comes():
    stream = Detokenizer(CODE)
    assert stream.add(CODE.encode("a€")[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_bytes_that_are_no_text_do_not_hold_the_stream_for_ever():
    stream = Detokenizer(CODE)
    shown = stream.add([0x80 + CODE.num_special] * 12)
    assert len(shown) >= 6


class Counting(ByteTokenizer):
    """It counts the calls of decode, and the most tokens of one."""

    calls, longest = 0, 0

    def decode(self, token_ids):
        self.calls, self.longest = self.calls + 1, max(self.longest, len(token_ids))
        return super().decode(token_ids)


def test_a_burst_without_text_is_decoded_once_or_twice_and_kept_no_longer_than_a_character():
    code = Counting()
    stream = Detokenizer(code, CODE.encode("a"))
    for _ in range(5):
        code.calls = 0
        assert stream.add([300] * 16) == "" and code.calls <= 2
    assert code.longest <= 16 + 8 and stream.add(CODE.encode("b")) == "b"


class Spaced:
    """A tokenizer whose text depends on the token before: a space between words, none before the first."""

    words = ["", "one", "two", "three"]

    def encode(self, text):
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids):
        return " ".join(self.words[t] for t in token_ids if t)


def test_spaces_between_words_survive_a_stream():
    stream = Detokenizer(Spaced())
    assert [stream.add([t]) for t in (1, 2, 0, 3)] == ["one", " two", "", " three"]


def test_stop_strings_are_found_once_and_their_beginnings_held_back():
    assert find_stop("hello END", ["END", "lo"], 0) == (3, "lo")
    assert find_stop("END and more", ["END"], 3) is None, "it ended before what is new"
    assert find_stop("xEND", ["END"], 3) == (1, "END")
    assert held_back("some E", ["END"]) == 1 and held_back("some EN", ["END", "x"]) == 2
    assert held_back("some END", ["END"]) == 0 and held_back("", ["END"]) == 0


def test_a_folder_says_which_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json; write one .*Engine\(\*jattn.models.load"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    with pytest.raises(FileNotFoundError, match="'GPT2Tokenizer' of its tokenizer_config.json is not ByT5Tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "one": 1, "two": 2}, unk_token="<s>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    assert found.encode("one two") == [1, 2] and found.decode([0, 2, 1]) == "two one"


@pytest.mark.parametrize(
    ("stored", "flags", "ids"),
    [
        (dict(lowercase=True), dict(do_lower_case=False), [1, 2, 4]),
        (dict(lowercase=False), dict(do_lower_case=True), [0, 0, 4]),
        (dict(lowercase=True), dict(do_lower_case=True, strip_accents=False), [0, 2, 4]),
        (dict(lowercase=True, strip_accents=False), dict(strip_accents=None), [0, 0, 4]),
        (dict(lowercase=True), dict(tokenize_chinese_chars=False), [0, 0, 5]),
        (dict(lowercase=False, strip_accents=False, handle_chinese_chars=False), {}, [0, 0, 4]),
        (dict(lowercase=False), dict(do_lower_case=None), [0, 0, 4]),
        (dict(lowercase=True), dict(do_lower_case=False, tokenizer_class="PreTrainedTokenizerFast"), [0, 0, 4]),
        (dict(lowercase=True), dict(do_lower_case=False, tokenizer_class=["BertTokenizer"]), [0, 0, 4]),
    ],
)
def test_the_flags_of_berts_tokenizers_count_more_than_the_rules_of_tokenizer_json(tmp_path, stored, flags, ids):
    """As in transformers, where the class makes its rules from the flags, or from its defaults."""
    bert_tokenizer(tmp_path, stored, flags)
    made = load_tokenizer(tmp_path).encode("Cafe caf\u00e9 \u4e2d\u4e2d")
    assert [made[0], made[1], made[2]] == ids


@pytest.mark.parametrize("wrong", [dict(do_lower_case="no"), dict(strip_accents=3), dict(tokenize_chinese_chars=[])])
def test_a_flag_that_is_neither_true_nor_false_is_refused(tmp_path, wrong):
    bert_tokenizer(tmp_path, {}, wrong)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* of tokenizer_config.json must be true or false"):
        load_tokenizer(tmp_path)


def bert_tokenizer(folder, stored, flags):
    words = ["cafe", "Cafe", "caf\u00e9", "[UNK]", "\u4e2d", "\u4e2d\u4e2d"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.normalizer = tokenizers.normalizers.BertNormalizer(**stored)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="BertTokenizerFast") | flags))


def test_a_chat_template_is_the_folders_and_cannot_reach_out(tmp_path):
    assert load_chat_template(tmp_path) is None
    source = "{{ bos_token }}{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    config = {"chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": source}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": {"content": "<s>"}}))
    messages = [{"role": "user", "content": "a<b"}]
    assert load_chat_template(tmp_path).render(messages) == '<s>"a<b"'
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with pytest.raises(ValueError, match="no system message"):
        load_chat_template(tmp_path).render(messages)
    with pytest.raises(ValueError, match="refuses"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render(messages)


def replaced(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(kind, rules):
    return {"type": "Sequence", kind: rules}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
COPIES = {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 9999, "pair": [], "special_tokens": {}}
MAP = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"a" * 5000 + b"\0").decode()
BOMBS = {
    "replacements": {"normalizer": sequence("normalizers", [replaced({"String": "a"}, "a" * 1000)] * 4)},
    "matches of nothing": {"normalizer": replaced({"Regex": "x*"}, "a" * 5000)},
    "nested": {
        "normalizer": sequence("normalizers", [sequence("normalizers", [replaced({"String": "a"}, "aa")] * 13)])
    },
    "beginnings": {"normalizer": sequence("normalizers", [{"type": "Prepend", "prepend": "a" * 5000}])},
    "forms": {"normalizer": sequence("normalizers", [{"type": "NFKD"}, replaced({"String": "a"}, "\ufdfa")] * 3)},
    "a map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": MAP}},
    "bytes of bytes": {"pre_tokenizer": sequence("pretokenizers", [BYTES] * 40)},
    "copies": {"post_processor": {"type": "TemplateProcessing"} | COPIES},
    "a decoder": {"decoder": sequence("decoders", [replaced({"String": "a"}, "a" * 1000)] * 4)},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_tokenizer_that_lengthens_texts_without_measure_is_refused(tmp_path, name):
    """Refused before the library applies the rules, also to its added tokens: without memory it aborts the process."""
    values = json.loads(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str())
    token = dict(id=1, content="a" * 99, single_word=False, lstrip=False, rstrip=False, normalized=True, special=False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(values | {"added_tokens": [token]} | BOMBS[name]))
    with pytest.raises(ValueError, match="tokenizer.json.*may make .* characters of one"):
        load_tokenizer(tmp_path)


def test_published_kinds_of_rules_are_within_measure_and_long_texts_are_not(tmp_path, monkeypatch):
    rules, pieces = tokenizers.normalizers, tokenizers.pre_tokenizers
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    for normalizer in (
        rules.Sequence([rules.Prepend("▁"), rules.Replace(" ", "▁")]),
        rules.Sequence([rules.Replace("``", '"'), rules.NFKD(), rules.StripAccents(), rules.Lowercase()]),
        rules.Sequence([rules.NFC(), rules.Replace(tokenizers.Regex(r"\s+"), " "), rules.Lowercase()]),
        rules.BertNormalizer(),
    ):
        inner.normalizer, inner.pre_tokenizer = normalizer, pieces.Sequence([pieces.Digits(), pieces.ByteLevel()])
        inner.save(str(tmp_path / "tokenizer.json"))
        assert load_tokenizer(tmp_path).encode("a" * 100_000)
    monkeypatch.setattr("jattn.text.tokenizer.MAX_CHARACTERS", 1000)
    assert load_tokenizer(tmp_path).encode("a" * 1000)
    with pytest.raises(ValueError, match="tokenizer.json encodes up to 1000 characters, and this text has 1001"):
        load_tokenizer(tmp_path).encode("a" * 1001)
