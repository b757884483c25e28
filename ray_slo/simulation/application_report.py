"""The results of a run of an application: by stream, by kind of worker, and compared with the
plan's predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.simulation.frames import Array, Bools, frame
from ray_slo.simulation.pipeline_report import PipelineReport

if TYPE_CHECKING:
    import pandas as pd


class ApplicationReport(PipelineReport):
    """A `PipelineReport` over all streams, with the figures of each stream.

    Args:
        meta: as in `PipelineReport`, with streams, and with the price of a worker-hour by kind.
        frames: as in `PipelineReport`, with the column stream.
    """

    @cached_property
    def _worth(self) -> Array:
        """Accuracy (0 to 1) of requests in time; 0 for all others."""
        return np.where(self._outcome == 0, self._accuracy / 100, 0.0)

    # -- answers ----------------------------------------------------------------------

    def value(
        self, begin_s: float = 0.0, end_s: float | None = None, stream: str | None = None
    ) -> float:
        """Mean accuracy (0 to 1) of the answers to clients' requests. A late or missing answer
        counts 0. NaN if no request arrived."""
        chosen = self._of(begin_s, end_s, stream)
        return float(self._worth[chosen].mean()) if chosen.any() else math.nan

    def bad_rate(
        self, begin_s: float = 0.0, end_s: float | None = None, stream: str | None = None
    ) -> float:
        """Share of clients' requests that were not answered in time; NaN if none arrived."""
        chosen = self._of(begin_s, end_s, stream)
        return float((self._outcome[chosen] != 0).mean()) if chosen.any() else math.nan

    def _of(self, begin_s: float, end_s: float | None, stream: str | None) -> Bools:
        chosen = self._select(begin_s, end_s)
        if stream is None:
            return chosen
        number = self.meta["streams"].index(stream)
        return np.asarray(chosen & (self._f["stream"] == number))

    def streams(self, begin_s: float = 0.0, end_s: float | None = None) -> pd.DataFrame:
        """A row per stream: requests, rate and goodput (per second), bad_rate, value, accuracy (of
        requests in time, percent), p50_s, p95_s, p99_s (latency of answered requests)."""
        end = float(self.meta["duration_s"]) if end_s is None else end_s
        rows = []
        for stream in self.meta["streams"]:
            chosen = self._of(begin_s, end, stream)
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

    # -- workers --------------------------------------------------------------------------

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

    # -- predictions ---------------------------------------------------------------------

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

    def summary(self) -> dict[str, Any]:
        return {
            **super().summary(),
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
