"""`ray-slo status`: the present state of a running application."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("status")(status)


def status(
    application: Annotated[
        str | None, typer.Argument(help="Serve application; default: every ray-slo application.")
    ] = None,
    address: Annotated[str, typer.Option(help="Address of the Ray cluster.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    watch_s: Annotated[
        float | None,
        typer.Option(min=0.2, help="Seconds between two readings; default: read once."),
    ] = None,
) -> None:
    """Show models, queues, workers, goodput, and the predicted and the measured latency."""
    from ray_slo.cli.top_text import console_for_tables, print_screen
    from ray_slo.serve.watch.screen import screen
    from ray_slo.serve.watch.status import read_status

    console = console_for_tables()
    while True:
        found = read_status(address, application)
        if as_json:
            typer.echo(json.dumps(found, indent=1))
        else:
            if watch_s:
                console.clear()
            for name, state in found.items():
                print_screen(console, screen(name, state))
        if not watch_s:
            return
        time.sleep(watch_s)
