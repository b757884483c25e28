"""Reading of the decision log: rows become rounds of policies."""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_slo.core.cluster import Assigned, Cluster, DispatchDelay, Model, Variant, Worker
from ray_slo.core.decisions import Action, Decision, Dispatch, Drop, DropReason, Preempt
from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.rehearsal import Rehearsed
from ray_slo.core.requests import BatchOutcome, BatchStatus, Request, Upstream
from ray_slo.core.text import quoted
from ray_slo.record.rows import (
    AGAIN,
    COLUMNS,
    INDEX,
    OF_REQUEST,
    SUFFIX,
    Logged,
    Round,
    Row,
    Start,
    about_file,
    as_time,
    damaged,
    of_request,
)


@dataclass(frozen=True)
class _File:
    path: Path
    scheduler: str
    sequence: int
    # The rows of the file that begin or interrupt the life of a policy.
    what: list[tuple[int, Start | None, str | None, int]]


def _open(path: Path) -> _File:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            about = about_file(path, file)
            table = file.read(["what", "reason", "detail", "size"])
        marks = pc.is_in(table["what"], value_set=pa.array(["start", "lost"]))
        found = []
        for i in pc.indices_nonzero(marks).to_pylist():
            row = table.slice(i, 1).to_pylist()[0]
            with damaged(path, lambda i=i: f"row {i}: "):  # type: ignore[misc]
                start = Start.from_json(row["detail"]) if row["what"] == "start" else None
                lost = 0 if start is not None else int(row["size"])
            found.append((i, start, row["reason"], lost))
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: no decision log, or cut short: {error}") from None
    return _File(path, about["scheduler"], about["sequence"], found)


@dataclass(frozen=True)
class Life:
    """The events and decisions of one policy object. They begin at its start, or at the first row
    in the log if earlier rows were deleted.

    Attributes:
        scheduler: name of the scheduler.
        start: the policy and its arguments. None if unknown.
        begins: whether the log has its first event. Without it, a replay cannot be exact.
        lost: numbers of lost rows. −1 stands for a missing file.
    """

    scheduler: str
    start: Start | None
    begins: bool
    lost: tuple[int, ...]
    _slices: tuple[tuple[Path, int, int | None], ...]

    @property
    def whole(self) -> bool:
        """Whether the log has every row from the policy's start on."""
        return self.begins and not self.lost

    def rounds(self, load_table: Callable[[Path], Any] | None = None) -> Iterator[Round]:
        """Yield the rounds in order. Files are read one after the other.

        Args:
            load_table: function that loads a policy's table from its file. Without it, tables are
                None.
        """
        decoder = Decoder(load_table)
        for path, begin, end in self._slices:
            with damaged(path, lambda: f"row {decoder.row}: "):
                yield from decoder.decode(_read_rows(path, begin, end), begin)

    @property
    def path(self) -> Path:
        """The first file."""
        return self._slices[0][0]


