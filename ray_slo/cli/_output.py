"""Shared by the commands: numbers, tables, JSON, key=value arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
import yaml

if TYPE_CHECKING:
    from rich.table import Table


def print_json(data: Any) -> None:
    """JSON on stdout, nothing else, so that it pipes."""
    typer.echo(json.dumps(data, indent=1, default=str))


def number(value: float | None, digits: int = 3, suffix: str = "") -> str:
    """To `digits` significant digits, without an exponent; "–" for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}{suffix}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{decimals}f}{suffix}"


def percent(value: float | None) -> str:
    """A share as percent, with one decimal below 10 %."""
    if value is None:
        return "–"
    return f"{100 * value:.{1 if abs(value) < 0.0995 or value > 0.9 else 0}f} %"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A rich table: first column left, the others right-aligned."""
    from rich.table import Table

    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        result.add_row(*row)
    return result


def key_values(option: str, given: Iterable[str] | None) -> dict[str, Any]:
    """{"k": v} from "k=v" texts, values read as YAML (numbers, true, [1, 2], text).

    Raises:
        ValueError: a text without "=", naming the option.
    """
    result: dict[str, Any] = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"{option} wants KEY=VALUE, got {text!r}")
        try:
            result[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            result[key.strip()] = value
    return result
