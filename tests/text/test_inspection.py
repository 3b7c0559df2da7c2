"""What a template reads is found by parsing it: it is not missed, and a word in a comment does not count."""

import pytest

from jattn.text import ChatTemplate

CALLED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]

READS_TOOLS = {  # as the published templates begin
    "Llama 3.1": (
        "{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}"
        "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}"
        "{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}"
    ),
    "Qwen 2.5 and 3": (
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}"
        "{{- tool | tojson }}{%- endfor %}{%- endif %}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>' }}{%- endif %}"
    ),
    "Mistral": (
        "{%- if messages[0]['role'] == 'system' %}{%- set loop_messages = messages[1:] %}{%- else %}"
        "{%- set loop_messages = messages %}{%- endif %}{%- if not tools is defined %}"
        "{%- set tools = none %}{%- endif %}"
        "{%- for message in loop_messages %}{%- if tools is not none and (message == loop_messages[-1]) %}"
        "{{- '[AVAILABLE_TOOLS] [' }}{%- endif %}{%- endfor %}"
    ),
    "gpt-oss": (
        "{%- macro render_tool_namespace(namespace_name, tools) -%}{%- for tool in tools %}"
        "{%- set tool = tool.function %}{{- tool.name }}{%- endfor %}{%- endmacro -%}"
        "{%- macro build_system_message() -%}"
        "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
        "{{- 'Reasoning: ' + reasoning_effort }}{%- if builtin_tools %}x{%- endif -%}{%- endmacro -%}"
        "{{- build_system_message() }}{%- if tools -%}{{- render_tool_namespace('functions', tools) }}{%- endif -%}"
    ),
    "DeepSeek V3.1": (
        "{%- set ns = namespace(is_first=false, system_prompt='') -%}{%- if tools is defined and tools is not none %}"
        "{%- set tool_ns = namespace(text='## Tools\\n') %}{%- for tool in tools %}"
        "{%- set tool_ns.text = tool_ns.text + tool.function.name %}{%- endfor %}{{ tool_ns.text }}{%- endif %}"
    ),
    "Phi-4-mini, of the message": (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] %}"
        "{{ message['tools'] }}{% endif %}{% endfor %}{{ tools }}"
    ),
    "Command R": "{% set tools = tools or [] %}{{ tools | length }}",
    "an argument's default": "{% macro list(t=tools) %}{{ t }}{% endmacro %}{{ list() }}",
    "a macro's body": "{% macro list() %}{{ tools }}{% endmacro %}{{ list() }}",
    "marked for training": "{% generation %}{% for x in tools %}{% break %}{% endfor %}{% endgeneration %}",
    "a block": "{% block tools %}{{ tools }}{% endblock %}",
    "a keyword": "{{ dict(tools=tools) }}",
}

READS_NO_TOOLS = {
    "Gemma": (
        "{%- for message in messages -%}{{ '<start_of_turn>' + message.role + message.content }}{%- endfor -%}"
        "{#- tools are not supported -#}"
    ),
    "a comment": "{# tools #}{{ messages[0].content }}",
    "a text": "{{ messages[0].content }}I know no tools",
    "a string": "{{ 'tools' }}",
    "an attribute": "{{ messages[0].tools }}",
    "an item": "{{ messages[0]['tools'] }}",
    "a keyword": "{{ dict(tools=1) }}",
    "a macro's argument": "{% macro list(tools) %}{{ tools }}{% endmacro %}{{ list([]) }}",
    "a variable of its own": "{% set tools = [] %}{{ tools }}",
    "a loop's variable": "{% for tools in messages %}{{ tools.content }}{% endfor %}",
    "an attribute of a namespace": "{% set ns = namespace(tools=1) %}{{ ns.tools }}",
    "a filter's argument": "{{ messages | map(attribute='tools') | list }}",
    "a block's name": "{% block tools %}x{% endblock %}",
}


@pytest.mark.parametrize("name", READS_TOOLS)
def test_a_template_that_looks_tools_up_reads_them(name):
    assert ChatTemplate(READS_TOOLS[name]).does_read("tools")


@pytest.mark.parametrize("name", READS_NO_TOOLS)
def test_the_word_alone_reads_nothing(name):
    template = ChatTemplate(READS_NO_TOOLS[name])
    assert not template.does_read("tools")
    chat = [{"role": "user", "content": "hi"}]
    assert template.render(chat, tools=[{"name": "f"}]) == template.render(chat), "the witness"


def test_other_variables_are_read_under_their_names():
    oss, qwen = ChatTemplate(READS_TOOLS["gpt-oss"]), ChatTemplate(READS_TOOLS["Qwen 2.5 and 3"])
    assert oss.does_read("reasoning_effort") and oss.does_read("builtin_tools") and not oss.does_read("namespace_name")
    assert qwen.does_read("enable_thinking") and not qwen.does_read("tool") and not qwen.does_read("")


ASKS = [
    "message['content'] is none",
    'message["content"] is none',
    "message.content is none",
    "message.content == none",
    "none == message['content']",
    "message.content in ['', none]",
    "(message.content) is none",
    "message.content is sameas none",
    "message.content is eq(none)",
    "not message.content is not none",
    "not (message.content != None)",
    "message.get('content', 'x') is none",
]


@pytest.mark.parametrize("question", ASKS)
def test_a_template_that_compares_the_content_with_none_gets_the_null(question):
    asks = "{% for message in messages %}{% if QUESTION %}call{% else %}{{ message.content }}{% endif %}{% endfor %}"
    assert ChatTemplate(asks.replace("QUESTION", question)).render(CALLED) == "hicall"


@pytest.mark.parametrize("name", ["content", "text"])
def test_the_content_may_have_another_name(name):
    asks = "{% for m in messages %}{% set NAME = m.content %}{{ 'call' if NAME is none else NAME }}{% endfor %}"
    assert ChatTemplate(asks.replace("NAME", name)).render(CALLED) == "hicall"


@pytest.mark.parametrize(
    "written",
    [
        "{{ message.content }}{# message.content is none #}",
        "{{ message.content }}{{ '' if 'content is none' else 1 }}",
        "{{ message.content if tools is none }}",
        "{{ message.content if message.content is not string }}",
        "{{ message.content if message.content is defined }}",
        "{{ message.content | default('', true) }}{{ message.name is none and '' or '' }}",
    ],
)
def test_another_template_would_print_the_null(written):
    assert "None" not in ChatTemplate("{% for message in messages %}" + written + "{% endfor %}").render(CALLED)


def test_a_template_that_cannot_be_compiled_says_so_before_it_is_asked():
    with pytest.raises(ValueError, match="the chat template cannot be compiled: .*line 1"):
        ChatTemplate("{% if %}").does_read("tools")
