"""A kernel lists the fields of a rule that it honours; any other field that is set is a reason to refuse."""

import dataclasses
from typing import Any


def unlisted(rule: Any, known: tuple[str, ...]) -> list[str]:
    """`field=value` for every field of a dataclass that differs from its default and is not in `known`."""
    return [
        f"{field.name}={getattr(rule, field.name)!r}"
        for field in dataclasses.fields(rule)
        if field.name not in known and getattr(rule, field.name) != field.default
    ]
