"""docs/parity.md accounts for every row, once, in order, with a test or a reason, and counts right."""

import re

import pytest

from tests.rooms import tree

ROWS = {  # family: rows of each part
    "S0": 55, "S1": 50, "S2": 19, "S3": 20, "S4": 28, "R": 34, "B": 14, "O": 11, "F": 18, "I": 19,
}  # fmt: skip
STATUSES = ("done", "part", "not yet", "dropped")
TEXT = tree.text(tree.ROOT / "docs" / "parity.md") or ""
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| [A-Z]\d?-\d+ \|", line)
]


def test_every_row_stands_there_once_and_in_order():
    wanted = [f"{family}-{number}" for family, count in ROWS.items() for number in range(1, count + 1)]
    assert [row[0] for row in TABLE] == wanted


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_a_row_has_a_status_and_what_backs_it(row):
    """Done: a test (or, beyond the five parts, a file). Otherwise: what is missing, in words."""
    name, status, what, *proof = row
    assert status in STATUSES and what
    if status in ("part", "not yet"):
        assert "not yet" in what or name in ("B-13", "I-13"), "say what is missing"
    elif status == "done" and name[0] in "SR":
        assert "`tests/" in proof[0], "done needs a test"


def test_the_counts_are_the_tables():
    counted = {
        "S": [row for row in TABLE if row[0][0] == "S"],
        "R": [row for row in TABLE if row[0][0] == "R"],
        "B, O, F, I": [row for row in TABLE if row[0][0] in "BOFI"],
    }
    for title, rows in counted.items():
        by_status = [str(sum(row[1] == status for row in rows)) for status in STATUSES]
        line = next(line for line in TEXT.splitlines() if line.startswith(f"| [{title}:"))
        assert [cell.strip() for cell in line.strip("|").split("|")][1:] == [str(len(rows)), *by_status]
