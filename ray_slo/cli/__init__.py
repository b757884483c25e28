"""The `ray-slo` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ray_slo.core.text import quoted

# One module per command, each with `register(app)`.
COMMANDS = (
    *("new", "simulate", "plan", "profile", "solve", "policy", "bench", "status", "replay"),
    *("report", "dashboards", "demo"),
)


def _describe(error: Exception) -> str:
    """One line per problem; a pydantic error's fields are spelled as in the YAML."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    problems = getattr(error, "errors", None)
    if not callable(problems):
        return str(error)
    lines = []
    for problem in problems():
        field = ".".join(str(part) for part in problem["loc"])
        given = problem.get("input")
        shown = f", got {quoted(given)}" if isinstance(given, str | int | float) else ""
        lines.append(f"{field or 'input'}: {problem['msg']}{shown}")
    return "\n".join(lines)


class _Group(TyperGroup):
    """Turns errors that the user can mend into a short message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, OSError) as error:
            if os.environ.get("RAY_SLO_TRACEBACK") or isinstance(error, BrokenPipeError):
                raise
            typer.secho(f"Error: {_describe(error)}", fg="red", err=True)
            raise typer.Exit(2) from None
        except RuntimeError as error:
            from ray_slo.simulation.books import PolicyError

            if os.environ.get("RAY_SLO_TRACEBACK") or not isinstance(error, PolicyError):
                raise
            typer.secho(f"Error: the policy broke its contract: {error}", fg="red", err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    name="ray-slo",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="SLO-aware serving for Ray Serve.",
)


def _version(show: bool) -> None:
    if show:
        from ray_slo import __version__

        typer.echo(f"ray-slo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


for _name in COMMANDS:
    import_module(f"{__name__}.{_name}").register(app)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line; exits the process."""
    app(list(sys.argv[1:] if args is None else args), prog_name="ray-slo")
