"""`ray-slo demo`: the demonstration that `make demo` runs."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    from ray_slo.demo.__main__ import demo

    app.command("demo")(demo)
