"""Chat templates for the tests, which use the constructs of published ones; and chats for them."""

from typing import Any

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a <city>, é",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Hà Nội"]}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}}

TEMPLATES = {
    "turns, every special token, the prompt's beginning": (
        "{{ bos_token }}{% for message in messages %}\n"
        "    {%- if message.role == 'assistant' %}\n"
        "    {% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}\n"
        "    {%- else %}[{{ message['role'] | upper }}] {{ message.content | trim }}{{ sep_token }}\n"
        "    {%- endif %}\n"
        "{%- endfor %}{{ image_token }}{{ boi_token }}{% if add_generation_prompt %}[ANSWER]{{ pad_token }}{% endif %}"
    ),
    "tools, documents and calls as JSON": (
        "{%- if tools %}{{ 'TOOLS\n' }}{% for tool in tools %}{{ tool | tojson }}{{ tool | tojson(indent=4) }}"
        "{{ tool.function.parameters | tojson(ensure_ascii=true, sort_keys=true) }}"
        "{{ tool.function.name | tojson(separators=(',', ':')) }}{% endfor %}{% endif %}\n"
        "{%- for text in documents or [] %}<{{ loop.index0 }}:{{ text.title }}|{{ text.text }}>{% endfor %}\n"
        "{%- for message in messages %}{{ message.role }}:{{ message.content }}\n"
        "{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}\n"
        "{%- if call.function is defined and not loop.last %},{% endif %}{% endfor %}{% endfor %}"
    ),
    "loops that end early, and macros": (
        "{%- macro line(role, text='-') %}<{{ role }}>{{ text }}{% endmacro %}\n"
        "{%- set ns = namespace(last=-1, seen=[]) %}\n"
        "{%- for message in messages[::-1] %}{% if message.role == 'user' %}\n"
        "{%- set ns.last = (messages | length - 1) - loop.index0 %}{% break %}{% endif %}{% endfor %}\n"
        "{%- for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}\n"
        "{%- set ns.seen = ns.seen + [message.role] %}{{ line(message.role, message.content ~ '|' ~ loop.index) }}\n"
        "{%- if loop.previtem and loop.previtem.role == message.role %}{{ raise_exception('twice') }}{% endif %}\n"
        "{%- endfor %}{{ ns.last }}{{ ns.seen | join(', ') }}{{ messages | map(attribute='role') | list | tojson }}\n"
        "{%- for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}\n"
        "{%- for role, group in messages | groupby('role') %}{{ role }}{{ group | length }}{% else %}none{% endfor %}"
    ),
    "thoughts, effort and the day": (
        "{% set day = strftime_now('%d %b %Y') %}{{ 'Today: ' + day }}\n"
        "{%- if reasoning_effort is defined %} effort={{ reasoning_effort }}{% endif %}\n"
        "{%- for message in messages %}{{ message.role }}\n"
        "{%- if message.reasoning_content is string %}<think>{{ message.reasoning_content }}</think>{% endif %}\n"
        "{%- if message.thinking %}({{ message.thinking }}){% endif %}\n"
        "{%- set content = message.content if message.content is string else '' %}\n"
        "{%- if '</think>' in content %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}\n"
        "{{ content }}{{ '%s-%d' | format(message.role, loop.index) }}{{ '{}:{}'.format(1, 'b') }}{% endfor %}\n"
        "{%- if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif %}\n"
    ),
    "parts of a message": (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}\n"
        "{%- elif message.content is iterable %}\n"
        "{%- for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}\n"
        "{%- else %}nothing{% endif %}{{ 'é' * 3 }}{{ 7 // 2 }}{{ 2 ** 5 }}{{ dict(a=1) | tojson }}{% endfor %}"
    ),
    "a template that is strict": (
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\n"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{{ message.content + eos_token }}{% endfor %}"
    ),
}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one": ([user("Hello <b>é</b>\n")], {}),
    "several": ([{"role": "system", "content": "Short."}, user("Hi"), assistant("Yo"), user("More  ")], {}),
    "no header for the answer": ([user("Hi"), assistant("Yo")], dict(add_generation_prompt=False)),
    "tools": ([user("Weather?")], dict(tools=[TOOL])),
    "calls": (
        [user("Weather?"), assistant(None, tool_calls=[CALL]), {"role": "tool", "content": "20", "tool_call_id": "c1"}],
        dict(tools=[TOOL]),
    ),
    "documents": ([user("Who?")], dict(documents=[{"title": "T", "text": "text"}])),
    "thoughts": ([user("2+2"), assistant("4", reasoning_content="hm"), user("x"), assistant("y", reasoning="so")], {}),
    "thoughts inside": ([user("2+2"), assistant("<think>\nhm\n</think>\n\n4"), user("3+3")], {}),
    "variables": ([user("2+2")], dict(variables=dict(enable_thinking=False, reasoning_effort="high"))),
    "to be continued": ([user("2+2"), assistant("The answer is ")], dict(continue_final_message=True)),
    "to be continued, parts": (
        [user("2+2"), assistant([{"type": "text", "text": "It"}, {"type": "text", "text": " is"}])],
        dict(continue_final_message=True),
    ),
    "parts": ([user([{"type": "text", "text": "Hello"}, {"type": "image"}, {"type": "text", "text": " there"}])], {}),
    "in the wrong order": ([assistant("a"), user("b")], {}),
    "two of one": ([user("a"), user("b")], {}),
}
