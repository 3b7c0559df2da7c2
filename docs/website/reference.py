"""The pages of the API reference: every name of the public packages' `__all__`, in its order and groups.

Docstrings are plain text with `code`, lists and indented blocks. They are written into MyST directives of Sphinx's
Python domain, so that every name can be linked to and is found by the search.
"""

import dataclasses
import enum
import functools
import importlib
import inspect
import re
import types
from typing import Any

from website import source
from website.source import Argument

PACKAGES = (
    "jattn",
    "jattn.nn",
    "jattn.models",
    "jattn.engine",
    "jattn.text",
    "jattn.embedded",
    "jattn.metadata",
    "jattn.backends",
    "jattn.compat.vllm",
)
"""The public packages, in the order of the contents page."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A public name at the first place that exports it."""

    package: str
    name: str
    thing: Any

    @property
    def full_name(self) -> str:
        return f"{self.package}.{self.name}"


@functools.cache
def packages() -> dict[str, types.ModuleType]:
    """The public packages, and the modules that one of them exports."""
    found = {}
    for name in PACKAGES:
        found[name] = package = importlib.import_module(name)
        exported = (getattr(package, each) for each in package.__all__)
        modules = (thing for thing in exported if isinstance(thing, types.ModuleType))
        found |= {module.__name__: module for module in modules if module.__name__ not in PACKAGES}
    return found


@functools.cache
def entries() -> dict[str, Entry]:
    """Every place that exports a name, and the entry that describes it: the first place with that object."""
    first: dict[int, Entry] = {}
    found = {}
    for package, module in packages().items():
        for name in _public(module):
            thing = getattr(module, name)
            if not isinstance(thing, types.ModuleType):
                found[f"{package}.{name}"] = first.setdefault(id(thing), Entry(package, name, thing))
    return found


@functools.cache
def targets() -> dict[str, str]:
    """Every name that the reference describes, methods included, under each of its public spellings."""
    found = {name: name for name in packages()}
    for spelling, entry in entries().items():
        found[spelling] = entry.full_name
        if isinstance(entry.thing, type):
            for member, _ in source.members(entry.thing):
                found[f"{spelling}.{member}"] = f"{entry.full_name}.{member}"
    return found


@functools.cache
def exists(name: str) -> bool:
    """Whether a dotted name leads to a module, an attribute or a field."""
    thing, *parts = name.split(".")
    try:
        here = importlib.import_module(thing)
    except ImportError:
        return False
    for part in parts:
        thing += f".{part}"
        if dataclasses.is_dataclass(here) and part in {field.name for field in dataclasses.fields(here)}:
            return True
        if hasattr(here, part):
            here = getattr(here, part)
            continue
        try:
            here = importlib.import_module(thing)
        except ImportError:
            return False
    return True


def pages() -> dict[str, str]:
    """Path inside the site's source to text: the contents page, and one page for each package."""
    found = {f"reference/{name}.md": _page(name, module) for name, module in packages().items()}
    return {"reference/index.md": _contents(), **found}


_SPECIAL = re.compile(r"[*<\[$\\#]|(?<!\w)_|_(?!\w)")
"""What Markdown would read as markup."""


