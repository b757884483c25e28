"""The program behind `make demo`; see `--help`."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ray_slo.core.profiles import LatencyProfile
    from ray_slo.demo.calibrate import Calibration
    from ray_slo.demo.systems import Settings, System
    from ray_slo.load.report import LoadResult
    from ray_slo.load.workload import Payloads, Recorded

REPORT = "report.html"


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report and measurements.")] = Path(
        "out/demo"
    ),
    variant: Annotated[
        str | None,
        typer.Option(help="Train this network alone (default: train all, serve the last)."),
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(help="default, blocking, tuned, batch, deployment; repeatable."),
    ] = None,
    duration_s: Annotated[float, typer.Option(min=2, help="Of the run of each system.")] = 30.0,
    rate: Annotated[float | None, typer.Option(help="Requests/s, instead of calibrating.")] = None,
    slo_ms: Annotated[float | None, typer.Option(help="With --rate.")] = None,
    wait_ms: Annotated[float | None, typer.Option(help="Tuned wait, with --rate.")] = None,
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    seed: Annotated[int, typer.Option(help="Of the recorded workload.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A minute: less of everything.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Serve real digit images with plain Ray Serve and with ray-slo, and compare."""
    from rich.console import Console

    if missing := [name for name in ("torch", "sklearn", "PIL") if find_spec(name) is None]:
        typer.secho(
            f"Error: the demo trains and serves small networks, and {', '.join(missing)} is not "
            "installed; install it with pip install 'ray-slo[digits]'",
            fg="red",
            err=True,
        )
        raise typer.Exit(2)

    console = Console(stderr=as_json)
    try:
        options = Options(
            *(out, variant, system, min(duration_s, 6.0) if quick else duration_s, rate),
            *(slo_ms, wait_ms, replicas, seed, quick),
        )
        figures = run(console, options)
    except (ValueError, ConnectionError) as error:
        console.print(f"[red]Error:[/] {error}", highlight=False)
        raise typer.Exit(2) from None
    if as_json:
        from ray_slo.cli._output import print_json

        print_json(figures)


@dataclass(frozen=True)
class Options:
    """What the command was asked for."""

    out: Path
    variant: str | None
    systems: list[str] | None
    duration_s: float
    rate: float | None
    slo_ms: float | None
    wait_ms: float | None
    replicas: int
    seed: int
    quick: bool


def run(console: Any, options: Options) -> dict[str, Any]:
    """All steps; returns the figures that `--json` prints.

    Raises:
        ValueError: options that do not fit together.
    """
    if options.rate is not None and (options.slo_ms is None or options.wait_ms is None):
        raise ValueError("--rate goes with --slo-ms and --wait-ms: nothing is calibrated then")
    from ray_slo.demo import report
    from ray_slo.demo.systems import choose

    systems = choose(options.systems)
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    family = _train(console, options)
    variant = options.variant or list(family)[-1]
    load = _load(console)
    profile, machine = _profile(console, variant, options)
    calibration, results = _serve(console, systems, variant, profile, options)

    settings = calibration.settings
    title = f"{variant}, SLO {1e3 * settings.slo_s:.0f} ms, {options.replicas} replicas"
    console.print(report.screen_table(results, title))
    for system, result in results.items():
        result.save(options.out / system.key)
    next_steps = _next_steps(variant, calibration)
    path = report.write(
        options.out / REPORT, results, calibration, {variant: profile}, family, machine, next_steps
    )
    console.print(f"report: {path}   (done in {time.monotonic() - started:.0f} s)\n\nnext:")
    console.print(next_steps, highlight=False, soft_wrap=True)
    return {
        "machine": machine,
        "load_average": load,
        "variant": variant,
        "slo_ms": 1e3 * settings.slo_s,
        "server_slo_ms": settings.server_slo_ms,
        "tuned_wait_ms": 1e3 * settings.tuned_wait_s,
        "rate": calibration.rate,
        "capacity": calibration.capacity,
        "tried": calibration.tried,
        "seconds": time.monotonic() - started,
        "systems": {system.key: result.summary for system, result in results.items()},
    }


def _train(console: Any, options: Options) -> dict[str, float]:
    """Accuracy of each network."""
    from ray_slo.cli._output import percent, table
    from ray_slo.demo.digits.train import accuracies

    with console.status("training the digits networks (kept for the next time)"):
        family: dict[str, float] = accuracies([options.variant] if options.variant else None)
    rows = [(name, percent(accuracy)) for name, accuracy in family.items()]
    console.print(table("digits networks", ("network", "accuracy on unseen writers"), rows))
    return family


