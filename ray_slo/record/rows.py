"""The decision log: everything that a policy was fed and everything that it decided, as Parquet.

A `Recording` stands between a host and its policy, live and in the simulator alike, and hands one
`Round` per `decide` to a sink. An `Encoder` makes rows of rounds, `write_file` files of rows, and
`read` gives the rounds back exactly, to the last bit of every time.

One table; what stands in a column depends on `what` the row says (docs/decision-log.md). Every file
can be read without the others: it repeats who decides, and the cluster with its profiles. What a
planner decided is a table of its own (`plan_log`).
"""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ray_slo.core.cluster import Assigned, Cluster, DispatchDelay, Model, Variant, Worker
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason, Preempt
from ray_slo.core.policy import Policy
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, Upstream, WorkerId

FORMAT = "ray-slo/decision-log/1"
SUFFIX = ".decisions.parquet"
_METADATA = b"ray_slo"

# Name and Arrow type of every column, in order. Times are seconds in the scheduler's clock.
COLUMNS: dict[str, str] = {
    "round": "int64",  # number of the decision; an event belongs to the one that follows it
    "event": "int32",  # which call to the policy in its round; an action: which in the decision
    "at": "double",
    "what": "string",
    "request": "int64",
    "client": "string",
    "client_request": "int64",
    "model": "string",
    "arrival": "double",
    "deadline": "double",
    "size": "int32",  # of a request: its items; of a batch: its requests
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
_INDEX = {name: i for i, name in enumerate(COLUMNS)}
AGAIN = "again"  # reason of rows that repeat at the head of a file what is known by then

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
        decision: None where the policy raised `error`.
    """

    now: float
    events: Sequence[tuple[str, tuple[Any, ...]]]
    decision: Decision | None
    error: str = ""


@dataclass(frozen=True)
class Start:
    """Who decides, from here on.

    Attributes:
        policy: name or "module:attr"; None where it was a ready-made object.
        kwargs: its arguments; None where they are nothing that JSON can hold.
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


class Recording:
    """A policy that tells `sink` of every round. Everything else is the inner policy's."""

    serves_late: ClassVar[bool] = False  # shadowed by the inner policy's

    def __init__(self, policy: Policy, sink: Callable[[Round], None]) -> None:
        self.policy = policy
        self.serves_late = policy.serves_late  # type: ignore[misc]
        if hasattr(policy, "explain"):
            policy.explain = True
        self._sink = sink
        self._events: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self.policy, name)
        if name not in ("preempt_failed", "tables_solved"):  # events that not all policies take
            return inner

        def fed(*args: Any) -> None:
            self._events.append((name, args))
            inner(*args)

        return fed

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
        self._sink(Round(now, events, decision))
        return decision


# -- rows ------------------------------------------------------------------------------------


