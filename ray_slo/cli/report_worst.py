"""The worst requests of a run, explained step by step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.cli._output import number
from ray_slo.cli.report_html import Details
from ray_slo.cli.report_source import WORST
from ray_slo.core.decisions import DropReason

if TYPE_CHECKING:
    import pandas as pd

    from ray_slo.simulation.report import Report

WHY = {reason.value: reason.why for reason in DropReason}


def worst(frame: pd.DataFrame) -> list[int]:
    """Return the rows of the worst requests: late, dropped and pending ones in turn, the worst of
    each first. If none was missed, return those with the least slack."""
    slack = frame["slack_s"].to_numpy()
    bad = frame["outcome"].isin(("late", "dropped", "pending")).to_numpy()
    order = np.argsort(np.where(np.isnan(slack), np.inf, slack), kind="stable")
    if not bad.any():
        return [int(i) for i in order[:WORST] if not np.isnan(slack[i])]
    found: list[int] = []
    late = [int(i) for i in order if frame["outcome"].iat[i] == "late"]
    dropped = np.flatnonzero((frame["outcome"] == "dropped").to_numpy())
    waited = (frame["dropped_s"] - frame["arrival_s"]).to_numpy()
    dropped = dropped[np.argsort(-waited[dropped], kind="stable")]  # the longest wait first
    pending = np.flatnonzero((frame["outcome"] == "pending").to_numpy())
    kinds: list[list[int]] = [late, [int(i) for i in dropped], [int(i) for i in pending]]
    while len(found) < WORST and any(kinds):
        for kind in kinds:
            if kind and len(found) < WORST:
                found.append(kind.pop(0))
    return found


class Around:
    """Other requests and busy workers at a time, for explanations. A query takes O(log n)."""

    def __init__(self, report: Report) -> None:
        frame, b = report.requests, report.batches
        left = frame["started_s"].fillna(frame["dropped_s"]).fillna(np.inf)
        self.left_at = left.to_numpy()
        self.arrivals = np.sort(frame["arrival_s"].to_numpy())
        self.left = np.sort(self.left_at)
        self.start = b["started_s"].to_numpy() if len(b) else np.zeros(0)
        self.finish = b["finished_s"].to_numpy() if len(b) else np.zeros(0)
        self.worker = b["worker"].astype(str).to_numpy() if len(b) else np.zeros(0, dtype=str)

    def waiting(self, at: float) -> int:
        """Return the number of requests that arrived before `at` and had not left the queue."""
        before = bisect_right(self.arrivals, np.nextafter(at, -math.inf))
        return int(max(before - bisect_right(self.left, at), 0))

    def busy(self, at: float) -> dict[str, float]:
        """Return the busy workers, and the time in seconds when each was free again."""
        on = (self.start < at) & (self.finish > at)
        return dict(zip(self.worker[on].tolist(), self.finish[on].tolist(), strict=True))


def explained(report: Report, around: Around, i: int) -> Details:
    """Explain step by step what happened to one request."""
    r = report.requests.iloc[i]
    arrival, budget = float(r["arrival_s"]), float(r["deadline_s"] - r["arrival_s"])

    def at(time: float) -> str:
        return f"+{1e3 * (time - arrival):.1f} ms"

    busy = around.busy(arrival)
    steps = [
        f"arrived at {arrival:.3f} s for {r['model']}, to be answered within {1e3 * budget:.4g} "
        f"ms; requests waiting before it: {around.waiting(arrival)}, busy workers: {len(busy)}"
    ]
    worker, free = min(busy.items(), key=lambda item: item[1], default=("", math.inf))
    left = around.left_at[i]
    if free < left:
        steps.append(f"{at(free)}: {worker} was the first of these workers to be free")
    outcome = str(r["outcome"])
    head = f"{r['model']} at {arrival:.3f} s: "
    if outcome == "dropped":
        reason = str(r["drop_reason"])
        steps.append(f"{at(r['dropped_s'])}: given up ({reason}): {WHY.get(reason, reason)}")
        head += f"given up after {1e3 * (r['dropped_s'] - arrival):.1f} ms ({reason})"
    elif outcome == "pending":
        steps.append("no answer in this record: it was withdrawn, or the record ends before")
        head += "never answered"
    else:
        steps += _ran(report, r, at)
        slack = 1e3 * float(r["slack_s"])
        late = f"{-slack:.1f} ms late" if slack < 0 else f"{slack:.1f} ms to spare"
        head += f"answered after {1e3 * r['latency_s']:.1f} ms, {late}"
    return Details(head, steps, {"model": str(r["model"]), "outcome": outcome})


def _ran(report: Report, r: Any, at: Callable[[float], str]) -> list[str]:
    b = report.batches.iloc[int(r["batch"])]
    sent, started, finished = (float(b[k]) for k in ("dispatched_s", "started_s", "finished_s"))
    predicted = float(b["predicted_finish_s"])
    others = ("alone", "with one other")[b["size"] - 1] if b["size"] < 3 else ""
    others = others or f"with {b['size'] - 1} others"
    spare = 1e3 * (float(r["deadline_s"]) - predicted)
    steps = [
        f"{at(sent)}: sent to {b['worker']} {others} as {b['variant']}; predicted to end at "
        f"{at(predicted)}, "
        + (f"{spare:.1f} ms before its deadline" if spare >= 0 else f"{-spare:.1f} ms too late")
    ]
    if "price" in b and not math.isnan(b["price"]):
        steps[0] += f"; worth {number(b['price'], 4)} to the policy"
    begun = float(b["predicted_start_s"])
    delay = f" ({1e3 * (started - begun):.1f} ms later than predicted)" * (started - begun > 1e-3)
    steps.append(f"{at(started)}: the batch began{delay}")
    planned, took = predicted - begun, finished - started
    off = 1e3 * (took - planned)
    judged = "as predicted"
    if abs(off) > max(0.5, 30 * planned):
        judged = f"{abs(off):.1f} ms {'longer' if off > 0 else 'shorter'} than predicted"
    steps.append(f"{at(finished)}: done; it ran {1e3 * took:.1f} ms, {judged}")
    slack = float(r["slack_s"])
    if slack < 0:
        parts = {
            "waiting in the queue": sent - float(r["arrival_s"]),
            "getting to the worker": started - sent,
            "running": took,
        }
        largest = max(parts, key=lambda name: parts[name])
        steps.append(
            f"missed by {-1e3 * slack:.1f} ms. The longest part was {largest} "
            f"({1e3 * parts[largest]:.1f} ms)"
        )
    return steps
