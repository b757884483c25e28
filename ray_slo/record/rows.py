"""The decision log: all events and all decisions of a policy, as Parquet.

A `Recording` is between a host and its policy, live and in the simulator. It gives a sink one
`Round` per `decide`. An `encode.Encoder` makes rows from rounds, and `write_file` makes files from
rows. `decode.read` gives the rounds back, exactly to the last bit of every time.

The log is one table. The column `what` says what a row is, and so what the other columns mean
(docs/decision-log.md). Every file can be read without the others: it repeats the policy, and the
cluster with its profiles.
The planner's decisions are a separate table (`plans`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Decision
from ray_slo.core.files import whole
from ray_slo.core.policy import Policy, PolicyWrapper
from ray_slo.core.requests import BatchOutcome, Request, WorkerId
from ray_slo.core.text import quoted

FORMAT = "ray-slo/decision-log/1"
SUFFIX = ".decisions.parquet"
_METADATA = b"ray_slo"
_NEWER = ("task",)  # columns that older logs do not have
# A small file may say that it has any number of these.
_MOST_VALUES, _MOST_BYTES = 500_000_000, 2**32
_LONGEST_S = 1e12  # longer than any clock runs
LAST_WALL_S = 2e11  # the year 8307; dates end with 9999

# Name and Arrow type of every column, in order. Times are seconds in the scheduler's clock.
_OF_REQUEST = {  # attributes of a `Request`, in the order of its arguments after its number
    "model": "string",
    "arrival": "double",
    "deadline": "double",
    "size": "int32",  # of a request: its items; of a batch: its requests
    "task": "string",  # older logs do not have it; then the task has the name of the model
}
COLUMNS: dict[str, str] = {
    "round": "int64",  # number of the decision; an event belongs to the next one
    "event": "int32",  # number of the call in its round; for an action, its number in the decision
    "at": "double",
    "what": "string",
    "request": "int64",
    "client": "string",
    "client_request": "int64",
    **_OF_REQUEST,
    "worker": "string",
    "variant": "string",
    "batch": "int64",
    "requests": "list<int64>",
    "start_at": "double",
    "finish_at": "double",
    "predicted_finish_at": "double",
    "slack_s": "double",
    "reason": "string",
    "value": "double",
    "wake_at": "double",
    "table_s": "list<double>",
    "detail": "string",
}
INDEX = {name: i for i, name in enumerate(COLUMNS)}
OF_REQUEST = slice(INDEX["model"], INDEX["model"] + len(_OF_REQUEST))
of_request = attrgetter(*_OF_REQUEST)
AFTER_REQUEST = INDEX["detail"] - OF_REQUEST.stop  # number of columns between them
BEFORE_WAKE = INDEX["wake_at"] - INDEX["what"] - 1
AGAIN = "again"  # reason of rows at the beginning of a file that repeat earlier rows

Row = tuple[Any, ...]


class Table(NamedTuple):
    """A kind of file: its format, the ending of its names, and its columns in order, each with its
    Arrow type."""

    format: str
    suffix: str
    columns: Mapping[str, str]


DECISIONS = Table(FORMAT, SUFFIX, COLUMNS)


class Round(NamedTuple):
    """One call of `decide`, with the events since the last one.

    Attributes:
        now: time of the call in the scheduler's clock, in seconds.
        events: events before the call: the name of the method of `Policy`, and its arguments.
        decision: the decision. None if the policy raised `error`.
        setting: a new setting of `auto`, and its reason. A replay does not need it.
    """

    now: float
    events: Sequence[tuple[str, tuple[Any, ...]]]
    decision: Decision | None
    error: str = ""
    setting: tuple[str, str] | None = None


@dataclass(frozen=True)
class Start:
    """The start of a policy.

    Attributes:
        policy: its name or "module:attr". None if it was given as an object.
        kwargs: its arguments. None if they cannot be written as JSON.
        about: further facts as JSON data: application, wall-clock time, …
    """

    policy: str | None
    kwargs: Mapping[str, Any] | None
    about: Mapping[str, Any]

    @classmethod
    def of(cls, policy: Any, kwargs: Mapping[str, Any], **about: Any) -> Start:
        """Make the start from the arguments of `make_policy`."""
        name = policy if isinstance(policy, str) else None
        if isinstance(policy, type):
            name = f"{policy.__module__}:{policy.__qualname__}"
        kept: Mapping[str, Any] | None = dict(kwargs)
        try:
            if json.loads(json.dumps(kept)) != kept:
                kept = None
        except (TypeError, ValueError):
            kept = None
        return cls(name, kept, about)

    def to_json(self) -> str:
        return json.dumps({"policy": self.policy, "kwargs": self.kwargs, "about": self.about})

    @classmethod
    def from_json(cls, text: str) -> Start:
        """Make the start from the text of `to_json`.

        Raises:
            ValueError: a field is missing or of another kind.
        """
        said = json.loads(text)
        if not isinstance(said, dict) or said.keys() != {"policy", "kwargs", "about"}:
            raise ValueError(f"a start has policy, kwargs and about, got {quoted(said)}")
        start = cls(**said)
        wall_at, models = start.about_of("wall_at", 0.0), start.about_of("models", [])
        for name, value, kinds in (
            ("policy", start.policy, str | None),
            ("kwargs", start.kwargs, dict | None),
            ("about.models", models, list),
            ("about.application", start.about_of("application"), str | None),
            ("about.clock", start.about_of("clock"), str | None),
            ("about.wall_at", wall_at, int | float),
        ):
            if not isinstance(value, kinds):
                raise ValueError(f"{name} of a start cannot be {quoted(value)}")
        if not all(isinstance(name, str) for name in models):
            raise ValueError(f"about.models of a start must be names, got {quoted(models)}")
        as_time("about.wall_at", wall_at, LAST_WALL_S)
        return start

    def about_of(self, name: str, default: Any = None) -> Any:
        if not isinstance(self.about, dict):
            raise ValueError(f"about of a start cannot be {quoted(self.about)}")
        return self.about.get(name, default)


class Recording(PolicyWrapper):
    """A policy that passes every round to `sink`. All else is done by the inner policy."""

    def __init__(self, policy: Policy, sink: Callable[[Round], None]) -> None:
        super().__init__(policy)
        if hasattr(policy, "explain"):
            policy.explain = True
        self._sink = sink
        self._events: list[tuple[str, tuple[Any, ...]]] = []
        self._in_force: Callable[[], Mapping[str, Any]] | None = getattr(policy, "in_force", None)
        self._setting = ""

    def optional_event(self, name: str, *args: Any) -> None:
        self._events.append((name, args))
        super().optional_event(name, *args)

    def requests_arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._events.append(("requests_arrived", (now, requests)))
        self.policy.requests_arrived(now, requests)

    def requests_cancelled(self, now: float, requests: Sequence[Request]) -> None:
        self._events.append(("requests_cancelled", (now, requests)))
        self.policy.requests_cancelled(now, requests)

    def batch_finished(self, now: float, worker: WorkerId, outcome: BatchOutcome) -> None:
        self._events.append(("batch_finished", (now, worker, outcome)))
        self.policy.batch_finished(now, worker, outcome)

    def cluster_changed(self, now: float, cluster: Cluster) -> None:
        self._events.append(("cluster_changed", (now, cluster)))
        self.policy.cluster_changed(now, cluster)

    def decide(self, now: float) -> Decision:
        events, self._events = self._events, []
        try:
            decision = self.policy.decide(now)
        except Exception as error:
            self._sink(Round(now, events, None, f"{type(error).__name__}: {error}"))
            raise
        self._sink(Round(now, events, decision, setting=self._other_setting()))
        return decision

    def _other_setting(self) -> tuple[str, str] | None:
        if self._in_force is None or (said := self._in_force())["setting"] == self._setting:
            return None
        self._setting = said["setting"]
        return self._setting, said["why"]


class Logged(Request):
    """A request from a log. `origin` is its client and its number there, if they are known."""

    __slots__ = ("origin",)
    origin: tuple[str, int] | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.origin = None


# -- files -----------------------------------------------------------------------------------


def to_arrow(
    rows: Sequence[Row], breathe: Callable[[], None] = lambda: None, kind: Table = DECISIONS
) -> Any:
    """Return rows as an Arrow table. `breathe` is called between columns, so that a long
    conversion can let other threads run."""
    import pyarrow as pa

    types: dict[str, Any] = {
        "list<int64>": pa.list_(pa.int64()),
        "list<double>": pa.list_(pa.float64()),
        "list<string>": pa.list_(pa.string()),
    }
    arrays = []
    for column, name in zip(zip(*rows, strict=True), kind.columns.values(), strict=True):
        arrays.append(pa.array(column, types.get(name, name)))
        breathe()
    return pa.table(arrays, names=list(kind.columns))


def write_file(
    path: Path, table: Any, scheduler: str, sequence: int, kind: Table = DECISIONS
) -> int:
    """Write an Arrow table of rows to a file. Return the number of bytes. Readers see the complete
    file or none."""
    import pyarrow.parquet as pq

    about = {"format": kind.format, "scheduler": scheduler, "sequence": sequence}
    table = table.replace_schema_metadata({_METADATA: json.dumps(about).encode()})
    # Times do not repeat, and numbers mostly count up. These encodings give two thirds of the size
    # in a third of the time.
    texts = [name for name, type_ in kind.columns.items() if type_ == "string"]
    counts = [name for name, type_ in kind.columns.items() if type_.startswith("int")]
    lists = [f"{n}.list.element" for n, type_ in kind.columns.items() if type_ == "list<int64>"]
    with whole(path) as half:
        pq.write_table(
            table,
            half,
            compression="zstd",
            use_dictionary=texts,
            column_encoding=dict.fromkeys([*counts, *lists], "DELTA_BINARY_PACKED"),
        )
    return path.stat().st_size


def file_name(scheduler: str, sequence: int, kind: Table = DECISIONS) -> str:
    """Return the name of a file. Sorted names are in order of scheduler, then of time."""
    return f"{scheduler}-{sequence:06d}{kind.suffix}"


def about_file(path: Path, file: Any, kind: Table = DECISIONS) -> dict[str, Any]:
    """Return the writer of a file (`scheduler`) and the file's number (`sequence`).

    Args:
        file: the file, opened by Arrow.

    Raises:
        ValueError: the file is of another kind or too large, or a column is missing or of another
            type.
    """
    about: dict[str, Any]
    schema, size = file.schema_arrow, file.metadata
    with damaged(path):
        groups = [size.row_group(i) for i in range(size.num_row_groups)]
        values = sum(g.column(i).num_values for g in groups for i in range(g.num_columns))
        for what, number, most in (
            ("values", max(values, size.num_rows), _MOST_VALUES),
            ("bytes", sum(group.total_byte_size for group in groups), _MOST_BYTES),
        ):
            if not 0 <= number <= most:
                raise ValueError(f"it has {number} {what}, at most {most} are read from a file")
        about = json.loads((schema.metadata or {}).get(_METADATA, b"{}"))
        found = about.get("format") if isinstance(about, dict) else about
        if found != kind.format:
            raise ValueError(
                f"no decision log: format must be {kind.format!r}, got {quoted(found)}"
            )
        for name, wanted in (("scheduler", str), ("sequence", int)):
            if not isinstance(about.get(name), wanted):
                raise ValueError(f"its metadata must name {name}, got {quoted(about.get(name))}")
        wanted_schema = to_arrow([(None,) * len(kind.columns)], kind=kind).schema
        for name in kind.columns:
            if name not in schema.names:
                if name not in _NEWER:
                    raise ValueError(f"there is no column {name}")
            elif schema.field(name).type != wanted_schema.field(name).type:
                is_of, wants = schema.field(name).type, wanted_schema.field(name).type
                raise ValueError(f"column {name} must be {wants}, got {is_of}")
    return about


@contextmanager
def damaged(path: Path, where: Callable[[], str] = str) -> Iterator[None]:
    """Return a context manager for code that reads a file. Whatever is wrong with the content
    becomes a ValueError that names the file.

    Args:
        where: returns the place in the file, for the message.
    """
    try:
        yield
    except RecursionError:
        raise ValueError(f"{path}: {where()}it is nested too deeply") from None
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        said = str(error)
        if str(path) in said:
            raise
        if not isinstance(error, ValueError):
            said = f"not what a log contains ({type(error).__name__}: {error})"
        raise ValueError(f"{path}: {where()}{said}") from error
    except (OSError, NotImplementedError) as error:  # of Arrow, if not of the file system
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ValueError(f"{path}: it is damaged: {error}") from error


def as_time(name: str, value: Any, most_s: float = _LONGEST_S) -> float:
    """Return a time in seconds.

    Raises:
        ValueError: it is no finite number, or beyond `most_s`.
    """
    if not isinstance(value, int | float) or not abs(value) <= most_s:
        raise ValueError(f"{name} must be a time in seconds, got {quoted(value)}")
    return value
