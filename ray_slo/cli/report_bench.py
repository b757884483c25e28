"""The clients' view of a bench run, for a report page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from ray_slo.cli._output import number, percent
from ray_slo.cli.report_html import Details, Table
from ray_slo.cli.report_source import MOST_REQUESTS, WORST, Source, down, outcomes, rounded
from ray_slo.core.documents import Column, SloMs, check_arrays, naming
from ray_slo.core.explain import validated
from ray_slo.core.text import quoted

if TYPE_CHECKING:
    import pandas as pd

_NEEDED = {"intended_s", "sent_s", "latency_s", "measured", "status"}
_NUMBERS = {
    "intended_s": Column(),
    **dict.fromkeys(("sent_s", "latency_s", "queue_s", "exec_s"), Column(may_miss=True)),
    "accuracy": Column(may_miss=True),
    "batch_size": Column(0, 2**31, may_miss=True),
}


def of_bench(folder: Path) -> Source:
    """Return the page's content for a folder that `ray-slo bench --out` wrote.

    Raises:
        ValueError: its files are not those of a bench run.
    """
    summary, frame = _summary(folder / "summary.json"), _requests(folder / "requests.csv")
    slo_ms, measured = summary.slo_ms, frame["measured"].to_numpy(dtype=bool)
    facts, notes = _facts(summary, slo_ms), list(summary.warnings)
    data = _columns(frame, slo_ms, measured)
    if len(frame) > MOST_REQUESTS:
        notes.append(f"Charts show the last {MOST_REQUESTS:,} of {len(frame):,} requests.")
    source = Source("What clients saw", f"bench run {folder}", facts, data, [], notes)
    left = slo_ms - 1e3 * frame["latency_s"]
    chosen = frame[measured].assign(left=left[measured]).sort_values("left").head(WORST)
    source.worst = [_client_saw(row, slo_ms) for _, row in chosen.iterrows()]
    counts = Counter(frame["error"].dropna().astype(str)) if "error" in frame else Counter()
    if counts:
        rows = [(text[:200], f"{n:,}") for text, n in counts.most_common(10)]
        source.tables.append(("Errors", [], Table(("text", "requests"), rows)))
    return source


class _Summary(BaseModel):
    """What is read of a summary."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    slo_ms: SloMs
    requests: int
    offered_rate: float | None
    goodput: float | None
    bad_rate: float | None
    p50_ms: float | None
    p99_ms: float | None
    mean_batch: float | None
    accuracy: float | None
    warnings: list[str]


def _summary(path: Path) -> _Summary:
    with naming(path, "a bench run"):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return validated(_Summary, said)


def _requests(path: Path) -> pd.DataFrame:
    import pandas as pd

    from ray_slo.load.report import STATUSES

    with naming(path, "a bench run"):
        frame = pd.read_csv(path)
        if missing := sorted(_NEEDED - set(frame)):
            raise ValueError(f"it has no {', '.join(missing)}")
        if frame["measured"].dtype != bool and len(frame):
            raise ValueError("measured must be True or False")
        if wrong := sorted(set(frame["status"].astype(str)) - set(STATUSES)):
            raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {quoted(wrong[0])}")
        for name, column in _NUMBERS.items():
            if name in frame:
                found = frame[name].to_numpy()
                if found.dtype.kind not in "iuf":  # all of it may be missing
                    try:
                        found = pd.to_numeric(frame[name]).to_numpy(dtype=float)
                    except (ValueError, TypeError, OverflowError) as error:
                        raise ValueError(f"{name} must be numbers: {error}") from None
                check_arrays({name: found}, (len(frame),), **{name: column})
                frame[name] = found.astype(float)
        return frame


