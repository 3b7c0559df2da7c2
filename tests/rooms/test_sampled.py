"""Of a sampled file a commit passes the first test of each function and some of the others; other files are whole."""

from pathlib import Path

import pytest

from tests import conftest, quick, sampled
from tests.rooms import tree


class Item:
    """What pytest passes, as far as it is read."""

    def __init__(self, file: str, function: str, parameter: int = 0):
        self.path, self.originalname, self.name = Path(file), function, f"{function}[{parameter}]"
        self.markers = list[str]()

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.markers.append(mark.name)


def runs(items: list[Item]) -> list[bool]:
    sampled.mark(items, Path("."))  # pyright: ignore[reportArgumentType]
    return [not item.markers for item in items]


def test_the_first_of_each_function_runs_and_about_one_in_n_of_the_others(monkeypatch):
    monkeypatch.setattr(sampled, "ONE_IN", {"a.py": 4})
    chosen = {name: runs([Item("a.py", name, i) for i in range(400)]) for name in "fg"}
    assert all(each[0] and 60 < sum(each) < 140 for each in chosen.values())
    assert chosen["f"] == runs([Item("a.py", "f", i) for i in range(400)]), "another choice at another time"
    for alternating in (2, 3, 4):
        assert all(sum(chosen["f"][i::alternating]) > 10 for i in range(alternating))
    assert all(runs([Item("b.py", "f", i) for i in range(9)]))


def test_a_test_that_is_slow_anyway_stays_so_and_is_not_the_first(monkeypatch):
    monkeypatch.setattr(sampled, "ONE_IN", {"a.py": 10**9})
    items = [Item("a.py", "f", i) for i in range(3)]
    items[0].add_marker(pytest.mark.slow)
    assert runs(items) == [False, True, False]


@pytest.mark.parametrize(("module", "table"), [(sampled, "ONE_IN"), (quick, "SUBSET")])
def test_a_file_that_is_not_there_is_named(module, table, monkeypatch):
    conftest.check_places(tree.ROOT)
    monkeypatch.setitem(getattr(module, table), "tests/gone.py", "")
    with pytest.raises(pytest.UsageError, match="tests/gone.py"):
        conftest.check_places(tree.ROOT)
