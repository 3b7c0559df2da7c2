"""The fields of a body: each is read by its own reader, or refused by name.

A null means that the field is absent. Beyond the OpenAI interface: top_k, min_p, repetition_penalty, stop_token_ids,
ignore_eos, include_stop_str_in_output and cache_salt; of a chat, what its template reads: documents,
chat_template_kwargs, add_generation_prompt and continue_final_message.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jattn.engine import SamplingParams
from jattn.engine.params import (
    MAX_COMPLETIONS,
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    REPETITION_RANGE,
)
from jattn.serve.errors import BadRequestError
from jattn.text import ChatTemplate, Tokenizer
from jattn.text.chat import RESERVED

Reader = Callable[[Any], Any]
"""Checks a field's value and returns it as the server uses it; _WrongError says what it must be."""

Prompts = tuple[str | tuple[int, ...], ...]


MAX_TOKEN_CHARACTERS = 256
"""Of a text, for each token of the model's length; more is refused before it is tokenised. Long tokens have 128."""


class _WrongError(ValueError):
    """What the value must be."""


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a body asks for."""

    prompts: Prompts
    params: SamplingParams
    chat: bool
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    salt: str = ""
    user: str | None = None


def completion(body: dict[str, Any], default_max_tokens: int) -> Asked:
    """POST /v1/completions."""
    found = _read(body, COMPLETION)
    if "prompt" not in found:
        raise BadRequestError("prompt=None must be text, token ids, or a list of either", "prompt")
    sampling = dict(max_tokens=found.get("max_tokens", default_max_tokens), logprobs=found.get("logprobs"))
    return _asked(found, found["prompt"], sampling, chat=False)


def check_length(text: str, max_model_len: int, name: str) -> None:
    """Refuse a text that is too long for any tokenizer to fit it in."""
    if len(text) > (most := max_model_len * MAX_TOKEN_CHARACTERS):
        why = f"{most} for the {max_model_len} tokens that prompt and output together may have"
        raise BadRequestError(f"the prompt has {len(text)} characters, more than {why}", name)


def chat(body: dict[str, Any], template: ChatTemplate | None, tokenizer: Tokenizer | None, max_model_len: int) -> Asked:
    """POST /v1/chat/completions."""
    found = _read(body, CHAT)
    if template is None or tokenizer is None:
        lacking = "chat template" if template is None else "tokenizer"
        raise BadRequestError(f"this model's folder has no {lacking}; use /v1/completions", "messages")
    if "messages" not in found:
        raise BadRequestError("messages=None must be a non-empty list of messages", "messages")
    limits = {found[name] for name in ("max_tokens", "max_completion_tokens") if name in found}
    if len(limits) > 1:
        raise BadRequestError("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    wants_logprobs = found.get("logprobs", False)
    if "top_logprobs" in found and not wants_logprobs:
        raise BadRequestError("top_logprobs needs logprobs=true", "top_logprobs")
    if found.get("tools") and body.get("parallel_tool_calls") is False:
        raise BadRequestError("parallel_tool_calls=false is not enforced here", "parallel_tool_calls")
    if body.get("tool_choice") == "none":
        found.pop("tools", None)
    variables = {name: found[name] for name in ("reasoning_effort",) if name in found}
    variables |= found.get("chat_template_kwargs", {})
    passed = {name: found[name] for name in PASSED if name in found}
    try:
        text = template.render(found["messages"], variables=variables, **passed)
    except Exception as error:  # a template is a program and may raise anything
        raise BadRequestError(f"the chat template cannot render these messages: {error}", "messages") from error
    check_length(text, max_model_len, "messages")
    try:
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False))  # the template writes them
    except Exception as error:
        raise BadRequestError(f"the chat cannot be tokenised: {error}", "messages") from error
    sampling = dict(
        max_tokens=limits.pop() if limits else max_model_len,
        logprobs=found.get("top_logprobs", 0) if wants_logprobs else None,
    )
    return _asked(found, (prompt,), sampling, chat=True)


def _asked(found: dict[str, Any], prompts: Prompts, sampling: dict[str, Any], chat: bool) -> Asked:
    options = found.get("stream_options")
    if options is not None and not found.get("stream"):
        raise BadRequestError("stream_options needs stream=true", "stream_options")
    try:
        params = SamplingParams(**{name: found[name] for name in SAMPLING if name in found}, **sampling)
    except ValueError as error:  # of fields that are each right alone, as n=2 beside temperature=0
        name = next((name for name in SAMPLING if str(error).startswith(f"{name}=")), None)
        raise BadRequestError(str(error), name) from error
    return Asked(
        prompts,
        params,
        chat,
        model=found.get("model"),
        stream=found.get("stream", False),
        include_usage=(options or {}).get("include_usage", False),
        salt=found.get("cache_salt", ""),
        user=found.get("safety_identifier", found.get("user")),
    )


def _read(body: dict[str, Any], readers: dict[str, Reader]) -> dict[str, Any]:
    """The values of the fields that are present; one error names every mistake."""
    found, wrong = {}, {}
    for name, value in body.items():
        if name in readers:
            if value is None:
                continue
            try:
                found[name] = readers[name](value)
            except _WrongError as error:
                wrong[name] = f"{name}={value!r:.80} must be {error}"
        elif name not in NEUTRAL:
            wrong[name] = f"{name:.80} is not known"
        elif value is not None and not any(_is_same(value, neutral) for neutral in NEUTRAL[name]):
            wrong[name] = f"{name} is not served here"
    if wrong:
        raise BadRequestError("; ".join(wrong.values()), next(iter(wrong))[:80])
    return found


# ---------------------------------------------------------------------- readers
def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongError("true or false")
    return value


def _integer(low: int, high: int) -> Reader:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _WrongError(f"an integer from {low} to {high}")
        return value

    return read


def _number(low: float, high: float) -> Reader:
    def read(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise _WrongError(f"a number from {low} to {high}")
        return value

    return read


def _temperature(value: Any) -> float:
    value = _number(0, 100)(value)
    if 0 < value < 1e-3:
        raise _WrongError("0 (the likeliest token) or at least 0.001")
    return value


def _top_p(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise _WrongError("a number above 0 up to 1")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongError("text")
    return value


def _stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _WrongError("text, or a list of texts, none of them empty")
    if len(texts) > MAX_STOPS or sum(map(len, texts)) > MAX_STOP_CHARACTERS:
        raise _WrongError(f"at most {MAX_STOPS} texts, together of at most {MAX_STOP_CHARACTERS} characters")
    return texts


def _stop_tokens(value: Any) -> tuple[int, ...]:
    tokens = _tokens(value)
    if len(tokens) > MAX_STOPS:
        raise _WrongError(f"at most {MAX_STOPS} token ids")
    return tokens


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= MAX_INT32 for token in value):
        raise _WrongError("a list of token ids")
    return tuple(value)


def _prompts(value: Any) -> Prompts:
    """Text, tokens, or a list of texts and of tokens."""
    if isinstance(value, str):
        return (value,)
    try:
        if not isinstance(value, list) or not value:
            raise _WrongError
        if type(value[0]) is int:
            return (_tokens(value),)
        return tuple(prompt if isinstance(prompt, str) else _tokens(prompt) for prompt in value)
    except _WrongError:
        raise _WrongError("text, token ids, or a list of either") from None


def _stream_options(value: Any) -> dict[str, bool]:
    if not isinstance(value, dict):
        raise _WrongError("an object")
    readers = dict(include_usage=_boolean, include_obfuscation=_no)
    if unknown := [name for name in value if name not in readers]:
        raise _WrongError(f"without {unknown[0]!r:.80}, which is not known")
    return {name: readers[name](option) for name, option in value.items() if option is not None}


def _no(value: Any) -> bool:
    if value is not False:
        raise _WrongError("without include_obfuscation, which is not served here")
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _WrongError("a non-empty list of messages")
    return [_message(message) for message in value]


def _message(message: Any) -> dict[str, Any]:
    """The fields of a message that a template may read. Others (of an answer that is sent back) must be null or []."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _WrongError("a list of messages, each an object with a role and a content")
    given = {name: value for name, value in message.items() if value is not None}
    kept = {}
    for name, value in given.items():
        if name == "content":
            kept[name] = _content(value)
        elif name == "tool_calls":
            kept[name] = _objects(value)
        elif name in MESSAGE_TEXTS:
            if not isinstance(value, str):
                raise _WrongError(f"messages whose {name} is text")
            kept[name] = value
        elif value != []:
            raise _WrongError(f"without a message's {name!r:.80}, which is not served here")
    return kept


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise _WrongError("messages whose content is text, or a list of text parts")
    for part in content:
        if part.get("type") != "text":
            raise _WrongError(f"without parts of type {part.get('type')!r:.80}: only text is served here")
        if not isinstance(part.get("text"), str) or len(part) != 2:
            raise _WrongError("messages whose parts are {type, text}, the text a text")
    return "".join(part["text"] for part in content)


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _WrongError("a list of objects")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongError("an object")
    return value


