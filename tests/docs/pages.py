"""The code blocks of the README and of docs/, and how each is tried.

* ``python`` is executed, a page's blocks in one namespace from top to bottom; what follows as
  ``text`` is what it prints. An application that a block deploys goes when a later one deploys.
* ``yaml`` is read by what reads such a file. ``title="NAME"`` makes any block a file.
* ``sh`` is checked command by command: options, files, targets. It is run where it is cheap, where
  its output follows, and all of it, in order, on a page that says `<!-- followed -->`. In that
  output `…` stands for anything, and numbers may differ.
* A fence without a language is a drawing.

In a comment before a block: `<!-- not run: reason -->`; `<!-- with: {yaml} -->` completes a YAML
fragment. `<!-- setup` and Python code, up to `-->`, is run and not shown.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import tomllib
import typer
import yaml
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from ray_slo.cli import app as cli

ROOT = Path(__file__).parents[2]
LOG = "/var/log/slo"  # what pages call a folder with a decision log
URL = "http://127.0.0.1:8000"
GRPC = "127.0.0.1:9000"
SOME_MODEL = {
    "models": {"m": {"callable": "examples.groups:Scale", "args": [2], "latency_slo_ms": 500}}
}
OUTPUT = ("text", "http", "json")
CHEAP = ("dashboards", "replay", "report")  # commands that are always run


class Unknown(Exception):
    """A block or a command that nothing here knows how to try."""


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: path from the repository's root.
        line: where it begins.
        title: name of the file that it is to be saved as.
        not_run: why it is not tried.
        extra: YAML that completes it.
    """

    page: str
    line: int
    language: str
    code: str
    title: str | None = None
    not_run: str | None = None
    extra: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(path: Path) -> list[Block]:
    """The code blocks of a page, those of its `<!-- setup -->` comments, too."""
    page = path.relative_to(ROOT).as_posix()
    found: list[Block] = []
    not_run, extra = None, ""
    for token in MarkdownIt().parse(path.read_text(encoding="utf-8")):
        if token.type == "html_block":
            line = token.map[0] + 1
            if said := re.search(r"<!-- not run: (.+?) -->", token.content, re.DOTALL):
                not_run = " ".join(said[1].split())
            if said := re.search(r"<!-- with: (.+?) -->", token.content, re.DOTALL):
                extra = said[1]
            setups = re.findall(r"<!-- setup\n(.+?)-->", token.content, re.DOTALL)
            found += [Block(page, line, "python", code) for code in setups]
        elif token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="(.+?)"', rest)
            place = (page, token.map[0] + 1, language, token.content)
            found.append(Block(*place, title and title[1], not_run, extra))
            not_run, extra = None, ""
    return found


def is_followed(path: Path) -> bool:
    return "<!-- followed -->" in path.read_text(encoding="utf-8")


def needs_ray(path: Path) -> bool:
    """Whether a page's code needs a running Ray."""
    code = [b.code for b in blocks(path) if b.language == "python" and not b.not_run]
    return is_followed(path) or bool(re.search(r"\bserve\.(run|start)\(", "\n".join(code)))


PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]


# -- what a block says -------------------------------------------------------------------------


def commands(code: str) -> list[list[str]]:
    """The commands of a ``sh`` block, or of the lines with `$` of a ``console`` one."""
    lines = code.replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words for words in split if words]


def console(code: str) -> tuple[str, str]:
    """Commands and output of a ``console`` block."""
    said = code.splitlines()
    typed = [line[2:] for line in said if line.startswith("$ ")]
    return "\n".join(typed), "\n".join(line for line in said if not line.startswith("$ "))


def trimmed(said: str) -> list[str]:
    return [line.rstrip() for line in said.splitlines()]


def looks_like(printed: str, said: str) -> bool:
    """Whether an output is what a page says: `…` is anything, numbers and widths may differ."""
    number = r"(?:[-+]?\d[\d.,:T-]*|–)"

    def plain(text: str) -> str:
        return re.sub(r"[\s━─┏┓┡┩└┘├┤┳╇┴┬┼╋┃│]+", " ", text)

    def piece(text: str) -> re.Pattern[str]:
        words = re.findall(rf"[A-Za-z_]\w*|{number}|.", text.strip())
        made = [number if re.fullmatch(number, word) else re.escape(word) for word in words]
        return re.compile("".join(made))

    at, printed = 0, plain(printed)
    for text in plain(said).split("…"):
        found = piece(text).search(printed, at)
        if found is None:
            return False
        at = found.end()
    return True


