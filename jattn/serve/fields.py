"""The fields of a POST body: each is checked by its reader, and refused by name if it cannot be honoured.

A null means that the field is absent. Beyond the OpenAI interface: top_k, min_p, repetition_penalty, stop_token_ids,
ignore_eos, include_stop_str_in_output and cache_salt. A chat also has what its template reads: documents,
chat_template_kwargs, add_generation_prompt and continue_final_message. Embeddings also have prompt_name.
"""

import dataclasses
from typing import Any

from jattn.engine import SamplingParams
from jattn.engine.params import MAX_COMPLETIONS, MAX_INT32, MAX_LOGPROBS, REPETITION_RANGE, SamplingParamsError
from jattn.errors.arguments import short
from jattn.serve import readers
from jattn.serve.errors import BadRequestError
from jattn.text import ChatTemplate, Tokenizer

MAX_CHARACTERS_PER_TOKEN = 256
"""A text with more characters for each token of the model's length is refused before it is tokenised.

The longest tokens of published vocabularies have 128 characters.
"""

MAX_PARAM = 80
"""Characters of a field's name in the `param` of an error."""


@dataclasses.dataclass(frozen=True)
class ParsedBody:
    """The checked fields of a body."""

    prompts: readers.Prompts
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

    inputs: readers.Prompts
    model: str | None = None
    is_base64: bool = False
    dimensions: int | None = None
    prompt_name: str | None = None  # of the text that the model's folder puts before each text
    user: str | None = None


def parse_embeddings(body: dict[str, Any]) -> ParsedEmbeddings:
    """The body of POST /v1/embeddings."""
    values = _read(body, EMBEDDING_FIELDS, UNSUPPORTED_EMBEDDING_FIELDS)
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
    values = _read(body, COMPLETION_FIELDS, UNSUPPORTED_COMPLETION_FIELDS)
    if "prompt" not in values:
        raise BadRequestError("prompt=None must be text, token ids, or a list of either", "prompt")
    sampling = dict(max_tokens=values.get("max_tokens", default_max_tokens), logprobs=values.get("logprobs"))
    return _parsed(values, values["prompt"], sampling, is_chat=False)


def parse_chat(
    body: dict[str, Any], template: ChatTemplate | None, tokenizer: Tokenizer | None, max_model_len: int
) -> ParsedBody:
    """The body of POST /v1/chat/completions, its messages rendered and tokenised."""
    values = _read(body, CHAT_FIELDS, UNSUPPORTED_CHAT_FIELDS)
    if template is None or tokenizer is None:
        missing = "chat template" if template is None else "tokenizer"
        raise BadRequestError(f"this model's folder has no {missing}; use /v1/completions", "messages")
    if "messages" not in values:
        raise BadRequestError("messages=None must be a non-empty list of messages", "messages")
    max_tokens = {values[name] for name in ("max_tokens", "max_completion_tokens") if name in values}
    if len(max_tokens) > 1:
        raise BadRequestError("max_tokens and max_completion_tokens differ; give one", "max_tokens")
    wants_logprobs = values.get("logprobs", False)
    if values.get("top_logprobs") and not wants_logprobs:
        raise BadRequestError("top_logprobs needs logprobs=true", "top_logprobs")
    if body.get("tool_choice") == "none":
        values.pop("tools", None)
    if values.get("tools") and body.get("parallel_tool_calls") is False:
        raise BadRequestError("parallel_tool_calls=false is not supported: leave it out", "parallel_tool_calls")
    values = {name: value for name, value in values.items() if name not in ("tools", "documents") or value}
    variables = dict(values.get("chat_template_kwargs", {}))
    if "reasoning_effort" in values:
        if variables.setdefault("reasoning_effort", values["reasoning_effort"]) != values["reasoning_effort"]:
            raise BadRequestError(
                "reasoning_effort differs from that in chat_template_kwargs: leave one of them out", "reasoning_effort"
            )
    arguments = {name: values[name] for name in TEMPLATE_ARGUMENTS if name in values}
    try:
        text = template.render(values["messages"], variables=variables, **arguments)
    except ValueError as error:  # says what refuses the messages
        raise BadRequestError(str(error), "messages") from error
    except Exception as error:  # a template is a program and may raise anything
        raise BadRequestError(f"the chat template cannot render these messages: {error}", "messages") from error
    _check_is_read(template, values)
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


