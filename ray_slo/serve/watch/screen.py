"""The status of an application as text: the same for `ray-slo status`, `ray-slo top` and the web
page.

It is pure: it turns the status of `Frontend.slo_status` into tables and lines. All texts are
without control characters, so that no name or error of a user can control a terminal. The display
escapes them in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from ray_slo.core.text import clipped

_LONGEST = 300  # characters of a cell
_CONTROL = dict.fromkeys([*range(32), *range(127, 160)], " ")  # and no line breaks

State = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        cells: text for people.
        keys: sort keys, a number or a text for each cell.
        of: models that it is about; none: all.
        warn: whether it needs attention.
    """

    cells: Sequence[str]
    keys: Sequence[float | str]
    of: Sequence[str] = ()
    warn: bool = False


@dataclass(frozen=True)
class Line:
    """A sentence; `level` is "", "warn" or "error"."""

    text: str
    level: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the screen.

    Attributes:
        key: short and stable.
        columns: names; those that start with "#" are numbers, aligned right.
        lines: lines above the rows.
    """

    key: str
    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Row] = ()
    lines: Sequence[Line] = ()


@dataclass(frozen=True)
class Screen:
    """The screen of one application.

    Attributes:
        head: one line about the whole application.
        opens: models and pipelines that can be opened.
    """

    application: str
    head: str
    sections: Sequence[Section] = ()
    opens: Sequence[str] = ()
    lines: Sequence[Line] = field(default_factory=tuple)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def screen(application: str, state: State, model: str | None = None) -> Screen:
    """The screen of an application, or of one model or pipeline of it.

    Args:
        state: of `Frontend.slo_status`, or {"unreachable": why}.
    """
    if "unreachable" in state:
        return Screen(plain(application), "", lines=(Line(plain(state["unreachable"]), "error"),))
    found = (
        _models(state),
        _variants(state),
        _refused(state),
        *(_auto(group, of["auto"]) for group, of in _schedulers(state) if "auto" in of),
        _plan(state),
        _groups(state),
        _kinds(state),
        _workers(state),
        _nodes(state),
        _profiles(state),
    )
    sections = [section for section in found if section is not None]
    if model is not None:
        sections = [_about(section, _family(state, model)) for section in sections]
    sections = [section for section in sections if section.rows or section.lines]
    opens = [*state.get("pipelines", {}), *state["models"]]
    return Screen(plain(application), _head(state), sections, list(map(plain, opens)), _top(state))


def plain(value: Any) -> str:
    """A text without control characters, cut if it is long."""
    return clipped(str(value).translate(_CONTROL).strip(), _LONGEST)


def _family(state: State, name: str) -> frozenset[str]:
    """A model or pipeline and its parts, by their names in rows."""
    of = state.get("pipelines", {}).get(name, {})
    tasks = {*of.get("parents", ()), *of.get("shared", {}).values()}
    return frozenset({name, *tasks})


def _about(section: Section, models: Collection[str]) -> Section:
    rows = [row for row in section.rows if not row.of or set(row.of) & set(models)]
    return Section(section.key, section.title, section.columns, rows, section.lines)


def _row(*cells: tuple[str, float | str] | str, of: Iterable[str] = (), warn: bool = False) -> Row:
    """A row; a cell is a text, or a text and its sort key."""
    pairs = [(c, c) if isinstance(c, str) else c for c in cells]
    return Row([plain(text) for text, _ in pairs], [key for _, key in pairs], tuple(of), warn)


def _number(value: Any, digits: int = 1, suffix: str = "") -> tuple[str, float]:
    """A cell for a number. An unknown one is empty, and sorted below all others."""
    if value is None or not math.isfinite(value):
        return "", -math.inf
    return f"{value:.{digits}f}{suffix}", float(value)


def _schedulers(state: State) -> list[tuple[str, State]]:
    return [("", state), *state.get("groups", {}).items()]


_COUNTED = {"on_node": "granted on their frontend's node", "unclaimed": "batches unclaimed"}
"""Words for counts whose names say too little."""

# -- the parts ---------------------------------------------------------------------------------


def _head(state: State) -> str:
    parts = [f"policy {state.get('policy', '?')}", f"scheduler {state.get('scheduler', '?')}"]
    if "mode" in state:
        parts.append(f"mode {state['mode']}")
    frontends, wanted = state.get("frontends", 1), state.get("num_frontends", 1)
    if wanted > 1 or frontends != wanted:
        parts.append(f"{frontends} of {wanted} frontends heard")
    parts += [
        f"{state.get('pending', 0)} pending",
        f"dispatch delay {state.get('dispatch_delay_ms', 0):.1f} ms",
        f"batches end {state.get('prediction_error_ms', 0):+.1f} ms from their prediction, "
        f"and 95 % of them by {state.get('prediction_error_p95_ms', 0):+.1f} ms",
        *(f"{n} {_COUNTED.get(name, name)}" for name, n in state.get("counts", {}).items()),
    ]
    return plain(", ".join(parts))


def _models(state: State) -> Section:
    pipelines = state.get("pipelines", {})  # clients ask for these; models are their tasks
    lately = state.get("lately", {})
    window_s = lately.get("window_s", 1)
    rows = []
    for model, spec in {**state["models"], **pipelines}.items():
        found = lately.get("models", {}).get(model, {})
        expected = state.get("expected", {}).get(model, {})
        bad = state.get("bad_rate", {}).get(model)
        expected_bad = expected.get("bad_rate")
        latency = found.get("latency_ms", {})
        p99 = latency.get("p99")
        rows.append(
            _row(
                model,
                (f"{spec['latency_slo_ms']:g}", spec["latency_slo_ms"]),
                _number(found.get("requests", 0) / window_s),
                _number(state.get("goodput", {}).get(model, 0.0)),
                _beside(bad, expected_bad, 100.0, 1),
                _number(latency.get("p50")),
                _number(p99),
                ("", -1) if model in pipelines else _queued(state, model),
                _beside(state.get("accuracy", {}).get(model), expected.get("accuracy"), 1.0, 2),
                of=(model,),
                warn=bad is not None and bad > max(0.01, 2 * (expected_bad or 0.0)),
            )
        )
    columns = ("model", "#SLO ms", "#asked /s", "#goodput /s", "#not in time %", "#p50 ms")
    return Section("models", "Models", (*columns, "#p99 ms", "#queued", "#accuracy %"), rows)


def _queued(state: State, model: str) -> tuple[str, float]:
    number = state.get("queued", {}).get(model)
    return ("?", -1) if number is None else (str(number), number)


def _beside(
    measured: float | None, expected: float | None, times: float, digits: int
) -> tuple[str, float]:
    """A measured value beside the expected one."""
    said = [] if measured is None else [f"{times * measured:.{digits}f}"]
    if expected is not None and not math.isnan(expected):
        said.append(f"(expected {times * expected:.{digits}f})")
    return " ".join(said), -1.0 if measured is None else measured


def _variants(state: State) -> Section | None:
    lately = state.get("lately", {})
    window_s = lately.get("window_s", 1)
    rows = []
    for model, variants in lately.get("variants", {}).items():
        total = sum(v["answers"] for v in variants.values())
        for variant, v in variants.items():
            share = v["answers"] / total if total else None
            rows.append(
                _row(
                    model,
                    variant,
                    _number(None if share is None else 100 * share, 0),
                    _number(v["answers"] / window_s),
                    _number(v["batches"] / window_s if v["batches"] else None),
                    _number(v["batch_size"]),
                    _number(v["exec_ms"]),
                    _number(v["predicted_ms"]),
                    _number(v["measured_ms"]),
                    of=(model,),
                )
            )
    columns = ("model", "variant", "#share %", "#answers /s", "#batches /s", "#batch size")
    times = ("#execution ms", "#predicted ms", "#measured ms")
    title = f"Variants in use, last {window_s} s: a batch from its grant to its results"
    return Section("variants", title, (*columns, *times), rows)


def _refused(state: State) -> Section:
    rows = [
        _row(
            _number(one["ago_s"], 0),
            one["model"] + f"@{one['slo_class']}" * bool(one["slo_class"]),
            one["outcome"],
            one["reason"],
            (str(one["count"]), one["count"]),
            of=(one["model"],) if one["model"] else (),
        )
        for one in state.get("lately", {}).get("refused", ())
    ]
    columns = ("#s ago", "model", "outcome", "reason", "#requests")
    return Section("refused", "Last requests without an answer in time", columns, rows)


def _top(state: State) -> tuple[Line, ...]:
    """What needs attention before all else."""
    lines = [Line(plain(said), "error") for said in state.get("refused_settings", ())]
    starting = state.get("starting")
    if not starting:
        return tuple(lines)
    lines += [Line(plain(f"not served yet: {', '.join(starting['models'])}"), "warn")]
    for worker, w in starting["workers"].items():
        lines.append(Line(plain(f"worker {worker} ({w['kind']}): {w['state']}")))
    for kind, d in starting["deployments"].items():
        said = "; ".join(filter(None, [f"{d['running']} workers run", d["message"]]))
        lines.append(Line(plain(f"{kind}: {said}")))
    return tuple(lines)


def _auto(group: str, auto: State) -> Section:
    """The current setting, its reason, and the results of the last rehearsal."""
    where = f"group {group}: " * bool(group)
    lines = [
        Line(
            plain(
                f"{where}auto runs {auto['setting']!r}, for {auto['for_s']:.0f} s: {auto['why']}. "
                f"{auto['held']} rehearsals held, {auto['failed']} failed"
            )
        )
    ]
    if auto["error"]:
        lines.append(Line(plain(f"the last rehearsal failed: {auto['error']}"), "warn"))
    for one in auto["rehearsals"]:
        if one["measured_bad"] is None or one["predicted_bad"] is None:
            continue
        lines.append(
            Line(
                plain(
                    f"{one['ago_s']:.0f} s ago: {one['setting']}: not in time "
                    f"{100 * one['predicted_bad']:.2f} % predicted, "
                    f"{100 * one['measured_bad']:.2f} % measured until the next"
                )
            )
        )
    title, rows = f"Policy auto{f' of group {group}' * bool(group)}", []
    if auto["rehearsals"]:
        last = auto["rehearsals"][-1]
        title += f": rehearsed {last['ago_s']:.0f} s ago with {last['requests']} requests"
        for setting, found in last["tried"].items():
            if "error" in found:
                said = f"{setting} could not be tried: {found['error']}"
                lines.append(Line(plain(said), "warn"))
                continue
            given_up = "" if found["whole"] else " (given up)"
            rows.append(
                _row(
                    setting,
                    (f"{found['value']:.4f}{given_up}", found["value"]),
                    _number(100 * found["bad"], 2),
                    _number(found["p50_ms"]),
                )
            )
    columns = ("setting", "#value", "#not in time %", "#p50 ms")
    return Section(f"auto {group}".strip(), plain(title), columns, rows, lines)


def _plan(state: State) -> Section | None:
    plan = state.get("plan")
    if plan is None:
        return None
    age_s = plan.get("plan_age_s")
    age = "none yet" if age_s is None else f"{age_s:.0f} s old"
    by = plan.get("planner") or "the configuration"
    lines = [Line(plain(f"plan by {by}: {plan.get('state', '?')}, {age}. {plan.get('why', '')}"))]
    failed = [f"{what}: {error}" for what, error in plan.get("load_errors", {}).items()]
    lines += [Line(plain(said), "error") for said in filter(None, [plan.get("error"), *failed])]
    return Section("plan", "Plan", lines=lines)


def _groups(state: State) -> Section | None:
    rows = []
    for name, group in state.get("groups", {}).items():
        models, counts = group.get("models", []), group.get("counts", {})
        moving = [f"+{m}" for m in group.get("wanted_models", models) if m not in models]
        moving += [f"-{m}" for m in group.get("draining", [])]
        queued = sum(group.get("queued", {}).values())
        rows.append(
            _row(
                name,
                ", ".join(models),
                ", ".join(moving),
                (str(len(group.get("workers", ()))), len(group.get("workers", ()))),
                (str(queued), queued),
                *((str(counts.get(n, "?")), counts.get(n, -1)) for n in ("granted", "refused")),
                _number(sum(state["goodput"].get(m, 0.0) for m in models)),
                of=models,
            )
        )
    columns = ("group", "models", "on the move", "#workers", "#queued", "#granted", "#refused")
    return Section("groups", "Groups", (*columns, "#goodput /s"), rows) if rows else None


def _kinds(state: State) -> Section:
    """Workers by kind, and the number of them per task."""
    plan = state.get("plan", {})
    by_kind: dict[str, list[State]] = {}
    for worker in state.get("workers", {}).values():
        by_kind.setdefault(worker["kind"], []).append(worker)
    rows = []
    for kind in sorted({*by_kind, *plan.get("targets", {})}):
        workers = by_kind.get(kind, [])
        target = plan.get("targets", {}).get(kind)
        does: dict[str, int] = {}
        for worker in workers:
            for one in worker["assigned"]:
                does[one["variant"]] = does.get(one["variant"], 0) + 1
        busy = sum(w["batches_in_flight"] > 0 for w in workers)
        rows.append(
            _row(
                kind,
                (str(len(workers)), len(workers)),
                ("", -1) if target is None else (str(target), target),
                (str(busy), busy),
                ", ".join(f"{n} × {variant}" for variant, n in sorted(does.items()))
                or ", ".join(sorted({v for w in workers for v in w["variants"]})),
                warn=target is not None and target != len(workers),
            )
        )
    columns = ("kind", "#workers", "#wanted", "#busy", "what they serve")
    return Section("kinds", "Workers by kind", columns, rows)


def _workers(state: State) -> Section:
    rows, lines = [], []
    owners = _owners(state)
    for worker, w in state.get("workers", {}).items():
        assigned = [f"{a['variant']}, batches of {a['batch_size']}" for a in w["assigned"]]
        running = [
            f"{b['batch_size']} × {b['variant']} for {b['for_ms']:.0f} of {b['expected_ms']:.0f} ms"
            for b in w.get("running", ())
        ]
        rows.append(
            _row(
                worker,
                w["kind"],
                ", ".join(w["variants"]),
                "; ".join(assigned),
                "; ".join(running),
                (str(w["batches_in_flight"]), w["batches_in_flight"]),
                _memory(w.get("memory", {})),
                _number(w["last_heartbeat_s"]),
                of=sorted({owners[v] for v in w["variants"] if v in owners}),
                warn=w["last_heartbeat_s"] > 5,
            )
        )
        memory = w.get("memory", {})
        for variant, size in memory.get("largest_batch", {}).items():
            said = f"{worker}: no memory for batches of {variant} of more than {size}"
            lines.append(Line(plain(said), "warn"))
        for variant, why in memory.get("left_out", {}).items():
            lines.append(Line(plain(f"{worker}: {variant} is left out: {why}"), "error"))
    columns = ("worker", "kind", "variants", "does", "runs now", "#in flight", "memory MB")
    return Section("workers", "Workers", (*columns, "#heartbeat s ago"), rows, lines)


def _nodes(state: State) -> Section:
    """What runs on which node, and whether the loss of one costs more than its share."""
    seen = state.get("nodes", {})
    parts: dict[str, list[str]] = {"frontend": list(seen.get("frontends", ()))}
    parts["worker"] = [w["node"] for w in state.get("workers", {}).values() if w.get("node")]
    schedulers = [
        (group, one)
        for group, of in _schedulers(state)
        for one in of.get("schedulers", ())
        if one["node"]
    ]
    for group, one in schedulers:
        what = "scheduler" if one["state"] == "leads" else f"scheduler ({one['state']})"
        parts.setdefault(f"{what} of group {group}" if group else what, []).append(one["node"])
    if planner := state.get("plan", {}).get("node"):
        parts["planner"] = [planner]
    rows = [
        _row(node, ", ".join(f"{n.count(node)} × {part}" for part, n in parts.items() if node in n))
        for node in dict.fromkeys(chain(seen.get("cluster", ()), *parts.values()))
    ]
    lines = []
    if len(seen.get("cluster", ())) > 1:
        both: dict[str, list[str]] = {}
        for group, one in schedulers:
            both.setdefault(group, []).append(one["node"])
        alone = {
            "frontends": parts["frontend"],
            "workers": parts["worker"],
            **{f"schedulers{f' of group {g}' * bool(g)}": nodes for g, nodes in both.items()},
        }
        lines = [
            Line(plain(f"single point of failure: all {what} are on node {nodes[0]}"), "warn")
            for what, nodes in alone.items()
            if len(set(nodes)) == 1
        ]
    columns = ("node", "runs")
    return Section("nodes", "Nodes", columns, rows if len(rows) > 1 else (), lines)


def _owners(state: State) -> dict[str, str]:
    """Model by variant, with the variant names of workers."""
    owners = {}
    for model, spec in state["models"].items():
        for variant in spec.get("variants", {model: {}}):
            owners[variant] = owners[f"{model}/{variant}"] = model
    return owners


def _memory(memory: State) -> tuple[str, float]:
    """Memory of variants and their common room; one batch runs at a time."""
    found = memory.get("variants", {}).values()
    if not found:
        return "", -1.0
    taken_mb = sum(v["load_mb"] for v in found) + max(v["batch_mb"] for v in found)
    room_mb = memory["room_mb"]
    room = "" if room_mb is None else f" of {room_mb:.0f}"
    return f"{taken_mb:.0f}{room} ({memory['device']})", taken_mb


def _profiles(state: State) -> Section:
    owners = _owners(state)
    rows = [
        _row(
            variant,
            _number(p["latency_1_ms"], 2),
            _number(p["latency_max_ms"], 2),
            *((str(p[name]), p[name]) for name in ("max_batch_size", "measured_to", "samples")),
            _number(p.get("spread"), 2),
            _number(p.get("age_s"), 0),
            of=[owners[name] for name in [variant.rpartition("@")[0]] if name in owners],
        )
        for variant, p in state.get("profiles", {}).items()
    ]
    columns = ("variant @ hardware", "#ℓ(1) ms", "#ℓ(max) ms", "#max batch", "#measured to")
    return Section(
        "profiles", "Latency profiles", (*columns, "#batches seen", "#scatter ×", "#age s"), rows
    )