def read(path: str | Path) -> list[Life]:
    """Return every policy's life in a file or a folder. They are sorted by scheduler, then by time.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the folder has no decision log, or a file is truncated or of another kind. The
            message names it.
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
        for i, start, reason, rows_lost in file.what:
            if start is None:
                lives[-1]["lost"].append(rows_lost)
            elif reason == AGAIN:
                lives[-1]["start"] = lives[-1]["start"] or start
            else:
                if i > begin:
                    lives[-1]["_slices"].append((file.path, begin, i))
                if lives[-1]["_slices"] or lives[-1]["begins"]:
                    lives.append(_life(file.scheduler))
                lives[-1] |= {"start": start, "begins": True}
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

    # The file is opened only once, because a live writer may replace it by a longer one.
    with pq.ParquetFile(path) as file:
        table = file.read(list(COLUMNS)).slice(begin)
    if "task" not in table.column_names:  # an older log
        table = table.add_column(INDEX["task"], "task", table["model"])
    if end is not None:
        table = table.slice(0, end - begin)
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


class Decoder:
    """Makes rounds from rows: the inverse of `Encoder`."""

    def __init__(self, load_table: Callable[[Path], Any] | None = None) -> None:
        self._load_table = load_table
        self._profiles: dict[int, LatencyProfile] = {}
        self._cluster: Cluster | None = None
        self._requests: dict[int, Request] = {}
        self.row = 0  # number of the current row in its file

    def decode(self, rows: Iterable[Row], first: int = 0) -> Iterator[Round]:
        """Yield the rounds of one file. Rows after its last `decide` belong to the first round of
        the next file.

        Args:
            first: number of the first row in its file.

        Raises:
            ValueError, TypeError, LookupError: a row contains what no log contains.
        """
        (event_at, at_at, what_at), i = (INDEX[k] for k in ("event", "at", "what")), INDEX
        events: list[tuple[str, tuple[Any, ...]]] = []
        last: tuple[Any, ...] = ()
        deciding: Round | None = None
        setting: tuple[str, str] | None = None
        for self.row, row in enumerate(rows, first):
            what, at = row[what_at], as_time("at", row[at_at])
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
                events.append(("batch_finished", (at, row[i["worker"]], self._outcome(row))))
            elif what == "profile":
                self._profiles[row[i["size"]]] = LatencyProfile(row[i["table_s"]])
            elif what == "cluster":
                known = self._cluster is not None
                self._cluster = self._decode_cluster(row[i["detail"]])
                if not (known and row[i["reason"]] == AGAIN):
                    events.append(("cluster_changed", (at, self._cluster)))
            elif what == "preempt_failed":
                events.append(("preempt_failed", (at, row[i["worker"]], row[i["batch"]])))
            elif what in ("solved", "tables"):
                answers = [self._answer(a) for a in json.loads(row[i["detail"]])]
                events.append(("solved", (at, answers)))
            elif what == "setting":
                if row[i["reason"]] != AGAIN:
                    said = json.loads(row[i["detail"]])
                    setting = str(said["setting"]), str(said["why"])
            elif what == "decide":
                deciding = Round(at, events, Decision([], row[i["wake_at"]]), setting=setting)
                setting = None
            elif what == "error":
                yield Round(at, events, None, row[i["detail"]])
                events = []
            elif what in ("dispatch", "drop", "preempt"):
                if deciding is None or deciding.decision is None:
                    raise ValueError(f"a {what} before the first decision")
                deciding.decision.actions.append(self._action(what, row))
            elif what not in ("start", "lost"):
                raise ValueError(f"what must be a kind of row, got {quoted(what)}")
        if deciding is not None:
            yield deciding

    def _answer(self, said: Any) -> Any:
        """Return the answer to a policy's problem. Older logs have rows "tables" instead, with the
        text of a table."""
        if isinstance(said, dict):
            if "rehearsed" in said:
                return Rehearsed.from_json(said["rehearsed"])
            said = said["table"]
        return None if said is None else self._table(said)

    def _table(self, text: str) -> Any:
        if self._load_table is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "table.npz"
            path.write_bytes(base64.b85decode(text))
            return self._load_table(path)

    def _request(self, row: Row) -> Request:
        number, client, client_request = row[4:7]
        said = row[OF_REQUEST]
        known = self._requests.get(number)
        for name in ("arrival", "deadline"):
            as_time(name, row[INDEX[name]])
        if number is None or said[0] is None or not (said[3] or 0) >= 1:
            raise ValueError(
                f"a request has a number, a model and a size of at least 1, got {number!r}, "
                f"{quoted(said[0])} and {said[3]!r}"
            )
        if known is not None and of_request(known) == said:
            return known  # the request came back to the queue
        detail = row[-1]
        upstream = None if detail is None else Upstream(*json.loads(detail))
        request = Logged(number, *said, upstream)
        request.origin = None if client_request is None else (client, client_request)
        self._requests[number] = request
        return request

    def _known(self, number: int) -> Request:
        """Return an earlier request. If its row is no longer in the log, its fields are unknown."""
        request = self._requests.get(number)
        if request is None:
            if number is None:
                raise ValueError("a request without a number")
            request = self._requests[number] = Logged(number, "", math.nan, math.nan)
        return request

    def _outcome(self, row: Row) -> BatchOutcome:
        i = INDEX
        status = BatchStatus(row[i["reason"]])
        requests = [self._known(r) for r in row[i["requests"]]]
        if status is BatchStatus.FINISHED:
            for r in requests:
                self._requests.pop(r.id, None)
        begin, end = (as_time(name, row[i[name]]) for name in ("start_at", "finish_at"))
        return BatchOutcome(row[i["batch"]], requests, begin, end, status)

    def _action(self, what: str, row: Row) -> Action:
        i = INDEX
        if what == "preempt":
            return Preempt(row[i["worker"]], row[i["reason"]], row[i["variant"]], row[i["value"]])
        requests = [self._known(r) for r in row[i["requests"]]]
        if what == "drop":
            for r in requests:
                self._requests.pop(r.id, None)
            return Drop(requests, DropReason(row[i["reason"]]), row[i["finish_at"]])
        if not requests or None in (row[i["batch"]], row[i["worker"]], row[i["variant"]]):
            raise ValueError("a batch has a number, a worker, a variant and requests")
        return Dispatch(
            row[i["batch"]],
            row[i["worker"]],
            row[i["variant"]],
            requests,
            as_time("start_at", row[i["start_at"]]),
            as_time("finish_at", row[i["finish_at"]]),
            row[i["value"]],
        )

    def _decode_cluster(self, text: str) -> Cluster:
        body = json.loads(text)
        models = [
            Model(
                _name(name),
                as_time("SLO", slo_s),
                tuple(
                    Variant(
                        _name(v),
                        {k: self._profiles[n] for k, n in numbers.items()},
                        None if accuracy is None else as_time("accuracy", accuracy),
                    )
                    for v, accuracy, numbers in variants
                ),
            )
            for name, slo_s, variants in body["models"]
        ]
        workers = [
            Worker(_name(w), _name(hardware), frozenset(map(_name, loaded)), _assigned(plan))
            for w, hardware, loaded, plan in body["workers"]
        ]
        delay = DispatchDelay(*(as_time("delay_s", s) for s in body["delay_s"]))
        return Cluster.of(
            models, workers, delay, as_time("preempt_delay_s", body["preempt_delay_s"])
        )


def _name(said: Any) -> str:
    if not isinstance(said, str):
        raise ValueError(f"a name must be text, got {quoted(said)}")
    return said


def _assigned(said: list[Any] | None) -> tuple[Assigned, ...]:
    """Return the assignments of a row. Older logs have None, or one variant."""
    if not said:
        return ()
    parts = said if isinstance(said[0], list) else [said]
    return tuple(
        Assigned(_name(variant), int(size), *(as_time("load", x) for x in load if x is not None))
        for variant, size, *load in parts
    )
