"""The result of a load run: one row per request, a summary, files and plots."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ray_slo.core.files import whole, write_text
from ray_slo.load.workload import Payloads, Recorded

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATUSES = ("ok", "late", "refused", "expired", "timeout", "error")
_COLOURS = {
    "ok": "#2a9d5c",
    "late": "#e07b00",
    "refused": "#3b7dd8",
    "expired": "#9b59b6",
    "timeout": "#888888",
    "error": "#d62839",
}
# If the 99th percentile of the generator's lateness is above this, the summary has a warning.
LATE_GENERATOR_S = 0.02

# Column and converter of each header. Headers have times in milliseconds, columns in seconds.
_HEADERS: dict[str, tuple[str, Any]] = {
    "x-slo-model": ("model", str),
    "x-slo-variant": ("variant", str),
    "x-slo-accuracy": ("accuracy", float),
    "x-slo-batch-size": ("batch_size", float),
    "x-slo-queue-ms": ("queue_s", lambda text: float(text) / 1e3),
    "x-slo-exec-ms": ("exec_s", lambda text: float(text) / 1e3),
}


@dataclass(slots=True)
class Sample:
    """The result of one request. Times are in seconds from the start of the run."""

    sent_s: float = math.nan
    done_s: float = math.nan
    status: str = "error"  # answered | refused | expired | error | timeout
    code: int | None = None
    error: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    answer: Any = None  # body of the response, or result of the handle; parsed after the run


@dataclass(frozen=True)
class LoadResult:
    """Requests and figures of one run.

    Attributes:
        requests: one row per request, with these columns: `intended_s`, `sent_s`, `done_s` (from
            the start of the run), `latency_s` (from the intended time), `measured` (whether sent
            after the warm-up), `status` (one of `STATUSES`), `code`, `error`, `payload`, `label`,
            `answer` (the label in the answer) and `correct` (NA if unknown). If the answers tell
            them, also `model`, `variant`, `accuracy`, `batch_size`, `queue_s` and `exec_s`.
        slo_s: largest latency that counts as in time, in seconds.
        duration_s: time during which requests were sent, in seconds.
        warmup_s: time at the start that the figures do not count, in seconds.
        cpu_s: CPU time of the load generator, in seconds.
    """

    requests: pd.DataFrame
    slo_s: float
    duration_s: float
    warmup_s: float
    cpu_s: float

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample],
        workload: Recorded,
        payloads: Payloads | None,
        *,
        slo_s: float,
        cpu_s: float,
        label_field: str = "label",
    ) -> LoadResult:
        """Make the result from the samples and the CPU time that `drive` returned."""
        done = np.array([s.done_s for s in samples])
        latency = done - workload.times_s
        answered = np.array([s.status == "answered" for s in samples], dtype=bool)
        status = np.where(answered, np.where(latency <= slo_s, "ok", "late"), "")
        frame = pd.DataFrame(
            {
                "intended_s": workload.times_s,
                "sent_s": [s.sent_s for s in samples],
                "done_s": done,
                "latency_s": latency,
                "measured": workload.times_s >= workload.warmup_s,
                "status": [
                    text or s.status for text, s in zip(status.tolist(), samples, strict=True)
                ],
                "code": pd.array([s.code for s in samples], dtype="Int64"),
                "error": [s.error for s in samples],
                "payload": workload.payload,
            }
        )
        for header, (column, convert) in _HEADERS.items():
            values = [_convert(convert, s.headers.get(header)) for s in samples]
            if any(value is not None for value in values):
                frame[column] = values
        answers = [
            parse_label(s.answer, label_field) if s.status == "answered" else None for s in samples
        ]
        frame["answer"] = answers
        correct: list[bool | None] = [None] * len(samples)
        if payloads is not None and payloads.labels is not None:
            labels = [payloads.labels[i] for i in workload.payload]
            frame["label"] = labels
            correct = [
                got == label if ok else None
                for got, label, ok in zip(answers, labels, answered, strict=True)
            ]
        frame["correct"] = pd.array(correct, dtype="boolean")
        return cls(frame, slo_s, workload.duration_s, workload.warmup_s, cpu_s)

    @property
    def measured(self) -> pd.DataFrame:
        """The requests in the figures: those whose intended send time is after the warm-up."""
        return self.requests[self.requests["measured"]]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Figures by name. A figure is None if there is nothing to compute it from.

        Rates are per second of the measured window. `goodput` counts answers within the SLO.
        `bad_rate` is the share of requests without such an answer (late, refused, expired, …).
        Latency percentiles are over all answered requests, in time or late. `mean_batch` is the
        mean over batches; the mean over requests would weigh large batches more. `accuracy` is the
        share of right answers among those in time, if labels are known.
        """
        frame = self.measured
        window = self.duration_s - self.warmup_s
        counts = {s: int((frame["status"] == s).sum()) for s in STATUSES}
        answered = frame[frame["status"].isin(("ok", "late"))]
        in_time = frame[frame["status"] == "ok"]
        late_ms = 1e3 * (self.requests["sent_s"] - self.requests["intended_s"]).to_numpy()
        summary: dict[str, Any] = {
            "requests": len(frame),
            "window_s": window,
            "slo_ms": 1e3 * self.slo_s,
            "offered_rate": len(frame) / window,
            "goodput": counts["ok"] / window,
            "bad_rate": 1 - counts["ok"] / len(frame) if len(frame) else None,
            **{f"p{q}_ms": _percentile(answered["latency_s"], q) for q in (50, 95, 99)},
            "mean_batch": _mean_batch(answered),
            "accuracy": _mean(in_time["correct"]),
            "status": counts,
            "generator": {
                "late_p99_ms": float(np.percentile(late_ms, 99)) if len(late_ms) else 0.0,
                "late_max_ms": float(late_ms.max()) if len(late_ms) else 0.0,
                "cpu_ms_per_request": 1e3 * self.cpu_s / max(len(self.requests), 1),
            },
        }
        if "variant" in frame:
            mix = answered["variant"].value_counts(normalize=True)
            summary["variants"] = {str(k): float(v) for k, v in mix.items()}
        summary["warnings"] = self._warnings(summary)
        return summary

    def _warnings(self, summary: Mapping[str, Any]) -> list[str]:
        found = []
        late_ms = summary["generator"]["late_p99_ms"]
        if late_ms > 1e3 * LATE_GENERATOR_S:
            found.append(
                f"the load generator itself was late (p99 {late_ms:.0f} ms): this machine is too "
                "busy to send on time, and the latencies include that"
            )
        if not summary["requests"]:
            found.append("no request was sent after the warm-up: raise the rate or the duration")
        return found

    @property
    def sample_errors(self) -> dict[str, int]:
        """The error texts of failed requests and their counts, the most frequent first."""
        failed = self.measured[self.measured["status"] == "error"]
        texts = failed["error"].fillna("no text").str.slice(0, 160)
        return {str(k): int(v) for k, v in texts.value_counts().head(5).items()}

    def save(self, folder: str | Path) -> list[Path]:
        """Write `requests.csv`, `summary.json` and `latency.svg` into a folder. Return their
        paths."""
        out = Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        paths = [out / "requests.csv", out / "summary.json", out / "latency.svg"]
        with whole(paths[0]) as half:
            self.requests.to_csv(half, index=False)
        write_text(paths[1], json.dumps(self.summary, indent=1) + "\n")
        with whole(paths[2]) as half:
            self.plot().savefig(half, format="svg")
        return paths

    def plot(self) -> Figure:
        """Plot the latency over time on a logarithmic axis, with a point per request. A line shows
        the SLO."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 2.4), layout="constrained")
        axis = figure.subplots()
        for status, rows in self.requests.groupby("status"):
            axis.scatter(
                rows["intended_s"],
                1e3 * rows["latency_s"].clip(lower=1e-4),
                s=5,
                linewidths=0,
                color=_COLOURS[str(status)],
                label=str(status),
            )
        axis.axhline(1e3 * self.slo_s, linewidth=0.8, linestyle="--", color="#888888")
        axis.set_yscale("log")
        axis.set(xlabel="intended send time (s)", ylabel="latency (ms)")
        axis.legend(fontsize=7, loc="upper right", frameon=False, ncols=3, markerscale=2)
        return figure


def parse_label(answer: Any, label_field: str) -> str | None:
    """Return the label in an answer as text, or None if it has none. The answer is JSON as bytes, a
    dict, or a plain value."""
    if isinstance(answer, bytes):
        try:
            answer = json.loads(answer)
        except ValueError:
            answer = answer.decode(errors="replace").strip()
    if isinstance(answer, Mapping):
        answer = answer.get(label_field)
    if isinstance(answer, np.generic):
        answer = answer.item()
    return None if answer is None else str(answer)


def _convert(convert: Any, text: str | None) -> Any:
    try:
        return None if text is None else convert(text)
    except ValueError:
        return None


def _percentile(values: pd.Series[float], q: int) -> float | None:
    return 1e3 * float(np.percentile(values.to_numpy(), q)) if len(values) else None


def _mean(values: Any) -> float | None:
    known = values.dropna()
    return float(known.astype(float).mean()) if len(known) else None


def _mean_batch(answered: pd.DataFrame) -> float | None:
    """Return the mean batch size over batches. The rows are requests, so each of the b requests of
    a batch counts as 1/b batch."""
    if "batch_size" not in answered:
        return None
    sizes = answered["batch_size"].dropna()
    return float(len(sizes) / (1 / sizes).sum()) if len(sizes) else None
