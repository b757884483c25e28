"""A simulated or recorded run, for a report page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ray_slo.cli._output import number, percent
from ray_slo.cli.report_html import Table
from ray_slo.cli.report_source import MOST_REQUESTS, Source, down, outcomes, rounded
from ray_slo.cli.report_worst import WHY, Around, explained, worst

if TYPE_CHECKING:
    from ray_slo.simulation.report import Report


def of_report(report: Report, kind: str) -> Source:
    """A simulated or recorded run."""
    summary = report.summary()
    slos = ", ".join(f"{1e3 * s:g}" for s in sorted(set(report.meta["slo_s"].values())))
    facts = [
        ("policy", str(summary["policy"])),
        ("requests", f"{summary['requests']:,}"),
        ("SLO", f"{slos} ms"),
        ("offered", number(summary["offered_per_s"], suffix="/s")),
        ("goodput", number(summary["goodput_per_s"], suffix="/s")),
        ("violations", percent(summary["bad_rate"])),
        ("p50", number(summary["latency_p50_ms"], suffix=" ms")),
        ("p99", number(summary["latency_p99_ms"], suffix=" ms")),
        ("mean batch", number(summary["batch_size_mean"])),
        ("accuracy", number(summary["accuracy"], 4, " %")),
        ("workers", str(len(report.meta["workers"]))),
        ("idle", percent(summary["idle_fraction"])),
    ]
    notes = []
    frame = report.requests
    first = 0
    if len(frame) > MOST_REQUESTS:
        first = len(frame) - MOST_REQUESTS
        notes.append(
            f"Charts show the last {MOST_REQUESTS:,} of {len(frame):,} requests; the figures above "
            "are of all."
        )
    data = {
        "models": list(report.meta["models"]),
        "variants": list(report.meta["variants"]),
        "accuracy": [report.meta["accuracy"].get(v) for v in report.meta["variants"]],
        "workers": list(report.meta["workers"]),
        "slo_ms": [1e3 * report.meta["slo_s"][m] for m in report.meta["models"]],
        **outcomes(frame["outcome"].cat.categories),
        **_columns(report, first),
    }
    source = Source(f"{summary['policy']}: what it did", kind, facts, data, [], notes)
    around = Around(report)
    source.worst = [explained(report, around, i) for i in worst(frame)]
    if len(report.meta["models"]) > 1:
        source.tables.append(("By model", [], _by_model(summary)))
    if refused := _refused(report):
        source.tables.append(("Why requests were given up", [], refused))
    return source


def _columns(report: Report, first: int) -> dict[str, Any]:
    frame, b = report.requests, report.batches
    r = frame.iloc[first:]
    begin = float(r["arrival_s"].iloc[0]) if first else 0.0
    used = (b["finished_s"] >= begin).to_numpy() if len(b) else np.zeros(0, dtype=bool)
    number_of = np.cumsum(used) - 1  # of batches, among those shown
    batch = r["batch"].to_numpy()
    model_of, slack = np.full(len(b), -1), np.full(len(b), np.inf)
    served = frame["batch"].to_numpy() >= 0
    at = frame["batch"].to_numpy()[served]
    model_of[at] = frame["model"].cat.codes.to_numpy()[served]
    np.minimum.at(slack, at, frame["slack_s"].to_numpy()[served])
    end = max(float(frame["arrival_s"].max()), float(b["finished_s"].max()) if len(b) else 0.0)
    return {
        "from": down(max(begin, float(report.meta["warmup_s"]))),
        "to": -down(-end),
        "requests": {
            "t": rounded(r["arrival_s"], 4),
            "latency": rounded(1e3 * r["latency_s"], 2),
            "outcome": r["outcome"].cat.codes.tolist(),
            "model": r["model"].cat.codes.tolist(),
            "variant": r["variant"].cat.codes.tolist(),
            "worker": r["worker"].cat.codes.tolist(),
            "batch": np.where(batch >= 0, number_of[batch], -1).tolist() if len(b) else [],
        },
        "batches": {
            "worker": b["worker"].cat.codes[used].tolist(),
            "variant": b["variant"].cat.codes[used].tolist(),
            "model": model_of[used].tolist(),
            "size": b["size"][used].tolist(),
            "status": b["status"][used].astype(object).fillna("lost").tolist(),
            "sent": rounded(b["dispatched_s"][used], 4),
            "start": rounded(b["started_s"][used], 4),
            "finish": rounded(b["finished_s"][used], 4),
            "predicted": rounded(b["predicted_finish_s"][used], 4),
            "slack": rounded(1e3 * slack[used], 2),
        },
    }


def _by_model(summary: dict[str, Any]) -> Table:
    columns = ("model", "SLO ms", "offered/s", "goodput/s", "violations", "p50 ms", "p99 ms")
    rows = [
        (
            name,
            number(m["slo_ms"]),
            number(m["offered_per_s"]),
            number(m["goodput_per_s"]),
            percent(m["bad_rate"]),
            number(m["latency_p50_ms"]),
            number(m["latency_p99_ms"]),
        )
        for name, m in summary["models"].items()
    ]
    return Table(columns, rows)


def _refused(report: Report) -> Table | None:
    frame = report.requests
    dropped = frame[(frame["outcome"] == "dropped") & frame["measured"]]
    counts = dropped["drop_reason"].value_counts()
    rows = [
        (str(reason), f"{count:,}", WHY.get(str(reason), ""))
        for reason, count in counts.items()
        if count
    ]
    return Table(("reason", "requests", "meaning"), rows, prose=True) if rows else None
