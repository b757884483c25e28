"""`ray-slo bench`: open-loop load against an HTTP endpoint or a Serve handle."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_slo.cli._output import (
    number,
    percent,
    positive,
    print_json,
    table,
    will_fill,
    will_write,
)
from ray_slo.core.text import quoted

if TYPE_CHECKING:
    from ray_slo.load.report import LoadResult
    from ray_slo.load.workload import Payloads, Recorded
    from ray_slo.simulation.arrivals import Constant, Gamma, Poisson, Times, Trace


_KINDS = ("poisson", "gamma", "constant")
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"  # a header's name (RFC 9110)


_Url = Annotated[
    str | None, typer.Argument(help="Endpoint, like http://127.0.0.1:8000/", show_default=False)
]
_Handle = Annotated[
    str | None,
    typer.Option(metavar="APP[/DEPLOYMENT]", help="Call a Serve handle instead of HTTP."),
]
_RayAddress = Annotated[
    str, typer.Option(help="Address of the running Ray cluster (with --handle).")
]
_WarmupS = Annotated[
    float | None,
    typer.Option(help="Seconds at the start that are not counted. [default: 2, at most a quarter]"),
]
_Arrivals = Annotated[
    str,
    typer.Option(help="poisson, gamma, constant, or a file: request times, or rates by interval."),
]
_Rate = Annotated[float | None, typer.Option(help="Mean requests per second. [default: 20]")]
_DurationS = Annotated[
    float | None,
    typer.Option(help="Time during which requests arrive, seconds. [default: 20]"),
]
_Shape = Annotated[
    float | None,
    typer.Option(help="Shape of gamma arrivals: 1 is Poisson, smaller is burstier. [default: 0.5]"),
]
_IntervalS = Annotated[
    float | None,
    typer.Option(help="Seconds per line of a file that does not say it. [default for rates: 1]"),
]
_Payload = Annotated[
    str | None,
    typer.Option(
        help="Payloads: a file, a folder (its sub-folders are labels), a glob pattern, a .jsonl "
        "file, or a Python name module:attr. Without it, GET requests are sent."
    ),
]
_Header = Annotated[
    list[str] | None, typer.Option(metavar="NAME:VALUE", help="Header to send; repeatable.")
]
_ResponseMetadata = Annotated[
    bool,
    typer.Option(
        help="Ask the handle for variant, batch size and times. The ingress of ray-slo is always "
        "asked."
    ),
]
_LabelField = Annotated[str, typer.Option(help="Field of a JSON answer that contains the label.")]
_Record = Annotated[
    Path | None, typer.Option(help="Save the workload to this file (.npz), to replay it later.")
]
_Replay = Annotated[
    Path | None, typer.Option(help="Send a recorded workload instead of a new one.")
]
_Out = Annotated[
    Path | None, typer.Option(help="Folder for requests.csv, summary.json and a plot.")
]


def bench(
    url: _Url = None,
    handle: _Handle = None,
    ray_address: _RayAddress = "auto",
    rate: _Rate = None,
    duration_s: _DurationS = None,
    warmup_s: _WarmupS = None,
    arrivals: _Arrivals = "poisson",
    shape: _Shape = None,
    interval_s: _IntervalS = None,
    payload: _Payload = None,
    slo_ms: Annotated[
        float, typer.Option(help="Latency up to which an answer is in time, milliseconds.")
    ] = 1000.0,
    timeout_s: Annotated[
        float, typer.Option(help="Time after which a request is given up, seconds.")
    ] = 30.0,
    header: _Header = None,
    label_field: _LabelField = "label",
    response_metadata: _ResponseMetadata = False,
    record: _Record = None,
    replay: _Replay = None,
    seed: Annotated[int, typer.Option(help="Seed of arrival times and payload order.")] = 0,
    out: _Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Send requests at a given rate, without waiting for answers. Report goodput and latency.

    Latency counts from the intended send time (no coordinated omission).

    Example: ray-slo bench http://127.0.0.1:8000/ --rate 40 --slo-ms 500 --payload digits/
    """
    from rich.console import Console

    from ray_slo.load.drive import run_http
    from ray_slo.load.workload import Recorded, load_payloads

    _check_target(url, handle, payload)
    positive(slo_ms=slo_ms, timeout_s=timeout_s)
    options: dict[str, Any] = {"slo_s": slo_ms / 1e3, "timeout_s": timeout_s}
    options["label_field"] = label_field
    headers = _headers(header)
    will_write("--record", record)
    will_fill("--out", out)
    payloads = load_payloads(payload) if payload else None
    if replay:
        said = {"rate": rate, "duration_s": duration_s, "warmup_s": warmup_s}
        said |= {"shape": shape, "interval_s": interval_s}
        if given := [name for name, value in said.items() if value is not None]:
            flag = f"--{given[0].replace('_', '-')}"
            raise ValueError(f"{flag} cannot be used with --replay, whose file says it")
        workload = Recorded.load(replay)
    else:
        length = {"warmup_s": warmup_s, "shape": shape, "interval_s": interval_s}
        workload = make_workload(arrivals, rate, duration_s, payloads, **length, seed=seed)
        if read := workload.about.get("read"):
            typer.echo(read, err=True)
    if record:
        workload.save(record)
    with Console(stderr=True).status(f"{len(workload)} requests in {workload.duration_s:g} s …"):
        if url is not None:
            result = run_http(url, workload, payloads, headers=headers, **options)
        else:
            told = {"response_metadata": True} if response_metadata else {}
            result = _through_handle(
                handle or "", ray_address, workload, payloads, call_kwargs=told, **options
            )
    paths = result.save(out) if out else []
    if as_json:
        print_json(result.summary)
        return
    show(Console(), result, url or handle or "")
    for path in paths:
        Console().print(f"wrote {path}")


