"""Tile sizes, one JSON file a chip, read by gpu/tile_policy.py and tpu/tile_policy.py.

Those of GPUs are measured by `python -m jattn bench --tune`, those of TPUs counted by `benchmarks.tpu.sweep --tables`.
"""

import json
import pathlib
from typing import Any


def table_path(chip: str) -> pathlib.Path:
    """The file of a chip's or card's table."""
    return pathlib.Path(__file__).with_name(f"{chip}.json")


def read_rows(path: pathlib.Path, *, texts: tuple[str, ...], counts: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of a table, with these columns of text and of positive integers; other columns are ignored.

    ValueError for a file that is not such a table: somebody's, or of another version.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return [
            {name: _text(row[name]) for name in texts} | {name: _count(row[name]) for name in counts} for row in rows
        ]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is not a table of tile sizes ({why}); delete it, or write it anew with `jattn bench --tune`"
        ) from error


def _text(value) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} must be a text")
    return value


def _count(value) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} must be a positive integer")
    return value
