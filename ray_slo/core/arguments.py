"""Checks what a call is given by the annotations of its arguments: kind, choices, bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, wraps
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

F = TypeVar("F", bound=Callable[..., Any])

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
"""Infinity is one, too."""
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
"""Above 0 and at most 1."""

_KINDS = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    str: "a text",
    NoneType: "null",
}
_BOUNDS = {Gt: ("gt", "above"), Ge: ("ge", "at least"), Le: ("le", "at most"), Lt: ("lt", "below")}


def checked(call: F) -> F:
    """`call`, which raises a ValueError that names an argument of another kind, choice or bound."""
    signature = inspect.signature(call)

    @wraps(call)
    def checking(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        check(call, bound.arguments)
        return call(*args, **kwargs)

    return checking  # type: ignore[return-value]


def check_fields(made: Any, of: str = "") -> None:
    """Check the fields of a dataclass. `of`: whose they are, for the message."""
    check(type(made), {field.name: getattr(made, field.name) for field in fields(made)}, of)


def check(call: Callable[..., Any], given: Mapping[str, Any], of: str = "") -> None:
    """Check the arguments that are given, by name.

    Raises:
        ValueError: names an argument and what it must be.
    """
    hints = _hints(call)
    for name, value in given.items():
        if (hint := hints.get(name)) is None:
            continue
        if hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0:
            value = value.item()  # of NumPy
        try:
            hint.validate_python(value, strict=True)
        except ValidationError as error:
            words = _words(_annotations(call)[name], {e["type"] for e in error.errors()})
            raise ValueError(f"{name}{of} must be {words}, got {value!r}") from None


@cache
def _annotations(call: Callable[..., Any]) -> dict[str, Any]:
    """Those that can be told: some are imported for type checkers only."""
    call = inspect.getattr_static(call, "__init__") if isinstance(call, type) else call
    call, found = inspect.unwrap(call), dict[str, Any]()
    for name, annotation in getattr(call, "__annotations__", {}).items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        with suppress(NameError, TypeError, AttributeError):
            found |= get_type_hints(alone, call.__globals__, include_extras=True)
    return found


@cache
def _hints(call: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """Of the arguments whose kinds are simple."""
    return {
        name: TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        for name, hint in _annotations(call).items()
        if name != "return" and _words(hint, ())
    }


def _words(hint: Any, wrong: Collection[str]) -> str:
    """What an argument must be; "" where its kind is no simple one.

    Args:
        wrong: pydantic's names of what is wrong; only bounds are said where the kind is right.
    """
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = []
    for part in parts:
        bounds: list[str] = []
        if get_origin(part) is Annotated:
            part, *about = get_args(part)
            said = [m for a in about for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
            bounds = [
                f"{word} {getattr(m, at):g}"
                for m in said
                for kind, (at, word) in _BOUNDS.items()
                if isinstance(m, kind)
            ]
        if get_origin(part) is Literal:
            words.append(f"one of {', '.join(map(str, get_args(part)))}")
        elif part not in _KINDS:
            return ""
        elif "finite_number" in wrong:
            return "a finite number"
        elif bounds and wrong and not any(w.endswith("_type") for w in wrong):
            return "positive" if bounds == ["above 0"] else " and ".join(bounds)
        else:
            words.append(_KINDS[part])
    return " or ".join(words)
