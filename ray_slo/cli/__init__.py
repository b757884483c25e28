"""The `ray-slo` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from annotated_types import Ge, Le
from pydantic import ValidationError
from typer.core import TyperGroup

from ray_slo.core.environment import TRACEBACK
from ray_slo.core.explain import problem
from ray_slo.core.pages import CLI, pointed
from ray_slo.core.text import text_of

# One module per command, each with `register(app)`.
COMMANDS = (
    *("new", "check", "run", "simulate", "plan", "profile", "solve", "policy", "bench"),
    *("status", "top", "replay", "report", "dashboards", "demo", "docs"),
)


def _describe(error: Exception) -> str:
    """Return the text of an error, with one line per mistake."""
    if not isinstance(error, ValidationError):
        return text_of(error)
    return "\n".join(
        ": ".join(filter(None, [".".join(map(str, e["loc"])), problem((), e)]))
        for e in error.errors()
    )


def _reworded(error: typer.BadParameter) -> None:
    """Describe a mistake in an option in the same way as a mistake in a document."""
    if not isinstance(cause := error.__cause__, ValidationError):
        return  # a version of Typer without pydantic; its message already has the value
    wrong = cause.errors()[0]
    kind = {"int": int, "bool": bool}.get(wrong["type"].split("_")[0], float)
    about: list[Any] = []
    for rule, at in ((Ge, "min"), (Le, "max")):
        if (bound := getattr(error.param, at, None)) is not None:
            about.append(rule(bound))
    whole = (kind, *about)
    error.message = problem([Annotated[whole] if about else kind], wrong)


class _Group(TyperGroup):
    """Turns errors that the user can correct into a short message and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            _reworded(error)
            raise
        except (ValueError, OSError) as error:
            if os.environ.get(TRACEBACK) or isinstance(error, BrokenPipeError):
                raise
            said = pointed(_describe(error), f"{CLI}#ray-slo-{ctx.invoked_subcommand}")
            typer.secho(f"Error: {said}", fg="red", err=True)
            raise typer.Exit(2) from None
        except RuntimeError as error:
            from ray_slo.simulation.books import PolicyError

            if os.environ.get(TRACEBACK) or not isinstance(error, PolicyError):
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
    """Run the command line, and exit the process."""
    # With Serve's throughput options, handles work only in event loops. This allows them here.
    os.environ.setdefault("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP", "1")
    app(list(sys.argv[1:] if args is None else args), prog_name="ray-slo")
