"""`ray-slo report`: an HTML page about a decision log, a simulation or a bench run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ray_slo.cli._output import will_write
from ray_slo.cli.report_html import Page, Section

if TYPE_CHECKING:
    from ray_slo.cli.report_source import Source

_OVER_TIME = "Every request by the time of its arrival. Drag sideways to choose a time."
_LATENCY = "Share of all requests answered within a time. Refused and lost requests are never."
_SIZES = "Batches by the number of requests in them."
_VARIANTS = "Which network answered."
_MIX = "Which network answered, and how accurate the answers in time are."
_TIMELINE = (
    "A bar is a batch, and its number is the number of requests in it. If the bar is orange below, "
    "some of them were late. Drag to move; pinch, or ctrl and the wheel, to zoom."
)
_PLANS = (
    "The time and the trigger of each plan, its changes from the plan before, and the planner's "
    "reason. If there is no change, the plan stayed."
)
_ERRORS = "How much later a batch ended than the policy predicted when it sent it."


def report(
    source: Annotated[
        Path,
        typer.Argument(
            help="A decision log (file or folder), a simulation (report.npz, or the folder of "
            "`simulate --report`), or a bench run (the folder of `bench --out`)."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Path of the page to write.")] = Path("report.html"),
    run: Annotated[
        str | None, typer.Option(help="Name of the scheduler in a log; default: the newest.")
    ] = None,
    warmup_s: Annotated[
        float, typer.Option(help="Seconds at the start of a log that figures do not count.")
    ] = 0.0,
) -> None:
    """Write a self-contained HTML page about a run: goodput, latencies, batches, late requests."""
    if not 0 <= warmup_s < math.inf:
        raise ValueError(f"--warmup-s must be at least 0 and finite, got {warmup_s:g}")
    will_write("--out", out)
    path = page(load(source, run, warmup_s)).write(out)
    typer.echo(f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)")


def load(path: str | Path, run: str | None = None, warmup_s: float = 0.0) -> Source:
    """Read a decision log (file or folder), a simulation (`report.npz`, or the folder that
    `ray-slo simulate --report` wrote) or a bench run (the folder of `ray-slo bench --out`).

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it is none of these, or it is damaged.
    """
    from ray_slo.cli.report_bench import of_bench
    from ray_slo.cli.report_log import of_log
    from ray_slo.cli.report_run import of_report
    from ray_slo.record.rows import SUFFIX
    from ray_slo.simulation.report import Report

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(2, "No such file or folder", str(path))
    is_simulation = path.suffix == ".npz" or (path / "report.npz").is_file()
    is_bench = (path / "requests.csv").is_file() and (path / "summary.json").is_file()
    if (is_simulation or is_bench) and (run is not None or warmup_s):
        given = "--run" if run is not None else "--warmup-s"
        raise ValueError(f"{given} is only for a decision log; {path} is none, so leave it out")
    if is_simulation:
        file = path if path.is_file() else path / "report.npz"
        return of_report(Report.load(file), f"simulation {file}")
    if is_bench:
        return of_bench(path)
    if path.is_file() or list(path.glob(f"*{SUFFIX}")):
        return of_log(path, run, warmup_s)
    raise ValueError(
        f"{path}: neither a decision log (*{SUFFIX}), nor a simulation (report.npz), nor a bench "
        "run (requests.csv and summary.json)"
    )


def page(source: Source) -> Page:
    """Return the page about a run."""
    data = source.data
    has_batches = data["batches"] is not None and len(data["batches"]["size"]) > 0
    sections = [
        Section("Goodput and violations", source.notes, charts=[("goodput", _OVER_TIME)]),
        Section("Latency against the SLO", charts=[("latency", _LATENCY)]),
    ]
    if has_batches or data["requests"].get("batch_size"):
        sections.append(Section("Batch sizes", charts=[("sizes", _SIZES)]))
    if len(data["variants"]) > 1:
        known = any(accuracy is not None for accuracy in data["accuracy"])
        heading, words = ("Variants and accuracy", _MIX) if known else ("Variants", _VARIANTS)
        sections.append(Section(heading, charts=[("mix", words)]))
    if has_batches:
        sections += [
            Section("What every worker ran", charts=[("timeline", _TIMELINE)]),
            Section("Prediction error", charts=[("errors", _ERRORS)]),
        ]
    if source.plans is not None:
        sections.append(Section("Planner decisions", [_PLANS], source.plans))
    if source.worst:
        happened = {data["outcomes"][i]["name"] for i in set(data["requests"]["outcome"])}
        bad = any(o["bad"] for o in data["outcomes"] if o["name"] in happened)
        words = "No request was missed. These had the least slack."
        if bad:
            words = "The worst late, refused and unanswered requests."
        sections.append(Section("The worst requests", [words], details=source.worst))
    sections += [Section(heading, words, table) for heading, words, table in source.tables]
    return Page(source.title, f"From the {source.kind}.", source.facts, sections, data)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(report)
