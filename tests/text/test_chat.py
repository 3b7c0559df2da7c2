"""A chat template is an untrusted program: it gets what it needs, its errors are reported, its resources limited."""

import json
import os
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import jattn
from jattn.cli import main
from jattn.engine import Engine
from jattn.engine.request import CompletionState, Sequence
from jattn.text import ByteTokenizer, ChatTemplate, chat_prompt, load_tokenizer, renderer
from jattn.text.chat import load_chat_template
from tests.models import folders

HELLO = [{"role": "user", "content": "a<b"}]

CANNOT_BE_READ = {
    "a tag of nobody": ({"chat_template": "{% bogus %}"}, None, "bogus.*line 1"),
    "half a tag": ({"chat_template": "\n\n{{ messages"}, None, "line 3"),
    "a number": ({"chat_template": 5}, None, "tokenizer_config.json: chat_template=5"),
    "a list of texts": ({"chat_template": ["x"]}, None, "tokenizer_config.json: chat_template="),
    "an empty list": ({"chat_template": []}, None, "tokenizer_config.json: chat_template="),
    "a name without a text": ({"chat_template": [{"name": "default"}]}, None, "chat_template="),
    "no default": (
        {"chat_template": [{"name": "rag", "template": "x"}]},
        None,
        "no template 'default'; use one of rag",
    ),
    "a file of bytes": ({}, b"\xff\xfe{", "chat_template.jinja is not UTF-8"),
    "an empty file": ({"chat_template": "this one is good"}, b"", "chat_template.jinja is empty"),
    "a pointer": ({}, folders.LFS, "chat_template.jinja is a Git LFS pointer"),
    "a very long one": ({"chat_template": "x" * 300_000}, None, "300000 characters"),
    "too deep": ({"chat_template": "{% if 1 %}" * 3000 + "{% endif %}" * 3000}, None, "cannot be compiled"),
}


@pytest.mark.parametrize("name", CANNOT_BE_READ)
def test_a_template_that_cannot_be_read_stops_chats_and_nothing_else(tmp_path, name):
    settings, file, message = CANNOT_BE_READ[name]
    path = folders.make(tmp_path)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if file is not None:
        (path / "chat_template.jinja").write_bytes(file)
    engine = Engine.from_pretrained(path, num_blocks=4)
    assert engine.tokenizer.encode("one one") and engine.add_request("one one") and engine.has_work
    for _ in range(2):  # the second time as the first
        with pytest.raises(ValueError, match=f"the chat template of tinyfolder.*{message}") as caught:
            engine.chat_template.render(HELLO)
    assert str(tmp_path) not in str(caught.value), "clients see this"


def test_where_a_folders_template_is_looked_for(tmp_path):
    assert load_chat_template(tmp_path) is None
    settle = lambda name, values: (tmp_path / name).write_text(
        values if isinstance(values, str) else json.dumps(values)
    )
    said = lambda **options: load_chat_template(tmp_path).render(HELLO, **options)
    settle("tokenizer_config.json", {"chat_template": "settings{{ bos_token }}", "bos_token": {"content": "<s>"}})
    assert said() == "settings<s>"
    settle("special_tokens_map.json", {"bos_token": "<t>", "cls_token": "<c>"})
    assert said() == "settings<t>", "the map rules where the settings list no tokens by id"
    settle("chat_template.json", {"chat_template": "legacy{{ cls_token }}"})
    assert said() == "legacy<c>"
    settle("chat_template.jinja", "file")
    assert said() == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    settle("additional_chat_templates/tool_use.jinja", "tools {{ tools[0].name }}")
    assert said() == said(tools=[]) == "file" and said(tools=[{"name": "f"}]) == "tools f"
    assert said(template="tool_use", tools=[{"name": "g"}]) == "tools g"


