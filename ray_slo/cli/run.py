"""`ray-slo run`: `serve run` in the mode and with the settings that serve most requests in time."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
import yaml

_PORT = 8000  # Serve's default


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
    if (at := _taken(ctx.args)) is not None:
        raise ValueError(
            f"another program listens on {at}. If it is Serve of another Ray, its applications "
            "would get a part of the requests. Stop it, or set another port in `http_options` of "
            "the config"
        )
    why_not = modes.why_not()
    typer.echo(f"mode: {modes.enter()}{f' ({why_not})' if why_not else ''}", err=True)
    sys.stderr.flush()
    os.execv(serve, ["serve", "run", *ctx.args])


def _taken(args: Sequence[str]) -> str | None:
    """Return the address of Serve's HTTP proxy if another program listens there. None if nobody
    does, or if a Ray runs already: `serve run` then uses its Serve, which may be that program."""
    named = any(arg == "-a" or arg.startswith("--address") for arg in args)
    current = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # Ray's own
    if named or os.environ.get("RAY_ADDRESS") or current.exists():
        return None
    options = _http_options(args)
    host, port = options.get("host", "127.0.0.1"), options.get("port", _PORT)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a Serve that has ended
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"{host}:{port}" if error.errno == errno.EADDRINUSE else None
        except (TypeError, OverflowError):  # Serve says what is wrong
            return None
    return None


def _http_options(args: Sequence[str]) -> dict[str, Any]:
    """Return `http_options` of the config in the arguments. Empty if there is none."""
    for path in map(Path, args):
        if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
            try:
                config = yaml.safe_load(path.read_text(encoding="utf-8"))
                options = config.get("http_options")
                if config.get("proxy_location") == "Disabled":
                    return {"port": 0}  # any
            except (OSError, ValueError, AttributeError, yaml.YAMLError):
                continue
            if isinstance(options, dict):
                return options
    return {}
