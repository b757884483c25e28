"""Messages about mistakes in a document: field, value, valid choices. Imports no Ray."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ray_slo.core.hints import KINDS, choices, parts_of, wanted, wanted_bounds
from ray_slo.core.names import nearest
from ray_slo.core.pages import SEE, anchor_of, see
from ray_slo.core.text import clipped, quoted

T = TypeVar("T", bound=BaseModel)
MAX_ITEMS = 1_000_000  # of a document; a few nested aliases make billions
_KEY = 200  # characters of a field's place
_QUOTE = "'"
_KEY_LOC = ("[key]",)  # ends pydantic's place of a key that is wrong itself


class Misplaced(ValueError):
    """A mistake below the place whose validator finds it.

    Args:
        at: the field, as seen from that place: "tasks.name.parent".
        said: what is wrong with it.
    """

    def __init__(self, at: str, said: str) -> None:
        super().__init__(at, said)
        self.at, self.said = at, said

    def __str__(self) -> str:
        return f"{self.at}: {self.said}"


@contextmanager
def placed(at: str, instead_of: str = "") -> Iterator[None]:
    """Put the place before the message of a ValueError that is raised inside, or in place of
    `instead_of`, with which the message begins."""
    try:
        yield
    except ValueError as error:
        if instead_of and (said := str(error)).startswith(f"{instead_of}: "):
            raise Misplaced(at, said.removeprefix(f"{instead_of}: ")) from None
        if not isinstance(error, Misplaced):
            raise Misplaced(at, str(error)) from None
        raise Misplaced(f"{at}.{error.at}", error.said) from None


def validated(model: type[T], data: Any, at: str = "", base: Path = Path()) -> T:
    """`data` as a `model`.

    Args:
        at: where it is written in the whole document, for the messages.
        base: folder of the document, from which it names files.

    Raises:
        ValueError: one line per mistake: field, value, valid choices.
    """
    if (items := _items(data, {})) > MAX_ITEMS:
        where = f"{at}: " if at else ""
        raise ValueError(
            f"{where}with what its aliases repeat, it has {items:.3g} items, at most {MAX_ITEMS:,}"
        )
    try:
        return model.model_validate(data, context={"base": base})
    except ValidationError as error:
        lines = explained(error, model, data, at)
        places = [_keys(e, data) for e in _relevant(error.errors(), data)]
        lines += see(_section(model, place) for place in places)
        raise ValueError("\n".join(lines)) from None


def _items(value: Any, known: dict[int, float]) -> float:
    """Number of items in a document, where one that is there several times counts as often."""
    if not isinstance(value, dict | list | tuple):
        return 1.0
    if id(value) not in known:
        known[id(value)] = 1.0  # for a list that contains itself
        parts = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1.0 + sum(_items(part, known) for part in parts)
    return known[id(value)]


@contextmanager
def explaining(model: type[BaseModel]) -> Iterator[None]:
    """Add a line to the message of a ValueError that is raised inside. It names the section of the
    docs on the field with which the message begins. `model`: the model of the whole document."""
    try:
        yield
    except ValueError as error:
        lines = str(error).splitlines()
        if not any(line.startswith(SEE) for line in lines):
            heads = [line.split(":")[0].split(" ")[0] for line in lines]
            lines += see(_section(model, head.split(".")) for head in heads)
        raise ValueError("\n".join(lines)) from None


def _section(model: type[BaseModel], keys: Sequence[Any]) -> str | None:
    """The section of the docs on a field, or on the nearest field above it."""
    found = anchor_of(model)
    for i in range(1, len(keys) + 1):
        owners = _models(_hints_at(model, None, keys[:i]), None)
        found = next((anchor for m in owners if (anchor := anchor_of(m))), found)
    return found


def explained(error: ValidationError, model: type[BaseModel], data: Any, at: str = "") -> list[str]:
    """One line per mistake in `data`, which should be a `model`. `at`: where it is written."""
    listed: set[tuple[Any, ...]] = set()
    return [_explain(model, data, e, listed, at) for e in _relevant(error.errors(), data)]


def _relevant(errors: Sequence[Any], data: Any) -> Iterator[Any]:
    """The errors to report: if a field has several valid forms, those of the most similar one."""
    unions: dict[tuple[Any, ...], dict[Any, list[Any]]] = {}
    for error in errors:
        point, branch = _branch(error, data)
        unions.setdefault(point, {}).setdefault(branch, []).append(error)
    for branches in unions.values():
        yield from min(branches.values(), key=_unlike)


def _unlike(errors: Sequence[Any]) -> tuple[int, int]:
    """Sort key: the difference of a value from a branch of a union; less if the mistake is deep."""
    wrong_kind = sum(e["type"].endswith("_type") for e in errors)
    return wrong_kind, -max(len(e["loc"]) for e in errors)


def _branch(error: Any, data: Any) -> tuple[tuple[Any, ...], Any]:
    """The first place where pydantic names a branch of a union and not a key, and that branch."""
    loc = error["loc"]
    for i, key in enumerate(loc):
        inside, data = _step(data, key)
        if not inside and not (error["type"] == "missing" and i == len(loc) - 1):
            return tuple(loc[:i]), key
    return tuple(loc), None


def _step(data: Any, key: Any) -> tuple[bool, Any]:
    """Whether `key` is in `data`, and its value; without it, `data` itself."""
    if isinstance(data, Mapping) and key in data:
        return True, data[key]
    if isinstance(data, Sequence) and not isinstance(data, str) and isinstance(key, int):
        return (True, data[key]) if 0 <= key < len(data) else (False, data)
    return False, data


def _keys(error: Any, data: Any) -> tuple[Any, ...]:
    """The place of an error, without pydantic's names of branches of unions."""
    keys, loc = [], error["loc"]
    for i, key in enumerate(loc):
        inside, data = _step(data, key)
        if inside or (error["type"] == "missing" and i == len(loc) - 1):
            keys.append(key)
    return tuple(keys)