def _variables(value: Any) -> dict[str, Any]:
    if taken := [name for name in RESERVED if name in _object(value)]:
        raise _WrongError(f"without {taken[0]}, which is a field of its own")
    return value


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other  # in Python True == 1


SAMPLING: dict[str, Reader] = dict(
    temperature=_temperature,
    top_p=_top_p,
    n=_integer(1, MAX_COMPLETIONS),
    seed=_integer(0, 2**63 - 1),
    stop=_stop,
    presence_penalty=_number(-2, 2),
    frequency_penalty=_number(-2, 2),
    top_k=_integer(-1, MAX_INT32),
    min_p=_number(0, 1),
    repetition_penalty=_number(*REPETITION_RANGE),
    stop_token_ids=_stop_tokens,
    ignore_eos=_boolean,
    include_stop_str_in_output=_boolean,
)
"""Fields that SamplingParams has under the same name."""

COMMON = SAMPLING | dict(
    model=_text,
    stream=_boolean,
    stream_options=_stream_options,
    cache_salt=_text,
    user=_text,  # logged beside the request's id
    safety_identifier=_text,  # the newer name of user
    max_tokens=_integer(1, MAX_INT32),
)
COMPLETION = COMMON | dict(prompt=_prompts, logprobs=_integer(0, MAX_LOGPROBS))
CHAT = COMMON | dict(
    messages=_messages,
    max_completion_tokens=_integer(1, MAX_INT32),
    logprobs=_boolean,
    top_logprobs=_integer(0, MAX_LOGPROBS),
    tools=_objects,  # for the template; calls in the answer stay text
    documents=_objects,
    add_generation_prompt=_boolean,
    continue_final_message=_boolean,
    reasoning_effort=_text,
    chat_template_kwargs=_variables,
)
PASSED = ("tools", "documents", "add_generation_prompt", "continue_final_message")
"""Fields of a chat that ChatTemplate.render takes under the same name."""

MESSAGE_TEXTS = ("role", "name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal")
"""Fields of a message that are text."""

NEUTRAL: dict[str, tuple] = dict(
    echo=(False,), best_of=(1,), suffix=("",), logit_bias=({},), tools=([],), tool_choice=("none", "auto"),
    response_format=({"type": "text"},), functions=([],), function_call=("none", "auto"),
    parallel_tool_calls=(True, False), modalities=(["text"],), audio=(), metadata=({},), store=(False,),
    service_tier=("auto", "default"), prediction=(), reasoning_effort=(), verbosity=(), web_search_options=(),
    moderation=(), prompt_cache_key=(), prompt_cache_options=(), prompt_cache_retention=(),
)  # fmt: skip
"""Fields of the interface that are not served: field -> the values that ask for nothing, which are accepted."""
