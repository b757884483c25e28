"""`ray-slo top`: a live screen about a running application."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    app.command("top")(top)


def top(
    application: Annotated[
        str | None, typer.Argument(help="Serve application; default: every ray-slo application.")
    ] = None,
    address: Annotated[str, typer.Option(help="Address of the Ray cluster.")] = "auto",
    url: Annotated[
        str | None,
        typer.Option(help="URL of an application with a status page, to ask instead of Ray."),
    ] = None,
    interval_s: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between two readings.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and exit.")] = False,
) -> None:
    """Watch models, variants, queues, batches, workers, the plan and refusals, live.

    Keys: arrows choose a model, enter opens it, escape goes back. s sorts by the next column, r
    reverses the order, t goes to the next table, a to the next application, q quits. Where a line
    ends in ›, it continues: the right arrow scrolls.
    """

    def read() -> Mapping[str, Mapping[str, Any]]:
        if url is not None:
            return _over_http(url, application)
        from ray_slo.serve.watch.status import read_status

        return read_status(address, application)

    if once:
        from ray_slo.cli.top_text import console_for_tables, print_screen
        from ray_slo.serve.watch.screen import screen

        for name, state in read().items():
            print_screen(console_for_tables(), screen(name, state))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ValueError("ray-slo top needs a terminal; use --once to print one reading")
    from ray_slo.cli.top_app import Top

    typer.echo("connecting …")  # it takes seconds
    read()  # report a wrong address before the screen is cleared
    Top(read, interval_s).run(mouse=False)


def _over_http(url: str, application: str | None) -> Mapping[str, Mapping[str, Any]]:
    """Return the status that an application serves at `/-/status` beside its API.

    Raises:
        ValueError: the application does not answer, or has no status page.
    """
    import httpx

    asked = f"{url.rstrip('/')}/-/status"
    advice = "; the application needs `status_page: true`"
    try:
        answer = httpx.get(asked, timeout=15.0)
        if answer.status_code == 400:  # it is there, and says why it does not answer
            advice = ""
            raise ValueError(str(answer.json()["message"]))
        answer.raise_for_status()
        found = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--url: no status at {asked}: {error}{advice}") from None
    return {application or url: found}
