"""The decision log: all events and all decisions of a policy, as Parquet.

A `Recording` is between a host and its policy, live and in the simulator. It gives a sink one
`Round` per `decide`. An `encode.Encoder` makes rows from rounds, and `write_file` makes files from
rows. `decode.read` gives the rounds back, exactly to the last bit of every time.

There is one table. The column `what` decides the meaning of the others (docs/decision-log.md).
Every file can be read without the others: it repeats the policy, and the cluster with its profiles.
The planner's decisions are a separate table (`plans`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ray_slo.core.cluster import Cluster
from ray_slo.core.decisions import Decision
from ray_slo.core.policy import Policy, PolicyWrapper
from ray_slo.core.requests import BatchOutcome, Request, WorkerId

FORMAT = "ray-slo/decision-log/1"
SUFFIX = ".decisions.parquet"
_METADATA = b"ray_slo"

# Name and Arrow type of every column, in order. Times are seconds in the scheduler's clock.
_OF_REQUEST = {  # attributes of a `Request`, in the order of its arguments after the id
    "model": "string",
    "arrival": "double",
    "deadline": "double",
    "size": "int32",  # of a request: its items; of a batch: its requests
    "task": "string",  # older logs have none: the task has the model's name
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
AFTER_REQUEST = INDEX["detail"] - OF_REQUEST.stop  # columns between
BEFORE_WAKE = INDEX["wake_at"] - INDEX["what"] - 1
AGAIN = "again"  # reason of rows at the head of a file, which repeat earlier ones

Row = tuple[Any, ...]


class Table(NamedTuple):
    """A kind of file: its format, how names end, and (name, Arrow type) of columns in order."""

    format: str
    suffix: str
    columns: Mapping[str, str]


DECISIONS = Table(FORMAT, SUFFIX, COLUMNS)


class Round(NamedTuple):
    """One call of `decide`, with the events fed since the last one.

    Attributes:
        events: (method of `Policy`, its arguments: `now` and the rest).
        decision: None if the policy raised `error`.
        setting: a new setting of `auto`, and its reason; only for readers.
    """

    now: float
    events: Sequence[tuple[str, tuple[Any, ...]]]
    decision: Decision | None
    error: str = ""
    setting: tuple[str, str] | None = None


@dataclass(frozen=True)
class Start:
    """The policy from here on.

    Attributes:
        policy: name or "module:attr"; None if it was an object.
        kwargs: its arguments; None if JSON cannot contain them.
        about: free-form, as JSON: application, wall-clock time, …
    """

    policy: str | None
    kwargs: Mapping[str, Any] | None
    about: Mapping[str, Any]

    @classmethod
    def of(cls, policy: Any, kwargs: Mapping[str, Any], **about: Any) -> Start:
        """From what `make_policy` takes."""
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
        return cls(**json.loads(text))


class Recording(PolicyWrapper):
    """A policy that gives `sink` every round. Everything else is the inner policy's."""

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
    """A request from a log. `origin`: its client and its number there, if known."""

    __slots__ = ("origin",)
    origin: tuple[str, int] | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.origin = None


# -- files -----------------------------------------------------------------------------------


def to_arrow(
    rows: Sequence[Row], breathe: Callable[[], None] = lambda: None, kind: Table = DECISIONS
) -> Any:
    """Rows as an Arrow table. `breathe` is called between columns."""
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
    """Write an Arrow table of rows. Return the number of bytes. The file appears whole or not at
    all."""
    import pyarrow.parquet as pq

    about = {"format": kind.format, "scheduler": scheduler, "sequence": sequence}
    table = table.replace_schema_metadata({_METADATA: json.dumps(about).encode()})
    half = path.with_suffix(".tmp")
    # Times do not repeat and numbers mostly count up: two thirds of the size, a third of the time.
    texts = [name for name, type_ in kind.columns.items() if type_ == "string"]
    counts = [name for name, type_ in kind.columns.items() if type_.startswith("int")]
    lists = [f"{n}.list.element" for n, type_ in kind.columns.items() if type_ == "list<int64>"]
    pq.write_table(
        table,
        half,
        compression="zstd",
        use_dictionary=texts,
        column_encoding=dict.fromkeys([*counts, *lists], "DELTA_BINARY_PACKED"),
    )
    half.replace(path)
    return path.stat().st_size


def file_name(scheduler: str, sequence: int, kind: Table = DECISIONS) -> str:
    """Names sort by scheduler, then by time."""
    return f"{scheduler}-{sequence:06d}{kind.suffix}"


def about_file(path: Path, schema: Any, kind: Table = DECISIONS) -> dict[str, Any]:
    """The writer of a file (`scheduler`), and the file's number (`sequence`).

    Raises:
        ValueError: it is not a file of this kind.
    """
    about: dict[str, Any] = json.loads((schema.metadata or {}).get(_METADATA, b"{}"))
    if (found := about.get("format")) != kind.format:
        raise ValueError(f"{path}: no decision log: format must be {kind.format!r}, got {found!r}")
    return about
