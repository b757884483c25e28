"""What is wrong with a document, in words: field, value, valid choices. Imports no Ray."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from ray_slo.core.names import nearest
from ray_slo.core.text import clipped, quoted

T = TypeVar("T", bound=BaseModel)
_KEY = 200  # characters of a field's place
_QUOTE = "'"
_NO_MAPPING = ("dict_type", "mapping_type", "model_type", "model_attributes_type")


def validated(model: type[T], data: Any) -> T:
    """`data` as a `model`.

    Raises:
        ValueError: one line per mistake: field, value, valid choices.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ValueError("\n".join(explained(error, model, data))) from None


def explained(error: ValidationError, model: type[BaseModel], data: Any) -> list[str]:
    """One line per mistake that kept `data` from being a `model`."""
    listed: set[tuple[Any, ...]] = set()
    return [_explain(model, data, e, listed) for e in _relevant(error.errors(), data)]


def _relevant(errors: Sequence[Any], data: Any) -> Iterator[Any]:
    """Of a field that may be this or that, only what keeps it from what it looks most like."""
    unions: dict[tuple[Any, ...], dict[Any, list[Any]]] = {}
    for error in errors:
        point, branch = _branch(error, data)
        unions.setdefault(point, {}).setdefault(branch, []).append(error)
    for branches in unions.values():
        yield from min(branches.values(), key=_unlike)


def _unlike(errors: Sequence[Any]) -> tuple[int, int]:
    """How far a branch of a union is from what was given; the deeper the mistake, the nearer."""
    wrong_kind = sum(e["type"].endswith("_type") for e in errors)
    return wrong_kind, -max(len(e["loc"]) for e in errors)


def _branch(error: Any, data: Any) -> tuple[tuple[Any, ...], Any]:
    """The first place at which pydantic names a branch of a union instead of a key; and which."""
    loc = error["loc"]
    for i, key in enumerate(loc):
        inside, data = _step(data, key)
        if not inside and not (error["type"] == "missing" and i == len(loc) - 1):
            return tuple(loc[:i]), key
    return tuple(loc), None


def _step(data: Any, key: Any) -> tuple[bool, Any]:
    """Whether `key` is in `data`, and what is there; else `data` itself."""
    if isinstance(data, Mapping) and key in data:
        return True, data[key]
    if isinstance(data, Sequence) and not isinstance(data, str) and isinstance(key, int):
        return (True, data[key]) if 0 <= key < len(data) else (False, data)
    return False, data


def _keys(error: Any, data: Any) -> tuple[Any, ...]:
    """Where an error is, without the names that pydantic gives to branches of unions."""
    keys, loc = [], error["loc"]
    for i, key in enumerate(loc):
        inside, data = _step(data, key)
        if inside or (error["type"] == "missing" and i == len(loc) - 1):
            keys.append(key)
    return tuple(keys)


def _explain(model: type[BaseModel], data: Any, error: Any, listed: set[tuple[Any, ...]]) -> str:
    """`listed`: where the valid keys were said; they are said once."""
    kind, keys, context = error["type"], _keys(error, data), error.get("ctx", {})
    path = clipped(".".join(str(key) for key in keys), _KEY)
    if kind == "extra_forbidden":
        owners = _owners(model, data, keys[:-1])
        told = [said for m in owners if (said := getattr(m, "instead", {}).get(keys[-1]))]
        if told:
            return f"{path}: {told[0]}"
        valid = sorted({name for m in owners for name in m.model_fields})
        known = f"; valid keys are {', '.join(valid)}" if keys[:-1] not in listed else ""
        listed.add(keys[:-1])
        return f"{path}: unknown key{nearest(str(keys[-1]), valid)}{known}"
    if kind == "missing":
        return f"{path}: required"
    if kind == "union_tag_not_found":
        return f"{path}: {context['discriminator'].strip(_QUOTE)} is required"
    if kind == "union_tag_invalid":
        expected = context["expected_tags"].replace(_QUOTE, "")
        hint = nearest(context["tag"], expected.split(", "))
        field, tag = context["discriminator"].strip(_QUOTE), quoted(context["tag"])
        return f"{path}.{field}: must be one of {expected}, got {tag}{hint}"
    if kind in _NO_MAPPING and path:
        return f"{path}: must be a mapping, got {quoted(error['input'])}"
    shown = error["input"]
    got = f", got {quoted(shown)}" if not isinstance(shown, dict) else ""
    said = f"{error['msg'].removeprefix('Value error, ')}{got}"
    return f"{path}: {said}" if path else said


def _owners(model: type[BaseModel], data: Any, keys: Sequence[Any]) -> list[type[BaseModel]]:
    """Whose fields may be written at `keys`."""
    owners: list[type[BaseModel]] = [model]
    inner: list[Any] = []  # of the mapping or list that a key chose from
    for key in keys:
        data = _step(data, key)[1]
        named = [o.model_fields[key].annotation for o in owners if key in o.model_fields]
        if named:
            inner = named
        owners = [m for annotation in inner for m in _models(annotation)]
    kind = data.get("kind") if isinstance(data, Mapping) else None
    return [m for m in owners if kind in _kinds(m)] or owners


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _kinds(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field else ()
