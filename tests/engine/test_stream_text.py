"""The text of a stream is the text of its tokens, for each kind of tokenizer, at a constant cost per token."""

import functools
import random
import time

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models

from jattn.engine import SamplingParams
from jattn.engine.request import CompletionState, Sequence
from jattn.text.detokenizer import Detokenizer, find_stop, held_back
from jattn.text.tokenizer import ByteTokenizer

BYTES = {f"<0x{byte:02X}>": 20 + byte for byte in range(256)}
WORDS = {"<s>": 0, "<end>": 1, "▁": 2, "▁one": 3, "▁two": 4, "o": 5, "é": 6, "▁€": 7, ".": 8, "▁▁": 9}


class Inner:
    """decode as FolderTokenizer does it."""

    def __init__(self, vocab, decoder, model=models.BPE, special=("<s>", "<end>")):
        self._inner = tokenizers.Tokenizer(model(vocab=vocab, **(dict(merges=[]) if model is models.BPE else {})))
        self._inner.decoder = decoder
        self._inner.add_special_tokens(list(special))
        self.ids = range(len(vocab))
        self.decoded = 0

    def decode(self, token_ids):
        self.decoded += len(token_ids)
        return self._inner.decode(list(token_ids), skip_special_tokens=True)


def metaspace(scheme):
    return Inner(WORDS, decoders.Metaspace(prepend_scheme=scheme))


def byte_fallback():
    """Llama 2's: pieces with a mark for the space, and bytes for characters without a piece."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return Inner(WORDS | BYTES, decoders.Sequence(steps))


def word_piece(cleanup):
    vocab = {"<s>": 0, "<end>": 1, "one": 2, "##two": 3, "three": 4, ".": 5, "n't": 6, "'s": 7, "é": 8, "##é": 9}
    model = functools.partial(models.WordPiece, unk_token="<s>")
    return Inner(vocab, decoders.WordPiece("##", cleanup), model)


def byte_level():
    """GPT's: every byte has a letter, and a token may hold bytes of two characters."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = ["ab €€ 😀😀 é日本 語"] * 3 + ["日語日語 €a€"] * 3
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=330, initial_alphabet=letters, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    vocab = {"<s>": 0, "<end>": 1} | {token: id + 2 for token, id in trained.get_vocab().items()}
    return Inner(vocab, decoders.ByteLevel())


KINDS = {
    "bytes": ByteTokenizer,
    "metaspace, always a space before": lambda: metaspace("always"),
    "metaspace, a space before the first": lambda: metaspace("first"),
    "metaspace, no space before": lambda: metaspace("never"),
    "byte fallback": byte_fallback,
    "WordPiece": lambda: word_piece(True),
    "WordPiece, spaces kept": lambda: word_piece(False),
    "byte level": byte_level,
}


