"""What a report page shows, from a decision log, a simulation or a bench run: columns and words.

Everything here is a `Source`: columns per request and per batch, as the page's charts want them
(`data`), and what is said in words: facts, tables, and the worst requests step by step.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ray_slo.cli._output import number, percent
from ray_slo.cli.report_html import Details, Table
from ray_slo.core.decisions import DropReason

if TYPE_CHECKING:
    import pandas as pd

    from ray_slo.core.cluster import Cluster
    from ray_slo.record.decode import Life
    from ray_slo.record.plans import Planned
    from ray_slo.simulation.replay import Tape
    from ray_slo.simulation.report import Report

MOST_REQUESTS = 50_000  # in the charts; a page should open on a phone
WORST = 10
_MOST_CHANGES = 100
_MOST_PLANS = 500

# Outcome: (colour of the page, whether it is a violation).
OUTCOMES: dict[str, tuple[str, bool]] = {
    "good": ("good", False),
    "late": ("late", True),
    "dropped": ("dropped", True),
    "pending": ("pending", True),
    "ok": ("good", False),
    "refused": ("dropped", True),
    "expired": ("expired", True),
    "timeout": ("pending", True),
    "error": ("failed", True),
}

_WHY = {reason.value: reason.why for reason in DropReason}


@dataclass
class Source:
    """One run, ready to be shown.

    Attributes:
        kind: what it was read from, in words.
        facts: (name, value) for the head of the page.
        data: for the charts; see `templates/report.js`.
        notes: what a reader should know before believing the page.
        tables: (heading, words, table).
        plans: decisions of the planner, as a table; None where there is none.
        worst: the worst requests, explained.
    """

    title: str
    kind: str
    facts: list[tuple[str, str]]
    data: dict[str, Any]
    worst: list[Details]
    notes: list[str] = field(default_factory=list)
    tables: list[tuple[str, list[str], Table]] = field(default_factory=list)
    plans: Table | None = None


def load(path: str | Path, run: str | None = None, warmup_s: float = 0.0) -> Source:
    """Read a decision log (file or folder), a simulation (`report.npz`, or the folder that
    `ray-slo simulate --report` wrote) or a bench run (the folder of `ray-slo bench --out`).

    Raises:
        FileNotFoundError: nothing there.
        ValueError: none of these, or broken.
    """
    from ray_slo.record.rows import SUFFIX
    from ray_slo.simulation.report import Report

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(2, "No such file or folder", str(path))
    if path.suffix == ".npz" or (path / "report.npz").is_file():
        file = path if path.is_file() else path / "report.npz"
        return of_report(Report.load(file), f"simulation {file}")
    if (path / "requests.csv").is_file() and (path / "summary.json").is_file():
        return of_bench(path)
    if path.is_file() or list(path.glob(f"*{SUFFIX}")):
        return of_log(path, run, warmup_s)
    raise ValueError(
        f"{path}: neither a decision log (*{SUFFIX}), nor a simulation (report.npz), nor a bench "
        "run (requests.csv and summary.json)"
    )


# -- decision logs and simulations -----------------------------------------------------------


def of_log(path: Path, run: str | None = None, warmup_s: float = 0.0) -> Source:
    """The newest scheduler of the log that served anything, or `run`."""
    from datetime import datetime, timezone

    from ray_slo.record.decode import read
    from ray_slo.simulation.replay import recorded, tape

    lives = [life for life in read(path) if run is None or run in life.scheduler]
    if not lives:
        raise ValueError(f"--run: no scheduler {run!r} in {path}")
    life, found = lives[-1], None
    for life in reversed(lives):
        try:
            found = tape(life)
            break
        except ValueError:
            if life is lives[0]:
                raise
    assert found is not None
    report = recorded(found, warmup_s)
    start = life.start
    report.meta["policy"] = (start and start.policy) or "its own policy"
    source = of_report(report, f"decision log {life.scheduler}")
    about = dict(start.about) if start else {}
    if "wall_at" in about:
        at = datetime.fromtimestamp(about["wall_at"], timezone.utc)
        source.facts.insert(1, ("since", f"{at:%Y-%m-%d %H:%M} UTC"))
    if not life.begins:
        source.notes.append("The beginning of this log is gone: its bound in size was reached.")
    if lost := sum(n for n in life.lost if n > 0):
        source.notes.append(f"{lost} rows were not kept, as the writer could not keep up.")
    if found.cancels:
        source.notes.append(
            f"{len(found.cancels)} requests were withdrawn by their clients; they count as pending."
        )
    source.notes += [f"At {t - found.zero:.3f} s the policy raised {e}" for t, e in found.errors]
    if others := len(lives) - 1:
        source.notes.append(
            f"The log holds {others} more scheduler{'s' * (others > 1)}; see --run."
        )
    _add_plans(source, life, found, path if path.is_dir() else path.parent)
    if found.preempts:
        rows = [
            (f"{at - found.zero:.3f}", p.worker, p.variant, number(p.gain), p.reason)
            for at, p in found.preempts[:_MOST_CHANGES]
        ]
        columns = ("at (s)", "worker", "to run", "gain in requests", "why")
        words = [f"The first {len(rows)} of {len(found.preempts)}."]
        source.tables.append(("Preemptions", words, Table(columns, rows, prose=True)))
    if changes := list(_changes(found)):
        shown = changes[:_MOST_CHANGES]
        words = [
            "Workers, what the planner wants of them, and profiles that the scheduler learned, as "
            "the policy was told."
        ]
        if len(changes) > len(shown):
            words.append(f"The first {len(shown)} of {len(changes)}.")
        table = Table(("at (s)", "what changed"), shown, prose=True)
        source.tables.append(("What the policy was told of the cluster", words, table))
    return source


def _add_plans(source: Source, life: Life, found: Tape, folder: Path) -> None:
    """What planners of the same application decided while the scheduler lived, in its time."""
    from ray_slo.record.plans import read

    about = dict(life.start.about) if life.start else {}
    begin, end = found.clusters[0][0], found.end + 5.0
    placed: list[tuple[float, Planned]] = []
    elsewhere: list[Planned] = []
    for planner in read(folder):
        theirs = planner.start.about
        same = theirs.get("application") == about.get("application")
        if not same and not set(about.get("models", ["?"])) <= set(theirs.get("models", ())):
            continue
        source.facts.insert(1, ("planner", str(planner.start.policy)))
        for p in planner.plans:
            shift = planner.shift(about.get("clock"), p.at)
            if shift is None:
                elsewhere.append(p)
            else:
                placed.append((p.at + shift, p))
        if planner.lost:
            source.notes.append(f"{planner.lost} decisions of the planner were not kept.")
    source.facts = list(dict(source.facts).items())
    placed.sort(key=lambda item: item[0])
    before = [item for item in placed if item[0] < begin and not item[1].error][-1:]
    placed = before + [item for item in placed if begin <= item[0] <= end]
    if elsewhere and not placed:
        source.notes.append(
            "The planner ran on another machine, whose clock was never compared with the "
            "scheduler's: its decisions are listed by its own, and not marked in charts."
        )
        rows = [_plan_row(_wall(p), p) for p in elsewhere[-_MOST_PLANS:]]
        source.plans = _plan_table(rows, elsewhere[-_MOST_PLANS:], [None] * len(rows))
    if not placed:
        return
    if len(placed) > _MOST_PLANS:
        source.notes.append(
            f"The last {_MOST_PLANS} of {len(placed)} decisions of the planner are shown."
        )
        placed = placed[-_MOST_PLANS:]
    times = [at - found.zero for at, _ in placed]
    plans = [p for _, p in placed]
    rows = [_plan_row(f"{t:.2f}", p) for t, p in zip(times, plans, strict=True)]
    source.plans = _plan_table(rows, plans, times)
    marked = [(t, p) for t, p in zip(times, plans, strict=True) if p.changes or p.error]
    source.data["plans"] = {
        "t": _rounded([t + (p.took_s or 0.0) for t, p in marked], 4),
        "failed": [bool(p.error) for _, p in marked],
        "words": [f"{p.trigger}: " + (p.error or "; ".join(p.changes)) for _, p in marked],
    }


def _wall(p: Planned) -> str:
    from datetime import datetime, timezone

    return f"{datetime.fromtimestamp(p.wall_at or 0.0, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _plan_table(rows: Any, plans: Sequence[Planned], times: Sequence[float | None]) -> Table:
    kinds = ["failed" if p.error else "changed" if p.changes else "" for p in plans]
    names = ("at (s)", "trigger", "demand", "workers wanted", "changes", "took (ms)", "why")
    return Table(names, rows, kinds=kinds, times=[t and round(t, 3) for t in times])


def _plan_row(at: str, p: Planned) -> tuple[str, ...]:
    targets = [f"{n} {kind}" for kind, n in p.targets.items() if n is not None]
    why = f"{p.error}. The last plan holds." if p.error else p.why
    if p.shortfall and p.shortfall not in why:
        why = f"{why} Short of it: {p.shortfall}."
    took = "" if p.took_s is None else number(1e3 * p.took_s)
    demand = "" if p.demand is None else number(p.demand, suffix="/s")
    return at, p.trigger, demand, ", ".join(targets), "\n".join(p.changes), took, why


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
    frame, batches = report.requests, report.batches
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
        **_outcomes(frame["outcome"].cat.categories),
        **_columns(report, first),
    }
    source = Source(f"{summary['policy']}: what it did", kind, facts, data, [], notes)
    source.worst = [_explained(report, i) for i in _worst(frame, batches)]
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
        "from": _down(max(begin, float(report.meta["warmup_s"]))),
        "to": -_down(-end),
        "requests": {
            "t": _rounded(r["arrival_s"], 4),
            "latency": _rounded(1e3 * r["latency_s"], 2),
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
            "sent": _rounded(b["dispatched_s"][used], 4),
            "start": _rounded(b["started_s"][used], 4),
            "finish": _rounded(b["finished_s"][used], 4),
            "predicted": _rounded(b["predicted_finish_s"][used], 4),
            "slack": _rounded(1e3 * slack[used], 2),
        },
    }


def _outcomes(names: Iterable[str]) -> dict[str, Any]:
    return {
        "outcomes": [{"name": n, "colour": OUTCOMES[n][0], "bad": OUTCOMES[n][1]} for n in names]
    }


def _down(seconds: float) -> float:
    """To 0.1 ms, as times are given to the page, and never up."""
    return math.floor(1e4 * float(seconds)) / 1e4


def _rounded(values: Any, digits: int) -> list[float | None]:
    array = np.asarray(values, dtype=float)
    return [v if math.isfinite(v) else None for v in np.round(array, digits).tolist()]


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
        (str(reason), f"{count:,}", _WHY.get(str(reason), ""))
        for reason, count in counts.items()
        if count
    ]
    return Table(("reason", "requests", "meaning"), rows, prose=True) if rows else None


def _changes(tape: Tape) -> Iterable[tuple[str, str]]:
    last: Cluster | None = None
    for at, cluster in tape.clusters:
        said = list(_change(last, cluster))
        if said:
            yield f"{round(at - tape.zero, 2) + 0.0:.2f}", "; ".join(said)
        last = cluster


def _change(old: Cluster | None, new: Cluster) -> Iterable[str]:
    before = old.workers if old else {}
    for gone in set(before) - set(new.workers):
        yield f"{gone} left"
    for w in new.workers.values():
        was = before.get(w.id)
        if was is None:
            yield f"{w.id} ({w.hardware}) is there with {', '.join(sorted(w.loaded))}"
        elif was.loaded != w.loaded:
            yield f"{w.id} has loaded {', '.join(sorted(w.loaded)) or 'nothing'}"
        if w.assigned is not None and (was is None or was.assigned != w.assigned):
            load = "" if w.assigned.load is None else f" for {w.assigned.load:.3g} requests/s"
            yield (
                f"the plan wants {w.assigned.variant} of {w.id}, in batches of at most "
                f"{w.assigned.batch_size}{load}"
            )
    if old is None:
        return
    for v in new.variants.values():
        for kind, profile in v.profiles.items():
            then = old.variants[v.name].profiles.get(kind) if v.name in old.variants else None
            if then is not None and profile.table != then.table:
                b = min(8, profile.max_batch_size)
                if abs(profile(b) / then(b) - 1) > 0.1:
                    yield (
                        f"{v.name} on {kind}: a batch of {b} takes {1e3 * profile(b):.3g} ms, not "
                        f"{1e3 * then(b):.3g} ms"
                    )


# -- the worst requests ----------------------------------------------------------------------


def _worst(frame: pd.DataFrame, batches: pd.DataFrame) -> list[int]:
    """Those that were missed by most, of all kinds; without any miss those with least slack."""
    slack = frame["slack_s"].to_numpy()
    bad = frame["outcome"].isin(("late", "dropped", "pending")).to_numpy()
    order = np.argsort(np.where(np.isnan(slack), np.inf, slack), kind="stable")
    if not bad.any():
        return [int(i) for i in order[:WORST] if not np.isnan(slack[i])]
    found: list[int] = []
    late = [int(i) for i in order if frame["outcome"].iat[i] == "late"]
    dropped = np.flatnonzero((frame["outcome"] == "dropped").to_numpy())
    waited = (frame["dropped_s"] - frame["arrival_s"]).to_numpy()
    dropped = dropped[np.argsort(-waited[dropped], kind="stable")]  # refused latest
    pending = np.flatnonzero((frame["outcome"] == "pending").to_numpy())
    kinds: list[list[int]] = [late, [int(i) for i in dropped], [int(i) for i in pending]]
    while len(found) < WORST and any(kinds):
        for kind in kinds:
            if kind and len(found) < WORST:
                found.append(kind.pop(0))
    return found


class _Around:
    """What else was going on, for explanations. O(log n) to ask."""

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
        """Requests that had arrived before and not left the queue."""
        before = bisect_right(self.arrivals, np.nextafter(at, -math.inf))
        return int(max(before - bisect_right(self.left, at), 0))

    def busy(self, at: float) -> dict[str, float]:
        """Busy workers, and when each was free again."""
        on = (self.start < at) & (self.finish > at)
        return dict(zip(self.worker[on].tolist(), self.finish[on].tolist(), strict=True))


def _around(report: Report) -> _Around:
    made: _Around | None = report.__dict__.get("_around")
    if made is None:
        made = report.__dict__["_around"] = _Around(report)
    return made


def _explained(report: Report, i: int) -> Details:
    """One request's way, from the frames."""
    r = report.requests.iloc[i]
    around = _around(report)
    arrival, budget = float(r["arrival_s"]), float(r["deadline_s"] - r["arrival_s"])

    def at(time: float) -> str:
        return f"+{1e3 * (time - arrival):.1f} ms"

    busy = around.busy(arrival)
    steps = [
        f"arrived at {arrival:.3f} s for {r['model']}, to be answered within {1e3 * budget:.4g} "
        f"ms; {around.waiting(arrival) or 'nobody'} waited before it, {len(busy) or 'no'} "
        f"worker{'s were' if len(busy) != 1 else ' was'} busy"
    ]
    worker, free = min(busy.items(), key=lambda item: item[1], default=("", math.inf))
    left = around.left_at[i]
    if free < left:
        steps.append(f"{at(free)}: {worker} was the first of them to be done")
    outcome = str(r["outcome"])
    head = f"{r['model']} at {arrival:.3f} s: "
    if outcome == "dropped":
        reason = str(r["drop_reason"])
        steps.append(f"{at(r['dropped_s'])}: given up ({reason}): {_WHY.get(reason, reason)}")
        head += f"given up after {1e3 * (r['dropped_s'] - arrival):.1f} ms ({reason})"
    elif outcome == "pending":
        steps.append("never answered in this record: withdrawn, or it ends before")
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
            "it waited in the queue": sent - float(r["arrival_s"]),
            "the way to the worker": started - sent,
            "the execution": took,
        }
        largest = max(parts, key=lambda name: parts[name])
        steps.append(
            f"missed by {-1e3 * slack:.1f} ms. Most of its time went into this: {largest} "
            f"({1e3 * parts[largest]:.1f} ms)"
        )
    return steps


