"""The program of the process that renders chat templates: JSON lines in, JSON lines out.

jattn.text.renderer starts it as a script. It imports nothing of jattn, whose import would load JAX. The kernel limits
the time and memory of the process, so the operations of a template need no checks of their own. Jinja's sandbox and
METHODS keep a template from Python's objects, files and network.
"""

import datetime
import functools
import json
import signal
import sys
from collections.abc import Callable
from typing import Any

MAX_ERROR = 2000
"""Characters of an error that are returned."""
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
"""Types -> the methods that a template may call on them; none returns bytes."""


def main() -> None:
    """Inspect templates and render chats until the input ends.

    Arguments: Python's search path as JSON, and the limit of memory in bytes.
    """
    sys.path[:] = json.loads(sys.argv[1])
    limit_memory(int(sys.argv[2]))
    environment = make_environment()
    compiled = functools.lru_cache(maxsize=8)(environment.from_string)
    inspect = functools.partial(inspected, environment)
    write({})  # ready
    for line in sys.stdin.buffer:
        job = json.loads(line.decode("utf-8", "surrogatepass"))
        limit_time(job["max_seconds"])
        try:
            result = rendered(compiled, job) if "variables" in job else while_compiling(inspect, job["source"])
        except MemoryError:
            result = {"refused": "MemoryError: more memory than one chat may take"}
        limit_time(0)
        write(result)


def write(result: dict[str, Any]) -> None:
    text = json.dumps(result, ensure_ascii=False) + "\n"
    sys.stdout.buffer.write(text.encode("utf-8", "surrogatepass"))
    sys.stdout.buffer.flush()


def limit_memory(num_bytes: int) -> None:
    """Allocating more fails with MemoryError where the system enforces RLIMIT_AS. No core file is written."""
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    num_bytes = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def limit_time(seconds: float) -> None:
    """The kernel kills this process after this much processor time; 0: no limit."""
    if hasattr(signal, "setitimer"):  # elsewhere only the renderer's timer ends the process
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
        signal.setitimer(signal.ITIMER_PROF, seconds)


def while_compiling(work: Callable[[str], Any], source: str) -> Any:
    """work(source), or {"invalid": why the template cannot be compiled}."""
    try:
        return work(source)
    except MemoryError:
        raise
    except Exception as error:  # jinja's, or Python's if the generated code is nested too deeply
        line = getattr(error, "lineno", None)
        return {"invalid": str(error)[:MAX_ERROR] + (f", line {line}" if line else "")}


def inspected(environment: Any, source: str) -> dict[str, Any]:
    """{"variables": names that the template looks up in its input, "asks_for_null": the function's result}."""
    from jinja2 import meta

    tree = environment.parse(source)
    search = meta.TrackingCodeGenerator(environment)  # as meta.find_undeclared_variables does
    search.optimizer = None  # off in this environment too; it needs a deeper stack than compiling does
    search.visit(tree)
    return {"variables": sorted(search.undeclared_identifiers), "asks_for_null": asks_for_null(tree)}


def asks_for_null(tree: Any) -> bool:
    """True if the template compares a message's content with none: `is none`, `!= none`, `in ['', none]`."""
    from jinja2 import nodes

    names = {"content"}  # of variables that hold the content

    def has_content(node: Any) -> bool:
        attributes = any(each.attr == "content" for each in node.find_all(nodes.Getattr))
        keys = any(each.value == "content" for each in node.find_all(nodes.Const))
        return attributes or keys or any(each.name in names for each in node.find_all(nodes.Name))

    def has_none(node: Any) -> bool:
        is_test = isinstance(node, nodes.Test) and node.name == "none"
        return is_test or any(each.value is None for each in node.find_all(nodes.Const))

    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name) and has_content(assignment):
            names.add(assignment.target.name)
    return any(has_none(each) and has_content(each) for each in tree.find_all((nodes.Test, nodes.Compare)))


def rendered(compiled: Any, job: dict[str, Any]) -> dict[str, str]:
    """{"text": the prompt}, {"invalid": why the template cannot be compiled}, or {"refused": why it ended}."""
    template = while_compiling(compiled, job["source"])
    if isinstance(template, dict):
        return template
    try:
        text = template.render(job["variables"])
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: it may raise anything
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        return {"refused": f"{kind}{error}"[:MAX_ERROR]}
    if len(text) > job["max_characters"]:
        return {"refused": f"a prompt of {len(text)} characters, more than {job['max_characters']}"}
    return {"text": text}


def make_environment() -> Any:
    """Jinja's sandbox, with the options, filters and globals that transformers gives to templates."""
    import jinja2
    from jinja2 import ext, nodes, sandbox, utils

    class Generation(ext.Extension):
        """{% generation %} marks an assistant's text for training; here it only renders its content."""

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
        """A namespace without names that begin with _, which could reach Python's own attributes."""

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
            raise jinja2.exceptions.SecurityError(f"a name in a namespace must not begin with _, as {name!r} does")

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
    """JSON as transformers writes it: nothing is escaped for HTML. The options are those of json.dumps."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format: str) -> str:
    """The local time."""
    return datetime.datetime.now().strftime(format)


def dictionary(*args: Any, **values: Any) -> dict:
    """dict() as a function: the class itself would give a template its attributes."""
    return dict(*args, **values)


if __name__ == "__main__":
    main()
