"""Writing of the decision log: rounds of a policy become rows."""

from __future__ import annotations

import base64
import json
import math
import tempfile
from pathlib import Path
from typing import Any, ClassVar

from ray_slo.core.cluster import Assigned, Cluster
from ray_slo.core.decisions import Action, Dispatch, Drop
from ray_slo.core.rehearsal import Rehearsed
from ray_slo.core.requests import WorkerId
from ray_slo.record.rows import (
    AFTER_REQUEST,
    AGAIN,
    BEFORE_WAKE,
    COLUMNS,
    DECISIONS,
    INDEX,
    Round,
    Row,
    Start,
    file_name,
    of_request,
    to_arrow,
    write_file,
)


class Encoder:
    """Makes rows from rounds, and adds them to `rows`. The caller takes them from there."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._round = 0
        self._start: Start | None = None
        self._at = 0.0
        self._cluster: Cluster | None = None
        self._profiles: dict[tuple[float, ...], int] = {}
        self._setting: str | None = None  # present setting of `auto`, as JSON
        # Worker and predicted finish time of each running batch, in seconds.
        self._predicted: dict[int, tuple[WorkerId, float]] = {}

    def _row(self, event: int, at: float, what: str, **values: Any) -> None:
        row: list[Any] = [None] * len(COLUMNS)
        row[:4] = (self._round, event, at, what)
        for name, value in values.items():
            row[INDEX[name]] = value
        self.rows.append(tuple(row))

    def start(self, start: Start, at: float) -> None:
        """Write the start of a policy."""
        self._round, self._at, self._start, self._cluster = 0, at, start, None
        self._setting = None
        self._predicted.clear()
        self._profiles.clear()
        self._row(0, at, "start", detail=start.to_json())

    def lost(self, rows: int, at: float) -> None:
        """Write the number of lost rows."""
        self._row(0, at, "lost", size=rows)

    def new_file(self) -> None:
        """Begin a new file. Repeat the facts without which its rows cannot be understood."""
        self._profiles.clear()
        if self._start is not None:
            self._row(0, self._at, "start", reason=AGAIN, detail=self._start.to_json())
        if self._cluster is not None:
            self._encode_cluster(0, self._at, self._cluster, AGAIN)
        if self._setting is not None:
            self._row(0, self._at, "setting", reason=AGAIN, detail=self._setting)

    def add(self, round: Round) -> None:
        """Write the rows of one round."""
        for i, (name, args) in enumerate(round.events):
            self._event(i, name, *args)
        number, now, none = self._round, round.now, (None,)
        if round.setting is not None:
            self._setting = json.dumps(dict(zip(("setting", "why"), round.setting, strict=True)))
            self._row(len(round.events), now, "setting", detail=self._setting)
        if round.decision is None:
            self._row(0, now, "error", detail=round.error)
        else:
            wake_at = round.decision.wake_at
            # This is `_row`, inlined: the call would be most of the cost of a round without events.
            self.rows.append((number, 0, now, "decide", *none * BEFORE_WAKE, wake_at, None, None))
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
                        *of_request(r),
                        *(None,) * AFTER_REQUEST,
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
        elif name == "solved":
            self._row(i, now, "solved", detail=json.dumps([_answer(a) for a in args[0]]))
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
                detail=d.note or None,
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
                [w.id, w.hardware, sorted(w.loaded), [_assigned(a) for a in w.assigned]]
                for w in cluster.workers.values()
            ],
            "delay_s": [cluster.delay.control_s, cluster.delay.per_request_s],
            "preempt_delay_s": cluster.preempt_delay_s,
        }
        self._row(i, now, "cluster", reason=reason, detail=json.dumps(body))


def _assigned(assigned: Assigned) -> list[Any]:
    return [assigned.variant, assigned.batch_size, assigned.load]


def _answer(answer: Any) -> dict[str, Any] | None:
    """Return the answer to a policy's problem as JSON data, or None if it has no file format."""
    if isinstance(answer, Rehearsed):
        return {"rehearsed": answer.to_json()}
    return {"table": _table_text(answer)} if hasattr(answer, "save") else None


def _table_text(table: Any) -> str:
    """Return a policy table (`papers.ramsis.Table`) as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.npz"
        table.save(path)
        return base64.b85encode(path.read_bytes()).decode()


class Lines:
    """A sink for simulated runs that writes one log into a folder when it is closed.

    A live scheduler uses `ray_slo.serve.watch.log_writer`, which writes without delaying decisions.
    """

    _subfolder = ""
    _kind = DECISIONS
    _make: ClassVar[type[Any]] = Encoder

    def __init__(self, folder: str | Path, name: str, start: Start, at: float = 0.0) -> None:
        self._folder, self._name = Path(folder) / self._subfolder, name
        self._encoder = self._make()
        self._encoder.start(start, at)

    def __call__(self, said: Any) -> None:
        self._encoder.add(said)

    def close(self) -> Path:
        """Write the file, and return its path."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / file_name(self._name, 0, self._kind)
        write_file(path, to_arrow(self._encoder.rows, kind=self._kind), self._name, 0, self._kind)
        return path