def _explain(
    model: type[BaseModel], data: Any, error: Any, listed: set[tuple[Any, ...]], at: str
) -> str:
    """The message for one error. `listed`: places whose valid keys were already listed."""
    kind, keys, context = error["type"], _keys(error, data), error.get("ctx", {})
    is_key = error["loc"][-1:] == _KEY_LOC
    if is_key:
        keys = _keys({**error, "loc": error["loc"][:-2]}, data)
    key = [_shown_key(error["input"])] if is_key else []
    path = clipped(".".join(filter(None, [at, *map(_shown_key, keys), *key])), _KEY)
    if kind == "extra_forbidden":
        return f"{path}: {_unknown_key(model, data, keys, listed)}"
    if kind == "union_tag_not_found":
        field, valid = context["discriminator"].strip(_QUOTE), _tags(model, data, keys)
        return f"{path}: {field} is required; it must be one of {', '.join(valid)}"
    if kind == "union_tag_invalid":
        expected = context["expected_tags"].replace(_QUOTE, "")
        hint = nearest(context["tag"], expected.split(", "))
        field, tag = context["discriminator"].strip(_QUOTE), quoted(context["tag"])
        return f"{path}.{field}: must be one of {expected}, got {tag}{hint}"
    if isinstance(own := context.get("error"), Misplaced):
        path, said = f"{path}.{own.at}".removeprefix("."), own.said
    else:
        hints = _hints_at(model, data, keys)
        if is_key:
            hints = [get_args(p)[0] for h in hints for p, _ in parts_of(h) if len(get_args(p)) == 2]
        said = problem(hints, error)
    return f"{path}: {said}" if path else said


def _shown_key(key: Any) -> str:
    return key if isinstance(key, str) else quoted(key)


