"""The fields of vLLM's bodies: values that change nothing are accepted, all others refused by name."""

import json

import httpx
import openai
import pytest

from jattn.serve import fields
from jattn.serve.errors import BadRequestError
from jattn.text import ByteTokenizer, ChatTemplate
from tests.serve.running import PATIENCE, TEMPLATE, make_engine, serving
from tests.serve.test_embeddings import make_embedder

CLIENT = httpx.Client(timeout=PATIENCE)
GOOD = {
    "completions": {"prompt": "hello", "max_tokens": 3, "temperature": 0},
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0},
    "embeddings": {"input": "hello"},
}
REQUEST = dict(truncate_prompt_tokens=None, truncation_side=None, request_id=None, priority=0)
GENERATION = REQUEST | dict(
    use_beam_search=False, length_penalty=1.0, min_tokens=0, skip_special_tokens=True,
    spaces_between_special_tokens=True, include_stop_str_in_output=False, ignore_eos=False, stop=[], stop_token_ids=[],
    prompt_logprobs=None, logprob_token_ids=None, allowed_token_ids=None, bad_words=[], logit_bias=None,
    logits_processors=None, structured_outputs=None, response_format=None, guided_json=None, guided_regex=None,
    guided_choice=None, guided_grammar=None, guided_decoding_backend=None, guided_whitespace_pattern=None,
    structural_tag=None, session_id=None, return_tokens_as_token_ids=False, return_token_ids=False, cache_salt=None,
    kv_transfer_params=None, ec_transfer_params=None, vllm_xargs={}, repetition_detection=None,
    thinking_token_budget=None, stream_interval=None, stream=False, stream_options=None, best_of=1, echo=False,
    top_k=0, min_p=0.0, repetition_penalty=1.0,
)  # fmt: skip
NEUTRAL = {  # what vLLM does without the field
    "completions": GENERATION | dict(add_special_tokens=True, prompt_embeds=None, suffix=None),
    "chat/completions": GENERATION
    | dict(
        add_special_tokens=False, add_generation_prompt=True, continue_final_message=False, include_reasoning=True,
        chat_template=None, chat_template_kwargs=None, mm_processor_kwargs=None, media_io_kwargs=None,
        return_prompt_text=False, logprobs=False, top_logprobs=0, tools=None, tool_choice="none", documents=None,
        parallel_tool_calls=True, reasoning_effort=None,
    ),
    "embeddings": REQUEST
    | dict(
        add_special_tokens=True, mm_processor_kwargs=None, cache_salt=None, padding="do_not_pad", use_activation=None,
        normalize=None, embed_dtype="float32", endianness="native", dimensions=None, additional_data=None,
    ),
}  # fmt: skip
OTHER = dict(truncate_prompt_tokens=-1, truncation_side="left", request_id="x", priority=1)
OTHER_GENERATION = OTHER | dict(
    use_beam_search=True, length_penalty=1.1, min_tokens=1, skip_special_tokens=False,
    spaces_between_special_tokens=False, prompt_logprobs=0, logprob_token_ids=[5], allowed_token_ids=[5],
    bad_words=["x"], logit_bias={"5": 1}, logits_processors=["x"], structured_outputs={"regex": "x"}, guided_json={},
    guided_regex="x", guided_choice=["x"], guided_grammar="x", guided_decoding_backend="x",
    guided_whitespace_pattern="x", structural_tag="x", session_id="x", return_tokens_as_token_ids=True,
    return_token_ids=True,
    kv_transfer_params={}, ec_transfer_params={}, vllm_xargs={"x": 1}, repetition_detection={}, thinking_token_budget=1,
    stream_interval=2,
)  # fmt: skip
REFUSED = {
    "completions": OTHER_GENERATION | dict(add_special_tokens=False, prompt_embeds="x"),
    "chat/completions": OTHER_GENERATION
    | dict(
        add_special_tokens=True, include_reasoning=False, chat_template="x", mm_processor_kwargs={}, media_io_kwargs={},
        return_prompt_text=True,
    ),
    "embeddings": OTHER
    | dict(
        add_special_tokens=False, mm_processor_kwargs={}, cache_salt="x", padding="max_length", use_activation=True,
        normalize=True, embed_dtype="float16", endianness="big", additional_data=1,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def urls():
    engine = make_engine(prefix_caching=False)  # usage counts what was cached
    with serving(engine) as (_, _, url), serving(make_embedder(), model_name="fake") as (_, _, embeddings):
        yield {"completions": url, "chat/completions": url, "embeddings": embeddings}


def send(urls, path, more):
    return CLIENT.post(f"{urls[path]}/v1/{path}", json=GOOD[path] | more)


def result(answer):
    """What a response says beside its id and time."""
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in ("id", "created")}


@pytest.mark.parametrize("path", GOOD)
def test_a_body_with_vllms_defaults_is_one_without_them(urls, path):
    assert result(send(urls, path, NEUTRAL[path])) == result(send(urls, path, {}))
    assert result(send(urls, path, dict.fromkeys(REFUSED[path]))) == result(send(urls, path, {}))


@pytest.mark.parametrize("path", GOOD)
def test_every_other_value_is_not_supported(urls, path):
    for name, value in REFUSED[path].items():
        error = send(urls, path, {name: value}).json()["error"]
        assert error["param"] == name and f"{name}=" in error["message"], error
        assert "is not supported: leave it out" in error["message"]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("completions", {"length_penalty": 1}),  # as JavaScript writes 1.0
        ("completions", {"bad_words": None, "logits_processors": []}),
        ("chat/completions", {"thinking_token_budget": -1}),
        ("embeddings", {"endianness": "little"}),
        ("chat/completions", {"response_format": {"type": "text", "json_schema": None}}),  # as pydantic writes it
        ("completions", {"logit_bias": {"5": None}}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "x": None}]}]}),
    ],
)
def test_a_default_has_other_forms(urls, path, more):
    assert result(send(urls, path, more)) == result(send(urls, path, {}))


