"""Of a sampled file, every n-th test of each function is left to a commit; other files are left as they are."""

from pathlib import Path

import pytest

from tests import sampled


class Item:
    """What pytest passes, as far as it is read."""

    def __init__(self, file: str, name: str):
        self.path, self.originalname, self.markers = Path(file), name, list[str]()

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.markers.append(mark.name)


def slow(items: list[Item]) -> list[bool]:
    sampled.mark(items, Path("."))  # pyright: ignore[reportArgumentType]
    return [bool(item.markers) for item in items]


def test_every_nth_test_of_each_function_runs(monkeypatch):
    monkeypatch.setattr(sampled, "EVERY", {"a.py": 3})
    of_two_functions = [Item("a.py", name) for name in "ffffgff"]
    assert slow(of_two_functions) == [False, True, True, False, False, True, True]
    assert slow([Item("b.py", "f"), Item("b.py", "f")]) == [False, False]


def test_a_test_that_is_slow_anyway_takes_no_place_of_another(monkeypatch):
    monkeypatch.setattr(sampled, "EVERY", {"a.py": 2})
    items = [Item("a.py", "f") for _ in range(3)]
    items[0].add_marker(pytest.mark.slow)
    assert slow(items) == [True, False, True]


def test_a_file_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sampled, "EVERY", {"tests/gone.py": 2})
    with pytest.raises(pytest.UsageError, match="tests/gone.py"):
        sampled.check(tmp_path)
