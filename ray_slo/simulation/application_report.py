"""The results of a run of an application: frames from end to end, and the planner's decisions.

A *frame* is a client's request. The requests of tasks that it leads to have its deadline. A frame
is *ok* if all of them were served by then. It is *late* if the last one was late, *dropped* if one
was dropped, and *pending* if it was never answered. All frames that are not ok are SLO violations.

The accuracy of a frame is the mean accuracy of its leaves' paths. A leaf is a request at any task
that made no other request. So if the root made no request, the frame has the accuracy of the root's
variant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.core.decisions import DropReason
from ray_slo.simulation.frames import EPSILON_S, Array, Bools, Frames, frame, named

if TYPE_CHECKING:
    import pandas as pd

OUTCOMES = ("ok", "late", "dropped", "pending")
TASK_OUTCOMES = ("served", "dropped", "cancelled", "pending")


class ApplicationReport(Frames):
    """Frames of all streams, requests of tasks, batches and plans of one run.

    Figures are about the frames that arrive in [begin_s, end_s), and about the workers in this
    time. The default is the whole run.

    Args:
        meta: duration_s, seed, policy, planner, tasks, variants, accuracy, workers, slo_s, streams,
            and prices (of a worker-hour, by kind).
        frames: columns of shape (frames,): arrival_s, deadline_s, end_s (NaN: never), dropped,
            stream.
        requests: columns of shape (requests,): frame, task, parent (−1: none), arrival_s (at the
            task), batch (−1: none), drop_reason (−1: none), dropped_s. Those of clients come first.
        batches: as in `Report`.
        leaves: columns of shape (leaves,): frame, accuracy (percent).
        plans: one row per question to the planner.
        used: number of running workers over time, by kind: pairs of a time and the number from then
            on, in order of time.
    """

    def __init__(
        self,
        meta: Mapping[str, Any],
        frames: Mapping[str, Array],
        requests: Mapping[str, Array],
        batches: Mapping[str, Array],
        leaves: Mapping[str, Array],
        plans: Sequence[Mapping[str, Any]],
        used: Mapping[str, Sequence[tuple[float, int]]],
    ) -> None:
        super().__init__(meta, requests, batches)
        self._f = dict(frames)
        self._plans, self._used = list(plans), used
        n = len(self._f["arrival_s"])
        met = self._f["end_s"] <= self._f["deadline_s"] + EPSILON_S
        dropped, answered = self._f["dropped"], ~np.isnan(self._f["end_s"])
        self._outcome = np.select([dropped, met, answered], [2, 0, 1], 3)
        counts = np.bincount(leaves["frame"], minlength=n)
        total = np.bincount(leaves["frame"], leaves["accuracy"], minlength=n)
        self._leaves = counts
        whole = answered & ~dropped
        self._accuracy = np.where(whole, total / np.maximum(counts, 1), np.nan)

    # -- frames --------------------------------------------------------------------------------

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per frame: arrival_s, deadline_s, outcome, end_s (answered or dropped),
        latency_s, accuracy (percent; NaN if it was not served), leaves, dropped_at (the first task
        that dropped one of its requests) and drop_reason."""
        n = len(self._outcome)
        r = self._r
        task, reason = np.full(n, -1), np.full(n, -1)
        drops = np.flatnonzero(r["drop_reason"] >= 0)
        # The first drop is written last, so it stays.
        drops = drops[np.argsort(r["dropped_s"][drops], kind="stable")][::-1]
        task[r["frame"][drops]] = r["task"][drops]
        reason[r["frame"][drops]] = r["drop_reason"][drops]
        return frame(
            {
                "arrival_s": self._f["arrival_s"],
                "deadline_s": self._f["deadline_s"],
                "outcome": named(self._outcome, OUTCOMES),
                "end_s": self._f["end_s"],
                "latency_s": self._f["end_s"] - self._f["arrival_s"],
                "accuracy": self._accuracy,
                "leaves": self._leaves,
                "dropped_at": named(task, self.meta["tasks"]),
                "drop_reason": named(reason, [d.value for d in DropReason]),
            }
        )

    @cached_property
    def task_requests(self) -> pd.DataFrame:
        """One row per request of a task, those of clients first: frame, task, parent, arrival_s (at
        the task), outcome (served, dropped, cancelled, pending), drop_reason, dropped_s, batch,
        worker, variant, started_s, finished_s."""
        r = self._r
        cancelled = self._f["dropped"][r["frame"]]
        outcome = np.select([self.served, r["drop_reason"] >= 0, cancelled], [0, 1, 2], 3)
        return frame(
            {
                "frame": r["frame"],
                "task": named(r["task"], self.meta["tasks"]),
                "parent": r["parent"],
                "arrival_s": r["arrival_s"],
                "outcome": named(outcome, TASK_OUTCOMES),
                **self.fates(),
            }
        )

    @cached_property
    def plans(self) -> pd.DataFrame:
        """One row per question to the planner: asked_s, applied_s (NaN: never), why ("first plan",
        "period", "demand changed", "worker joined", …), demand (measured), planned_demand, step,
        shortfall (what cannot be served), workers (wanted number), accuracy, swaps, variants
        (number of workers by variant), explanation, error. From step to variants, except for
        workers, the plan is that for the present workers."""
        columns = (
            *("asked_s", "applied_s", "why", "demand", "planned_demand", "step", "shortfall"),
            *("workers", "accuracy", "swaps", "variants", "explanation", "error"),
        )
        return frame(self._plans, columns)

    @cached_property
    def workers(self) -> list[tuple[float, int]]:
        """Pairs of a time and the number of running workers of all kinds from then on. Workers that
        start or stop count."""
        now: dict[str, int] = {}
        found = []
        steps = [(t, kind, n) for kind, used in self._used.items() for t, n in used]
        for t, kind, n in sorted(steps, key=lambda step: step[0]):
            now[kind] = n
            found.append((t, sum(now.values())))
        return found

    # -- figures -------------------------------------------------------------------------------

    @cached_property
    def _worth(self) -> Array:
        """Accuracy (0 to 1) of frames in time; 0 for all others."""
        return np.where(self._outcome == 0, self._accuracy / 100, 0.0)

    def _select(self, begin_s: float, end_s: float | None, stream: str | None = None) -> Bools:
        arrival = self._f["arrival_s"]
        end = math.inf if end_s is None else end_s
        chosen: Bools = np.asarray((arrival >= begin_s) & (arrival < end))
        if stream is not None:
            chosen = np.asarray(chosen & (self._f["stream"] == self.meta["streams"].index(stream)))
        return chosen

    def count(
        self, outcome: str | None = None, begin_s: float = 0.0, end_s: float | None = None
    ) -> int:
        """Return the number of frames with one outcome (ok, late, dropped, pending), or of all."""
        chosen = self._select(begin_s, end_s)
        if outcome is not None:
            chosen = chosen & (self._outcome == OUTCOMES.index(outcome))
        return int(chosen.sum())

    def bad_rate(
        self, begin_s: float = 0.0, end_s: float | None = None, stream: str | None = None
    ) -> float:
        """Return the share of the frames that were not ok; NaN if none arrived."""
        chosen = self._select(begin_s, end_s, stream)
        return float((self._outcome[chosen] != 0).mean()) if chosen.any() else math.nan

    def accuracy(self, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Return the mean accuracy of the frames that were ok, in percent. NaN if there are
        none."""
        good = self._select(begin_s, end_s) & (self._outcome == 0)
        return float(self._accuracy[good].mean()) if good.any() else math.nan

    def value(
        self, begin_s: float = 0.0, end_s: float | None = None, stream: str | None = None
    ) -> float:
        """Return the mean accuracy (0 to 1) of the answers to clients' requests. A late or missing
        answer counts 0. NaN if no request arrived."""
        chosen = self._select(begin_s, end_s, stream)
        return float(self._worth[chosen].mean()) if chosen.any() else math.nan

    def streams(self, begin_s: float = 0.0, end_s: float | None = None) -> pd.DataFrame:
        """A row per stream: requests, rate and goodput (per second), bad_rate, value, accuracy (of
        requests in time, percent), p50_s, p95_s, p99_s (latency of answered requests)."""
        end = float(self.meta["duration_s"]) if end_s is None else end_s
        rows = []
        for stream in self.meta["streams"]:
            chosen = self._select(begin_s, end, stream)
            good = chosen & (self._outcome == 0)
            latency = (self._f["end_s"] - self._f["arrival_s"])[chosen & (self._outcome <= 1)]
            row: dict[str, Any] = {
                "stream": stream,
                "requests": int(chosen.sum()),
                "rate": float(chosen.sum() / (end - begin_s)),
                "goodput": float(good.sum() / (end - begin_s)),
                "bad_rate": self.bad_rate(begin_s, end, stream),
                "value": self.value(begin_s, end, stream),
                "accuracy": float(self._accuracy[good].mean()) if good.any() else math.nan,
            }
            for p in (50, 95, 99):
                row[f"p{p}_s"] = float(np.percentile(latency, p)) if len(latency) else math.nan
            rows.append(row)
        return frame(rows)

    # -- workers ------------------------------------------------------------------------------

    def workers_used(self, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Return the mean number of running workers over time."""
        end = float(self.meta["duration_s"]) if end_s is None else end_s
        times = np.array([t for t, _ in self.workers])
        numbers = np.array([n for _, n in self.workers], dtype=float)
        edges = np.clip(np.append(times, math.inf), begin_s, end)
        return float(numbers @ np.diff(edges) / (end - begin_s))

    def busy(self, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Return the mean number of workers that run a batch, over time."""
        end = float(self.meta["duration_s"]) if end_s is None else end_s
        start, finish = (np.clip(self._b[c], begin_s, end) for c in ("started_s", "finished_s"))
        return float((finish - start).sum() / (end - begin_s))

    def worker_hours(
        self, begin_s: float = 0.0, end_s: float | None = None, kind: str | None = None
    ) -> float:
        """Hours of running workers, of one kind or all. Starting and stopping workers count."""
        end = float(self.meta["duration_s"]) if end_s is None else end_s
        kinds = self._used if kind is None else {kind: self._used[kind]}
        hours = 0.0
        for used in kinds.values():
            times = np.clip([*(t for t, _ in used), math.inf], begin_s, end)
            hours += float(np.array([n for _, n in used], dtype=float) @ np.diff(times)) / 3600
        return hours

    def cost(self, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Price of all worker-hours."""
        prices: Mapping[str, float] = self.meta["prices"]
        return sum(p * self.worker_hours(begin_s, end_s, kind) for kind, p in prices.items())

    # -- predictions ---------------------------------------------------------------------------

    @cached_property
    def expected(self) -> pd.DataFrame:
        """A row per plan, for the time that it was in force: begin_s, end_s, requests, and
        predictions beside measurements: expected_accuracy, accuracy (percent), expected_bad,
        bad_rate. Plans without a request in their time are left out."""
        applied = sorted((p for p in self._plans if "applied_s" in p), key=lambda p: p["applied_s"])
        ends = [p["applied_s"] for p in applied[1:]] + [float(self.meta["duration_s"])]
        rows = []
        for plan, end in zip(applied, ends, strict=True):
            begin = plan["applied_s"]
            if end > begin and (count := self.count(None, begin, end)):
                row = {"begin_s": begin, "end_s": end, "requests": count}
                row |= {"expected_accuracy": plan.get("accuracy")}
                row |= {"accuracy": self.accuracy(begin, end)}
                row |= {"expected_bad": plan.get("expected_bad")}
                rows.append(row | {"bad_rate": self.bad_rate(begin, end)})
        columns = ("begin_s", "end_s", "requests", "expected_accuracy", "accuracy")
        return frame(rows, (*columns, "expected_bad", "bad_rate"))

    # -- summary -------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the figures of the whole run, as JSON data."""
        return {
            **{k: self.meta[k] for k in ("policy", "planner", "seed", "duration_s")},
            "requests": self.count(),
            **{outcome: self.count(outcome) for outcome in OUTCOMES},
            "violation_ratio": self.bad_rate(),
            "accuracy": self.accuracy(),
            "workers": self.workers_used(),
            "plans": len(self._plans),
            "value": self.value(),
            "bad_rate": self.bad_rate(),
            "worker_hours": self.worker_hours(),
            "cost": self.cost(),
        }

    def __repr__(self) -> str:
        return (
            f"ApplicationReport({self.meta['planner']}, {self.meta['policy']}: {self.count()} "
            f"requests, bad {self.bad_rate():.2%}, accuracy {self.accuracy():.4g} %, value "
            f"{self.value():.4g}, {self.workers_used():.3g} workers)"
        )