def escaped(text: str) -> str:
    """Text in which Markdown finds nothing but `code`, paragraphs, lists and indented blocks."""
    lines = []
    for line in text.split("\n"):
        if line.startswith("    "):
            lines.append(line)
        else:
            parts = re.split(r"(`[^`]*`)", line)
            lines.append("".join(part if i % 2 else _SPECIAL.sub(r"\\\g<0>", part) for i, part in enumerate(parts)))
    return "\n".join(lines)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table; a column that is empty in every row is left out."""
    kept = [i for i in range(len(head)) if any(row[i] for row in rows)]
    cells = [[row[i].replace("|", r"\|") for i in kept] for row in rows]
    lines = [[head[i] for i in kept], ["---"] * len(kept), *cells]
    return [f"| {' | '.join(line)} |" for line in lines]


def code(text: str) -> str:
    """The text as inline code; nothing for nothing."""
    return f"`{text}`" if text else ""


def _public(module: types.ModuleType) -> list[str]:
    """The names of `__all__`; of a module without one, its own public classes and functions."""
    if hasattr(module, "__all__"):
        return [name for _, names in source.groups(module) for name in names]
    return [name for name, thing in vars(module).items() if name[0] != "_" and _defined_in(module, thing)]


def _defined_in(module: types.ModuleType, thing: Any) -> bool:
    return isinstance(thing, type | types.FunctionType) and thing.__module__ == module.__name__


def _grouped(module: types.ModuleType) -> list[tuple[str, list[str]]]:
    return source.groups(module) if hasattr(module, "__all__") else [("", _public(module))]


def _contents() -> str:
    lines = ["# API reference", "", "Every public name, one line each. A name links to its signature and description."]
    lines += ["", ":::{toctree}", ":hidden:", "", *packages(), ":::"]
    for package, module in packages().items():
        lines += ["", f"## {package}", "", escaped(source.first_sentence(module))]
        for title, names in _grouped(module):
            lines += ["", f"**{_capital(title)}**"] if title else []
            lines += ["", *_summary(package, module, names)]
    return "\n".join(lines) + "\n"


def _summary(package: str, module: types.ModuleType, names: list[str]) -> list[str]:
    """A table of names, each with the first sentence of its docstring."""
    rows = []
    for name in names:
        thing = getattr(module, name)
        target = thing.__name__ if isinstance(thing, types.ModuleType) else targets()[f"{package}.{name}"]
        role = "py:mod" if isinstance(thing, types.ModuleType) else "py:obj"
        rows.append([f"{{{role}}}`{name} <{target}>`", escaped(source.first_sentence(thing))])
    return table(["name", "what it is"], rows)


def _page(package: str, module: types.ModuleType) -> str:
    lines = [f"# {package}", "", f":::{{py:module}} {package}", ":::", "", *_doc(module)]
    for title, names in _grouped(module):
        lines += ["", f"## {_capital(title)}"] if title else []
        elsewhere = [name for name in names if _is_elsewhere(package, name)]
        for name in names:
            if name not in elsewhere:
                lines += ["", *_described(entries()[f"{package}.{name}"])]
        if elsewhere:
            lines += ["", "Described on another page:", "", *_summary(package, module, elsewhere)]
    return "\n".join(lines) + "\n"


def _is_elsewhere(package: str, name: str) -> bool:
    """A module, or a name that another public package exported first."""
    entry = entries().get(f"{package}.{name}")
    return entry is None or entry.package != package


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]


def _described(entry: Entry) -> list[str]:
    """The directive of a class, function or other object, its members inside."""
    thing = entry.thing
    module = f":module: {entry.package}"
    if isinstance(thing, type):
        fields = source.arguments(thing)
        head = f"{entry.name}({_signature(fields, annotated=not dataclasses.is_dataclass(thing))})"
        kind = "py:exception" if issubclass(thing, BaseException) else "py:class"
        bare = issubclass(thing, enum.Enum) or inspect.isabstract(thing) or not (fields or _has_init(thing))
        rows = _fields(thing, fields)
        body = [*_doc(thing), *rows, *_attributes(thing)]
        option = [":single-line-parameter-list:"] if rows else []  # the table has a line for each
        for name, value in source.members(thing):
            body += ["", *_member(name, value, thing)]
        return [f"::::{{{kind}}} {entry.name if bare else head}", module, *option, "", *body, "::::"]
    if callable(thing):
        return [f"::::{{py:function}} {_call(entry.name, thing)}", module, "", *_doc(thing), "::::"]
    return [f"::::{{py:data}} {entry.name}", module, "", f"`{thing!r}`", "::::"]


def _has_init(cls: type) -> bool:
    return source.is_ours(cls.__init__)


def _member(name: str, value: Any, cls: type) -> list[str]:
    function, option = value, None
    if isinstance(value, classmethod | staticmethod):
        function, option = value.__func__, f":{type(value).__name__}:"
    if not isinstance(value, property) and not hasattr(value, "func"):
        head = f"{{py:method}} {_call(name, function, bound=not isinstance(value, staticmethod))}"
    else:
        result = source.returns(getattr(value, "fget", None) or value.func)
        head, option = f"{{py:property}} {name}", f":type: {result}" if result else None
    return [
        f":::{head}",
        *([option] if option else []),
        "",
        *_doc(getattr(cls, name) if option is None else value),
        ":::",
    ]


def _call(name: str, function: Any, bound: bool = False) -> str:
    fields, result = source.arguments(function)[1 if bound else 0 :], source.returns(function)
    return f"{name}({_signature(fields)})" + (f" -> {result}" if result else "")


def _signature(fields: list[Argument], annotated: bool = True) -> str:
    parts, starred = [], False
    for field in fields:
        if field.kind == source.KEYWORD and not starred and not field.name.startswith("**"):
            parts.append("*")
        starred = starred or field.kind == source.KEYWORD or field.name.startswith("*")
        typed = f": {field.annotation}" if annotated and field.annotation else ""
        equals = " = " if typed else "="
        parts.append(field.name + typed + (equals + field.default if field.default else ""))
    return ", ".join(parts)


def _doc(thing: Any) -> list[str]:
    return escaped(inspect.getdoc(thing) or "").split("\n")


def _fields(cls: type, fields: list[Argument]) -> list[str]:
    """A table of the members of an enum, or of the fields of a dataclass; arguments only if some are commented."""
    if issubclass(cls, enum.Enum):
        rows = [[code(name), code(value), escaped(comment)] for name, value, comment in source.values(cls)]
        return ["", *table(["member", "value", "meaning"], rows)]
    if not fields or not (dataclasses.is_dataclass(cls) or any(field.comment for field in fields)):
        return []
    return ["", *argument_table(fields)]


def _attributes(cls: type) -> list[str]:
    """A table of class attributes."""
    found = source.attributes(cls)
    rows = [[code(each.name), code(each.annotation), code(each.default), escaped(each.comment)] for each in found]
    return ["", *table(["attribute", "type", "value", "meaning"], rows)] if rows else []


def argument_table(fields: list[Argument]) -> list[str]:
    """Name, type, default and comment of each argument."""
    rows = [
        [code(field.name), code(field.annotation), code(field.default) or "required", escaped(field.comment)]
        for field in fields
    ]
    return table(["argument", "type", "default", "meaning"], rows)
