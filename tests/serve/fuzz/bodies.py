"""Request bodies: valid ones, and random mutations of them."""

import json
import random

MODEL = "adder"


class Json(str):
    """A value given as JSON text, valid or not."""


TEXTS = [
    "", "x", "740+583=", "\0", "\n\r\t\x1b[2J", "é", "漢字", "👩‍👩‍👧", "\u202e", "\ufeff", "\uffff", "\x7f", "</s>",
    "<|im_end|>", "{{ 7*7 }}", "{% raw %}", "${jndi:ldap://x}", "' OR 1=1 --", "../../etc/passwd", "%s%n%x",
    "null", "NaN",
    "a" * 1023, "b" * 1024, "c" * 5000, "漢" * 341, "漢" * 342, "\\", '"', "data: [DONE]\n\n", "0", "-1", "true",
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 3, 20, 21, 64, 65, 127, 128, 129, 255, 256, 384, 1023, 1024, 2**31 - 1, 2**31, -(2**31), 2**32,
    2**63 - 1,
    2**63, 2**64, 0.0, -0.0, 0.5, 1.0, 1.5, 2.0, 2.1, -2.0, 100, 101, 1e-3, 9e-4, 1e-45, 1e-300, 5e-324, 1e38,
    3.5e38, 1e308,
]  # fmt: skip
LITERALS = [
    Json(text)
    for text in (
        "NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 20, "9" * 21, "9" * 400, "-" + "9" * 400, "9" * 5000,
        "0." + "1" * 400, "1E5", "1e0", "-0", "01", "+1", ".5", "1.", "0x10", "1_000", "True", "None", "undefined",
        "'x'",
        '"\\ud800"', '"\\udc00x"', '"\\ud83d\\ude00"', '"\\u0000"', '"\\x"', '"\n"', '"', "{", "[", "]", "}", ",",
        ":", "",
        "[" * 100 + "]" * 100, "[" * 20000, '{"a":' * 3000 + "1" + "}" * 3000, '{"a":1,"a":1}', "/*x*/1", "//",
        "[1,]", "\ufeff1",
    )
]  # fmt: skip
VALUES = [
    None, True, False, [], {}, [None], [[]], [[], []], {"": ""}, [True], [0], ["x", 1], [1, "x"], [[1], "x"], [1.0],
    [[1, 2], [3]], {"type": "text"}, {"type": "text", "json_schema": None}, {"x": None},
    {"include_usage": True}, {"include_usage": 1}, {"include_usage": None, "x": 1},
    {"include_obfuscation": False}, [{"role": "user", "content": "x"}], [{"role": "user"}], [{"content": "x"}],
    [{"role": "u", "content": [{"type": "text", "text": "y"}]}],
    [{"role": "u", "content": [{"type": "text", "text": "y", "x": None}]}],
    [{"role": "u", "content": [{"type": "text"}]}],
    [{"role": "u", "content": [7]}], [{"role": "u", "content": 7}], [{"role": "", "content": None, "tool_calls": []}],
    [{"role": "u", "content": "x", "name": 1}], [{"role": "u", "content": "x", "name": None}], ["x"] * 64, ["x"] * 65,
    [[65]] * 300, list(range(384)), list(range(385)), [5] * 1023, [5] * 1024, ["y" * 64] * 64, ["y" * 65] * 64,
]  # fmt: skip
KEYS = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "min_p", "top_k",
    "n", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "logprobs",
    "include_stop_str_in_output", "stream", "stream_options", "cache_salt", "user", "safety_identifier",
    "top_logprobs",
    "echo", "best_of", "suffix", "logit_bias", "tools", "tool_choice", "functions", "function_call",
    "response_format",
    "parallel_tool_calls", "modalities", "audio", "metadata", "store", "service_tier", "reasoning_effort",
    "prediction", "documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "add_special_tokens", "min_tokens", "skip_special_tokens", "bad_words", "length_penalty", "guided_json",
    "vllm_xargs", "priority",
]  # fmt: skip