@pytest.mark.parametrize(
    ("path", "name"),
    [("embeddings", "min_tokens"), ("embeddings", "guided_json"), ("completions", "chat_template"),
     ("chat/completions", "prompt_embeds"), ("completions", "padding"), ("completions", "include_reasoning")],
)  # fmt: skip
def test_a_field_of_another_path_is_unknown(urls, path, name):
    assert f"the field '{name}' is unknown" in send(urls, path, {name: None}).json()["error"]["message"]


def test_a_boolean_is_no_number_and_a_number_no_boolean(urls):
    for more in ({"min_tokens": False}, {"priority": 0.0}, {"length_penalty": True}, {"use_beam_search": 0}):
        assert "is not supported" in send(urls, "completions", more).json()["error"]["message"]


def test_special_tokens_are_added_to_a_completion_and_left_out_of_a_chat():
    """What the accepted values of add_special_tokens say."""

    class Begins(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [0] * add_special_tokens + super().encode(text)

    chat = GOOD["chat/completions"] | {"add_special_tokens": False}
    parsed = fields.parse_chat(chat, ChatTemplate(TEMPLATE), Begins(), max_model_len=99)
    assert parsed.prompts == (tuple(Begins().encode("u:hi\na:", add_special_tokens=False)),)
    with pytest.raises(BadRequestError, match="add_special_tokens=True is not supported"):
        fields.parse_chat(chat | {"add_special_tokens": True}, ChatTemplate(TEMPLATE), Begins(), max_model_len=99)


def test_usage_in_every_event_is_refused_and_none_is_the_default(urls):
    for path in ("completions", "chat/completions"):
        ask = lambda options: send(urls, path, {"stream": True, "stream_options": options})  # noqa: B023  called here
        events = ask({"include_usage": True, "continuous_usage_stats": False}).text.split("\n\n")[:-2]
        usages = [json.loads(event.removeprefix("data: ")).get("usage") for event in events]
        assert usages[-1]["completion_tokens"] == 3 and not any(usages[:-1])
        error = ask({"continuous_usage_stats": True}).json()["error"]
        assert error["param"] == "stream_options"
        assert "without continuous_usage_stats, which is not supported" in error["message"]
        error = ask({"include_usage": 1}).json()["error"]
        assert (
            error["message"]
            == "stream_options={'include_usage': 1} must be an object whose include_usage is true or false"
        )


def test_no_top_logprobs_need_no_logprobs(urls):
    assert result(send(urls, "chat/completions", {"top_logprobs": 0})) == result(send(urls, "chat/completions", {}))


def test_the_openai_package_sends_them_in_its_extra_body(urls):
    with openai.OpenAI(base_url=f"{urls['completions']}/v1", api_key="x", max_retries=0) as client:
        made = client.completions.create(model="fake", prompt="hello", max_tokens=3, extra_body=NEUTRAL["completions"])
        assert made.choices[0].finish_reason == "length"
