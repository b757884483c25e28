"""The plan log: the planners' decisions and their reasons. It is a separate table beside the
schedulers' decision log.

A row is one question to a planner, with its cause, its input, its answer, and the changes. The
table is in the folder `_plans` of the log. Parquet readers take a folder as one table, and skip
names that begin with `_`. docs/decision-log.md describes the columns.

Times are in the planner's clock. `shift` converts them to a scheduler's clock. Processes of one
machine share a monotonic clock, which `clock` names. For the clock of another machine, the planner
measured the difference with its messages. Wall-clock times are for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ray_slo.core.text import quoted
from ray_slo.record.encode import Lines
from ray_slo.record.rows import (
    AGAIN,
    LAST_WALL_S,
    Row,
    Start,
    Table,
    about_file,
    as_time,
    damaged,
)

FOLDER = "_plans"
PLANS = Table(
    "ray-slo/plan-log/1",
    ".plans.parquet",
    {
        "number": "int64",  # number of the question since the planner started
        "at": "double",
        "wall_at": "double",
        "what": "string",
        "trigger": "string",
        "demand": "double",
        "inputs": "string",
        "targets": "string",
        "plan": "string",
        "workers": "string",
        "changes": "list<string>",
        "why": "string",
        "shortfall": "string",
        "error": "string",
        "took_s": "double",
        "clocks": "string",
        "reason": "string",
        "detail": "string",
    },
)
_INDEX = {name: i for i, name in enumerate(PLANS.columns)}


@dataclass(frozen=True)
class Outline:
    """The part of a plan whose changes are reported.

    Attributes:
        targets: wanted number of workers, by kind or by group. None: no change.
        variants: number of workers that should run each variant.
        batches: largest batch size of each variant, if it is the same on all its workers.
        groups: group of each model.
    """

    targets: Mapping[str, int | None] = field(default_factory=dict)
    variants: Mapping[str, int] = field(default_factory=dict)
    batches: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_assignments(
        cls, targets: Mapping[str, int | None], assigned: Iterable[tuple[str, int, int]]
    ) -> Outline:
        """Make the outline from triples of a variant, its batch size, and its number of
        workers."""
        variants: dict[str, int] = {}
        sizes: dict[str, set[int]] = {}
        for variant, batch_size, workers in assigned:
            variants[variant] = variants.get(variant, 0) + workers
            sizes.setdefault(variant, set()).add(batch_size)
        batches = {v: b for v, (b, *more) in sizes.items() if not more}
        return cls(targets, variants, batches)

    def changes(self, last: Outline) -> list[str]:
        """Return the changes since the outline `last`, one line each.

        >>> old, new = Outline({"gpu": 2}, {"small": 2}), Outline({"gpu": 3}, {"large": 3})
        >>> new.changes(old)
        ['gpu: 2 → 3 workers', 'large: 0 → 3 workers', 'small: 2 → 0 workers']
        """
        lines = []
        for name in sorted(self.targets):
            then, now = last.targets.get(name), self.targets[name]
            if now is not None and then != now:
                lines.append(f"{name}: {'–' if then is None else then} → {now} workers")
        for name in sorted({*self.variants, *last.variants}):
            before, after = last.variants.get(name, 0), self.variants.get(name, 0)
            if before != after:
                lines.append(f"{name}: {before} → {after} workers")
        lines += [
            f"{name}: batches of {last.batches[name]} → {now}"
            for name, now in sorted(self.batches.items())
            if last.batches.get(name, now) != now
        ]
        lines += [
            f"{name}: {last.groups.get(name, '–')} → {now}"
            for name, now in sorted(self.groups.items())
            if last.groups.get(name) != now
        ]
        return lines


@dataclass(frozen=True)
class Planned:
    """One question to a planner, and its answer.

    Attributes:
        at: time of the question in the planner's clock, in seconds.
        trigger: cause of the question: "first plan", "period", "demand changed", "worker lost", …
        demand: requests per second to plan for.
        inputs: a summary of the other inputs.
        targets: wanted number of workers, by kind or by group.
        plan: the planner's answer.
        workers: variant of each worker.
        changes: changes from the last plan, one line each.
        why: the planner's reason.
        shortfall: what the plan does not serve. None if it serves everything.
        error: reason why there is no plan. The last plan stays in force.
        took_s: time from the question to the answer, in seconds.
        wall_at: Unix time of the question, for people.
        clocks: lead of other machines' clocks over the planner's, in seconds, by clock.
    """

    at: float
    trigger: str
    demand: float | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, int | None] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    workers: Mapping[str, str | None] = field(default_factory=dict)
    changes: Sequence[str] = ()
    why: str = ""
    shortfall: str | None = None
    error: str = ""
    took_s: float | None = None
    wall_at: float | None = None
    clocks: Mapping[str, float] = field(default_factory=dict)


_JSON = ("inputs", "targets", "plan", "workers", "clocks")
_PLAIN = ("wall_at", "trigger", "demand", "why", "shortfall", "error", "took_s")


class PlanEncoder:
    """Makes rows from `Planned`, as `encode.Encoder` does from rounds."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._number = 0
        self._start: Start | None = None
        self._at = 0.0

    def _row(self, at: float, what: str, **values: Any) -> None:
        row: list[Any] = [None] * len(PLANS.columns)
        for name, value in {"number": self._number, "at": at, "what": what, **values}.items():
            row[_INDEX[name]] = value
        self.rows.append(tuple(row))

    def start(self, start: Start, at: float) -> None:
        """Write the start of a planner."""
        self._number, self._at, self._start = 0, at, start
        self._row(at, "start", detail=start.to_json())

    def lost(self, rows: int, at: float) -> None:
        """Write the number of lost rows."""
        self._row(at, "lost", detail=str(rows))

    def new_file(self) -> None:
        """Begin a new file. Repeat the facts without which its rows cannot be understood."""
        if self._start is not None:
            self._row(self._at, "start", reason=AGAIN, detail=self._start.to_json())

    def add(self, planned: Planned) -> None:
        """Write the row of one question."""
        texts = {name: json.dumps(getattr(planned, name), default=str) for name in _JSON}
        plain = {name: getattr(planned, name) for name in _PLAIN}
        self._row(planned.at, "plan", changes=list(planned.changes), **texts, **plain)
        self._number += 1
        self._at = planned.at


