"""docs/parity.md has every row once, in order, with the feature in words, a test or a reason, and the right counts."""

import re

from tests.rooms import tree

ROWS = {  # family: rows of each part
    "S0": 55, "S1": 50, "S2": 19, "S3": 20, "S4": 28, "R": 50, "B": 14, "O": 11, "F": 18, "I": 19,
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


def flaw(row: list[str]) -> str | None:
    """Done needs a test (beyond the five parts and robustness, a file); part and not yet say what is missing."""
    name, feature, status, what, *proof = row
    if status not in STATUSES or not feature or not what:
        return "no feature, no status or no description"
    if status in ("part", "not yet") and "not yet" not in what:
        return "what is missing?"
    if status == "done" and name[0] in "SR" and "`tests/" not in proof[0]:
        return "done without a test"
    return None


def test_every_row_has_a_status_and_what_backs_it():
    assert not {row[0]: flaw(row) for row in TABLE if flaw(row)}


def test_the_counts_are_the_tables():
    counted = {
        "S": [row for row in TABLE if row[0][0] == "S"],
        "R": [row for row in TABLE if row[0][0] == "R"],
        "B, O, F, I": [row for row in TABLE if row[0][0] in "BOFI"],
    }
    for title, rows in counted.items():
        by_status = [str(sum(row[2] == status for row in rows)) for status in STATUSES]
        line = next(line for line in TEXT.splitlines() if line.startswith(f"| [{title}:"))
        assert [cell.strip() for cell in line.strip("|").split("|")][1:] == [str(len(rows)), *by_status]