def streamed(code, prompt, output, rng):
    """The text of a stream in bursts of any size."""
    stream, left, parts = Detokenizer(code, prompt), list(output), []
    while left:
        size = rng.choice((1, 1, 2, 5))
        parts.append(stream.add(left[:size]))
        left = left[size:]
    parts.append(stream.finish())
    assert stream.text == "".join(parts)
    return "".join(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_streams_text_is_what_the_output_adds_to_the_prompts_text(kind):
    """text(stream) == text(prompt + ids) after text(prompt): the first word's space stays."""
    code, rng, seen = KINDS[kind](), random.Random(3), 0
    ids = list(getattr(code, "ids", range(2, 259)))
    few = [id for id in ids if 0 < len(code.decode([id]).strip("\ufffd"))]
    for _ in range(1500):
        pick = lambda most: rng.choices(few if rng.random() < 0.5 else ids[:12] + few, k=rng.randrange(most))
        prompt, output = pick(20), pick(12)
        if rng.random() < 0.7:  # characters over several tokens
            text = rng.choice(("€", "😀é", "日語 €", "a€"))
            raw = [id + {"byte fallback": 20, "bytes": 3}.get(kind, 0) for id in text.encode()]
            output = output + raw if kind in ("byte fallback", "bytes") else output
        before, whole = code.decode(prompt), code.decode(prompt + output)
        if "\ufffd" in whole:
            continue
        seen += 1
        assert whole.startswith(before)
        assert streamed(code, prompt, output, rng) == whole[len(before) :], (prompt, output)
    assert seen > 300


def byte_ids(kind, code, text):
    """A token for each byte."""
    if kind == "bytes":
        return code.encode(text)
    if kind == "byte fallback":
        return [BYTES[f"<0x{byte:02X}>"] for byte in text.encode()]
    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [code._inner.token_to_id(letter) for letter in letters[0][0]]


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bytes"])
def test_a_character_that_the_prompt_left_unfinished_belongs_to_the_output(kind):
    code, rng = KINDS[kind](), random.Random(4)
    for text in ("a €€ 😀 é日本 語 b", "日語日語 €a€", "😀😀😀", "x" * 50 + "€" * 30):
        ids = byte_ids(kind, code, text)
        for cut in range(len(ids) + 1):
            before = text.encode()[:cut].decode(errors="ignore")
            assert before + streamed(code, ids[:cut], ids[cut:], rng) == text


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bytes"])
def test_bytes_that_never_become_a_character_are_shown_once(kind):
    code = KINDS[kind]()
    half = byte_ids(kind, code, "€")[:2]
    dot = [8] if kind == "byte fallback" else byte_ids(kind, code, ".")  # no byte beside the others
    assert streamed(code, [], [*half, *dot], random.Random(0)) == code.decode([*half, *dot])
    assert streamed(code, [*dot, *half], dot, random.Random(0)) == ".", "the prompt's own half is not repeated"
    sign = byte_ids(kind, code, "\ufffd")
    assert streamed(code, [*dot, *sign], dot, random.Random(0)) == ".", "nor its sign of one"
    assert streamed(code, dot, [*sign, *dot, *sign], random.Random(0)) == "\ufffd.\ufffd"


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bytes"])
def test_special_tokens_before_a_character_do_not_count_among_its_tokens(kind):
    """After three of them an emoji that came byte by byte began with U+FFFD, and one that came at once did not."""
    code = KINDS[kind]()
    for count in range(15):
        stream = Detokenizer(code, byte_ids(kind, code, "é"))
        output = [1] * count + byte_ids(kind, code, "😀")
        assert "".join(stream.add([token]) for token in output) == "😀", count


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "bytes"])
def test_the_sizes_of_bursts_change_no_text_also_of_invalid_bytes_among_silent_tokens(kind):
    """How many tokens come together depends on which other requests are served."""
    code, rng = KINDS[kind](), random.Random(7)
    for _ in range(1500):
        output = []
        while len(output) < 30:
            ids = byte_ids(kind, code, rng.choice(("é", "漢", "한국", "a", "😀", "b")))
            output += [*ids[: rng.choice((1, 2, 6, 6, 6, 6))], *[1] * rng.randrange(2)]
        prompt = byte_ids(kind, code, "a")
        alone = Detokenizer(code, prompt)
        text = "".join([alone.add([token]) for token in output]) + alone.finish()
        assert streamed(code, prompt, output, rng) == text, output