WRONG_CHATS = {
    "nothing": ([], {}, "non-empty list"),
    "text": ("hello", {}, "non-empty list"),
    "texts": (["hello"], {}, "non-empty list"),
    "an object": ([{"role": "user", "content": object()}], {}, "not object"),
    "deep": ([{"role": "user", "content": eval("[" * 80 + "]" * 80)}], {}, "64 deep"),
    "both ends": (HELLO, dict(add_generation_prompt=True, continue_final_message=True), "begins a new one"),
    "nothing to continue": (
        [{"role": "assistant"}],
        dict(continue_final_message=True),
        "a last message whose content is text",
    ),
    "an argument": (HELLO, dict(variables={"messages": []}), "messages is an argument"),
    "another template": (HELLO, dict(template="rag"), "no template 'rag'; use one of default"),
}


@pytest.mark.parametrize("name", WRONG_CHATS)
def test_a_chat_that_is_none_is_refused(name):
    messages, options, message = WRONG_CHATS[name]
    with pytest.raises(ValueError, match=message):
        ChatTemplate("{{ messages[0].content }}").render(messages, **options)


def test_a_chat_that_its_template_changes_is_not_continued():
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": " It is \n"}]
    said = lambda source: ChatTemplate(source).render(chat, continue_final_message=True)
    assert said("{{ messages[-1].content }}<end>{{ add_generation_prompt }}") == " It is \n"
    assert said("{{ messages[-1].content | trim }}<end>") == "It is"
    assert chat[-1]["content"] == " It is \n", "the caller's list stays as it was"
    for source in ("{{ messages[0].content }}", "{{ messages[-1].content | upper }}"):
        with pytest.raises(ValueError, match="leaves out or changes the last message"):
            said(source)


NO_WAY_OUT = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ (messages | attr('__class__')).x }}",
    "{{ '{0.__class__.__base__}'.format(messages).x.y }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ strftime_now.__globals__.json }}",
    "{{ namespace(_x=1) }}",
    "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ dict.mro() }}",
    "{{ dict.__subclasses__() }}",
    "{% include 'x' %}",
    "{% import 'os' as os %}{{ os.x }}",
    "{{ self.__init__.__globals__.x }}",
    "{{ cycler.__init__.x }}",
    "{{ lipsum.__globals__.os }}",
    "{{ messages.__iter__.__self__.x }}",
]


@pytest.mark.parametrize("source", NO_WAY_OUT)
def test_a_template_reaches_nothing_but_its_messages(source):
    with pytest.raises(ValueError, match="the chat template"):
        ChatTemplate(source).render(HELLO)


