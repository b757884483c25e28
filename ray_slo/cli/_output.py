"""Output and arguments of the commands: numbers, tables, JSON, KEY=VALUE options, files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
import yaml

from ray_slo.core.explain import explaining, validated
from ray_slo.core.pages import SEE

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.table import Table

    from ray_slo.simulation.workloads import Workload

    T = TypeVar("T", bound=BaseModel)

PICTURES = (".png", ".svg", ".pdf")


def print_json(data: Any) -> None:
    """Print only JSON to stdout, so that other programs can read it."""
    typer.echo(json.dumps(data, indent=1, default=str))


def number(value: float | None, digits: int = 3, suffix: str = "") -> str:
    """Format a number with `digits` significant digits, without an exponent. None and NaN give
    "–"."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}{suffix}"
    decimals = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    return f"{value:.{decimals}f}{suffix}"


def percent(value: float | None) -> str:
    """Format a share as a percentage, with one decimal below 10 % and above 90 %. None and NaN give
    "–"."""
    if value is None or math.isnan(value):
        return "–"
    return f"{100 * value:.{1 if abs(value) < 0.0995 or value > 0.9 else 0}f} %"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a rich table. The first column is left-aligned, the others are right-aligned."""
    from rich.table import Table

    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


def key_values(option: str, given: Iterable[str] | None) -> dict[str, Any]:
    """Return {"k": v} for texts "k=v". The values are read as YAML (numbers, true, [1, 2], text).

    Raises:
        ValueError: a text has no "=". The message names the option.
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


def read_document(path: Path, example: str, *kinds: str) -> dict[str, Any]:
    """Read a command's YAML file.

    Args:
        example: path of an example, for error messages.
        kinds: the kinds of documents that the command reads, as in `what_it_is`.

    Raises:
        ValueError: the file is not a YAML mapping, or a document of another kind.
    """
    from ray_slo.core.documents import read_yaml, what_it_is

    data = read_yaml(path)
    kind, said, told = what_it_is(data)
    if kind and kind not in kinds:
        raise ValueError(f"{path}: this is {said} ({told}); wanted a file like {example}")
    return data


def in_document(path: Path | None, model: type[T], data: Any) -> T:
    """Return `data` as an object of the class `model`. Error messages name the file."""
    with mistakes_in(path, model):
        return validated(model, data, base=path.parent if path else Path())


def say_read(workloads: Iterable[Workload], duration_s: float | None) -> None:
    """Print to stderr what was read from files of arrivals, and how much of it the run takes."""
    for workload in workloads:
        length_s, rest = workload.length_s, ""
        if duration_s is not None and length_s is not None and duration_s < length_s:
            rest = f"; the run takes the first {duration_s:g} s of {length_s:.6g} s"
        for said in workload.said:
            typer.echo(f"{said}{rest}", err=True)


@contextmanager
def mistakes_in(path: Path | None, model: type[BaseModel]) -> Iterator[None]:
    """Return a context manager that adds to a ValueError the section of the docs on the field, and
    the file's name if there is a file. `model`: the model of the document."""
    try:
        with explaining(model):
            yield
    except ValueError as error:
        if path is None:
            raise
        lines = str(error).split("\n")
        told = [line if line.startswith(SEE) else f"{path}: {line}" for line in lines]
        raise ValueError("\n".join(told)) from None


def positive(**options: float | None) -> None:
    """Check that options are positive and finite. The argument `rate_x` is the option --rate-x.

    Raises:
        ValueError: one is not. The message names the option.
    """
    for name, value in options.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} must be positive and finite, got {value:g}")


def will_write(option: str, path: Path | None, endings: Sequence[str] = ()) -> None:
    """Check before a long run that a file can be written at its end. Make its folder.

    Raises:
        ValueError: the name has another ending, or the file cannot be written.
    """
    if path is None:
        return
    if endings and path.suffix not in endings:
        raise ValueError(f"{option} must end in {', '.join(endings)}, got {str(path)!r}")
    with _written(option, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("ab"):
            pass
        if not there:
            path.unlink()


def will_fill(option: str, path: Path | None) -> None:
    """Make the folder that a long run fills at its end.

    Raises:
        ValueError: the folder cannot be made, or no file can be written into it.
    """
    if path is not None:
        with _written(option, path):
            path.mkdir(parents=True, exist_ok=True)
        will_write(option, path / ".ray-slo")


@contextmanager
def _written(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: cannot write {str(path)!r}: {error.strerror}") from None
