"""Checks the arguments of a call by their annotations: kind, choices, bounds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import cache, wraps
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ray_slo.core.hints import KINDS, bounds, parts_of
from ray_slo.core.text import quoted

F = TypeVar("F", bound=Callable[..., Any])

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
"""At least 0; infinity is allowed, as for `Above0`."""
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
"""Above 0 and at most 1."""


def checked(call: F) -> F:
    """`call` with checked arguments: a wrong kind, choice or bound is a ValueError that names
    it."""
    signature = inspect.signature(call)

    @wraps(call)
    def checking(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        check(call, bound.arguments)
        return call(*args, **kwargs)

    return checking  # type: ignore[return-value]


def check_fields(made: Any, of: str = "") -> None:
    """Check the fields of a dataclass. `of`: the owner's name, for the message."""
    check(type(made), {field.name: getattr(made, field.name) for field in fields(made)}, of)


def check(call: Callable[..., Any], given: Mapping[str, Any], of: str = "") -> None:
    """Check the given arguments, by name.

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
            raise ValueError(f"{name}{of} must be {words}, got {quoted(value)}") from None


@cache
def _annotations(call: Callable[..., Any]) -> dict[str, Any]:
    """Annotations that can be resolved: some are imported for type checkers only."""
    call = inspect.getattr_static(call, "__init__") if isinstance(call, type) else call
    call, found = inspect.unwrap(call), dict[str, Any]()
    for name, annotation in getattr(call, "__annotations__", {}).items():
        alone = SimpleNamespace(__annotations__={name: annotation})
        with suppress(NameError, TypeError, AttributeError):
            found |= get_type_hints(alone, call.__globals__, include_extras=True)
    return found


@cache
def _hints(call: Callable[..., Any]) -> dict[str, TypeAdapter[Any]]:
    """Validators of the arguments with simple kinds."""
    return {
        name: TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        for name, hint in _annotations(call).items()
        if name != "return" and _words(hint, ())
    }


def _words(hint: Any, wrong: Collection[str]) -> str:
    """What an argument must be; "" if its kind is not simple.

    Args:
        wrong: pydantic's names of the mistakes; if the kind is right, only bounds are named.
    """
    words = []
    for part, about in parts_of(hint):
        limits = bounds(about)
        if get_origin(part) is Literal:
            words.append(f"one of {', '.join(map(str, get_args(part)))}")
        elif part not in KINDS:
            return ""
        elif "finite_number" in wrong:
            return "a finite number"
        elif limits and wrong and not any(w.endswith("_type") for w in wrong):
            return "positive" if limits == "above 0" else limits
        else:
            words.append(KINDS[part])
    return " or ".join(words)
