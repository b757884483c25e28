"""The base of everything that users write as a document: unknown keys are refused, and so are
numbers that are none."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, model_validator


class Strict(BaseModel):
    """A pydantic model that takes no unknown key, no infinity or NaN, and no `yes` for 1."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, data: Any) -> Any:
        given = data if isinstance(data, Mapping) else {}
        for name, field in cls.model_fields.items():
            if not isinstance(value := given.get(name), bool):
                continue
            kinds = _kinds(field.annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(
                    f"{name} must be a number, got {value} (YAML reads yes, no, on and off as "
                    "booleans)"
                )
        return data


def _kinds(annotation: Any) -> set[Any]:
    """What a field may hold."""
    if get_origin(annotation) in (Union, UnionType):
        return set().union(*map(_kinds, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    return {annotation}
