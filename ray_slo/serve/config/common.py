"""What all parts of a config share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict

from ray_slo.core.documents import SloMs, Strict
from ray_slo.core.text import quoted

MOST_REPLICAS = 100_000
_LONGEST_NAME = 100  # characters


class StrictConfig(Strict):
    model_config = ConfigDict(arbitrary_types_allowed=True)


def check_name(what: str, name: str) -> None:
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"{what} name {quoted(name)} has {len(name)} characters; use at most {_LONGEST_NAME}"
        )
    if not name or not all((c.isascii() and c.isalnum()) or c in "-_." for c in name):
        raise ValueError(
            f"{what} name {name!r}: use ASCII letters, digits, '-', '_' and '.' "
            "(it is part of metric tags, and a model's of a URL)"
        )


def names(what: str) -> AfterValidator:
    """Return the check of the names in a mapping."""

    def checked(value: Any) -> Any:
        for name in value:
            check_name(what, name)
        return value

    return AfterValidator(checked)


SloClasses = Annotated[dict[str, SloMs], names("SLO class")]
"""Latency SLOs in milliseconds that clients may name instead of the usual one."""
