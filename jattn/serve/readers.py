"""Readers: each checks the value of a field of a body, and returns it as the server uses it."""

from collections.abc import Callable
from typing import Any

from jattn import strict_json
from jattn.engine.params import MAX_INT32, MAX_STOP_CHARACTERS, MAX_STOPS
from jattn.errors.arguments import short
from jattn.serve.body import MAX_DEPTH, MAX_DIGITS, MAX_VALUES
from jattn.text.chat import RESERVED

Reader = Callable[[Any], Any]
"""Checks the value of a field and returns it as the server uses it, or raises InvalidValueError."""

Prompts = tuple[str | tuple[int, ...], ...]


MESSAGE_TEXT_FIELDS = ("role", "name", "tool_call_id", "reasoning_content", "reasoning", "thinking", "refusal")
"""Fields of a message whose value is text."""

UNSUPPORTED_STREAM_OPTIONS = ("include_obfuscation", "continuous_usage_stats")
"""They may be false or null."""


class InvalidValueError(ValueError):
    """The message completes the sentence 'FIELD=VALUE must be ...'."""


def boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidValueError("true or false")
    return value


def integer(low: int, high: int) -> Reader:
    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise InvalidValueError(f"an integer from {low} to {high}")
        return value

    return read


def number(low: float, high: float) -> Reader:
    def read(value: Any) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise InvalidValueError(f"a number from {low} to {high}")
        return value

    return read


def temperature(value: Any) -> float:
    value = number(0, 100)(value)
    if 0 < value < 1e-3:
        raise InvalidValueError("0 (always the most likely token) or at least 0.001")
    return value


def top_p(value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise InvalidValueError("a number above 0 up to 1")
    return value


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidValueError("text")
    return value


def encoding_format(value: Any) -> str:
    if value not in ("float", "base64"):
        raise InvalidValueError("float or base64")
    return value


def stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidValueError("a non-empty text, or a list of such texts")
    if len(texts) > MAX_STOPS or sum(map(len, texts)) > MAX_STOP_CHARACTERS:
        raise InvalidValueError(f"at most {MAX_STOPS} texts, together of at most {MAX_STOP_CHARACTERS} characters")
    return texts


def stop_tokens(value: Any) -> tuple[int, ...]:
    ids = tokens(value)
    if len(ids) > MAX_STOPS:
        raise InvalidValueError(f"at most {MAX_STOPS} token ids")
    return ids


def tokens(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token <= MAX_INT32 for token in value):
        raise InvalidValueError("a list of token ids")
    return tuple(value)


def prompts(value: Any) -> Prompts:
    """Text, tokens, or a list of texts and of tokens."""
    if isinstance(value, str):
        return (value,)
    try:
        if not isinstance(value, list) or not value:
            raise InvalidValueError
        if type(value[0]) is int:
            return (tokens(value),)
        return tuple(prompt if isinstance(prompt, str) else tokens(prompt) for prompt in value)
    except InvalidValueError:
        raise InvalidValueError("text, token ids, or a list of either") from None


def stream_options(value: Any) -> dict[str, bool]:
    if not isinstance(value, dict):
        raise InvalidValueError("an object")
    if unknown := [name for name in value if name not in ("include_usage", *UNSUPPORTED_STREAM_OPTIONS)]:
        raise InvalidValueError(f"without {short(unknown[0])}, which is unknown")
    given = {name: option for name, option in value.items() if option is not None}
    if not isinstance(given.get("include_usage", False), bool):
        raise InvalidValueError("an object whose include_usage is true or false")
    if unsupported := [name for name in UNSUPPORTED_STREAM_OPTIONS if given.get(name, False) is not False]:
        raise InvalidValueError(f"without {unsupported[0]}, which is not supported")
    return given


def messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidValueError("a non-empty list of messages")
    return [_message(message) for message in value]


def _message(message: Any) -> dict[str, Any]:
    """The fields that a template may read. All others must be null or [], as in a response that is sent back."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidValueError("a list of messages, each an object with a role and a content")
    kept = {}
    for name, value in message.items():
        if value is None:
            continue
        if name == "content":
            kept[name] = _content(value)
        elif name == "tool_calls":
            if not isinstance(value, list) or not all(isinstance(call, dict) for call in value):
                raise InvalidValueError("messages whose tool_calls are a list of objects")
            if calls := [_tool_call(call) for call in value]:  # of [], templates may count the calls
                kept[name] = calls
        elif name in MESSAGE_TEXT_FIELDS:
            if not isinstance(value, str):
                raise InvalidValueError(f"messages whose {name} is text")
            kept[name] = value
        elif value != []:
            raise InvalidValueError(f"without a message's {short(name)}, which is not supported")
    if "tool_calls" in kept:
        kept.setdefault("content", None)  # for a template that asks whether it is null
    return kept


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments as the object of which they are the JSON text in OpenAI's interface.

    Templates write an object as JSON, and a text as JSON's string: with quotes around it, and backslashes.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("arguments"), str):
        return call
    if text.count("[") + text.count("{") > MAX_VALUES:  # parsing them takes long, see body.py
        return call
    try:
        arguments = strict_json.parse(text, MAX_DEPTH, MAX_DIGITS) if text.strip() else {}
        strict_json.check(arguments, MAX_DEPTH, MAX_VALUES)
    except ValueError:  # a model may have written it
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidValueError("messages whose content is text, or a list of text parts")
    for part in content:
        if part.get("type") != "text":
            raise InvalidValueError(f"without parts of type {short(part.get('type'))}: only text is supported")
        names = {name for name, value in part.items() if value is not None}
        if not isinstance(part.get("text"), str) or names != {"type", "text"}:
            raise InvalidValueError("messages whose parts have a type and a text, and nothing else")
    return "".join(part["text"] for part in content)


def objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidValueError("a list of objects")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValueError("an object")
    return value


def variables(value: Any) -> dict[str, Any]:
    if reserved := [name for name in RESERVED if name in _object(value)]:
        raise InvalidValueError(f"without {reserved[0]}, which is a field of the body")
    return value
