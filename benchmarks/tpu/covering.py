"""Covering arrays: a short list of cells in which every two values of two factors are together at least once."""

import itertools
from collections.abc import Callable, Mapping, Sequence

Cell = dict[str, str]  # the value of each factor


def covering(
    factors: Mapping[str, Sequence[str]], possible: Callable[[Cell], bool], first: Sequence[Cell] = (), turn: int = 0
) -> list[Cell]:
    """`first`, and the cells that it takes besides until each pair of values that some possible cell has is in one.

    possible(cell), of some factors or all: may these values be together? What it denies stays denied with more values.
    Greedy and deterministic: a cell begins with the first pair that is left, and takes of each factor the value with
    most pairs that are left. turn: where values are equal, which comes first.
    """
    order = {name: [*values[turn % len(values) :], *values[: turn % len(values)]] for name, values in factors.items()}
    singles = [[(name, value) for value in values] for name, values in order.items()]
    left = {
        pair: None
        for a, b in itertools.combinations(singles, 2)
        for pair in itertools.product(a, b)
        if possible(dict(pair))
    }
    cells: list[Cell] = []

    def add(cell: Cell):
        cells.append(cell)
        for pair in pairs(cell):
            left.pop(pair, None)

    def pairs(cell: Cell):
        return itertools.combinations([(name, cell[name]) for name in factors], 2)

    def completed(cell: Cell) -> Cell | None:
        """A possible cell with these values; None: there is none."""
        name = next((name for name in factors if name not in cell), None)
        if name is None:
            return cell

        def gain(value: str) -> int:
            mine = (name, value)
            return sum((mine, x) in left or (x, mine) in left for x in cell.items())

        for value in sorted(order[name], key=gain, reverse=True):
            more = cell | {name: value}
            if possible(more) and (found := completed(more)) is not None:
                return found
        return None

    for cell in first:
        add(cell)
    while left:
        pair = next(iter(left))
        cell = completed(dict(pair))
        if cell is None:
            del left[pair]
        else:
            add(cell)
    return cells
