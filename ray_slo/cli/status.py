"""`ray-slo status`: what a running application does right now."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    application: Annotated[
        str | None, typer.Argument(help="Serve application; default: every one on ray-slo.")
    ] = None,
    address: Annotated[str, typer.Option(help="Ray cluster to ask.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    watch_s: Annotated[
        float | None, typer.Option(min=0.2, help="Ask again every so many seconds.")
    ] = None,
) -> None:
    """Show models, queues, workers, goodput, and predicted beside measured latency."""
    from rich.console import Console

    from ray_slo.serve.watch.status import read_status

    console = Console()
    while True:
        found = read_status(address, application)
        if as_json:
            typer.echo(json.dumps(found, indent=1))
        else:
            if watch_s:
                console.clear()
            for name, state in found.items():
                _print(console, name, state)
        if not watch_s:
            return
        time.sleep(watch_s)


def _print(console: Any, name: str, state: dict[str, Any]) -> None:
    from rich.table import Table

    if "unreachable" in state:
        console.print(f"[bold]{name}[/]  {state['unreachable']}", soft_wrap=True)
        return
    console.print(
        f"[bold]{name}[/]  policy {state.get('policy', '?')}, scheduler {state['scheduler']}, "
        f"{state['pending']} pending, dispatch delay {state.get('dispatch_delay_ms', 0):.1f} ms, "
        f"median prediction error {state.get('prediction_error_ms', 0):+.1f} ms"
    )
    models = Table("model", title_justify="left")
    for column in ("SLO ms", "queued", "goodput /s", "accuracy %", "not in time %"):
        models.add_column(column, justify="right")
    pipelines = state.get("pipelines", {})  # clients ask for them; models are their tasks
    for model, spec in {**state["models"], **pipelines}.items():
        models.add_row(
            model,
            f"{spec['latency_slo_ms']:g}",
            "" if model in pipelines else str(state.get("queued", {}).get(model, "?")),
            f"{state['goodput'].get(model, 0.0):.1f}",
            *_beside(state, model),
        )
    profiles = Table("variant @ hardware")
    for column in ("ℓ(1) ms", "ℓ(max) ms", "max batch", "measured to", "batches seen"):
        profiles.add_column(column, justify="right")
    for variant, p in state.get("profiles", {}).items():
        profiles.add_row(
            variant,
            f"{p['latency_1_ms']:.2f}",
            f"{p['latency_max_ms']:.2f}",
            str(p["max_batch_size"]),
            str(p["measured_to"]),
            str(p["samples"]),
        )
    workers = Table("worker", "kind", "variants", "does", "memory MB")
    for column in ("in flight", "heartbeat s ago"):
        workers.add_column(column, justify="right")
    for worker, w in state.get("workers", {}).items():
        workers.add_row(
            worker,
            w["kind"],
            ", ".join(w["variants"]),
            "; ".join(f"{a['variant']}, batches of {a['batch_size']}" for a in w["assigned"]),
            _memory(w.get("memory", {})),
            str(w["batches_in_flight"]),
            f"{w['last_heartbeat_s']:.1f}",
        )
    counts = state.get("counts", {})
    if "starting" in state:
        _print_starting(console, state["starting"])
    console.print(models, profiles, workers)
    _print_memory(console, state.get("workers", {}))
    if "groups" in state:
        _print_groups(console, state)
    for group, of in {"": state, **state.get("groups", {})}.items():
        if "auto" in of:
            _print_auto(console, group, of["auto"])
    if "plan" in state:
        _print_plan(console, state["plan"])
    console.print(", ".join(f"{k} {v}" for k, v in counts.items()))


def _beside(state: dict[str, Any], model: str) -> tuple[str, str]:
    """Accuracy and share not in time, percent: measured, and what is expected."""
    expected = state.get("expected", {}).get(model, {})
    bad = state.get("bad_rate", {}).get(model)
    return (
        _expected(state.get("accuracy", {}).get(model), expected.get("accuracy"), 1.0, 2),
        _expected(bad, expected.get("bad_rate"), 100.0, 1),
    )


def _expected(measured: float | None, expected: float | None, times: float, digits: int) -> str:
    said = [] if measured is None else [f"{times * measured:.{digits}f}"]
    if expected is not None:
        said.append(f"(expected {times * expected:.{digits}f})")
    return " ".join(said)


def _memory(memory: dict[str, Any]) -> str:
    """What variants take of what they share; one batch runs at a time."""
    found = memory.get("variants", {}).values()
    if not found:
        return ""
    taken_mb = sum(v["load_mb"] for v in found) + max(v["batch_mb"] for v in found)
    room_mb = memory["room_mb"]
    room = "" if room_mb is None else f" of {room_mb:.0f}"
    return f"{taken_mb:.0f}{room} ({memory['device']})"


def _print_memory(console: Any, workers: dict[str, Any]) -> None:
    for worker, w in workers.items():
        memory = w.get("memory", {})
        for variant, size in memory.get("largest_batch", {}).items():
            said = f"{worker}: no memory for batches of {variant} of more than {size}"
            console.print(said, markup=False, style="yellow")
        for variant, why in memory.get("left_out", {}).items():
            console.print(f"{worker}: {variant} is left out: {why}", markup=False, style="red")


def _print_starting(console: Any, starting: dict[str, Any]) -> None:
    console.print(f"not served yet: {', '.join(starting['models'])}", style="yellow")
    for worker, w in starting["workers"].items():
        console.print(f"  worker {worker} ({w['kind']}): {w['state']}", markup=False)
    for kind, d in starting["deployments"].items():
        state = f"{d['running']} workers run"
        console.print(f"  {kind}: {'; '.join(filter(None, [state, d['message']]))}", markup=False)


def _print_groups(console: Any, state: dict[str, Any]) -> None:
    from rich.table import Table

    groups = Table("group", "models", "on the move")
    for column in ("workers", "queued", "granted", "refused", "goodput /s"):
        groups.add_column(column, justify="right")
    for name, group in state["groups"].items():
        models, counts = group["models"], group.get("counts", {})
        moving = [f"+{m}" for m in group.get("wanted_models", models) if m not in models]
        moving += [f"-{m}" for m in group.get("draining", [])]
        groups.add_row(
            name,
            ", ".join(models),
            ", ".join(moving),
            str(len(group.get("workers", ()))),
            str(sum(group.get("queued", {}).values())),
            str(counts.get("granted", "?")),
            str(counts.get("refused", "?")),
            f"{sum(state['goodput'].get(m, 0.0) for m in models):.1f}",
        )
    console.print(groups)


def _print_auto(console: Any, group: str, auto: dict[str, Any]) -> None:
    """The setting in force, why, and what the last rehearsal said of all of them."""
    from rich.table import Table

    where = f"group {group}: " * bool(group)
    console.print(
        f"{where}auto runs {auto['setting']!r}, for {auto['for_s']:.0f} s: {auto['why']}. "
        f"{auto['held']} rehearsals held, {auto['failed']} failed",
        markup=False,
    )
    if auto["error"]:
        console.print(f"the last rehearsal failed: {auto['error']}", markup=False, style="yellow")
    if not auto["rehearsals"]:
        return
    last = auto["rehearsals"][-1]
    tried = Table(
        "setting",
        title=f"{where}rehearsed {last['ago_s']:.0f} s ago with {last['requests']} requests",
        title_justify="left",
    )
    for column in ("value", "not in time %", "p50 ms"):
        tried.add_column(column, justify="right")
    for setting, found in last["tried"].items():
        if "error" in found:
            tried.add_row(setting, f"could not be tried: {found['error']}", "", "")
            continue
        given_up = "" if found["whole"] else " (given up)"
        p50 = "" if found["p50_ms"] is None else f"{found['p50_ms']:.1f}"
        said = f"{found['value']:.4f}{given_up}"
        tried.add_row(setting, said, f"{100 * found['bad']:.2f}", p50)
    console.print(tried)
    for one in auto["rehearsals"]:
        if one["measured_bad"] is None or one["predicted_bad"] is None:
            continue
        console.print(
            f"  {one['ago_s']:.0f} s ago: {one['setting']}: not in time "
            f"{100 * one['predicted_bad']:.2f} % predicted, {100 * one['measured_bad']:.2f} % "
            "measured until the next",
            markup=False,
        )


def _print_plan(console: Any, plan: dict[str, Any]) -> None:
    age_s = plan.get("plan_age_s")
    age = "none yet" if age_s is None else f"{age_s:.0f} s old"
    by = plan.get("planner") or "the configuration"
    why = f"plan by {by}: {plan.get('state', '?')}, {age}. {plan.get('why', '')}"
    console.print(why, markup=False)
    failed = [f"{what}: {error}" for what, error in plan.get("load_errors", {}).items()]
    for problem in filter(None, [plan.get("error"), *failed]):
        console.print(problem, markup=False, style="red")
