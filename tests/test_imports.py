"""Packages import each other one way only, Ray is imported only where allowed, modules are short.

Every `import` of `ray_slo` is checked, also inside functions, but not under `if TYPE_CHECKING:`.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.modules import Modules, room_of

ROOT = Path(__file__).parents[1] / "ray_slo"

# What each room may import of the others. `errors.py` is the short public path of serve's errors.
BELOW_SERVE = {"core", "planning", "papers", "policies", "record", "models", "simulation"}
ARROWS = {
    "core": set(),
    "planning": {"core", "record"},
    "papers": {"core", "planning"},
    "policies": {"core", "papers"},
    "record": {"core"},
    "load": {"core"},
    "models": {"core"},
    "simulation": {"core", "planning", "papers", "policies", "record"},
    "serve": BELOW_SERVE,
    "errors": {"serve"},
    "cli": {*BELOW_SERVE, "load", "serve"},
    "demo": {*BELOW_SERVE, "load", "serve", "cli"},
}
LAZY_ARROWS = {
    "load": {"serve"},  # the handle of a running deployment
    "cli": {"demo"},  # `ray-slo demo`
    "": {"serve", "models"},  # `ray_slo/__init__.py`: the public names, on first use
}
RAY_ROOMS, LAZY_RAY_ROOMS = {"serve", "errors", "demo"}, {"load", "cli"}
PRIVATE = re.compile(
    r"ray\._private|ray\.serve\._private|ray\.serve\.context|ray\.serve\.request_router"
    r"|ray\.dashboard|ray\.cluster_utils|uvicorn\.protocols"
)
PRIVATE_ROOM = "serve/ray_private/"
HEAVY = {"torch", "torchvision", "transformers", "pandas", "matplotlib", "opentelemetry"}
HEAVY_ROOMS = {"torch": {"demo"}, "pandas": {"simulation", "load", "cli", "demo"}}
CLOCKLESS = {"core", "planning", "papers", "policies", "record", "simulation"}
CLOCKS = {"time", "datetime", "random", "secrets", "uuid"}
MODULE_LINES, CLASS_LINES, FUNCTION_LINES = 500, 350, 60
MODULES_OF_A_FOLDER = 12  # of serve


class House(Modules):
    """What is wrong with a tree of modules; each method names the places."""

    def arrows(self):
        for found in self.imports:
            allowed = {found.room} | ARROWS.get(found.room, set())
            if found.lazy:
                allowed |= LAZY_ARROWS.get(found.room, set())
            reached = set(found.names) & ARROWS.keys() if found.module == "ray_slo" else set()
            if found.module.startswith("ray_slo."):
                reached = {found.module.split(".")[1]}
            if reached - allowed or found.module.startswith("."):
                yield str(found)
        for file, tree in self.trees.items():  # paths in tables such as `_LAZY`
            room = room_of(file)
            allowed = {room} | ARROWS.get(room, set()) | LAZY_ARROWS.get(room, set())
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    named = re.fullmatch(r"ray_slo\.(\w+)[\w.]*(:\w+)?", node.value)
                    if named and named[1] in ARROWS and named[1] not in allowed:
                        yield f"{file}:{node.lineno} names {node.value}"

    def ray(self):
        for found in self.imports:
            lazily = found.lazy and found.room in LAZY_RAY_ROOMS
            if found.package == "ray" and found.room not in RAY_ROOMS and not lazily:
                yield str(found)

    def private(self):
        for found in self.imports:
            paths = [found.module, *(f"{found.module}.{name}" for name in found.names)]
            hidden = any(
                PRIVATE.match(path) or any(part.startswith("_") for part in path.split("."))
                for path in paths
            )
            outside = not found.file.startswith(PRIVATE_ROOM)
            if found.package in ("ray", "uvicorn") and hidden and outside:
                yield str(found)

    def underscored(self):
        for found in self.imports:
            if found.package == "ray_slo":
                yield from (
                    f"{found}: {name}"
                    for name in found.names
                    if name.startswith("_") and not name.startswith("__")
                )
        for file, tree in self.trees.items():
            modules = {
                alias.asname or alias.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ray_slo")
                for alias in node.names
                if self.file_of(f"{node.module}.{alias.name}")
            }
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    hidden = node.attr.startswith("_") and not node.attr.startswith("__")
                    if hidden and node.value.id in modules:
                        yield f"{file}:{node.lineno} uses {ast.unparse(node)}"

    def heavy(self):
        for found in self.imports:
            at_home = found.room in HEAVY_ROOMS.get(found.package, set())
            if found.package in HEAVY and not found.lazy and not at_home:
                yield str(found)

    def clocks(self):
        """Policies, planners and the simulator are given their time and their random numbers."""
        for found in self.imports:
            if found.room in CLOCKLESS and found.package in CLOCKS:
                yield str(found)

    def sizes(self):
        for file, tree in self.trees.items():
            spans = [(file, len(self.sources[file].splitlines()), MODULE_LINES)]
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    lines = node.end_lineno - node.lineno + 1
                    spans.append((f"{file}:{node.name}", lines, CLASS_LINES))
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    # The body without its docstring; a signature may be a list of options.
                    first = node.body[ast.get_docstring(node) is not None :]
                    lines = node.end_lineno - first[0].lineno + 1 if first else 0
                    spans.append((f"{file}:{node.name}", lines, FUNCTION_LINES))
            for place, lines, most in spans:
                if lines > most:
                    yield f"{place} has {lines} lines, at most {most}"

    def folders(self):
        count: dict[str, int] = {}
        for file in self.sources:
            folder, _, name = file.rpartition("/")
            if name != "__init__.py" and folder.split("/")[0] == "serve":
                count[folder] = count.get(folder, 0) + 1
        for folder, modules in count.items():
            if modules > MODULES_OF_A_FOLDER:
                yield f"{folder} has {modules} modules, at most {MODULES_OF_A_FOLDER}"


RULES = ("arrows", "ray", "private", "underscored", "heavy", "clocks", "sizes", "folders")


@pytest.fixture(scope="module")
def house():
    return House(ROOT)


@pytest.mark.slow
def test_all_of_it_is_read(house):
    assert len(house.sources) > 150
    assert len(house.imports) > 1000
    assert {"core", "planning", "policies", "simulation", "serve", "record", "load"} <= {
        found.room for found in house.imports
    }
    assert any(found.lazy for found in house.imports)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_the_house_holds(house, rule):
    assert sorted(getattr(house, rule)()) == []


LONG = "".join(f"    a{i} = {i}\n" for i in range(61))


@pytest.mark.parametrize(
    ("rule", "file", "source", "says"),
    [
        ("arrows", "core/bad.py", "from ray_slo.policies import registry", "policies"),
        ("arrows", "core/bad.py", "def f():\n    import ray_slo.serve.errors", "serve.errors"),
        ("arrows", "planning/bad.py", "T = {'a': 'ray_slo.simulation.report'}", "names"),
        ("arrows", "load/bad.py", "from ray_slo.serve.errors import Expired", "serve.errors"),
        ("arrows", "core/bad.py", "from .names import nearest", ".names"),
        ("ray", "policies/bad.py", "import ray", "imports ray"),
        ("ray", "cli/bad.py", "from ray import serve", "imports ray"),
        ("private", "serve/bad.py", "from ray.serve._private import replica", "_private"),
        ("private", "serve/bad.py", "from ray.serve import context", "ray.serve"),
        ("private", "serve/bad.py", "def f():\n    from uvicorn.protocols import http", "uvicorn"),
        ("underscored", "serve/bad.py", "from ray_slo.core.text import _cut", "_cut"),
        ("underscored", "serve/bad.py", "from ray_slo.core import text\ntext._cut()", "text._cut"),
        ("heavy", "core/bad.py", "import torch", "torch"),
        ("clocks", "core/bad.py", "def f():\n    from time import monotonic", "imports time"),
        ("clocks", "policies/bad.py", "import random", "imports random"),
        ("clocks", "record/bad.py", "import time", "time"),
        ("heavy", "policies/bad.py", "from pandas import DataFrame", "pandas"),
        ("sizes", "core/bad.py", "\n" * 501, "501 lines"),
        ("sizes", "core/bad.py", f"def f():\n{LONG}", "f has 61 lines"),
        ("sizes", "core/bad.py", f"class C:\n{6 * LONG}", "C has"),
    ],
)
def test_what_breaks_it_is_found(tmp_path, rule, file, source, says):
    for folder in ("core", "planning", "policies", "record", "serve", "load", "cli"):
        (tmp_path / folder).mkdir()
    (tmp_path / "core" / "text.py").write_text("def _cut(): ...")
    assert list(getattr(House(tmp_path), rule)()) == []
    (tmp_path / file).write_text(source)
    (found,) = getattr(House(tmp_path), rule)()
    assert says in found


def test_what_is_allowed_passes(tmp_path):
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "good.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import torch\n    from ray import serve\n"
        "def f():\n    import ray\n    from ray_slo.serve import build_app\n"
    )
    good = House(tmp_path)
    assert [list(getattr(good, rule)()) for rule in RULES] == [[]] * len(RULES)


def test_a_folder_of_serve_has_few_modules(tmp_path):
    (tmp_path / "serve").mkdir()
    for i in range(13):
        (tmp_path / "serve" / f"m{i}.py").touch()
    assert list(House(tmp_path).folders()) == ["serve has 13 modules, at most 12"]
