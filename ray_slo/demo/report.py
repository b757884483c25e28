"""The demo's table, on screen and as an HTML page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_slo.cli._output import number, percent
from ray_slo.cli.report_html import Page, Section, Table, style, svg

if TYPE_CHECKING:
    from ray_slo.core.profiles import LatencyProfile
    from ray_slo.demo.calibrate import Calibration
    from ray_slo.demo.systems import Settings, System
    from ray_slo.load.report import LoadResult

COLUMNS = (
    "system",
    "offered/s",
    "goodput/s",
    "bad",
    "p50 ms",
    "p99 ms",
    "batch",
    "accuracy",
)
_NARROW = ("", "offered", "goodput", "bad", "p50", "p99", "batch", "accuracy")  # 80 columns


def cells(system: System, result: LoadResult) -> tuple[str, ...]:
    """A row of the table."""
    summary = result.summary
    return (
        system.name,
        number(summary["offered_rate"]),
        number(summary["goodput"]),
        percent(summary["bad_rate"]),
        number(summary["p50_ms"]),
        number(summary["p99_ms"]),
        number(summary["mean_batch"]),
        percent(summary["accuracy"]),
    )


def screen_table(results: Mapping[System, LoadResult], title: str) -> Any:
    """The rich table, for 80 columns."""
    from rich import box
    from rich.table import Table as Screen

    table = Screen(
        title=f"{title} (rates per second, times in ms)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    for index, column in enumerate(_NARROW):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for system, result in results.items():
        table.add_row(*cells(system, result), style="bold green" if system.ours else "")
    return table


def page(
    results: Mapping[System, LoadResult],
    calibration: Calibration,
    profiles: Mapping[str, LatencyProfile],
    family: Mapping[str, float],
    machine: Mapping[str, Any],
    next_steps: str,
) -> Page:
    """The whole report."""
    import matplotlib

    from ray_slo.cli.profile import plot_profiles
    from ray_slo.load.report import plot_latency_cdf, plot_runs

    settings = calibration.settings
    named = {system.name: result for system, result in results.items()}
    with matplotlib.rc_context(style()):  # type: ignore[arg-type]
        over_time, cdf = svg(plot_runs(named)), svg(plot_latency_cdf(named))
        measured_profiles = svg(plot_profiles(dict(profiles)))
    warnings = [
        f"{system.name}: {text}."
        for system, result in results.items()
        for text in result.summary["warnings"]
    ]
    sections = [
        Section(
            "What each system made of the same requests",
            text=warnings,
            table=Table(
                COLUMNS,
                [cells(system, result) for system, result in results.items()],
                [index for index, system in enumerate(results) if system.ours],
            ),
            figures=[
                (cdf, "Share of all requests answered within a time. Dashed: the SLO."),
                (over_time, "Every request by its intended send time. Dashed: the SLO."),
            ],
        ),
        Section(
            "How they differ",
            table=Table(("system", "batches"), [(s.name, s.about) for s in results]),
        ),
        Section("What is the same", text=_same(settings)),
        Section("How rate, SLO and tuned wait were chosen", text=_chosen(calibration)),
        Section(
            "The networks on this machine",
            text=["Execution time ℓ(b) of a batch of b images, one CPU thread, 95th percentile."],
            table=Table(
                ("network", "held-out accuracy"), [(n, percent(a)) for n, a in family.items()]
            ),
            figures=[(measured_profiles, "Measured profile of the network used.")],
        ),
        Section("Next", code=next_steps),
    ]
    facts = _facts(calibration, str(machine.get("hardware", "")))
    return Page("ray-slo beside plain Ray Serve, on this machine", _ABOUT, facts, sections)


_ABOUT = (
    "Goodput is what a client got within the SLO; the bad rate is the share of requests that were "
    "answered too late, refused, or not answered at all."
)


def _facts(calibration: Calibration, machine: str) -> list[tuple[str, str]]:
    settings = calibration.settings
    return [
        ("latency SLO", f"{1e3 * settings.slo_s:.0f} ms"),
        ("offered", f"{calibration.rate:.0f} req/s"),
        ("tuned wait", f"{1e3 * settings.tuned_wait_s:.0f} ms"),
        ("network", settings.variant),
        ("machine", machine),
    ]


def _same(settings: Settings) -> list[str]:
    return [
        f"{settings.num_replicas} replicas with one CPU thread each, network {settings.variant}, "
        f"at most {settings.max_batch_size} images in a batch, the same PNG decoding, warmed up; "
        "the same recorded Poisson arrivals and images from a load generator in its own process. "
        "Latency counts from the intended send time, and requests leave on time whatever the "
        "answers, so waiting is never hidden.",
        f"ray-slo was told {settings.server_slo_ms:.0f} ms: the client's SLO less 10 % for the way "
        "between client and server, which the server does not see.",
        "All run on the same cores as the proxy and the load generator, one system after another: "
        "a busy machine can favour one of them by chance.",
    ]


def _chosen(calibration: Calibration) -> list[str]:
    tried = "; ".join(
        f"{1e3 * t['wait_s']:.0f} ms at {t['rate']:.0f} req/s: {percent(t['bad_rate'])} bad"
        for t in calibration.tried
    )
    return [
        f"Plain Serve answered {calibration.capacity:.0f} requests/s with "
        f"{8 * calibration.settings.num_replicas} always in flight; the SLO is three such rounds. "
        "The rate is the highest of those tried at which plain Serve with its best wait kept up "
        "(at most 1 % bad): the edge of what a hand-tuned system can do.",
        f"Waits tried: {tried or 'none'}.",
    ]


def write(path: Path, *args: Any, **kwargs: Any) -> Path:
    """Make the page and write it."""
    return page(*args, **kwargs).write(path)
