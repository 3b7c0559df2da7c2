"""The fields of a POST body: each is checked by its reader, and refused by name if it cannot be honoured.

A null means that the field is absent. Beyond the OpenAI interface: top_k, min_p, repetition_penalty, stop_token_ids,
ignore_eos, include_stop_str_in_output and cache_salt. A chat also has what its template reads: documents,
chat_template_kwargs, add_generation_prompt and continue_final_message. Embeddings also have prompt_name.
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
from jattn.errors.arguments import short
from jattn.serve.errors import BadRequestError
from jattn.text import ChatTemplate, Tokenizer
from jattn.text.chat import RESERVED

Reader = Callable[[Any], Any]
"""Checks the value of a field and returns it as the server uses it, or raises _InvalidValueError."""

Prompts = tuple[str | tuple[int, ...], ...]

MAX_CHARACTERS_PER_TOKEN = 256
"""A text with more characters for each token of the model's length is refused before it is tokenised.

The longest tokens of published vocabularies have 128 characters.
"""

MAX_PARAM = 80
"""Characters of a field's name in the `param` of an error."""


class _InvalidValueError(ValueError):
    """The message completes the sentence 'FIELD=VALUE must be ...'."""


@dataclasses.dataclass(frozen=True)
class ParsedBody:
    """The checked fields of a body."""

    prompts: Prompts
    params: SamplingParams
    is_chat: bool
    model: str | None = None
    stream: bool = False
    include_usage: bool = False
    salt: str = ""
    user: str | None = None


@dataclasses.dataclass(frozen=True)
class ParsedEmbeddings:
    """The checked fields of a body of POST /v1/embeddings."""

    inputs: Prompts
    model: str | None = None
    is_base64: bool = False
    dimensions: int | None = None
    prompt_name: str | None = None  # of the text that the model's folder puts before each text
    user: str | None = None


def parse_embeddings(body: dict[str, Any]) -> ParsedEmbeddings:
    """The body of POST /v1/embeddings."""
    values = _read(body, EMBEDDING_FIELDS)
    if "input" not in values:
        raise BadRequestError("input=None must be text, token ids, or a list of either", "input")
    return ParsedEmbeddings(
        values["input"],
        model=values.get("model"),
        is_base64=values.get("encoding_format") == "base64",
        dimensions=values.get("dimensions"),
        prompt_name=values.get("prompt_name"),
        user=_user(values),
    )


def parse_completion(body: dict[str, Any], default_max_tokens: int) -> ParsedBody:
    """The body of POST /v1/completions."""
    values = _read(body, COMPLETION_FIELDS)
    if "prompt" not in values:
        raise BadRequestError("prompt=None must be text, token ids, or a list of either", "prompt")
    sampling = dict(max_tokens=values.get("max_tokens", default_max_tokens), logprobs=values.get("logprobs"))
    return _parsed(values, values["prompt"], sampling, is_chat=False)


def parse_chat(
    body: dict[str, Any], template: ChatTemplate | None, tokenizer: Tokenizer | None, max_model_len: int
) -> ParsedBody:
    """The body of POST /v1/chat/completions, its messages rendered and tokenised."""
    values = _read(body, CHAT_FIELDS)
    if template is None or tokenizer is None:
        missing = "chat template" if template is None else "tokenizer"
        raise BadRequestError(f"this model's folder has no {missing}; use /v1/completions", "messages")
    if "messages" not in values:
        raise BadRequestError("messages=None must be a non-empty list of messages", "messages")
    max_tokens = {values[name] for name in ("max_tokens", "max_completion_tokens") if name in values}
    if len(max_tokens) > 1:
        raise BadRequestError("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    wants_logprobs = values.get("logprobs", False)
    if "top_logprobs" in values and not wants_logprobs:
        raise BadRequestError("top_logprobs needs logprobs=true", "top_logprobs")
    if values.get("tools") and body.get("parallel_tool_calls") is False:
        raise BadRequestError("parallel_tool_calls=false is not supported", "parallel_tool_calls")
    if body.get("tool_choice") == "none":
        values.pop("tools", None)
    variables = {name: values[name] for name in ("reasoning_effort",) if name in values}
    variables |= values.get("chat_template_kwargs", {})
    arguments = {name: values[name] for name in TEMPLATE_ARGUMENTS if name in values}
    try:
        text = template.render(values["messages"], variables=variables, **arguments)
    except Exception as error:  # a template is a program and may raise anything
        raise BadRequestError(f"the chat template cannot render these messages: {error}", "messages") from error
    check_length(text, max_model_len, "messages")
    try:
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False))  # the template writes the special tokens
    except Exception as error:
        raise BadRequestError(f"the chat cannot be tokenised: {error}", "messages") from error
    sampling = dict(
        max_tokens=max_tokens.pop() if max_tokens else max_model_len,
        logprobs=values.get("top_logprobs", 0) if wants_logprobs else None,
    )
    return _parsed(values, (prompt,), sampling, is_chat=True)


