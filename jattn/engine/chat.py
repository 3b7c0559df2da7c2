"""A folder's chat template: messages to one prompt."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jattn.engine.tokenizer import tokenizer_config


class ChatTemplate:
    """The jinja template of tokenizer_config.json or chat_template.jinja, run in jinja's sandbox."""

    def __init__(self, source: str, variables: dict[str, Any] | None = None):
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ImportError("a chat template needs jinja2: pip install 'jattn[models]'") from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self._variables = variables or {}

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt that asks the model for the next message; ValueError with the template's own complaint."""
        import jinja2

        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **self._variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error


def load_chat_template(directory: str | Path) -> ChatTemplate | None:
    """The folder's template; None where it has none."""
    config = tokenizer_config(directory)
    path = Path(directory) / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return ChatTemplate(source, {name: _text(config[name]) for name in names if config.get(name) is not None})


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _refuse(message: str):
    import jinja2

    raise jinja2.TemplateError(message)
