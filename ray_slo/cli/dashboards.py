"""`ray-slo dashboards`: a Grafana dashboard and Prometheus rules for the metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ray_slo.cli._output import positive, will_fill
from ray_slo.core.files import write_text


def register(app: typer.Typer) -> None:
    app.command("dashboards")(dashboards)


def dashboards(
    out: Annotated[Path, typer.Option(help="Folder to write to; it is made if it does not exist.")],
    objective: Annotated[
        float, typer.Option(help="Share of requests that must be answered in time, e.g. 0.999.")
    ] = 0.99,
    max_plan_age_s: Annotated[
        float, typer.Option(help="Age of the last plan, in seconds, above which there is an alert.")
    ] = 180.0,
    min_requests: Annotated[
        int,
        typer.Option(help="Least number of requests in 1 h for an alert on the error budget."),
    ] = 100,
) -> None:
    """Write a Grafana dashboard like Ray's own, and Prometheus rules with alerts on the SLO."""
    from ray_slo.serve.watch.dashboards import dashboard, rules

    positive(max_plan_age_s=max_plan_age_s)
    files = {
        "slo_grafana_dashboard.json": dashboard(objective),
        "slo_rules.yml": rules(objective, max_plan_age_s, min_requests),
    }
    will_fill("--out", out)
    for name, text in files.items():
        write_text(out / name, text if text.endswith("\n") else f"{text}\n")
        typer.echo(out / name)
