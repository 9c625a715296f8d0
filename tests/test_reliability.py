"""docs/reliability.md promises, and names the tests that show it."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "docs" / "reliability.md").read_text()


def named(text: str) -> set[tuple[str, str]]:
    """Files and tests in them, `*` for a whole file. A test without a file is of the file before it in its line."""
    found = set()
    for line in text.splitlines():
        file = ""
        for path, test in re.findall(r"`((?:\w+/)*test_\w+\.py)?(?:::)?(test_\w+)?`", line):
            file = path or file
            if path or test:
                found.add((file, test or "*"))
    return found


def marked(node: ast.AST | None) -> bool:
    return node is not None and re.search(r"\bmark\.faults\b", ast.unparse(node)) is not None


def test_every_test_it_names_is_there_and_carries_the_marker():
    rows = named(TEXT)
    assert len(rows) > 40
    for file, name in sorted(rows):
        tree = ast.parse((TESTS / file).read_text()).body
        whole = any(marked(n) for n in tree if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n))
        tests = {n.name: n for n in tree if isinstance(n, ast.FunctionDef)}
        assert name == "*" or name in tests, f"docs/reliability.md names {file}::{name}, which is not there"
        by_itself = name != "*" and any(map(marked, tests[name].decorator_list))
        assert whole or by_itself, f"{file}::{name} is in docs/reliability.md: mark it with `faults`"


def test_names_are_understood():
    line = "| x | y | `test_a.py::test_b` *, `test_c`, of others `d/test_e.py`, `--fresh`, `mesascope.runs` |"
    assert named(line) == {("test_a.py", "test_b"), ("test_a.py", "test_c"), ("d/test_e.py", "*")}
