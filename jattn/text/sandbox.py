"""The program of the process that renders chat templates: JSON lines in, JSON lines out.

jattn.text.renderer starts it as a script. It imports nothing of jattn, whose import would start JAX. The kernel
bounds the process, so no operation of a template needs a check of its own; jinja's sandbox and the methods named here
keep the template from Python.
"""

import datetime
import functools
import json
import signal
import sys
from typing import Any

MOST_ERROR = 2000
"""Characters of an error that are passed on."""
METHODS = {
    str: "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip "
    "partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines "
    "startswith strip striptags swapcase title translate unescape upper zfill",
    dict: "copy get items keys values",
    (list, tuple): "copy count index",
    (int, float): "as_integer_ratio bit_count bit_length conjugate denominator hex imag is_integer numerator real",
    (bytes, bytearray, memoryview): "",
}
"""Types -> what a template may take of them; none makes bytes."""


def main() -> None:
    """Answer requests until there are no more; the arguments are Python's search path and the most bytes of memory."""
    sys.path[:] = json.loads(sys.argv[1])
    bound_memory(int(sys.argv[2]))
    environment = make_environment()
    compiled = functools.lru_cache(maxsize=8)(environment.from_string)
    say({})  # ready
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        bound_time(request["seconds"])
        try:
            answer = answered(compiled, request)
        except MemoryError:
            answer = {"refused": "MemoryError: more memory than one chat may take"}
        bound_time(0)
        say(answer)


def say(answer: dict[str, str]) -> None:
    text = json.dumps(answer, ensure_ascii=False) + "\n"
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
    sys.stdout.buffer.flush()


def bound_memory(most: int) -> None:
    """Where the system has such a limit, allocating more fails with MemoryError."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def bound_time(seconds: float) -> None:
    """The kernel ends this process after so much processor time, whatever it does then; 0: it does not."""
    if hasattr(signal, "setitimer"):  # else the other side's clock alone ends it
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.setitimer(signal.ITIMER_PROF, seconds)


def answered(compiled: Any, request: dict[str, Any]) -> dict[str, str]:
    """{"text": the prompt}, {"unreadable": why the template cannot be compiled}, or {"refused": why it ended}."""
    try:
        template = compiled(request["source"])
    except MemoryError:
        raise
    except Exception as error:  # jinja's, or Python's where the generated code nests too deeply
        line = getattr(error, "lineno", None)
        return {"unreadable": str(error)[:MOST_ERROR] + (f", line {line}" if line else "")}
    try:
        text = template.render(request["variables"])
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may raise anything
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        return {"refused": f"{kind}{error}"[:MOST_ERROR]}
    if len(text) > request["most"]:
        return {"refused": f"a prompt of {len(text)} characters, more than {request['most']}"}
    return {"text": text}


def make_environment() -> Any:
    """Jinja as transformers sets it up, in its sandbox."""
    import jinja2
    from jinja2 import ext, nodes, sandbox, utils

    class Generation(ext.Extension):
        """{% generation %} marks an assistant's text for training; rendering ignores the mark."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
            for types, names in METHODS.items():
                if isinstance(obj, types):
                    return attr in names.split()
            return super().is_safe_attribute(obj, attr, value)

    class Namespace(utils.Namespace):
        """A namespace without private names: such a name could reach attributes of Python's own."""

        def __init__(self, /, *args: Any, **values: Any):
            values = dict(*args, **values)
            for name in values:
                check_name(name)
            super().__init__(values)

        def __setitem__(self, name: str, value: Any) -> None:
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with _, as {name!r} does")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    del environment.globals["lipsum"], environment.globals["cycler"], environment.globals["joiner"]
    environment.globals |= dict(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=Namespace, dict=dictionary
    )
    return environment


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: nothing escaped for HTML, and json.dumps's options."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format: str) -> str:
    """The local time."""
    return datetime.datetime.now().strftime(format)


def dictionary(*args: Any, **values: Any) -> dict:
    """dict() as a function: the class itself would give a template its methods."""
    return dict(*args, **values)


if __name__ == "__main__":
    main()
