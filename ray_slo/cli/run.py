"""`ray-slo run`: `serve run` in the mode and with the settings that serve most requests in time."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    passed = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("run", context_settings=passed, no_args_is_help=True)(run)


def run(ctx: typer.Context) -> None:
    """Run an application (MODULE:APP) or a config, as `serve run` does, with all its options.

    If this starts Ray, the cluster is in the fast mode where that is possible. Serve's proxies
    refuse in overload before a frontend is reached. Ray's processes are not behind all other
    programs of the machine. A Ray that runs already keeps its own settings.
    """
    from ray_slo.serve.proxy import modes

    beside = Path(sys.executable).with_name("serve")
    serve = str(beside) if beside.is_file() else shutil.which("serve")
    if serve is None:
        raise FileNotFoundError(f"no `serve` beside {sys.executable} or on the PATH")
    why_not = modes.why_not()
    typer.echo(f"mode: {modes.enter()}{f' ({why_not})' if why_not else ''}", err=True)
    sys.stderr.flush()
    os.execv(serve, ["serve", "run", *ctx.args])