def good(rng: random.Random, is_chat: bool) -> dict:
    """A small, valid body."""
    question = f"{rng.randrange(1000):03}+{rng.randrange(1000):03}="
    body: dict = {"model": MODEL, "max_tokens": rng.choice([1, 2, 5, 16])}
    if is_chat:
        body["messages"] = [{"role": "user", "content": question}]
    else:
        body["prompt"] = rng.choice([question, list(question.encode()), [question, "1"], [[51, 52], question]])
    extras: dict = {
        "temperature": rng.choice([0, 0.7, 1, 100]), "top_p": rng.choice([0.1, 1, 1e-45]), "min_p": rng.choice([0,
        0.5, 1]),
        "top_k": rng.choice([-1, 0, 1, 50, 2**31 - 1]), "seed": rng.randrange(2**63),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2), "repetition_penalty": rng.choice([0.01, 1, 1.2, 100]),
        "stop": rng.choice(["\n", ["1", "22"], []]), "stop_token_ids": rng.choice([[], [5], list(range(64))]),
        "ignore_eos": rng.random() < 0.5, "include_stop_str_in_output": rng.random() < 0.5, "user": rng.choice(TEXTS),
        "cache_salt": rng.choice(TEXTS), "logprobs": (rng.random() < 0.5) if is_chat else rng.choice([0, 1, 20]),
    }  # fmt: skip
    body |= {name: extras[name] for name in rng.sample(sorted(extras), rng.randrange(len(extras)))}
    if body.get("temperature", 1) != 0 and rng.random() < 0.3:
        body["n"] = rng.choice([1, 2, 5])
    if rng.random() < 0.4:
        body["stream"] = True
        if rng.random() < 0.5:
            body["stream_options"] = {"include_usage": rng.random() < 0.7}
    return body


def hostile(rng: random.Random):
    """A value that is wrong for most fields."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(NUMBERS)
    if kind < 0.5:
        return rng.choice(TEXTS)
    return rng.choice(LITERALS) if kind < 0.7 else rng.choice(VALUES)


def mutated(rng: random.Random, body: dict) -> bytes:
    """The body after up to four mutations, as bytes."""
    pairs = list(body.items())
    for _ in range(rng.choice([0, 1, 1, 1, 2, 2, 4])):
        action, at = rng.random(), rng.randrange(len(pairs)) if pairs else 0
        if action < 0.45 and pairs:
            pairs[at] = (pairs[at][0], hostile(rng))
        elif action < 0.7:
            pairs.insert(at, (rng.choice(KEYS), hostile(rng)))
        elif action < 0.8 and pairs:
            del pairs[at]
        elif action < 0.85 and pairs:
            pairs.append(pairs[at])
        elif action < 0.9:
            pairs.append((rng.choice([*TEXTS, "Prompt", "prompt ", "__proto__"]), hostile(rng)))
        elif pairs:
            pairs[at] = (pairs[at][0], _deeper(rng, pairs[at][1]))
    raw = _written(pairs)
    while rng.random() < 0.15 and raw:
        raw = _damaged(rng, raw)
    return raw


def _deeper(rng: random.Random, value):
    """The value with a change inside."""
    if isinstance(value, list) and value:
        at = rng.randrange(len(value))
        return [*value[:at], _deeper(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, dict) and value:
        name = rng.choice(sorted(value))
        return value | {name: _deeper(rng, value[name])}
    return hostile(rng)


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    at, kind = rng.randrange(len(raw)), rng.randrange(5)
    if kind == 0:
        return raw[:at]
    if kind == 1:
        return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    if kind == 2:
        return raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:]
    if kind == 3:
        return raw + rng.choice([b" ", b"\n", b"{}", b"\0", b",", b"\xff"])
    return rng.choice([b"\xef\xbb\xbf", b" ", b"\xff\xfe", b"["]) + raw


def _written(value) -> bytes:
    """JSON text. A Json is written as it is; a list of pairs is an object that may have duplicate keys."""
    return _text(value, is_pairs=True).encode("utf-8", errors="surrogatepass")


def _text(value, is_pairs: bool = False) -> str:
    if isinstance(value, Json):
        return str(value)
    if isinstance(value, dict) or is_pairs:
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ", ".join(f"{json.dumps(name)}: {_text(part)}" for name, part in pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return json.dumps(value)
