"""Jinja for untrusted templates: no access to Python, and limits on the time and the sizes of one chat.

Jinja's own sandbox refuses private attributes, changes of data, and ranges above 100,000. Here, in addition, loops,
calls and filters check the time, and the result of every operator, call and filter has a largest size. A single
operation on data of that size is not interrupted.
"""

import datetime
import functools
import json
from collections.abc import Iterator
from typing import Any

from jattn.engine import bounds
from jattn.engine.bounds import check_growth, check_time, measured


def compiled(source: str, where: str) -> Any:
    """A compiled template; ValueError where the source cannot be compiled."""
    environment = _environment()
    try:
        return environment.from_string(source)
    except Exception as error:  # jinja's, or Python's where the generated code nests too deeply
        line = getattr(error, "lineno", None)
        at = f", line {line}" if line else ""
        raise ValueError(f"{where} is not a template that can be read: {error}{at}") from error


def run(template: Any, variables: dict[str, Any], where: str) -> str:
    """The rendered text; ValueError with the message of the template or of the limit that it reached."""
    try:
        with bounds.clock():
            return template.render(variables)
    except Exception as error:  # a template is a program: it may raise anything
        kind = "" if type(error).__module__.startswith("jinja2") else f"{type(error).__name__}: "
        raise ValueError(f"{where} refuses these messages: {kind}{error}") from error


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    try:
        import jinja2
        from jinja2 import ext, nodes, sandbox, utils, visitor
    except ImportError as error:
        raise ImportError("a chat template needs jinja2: pip install 'jattn[models]'") from error

    class Checks(visitor.NodeTransformer):
        """Passes loops, concatenations and literals through the filters looped, joined and measured."""

        def through(self, name: str, node: Any) -> Any:
            return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

        def visit_For(self, node: Any) -> Any:
            node = self.generic_visit(node)
            node.iter = self.through("looped", node.iter)
            return node

        def visit_Concat(self, node: Any) -> Any:
            node = self.generic_visit(node)
            return self.through("joined", nodes.List(node.nodes, lineno=node.lineno))

        def visit_List(self, node: Any) -> Any:
            return self.through("measured", self.generic_visit(node))

        visit_Dict = visit_List

        def visit_Tuple(self, node: Any) -> Any:
            return self.visit_List(node) if node.ctx == "load" else self.generic_visit(node)

    class Generation(ext.Extension):
        """{% generation %} marks an assistant's text for training; rendering ignores the mark."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Environment(sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*", "**", "%"))
        concat = staticmethod(bounds.joined)  # joins the pieces of a prompt, macro or block

        def _parse(self, source: str, name: Any, filename: Any) -> Any:
            return Checks().visit(super()._parse(source, name, filename))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            bounds.check_operator(operator, left, right)
            return measured(super().call_binop(context, operator, left, right))

        def call(self, context: Any, obj: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
            check_time()
            owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # jinja wraps str.format
            if isinstance(owner, str):
                args = tuple(list(bounds.timed(arg)) if isinstance(arg, Iterator) else arg for arg in args)
                check_growth(getattr(obj, "__name__", ""), owner, [*args, *options.values()])
            return measured(super().call(context, obj, *args, **options))

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
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[Generation, ext.loopcontrols],
        finalize=measured,
    )
    del environment.filters["urlize"]  # takes long for long texts
    environment.filters = {name: _bounded(name, filter) for name, filter in environment.filters.items()}
    environment.filters |= dict(tojson=tojson, looped=bounds.looped, joined=bounds.joined, measured=measured)
    del environment.globals["lipsum"], environment.globals["cycler"], environment.globals["joiner"]
    environment.globals |= dict(
        raise_exception=raise_exception, strftime_now=strftime_now, namespace=Namespace, dict=_dictionary
    )
    return environment


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: nothing escaped for HTML, and json.dumps's options."""
    if bounds.size_of([indent, separators]) > 100 or (isinstance(indent, int) and indent > 100):
        raise bounds.BoundError("tojson with an indent or separators of more than 100 characters")
    return json.dumps(
        measured(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def strftime_now(format: str) -> str:
    """The local time."""
    check_growth("%", format, [])
    return datetime.datetime.now().strftime(format)


def _bounded(name: str, filter: Any) -> Any:
    """The filter with limits on its counts and on the size of its result."""
    leading = 1 if hasattr(filter, "jinja_pass_arg") else 0  # jinja's own argument before the value

    @functools.wraps(filter)
    def bounded(*args: Any, **options: Any) -> Any:
        check_time()
        own, (value, *rest) = args[:leading], args[leading:]
        value = list(bounds.timed(value)) if isinstance(value, Iterator) else value
        check_growth("%" if name == "format" else name, value, [*rest, *options.values()])
        return measured(filter(*own, value, *rest, **options))

    return bounded


def _dictionary(*args: Any, **values: Any) -> dict:
    """dict() as a function: the class itself would give a template its methods."""
    return dict(*args, **values)
