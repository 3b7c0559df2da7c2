"""The status that a body must get: a second implementation of docs/serving.md that shares no code with the server."""

import json
import math
import re

from tests.serve import running

MODEL = "adder"
VOCABULARY, LENGTH = 384, 1024  # of the embedded model, which has one token per byte
MAX_BODY, MAX_PROMPTS, MAX_SEQUENCES = 1 << 16, 64, 256  # as the fuzzer starts its server
MAX_VALUES = 20_000  # keys and list items, besides those of the prompt
INT32 = 2**31 - 1
WORDS_OF_TEMPLATE = set(re.findall(r"\w+", running.TEMPLATE))


class _Bad(Exception):
    """A JSON text that parsers may read differently."""


def statuses(path: str, raw: bytes) -> set[int]:
    """The statuses allowed for a POST of these bytes."""
    if len(raw) > MAX_BODY:
        return {413}
    try:
        body = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_pairs, parse_constant=_raise, parse_int=_int, parse_float=_float
        )
        json.dumps(body, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError, _Bad):
        return {400}
    if not isinstance(body, dict):
        return {400}
    try:
        if not _is_bounded(body):
            return {400}
    except RecursionError:  # nested far deeper than any field may be; some parsers take it
        return {400}
    is_chat = path.endswith("/chat/completions")
    fields = COMMON | (CHAT if is_chat else COMPLETION)
    if set(body) - set(fields) - set(NO_EFFECT):
        return {400}
    body = {name: value for name, value in body.items() if value is not None}
    valid = all(_is_valid(name, value, fields) for name, value in body.items()) and _is_consistent(body, is_chat)
    if body.get("model", MODEL) != MODEL and isinstance(body["model"], str):
        return {404} if valid else {400, 404}
    return {200} if valid and _fits(body, is_chat) else {400}


def _is_bounded(body: dict) -> bool:
    """Are there few enough values, prompts and tokens to visit them all?"""
    extra, prompt = 0, body.get("prompt")
    if isinstance(prompt, list) and prompt:
        lists = [each for each in prompt if isinstance(each, list)]
        is_tokens = isinstance(prompt[0], int) and not isinstance(prompt[0], bool)
        if (not is_tokens and len(prompt) > MAX_PROMPTS) or any(
            len(each) >= LENGTH for each in ([prompt] if is_tokens else lists)
        ):
            return False
        extra = len(prompt) + (0 if is_tokens else sum(map(len, lists)))
    return _num_values(body) <= MAX_VALUES + extra


def _num_values(value) -> int:
    if not isinstance(value, (dict, list)):
        return 0
    return len(value) + sum(map(_num_values, value.values() if isinstance(value, dict) else value))


def prompts(body: dict, is_chat: bool) -> list:
    """The prompts, each as text or as a list of tokens."""
    if is_chat:
        text = "".join(f"{m['role'][:1]}:{_text(m.get('content'))}\n" for m in body["messages"])
        if body.get("continue_final_message"):
            return [text[:-1]]
        return [text + "a:" * body.get("add_generation_prompt", True)]
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _pairs(pairs):
    if len({name for name, _ in pairs}) < len(pairs):
        raise _Bad
    return dict(pairs)


def _raise(_):
    raise _Bad


def _int(text):
    if len(text) > 20:
        raise _Bad
    return int(text)


def _float(text):
    if math.isinf(float(text)):
        raise _Bad
    return float(text)


def _is_valid(name, value, fields) -> bool:
    if name in fields:
        return fields[name](value)
    if isinstance(value, dict):
        value = {key: value[key] for key in value if value[key] is not None}
    return any(json.dumps(value) == json.dumps(neutral) for neutral in NO_EFFECT.get(name, ()))


def _is_consistent(body, is_chat) -> bool:
    """Are fields that are valid alone also valid together?"""
    if "stream_options" in body and body.get("stream") is not True:
        return False
    if body.get("temperature", 1) == 0 and body.get("n", 1) != 1:
        return False
    if is_chat:
        limits = [body[name] for name in ("max_tokens", "max_completion_tokens") if name in body]
        told = not body.get("top_logprobs") or body.get("logprobs") is True
        taken = {"messages", "tools", "documents", "add_generation_prompt"} & set(body.get("chat_template_kwargs", ()))
        may_call = body.get("tools") and body.get("tool_choice") != "none"
        if may_call and body.get("parallel_tool_calls") is False:
            return False
        for_template = [name for name in ("documents", "reasoning_effort") if body.get(name) not in (None, [])]
        for_template += ["tools"] if may_call else []
        if not {*for_template, *body.get("chat_template_kwargs", ())} <= WORDS_OF_TEMPLATE:
            return False
        valid = "messages" in body and told and len(set(map(str, limits))) < 2 and not taken
        return valid and (not body.get("continue_final_message") or _can_continue(body))
    return "prompt" in body


