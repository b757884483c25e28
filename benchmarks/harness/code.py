"""The code mark of a program: a hash of all code that its figures depend on.

If the mark has not changed, a saved run need not be repeated. The mark covers the program's module,
what it imports of `benchmarks` and `ray_slo`, and the policies that its modules of `benchmarks`
name. For a live program and `mutants`, it covers all of `ray_slo`. Comments, docstrings and `ASKED`
do not count. The mark is the same only in the same release of Python, such as 3.11.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ROOMS = ("benchmarks", "ray_slo")
_REGISTRY = "ray_slo.policies.registry"
_COMPOSED, _COMPOSERS = "ray_slo.policies.composed", {"policy_for", "recipe_for", "compose"}
_REHEARSAL = "ray_slo.simulation.rehearsal"  # the engine imports it, but only `auto` uses it
_APART = {f"benchmarks.harness.{name}" for name in ("plots", "page", "readme", "results")}
_WHOLE = ("benchmarks.live.", "benchmarks.own.mutants")
"""Programs that run all of ray-slo, by the start of their module's name."""
_SAID = {"ASKED", "NAME", "SOURCE"}
_PATH = re.compile(r"(benchmarks|ray_slo)[\w.]*:\w+")
_DATA = {"benchmarks.zoos": "benchmarks/zoos", "benchmarks.harness.data": "benchmarks/data"}
"""By module that reads tables: the folder with these tables."""


@cache
def code_of(module: str) -> str:
    """Return the mark of a program, given its module."""
    digest = hashlib.sha256()
    for name in sorted(modules(module)):
        digest.update(f"{name}\0{_essence(name)}\0".encode())
        if folder := _DATA.get(name):
            for path in sorted((ROOT / folder).rglob("*.csv")):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def modules(module: str) -> set[str]:
    """Return all modules that a program's figures depend on, including its own."""
    from ray_slo.policies.registry import EXACT, POLICIES

    read: set[str] = set()
    strings: set[str] = set()
    waiting = [module]
    if module.startswith(_WHOLE):
        waiting += [_module(path) for path in (ROOT / "ray_slo").rglob("*.py")]
    while waiting:
        name = waiting.pop()
        if name not in read and name not in _APART and _source(name) is not None:
            read.add(name)
            waiting += [m for m in _imported(name) if name != _REGISTRY and m != _REHEARSAL]
            if name.startswith("benchmarks."):
                strings |= (said := _strings(name))
                waiting += [m for s in said if _PATH.fullmatch(s) for m in _meant(*s.split(":"))]
        if not waiting:
            auto = "auto" in strings or POLICIES["auto"].split(":")[0] in read
            tables = [POLICIES, EXACT] if "exact" in strings else [POLICIES]
            waiting = [of[p].split(":")[0] for of in tables for p in of if auto or p in strings]
            waiting += [_REHEARSAL] if auto else []
            waiting = [m for m in waiting if m not in read]
    return read


@cache
def _strings(module: str) -> frozenset[str]:
    nodes = ast.walk(_source(module) or ast.Module([], []))
    return frozenset(n.value for n in nodes if isinstance(n, ast.Constant) and _is_string(n))


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@cache
def _imported(module: str) -> tuple[str, ...]:
    """Return the modules that a module imports, and imported names, which may be modules."""
    found: dict[str, None] = {}
    for node in ast.walk(_source(module) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            found |= {alias.name: None for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found |= dict.fromkeys(_meant(node.module, alias.name))
                if alias.name in _COMPOSERS:
                    found[_COMPOSED] = None
    return tuple(found)


def _meant(module: str, name: str) -> Iterator[str]:
    """Yield what `from module import name` may read: modules, also those behind a re-export."""
    yield module
    yield f"{module}.{name}"
    if module.split(".")[0] in _ROOMS and (where := _gathered(_path(module)).get(name)):
        yield from _meant(where, name)


@cache
def _gathered(package: Path) -> dict[str, str]:
    """Return, by name, the module from which a package imports it."""
    init = _parsed(package / "__init__.py")
    return {
        alias.name: node.module
        for node in (ast.walk(init) if init else ())
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _path(module: str) -> Path:
    return ROOT.joinpath(*module.split("."))


def _source(module: str) -> ast.Module | None:
    """Return the syntax tree of a module.

    None if this repository has no such module, or if it is a package without code of its own.
    """
    if module.split(".")[0] not in _ROOMS:
        return None
    path = _path(module)
    if (tree := _parsed(path.with_suffix(".py"))) is not None:
        return tree
    tree = _parsed(path / "__init__.py")
    own = tree is not None and any(
        isinstance(n, ast.FunctionDef) and n.name not in ("__getattr__", "__dir__")
        for n in tree.body
    )
    return tree if own else None


@cache
def _parsed(path: Path) -> ast.Module | None:
    return ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else None


@cache
def _essence(module: str) -> str:
    """Return a text of a module's code, without what does not count, such as docstrings."""
    tree = _source(module) or ast.Module([], [])
    body = [
        node
        for node in tree.body
        if not (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in _SAID
        )
    ]
    return ast.dump(_Bare().visit(copy.deepcopy(ast.Module(body, []))))


class _Bare(ast.NodeTransformer):
    """Removes docstrings, which are statements that consist of a string."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if _is_string(node.value) else node
