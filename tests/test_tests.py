"""No test module imports another: code that tests share is in modules of its own."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(p.name for p in HERE.iterdir() if p.is_dir()))
def test_no_test_module_is_imported(folder):
    for path in (HERE / folder).rglob("*.py"):
        for name in imported(path):
            parts = name.split(".")
            ours = parts[0] == "tests" and any(p.startswith(("test_", "conftest")) for p in parts)
            assert not ours, f"{path.relative_to(HERE)} imports {name}"