def _load(console: Any) -> float:
    """The machine's load average; warns where it is busy."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5 * (os.cpu_count() or 1):
        console.print(
            f"[yellow]warning:[/] the machine is busy (load average {load:.1f}): "
            "what follows is measured beside other work"
        )
    return load


def _profile(console: Any, variant: str, options: Options) -> tuple[LatencyProfile, dict[str, Any]]:
    """The network's profile on this machine, and what the machine is."""
    from ray_slo.cli._output import number
    from ray_slo.core.profiles import save_profiles
    from ray_slo.models.profiling import Target, metadata, profile_class, to_profile

    with console.status(f"measuring {variant}: batches of 1 to 32"):
        target = Target("ray_slo.demo.digits:Digits", {"variant": variant})
        samples = profile_class(target, max_batch_size=32, budget_s=3 if options.quick else 8)
    profile = to_profile(samples, max_batch_size=32)
    machine = metadata(quantile=0.95, threads=1)
    save_profiles(options.out / "profile.json", {variant: profile}, **machine)
    console.print(
        f"{variant}: one image {number(1e3 * profile.latency(1))} ms, "
        f"8 together {number(1e3 * profile.latency(8))} ms, "
        f"32 together {number(1e3 * profile.latency(32))} ms"
    )
    return profile, machine


def _serve(
    console: Any, systems: list[System], variant: str, profile: LatencyProfile, options: Options
) -> tuple[Calibration, dict[System, LoadResult]]:
    """Calibrate, then give every system the same requests."""
    from ray_slo.demo.calibrate import Calibration, calibrate, poisson
    from ray_slo.demo.digits.data import test_pngs
    from ray_slo.demo.systems import Settings, local_serve
    from ray_slo.load.workload import Payloads

    images, labels = test_pngs()
    payloads = Payloads(images, [str(label) for label in labels], "image/png")
    slo_ms, wait_ms = options.slo_ms or 1e3, options.wait_ms or 0.0
    settings = Settings(variant, options.replicas, 32, slo_ms / 1e3, wait_ms / 1e3)
    for system in systems:
        system.app(settings)  # what cannot be built is better said now than after minutes
    results = {}
    with console.status("starting Ray on this machine") as status, local_serve() as url:
        if options.rate is None:
            status.update("calibrating rate, SLO and wait on plain Serve")
            calibration = calibrate(
                url,
                payloads,
                profile,
                settings,
                probe_s=3.0 if options.quick else 8.0,
                say=lambda text: console.print(f"  {text}", highlight=False),
            )
        else:
            calibration = Calibration(settings, options.rate, options.rate, [])
        duration_s = options.duration_s
        warmup_s = min(3.0, duration_s / 3)
        workload = poisson(
            payloads, calibration.rate, duration_s, warmup_s=warmup_s, seed=options.seed
        )
        workload.save(options.out / "workload.npz")
        console.print(
            f"every system now gets the same {len(workload)} requests in {duration_s:.0f} s; "
            f"SLO {1e3 * calibration.settings.slo_s:.0f} ms"
        )
        for system in systems:
            results[system] = _serve_one(
                console, status, system, calibration.settings, url, workload, payloads
            )
        status.update("stopping Ray")
    return calibration, results


def _serve_one(
    console: Any,
    status: Any,
    system: System,
    settings: Settings,
    url: str,
    workload: Recorded,
    payloads: Payloads,
) -> LoadResult:
    from ray_slo.cli._output import number
    from ray_slo.demo.systems import running
    from ray_slo.load.drive import run_http_process

    status.update(f"{system.name}: starting")
    with running(system.app(settings)):
        status.update(f"{system.name}: serving {len(workload)} requests")
        slo_s = settings.slo_s
        result = run_http_process(url, workload, payloads, slo_s=slo_s, timeout_s=20).result()
    summary = result.summary
    console.print(
        f"  {system.name}: {number(summary['goodput'])} of "
        f"{number(summary['offered_rate'])} req/s in time",
        highlight=False,
    )
    for text, count in result.sample_errors.items():
        console.print(f"    [red]{count} ×[/] {text}", highlight=False)
    return result


def _next_steps(variant: str, calibration: Calibration) -> str:
    slo_ms = 1e3 * calibration.settings.slo_s
    return (
        "make serve                     # leave the application running, with a curl line\n"
        "ray-slo bench http://127.0.0.1:8000/ --payload ray_slo.demo.digits.data:test_pngs "
        f"--rate {calibration.rate:.0f} --slo-ms {slo_ms:.0f}\n"
        f"ray-slo profile ray_slo.demo.digits:Digits --variant {variant}\n"
        "ray-slo simulate               # the same policies in virtual time\n"
    )


if __name__ == "__main__":
    if "" not in sys.path:
        sys.path.insert(0, "")
    typer.run(demo)