def _check_is_read(template: ChatTemplate, values: dict[str, Any]) -> None:
    """Refuse fields for the template that it does not read: they would be ignored."""
    is_read = lambda variable: template.does_read(variable, values.get("tools"))
    unread = [
        (name, name) for name in ("tools", "documents", "reasoning_effort") if name in values and not is_read(name)
    ]
    for name in values.get("chat_template_kwargs", {}):
        if not is_read(name):
            unread.append(("chat_template_kwargs", f"chat_template_kwargs[{short(name)}]"))
    if unread:
        way_out = ' (or, for tools, send tool_choice="none")' if unread[0] == ("tools", "tools") else ""
        names = ", ".join(name for _, name in unread)
        raise BadRequestError(
            f"this model's chat template does not read {names}: leave that out{way_out}", unread[0][0]
        )


def check_length(text: str, max_model_len: int, param: str) -> None:
    """Refuse a text that has too many characters for max_model_len tokens of any tokenizer."""
    if len(text) > (max_characters := max_model_len * MAX_CHARACTERS_PER_TOKEN):
        name, words = ("input", "it") if param == "input" else ("prompt", "prompt and output together")
        limit = f"{max_characters} for the {max_model_len} tokens that {words} may have"
        raise BadRequestError(f"the {name} has {len(text)} characters, more than {limit}", param)


def _parsed(values: dict[str, Any], prompts: readers.Prompts, sampling: dict[str, Any], is_chat: bool) -> ParsedBody:
    options = values.get("stream_options")
    if options is not None and not values.get("stream"):
        raise BadRequestError("stream_options needs stream=true", "stream_options")
    try:
        params = SamplingParams(**{name: values[name] for name in SAMPLING_FIELDS if name in values}, **sampling)
    except SamplingParamsError as error:  # each field is valid alone, but not with the others: n=2 and temperature=0
        param = next((name for name in error.fields if name in SAMPLING_FIELDS), None)
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