def _can_continue(body) -> bool:
    """Does the last message have a text that can be continued?"""
    return body.get("add_generation_prompt") is not True and bool(_text(body["messages"][-1].get("content")).strip())


def _are_objects(v) -> bool:
    return isinstance(v, list) and all(isinstance(each, dict) for each in v)


def _fits(body, is_chat) -> bool:
    """Do the prompts fit the model and the queue?"""
    asked = prompts(body, is_chat)
    tokens = [list(p.encode()) if isinstance(p, str) else p for p in asked]
    return (
        len(asked) <= MAX_PROMPTS
        and len(asked) * body.get("n", 1) <= MAX_SEQUENCES
        and all(0 < len(each) < LENGTH for each in tokens)
        and all(token < VOCABULARY for p in asked if not isinstance(p, str) for token in p)
        and all(token < VOCABULARY for token in body.get("stop_token_ids", []))
    )


def _text(content) -> str:
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _whole(low, high):
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high


def _real(low, high):
    return lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and low <= v <= high


def _is_bool(v) -> bool:
    return v is True or v is False


def _is_text(v) -> bool:
    return isinstance(v, str)


def _are_tokens(v) -> bool:
    return isinstance(v, list) and all(map(_whole(0, INT32), v))


def _is_prompt(v) -> bool:
    if isinstance(v, str):
        return True
    return isinstance(v, list) and bool(v) and (_are_tokens(v) or all(_is_text(p) or _are_tokens(p) for p in v))


def _are_stops(v) -> bool:
    texts = [v] if _is_text(v) else v
    valid = isinstance(texts, list) and all(_is_text(text) and text for text in texts)
    return valid and len(texts) <= 64 and len("".join(texts)) <= 4096


def _are_options(v) -> bool:
    known = {
        "include_usage": (True, False, None),
        "include_obfuscation": (False, None),
        "continuous_usage_stats": (False, None),
    }
    return isinstance(v, dict) and all(
        name in known and any(value is each for each in known[name]) for name, value in v.items()
    )


TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal")


def _is_message(v) -> bool:
    if not isinstance(v, dict) or not _is_text(v.get("role")):
        return False
    given = {name: value for name, value in v.items() if value is not None and name not in ("role", "content")}
    others = [value for name, value in given.items() if name not in (*TEXTS, "tool_calls")]
    told = all(_is_text(given[name]) for name in TEXTS if name in given) and _are_objects(given.get("tool_calls", []))
    return told and all(value == [] for value in others) and _is_content(v.get("content"))


def _is_content(v) -> bool:
    if isinstance(v, list):
        return all(
            isinstance(part, dict)
            and {key for key in part if part[key] is not None} == {"type", "text"}
            and part["type"] == "text"
            and _is_text(part["text"])
            for part in v
        )
    return v is None or _is_text(v)


COMMON = dict(
    model=_is_text,
    max_tokens=_whole(1, INT32),
    temperature=lambda v: _real(0, 100)(v) and (v == 0 or v >= 0.001),
    top_p=lambda v: _real(0, 1)(v) and v > 0,
    min_p=_real(0, 1),
    top_k=_whole(-1, INT32),
    n=_whole(1, 128),
    seed=_whole(0, 2**63 - 1),
    presence_penalty=_real(-2, 2),
    frequency_penalty=_real(-2, 2),
    repetition_penalty=_real(0.01, 100),
    stop=_are_stops,
    stop_token_ids=lambda v: _are_tokens(v) and len(v) <= 64,
    ignore_eos=_is_bool,
    include_stop_str_in_output=_is_bool,
    stream=_is_bool,
    stream_options=_are_options,
    cache_salt=_is_text,
    user=_is_text,
    safety_identifier=_is_text,
)
COMPLETION = dict(prompt=_is_prompt, logprobs=_whole(0, 20), add_special_tokens=lambda v: v is True)
CHAT = dict(
    messages=lambda v: isinstance(v, list) and bool(v) and all(map(_is_message, v)),
    max_completion_tokens=_whole(1, INT32),
    logprobs=_is_bool,
    top_logprobs=_whole(0, 20),
    tools=_are_objects,
    documents=_are_objects,
    add_generation_prompt=_is_bool,
    continue_final_message=_is_bool,
    reasoning_effort=_is_text,
    chat_template_kwargs=lambda v: isinstance(v, dict),
    add_special_tokens=lambda v: v is False,
)
NO_EFFECT = dict(
    echo=[False], best_of=[1], suffix=[""], logit_bias=[{}], tools=[[]], functions=[[]], metadata=[{}], store=[False],
    tool_choice=["none", "auto"], function_call=["none", "auto"], parallel_tool_calls=[True, False],
    response_format=[{"type": "text"}], modalities=[["text"]], service_tier=["auto", "default"],
    audio=[], prediction=[], reasoning_effort=[], min_tokens=[0], skip_special_tokens=[True], bad_words=[[]],
    length_penalty=[1.0, 1], guided_json=[], vllm_xargs=[{}], priority=[0],
)  # fmt: skip
