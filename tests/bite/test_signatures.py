"""A mutant takes the arguments of the function that it replaces.

Most mutants run before a release only: until then, one that a new parameter breaks would not be noticed.
"""

import inspect

from tests.bite import engine_mutants, mutants
from tests.bite.test_engine_mutants import owner_of

REPLACED = [
    *((name, mutant, mutant.target) for name, mutant in engine_mutants.MUTANTS.items()),
    *((name, mutant, target) for name, mutant in mutants.MUTANTS.items() for target in mutant.targets),
]


def test_a_mutant_takes_the_arguments_of_what_it_replaces():
    broken = {}
    for name, mutant, target in REPLACED:
        original = getattr(*owner_of(target))
        given = inspect.signature(original).parameters.values()
        by_place = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        by_name = {p.name: None for p in given if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(mutant.make(original)).bind(*by_place, **by_name)
        except TypeError as error:
            broken[name] = f"{error}, of {by_place} and {list(by_name)}"
    assert not broken
