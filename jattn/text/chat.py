"""Chat templates: messages to one prompt."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jattn.errors.arguments import BYTES, check_kind, short
from jattn.models.files import is_there, read_json, read_text
from jattn.text.renderer import Inspection, inspect, render
from jattn.text.special import read_special_tokens
from jattn.text.tokenizer import Tokenizer

FILE, LEGACY, FOLDER = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
MAX_SOURCE = 1 << 18
"""Characters of a template; published ones have up to about 30,000."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which clients send the reasoning of a message."""
MARK = "THE-LAST-MESSAGE-IS-CONTINUED-FROM-HERE "
"""Appended to a message that is continued, to find its end in the prompt. Its last space shows if that is trimmed."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables that `render` sets from its arguments."""
MAX_DEPTH = 64
"""Nesting of lists and objects in a template's input."""


class ChatTemplate:
    """One jinja template, or several by name, rendered in a separate process: see jattn.text.renderer.

    Nothing is compiled before the first chat, so a broken template only makes chats fail.

    variables: available in every chat, such as `bos_token`. where: the template's name in errors. problem: why the
    folder's template cannot be used; every chat is then refused with this message.
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
        self._inspections: dict[str, Inspection] = {}  # name of a template -> what it reads, once that is asked for

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
        """The prompt for the next message; ValueError with the message of the template if it refuses.

        The prompt contains its special tokens: encode it with add_special_tokens=False, as chat_prompt does.

        tools, documents: passed to the template. variables: more of them, by name (`enable_thinking`).
        continue_final_message: the prompt ends inside the last message, without a header for a new one.
        add_generation_prompt: None means True, or False with continue_final_message. template: the name of one of
        several; None means "tool_use" if there are tools and such a template, else "default".
        """
        if continue_final_message and add_generation_prompt:
            raise ValueError(
                "continue_final_message continues the last message; add_generation_prompt begins a new one"
            )
        if reserved := [name for name in RESERVED if name in (variables or {})]:
            raise ValueError(f"{reserved[0]} is an argument of render(); do not pass it in variables")
        plain = _plain(messages)
        if not plain or not isinstance(plain, list) or not all(isinstance(message, dict) for message in plain):
            raise ValueError(
                "messages must be a non-empty list of objects such as {'role': 'user', 'content': 'hello'}"
            )
        name = self._choose(template, tools)
        may_be_null = {"content"} if self._inspection(name).asks_for_null else set()  # other templates may print "None"
        chat = [_with_reasoning({k: v for k, v in each.items() if v is not None or k in may_be_null}) for each in plain]
        last_text = _mark(chat[-1]) if continue_final_message else None
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        arguments = dict(
            messages=chat, tools=_plain(tools), documents=_plain(documents), add_generation_prompt=add_generation_prompt
        )
        text = render(self._source(name), self._variables | _plain(variables or {}) | arguments, self._where)
        return text if last_text is None else _cut(text, last_text, self._where)

    def does_read(self, variable: str, tools: Any = None) -> bool:
        """False if the template never looks this variable up. tools: as in `render`; they may decide which template."""
        return variable in self._inspection(self._choose(None, tools)).variables

    def _inspection(self, name: str) -> Inspection:
        if name not in self._inspections:
            self._inspections[name] = inspect(self._source(name), self._where)
        return self._inspections[name]

    def _choose(self, name: str | None, tools: Any) -> str:
        if self._problem is not None:
            raise ValueError(self._problem)
        if name is None:
            name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(
                f"{self._where}: there is no template {name!r}; use one of {', '.join(sorted(self._sources))}"
            )
        return name

    def _source(self, name: str) -> str:
        source = self._sources[name]
        if len(source) > MAX_SOURCE:
            raise ValueError(f"{self._where} has {len(source)} characters, more than {MAX_SOURCE}")
        return source


def chat_prompt(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **options: Any
) -> list[int]:
    """The tokens of a chat, for Engine.add_request. The options are those of ChatTemplate.render.

    The template writes the special tokens, so the tokenizer adds none: a second BOS would change the model's output.
    """
    no_template = "an engine's chat_template is None if its folder has none: pass ChatTemplate(text of a template)"
    check_kind("template", template, ChatTemplate, no_template)
    return tokenizer.encode(template.render(messages, **options), add_special_tokens=False)


def load_chat_template(directory: str | Path) -> ChatTemplate | None:
    """The folder's template or templates; None if it has none. An unreadable file is reported by the first chat.

    The first of these that has a template counts, as in transformers: chat_template.jinja with the files of
    additional_chat_templates/, chat_template.json, tokenizer_config.json.
    """
    directory = Path(directory).resolve()
    where = f"the chat template of {directory.name}"
    try:
        sources = _sources(directory)
        variables = read_special_tokens(directory).by_name
    except (ValueError, FileNotFoundError) as error:
        why = str(error).replace(f"{directory}{os.sep}", "")  # the message reaches clients, who must not see the path
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
    """The value of chat_template, which is text, {name: text} or [{name, template}], as {name: text}."""
    named = value
    if isinstance(value, str):
        named = {"default": value}
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(named, dict) or not named or not all(isinstance(x, str) for pair in named.items() for x in pair):
        raise ValueError(
            f"{path}: chat_template={short(value)} must be text, or a list of objects with a name and a template"
        )
    return named


def _plain(value: Any, depth: int = MAX_DEPTH) -> Any:
    """A copy that has only JSON's types, so that a template finds no other methods in its input."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth == 0:
        raise ValueError(f"the lists and objects for a chat template are nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, BYTES):
        return [_plain(item, depth - 1) for item in value]
    raise ValueError(f"a chat template takes text, numbers, lists and objects, not {type(value).__name__}")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under both keys that templates read."""
    reasoning = next((message[name] for name in REASONING_KEYS if name in message), None)
    return message if reasoning is None else {"thinking": reasoning} | message | {"reasoning_content": reasoning}


def _mark(message: dict[str, Any]) -> str:
    """Append MARK to the message's text; returns the text without it."""
    content = message.get("content")
    parts = [part for part in content if isinstance(part, dict) and "text" in part] if isinstance(content, list) else []
    holder, key = (parts[-1], "text") if parts else (message, "content")
    text = holder.get(key)
    if not isinstance(text, str):
        raise ValueError("continue_final_message needs a last message whose content is text")
    holder[key] = text + MARK
    return text


def _cut(prompt: str, text: str, where: str) -> str:
    """The prompt up to MARK; if the template trimmed the message, the end of the prompt is trimmed too."""
    at = prompt.rfind(MARK.strip())
    if at < 0 or text.strip() not in prompt:
        raise ValueError(f"{where} leaves out or changes the last message, so it cannot be continued")
    return prompt[:at] if prompt.startswith(MARK, at) else prompt[:at].rstrip()