def problem(hints: Sequence[Any], error: Any) -> str:
    """The message about a wrong value, without its place.

    Args:
        hints: type hints of the valid values.
        error: one of pydantic's `errors()`.
    """
    kind, given = error["type"], error["input"]
    words = " or ".join(dict.fromkeys(filter(None, map(wanted, hints))))
    limits = next((said for hint in hints if (said := wanted_bounds(hint))), "")
    got = f", got {quoted(given)}"
    if kind == "value_error":
        said = error["msg"].removeprefix("Value error, ")
        shown = isinstance(given, Mapping) or quoted(given) in said or "got " in said
        return said if shown else f"{said}{got}"
    if kind == "missing":
        return f"required; it must be {words}" if words else "required"
    if kind == "invalid_key" or error["loc"][-1:] == _KEY_LOC:
        if kind != "invalid_key" and words != KINDS[str]:
            return f"the key must be {words}{got}"
        return f'the key must be {KINDS[str]}{got}; write it in quotes: "{quoted(given)}"'
    if kind.startswith(("greater_than", "less_than")) and limits:
        return f"must be {limits}{got}"
    if kind == "finite_number":
        of = " of" if limits.startswith("at ") else ""
        return f"must be a finite number{f'{of} {limits}' if limits else ''}{got}"
    if kind.endswith("too_short"):
        return f"must not be empty{got}"
    valid = [str(c) for hint in hints for c in choices(hint)]
    hint = nearest(given, valid) if isinstance(given, str) else ""
    if words:
        return f"must be {words}{got}{hint}"
    return f"{error['msg'].replace('Input should', 'It should')}{got}{hint}"


def _unknown_key(
    model: type[BaseModel], data: Any, keys: Sequence[Any], listed: set[tuple[Any, ...]]
) -> str:
    owners, place = _owners(model, data, keys[:-1]), tuple(keys[:-1])
    told = [said for m in owners if (said := getattr(m, "instead", {}).get(keys[-1]))]
    if told:
        return str(told[0])
    valid = sorted({field.alias or n for m in owners for n, field in m.model_fields.items()})
    known = f"; valid keys are {', '.join(valid)}" if place not in listed else ""
    listed.add(place)
    return f"unknown key{nearest(str(keys[-1]), valid)}{known}"


def _owners(model: type[BaseModel], data: Any, keys: Sequence[Any]) -> list[type[BaseModel]]:
    """The models whose fields are valid at `keys`."""
    return _models(_hints_at(model, data, keys), _at(data, keys))


def _tags(model: type[BaseModel], data: Any, keys: Sequence[Any]) -> list[str]:
    """The valid kinds at `keys`."""
    found = _models(_hints_at(model, data, keys), None)
    return list(dict.fromkeys(str(tag) for m in found for tag in _kinds(m)))


def _hints_at(model: type[BaseModel], data: Any, keys: Sequence[Any]) -> list[Any]:
    """The type hints of the values that are valid at `keys`."""
    hints: list[Any] = [model]
    for i, key in enumerate(keys):
        inner: list[Any] = []
        for owner in _models(hints, _at(data, keys[:i])):
            for name, field in owner.model_fields.items():
                if key in (name, field.alias):
                    whole = (field.annotation, *field.metadata)
                    inner.append(Annotated[whole] if field.metadata else field.annotation)
        for part, _ in (found for hint in hints if not inner for found in parts_of(hint)):
            origin, args = get_origin(part), get_args(part)
            if inspect.isclass(origin) and args and issubclass(origin, Collection):
                inner.append(args[1] if issubclass(origin, Mapping) else args[0])
        hints = inner
    return hints


def _at(data: Any, keys: Sequence[Any]) -> Any:
    for key in keys:
        inside, data = _step(data, key)
        if not inside:
            return None
    return data


def _models(hints: Sequence[Any], data: Any) -> list[type[BaseModel]]:
    """The models among type hints; if they have kinds, the model of the kind that `data` names."""
    parts = [part for hint in hints for part, _ in parts_of(hint)]
    found = [p for p in parts if inspect.isclass(p) and issubclass(p, BaseModel)]
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return [m for m in found if kind in _kinds(m)] or found


def _kinds(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field else ()