# -- YAML --------------------------------------------------------------------------------------


def read_yaml(block: Block, folder: Path, in_cluster: bool = False) -> None:
    """Have a YAML block read by what reads such a file.

    Args:
        in_cluster: it is for pods, which must be reached from others.
    """
    from pydantic import ValidationError
    from ray.serve.schema import ServeDeploySchema, gRPCOptionsSchema

    from ray_slo.serve import build_app
    from ray_slo.serve.config.app import AppConfig
    from ray_slo.simulation.sizing import PlanSpec
    from ray_slo.simulation.spec import SimulationSpec

    given: dict[str, Any]
    *_, given = documents = list(yaml.safe_load_all(block.code))
    whole_file = "applications" in given
    given |= yaml.safe_load(block.extra) if block.extra else {}
    if "apiVersion" in given:
        for manifest in documents:
            assert manifest["kind"] and manifest["metadata"]["name"]
            if served := manifest.get("spec", {}).get("serveConfigV2"):
                read_yaml(replace(block, code=served), folder, in_cluster=True)
        return
    if whole_file and not in_cluster:
        host = given.get("http_options", {}).get("host")
        assert host == "127.0.0.1", f"{block.where}: a reader who starts it is open to the network"
    if "args" in given and "applications" not in given:
        given = {"applications": [{"import_path": "ray_slo.serve:build_app", **given}]}
    if "applications" in given:
        for application in ServeDeploySchema.model_validate(given).applications:
            assert application.import_path == "ray_slo.serve:build_app", block.where
            assert build_app(application.args)
    elif "grpc_options" in given:
        options = gRPCOptionsSchema.model_validate(given["grpc_options"])
        for function in options.grpc_servicer_functions:
            imported(function)
    elif "cluster" in given:
        is_plan = bool({"policies", "pool", "accuracy_floor", "bad_rate"} & set(given))
        (PlanSpec if is_plan else SimulationSpec).model_validate(given)
    elif set(given) <= set(AppConfig.model_fields):
        known = {"models", "pipeline", "pipelines"} & set(given)
        assert build_app(given if known else SOME_MODEL | given)
    elif block.title == "types.yaml":
        from ray_slo.planning.catalogue import load_catalogue

        try:
            load_catalogue(folder / block.title)
        except ValidationError as error:
            raise AssertionError(block.where) from error
    else:
        raise Unknown(f"{block.where}: YAML with {', '.join(given)}")


def imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


# -- a reader ----------------------------------------------------------------------------------


