"""Checks that every chip's kernel makes before it is launched."""

import dataclasses
import enum
from collections.abc import Iterable
from typing import Any

import jax


class Subject(enum.Enum):
    """What a reason is about, where two checks may refuse the same thing: the caller then reports one of the two."""

    PAGE_SIZE = enum.auto()
    MEMORY = enum.auto()  # of the chip: too little for a launch


class Reason(str):
    """Why a kernel cannot serve something. `about`: its subject, if it has one."""

    about: Subject | None

    def __new__(cls, text: str, about: Subject | None = None):
        reason = super().__new__(cls, text)
        reason.about = about
        return reason


class Reasons(list[str]):
    """Why a kernel cannot serve something, in order; empty if it can."""

    def refuse(self, when: bool, reason: str, about: Subject | None = None) -> None:
        """Add the reason if `when` is true."""
        if when:
            self.append(Reason(reason, about))


def subjects(reasons: Iterable[str]) -> set[Subject]:
    """The subjects of these reasons; a reason without one adds none."""
    return {reason.about for reason in reasons if isinstance(reason, Reason) and reason.about is not None}


def unlisted_fields(rule: Any, honoured: tuple[str, ...]) -> list[str]:
    """`field=value` for every field of a MaskRule or LogitRule that is set and that the kernel does not honour.

    A kernel lists the fields that it honours. A field added to a rule later is then refused, never ignored.
    """
    return [
        f"{field.name}={getattr(rule, field.name)!r}"
        for field in dataclasses.fields(rule)
        if field.name not in honoured and getattr(rule, field.name) != field.default
    ]


def check_arrays(
    config: Any,
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    block_table: jax.Array,
    page_shape: tuple[int, int],
    extra: tuple[tuple[str, object, object], ...],
) -> None:
    """ValueError at the first array that differs from the kernel's config.

    page_shape: (kv heads, slots of a page), in the pool's order. extra: (name, seen, wanted) of what only this kernel
    checks.
    """
    c = config
    check_seen(
        ("q", q.shape[1:], (c.num_heads, c.head_dim)),
        ("k_pages", k_pages.shape[1:], (*page_shape, c.head_dim)),
        ("v_pages", v_pages.shape, (k_pages.shape[0], *page_shape, c.v_head_dim)),
        ("q dtype", q.dtype.name, c.dtype),
        ("k_pages dtype", k_pages.dtype.name, c.kv_dtype),
        ("v_pages dtype", v_pages.dtype.name, c.kv_dtype),
        ("block_table dtype", block_table.dtype.name, "int32"),
        *extra,
    )


def check_seen(*table: tuple[str, object, object]) -> None:
    """ValueError at the first of (name, seen, wanted) that differ."""
    for name, seen, wanted in table:
        if seen != wanted:
            raise ValueError(f"{name} is {seen}; the config wants {wanted}")