@dataclass
class Planner:
    """The decisions of one planner that are in the log, in order.

    Attributes:
        name: name of the log's writer.
        start: start of the planner. Its `policy` is the planner's name. Its `about` has
            application, models, clock and wall_at.
        lost: number of lost rows.
    """

    name: str
    start: Start
    plans: list[Planned]
    lost: int = 0

    def shift(self, clock: str | None, at: float) -> float | None:
        """Return the lead of `clock` over this planner's clock around the time `at`, in seconds.
        None if it was never measured."""
        if clock is not None and clock == self.start.about.get("clock"):
            return 0.0
        known = [(abs(p.at - at), p.clocks[clock or ""]) for p in self.plans if clock in p.clocks]
        return min(known)[1] if known else None


def read(path: str | Path) -> list[Planner]:
    """Return every planner in the log of a folder, sorted by name. The result is empty if the log
    has no plans.

    Raises:
        ValueError: a file is not a plan log, or is truncated. The message names it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = []
    for file_path in sorted((Path(path) / FOLDER).glob(f"*{PLANS.suffix}")):
        try:
            with pq.ParquetFile(file_path) as file:
                about = about_file(file_path, file, PLANS)
                rows = file.read().to_pylist()
            files.append((about["scheduler"], about["sequence"], file_path, rows))
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file_path}: no plan log, or cut short: {error}") from None
    found: list[Planner] = []
    for name, _, file_path, rows in sorted(files, key=lambda file: file[:2]):
        for i, row in enumerate(rows):
            with damaged(file_path, lambda i=i: f"row {i}: "):  # type: ignore[misc]
                _add(found, name, row)
    return found


def _add(found: list[Planner], name: str, row: Mapping[str, Any]) -> None:
    """Add what a row says to the planners."""
    if row["what"] == "start":
        if row["reason"] != AGAIN or not found or found[-1].name != name:
            found.append(Planner(name, Start.from_json(row["detail"]), []))
        return
    if row["what"] not in ("lost", "plan"):
        raise ValueError(f"what must be start, lost or plan, got {quoted(row['what'])}")
    if not found or found[-1].name != name:
        raise ValueError("it comes before the start of its planner")
    if row["what"] == "lost":
        found[-1].lost += int(row["detail"])
    else:
        found[-1].plans.append(_planned(row))


def _planned(row: Mapping[str, Any]) -> Planned:
    texts = {name: json.loads(row[name]) for name in _JSON}
    plain = {name: row[name] for name in _PLAIN}
    for name, value in texts.items():
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be a mapping, got {quoted(value)}")
    for clock, ahead_s in texts["clocks"].items():
        as_time(f"clocks.{quoted(clock)}", ahead_s)
    for name in ("trigger", "why", "error"):
        if plain[name] is None:
            raise ValueError(f"{name} is missing")
    if None in row["changes"]:
        raise ValueError("a change has no text")
    as_time("wall_at", plain["wall_at"] or 0.0, LAST_WALL_S)
    at = as_time("at", row["at"])
    return Planned(at=at, changes=tuple(row["changes"]), **texts, **plain)


class PlanLines(Lines):
    """A sink for simulated runs that writes a planner's table into the folder of a log when it is
    closed."""

    _subfolder = FOLDER
    _kind = PLANS
    _make: ClassVar[type[Any]] = PlanEncoder
