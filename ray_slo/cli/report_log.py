"""A decision log, for a report page: the policy's decisions and input, and the planner's plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_slo.cli._output import number
from ray_slo.cli.report_html import Table
from ray_slo.cli.report_run import of_report
from ray_slo.cli.report_source import Source, rounded

if TYPE_CHECKING:
    from ray_slo.core.cluster import Cluster
    from ray_slo.record.decode import Life
    from ray_slo.record.plans import Planned
    from ray_slo.simulation.replay import Tape

_MOST_CHANGES = 100
_MOST_PLANS = 500


def of_log(path: Path, run: str | None = None, warmup_s: float = 0.0) -> Source:
    """Return the page's content for the scheduler `run`. By default, it is the newest scheduler in
    the log that served a request."""
    from ray_slo.record.decode import read
    from ray_slo.simulation.replay import newest, recorded

    lives = [life for life in read(path) if run is None or run in life.scheduler]
    if not lives:
        raise ValueError(f"--run: no scheduler {run!r} in {path}")
    life, found = newest(lives)
    report = recorded(found, warmup_s)
    report.meta["policy"] = (life.start and life.start.policy) or "its own policy"
    source = of_report(report, f"decision log {life.scheduler}")
    wall_at = life.start.about.get("wall_at") if life.start else None
    if wall_at is not None:
        at = datetime.fromtimestamp(wall_at, timezone.utc)
        source.facts.insert(1, ("since", f"{at:%Y-%m-%d %H:%M} UTC"))
    source.notes += _missing(life, found, len(lives) - 1)
    _add_plans(source, life, found, path if path.is_dir() else path.parent)
    _add_settings(source, found)
    _add_preemptions(source, found)
    _add_changes(source, found)
    return source


def _missing(life: Life, found: Tape, others: int) -> Iterable[str]:
    """Yield notes about what the page does not show."""
    if not life.begins:
        yield "The beginning of this log was deleted, because the log reached its size limit."
    if lost := sum(n for n in life.lost if n > 0):
        yield f"{lost} rows were not kept, because the writer could not keep up."
    if n := len(found.cancels):
        yield f"{n} requests were withdrawn by their clients; they count as pending."
    for at, error in found.errors:
        yield f"At {at - found.zero:.3f} s the policy raised {error}"
    if others:
        yield f"The log holds {others} more scheduler{'s' * (others > 1)}; see --run."


def _add_settings(source: Source, found: Tape) -> None:
    if not found.settings:
        return
    rows = [
        (f"{max(at - found.zero, 0.0):.3f}", setting, why)
        for at, (setting, why) in found.settings[:_MOST_CHANGES]
    ]
    words = [f"The first {len(rows)} of {len(found.settings)}."]
    columns = ("from (s)", "setting", "why")
    source.tables.append(("What auto ran", words, Table(columns, rows, prose=True)))


def _add_preemptions(source: Source, found: Tape) -> None:
    if not found.preempts:
        return
    rows = [
        (f"{at - found.zero:.3f}", p.worker, p.variant, number(p.gain), p.reason)
        for at, p in found.preempts[:_MOST_CHANGES]
    ]
    columns = ("at (s)", "worker", "to run", "gain in requests", "why")
    words = [f"The first {len(rows)} of {len(found.preempts)}."]
    source.tables.append(("Preemptions", words, Table(columns, rows, prose=True)))


def _add_changes(source: Source, found: Tape) -> None:
    changes = list(_changes(found))
    if not changes:
        return
    shown = changes[:_MOST_CHANGES]
    words = [
        "Workers, what the planner wants of them, and profiles that the scheduler learned, as the "
        "policy was told."
    ]
    if len(changes) > len(shown):
        words.append(f"The first {len(shown)} of {len(changes)}.")
    table = Table(("at (s)", "what changed"), shown, prose=True)
    source.tables.append(("What the policy was told of the cluster", words, table))


def _add_plans(source: Source, life: Life, found: Tape, folder: Path) -> None:
    """Add the decisions of the application's planners during the scheduler's life, in the
    scheduler's time."""
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
            "scheduler's. So its decisions have wall-clock times, and charts do not show them."
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
        "t": rounded([t + (p.took_s or 0.0) for t, p in marked], 4),
        "failed": [bool(p.error) for _, p in marked],
        "words": [f"{p.trigger}: " + (p.error or "; ".join(p.changes)) for _, p in marked],
    }


def _wall(p: Planned) -> str:

    return f"{datetime.fromtimestamp(p.wall_at or 0.0, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _plan_table(rows: Any, plans: Sequence[Planned], times: Sequence[float | None]) -> Table:
    kinds = ["failed" if p.error else "changed" if p.changes else "" for p in plans]
    names = ("at (s)", "trigger", "demand", "workers wanted", "changes", "took (ms)", "why")
    return Table(names, rows, kinds=kinds, times=[t and round(t, 3) for t in times])


def _plan_row(at: str, p: Planned) -> tuple[str, ...]:
    targets = [f"{n} {kind}" for kind, n in p.targets.items() if n is not None]
    why = f"{p.error}. The last plan holds." if p.error else p.why
    if p.shortfall and p.shortfall not in why:
        why = f"{why} Not served: {p.shortfall}."
    took = "" if p.took_s is None else number(1e3 * p.took_s)
    demand = "" if p.demand is None else number(p.demand, suffix="/s")
    return at, p.trigger, demand, ", ".join(targets), "\n".join(p.changes), took, why


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
            yield f"{w.id} ({w.hardware}) joined with {', '.join(sorted(w.loaded))}"
        elif was.loaded != w.loaded:
            yield f"{w.id} has loaded {', '.join(sorted(w.loaded)) or 'nothing'}"
        for a in w.assigned:
            if was is None or a not in was.assigned:
                load = "" if a.load is None else f" for {a.load:.3g} requests/s"
                yield (
                    f"the plan assigns {a.variant} to {w.id}, in batches of at most "
                    f"{a.batch_size}{load}"
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
