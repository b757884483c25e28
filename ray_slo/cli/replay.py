"""`ray-slo replay`: run a decision log again, with the same policy or another one ("what if")."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_slo.cli._output import key_values, number, percent, print_json, table

if TYPE_CHECKING:
    from ray_slo.record.decode import Life
    from ray_slo.simulation.report import Report

_COLUMNS = (
    *("goodput_per_s", "bad_rate", "accuracy", "latency_p50_ms", "latency_p95_ms"),
    *("latency_p99_ms", "batch_size_mean", "idle_fraction"),
)
_HEADINGS = ("good/s", "bad", "accur.", "p50", "p95", "p99", "batch", "idle")
RECORDED, SIMULATED = "recorded", "simulated"


def replay(
    log: Annotated[Path, typer.Argument(help="Decision log: a file, or a folder of them.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help='Simulate the log with this policy (name or "module:attr"); repeatable.'),
    ] = None,
    policy_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Argument of this policy; repeatable."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help="Name of the scheduler (as listed); default: all, or the newest."),
    ] = None,
    warmup_s: Annotated[
        float, typer.Option(help="Seconds at the start that --policy does not count.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a scheduler's events, and compare the decisions with the recorded ones.

    The exit code is 1 if the policy decided differently. With --policy, simulate the recorded
    requests with another policy instead.
    """
    from ray_slo.record.decode import read

    lives = read(log)
    if run is not None:
        chosen = [life for life in lives if run in life.scheduler]
        if not chosen:
            names = ", ".join(dict.fromkeys(life.scheduler for life in lives))
            raise ValueError(f"--run: no scheduler {run!r} in {log}; there are {names}")
        lives = chosen
    arguments = key_values("--policy-arg", policy_arg)
    if policy:
        if arguments and len(policy) > 1:
            raise ValueError("--policy-arg needs exactly one --policy")
        _what_if(lives, policy, arguments, warmup_s, as_json)
    else:
        if arguments:
            raise ValueError("--policy-arg needs --policy")
        _same(lives, as_json)


def _same(lives: list[Life], as_json: bool) -> None:
    """Replay every policy's life whose beginning is in the log. Report the others as skipped."""
    from ray_slo.simulation.replay import Replayed
    from ray_slo.simulation.replay import replay as run

    results: list[tuple[Life, Replayed | str]] = []
    for life in lives:
        try:
            results.append((life, run(life)))
        except ValueError as error:
            if len(lives) == 1:
                raise
            results.append((life, str(error)))
    if as_json:
        print_json([_as_json(life, result) for life, result in results])
    for life, result in results:
        if not as_json:
            typer.echo(_in_words(life, result))
    done = [result for _, result in results if isinstance(result, Replayed)]
    if not done:
        raise ValueError("nothing could be replayed; see the reasons above")
    if not all(result.identical for result in done):
        raise typer.Exit(1)


def _as_json(life: Life, result: Any) -> dict[str, Any]:
    head = {"scheduler": life.scheduler, "policy": life.start and life.start.policy}
    if isinstance(result, str):
        return {**head, "skipped": result}
    difference = result.difference and vars(result.difference)
    counts = {"rounds": result.rounds, "actions": result.actions, "error": result.error}
    return {**head, "identical": result.identical, **counts, "difference": difference}


def _in_words(life: Life, result: Any) -> str:
    if isinstance(result, str):
        return f"skipped: {result}"
    policy = life.start.policy if life.start else "?"
    name = f"{life.scheduler} ({policy})"
    if (found := result.difference) is not None:
        return (
            f"{name}: NOT the same from decision {found.round} on, at {found.at!r}\n"
            f"  recorded: {found.recorded}\n  replayed: {found.replayed}"
        )
    ended = f"; in the end both raised {result.error}" if result.error else ""
    return f"{name}: {result.rounds} decisions with {result.actions} actions, all the same{ended}"


def _what_if(
    lives: list[Life],
    policies: list[str],
    arguments: Mapping[str, Any],
    warmup_s: float,
    as_json: bool,
) -> None:
    from rich.console import Console

    from ray_slo.policies.registry import live_arguments
    from ray_slo.simulation.replay import newest, policy_arguments, recorded, what_if

    life, found = newest(lives)
    reports: dict[str, Report] = {RECORDED: recorded(found, warmup_s)}
    try:
        name, kwargs = policy_arguments(life)
        reports[f"{name}, {SIMULATED}"] = what_if(
            found, name, _simulable(kwargs), warmup_s=warmup_s
        )
    except ValueError as error:
        typer.secho(f"the recorded policy cannot be simulated: {error}", fg="yellow", err=True)
    shortest_ms = 1e3 * min(reports[RECORDED].meta["slo_s"].values())
    for name in policies:
        kwargs = {**_simulable(live_arguments(name, shortest_ms)), **arguments}
        reports[f"what if {name}"] = what_if(found, name, kwargs, warmup_s=warmup_s)
    if as_json:
        summaries = {name: report.summary() for name, report in reports.items()}
        print_json({"scheduler": life.scheduler, "cancelled": len(found.cancels), **summaries})
        return
    wall_at = life.start.about.get("wall_at") if life.start else None
    when = ""
    if wall_at is not None:
        when = f", {datetime.fromtimestamp(wall_at, timezone.utc):%Y-%m-%d %H:%M} UTC"
    title = f"{life.scheduler}{when}: {len(found.requests)} requests"
    Console().print(side_by_side(reports, title))
    if life.lost or not life.begins:
        typer.echo("The log is incomplete. These figures do not count the missing part.")


def side_by_side(reports: Mapping[str, Report], title: str) -> Any:
    """Return a rich table with one row per report, for a width of 80 characters. Latencies are in
    milliseconds."""
    from rich import box

    rows = []
    for name, report in reports.items():
        values = report.summary()
        cells = [values[c] for c in _COLUMNS]
        rows.append([name] + [_cell(c, v) for c, v in zip(_COLUMNS, cells, strict=True)])
    made = table(title, ("", *_HEADINGS), rows)
    made.box, made.collapse_padding = box.SIMPLE_HEAD, True
    for column in made.columns:
        column.no_wrap = True
    return made


def _cell(column: str, value: Any) -> str:
    if column in ("bad_rate", "idle_fraction"):
        return percent(value)
    return number(value, 4 if column == "accuracy" else 3)


def _simulable(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the policy's arguments for the simulator. A live host solves tables in another
    process; the simulator cannot."""
    return {k: v for k, v in kwargs.items() if not (k == "solver" and v is None)}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(replay)
