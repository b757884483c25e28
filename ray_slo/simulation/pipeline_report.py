"""The results of a run of a pipeline: frames from end to end, and the planner's decisions.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.core.decisions import DropReason
from ray_slo.core.files import whole
from ray_slo.simulation.frames import EPSILON_S, Array, Bools, Frames, frame, named

if TYPE_CHECKING:
    import pandas as pd

OUTCOMES = ("ok", "late", "dropped", "pending")
TASK_OUTCOMES = ("served", "dropped", "cancelled", "pending")


class PipelineReport(Frames):
    """Frames, requests of tasks, batches and plans of one run.

    Figures are about the frames that arrive in [begin_s, end_s), and about the workers in this
    time. The default is the whole run.

    Args:
        meta: duration_s, seed, policy, planner, tasks, variants, accuracy, workers, slo_s.
        frames: columns of shape (frames,): arrival_s, deadline_s, end_s (NaN: never), dropped.
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
    def workers(self) -> pd.DataFrame:
        """Number of running workers over time: time_s, and workers from then on. Workers that start
        or stop count."""
        return frame(self._in_all, ("time_s", "workers"))

    @cached_property
    def _in_all(self) -> list[tuple[float, int]]:
        """Return pairs of a time and the number of running workers of all kinds from then on."""
        now: dict[str, int] = {}
        found = []
        steps = [(t, kind, n) for kind, used in self._used.items() for t, n in used]
        for t, kind, n in sorted(steps, key=lambda step: step[0]):
            now[kind] = n
            found.append((t, sum(now.values())))
        return found

    # -- figures -------------------------------------------------------------------------------

    def _select(self, begin_s: float, end_s: float | None) -> Bools:
        arrival = self._f["arrival_s"]
        return np.asarray((arrival >= begin_s) & (arrival < (math.inf if end_s is None else end_s)))

    def count(
        self, outcome: str | None = None, begin_s: float = 0.0, end_s: float | None = None
    ) -> int:
        """Return the number of frames with one outcome (ok, late, dropped, pending), or of all."""
        chosen = self._select(begin_s, end_s)
        if outcome is not None:
            chosen = chosen & (self._outcome == OUTCOMES.index(outcome))
        return int(chosen.sum())

    def violation_ratio(self, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Return the share of the frames that were not ok. NaN if no frame arrived."""
        arrived = self.count(None, begin_s, end_s)
        return 1 - self.count("ok", begin_s, end_s) / arrived if arrived else math.nan

    def accuracy(self, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Return the mean accuracy of the frames that were ok, in percent. NaN if there are
        none."""
        good = self._select(begin_s, end_s) & (self._outcome == 0)
        return float(self._accuracy[good].mean()) if good.any() else math.nan

    def workers_used(self, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Return the mean number of running workers over time."""
        end = float(self.meta["duration_s"]) if end_s is None else end_s
        times = np.array([t for t, _ in self._in_all])
        numbers = np.array([n for _, n in self._in_all], dtype=float)
        edges = np.clip(np.append(times, math.inf), begin_s, end)
        return float(numbers @ np.diff(edges) / (end - begin_s))

    def busy(self, begin_s: float = 0.0, end_s: float | None = None) -> float:
        """Return the mean number of workers that run a batch, over time."""
        end = float(self.meta["duration_s"]) if end_s is None else end_s
        start, finish = (np.clip(self._b[c], begin_s, end) for c in ("started_s", "finished_s"))
        return float((finish - start).sum() / (end - begin_s))

    def windows(self, window_s: float) -> pd.DataFrame:
        """Return one row per window of the run: begin_s, demand (arrivals per second),
        violation_ratio, accuracy, workers (mean), busy (mean)."""
        if not window_s > 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        duration = float(self.meta["duration_s"])
        rows = []
        for i in range(math.ceil(duration / window_s - 1e-9)):
            begin, end = i * window_s, min((i + 1) * window_s, duration)
            rows.append(
                {
                    "begin_s": begin,
                    "demand": self.count(None, begin, end) / (end - begin),
                    "violation_ratio": self.violation_ratio(begin, end),
                    "accuracy": self.accuracy(begin, end),
                    "workers": self.workers_used(begin, end),
                    "busy": self.busy(begin, end),
                }
            )
        return frame(rows)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the whole run, as JSON data."""
        return {
            **{k: self.meta[k] for k in ("policy", "planner", "seed", "duration_s")},
            "requests": self.count(),
            **{outcome: self.count(outcome) for outcome in OUTCOMES},
            "violation_ratio": self.violation_ratio(),
            "accuracy": self.accuracy(),
            "workers": self.workers_used(),
            "plans": len(self._plans),
        }

    def plot(self, path: str | Path, window_s: float = 10.0) -> Path:
        """Write a PNG of demand, accuracy, workers and violations over time (Loki Figure 5)."""
        from matplotlib.figure import Figure

        windows = self.windows(window_s)
        panels = {
            "demand": ("requests per second", 1.0),
            "accuracy": ("accuracy (%)", 1.0),
            "workers": ("workers", 1.0),
            "violation_ratio": ("SLO violations (%)", 100.0),
        }
        figure = Figure(figsize=(8, 8), layout="constrained")
        for (column, (label, scale)), axes in zip(
            panels.items(), figure.subplots(len(panels), sharex=True), strict=True
        ):
            axes.step(windows.begin_s, scale * windows[column], where="post")
            axes.set_ylabel(label)
            if column != "accuracy":
                axes.set_ylim(bottom=0)
        axes.set_xlabel("time (s)")
        path = Path(path)
        with whole(path) as half:
            figure.savefig(half, dpi=120, format=path.suffix[1:] or None)
        return path

    def __repr__(self) -> str:
        return (
            f"PipelineReport({self.meta['planner']}, {self.meta['policy']}: {self.count()} frames, "
            f"violations {self.violation_ratio():.2%}, accuracy {self.accuracy():.4g} %, "
            f"{self.workers_used():.3g} workers)"
        )
