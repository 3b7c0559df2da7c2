"""Each row of the list of bugs in docs/parity.md has a test with its number."""

import re

from tests.rooms import tree

ROWS = set(range(1, 51))
ELSEWHERE = {27: "how time grows from batch to batch is measured on a quiet machine: benchmarks"}


def test_every_row_has_a_test_with_its_name():
    named = re.compile(r"^def test_((?:r\d\d_)+)", re.MULTILINE)
    found = {
        int(number)
        for path in tree.files(".py", under=("tests/",))
        for rows in named.findall(path.read_text())
        for number in re.findall(r"\d\d", rows)
    }
    assert not ROWS - found - set(ELSEWHERE)
    assert not found - ROWS