# -- bench runs ------------------------------------------------------------------------------


def of_bench(folder: Path) -> Source:
    """What clients saw: the folder that `ray-slo bench --out` wrote.

    Raises:
        ValueError: its files are not those of a bench run.
    """
    import pandas as pd

    try:
        frame = pd.read_csv(folder / "requests.csv")
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        slo_ms, measured = float(summary["slo_ms"]), frame["measured"].to_numpy(dtype=bool)
        facts = [
            ("requests", f"{summary['requests']:,}"),
            ("SLO", number(slo_ms, suffix=" ms")),
            ("offered", number(summary["offered_rate"], suffix="/s")),
            ("goodput", number(summary["goodput"], suffix="/s")),
            ("violations", percent(summary["bad_rate"])),
            ("p50", number(summary["p50_ms"], suffix=" ms")),
            ("p99", number(summary["p99_ms"], suffix=" ms")),
            ("mean batch", number(summary["mean_batch"])),
            ("right answers", percent(summary["accuracy"])),
        ]
        notes = list(summary["warnings"])
        names = list(dict.fromkeys(frame["status"].astype(str)))
        status = frame["status"].astype(str)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{folder}: no bench run: {error}") from None
    if len(frame) > MOST_REQUESTS:
        notes.append(f"Charts show the last {MOST_REQUESTS:,} of {len(frame):,} requests.")
    answered = status.isin(("ok", "late"))
    models, model = _coded(frame.get("model"), len(frame), "all")
    variants, variant = _coded(frame.get("variant"), len(frame), "")
    accuracy: list[float | None] = [None] * len(variants)
    if "accuracy" in frame and variants:
        by = frame.groupby(variant)["accuracy"].mean()
        accuracy = [
            None if math.isnan(by.get(i, math.nan)) else float(by[i]) for i in range(len(variants))
        ]
    shown = slice(max(len(frame) - MOST_REQUESTS, 0), None)
    t = frame["intended_s"].to_numpy()
    data = {
        "models": models,
        "variants": variants,
        "accuracy": accuracy,
        "workers": [],
        "slo_ms": [slo_ms] * len(models),
        **_outcomes(names),
        "from": _down(min([*t[measured][:1].tolist(), t.max(initial=0.0)])),
        "to": -_down(-t.max(initial=0.0)),
        "requests": {
            "t": _rounded(t[shown], 4),
            "latency": _rounded(np.where(answered, 1e3 * frame["latency_s"], np.nan)[shown], 2),
            "outcome": [names.index(s) for s in status[shown]],
            "model": model[shown].tolist(),
            "variant": variant[shown].tolist(),
            "worker": [-1] * len(t[shown]),
            "batch": [],
            "batch_size": _rounded(frame["batch_size"][shown], 0) if "batch_size" in frame else [],
        },
        "batches": None,
    }
    source = Source("What clients saw", f"bench run {folder}", facts, data, [], notes)
    left = slo_ms - 1e3 * frame["latency_s"]
    chosen = frame[measured].assign(left=left[measured]).sort_values("left").head(WORST)
    source.worst = [_client_saw(row, slo_ms) for _, row in chosen.iterrows()]
    counts = Counter(frame["error"].dropna().astype(str)) if "error" in frame else Counter()
    if counts:
        rows = [(text[:200], f"{n:,}") for text, n in counts.most_common(10)]
        source.tables.append(("Errors", [], Table(("text", "requests"), rows)))
    return source


def _coded(values: Any, count: int, default: str) -> tuple[list[str], NDArray[Any]]:
    """Names, and the index of each value among them; −1 for none."""
    if values is None or values.isna().all():
        return ([default], np.zeros(count, int)) if default else ([], np.full(count, -1))
    names = sorted(values.dropna().astype(str).unique())
    index = {name: i for i, name in enumerate(names)}
    return names, np.array([-1 if v != v else index[str(v)] for v in values])


def _client_saw(row: Any, slo_ms: float) -> Details:
    latency = 1e3 * float(row["latency_s"])
    late_ms = 1e3 * (float(row["sent_s"]) - float(row["intended_s"]))
    steps = [f"meant to be sent at {row['intended_s']:.3f} s"]
    if late_ms > 1:
        steps.append(f"+{late_ms:.1f} ms: sent; the load generator was that late")
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
