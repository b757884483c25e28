"""The modules below a folder, parsed, with what they import: for tests of how they depend.

Every `import` counts, also inside functions, but not under `if TYPE_CHECKING:`.
"""

import ast
from typing import NamedTuple


class Import(NamedTuple):
    file: str  # below `ray_slo`
    line: int
    module: str
    names: tuple[str, ...]
    lazy: bool

    @property
    def room(self) -> str:
        return room_of(self.file)

    @property
    def package(self) -> str:
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def room_of(file):
    return "" if file == "__init__.py" else file.split("/")[0].removesuffix(".py")


def imports_of(file, tree):
    """Every import of a module, but for those under `if TYPE_CHECKING:`."""
    found = []

    def visit(node, lazy):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child, lazy)
            return
        if isinstance(node, ast.Import):
            found.extend(Import(file, node.lineno, a.name, (), lazy) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = tuple(alias.name for alias in node.names)
            found.append(Import(file, node.lineno, module, names, lazy))
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, lazy or inside)

    visit(tree, False)
    return found


class Modules:
    def __init__(self, root):
        self.sources = {p.relative_to(root).as_posix(): p.read_text() for p in root.rglob("*.py")}
        self.trees = {file: ast.parse(source) for file, source in self.sources.items()}
        self.imports = [i for file, tree in self.trees.items() for i in imports_of(file, tree)]

    def file_of(self, path):
        """The file of a module of `ray_slo`; None if there is none."""
        package, _, rest = path.partition(".")
        stem = rest.replace(".", "/")
        files = (f"{stem}.py", f"{stem}/__init__.py".removeprefix("/"))
        return next((f for f in files if package == "ray_slo" and f in self.sources), None)