def _check_target(url: str | None, handle: str | None, payload: str | None) -> None:
    if url is not None and Path(url).is_file():
        raise ValueError(
            f"url: {url} is a file; give the URL of a running application, like "
            "http://127.0.0.1:8000/, or --handle APP[/DEPLOYMENT]"
        )
    if (url is None) == (handle is None):
        raise ValueError("give either a URL or --handle APP[/DEPLOYMENT]")
    if handle is not None and payload is None:
        raise ValueError("--handle needs --payload: the arguments of the calls")


def make_workload(
    arrivals: str,
    rate: float | None = None,
    duration_s: float | None = None,
    payloads: Payloads | None = None,
    *,
    warmup_s: float | None = None,
    shape: float | None = None,
    interval_s: float | None = None,
    seed: int = 0,
) -> Recorded:
    """Make a workload from the command's options. The same seed gives the same workload. If
    arrivals are read from a file, `about["read"]` says what it holds.

    Raises:
        ValueError: the arrival process is unknown, or a number is out of its range. The message
            names the option.
    """
    import numpy as np

    from ray_slo.load.workload import Payloads, Recorded
    from ray_slo.simulation.arrivals import Times, Trace

    positive(rate=rate, duration_s=duration_s, shape=shape, interval_s=interval_s)
    if seed < 0:
        raise ValueError(f"--seed must be at least 0, got {seed}")
    process = _process(arrivals, rate, shape, interval_s)
    duration_s = 20.0 if duration_s is None else duration_s
    about: dict[str, Any] = {"arrivals": arrivals, "rate": process.rate}
    if isinstance(process, Trace | Times):
        left = duration_s < process.length_s
        taken = f"the first {duration_s:g} s of {process.length_s:.6g} s" if left else "all of it"
        about["read"] = f"{process.said}; the run takes {taken}"
        duration_s = min(duration_s, process.length_s)
    warmup_s = min(2.0, duration_s / 4) if warmup_s is None else warmup_s
    if not 0 <= warmup_s < duration_s:
        raise ValueError(
            f"--warmup-s must be at least 0 and less than the run, {duration_s:g} s, "
            f"got {warmup_s:g}"
        )
    times = process.times(duration_s, np.random.default_rng(seed))
    if "read" in about and not len(times):
        raise ValueError(
            f"--arrivals: {arrivals} has no request in the first {duration_s:g} s; give a longer "
            "--duration-s"
        )
    drawn_from = payloads or Payloads([b""])
    return Recorded.record(
        times, drawn_from, duration_s=duration_s, warmup_s=warmup_s, seed=seed, **about
    )


