"""`ray-slo dashboards`: a Grafana dashboard and Prometheus rules for the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("dashboards")(dashboards)


def dashboards(
    out: Annotated[Path, typer.Option(help="Folder to write to; made where it is not there.")],
    objective: Annotated[
        float, typer.Option(help="Share of requests to be answered in time, e.g. 0.999.")
    ] = 0.99,
    max_plan_age_s: Annotated[
        float, typer.Option(help="Alert when the last plan is older than this, seconds.")
    ] = 180.0,
    min_requests: Annotated[
        int,
        typer.Option(help="Alert on burnt budgets only from this many requests over 1 h on."),
    ] = 100,
) -> None:
    """Write a Grafana dashboard like Ray's own, and Prometheus rules with alerts on the SLO."""
    from ray_slo.serve.watch.dashboards import dashboard, rules

    files = {
        "slo_grafana_dashboard.json": dashboard(objective),
        "slo_rules.yml": rules(objective, max_plan_age_s, min_requests),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
        typer.echo(out / name)
