"""A folder's chat template: messages to one prompt."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn.errors.arguments import short
from jattn.models.files import is_there, read_json, read_text
from jattn.text.renderer import render
from jattn.text.special import read_special_tokens
from jattn.text.tokenizer import Tokenizer

FILE, LEGACY, FOLDER = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
MOST_SOURCE = 1 << 18
"""Most characters of a template; published ones have up to about 30,000."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which clients send a message's reasoning."""
MARK = "THE-LAST-MESSAGE-IS-CONTINUED-FROM-HERE "
"""Appended to a message that is continued, to find its end in the prompt; a missing trailing space means: trimmed."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
MOST_DEPTH = 64
"""Deepest nesting of lists and objects in a template's input."""


class ChatTemplate:
    """One jinja template, or several by name, run in a process of its own: see jattn.text.renderer.

    Nothing is compiled before the first chat, so a broken template fails chats and nothing else.
    variables: values that every chat has by name, such as `bos_token`. where: the template's name in errors. problem:
    why the folder's template cannot be used; every chat is then refused with this message.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        variables: Mapping[str, Any] | None = None,
        *,
        where: str = "the chat template",
        problem: str | None = None,
    ):
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._variables, self._where, self._problem = dict(variables or {}), where, problem

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that asks the model for the next message; ValueError with the template's own complaint.

        The prompt contains its special tokens: encode it with add_special_tokens=False, as chat_prompt does. tools and
        documents are passed on to the template; variables (`enable_thinking`, `reasoning_effort`) reach it by name.
        continue_final_message: the prompt ends inside the last message, without a header for a new one.
        add_generation_prompt: None means True, or False with continue_final_message. template: the name of one of
        several; None means "tool_use" if there are tools and such a template, else "default".
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message continues the last message; add_generation_prompt begins a new one"
            )
        if taken := [name for name in RESERVED if name in (variables or {})]:
            raise ValueError(f"{taken[0]} is an argument of its own, not a variable of the template")
        chat = _plain(messages)
        if not chat or not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
            raise ValueError(
                "messages must be a non-empty list of objects such as {'role': 'user', 'content': 'hello'}"
            )
        chat = [_with_thoughts({k: v for k, v in message.items() if v is not None}) for message in chat]
        end = _mark(chat[-1]) if continue_final_message else None
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        given = dict(messages=chat, tools=_plain(tools), documents=_plain(documents), add_generation_prompt=begins)
        text = self._run(self._chosen(template, tools), self._variables | _plain(variables or {}) | given)
        return text if end is None else _cut(text, end, self._where)

    def _chosen(self, name: str | None, tools: Any) -> str:
        if self._problem is not None:
            raise ValueError(self._problem)
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(
                f"{self._where}: there is no template {name!r} but {', '.join(sorted(self._sources))}: name one"
            )
        return name

    def _run(self, name: str, variables: dict[str, Any]) -> str:
        source = self._sources[name]
        if len(source) > MOST_SOURCE:
            raise ValueError(f"{self._where} has {len(source)} characters, more than {MOST_SOURCE}")
        return render(source, variables, self._where)


def chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """The tokens of a chat, for Engine.add_request; options are those of ChatTemplate.render.

    The template writes the special tokens and the tokenizer adds none: two BOS tokens would change the model's answer.
    """
    return tokenizer.encode(template.render(messages, **options), add_special_tokens=False)


def load_chat_template(directory: str | Path) -> ChatTemplate | None:
    """The folder's template or templates; None where it has none. An unreadable file is reported by the first chat.

    chat_template.jinja and the files of additional_chat_templates/ come before chat_template.json, and that before
    tokenizer_config.json, as transformers has it.
    """
    directory = Path(directory).resolve()
    where = f"the chat template of {directory.name}"
    try:
        sources = _sources(directory)
        variables = read_special_tokens(directory).by_name
    except (ValueError, FileNotFoundError) as error:
        why = str(error).replace(f"{directory}{os.sep}", "")  # it reaches clients, who must not see the path
        return ChatTemplate({}, where=where, problem=f"{where} cannot be used: {why}")
    return ChatTemplate(sources, variables, where=where) if sources else None


def _sources(directory: Path) -> dict[str, str]:
    """Every template by name."""
    found = {}
    if is_there(directory / FILE):
        found["default"] = read_text(directory / FILE)
    for path in sorted((directory / FOLDER).glob("*.jinja")):
        found[path.stem] = read_text(path)
    if found:
        return found
    for path in (directory / LEGACY, directory / "tokenizer_config.json"):
        value = read_json(path).get("chat_template") if is_there(path) else None
        if value is not None:
            return _by_name(path, value)
    return {}


def _by_name(path: Path, value: Any) -> dict[str, str]:
    """The value of a chat_template: a text, {name: text}, or [{name, template}]."""
    named = value
    if isinstance(value, str):
        named = {"default": value}
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(named, dict) or not named or not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise ValueError(
            f"{path}: chat_template={short(value)} must be a text, or a list of objects with a name and a template"
        )
    return named


def _plain(value: Any, depth: int = MOST_DEPTH) -> Any:
    """A copy made of JSON's types alone, so that a template finds no other methods on its input."""
    if value is None or isinstance(value, bool):
        return value
    for kind, plain in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return plain(value)
    if depth == 0:
        raise ValueError(f"a chat template takes lists and objects at most {MOST_DEPTH} deep in each other")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return [_plain(item, depth - 1) for item in value]
    raise ValueError(f"a chat template takes texts, numbers, lists and objects, not {type(value).__name__}")


def _with_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both keys that templates read."""
    thought = next((message[name] for name in THOUGHTS if name in message), None)
    return message if thought is None else {"thinking": thought} | message | {"reasoning_content": thought}


def _mark(message: dict[str, Any]) -> str:
    """Put the mark after the message's text, and return that text."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict) and "text" in part] if isinstance(content, list) else []
    holder, key = (parts[-1], "text") if parts else (message, "content")
    text = holder.get(key)
    if not isinstance(text, str):
        raise ValueError("continue_final_message needs a last message with a text as its content")
    holder[key] = text + MARK
    return text


def _cut(prompt: str, text: str, where: str) -> str:
    """The prompt up to the mark; where the template trimmed the message, the prompt's end is trimmed too."""
    at = prompt.rfind(MARK.strip())
    if at < 0 or text.strip() not in prompt:
        raise ValueError(f"{where} leaves out or changes the last message, so that it cannot be continued")
    return prompt[:at] if prompt.startswith(MARK, at) else prompt[:at].rstrip()