def _process(
    arrivals: str, rate: float | None, shape: float | None, interval_s: float | None
) -> Constant | Poisson | Gamma | Trace | Times:
    """The arrival process. An option that it does not have is refused."""
    from ray_slo.core.names import nearest
    from ray_slo.simulation.arrivals import Constant, Gamma, Poisson, of_file

    is_file = arrivals not in _KINDS and Path(arrivals).is_file()
    if not is_file and arrivals not in _KINDS:
        raise ValueError(
            f"--arrivals must be {', '.join(_KINDS)} or a file, got {quoted(arrivals)}"
            f"{nearest(arrivals, _KINDS)}"
        )
    if rate is not None and is_file:
        raise ValueError("--rate cannot be used with a file of arrivals, which has its own")
    if shape is not None and arrivals != "gamma":
        raise ValueError("--shape goes with --arrivals gamma")
    if interval_s is not None and not is_file:
        raise ValueError("--interval-s goes with a file of arrivals")
    if is_file:
        return of_file(Path(arrivals), interval_s)
    rate = 20.0 if rate is None else rate
    if arrivals == "gamma":
        return Gamma(rate=rate, shape=0.5 if shape is None else shape)
    return Constant(rate=rate) if arrivals == "constant" else Poisson(rate=rate)


def _headers(given: list[str] | None) -> dict[str, str]:
    headers = {}
    for text in given or ():
        name, colon, value = text.partition(":")
        if not colon or not re.fullmatch(_TOKEN, name.strip()) or re.search(r"[\r\n\0]", value):
            raise ValueError(f"--header wants NAME:VALUE as in HTTP, got {text!r}")
        headers[name.strip()] = value.strip()
    return headers


def _through_handle(
    name: str, address: str, workload: Recorded, payloads: Payloads | None, **options: Any
) -> LoadResult:
    import asyncio

    from ray_slo.load.drive import run_handle
    from ray_slo.serve.watch.status import connected_handle, is_frontend

    assert payloads is not None
    with connected_handle(name, address) as handle:
        if is_frontend(name):
            options["call_kwargs"]["response_metadata"] = True
        return asyncio.run(run_handle(handle, workload, payloads, **options))


def show(console: Any, result: LoadResult, title: str) -> None:
    """Print the figures of a run."""
    summary = result.summary
    status = ", ".join(f"{count} {name}" for name, count in summary["status"].items() if count)
    rows = [
        ("offered", number(summary["offered_rate"], suffix=" req/s")),
        ("goodput", number(summary["goodput"], suffix=" req/s")),
        ("bad rate", percent(summary["bad_rate"])),
        ("SLO", number(summary["slo_ms"], suffix=" ms")),
        *((q, number(summary[f"{q}_ms"], suffix=" ms")) for q in ("p50", "p95", "p99")),
        ("mean batch", number(summary["mean_batch"])),
        ("accuracy", percent(summary["accuracy"])),
        ("requests", f"{summary['requests']} ({status})"),
        ("generator late, p99", number(summary["generator"]["late_p99_ms"], suffix=" ms")),
    ]
    console.print(table(title, ("", "measured"), rows))
    for text in summary["warnings"]:
        console.print(f"[yellow]warning:[/] {text}")
    for text, count in result.sample_errors.items():
        console.print(f"[red]{count} ×[/] {text}", highlight=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(bench)