class Encoder:
    """Rounds in, rows out. `rows` is taken from by the caller."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._round = 0
        self._start: Start | None = None
        self._at = 0.0
        self._cluster: Cluster | None = None
        self._profiles: dict[tuple[float, ...], int] = {}
        self._predicted: dict[int, tuple[WorkerId, float]] = {}  # what runs: batch → its finish

    def _row(self, event: int, at: float, what: str, **values: Any) -> None:
        row: list[Any] = [None] * len(COLUMNS)
        row[:4] = (self._round, event, at, what)
        for name, value in values.items():
            row[_INDEX[name]] = value
        self.rows.append(tuple(row))

    def start(self, start: Start, at: float) -> None:
        """A policy begins its life."""
        self._round, self._at, self._start, self._cluster = 0, at, start, None
        self._predicted.clear()
        self._profiles.clear()
        self._row(0, at, "start", detail=start.to_json())

    def lost(self, rows: int, at: float) -> None:
        """So many rows were not kept."""
        self._row(0, at, "lost", size=rows)

    def new_file(self) -> None:
        """Repeat what a reader of the next rows alone must know."""
        self._profiles.clear()
        if self._start is not None:
            self._row(0, self._at, "start", reason=AGAIN, detail=self._start.to_json())
        if self._cluster is not None:
            self._encode_cluster(0, self._at, self._cluster, AGAIN)

    def add(self, round: Round) -> None:
        """Rows of one round."""
        for i, (name, args) in enumerate(round.events):
            self._event(i, name, *args)
        number, now, none = self._round, round.now, (None,)
        if round.decision is None:
            self._row(0, now, "error", detail=round.error)
        else:
            wake_at = round.decision.wake_at
            # As in `_row`, which would be most of the cost of a quiet round.
            self.rows.append((number, 0, now, "decide", *none * 17, wake_at, None, None))
            for i, action in enumerate(round.decision.actions):
                self._action(i, now, action)
        self._round += 1
        self._at = now

    def _event(self, i: int, name: str, now: float, *args: Any) -> None:
        if name == "requests_arrived":
            number, rows = self._round, self.rows
            for r in args[0]:
                rows.append(
                    (
                        *(number, i, now, "arrived", r.id),
                        getattr(r, "client", None),
                        getattr(r, "client_id", None),
                        *(r.model, r.arrival, r.deadline, r.size),
                        *(None,) * 12,
                        None if r.upstream is None else json.dumps(r.upstream),
                    )
                )
        elif name == "requests_cancelled":
            for r in args[0]:
                self._row(i, now, "cancelled", request=r.id)
        elif name == "batch_finished":
            worker, outcome = args
            _, predicted = self._predicted.pop(outcome.batch_id, (worker, None))
            requests = outcome.requests
            first = min([r.deadline for r in requests], default=math.nan)
            self._row(
                i,
                now,
                "finished",
                size=len(requests),
                worker=worker,
                batch=outcome.batch_id,
                requests=[r.id for r in requests],
                start_at=outcome.started_at,
                finish_at=outcome.finished_at,
                predicted_finish_at=predicted,
                slack_s=first - outcome.finished_at,
                reason=outcome.status.value,
            )
        elif name == "cluster_changed":
            self._cluster = args[0]
            here = self._cluster.workers
            gone = [b for b, (worker, _) in self._predicted.items() if worker not in here]
            for batch in gone:
                del self._predicted[batch]
            self._encode_cluster(i, now, self._cluster, None)
        elif name == "preempt_failed":
            self._row(i, now, "preempt_failed", worker=args[0], batch=args[1])
        elif name == "tables_solved":
            self._row(i, now, "tables", detail=json.dumps([_table_text(t) for t in args[0]]))
        else:
            raise ValueError(f"{name!r} is no event of a policy")

    def _action(self, i: int, now: float, action: Action) -> None:
        if isinstance(action, Dispatch):
            d = action
            self._predicted[d.batch_id] = (d.worker, d.finish_at)
            self._row(
                i,
                now,
                "dispatch",
                model=d.requests[0].model,
                size=len(d.requests),
                worker=d.worker,
                variant=d.variant,
                batch=d.batch_id,
                requests=[r.id for r in d.requests],
                start_at=d.start_at,
                finish_at=d.finish_at,
                slack_s=d.slack_s,
                value=d.price,
            )
        elif isinstance(action, Drop):
            self._row(
                i,
                now,
                "drop",
                size=len(action.requests),
                requests=[r.id for r in action.requests],
                finish_at=action.finish_at,
                slack_s=min(r.deadline for r in action.requests) - action.finish_at,
                reason=action.reason.value,
            )
        else:
            p = action
            self._row(
                i,
                now,
                "preempt",
                worker=p.worker,
                variant=p.variant,
                reason=p.reason,
                value=p.gain,
            )

    def _encode_cluster(self, i: int, now: float, cluster: Cluster, reason: str | None) -> None:
        for variant in cluster.variants.values():
            for profile in variant.profiles.values():
                key = tuple(profile.table)
                if key not in self._profiles:
                    number = self._profiles[key] = len(self._profiles)
                    self._row(i, now, "profile", size=number, table_s=list(key))
        numbers = self._profiles
        body = {
            "models": [
                [
                    m.name,
                    m.latency_slo_s,
                    [
                        [
                            v.name,
                            v.accuracy,
                            {kind: numbers[tuple(p.table)] for kind, p in v.profiles.items()},
                        ]
                        for v in m.variants
                    ],
                ]
                for m in cluster.models.values()
            ],
            "workers": [
                [w.id, w.hardware, sorted(w.loaded), _assigned(w.assigned)]
                for w in cluster.workers.values()
            ],
            "delay_s": [cluster.delay.control_s, cluster.delay.per_request_s],
            "preempt_delay_s": cluster.preempt_delay_s,
        }
        self._row(i, now, "cluster", reason=reason, detail=json.dumps(body))


def _assigned(assigned: Assigned | None) -> list[Any] | None:
    if assigned is None:
        return None
    return [assigned.variant, assigned.batch_size, assigned.load]


def _table_text(table: Any) -> str | None:
    """A policy table (`planning.ramsis.Table`) as text; None for one that has no file format."""
    if not hasattr(table, "save"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.npz"
        table.save(path)
        return base64.b85encode(path.read_bytes()).decode()


def _table_from(text: str) -> Any:
    from ray_slo.planning.ramsis.table import Table

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.npz"
        path.write_bytes(base64.b85decode(text))
        return Table.load(path)


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
    """Write an Arrow table of rows; bytes. The file is there whole or not at all."""
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
    """Who wrote a file (`scheduler`), and which of its files it is (`sequence`).

    Raises:
        ValueError: it is no such file.
    """
    about: dict[str, Any] = json.loads((schema.metadata or {}).get(_METADATA, b"{}"))
    if (found := about.get("format")) != kind.format:
        raise ValueError(f"{path}: no decision log: format must be {kind.format!r}, got {found!r}")
    return about


@dataclass(frozen=True)
class _File:
    path: Path
    scheduler: str
    sequence: int
    what: list[tuple[int, str, str | None, str | None, int | None]]  # of rows that bound a life


def _open(path: Path) -> _File:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            schema, table = file.schema_arrow, file.read(["what", "reason", "detail", "size"])
        about = about_file(path, schema)
        marks = pc.is_in(table["what"], value_set=pa.array(["start", "lost"]))
        found = []
        for i in pc.indices_nonzero(marks).to_pylist():
            row = table.slice(i, 1).to_pylist()[0]
            found.append((i, row["what"], row["reason"], row["detail"], row["size"]))
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: no decision log, or cut short: {error}") from None
    return _File(path, about["scheduler"], about["sequence"], found)


@dataclass(frozen=True)
class Life:
    """What one policy object was fed and decided, from its start or from what is left of it.

    Attributes:
        begins: its first event is here; without it a replay cannot be exact.
        lost: rows that were not kept, and files that are missing (as −1 each).
    """

    scheduler: str
    start: Start | None
    begins: bool
    lost: tuple[int, ...]
    _slices: tuple[tuple[Path, int, int | None], ...]

    @property
    def whole(self) -> bool:
        """Whether everything from its beginning is here."""
        return self.begins and not self.lost

    def rounds(self) -> Iterator[Round]:
        """In order; read file by file."""
        decoder = _Decoder()
        for path, begin, end in self._slices:
            yield from decoder.decode(_read_rows(path, begin, end))


def read(path: str | Path) -> list[Life]:
    """Every life in a file or a folder of them, by scheduler, in order.

    Raises:
        FileNotFoundError: no such file or folder.
        ValueError: no decision log there, or a file that is none or cut short; it is named.
    """
    path = Path(path)
    paths = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"{path}: no decision log here: no file *{SUFFIX}")
    if not path.exists():
        raise FileNotFoundError(2, "no such decision log", str(path))
    files = sorted((_open(p) for p in paths), key=lambda f: (f.scheduler, f.sequence))
    lives: list[dict[str, Any]] = []
    last: _File | None = None
    for file in files:
        follows = last is not None and last.scheduler == file.scheduler
        if not follows:
            lives.append(_life(file.scheduler))
        elif last is not None and file.sequence != last.sequence + 1:
            lives[-1]["lost"].append(-1)
        begin = 0
        for i, what, reason, detail, size in file.what:
            if what == "lost":
                lives[-1]["lost"].append(size)
            elif reason == AGAIN:
                lives[-1]["start"] = lives[-1]["start"] or Start.from_json(detail or "")
            else:
                if i > begin:
                    lives[-1]["_slices"].append((file.path, begin, i))
                if lives[-1]["_slices"] or lives[-1]["begins"]:
                    lives.append(_life(file.scheduler))
                lives[-1] |= {"start": Start.from_json(detail or ""), "begins": True}
                begin = i
        lives[-1]["_slices"].append((file.path, begin, None))
        last = file
    return [
        Life(**{**life, "lost": tuple(life["lost"]), "_slices": tuple(life["_slices"])})
        for life in lives
        if life["_slices"]
    ]


def _life(scheduler: str) -> dict[str, Any]:
    return {"scheduler": scheduler, "start": None, "begins": False, "lost": [], "_slices": []}


def _read_rows(path: Path, begin: int, end: int | None) -> Iterator[Row]:
    import pyarrow.parquet as pq

    # Opened once: a live writer may put a longer file in its place at any time.
    with pq.ParquetFile(path) as file:
        table = file.read(list(COLUMNS)).slice(begin)
    if end is not None:
        table = table.slice(0, end - begin)
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


class _Decoder:
    """Rows in, rounds out: the inverse of `Encoder`."""

    def __init__(self) -> None:
        self._profiles: dict[int, LatencyProfile] = {}
        self._cluster: Cluster | None = None
        self._requests: dict[int, Request] = {}

    def decode(self, rows: Iterable[Row]) -> Iterator[Round]:
        """Rounds of one file; what follows its last `decide` belongs to the next file's first."""
        (event_at, at_at, what_at), i = (_INDEX[k] for k in ("event", "at", "what")), _INDEX
        events: list[tuple[str, tuple[Any, ...]]] = []
        last: tuple[Any, ...] = ()
        deciding: Round | None = None
        for row in rows:
            what, at = row[what_at], row[at_at]
            if deciding is not None and what not in ("dispatch", "drop", "preempt"):
                yield deciding
                deciding, events, last = None, [], ()
            if what in ("arrived", "cancelled"):
                if what == "arrived":
                    request = self._request(row)
                else:
                    request = self._known(row[i["request"]])
                if last == (what, row[event_at]):
                    events[-1][1][1].append(request)
                else:
                    events.append((f"requests_{what}", (at, [request])))
                    last = (what, row[event_at])
                continue
            last = ()
            if what == "finished":
                status = BatchStatus(row[i["reason"]])
                requests = [self._known(r) for r in row[i["requests"]]]
                if status is BatchStatus.FINISHED:
                    for r in requests:
                        self._requests.pop(r.id, None)
                outcome = BatchOutcome(
                    row[i["batch"]], requests, row[i["start_at"]], row[i["finish_at"]], status
                )
                events.append(("batch_finished", (at, row[i["worker"]], outcome)))
            elif what == "profile":
                self._profiles[row[i["size"]]] = LatencyProfile(row[i["table_s"]])
            elif what == "cluster":
                known = self._cluster is not None
                self._cluster = self._decode_cluster(row[i["detail"]])
                if not (known and row[i["reason"]] == AGAIN):
                    events.append(("cluster_changed", (at, self._cluster)))
            elif what == "preempt_failed":
                events.append(("preempt_failed", (at, row[i["worker"]], row[i["batch"]])))
            elif what == "tables":
                texts = json.loads(row[i["detail"]])
                tables = [None if t is None else _table_from(t) for t in texts]
                events.append(("tables_solved", (at, tables)))
            elif what == "decide":
                deciding = Round(at, events, Decision([], row[i["wake_at"]]))
            elif what == "error":
                yield Round(at, events, None, row[i["detail"]])
                events = []
            elif deciding is not None and deciding.decision is not None:
                deciding.decision.actions.append(self._action(what, row))
        if deciding is not None:
            yield deciding

    def _request(self, row: Row) -> Request:
        number, client, client_request, model, arrival, deadline, size = row[4:11]
        known = self._requests.get(number)
        if known is not None and (known.arrival, known.deadline) == (arrival, deadline):
            return known  # came back
        detail = row[-1]
        upstream = None if detail is None else Upstream(*json.loads(detail))
        request = Logged(number, model, arrival, deadline, size, upstream)
        request.origin = None if client_request is None else (client, client_request)
        self._requests[number] = request
        return request

    def _known(self, number: int) -> Request:
        """A request that arrived before; nameless where that is not in the log any more."""
        request = self._requests.get(number)
        if request is None:
            request = self._requests[number] = Logged(number, "", math.nan, math.nan)
        return request

    def _action(self, what: str, row: Row) -> Action:
        i = _INDEX
        if what == "preempt":
            return Preempt(row[i["worker"]], row[i["reason"]], row[i["variant"]], row[i["value"]])
        requests = [self._known(r) for r in row[i["requests"]]]
        if what == "drop":
            for r in requests:
                self._requests.pop(r.id, None)
            return Drop(requests, DropReason(row[i["reason"]]), row[i["finish_at"]])
        return Dispatch(
            row[i["batch"]],
            row[i["worker"]],
            row[i["variant"]],
            requests,
            row[i["start_at"]],
            row[i["finish_at"]],
            row[i["value"]],
        )

    def _decode_cluster(self, text: str) -> Cluster:
        body = json.loads(text)
        models = [
            Model(
                name,
                slo_s,
                tuple(
                    Variant(v, {k: self._profiles[n] for k, n in numbers.items()}, accuracy)
                    for v, accuracy, numbers in variants
                ),
            )
            for name, slo_s, variants in body["models"]
        ]
        workers = [
            Worker(w, hardware, frozenset(loaded), None if plan is None else Assigned(*plan))
            for w, hardware, loaded, plan in body["workers"]
        ]
        delay = DispatchDelay(*body["delay_s"])
        return Cluster.of(models, workers, delay, body["preempt_delay_s"])


class Logged(Request):
    """A request from a log. `origin`: whose it was there (client, its number), if known."""

    __slots__ = ("origin",)
    origin: tuple[str, int] | None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.origin = None


class Lines:
    """A sink that writes one log into a folder, in order and at once: for simulated runs.

    A live scheduler has `ray_slo.record.writer`, which does not make decisions wait.
    """

    def __init__(self, folder: str | Path, name: str, start: Start, at: float = 0.0) -> None:
        self._folder, self._name = Path(folder), name
        self._encoder = Encoder()
        self._encoder.start(start, at)

    def __call__(self, round: Round) -> None:
        self._encoder.add(round)

    def close(self) -> Path:
        """Write the file; its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / file_name(self._name, 0)
        write_file(path, to_arrow(self._encoder.rows), self._name, 0)
        return path