def check_length(text: str, max_model_len: int, param: str) -> None:
    """Refuse a text that has too many characters for max_model_len tokens of any tokenizer."""
    if len(text) > (max_characters := max_model_len * MAX_CHARACTERS_PER_TOKEN):
        name, words = ("input", "it") if param == "input" else ("prompt", "prompt and output together")
        limit = f"{max_characters} for the {max_model_len} tokens that {words} may have"
        raise BadRequestError(f"the {name} has {len(text)} characters, more than {limit}", param)


def _parsed(values: dict[str, Any], prompts: Prompts, sampling: dict[str, Any], is_chat: bool) -> ParsedBody:
    options = values.get("stream_options")
    if options is not None and not values.get("stream"):
        raise BadRequestError("stream_options needs stream=true", "stream_options")
    try:
        params = SamplingParams(**{name: values[name] for name in SAMPLING_FIELDS if name in values}, **sampling)
    except ValueError as error:  # each field is valid alone, but not with the others: n=2 and temperature=0
        param = next((name for name in SAMPLING_FIELDS if str(error).startswith(f"{name}=")), None)
        raise BadRequestError(str(error), param) from error
    return ParsedBody(
        prompts,
        params,
        is_chat,
        model=values.get("model"),
        stream=values.get("stream", False),
        include_usage=(options or {}).get("include_usage", False),
        salt=values.get("cache_salt", ""),
        user=_user(values),
    )


def _user(values: dict[str, Any]) -> str | None:
    return values.get("safety_identifier", values.get("user"))


def _read(body: dict[str, Any], readers: dict[str, Reader]) -> dict[str, Any]:
    """The values of the fields that are present. One error names everything that is wrong."""
    values, problems = {}, {}
    for name, value in body.items():
        if name in readers:
            if value is None:
                continue
            try:
                values[name] = readers[name](value)
            except _InvalidValueError as error:
                problems[name] = f"{name}={short(value)} must be {error}"
        elif name not in UNSUPPORTED_FIELDS:
            problems[name] = f"the field {short(name)} is unknown"
        elif value is not None and not any(_is_same(value, neutral) for neutral in UNSUPPORTED_FIELDS[name]):
            problems[name] = f"{name}={short(value)} is not supported"
    if problems:
        raise BadRequestError("; ".join(problems.values()), next(iter(problems))[:MAX_PARAM])
    return values


# ---------------------------------------------------------------------- readers
def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _InvalidValueError("true or false")
    return value


def _integer(low: int, high: int) -> Reader:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _InvalidValueError(f"an integer from {low} to {high}")
        return value

    return read