LOOP = "{% set n = namespace(s='ab', l=[1], i=9) %}{% for i in range(99999) %}"
TOO_MUCH = {
    "a long loop": "{% for i in range(10**9) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(0) }}",
    "many calls": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "a long text": "{{ 'a' * 10**12 }}",
    "a text longer than a prompt": "{{ 'a' * 20000000 }}",
    "a long list": "{{ [0] * 10**12 }}",
    "a large number": "{{ (10 ** (10 ** 10)) % 7 }}",
    "large numbers": LOOP + "{% set n.i = n.i * n.i %}{% endfor %}",
    "doubling by -": LOOP + "{% set n.i = n.i - -n.i - -n.i * n.i %}{% endfor %}",
    "doubling by +": LOOP + "{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling by ~": LOOP + "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "doubling by a block": LOOP + "{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
    "doubling a list": LOOP + "{% set n.l = n.l + n.l %}{% endfor %}",
    "lists in lists": LOOP + "{% set n.l = [n.l, n.l] %}{% endfor %}{{ n.l }}",
    "one list in another": LOOP + "{% set n.l = [n.l] %}{% endfor %}{{ n.l }}",
    "objects in objects": LOOP + "{% set n.l = {'a': n.l, 'b': n.l} %}{% endfor %}{{ n.l }}",
    "a list of a long list": "{% set n = namespace(l=[0] * 200000) %}"
    "{% for i in range(99999) %}"
    "{% set x = [n.l] | string %}{% endfor %}",
    "comparisons of long texts": "{% set a = 'ab' * 4000000 %}{% set b, c = a ~ 'c', a ~ a %}"
    "{% for i in range(99999) %}{% if b in c %}{% endif %}{% endfor %}",
    "one long operation": "{% set a = 'a' * 10**7 %}{{ (a ~ 'b') in (a ~ a) or (a * 9).replace('a', 'bb') | title }}",
    "a wide column": "{{ 'a'.center(10**10) }}",
    "a wide filter": "{{ 'a' | center(10**10) }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide format method": "{{ '{:10000000000d}'.format(1) }}",
    "a width in an argument": "{{ '%*d' % (10**10, 1) }}",
    "many replacements": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "a filter's join": "{{ ('a' * 10**6) | join('b' * 10**6) }}",
    "tabs": "{{ ('\\t' * 10**7).expandtabs(60000) }}",
    "titles": "{{ ('ab ' * 50000000) | title | length }}",
    "JSON far to the right": "{{ messages | tojson(indent=10**10) }}",
    "a long answer": "{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}",
    "a long way to compile": "{{ " + "+".join(["a"] * 100000) + " }}",
}
STOPPED = "more than 0.3 seconds of processor time|Memory|Overflow|Recursion|a prompt of 20000000 char|recursion"


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_template_that_asks_for_too_much_is_stopped(name, monkeypatch):
    monkeypatch.setattr(renderer, "MAX_CPU_SECONDS", 0.3)
    monkeypatch.setattr(renderer, "MAX_ELAPSED_SECONDS", 120)  # a busy machine is no reason
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.thread_time()
    with pytest.raises(ValueError, match=f"the chat template (refuses these|cannot be compiled).*: .*({STOPPED})"):
        ChatTemplate(TOO_MUCH[name]).render(HELLO)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert time.thread_time() - begin < 2, "this process computes nothing of it"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10, "of all processes ended meanwhile"
    assert ChatTemplate("{{ messages[0].content }}").render(HELLO) == "a<b", "the next chat is served"


NO_BYTES = ["'a'.encode('ascii')", "(1).to_bytes(9, 'big')", "'a'.encode", "'a'|attr('encode')", "(1).from_bytes"]


@pytest.mark.parametrize("source", NO_BYTES)
def test_a_template_gets_no_bytes(source):
    with pytest.raises(ValueError, match="unsafe|no attribute|not callable"):
        ChatTemplate("{{ (" + source + ").x }}").render(HELLO)


def test_the_clock_ends_a_process_that_takes_no_processor_time(monkeypatch):
    """Also a process that is stopped; another one renders the next chat."""
    good = ChatTemplate("{{ messages[0].content }}")
    assert good.render(HELLO) == "a<b"
    monkeypatch.setattr(renderer, "MAX_ELAPSED_SECONDS", 0.5)
    os.kill(renderer._idle[-1]._popen.pid, signal.SIGSTOP)
    with pytest.raises(ValueError, match="the chat template refuses.*more than 0.5 seconds of elapsed time"):
        good.render(HELLO)
    monkeypatch.undo()
    assert good.render(HELLO) == "a<b"
    os.kill(renderer._idle[-1]._popen.pid, signal.SIGKILL)
    renderer._idle[-1]._popen.wait()
    assert good.render(HELLO) == "a<b", "nor does one that ended while it was idle end a chat"


def test_chats_of_many_threads_get_their_own_texts_from_few_processes(monkeypatch):
    monkeypatch.setattr(renderer, "MAX_CPU_SECONDS", 0.3)
    monkeypatch.setattr(renderer, "MAX_ELAPSED_SECONDS", 120)
    good, bad = ChatTemplate("{{ messages[0].content }}"), ChatTemplate(TOO_MUCH["loops in loops"])

    def chat(i):
        if i % 8 == 0:
            with pytest.raises(ValueError, match="processor time"):
                bad.render(HELLO)
        return good.render([{"role": "user", "content": f"{i} \ud800é🙂\0"}])

    with ThreadPoolExecutor(12) as threads:
        assert list(threads.map(chat, range(32))) == [f"{i} \ud800é🙂\0" for i in range(32)]
    assert 1 <= len(renderer._idle) <= renderer.MAX_PROCESSES


def test_a_process_that_does_not_start_is_no_fault_of_the_chat(monkeypatch, tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit(7)")
    monkeypatch.setattr(renderer, "PROGRAM", tmp_path / "broken.py")
    monkeypatch.setattr(renderer, "_idle", [])
    with pytest.raises(RuntimeError, match="does not start: .*code 7"):
        ChatTemplate("x").render(HELLO)


def test_the_process_ends_when_its_input_does():
    process = renderer.Process()
    process._popen.stdin.close()
    assert process._popen.wait(60) == 0
    process.close()


@pytest.mark.parametrize("dots", [".", "..", "absolute"])
def test_an_error_names_the_file_however_its_folder_is_named(tmp_path, dots, monkeypatch):
    path = folders.make(tmp_path)
    (path / "chat_template.jinja").write_bytes(b"\xff\xfe{")
    (path / "inside").mkdir()
    monkeypatch.chdir(path / "inside" if dots == ".." else path)
    with pytest.raises(ValueError, match=r"the chat template of \w+ cannot be used: chat_template\.jinja is not UTF-8"):
        load_chat_template(path if dots == "absolute" else dots).render(HELLO)


def test_what_templates_do_with_large_numbers_and_long_messages_is_no_matter():
    source = (
        "{{ n | default(10**9) }} {{ '%d' % 10**12 }} {{ '{}: 12345'.format(10**12) }}"
        "{% for m in messages %} {{ m.content.replace('\\n', '\\n    ') | length }}{{ messages | length }}{% endfor %}"
        "{{ ', '.join(messages | map(attribute='role')) | length }}"
    )
    said = ChatTemplate(source).render([{"role": "user", "content": "line\n" * 2000}] * 1000)
    assert said.startswith("1000000000 1000000000000 1000000000000: 12345 180001000 18000")


class Marked(ByteTokenizer):
    """A tokenizer that adds a token in front of a prompt."""

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + super().encode(text)


def test_the_tokens_of_a_chat_are_those_that_the_template_writes():
    assert chat_prompt(Marked(), ChatTemplate("{{ messages[0].content }}"), HELLO) == ByteTokenizer().encode("a<b")
    with pytest.raises(TypeError, match="template must be ChatTemplate, got NoneType; .* if its folder has none"):
        chat_prompt(ByteTokenizer(), None, HELLO)
    assert Marked().encode("a")[0] == 1


def test_a_response_begins_where_the_prompt_ends():
    """The end of a character that begins in the prompt belongs to the output."""
    code, params = ByteTokenizer(), jattn.SamplingParams(max_tokens=8)
    ids = code.encode("a€b")
    completion = CompletionState.of("r", Sequence("s", tuple(ids[:2]), params, max_len=99), 0, (), code)
    completion.read_text(completion.accept(ids[2:]))
    assert completion.snapshot().text == "€b"


def test_the_command_line_encodes_a_chat_once(tmp_path, capsys, monkeypatch):
    path, given = folders.make(tmp_path), []
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one {{ messages[0].content }}"}))
    real = Engine.add_request
    monkeypatch.setattr(
        Engine, "add_request", lambda self, prompt, *more: given.append(prompt) or real(self, prompt, *more)
    )
    size = ["--num-blocks", "4", "--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--max-tokens", "1"]
    assert main(["generate", "--model", str(path), "--chat", "--json", "one one", *size]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "one one"
    assert given == [load_tokenizer(path).encode("one one one", add_special_tokens=False)]