def _read(
    body: dict[str, Any], fields: dict[str, readers.Reader], unsupported: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The values of the fields that are present. One error names everything that is wrong."""
    values, problems = {}, {}
    for name, value in body.items():
        if name in fields:
            if value is None:
                continue
            try:
                values[name] = fields[name](value)
            except readers.InvalidValueError as error:
                problems[name] = f"{name}={short(value)} must be {error}"
        elif name not in unsupported:
            problems[name] = f"the field {short(name)} is unknown: {_instead(name, fields)}"
        elif value is not None and not any(_is_neutral(value, neutral) for neutral in unsupported[name]):
            other = f", or use {USE_INSTEAD[name]}" if USE_INSTEAD.get(name) in fields else ""
            problems[name] = f"{name}={short(value)} is not supported: leave it out{other}"
    if problems:
        raise BadRequestError("; ".join(problems.values()), next(iter(problems))[:MAX_PARAM])
    return values


def _instead(name: str, fields: dict[str, readers.Reader]) -> str:
    if USE_INSTEAD.get(name) in fields:
        return f"use {USE_INSTEAD[name]}"
    return f"it is a field of {PATHS[name]}" if name in PATHS else "leave it out"


def _is_neutral(value: Any, neutral: Any) -> bool:
    """Is the value equal to this one, which changes nothing? A null in an object means that its key is absent."""
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if each is not None}
    return type(value) is type(neutral) and value == neutral  # in Python True == 1


SAMPLING_FIELDS: dict[str, readers.Reader] = dict(
    temperature=readers.temperature,
    top_p=readers.top_p,
    n=readers.integer(1, MAX_COMPLETIONS),
    seed=readers.integer(0, 2**63 - 1),
    stop=readers.stop,
    presence_penalty=readers.number(-2, 2),
    frequency_penalty=readers.number(-2, 2),
    top_k=readers.integer(-1, MAX_INT32),
    min_p=readers.number(0, 1),
    repetition_penalty=readers.number(*REPETITION_RANGE),
    stop_token_ids=readers.stop_tokens,
    ignore_eos=readers.boolean,
    include_stop_str_in_output=readers.boolean,
)
"""Fields that are fields of SamplingParams under the same name."""

COMMON_FIELDS = SAMPLING_FIELDS | dict(
    model=readers.text,
    stream=readers.boolean,
    stream_options=readers.stream_options,
    cache_salt=readers.text,
    user=readers.text,  # logged with the request's id
    safety_identifier=readers.text,  # the newer name of user
    max_tokens=readers.integer(1, MAX_INT32),
)
COMPLETION_FIELDS = COMMON_FIELDS | dict(prompt=readers.prompts, logprobs=readers.integer(0, MAX_LOGPROBS))
CHAT_FIELDS = COMMON_FIELDS | dict(
    messages=readers.messages,
    max_completion_tokens=readers.integer(1, MAX_INT32),
    logprobs=readers.boolean,
    top_logprobs=readers.integer(0, MAX_LOGPROBS),
    tools=readers.objects,  # for the template; a call that the model writes stays in the text
    documents=readers.objects,
    add_generation_prompt=readers.boolean,
    continue_final_message=readers.boolean,
    reasoning_effort=readers.text,
    chat_template_kwargs=readers.variables,
)
EMBEDDING_FIELDS = dict(
    input=readers.prompts,
    model=readers.text,
    encoding_format=readers.encoding_format,
    dimensions=readers.integer(1, MAX_INT32),
    prompt_name=readers.text,
    user=readers.text,
    safety_identifier=readers.text,
)
TEMPLATE_ARGUMENTS = ("tools", "documents", "add_generation_prompt", "continue_final_message")
"""Fields of a chat that are arguments of ChatTemplate.render under the same name."""

OPENAI_FIELDS: dict[str, tuple[Any, ...]] = dict(
    echo=(False,), best_of=(1,), suffix=("",), logit_bias=({},), tools=([],), tool_choice=("none", "auto"),
    response_format=({"type": "text"},), functions=([],), function_call=("none", "auto"),
    parallel_tool_calls=(True, False), modalities=(["text"],), audio=(), metadata=({},), store=(False,),
    service_tier=("auto", "default"), prediction=(), reasoning_effort=(), verbosity=(), web_search_options=(),
    moderation=(), prompt_cache_key=(), prompt_cache_options=(), prompt_cache_retention=(),
)  # fmt: skip
"""Fields of OpenAI's interface that are not supported -> values that change nothing, which are accepted."""

VLLM_FIELDS: dict[str, tuple[Any, ...]] = dict(
    truncate_prompt_tokens=(), truncation_side=(), priority=(0,), request_id=(),
)  # fmt: skip
"""The same of vLLM's bodies, of every path. The values that change nothing are its defaults: clients may send them."""

VLLM_GENERATION_FIELDS: dict[str, tuple[Any, ...]] = VLLM_FIELDS | dict(
    use_beam_search=(False,), length_penalty=(1.0, 1), min_tokens=(0,), skip_special_tokens=(True,),
    spaces_between_special_tokens=(True,), prompt_logprobs=(), logprob_token_ids=(), allowed_token_ids=(),
    bad_words=([],), logits_processors=([],), structured_outputs=(), guided_json=(), guided_regex=(),
    guided_choice=(), guided_grammar=(), guided_decoding_backend=(), guided_whitespace_pattern=(), structural_tag=(),
    session_id=(), return_tokens_as_token_ids=(False,), return_token_ids=(False,), kv_transfer_params=(),
    ec_transfer_params=(), vllm_xargs=({},), repetition_detection=(), thinking_token_budget=(-1,), stream_interval=(),
)  # fmt: skip
"""Those of completions and chats."""

UNSUPPORTED_COMPLETION_FIELDS = (
    OPENAI_FIELDS | VLLM_GENERATION_FIELDS | dict(add_special_tokens=(True,), prompt_embeds=())
)
UNSUPPORTED_CHAT_FIELDS = OPENAI_FIELDS | VLLM_GENERATION_FIELDS | dict(
    add_special_tokens=(False,), include_reasoning=(True,), chat_template=(), mm_processor_kwargs=(),
    media_io_kwargs=(), return_prompt_text=(False,),
)  # fmt: skip
UNSUPPORTED_EMBEDDING_FIELDS = OPENAI_FIELDS | VLLM_FIELDS | dict(
    add_special_tokens=(True,), mm_processor_kwargs=(), cache_salt=(), padding=("do_not_pad",), use_activation=(),
    normalize=(), embed_dtype=("float32",), endianness=("native", "little"), additional_data=(),
)  # fmt: skip
"""All that a path refuses by name. A chat's template writes the special tokens; for other texts the tokenizer does."""

PATHS = dict(prompt="/v1/completions", messages="/v1/chat/completions", input="/v1/embeddings")
"""Fields that every body of one path has, and no other."""

USE_INSTEAD = dict(best_of="n", functions="tools", max_completion_tokens="max_tokens", top_logprobs="logprobs")
"""Fields that are not supported, or not on each route -> fields that do much the same, where a route has them."""