def _facts(summary: _Summary, slo_ms: float) -> list[tuple[str, str]]:
    return [
        ("requests", f"{summary.requests:,}"),
        ("SLO", number(slo_ms, suffix=" ms")),
        ("offered", number(summary.offered_rate, suffix="/s")),
        ("goodput", number(summary.goodput, suffix="/s")),
        ("violations", percent(summary.bad_rate)),
        ("p50", number(summary.p50_ms, suffix=" ms")),
        ("p99", number(summary.p99_ms, suffix=" ms")),
        ("mean batch", number(summary.mean_batch)),
        ("right answers", percent(summary.accuracy)),
    ]


def _columns(frame: pd.DataFrame, slo_ms: float, measured: NDArray[np.bool_]) -> dict[str, Any]:
    status = frame["status"].astype(str)
    names = list(dict.fromkeys(status))
    answered = status.isin(("ok", "late"))
    models, model = _coded(frame.get("model"), len(frame), "all")
    variants, variant = _coded(frame.get("variant"), len(frame), "")
    accuracy: list[float | None] = [None] * len(variants)
    if "accuracy" in frame and variants:
        by = frame.groupby(variant)["accuracy"].mean()
        means = [float(by.get(i, math.nan)) for i in range(len(variants))]
        accuracy = [None if math.isnan(mean) else mean for mean in means]
    shown = slice(max(len(frame) - MOST_REQUESTS, 0), None)
    t = frame["intended_s"].to_numpy()
    return {
        "models": models,
        "variants": variants,
        "accuracy": accuracy,
        "workers": [],
        "slo_ms": [slo_ms] * len(models),
        **outcomes(names),
        "from": down(min([*t[measured][:1].tolist(), t.max(initial=0.0)])),
        "to": -down(-t.max(initial=0.0)),
        "requests": {
            "t": rounded(t[shown], 4),
            "latency": rounded(np.where(answered, 1e3 * frame["latency_s"], np.nan)[shown], 2),
            "outcome": [names.index(s) for s in status[shown]],
            "model": model[shown].tolist(),
            "variant": variant[shown].tolist(),
            "worker": [-1] * len(t[shown]),
            "batch": [],
            "batch_size": rounded(frame["batch_size"][shown], 0) if "batch_size" in frame else [],
        },
        "batches": None,
    }


def _coded(values: Any, count: int, default: str) -> tuple[list[str], NDArray[Any]]:
    """Return the distinct names, and the index of each value among them. Missing values have index
    −1."""
    if values is None or values.isna().all():
        return ([default], np.zeros(count, int)) if default else ([], np.full(count, -1))
    names = sorted(values.dropna().astype(str).unique())
    index = {name: i for i, name in enumerate(names)}
    return names, np.array([-1 if v != v else index[str(v)] for v in values])


def _client_saw(row: Any, slo_ms: float) -> Details:
    latency = 1e3 * float(row["latency_s"])
    late_ms = 1e3 * (float(row["sent_s"]) - float(row["intended_s"]))
    steps = [f"intended send time: {row['intended_s']:.3f} s"]
    if late_ms > 1:
        steps.append(f"+{late_ms:.1f} ms: sent, as the load generator was late")
    known: Sequence[tuple[str, str]] = (
        ("queue_s", "waited in the queue for"),
        ("exec_s", "its batch ran for"),
    )
    for column, words in known:
        if column in row and row[column] == row[column]:
            steps.append(f"{words} {1e3 * row[column]:.1f} ms")
    if "variant" in row and isinstance(row["variant"], str):
        size = row.get("batch_size", math.nan)
        of = "" if size != size else f" in a batch of {size:.0f}"
        steps.append(f"answered by {row['variant']}{of}")
    status = str(row["status"])
    steps.append(f"+{latency:.1f} ms: {status}, with an SLO of {slo_ms:g} ms")
    if isinstance(row.get("error"), str):
        steps.append(str(row["error"])[:300])
    head = f"sent at {row['intended_s']:.3f} s: {status} after {latency:.1f} ms"
    model = row["model"] if isinstance(row.get("model"), str) else "all"
    return Details(head, steps, {"model": model, "outcome": status})
