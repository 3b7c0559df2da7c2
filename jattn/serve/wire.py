"""The OpenAI interface's JSON: bodies to requests, outputs to bodies. An unknown or unsupported field is refused."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jattn.engine import ChatTemplate, Completion, RequestOutput, SamplingParams

PLAIN = (
    "temperature", "top_p", "n", "seed", "stop", "presence_penalty", "frequency_penalty",
    "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
)  # fmt: skip
"""Fields that are SamplingParams by the same name; from top_k on, common extensions of the interface."""

HARMLESS = ("model", "user", "stream", "stream_options", "cache_salt", "metadata", "store")
NEUTRAL: dict[str, tuple] = dict(
    echo=(False, None), best_of=(1, None), suffix=("", None), logit_bias=({}, None), tools=([], None),
    tool_choice=("none", "auto", None), response_format=({"type": "text"}, None), functions=([], None),
    parallel_tool_calls=(True, False, None), modalities=(["text"], None), audio=(None,),
)  # fmt: skip
"""Fields that are understood but not served: accepted only where they ask for nothing."""


class BadRequestError(ValueError):
    """A body that cannot be served; `param` names the field."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a body asks for."""

    prompts: tuple[str | tuple[int, ...], ...]
    params: SamplingParams
    stream: bool
    include_usage: bool
    salt: str
    chat: bool


def parse_completion(body: dict[str, Any], default_max_tokens: int) -> Asked:
    """POST /v1/completions."""
    _check_fields(body, ("prompt", "max_tokens", "logprobs"))
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        prompts: tuple = (prompt,)
    elif isinstance(prompt, list) and prompt and all(_is_token(t) for t in prompt):
        prompts = (tuple(prompt),)
    elif isinstance(prompt, list) and prompt and all(isinstance(p, (str, list)) for p in prompt):
        prompts = tuple(p if isinstance(p, str) else tuple(p) for p in prompt)
    else:
        raise BadRequestError(f"prompt={prompt!r:.80} must be text, token ids, or a list of either", "prompt")
    extra = dict(max_tokens=_or(body.get("max_tokens"), default_max_tokens), logprobs=body.get("logprobs"))
    return _asked(body, prompts, extra, chat=False)


def parse_chat(body: dict[str, Any], template: ChatTemplate | None, default_max_tokens: int) -> Asked:
    """POST /v1/chat/completions."""
    _check_fields(body, ("messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"))
    if template is None:
        raise BadRequestError("this model's folder has no chat template; use /v1/completions", "messages")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise BadRequestError("messages must be a non-empty list of {role, content}", "messages")
    try:
        prompt = template.render([message | {"content": _text(message.get("content"))} for message in messages])
    except ValueError as error:
        raise BadRequestError(str(error), "messages") from error
    most = _or(body.get("max_completion_tokens"), _or(body.get("max_tokens"), default_max_tokens))
    told = _or(body.get("top_logprobs"), 0) if body.get("logprobs") else None
    return _asked(body, (prompt,), dict(max_tokens=most, logprobs=told), chat=True)


def answer(asked: Asked, outputs: list[RequestOutput], id: str, model: str, token_text: Callable[[int], str]) -> dict:
    """The whole body of a finished request."""
    choices = [
        _choice(asked, done, len(asked.prompts) and p * asked.params.n + done.index, done.text, done, token_text)
        for p, output in enumerate(outputs)
        for done in output.outputs
    ]
    kind = "chat.completion" if asked.chat else "text_completion"
    return _envelope(id, kind, model) | {"choices": choices, "usage": usage(outputs)}


def chunk(asked: Asked, done: Completion, index: int, seen: tuple[str, int], id: str, model: str, token_text) -> dict:
    """One event of a stream: what came after (text, number of tokens) seen before."""
    text, tokens = seen
    logprobs = done.logprobs[tokens:] if done.logprobs is not None else None
    news = dataclasses.replace(done, logprobs=logprobs)
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    choice = _choice(asked, news, index, done.text[len(text) :], done, token_text, delta=True)
    return _envelope(id, kind, model) | {"choices": [choice]}


def usage_chunk(asked: Asked, outputs: list[RequestOutput], id: str, model: str) -> dict:
    """The last event, where the client asked for it."""
    kind = "chat.completion.chunk" if asked.chat else "text_completion"
    return _envelope(id, kind, model) | {"choices": [], "usage": usage(outputs)}


def usage(outputs: list[RequestOutput]) -> dict:
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(done.token_ids) for output in outputs for done in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return dict(
        prompt_tokens=prompt, completion_tokens=made, total_tokens=prompt + made,
        prompt_tokens_details=dict(cached_tokens=cached),
    )  # fmt: skip


def error_body(message: str, kind: str = "invalid_request_error", param: str | None = None) -> dict:
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


def _choice(asked: Asked, news: Completion, index: int, text: str, done: Completion, token_text, delta=False) -> dict:
    reason = None if done.finish_reason is None else str(done.finish_reason)
    choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
    if news.logprobs is not None:
        choice["logprobs"] = (_chat_logprobs if asked.chat else _logprobs)(news, token_text)
    if not asked.chat:
        return choice | {"text": text}
    message = {"role": "assistant", "content": text}
    return choice | {"delta" if delta else "message": message}


def _logprobs(done: Completion, token_text) -> dict:
    told = done.logprobs or ()
    return dict(
        tokens=[token_text(t.token_id) for t in told],
        token_logprobs=[t.logprob for t in told],
        top_logprobs=[{token_text(i): p for i, p in t.top.items()} for t in told],
        text_offset=[],
    )


def _chat_logprobs(done: Completion, token_text) -> dict:
    entry = lambda token, logprob: dict(
        token=token_text(token), logprob=logprob, bytes=list(token_text(token).encode("utf-8"))
    )
    told = done.logprobs or ()
    return {
        "content": [
            entry(t.token_id, t.logprob) | {"top_logprobs": [entry(*pair) for pair in t.top.items()]} for t in told
        ]
    }


def _asked(body: dict[str, Any], prompts: tuple, extra: dict[str, Any], chat: bool) -> Asked:
    fields = {name: body[name] for name in PLAIN if body.get(name) is not None}
    try:
        params = SamplingParams(**fields, **extra)
    except (ValueError, TypeError) as error:
        raise BadRequestError(str(error)) from error
    options = body.get("stream_options") or {}
    return Asked(
        prompts,
        params,
        bool(body.get("stream")),
        bool(options.get("include_usage")),
        str(body.get("cache_salt") or ""),
        chat,
    )


def _check_fields(body: dict[str, Any], own: tuple[str, ...]) -> None:
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    unknown = [name for name in body if name not in (*own, *PLAIN, *HARMLESS, *NEUTRAL)]
    asking = [name for name, neutral in NEUTRAL.items() if name in body and body[name] not in neutral]
    if unknown or asking:
        said = [f"{name} is not known" for name in unknown] + [f"{name} is not served here" for name in asking]
        raise BadRequestError("; ".join(said), (unknown + asking)[0])


def _text(content: Any) -> str:
    if isinstance(content, list):
        if bad := [part.get("type") for part in content if part.get("type") != "text"]:
            raise BadRequestError(f"message parts of type {bad[0]!r} are not served here: only text is", "messages")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise BadRequestError("a message's content must be text, or a list of text parts", "messages")
    return content or ""


def _envelope(id: str, kind: str, model: str) -> dict:
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