class Reader:
    """Goes through a page as its reader would.

    Args:
        folder: where files of the page go, and what its commands write.
        log: folder with a decision log, for pages that speak of one.
        cluster: a running Ray, for pages that need one.
    """

    def __init__(self, path: Path, folder: Path, log: Path, cluster: Any = None) -> None:
        self.path, self.folder, self.cluster = path, folder, cluster
        self.log = log
        self.followed = is_followed(path)
        self.names: dict[str, Any] = {"__name__": "page"}
        self.said = ""  # by the last block that printed
        self.exact = True
        self.was_run = False
        self.before: set[str] = set()  # applications that are not the page's

    def read(self) -> None:
        """Try every block, in order.

        Raises:
            AssertionError, Unknown: naming the block.
        """
        todo = blocks(self.path)
        for block, after in zip(todo, [*todo, None][1:], strict=True):
            if block.not_run:
                self.was_run = False
                continue
            try:
                self.block(block, after)
            except BaseException as error:
                error.add_note(f"in the block at {block.where}")
                raise

    def block(self, block: Block, after: Block | None) -> None:
        code = self.placed(block.code)
        if block.title:
            (self.folder / block.title).write_text(code)
        if block.language == "python" and block.title:
            compile(code, block.where, "exec")
        elif block.language == "python":
            self.python(code, block)
        elif block.language == "yaml":
            read_yaml(block, self.folder)
        elif block.language == "sh":
            has_output = after is not None and after.language in OUTPUT
            self.sh(code, has_output and not after.not_run)
        elif block.language == "console":
            typed, said = console(code)
            self.sh(typed, True)
            assert looks_like(self.said, said), f"printed:\n{self.said}"
        elif block.language in OUTPUT:
            self.output(block)
        elif block.language == "protobuf":
            proto = (ROOT / "ray_slo/serve/protos/inference.proto").read_text()
            assert {line.strip() for line in code.splitlines()} <= {
                line.strip() for line in proto.splitlines()
            }
        elif block.language:
            raise Unknown(f"{block.where}: a block of {block.language}")

    def placed(self, code: str) -> str:
        """With the folders, ports and addresses of this run; what may last, shorter."""
        code = code.replace(LOG, str(self.log))
        if self.followed:
            code = re.sub(r"--duration-s \d+", "--duration-s 2", code)
            code = re.sub(r"--seconds \d+", "--seconds 1", code)
        if self.cluster is not None:
            code = code.replace(URL, self.cluster.url).replace(GRPC, self.cluster.grpc)
        return code

    def python(self, code: str, block: Block) -> None:
        if "serve.run(" in code:
            self.leave()
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            # A module that cannot be imported: its classes travel by value, as a script's do.
            source = "\n" * block.line + code  # for line numbers
            exec(compile(source, block.page, "exec"), self.names)
        self.said, self.exact, self.was_run = out.getvalue(), True, True

    def output(self, block: Block) -> None:
        assert self.was_run, "output of a block that is not run"
        if self.exact:
            assert trimmed(self.said) == trimmed(block.code)
        else:
            assert looks_like(self.said, block.code), f"printed:\n{self.said}"

    def leave(self) -> None:
        """Delete the page's applications."""
        if self.cluster is None:
            return
        from ray import serve

        for name in set(serve.status().applications) - self.before:
            serve.delete(name)

    # -- commands ------------------------------------------------------------------------------

    def sh(self, code: str, has_output: bool) -> None:
        said = []
        self.was_run = False
        for line in filter(None, code.replace("\\\n", " ").splitlines()):
            for words in commands(line):
                program = words[0].removeprefix(".venv/bin/").replace("-", "_").replace(".", "_")
                how = getattr(self, f"_{program}", None)
                if how is None:
                    raise Unknown(f"the command {words[0]!r}")
                said.append(how(words[1:], has_output, line))
        exact = not self.followed and " plan " in code  # a simulation: the same to the last digit
        printed = [part for part in said if part is not None]
        self.was_run = bool(printed) or self.followed
        self.said, self.exact = "".join(printed), exact

    def _ray_slo(self, args: list[str], has_output: bool, line: str) -> str | None:
        command = typer.main.get_command(cli)
        name, *rest = args
        chosen = command.commands[name]
        chosen.make_context(name, list(rest)).close()  # options and arguments are known
        for word in rest:
            if re.fullmatch(r"configs/\S+\.yaml|policies/\S+\.yaml", word):
                assert (ROOT / word).exists(), word
            if re.fullmatch(r"[\w.]+:\w+", word) and not self.followed:
                imported(word)
        if name == "run":
            return self._serve(args)
        if name == "plan" and rest[0].endswith(".yaml") and not (has_output or self.followed):
            self.question(rest)
        if name == "simulate" and rest[0].endswith(".yaml") and not (has_output or self.followed):
            self.simulation(rest[0])
        logs = name not in ("replay", "report") or str(self.log) in rest
        if not (self.followed or has_output or (name in CHEAP and logs)):
            return None
        if name == "status" and self.followed:
            args = [*args, "--address", self.cluster.address]
        done = CliRunner().invoke(cli, args)
        assert done.exit_code == 0, f"{line}\n{done.output}"
        return done.output

    @staticmethod
    def question(rest: list[str]) -> None:
        """A plan's spec and its changes."""
        from ray_slo.core.documents import read_yaml as document
        from ray_slo.simulation.application_plan import plan_application
        from ray_slo.simulation.application_spec import ApplicationSpec
        from ray_slo.simulation.sizing import PlanSpec, what_if

        said = document(ROOT / rest[0])
        if "workloads" in said:
            plan = plan_application(ApplicationSpec.model_validate(said), ROOT / "configs").plan
            assert plan.slots, rest
            return
        question = PlanSpec.model_validate(said).build(ROOT / "configs")
        for option, change in itertools.pairwise(rest):
            if option == "--what-if":
                assert what_if(question, change) != question

    def simulation(self, path: str) -> None:
        """A simulation's spec. `test_policies` compares the figures of those that have some."""
        from ray_slo.core.documents import read_yaml as document
        from ray_slo.simulation.application_spec import ApplicationSpec
        from ray_slo.simulation.spec import SimulationSpec

        said = document(next(p for p in (self.folder / path, ROOT / path) if p.exists()))
        if "applications" in said:  # `tests/cli/test_served.py` simulates such files
            read_yaml(Block(path, 1, "yaml", yaml.safe_dump(said)), self.folder)
        else:
            (ApplicationSpec if "workloads" in said else SimulationSpec).model_validate(said)

    def _make(self, args: list[str], *_: Any) -> None:
        for target in args:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.M), (
                target
            )

    def _serve(self, args: list[str], *_: Any) -> None:
        what, target = args[0], args[1]
        assert what in ("run", "deploy", "build"), what
        if target.endswith(".yaml"):
            file = next(p for p in (self.folder / target, ROOT / target) if p.exists())
            applications = yaml.safe_load(file.read_text())["applications"]
        if not self.followed:
            return
        from ray import serve

        from ray_slo.serve import build_app

        self.leave()
        if target.endswith(".yaml"):
            for application in applications:
                assert application["import_path"] == "ray_slo.serve:build_app"
                serve.run(build_app(application["args"]), name=application["name"])
        else:
            module = target.partition(":")[0]
            sys.modules.pop(module, None)
            importlib.invalidate_caches()
            serve.run(imported(target))

    def _curl(self, args: list[str], *_: Any) -> str | None:
        assert any(httpx.URL(a).host == "127.0.0.1" for a in args if a.startswith("http"))
        if not self.followed or shutil.which("curl") is None:
            return None
        return subprocess.run(
            ["curl", *args], capture_output=True, text=True, timeout=30, check=True
        ).stdout

    def _echo(self, _args: list[str], _has_output: bool, line: str) -> None:
        if self.followed:
            subprocess.run(line, shell=True, check=True, cwd=self.folder)

    def _export(self, args: list[str], *_: Any) -> None:
        for name, _, value in (arg.partition("=") for arg in args):
            assert re.fullmatch(r"\w+", name), name
            if re.fullmatch(r"[\w.]+:\w+", value):
                imported(value)

    def _pip(self, args: list[str], *_: Any) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert args[0] == "install"
        for named in re.findall(r"ray-slo\[([\w,]+)\]", " ".join(args)):
            assert set(named.split(",")) <= set(extras["optional-dependencies"])

    def _kubectl(self, args: list[str], *_: Any) -> None:
        """A command that is not ours: the files that it names are there."""
        for word in args:
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)*\.(ya?ml|json|py)", word):
                assert (ROOT / word).exists() or (self.folder / word).exists(), word

    _helm = _docker = _kind = _ray = _promtool = _kubectl

    def _python(self, args: list[str], *_: Any) -> None:
        if args[:2] == ["-m", "benchmarks"]:
            from benchmarks.harness.registry import PROGRAMS

            assert not args[2:] or args[2].startswith("-") or args[2] in PROGRAMS, args[2]
        elif args[0] == "-m":
            assert importlib.util.find_spec(args[1]), args[1]
        else:
            assert (ROOT / args[0]).exists(), args[0]


@contextlib.contextmanager
def at(folder: Path) -> Any:
    """In a folder with the repository's configs beside what the page makes."""
    for name in ("configs", "policies", "examples", "deployments"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    before = Path.cwd()
    os.chdir(folder)
    os.environ["COLUMNS"] = "100"
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.environ.pop("COLUMNS")
        os.chdir(before)
