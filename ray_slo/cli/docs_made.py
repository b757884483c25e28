"""Parts of the documentation that are generated from the code: lists of fields, errors, commands.

A page has a marker at the place of such a part: `<!-- fields: module.Class -->`, `<!-- errors -->`
or `<!-- commands -->`. `docs/hooks.py` replaces the markers for the site, and `ray-slo docs` for
the terminal.
"""

from __future__ import annotations

import enum
import re
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import TypeAdapter


def described(model: type[Any]) -> dict[str, str]:
    """Return the descriptions of a class's fields, from its docstring and those of its bases."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        _, _, section = (cls.__doc__ or "").partition("Attributes:\n")
        indent = len(section) - len(section.lstrip(" "))
        for entry in re.split(rf"\n(?= {{{indent}}}\S)", section.split("\n\n")[0].rstrip()):
            names, colon, meaning = entry.strip().partition(":")
            if colon and re.fullmatch(r"[\w, ]+", names):
                said = " ".join(meaning.split())
                found |= dict.fromkeys(re.split(r", *", names), said)
    return found


def type_name(annotation: Any) -> str:
    """Return a type in the words of the author of a config."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in (None, type(None)):
        return "null"
    if annotation is Any:
        return "any"
    if origin is Callable:
        return "function or class"
    if origin is Literal:
        return ", ".join(f'"{choice}"' for choice in args)
    if origin in (Union, types.UnionType):
        kinds = map(type_name, args)
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if hasattr(annotation, "__metadata__"):
        return type_name(annotation.__origin__)
    if origin in (list, tuple, frozenset, set):
        return f"list of {type_name(args[0])}" if args else "list"
    if origin is dict:
        return f"{type_name(args[1])} by name" if type_name(args[1]) != "any" else "mapping"
    simple = {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}
    if annotation in simple:
        return simple[annotation]
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return ", ".join(f'"{choice.value}"' for choice in annotation)
    name = getattr(annotation, "__name__", str(annotation))
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removesuffix("Spec")).lower()


def default_of(field: Any) -> str:
    """Return a field's default as YAML. It is empty if there is none."""
    if field.is_required():
        return "required"
    value = TypeAdapter(Any).dump_python(
        field.get_default(call_default_factory=True), mode="json", exclude_unset=True
    )
    if value is None or value in ({}, [], ""):
        return ""
    return f"default `{yaml.safe_dump(value, default_flow_style=True, width=1000).splitlines()[0]}`"


def limits(field: Any) -> str:
    """Return the bounds of a field that pydantic checks, as text."""
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


def fields_list(path: str) -> str:
    """Return a list of the fields of a pydantic model, in Markdown.

    Raises:
        LookupError: the docstring does not explain a field.
    """
    module, _, name = path.rpartition(".")
    model = getattr(import_module(module), name)
    said = described(model)
    entries = []
    for attribute, info in model.model_fields.items():
        field = info.alias or attribute
        meaning = info.description or said.get(field)
        if field == "kind":
            meaning = "which process it is"
        if not meaning:
            raise LookupError(f"{path}.{field}: its docstring does not say what it means")
        facts = [type_name(info.annotation) + limits(info), default_of(info)]
        entries.append(f"* **`{field}`**: {', '.join(filter(None, facts))}\n<br>{meaning}")
    return "\n".join(entries)


def errors() -> str:
    """Return a table of the errors with their HTTP status and gRPC code, in Markdown."""
    from ray_slo.serve import errors as module

    rows = ["| error | HTTP | gRPC | reason | |", "|---|---|---|---|---|"]
    for name in module.__all__:
        error = getattr(module, name)
        if name in ("SLOError", "ConfigError"):
            continue  # the base class of all, and an error that is raised before anything runs
        told = " ".join((error.__doc__ or "").split("\n\n")[0].split())
        told = re.split(r"(?<=\.) (?=HTTP )", told)[0]
        reasons = f"`{error.default_reason}`" + (", …" if name == "RefusedEarly" else "")
        rows.append(
            f"| `{name}` | {error.http_status} | `{error.grpc_code}` | {reasons} | {told} |"
        )
    return "\n".join(rows)


def commands() -> str:
    """Return the reference of the command line, from Typer's generator, in Markdown."""
    import typer
    from typer.cli import get_docs_for_click

    from ray_slo.cli import app

    command: Any = typer.main.get_command(app)
    for one in command.commands.values():
        one.short_help = (one.help or "").split("\n")[0]  # otherwise Typer truncates it
    context = typer.Context(command, info_name="ray-slo")
    made = get_docs_for_click(obj=command, ctx=context, name="ray-slo", indent=0)
    return made.split("\n", 1)[1]  # the page has a title


def filled_in(markdown: str) -> str:
    """Return a page with its markers replaced."""
    markdown = re.sub(r"<!-- fields: (\S+) -->", lambda m: fields_list(m[1]), markdown)
    markdown = re.sub(r"<!-- errors -->", lambda _: errors(), markdown)
    return re.sub(r"<!-- commands -->", lambda _: commands(), markdown)
