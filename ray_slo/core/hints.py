"""Describe the values that a type hint allows: kind, choices, bounds. Imports no Ray."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

KINDS: dict[Any, str] = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "a text",
    NoneType: "null",
}
_BOUNDS = {Gt: ("gt", "above"), Ge: ("ge", "at least"), Le: ("le", "at most"), Lt: ("lt", "below")}


def parts_of(hint: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The alternatives of a union: each without its annotations, and the annotations."""
    about: list[Any] = []
    while get_origin(hint) is Annotated:
        hint, *more = get_args(hint)
        about += [m for a in more for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
    if get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            for kind, own in parts_of(part):
                yield kind, own + about
    else:
        yield hint, about


def bounds(about: Collection[Any]) -> str:
    """The bounds among annotations, in words; "" if there are none."""
    found = {
        kind: f"{getattr(rule, at):.15g}"
        for rule in about
        for kind, (at, _) in _BOUNDS.items()
        if isinstance(rule, kind) and getattr(rule, at) not in (float("inf"), float("-inf"))
    }
    if found.keys() == {Ge, Le}:
        return f"from {found[Ge]} to {found[Le]}"
    return " and ".join(f"{_BOUNDS[kind][1]} {value}" for kind, value in found.items())


def choices(hint: Any) -> list[Any]:
    """The values that a hint lists."""
    return [c for part, _ in parts_of(hint) if get_origin(part) is Literal for c in get_args(part)]


def wanted(hint: Any) -> str:
    """The allowed values in words, such as "a number above 0 or null"; "" if all are allowed."""
    words: list[str] = []
    for part, about in parts_of(hint):
        said = _kind(part)
        if not said:
            return ""
        if part in (int, float) and (limits := bounds(about)):
            said += f" of {limits}" if limits.startswith("at ") else f" {limits}"
        if said not in words:
            words.append(said)
    return " or ".join(words)


def wanted_bounds(hint: Any) -> str:
    """The bounds of an allowed number, in words; "" if there are none."""
    return next((said for _, about in parts_of(hint) if (said := bounds(about))), "")


def _kind(part: Any) -> str:
    origin = get_origin(part) or part
    if part in KINDS:
        return KINDS[part]
    if origin is Literal:
        values = get_args(part)
        return f"one of {', '.join(map(str, values))}" if len(values) > 1 else repr(values[0])
    if origin is Callable:
        return "a function or class"
    if not inspect.isclass(origin):
        return ""
    if origin in (list, tuple, set, frozenset):
        return "a list"
    if issubclass(origin, Mapping | BaseModel):
        return "a mapping"
    return "a path" if issubclass(origin, Path) else ""
