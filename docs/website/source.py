"""What the source says about a public object: arguments, defaults, and the comment beside each of them."""

import ast
import dataclasses
import enum
import functools
import inspect
import io
import textwrap
import tokenize
import types
from collections.abc import Iterator
from typing import Any

OWN = ("jattn", "pallas_kernels")
POSITIONAL, KEYWORD = "positional", "keyword"
REQUIRED = ""


@dataclasses.dataclass(frozen=True)
class Argument:
    """One argument of a function, or one field of a dataclass, as its source spells it."""

    name: str  # with its stars
    kind: str  # POSITIONAL or KEYWORD
    annotation: str = ""
    default: str = REQUIRED
    comment: str = ""


def is_ours(thing: Any) -> bool:
    """Whether a class or function is defined in this project."""
    return (getattr(thing, "__module__", None) or "").split(".")[0] in OWN


def first_sentence(thing: Any) -> str:
    """The first line of the docstring as one line, up to its first blank line."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def arguments(thing: Any) -> list[Argument]:
    """The arguments of a function, or those that construct a class."""
    if not isinstance(thing, type):
        return _of_function(thing)
    if dataclasses.is_dataclass(thing):
        return [_of_field(thing, field) for field in dataclasses.fields(thing) if _is_argument(thing, field)]
    return _of_function(thing.__init__)[1:] if is_ours(thing.__init__) else []


def returns(function: Any) -> str:
    """The annotation of the result."""
    return _text(_definition(inspect.unwrap(function))[0].returns)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """(name, raw attribute) of the public methods and properties, the class's own first, then the inherited."""
    seen = set()
    for owner in filter(is_ours, cls.__mro__):
        for name, value in vars(owner).items():
            public = not name.startswith("_") or (name == "__call__" and not issubclass(cls, enum.Enum))
            if public and name not in seen and isinstance(value, _METHODS) and not _is_lambda(value):
                seen.add(name)
                yield name, value


def attributes(cls: type) -> list[Argument]:
    """The annotated public class attributes, the class's own first, then the inherited."""
    found: dict[str, Argument] = {}
    for owner in filter(is_ours, cls.__mro__):
        node, comments = _definition(owner)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and not _is_field(owner, line) and not line.target.id.startswith("_"):
                annotation = _text(line.annotation).removeprefix("ClassVar[")
                annotation = annotation if annotation == _text(line.annotation) else annotation[:-1]
                default = "" if line.value is None else ast.unparse(line.value)
                comment = comments.get(line.end_lineno, "")
                found.setdefault(line.target.id, Argument(line.target.id, KEYWORD, annotation, default, comment))
    return list(found.values())


def values(cls: type[enum.Enum]) -> list[tuple[str, str, str]]:
    """(name, value, comment) of an enum's members."""
    node, comments = _definition(cls)
    lines = {
        target.id: line.end_lineno for line in node.body if isinstance(line, ast.Assign) for target in line.targets
    }
    return [(name, repr(member.value), comments.get(lines[name], "")) for name, member in cls.__members__.items()]


def groups(module: types.ModuleType) -> list[tuple[str, list[str]]]:
    """(title, names) of `__all__`: a comment line in the list begins a group, and its words are the title."""
    text = inspect.getsource(module)
    node = next(line.value for line in ast.parse(text).body if isinstance(line, ast.Assign) and _names(line, "__all__"))
    titles = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and node.lineno < token.start[0] < node.end_lineno
    }
    found: list[tuple[str, list[str]]] = []
    for item in node.elts:
        title = titles.get(item.lineno - 1)
        if title or not found:
            found.append((title or "", []))
        found[-1][1].append(item.value)
    return found


_METHODS = (types.FunctionType, classmethod, staticmethod, property, functools.cached_property)


def _names(line: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in line.targets)


def _is_lambda(value: Any) -> bool:
    return getattr(getattr(value, "__func__", value), "__name__", "") == "<lambda>"


@functools.cache
def _definition(thing: Any) -> tuple[Any, dict[int, str]]:
    """The syntax tree of a class or function, and the comments of its source by line."""
    text = textwrap.dedent(inspect.getsource(thing))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return ast.parse(text).body[0], {line: text for line, text in comments.items() if not text.startswith(_TOOLS)}


_TOOLS = ("noqa", "fmt:", "pyright:", "type:")
"""Comments that speak to a tool."""


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value  # a quoted annotation
    return "" if node is None else ast.unparse(node)


def _default(value: Any, node: ast.expr | None) -> str:
    """A plain value as itself, everything else as the source spells it."""
    plain = value is None or type(value) in (bool, int, float, str, tuple)
    return repr(value) if plain or node is None else ast.unparse(node)


def _of_function(function: Any) -> list[Argument]:
    function = inspect.unwrap(function)
    node, comments = _definition(function)
    spec = node.args
    plain = [*spec.posonlyargs, *spec.args]
    defaults = dict(zip(reversed([arg.arg for arg in plain]), reversed(spec.defaults), strict=False))
    defaults |= {arg.arg: value for arg, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value}
    found = inspect.signature(function).parameters

    def made(arg: ast.arg, kind: str, stars: str = "") -> Argument:
        node = defaults.get(arg.arg)
        default = REQUIRED if node is None else _default(found[arg.arg].default, node)
        comment = comments.get((node or arg).end_lineno, "")
        return Argument(stars + arg.arg, kind, _text(arg.annotation), default, comment)

    made_of = [made(arg, POSITIONAL) for arg in plain]
    made_of += [made(spec.vararg, POSITIONAL, "*")] if spec.vararg else []
    made_of += [made(arg, KEYWORD) for arg in spec.kwonlyargs]
    return made_of + ([made(spec.kwarg, KEYWORD, "**")] if spec.kwarg else [])


def _is_field(cls: type, line: ast.AnnAssign) -> bool:
    return dataclasses.is_dataclass(cls) and not _text(line.annotation).startswith("ClassVar")


def _is_argument(cls: type, field: dataclasses.Field) -> bool:
    return field.init and not field.name.startswith("_") and _declared(cls, field.name) is not None


def _declared(cls: type, name: str) -> tuple[ast.AnnAssign, str] | None:
    """The line of ours that declares a field, and its comment; None for a field that a library adds."""
    for owner in filter(is_ours, cls.__mro__):
        node, comments = _definition(owner)
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id == name:
                return line, comments.get(line.end_lineno, "")
    return None


def _of_field(cls: type, field: dataclasses.Field) -> Argument:
    line, comment = _declared(cls, field.name)
    kind = KEYWORD if field.kw_only else POSITIONAL
    default, value = REQUIRED, line.value
    if field.default_factory is not dataclasses.MISSING:
        default = f"{field.default_factory.__name__}()"
    elif field.default is not dataclasses.MISSING:
        if isinstance(value, ast.Call):  # dataclasses.field(default=...), or a wrapper of it
            value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), value)
        default = _default(field.default, value)
    return Argument(field.name, kind, _text(line.annotation), default, comment)