def _number(low: float, high: float) -> Reader:
    def read(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise _InvalidValueError(f"a number from {low} to {high}")
        return value

    return read


def _temperature(value: Any) -> float:
    value = _number(0, 100)(value)
    if 0 < value < 1e-3:
        raise _InvalidValueError("0 (always the most likely token) or at least 0.001")
    return value


def _top_p(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise _InvalidValueError("a number above 0 up to 1")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _InvalidValueError("text")
    return value


def _encoding_format(value: Any) -> str:
    if value not in ("float", "base64"):
        raise _InvalidValueError("float or base64")
    return value


def _stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _InvalidValueError("text, or a list of non-empty texts")
    if len(texts) > MAX_STOPS or sum(map(len, texts)) > MAX_STOP_CHARACTERS:
        raise _InvalidValueError(f"at most {MAX_STOPS} texts, together of at most {MAX_STOP_CHARACTERS} characters")
    return texts


def _stop_tokens(value: Any) -> tuple[int, ...]:
    tokens = _tokens(value)
    if len(tokens) > MAX_STOPS:
        raise _InvalidValueError(f"at most {MAX_STOPS} token ids")
    return tokens


def _tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= MAX_INT32 for token in value):
        raise _InvalidValueError("a list of token ids")
    return tuple(value)


def _prompts(value: Any) -> Prompts:
    """Text, tokens, or a list of texts and of tokens."""
    if isinstance(value, str):
        return (value,)
    try:
        if not isinstance(value, list) or not value:
            raise _InvalidValueError
        if type(value[0]) is int:
            return (_tokens(value),)
        return tuple(prompt if isinstance(prompt, str) else _tokens(prompt) for prompt in value)
    except _InvalidValueError:
        raise _InvalidValueError("text, token ids, or a list of either") from None


def _stream_options(value: Any) -> dict[str, bool]:
    if not isinstance(value, dict):
        raise _InvalidValueError("an object")
    readers = dict(include_usage=_boolean, include_obfuscation=_false)
    if unknown := [name for name in value if name not in readers]:
        raise _InvalidValueError(f"without {short(unknown[0])}, which is unknown")
    return {name: readers[name](option) for name, option in value.items() if option is not None}


def _false(value: Any) -> bool:
    if value is not False:
        raise _InvalidValueError("without include_obfuscation, which is not supported")
    return value


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _InvalidValueError("a non-empty list of messages")
    return [_message(message) for message in value]


def _message(message: Any) -> dict[str, Any]:
    """The fields that a template may read. All others must be null or [], as in a response that is sent back."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _InvalidValueError("a list of messages, each an object with a role and a content")
    kept = {}
    for name, value in message.items():
        if value is None:
            continue
        if name == "content":
            kept[name] = _content(value)
        elif name == "tool_calls":
            kept[name] = _objects(value)
        elif name in MESSAGE_TEXT_FIELDS:
            if not isinstance(value, str):
                raise _InvalidValueError(f"messages whose {name} is text")
            kept[name] = value
        elif value != []:
            raise _InvalidValueError(f"without a message's {short(name)}, which is not supported")
    return kept


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise _InvalidValueError("messages whose content is text, or a list of text parts")
    for part in content:
        if part.get("type") != "text":
            raise _InvalidValueError(f"without parts of type {short(part.get('type'))}: only text is supported")
        if not isinstance(part.get("text"), str) or len(part) != 2:
            raise _InvalidValueError("messages whose parts have a type and a text, and nothing else")
    return "".join(part["text"] for part in content)


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _InvalidValueError("a list of objects")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _InvalidValueError("an object")
    return value


def _variables(value: Any) -> dict[str, Any]:
    if reserved := [name for name in RESERVED if name in _object(value)]:
        raise _InvalidValueError(f"without {reserved[0]}, which is a field of the body")
    return value


def _is_same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other  # in Python True == 1


SAMPLING_FIELDS: dict[str, Reader] = dict(
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
"""Fields that are fields of SamplingParams under the same name."""

COMMON_FIELDS = SAMPLING_FIELDS | dict(
    model=_text,
    stream=_boolean,
    stream_options=_stream_options,
    cache_salt=_text,
    user=_text,  # logged with the request's id
    safety_identifier=_text,  # the newer name of user
    max_tokens=_integer(1, MAX_INT32),
)
COMPLETION_FIELDS = COMMON_FIELDS | dict(prompt=_prompts, logprobs=_integer(0, MAX_LOGPROBS))
CHAT_FIELDS = COMMON_FIELDS | dict(
    messages=_messages,
    max_completion_tokens=_integer(1, MAX_INT32),
    logprobs=_boolean,
    top_logprobs=_integer(0, MAX_LOGPROBS),
    tools=_objects,  # for the template; a call that the model writes stays in the text
    documents=_objects,
    add_generation_prompt=_boolean,
    continue_final_message=_boolean,
    reasoning_effort=_text,
    chat_template_kwargs=_variables,
)
EMBEDDING_FIELDS = dict(
    input=_prompts,
    model=_text,
    encoding_format=_encoding_format,
    dimensions=_integer(1, MAX_INT32),
    prompt_name=_text,
    user=_text,
    safety_identifier=_text,
)
TEMPLATE_ARGUMENTS = ("tools", "documents", "add_generation_prompt", "continue_final_message")
"""Fields of a chat that are arguments of ChatTemplate.render under the same name."""

MESSAGE_TEXT_FIELDS = ("role", "name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal")
"""Fields of a message whose value is text."""

UNSUPPORTED_FIELDS: dict[str, tuple] = dict(
    echo=(False,), best_of=(1,), suffix=("",), logit_bias=({},), tools=([],), tool_choice=("none", "auto"),
    response_format=({"type": "text"},), functions=([],), function_call=("none", "auto"),
    parallel_tool_calls=(True, False), modalities=(["text"],), audio=(), metadata=({},), store=(False,),
    service_tier=("auto", "default"), prediction=(), reasoning_effort=(), verbosity=(), web_search_options=(),
    moderation=(), prompt_cache_key=(), prompt_cache_options=(), prompt_cache_retention=(),
)  # fmt: skip
"""Fields of the interface that are not supported -> values that change nothing, which are accepted."""
