"""`jattn generate`: continues prompts from arguments, a file or stdin; prints text as it is generated."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from jattn.cli import options, processes, screen
from jattn.cli.command import add_command
from jattn.engine import Engine, Processes, RequestOutput, SamplingParams
from jattn.engine.params import is_encodable
from jattn.text import chat_prompt

Prompt = str | list[int]

EXAMPLES = (
    r"jattn generate '740+583=' --stop '\n'",
    "jattn generate --model ~/models/llama --file prompts.txt --temperature 0.7 --json",
)


def add(commands) -> None:
    """Add the command to the parser."""
    parser = add_command(commands, "generate", "continue prompts", EXAMPLES)
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="prompts as text (default: one on each line of --file or stdin)"
    )
    parser.add_argument("--file", type=Path, help="a file with one prompt on each line")
    parser.add_argument("--chat", action="store_true", help="make a chat of each prompt, with the chat template")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on a line for each prompt, in order of completion"
    )
    options.add_engine(parser)
    options.add_sampling(parser)
    processes.add(parser)
    parser.set_defaults(run=lambda args: processes.run(args, run))


def run(args: argparse.Namespace, group: Processes | None = None) -> int:
    """0 if no prompt failed. group: of the processes that share the engine, if there are several."""
    params = options.sampling_params(args)
    texts = _prompts(args)
    engine = options.make_engine(args, processes=group)
    prompts: list[Prompt] = [_chat(engine, text) for text in texts] if args.chat else list(texts)
    if len(prompts) == 1 and not args.json:
        failures = _stream(engine, prompts[0], params)
    else:
        failures = _all(engine, texts, prompts, params, args)
    return 1 if failures else 0


def _prompts(args: argparse.Namespace) -> list[str]:
    if args.prompts and args.file:
        raise ValueError("give prompts as arguments or in --file, not both")
    if args.prompts:
        for number, prompt in enumerate(args.prompts, 1):
            if not is_encodable(prompt):  # Python has surrogates in place of bytes of an argument that it cannot decode
                encoding = sys.getfilesystemencoding()
                raise ValueError(f"prompt {number}, {prompt!a}, is not {encoding.upper()}: give it in --file, in UTF-8")
        return args.prompts
    if args.file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("there is no prompt: give prompts as arguments, in --file, or on stdin")
    prompts = [line for line in _lines(args.file) if line]
    if not prompts:
        raise ValueError("there is no prompt: every line is empty")
    return prompts


def _lines(file: Path | None) -> list[str]:
    """The lines of a file or of stdin, in UTF-8; they end with \\n or \\r\\n, and other separators are text."""
    data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where = "stdin" if file is None else file
        raise ValueError(f"{where} is not UTF-8 ({error.reason} at byte {error.start}): save it in UTF-8") from None
    return [line.removesuffix("\r") for line in text.split("\n")]


def _chat(engine: Engine, text: str) -> list[int]:
    """The tokens of a chat whose first message is this text."""
    if engine.chat_template is None or engine.tokenizer is None:
        raise ValueError("this model's folder has no chat template; use generate without --chat")
    return chat_prompt(engine.tokenizer, engine.chat_template, [{"role": "user", "content": text}])


def _stream(engine: Engine, prompt: Prompt, params: SamplingParams) -> int:
    """Print the text of one prompt as it is generated, then its other completions. Returns the number of failures."""
    engine.add_request(prompt, params)
    shown, last = "", None
    with screen.progress("generating") as report:
        report(0, 1, "waiting for the first token")  # the first steps may compile their programs
        outputs = engine.step()
        while not outputs and engine.has_work:
            outputs = engine.step()
    while outputs or engine.has_work:
        for last in outputs:
            print(last.text[len(shown) :], end="", flush=True)
            shown = last.text
        outputs = engine.step() if engine.has_work else []
    assert last is not None  # a request that was added gives at least one output
    print()
    for completion in last.outputs[1:]:
        print(completion.text)
    return _report_error(last)


def _all(
    engine: Engine, texts: list[str], prompts: list[Prompt], params: SamplingParams, args: argparse.Namespace
) -> int:
    """Print the results of all prompts. texts: as the user wrote them. Returns the number of failures."""
    failures, finished = 0, _finished(engine, prompts, params)
    if args.json:
        is_utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
        for index, output in finished:
            failures += _report_error(output)
            record = _record(index, texts[index], output)
            print(json.dumps(record, ensure_ascii=not is_utf8), flush=True)
        return failures
    found: dict[int, RequestOutput] = {}
    with screen.progress("generating") as report:
        report(0, len(prompts), "prompts")  # a terminal shows for which it waits
        for index, output in finished:
            found[index] = output
            if len(found) < len(prompts):
                report(len(found), len(prompts), "prompts")
    for index, text in enumerate(texts):
        for completion in found[index].outputs:
            print(text + ("\n" if args.chat else "") + completion.text)
        failures += _report_error(found[index])
    return failures


def _finished(engine: Engine, prompts: list[Prompt], params: SamplingParams) -> Iterator[tuple[int, RequestOutput]]:
    """(index of the prompt, its output), as they end."""
    index_of = {engine.add_request(prompt, params): i for i, prompt in enumerate(prompts)}
    for output in engine.drain():
        yield index_of[output.id], output


def _record(index: int, prompt: str, output: RequestOutput) -> dict:
    completions = [dict(text=c.text, finish_reason=c.finish_reason, tokens=len(c.token_ids)) for c in output.outputs]
    return dict(index=index, prompt=prompt, outputs=completions)


def _report_error(output: RequestOutput) -> int:
    if output.error:
        print(f"jattn: {output.error}", file=sys.stderr)
    return int(bool(output.error))