def test_special_tokens_between_words_take_no_space_with_them():
    code = metaspace("first")
    for count in (1, 5, 6, 7, 40, 200):
        output = [3, *[1] * count, 4]
        assert streamed(code, [0, 3], output, random.Random(count)) == " one two" == code.decode([3, *output])[3:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_costs_the_same_after_32_thousand_as_after_100(kind, monkeypatch):
    """For each token a few tokens are decoded, of any kind: text, special tokens, bytes that are no text."""
    code = KINDS[kind]()
    decoded, real = [0], code.decode
    monkeypatch.setattr(code, "decode", lambda ids: decoded.__setitem__(0, decoded[0] + len(ids)) or real(ids))
    ids = list(getattr(code, "ids", range(2, 259)))
    rng = random.Random(5)
    mixes = (lambda: rng.choice(ids), lambda: ids[1], lambda: ids[-1], lambda: ids[2])
    for pick in mixes:
        stream, worst = Detokenizer(code, ids * 300), 0
        for _ in range(32_000 // len(mixes)):
            decoded[0] = 0
            stream.add([pick()])
            worst = max(worst, decoded[0])
        assert worst <= 100


FEW = st.text("ab", max_size=12)


@hypothesis.given(FEW, st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(text, stop):
    ends = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    assert held_back(text, stop) == max(ends, default=0)


@hypothesis.given(FEW, FEW, st.lists(st.text("ab", min_size=1, max_size=6), max_size=4))
def test_a_stop_string_is_found_where_it_first_ends_in_the_new_text(before, new, stop):
    text = before + new
    ends = lambda s: [at for at in range(len(text)) if text.startswith(s, at) and at + len(s) > len(before)]
    found = sorted((ends(s)[0], s) for s in stop if ends(s))
    assert find_stop(text, stop, len(before)) == (found[0] if found else None)


def test_stop_strings_cost_the_same_however_long_the_text_is():
    """64 strings of 4,096 characters in all that nearly match: only the end of the text is searched."""
    stops = [("a" * 62 + "b" + chr(99 + i)) for i in range(64)]
    for text in ("a" * 1_000, "a" * 4_000_000):
        begin = time.perf_counter()
        for _ in range(50):
            assert find_stop(text, stops, len(text) - 4) is None and held_back(text, stops) == 62
        seconds = (time.perf_counter() - begin) / 50
        assert seconds < 0.2, "a tenth of what reading four million characters 64 times takes"


def read_in_bursts(code, prompt, output, params, size):
    """The completion after these tokens, in bursts of size() tokens; it ends at a stop string."""
    sequence = Sequence("s", tuple(prompt), params, max_len=len(prompt) + len(output))
    completion = CompletionState.of("r", sequence, 0, (), code)
    left = list(output)
    while left and completion.finish_reason is None:
        count = size()
        new = completion.accept(left[:count])
        sequence.tokens += new
        assert completion.read_text(new) <= len(new)
        left = left[count:]
    return completion.snapshot()


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sizes_of_bursts_do_not_move_the_end_at_a_stop_string(kind, include):
    code, rng, stopped = KINDS[kind](), random.Random(11), 0
    ids = list(getattr(code, "ids", range(2, 259)))
    few = [id for id in ids if 0 < len(code.decode([id]).strip("\ufffd"))]
    for _ in range(300):
        prompt, output = rng.choices(few, k=3), rng.choices(few + ids[:12], k=rng.randrange(1, 30))
        text = code.decode(output)
        at = rng.randrange(len(text) + 1)
        stop = tuple({text[at : at + rng.randrange(1, 9)] or "?", rng.choice(("a b", "onetwo", "\ufffd", "."))})
        params = SamplingParams(max_tokens=len(output), stop=stop, include_stop_str_in_output=include)
        read = functools.partial(read_in_bursts, code, prompt, output, params)
        one_by_one = read(lambda: 1)
        assert read(lambda: rng.choice((1, 2, 5, 16))) == one_by_one, (prompt, output, stop)
        stopped += one_by_one.stop is not None
    assert 60 < stopped < 300


def test_a_burst_without_a_stop_string_is_decoded_as_a_whole(monkeypatch):
    code = byte_level()
    calls, real = [0], code.decode
    monkeypatch.setattr(code, "decode", lambda ids: calls.__setitem__(0, calls[0] + 1) or real(ids))
    output = byte_ids("byte level", code, "ab a b a b ab ab") * 4
    read_in_bursts(code, output[:4], output, SamplingParams(max_tokens=99, stop=("never", "b?")), lambda: 16)
    assert calls[0] < len(output)
