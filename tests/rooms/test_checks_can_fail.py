"""No check in tests/ is of a form that cannot fail, or that passes for any error."""

import ast

import pytest

from tests.rooms import tree

COMPARISONS = ("assert_allclose", "assert_array_equal", "assert_equal", "assert_array_less", "same_bits")
BROAD = ("Exception", "BaseException")
LOOSE = ("ValueError", "TypeError", "RuntimeError")


def faults(source: str) -> list[tuple[int, str]]:
    """(line, fault) of every check in this source that cannot fail or that accepts any error."""
    nodes = list(ast.walk(ast.parse(source)))
    return sorted((node.lineno, what) for node in nodes if (what := fault_of(node)))


def fault_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Assert):
        return _assertion(node.test)
    if isinstance(node, ast.Call):
        return _call(node)
    if isinstance(node, ast.With):
        return _raises(node)
    if isinstance(node, ast.ExceptHandler) and all(isinstance(line, ast.Pass) for line in node.body):
        return "an exception is ignored"
    return None


def _assertion(test: ast.expr) -> str | None:
    if isinstance(test, ast.Tuple) or (isinstance(test, ast.Constant) and test.value):
        return "an assertion that always holds"
    for part in ast.walk(test):
        if isinstance(part, ast.Compare) and not _calls(part):  # a call may return something else the second time
            sides = [ast.dump(side) for side in (part.left, *part.comparators)]
            if any(a == b for a, b in zip(sides, sides[1:], strict=False)):
                return "something is compared with itself"
    return None


def _call(node: ast.Call) -> str | None:
    name = ast.unparse(node.func).split(".")[-1]
    if name in COMPARISONS and len(node.args) >= 2 and ast.dump(node.args[0]) == ast.dump(node.args[1]):
        return None if any(map(_calls, node.args)) else "something is compared with itself"
    broad = any(ast.unparse(part) in BROAD for arg in node.args for part in ast.walk(arg) if isinstance(part, ast.Name))
    if name in ("raises", "suppress") and broad:
        return "every exception passes"
    return None


def _raises(node: ast.With) -> str | None:
    """`with pytest.raises(ValueError):` without `match` or a look at the error afterwards passes for any ValueError."""
    for item in node.items:
        call = item.context_expr
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises" and item.optional_vars is None:
            names = {part.id for arg in call.args for part in ast.walk(arg) if isinstance(part, ast.Name)}
            if names & {*LOOSE} and not any(keyword.arg == "match" for keyword in call.keywords):
                return "a broad error type without a match on its message"
    return None


def _calls(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) for part in ast.walk(node))


def test_every_check_of_the_suite_can_fail():
    found = [
        f"{tree.relative(path)}:{line}: {what}"
        for path in tree.files(".py", under=("tests/",))
        for line, what in faults(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "assert (x == y, 'text')",
        "assert True",
        "assert x.y == x.y",
        "assert a < b[0] <= b[0]",
        "np.testing.assert_allclose(out, out, rtol=1)",
        "with pytest.raises(Exception):\n  f()",
        "with pytest.raises((KeyError, Exception), match='x'):\n  f()",
        "with contextlib.suppress(Exception):\n  f()",
        "with pytest.raises(ValueError):\n  f()",
        "try:\n  f()\nexcept KeyError:\n  pass",
    ],
)
def test_a_check_that_cannot_fail_is_seen(source):
    assert len(faults(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "assert draw(1) == draw(1)",
        "assert x == y <= z",
        "np.testing.assert_allclose(run(), run())",
        "with pytest.raises(ValueError, match='x'):\n  f()",
        "with pytest.raises(ValueError) as refusal:\n  f()\nassert 'x' in str(refusal.value)",
        "with contextlib.suppress(OSError):\n  f()",
        "try:\n  f()\nexcept KeyError:\n  g()",
    ],
)
def test_a_check_that_can_fail_is_left_alone(source):
    assert not faults(source)
