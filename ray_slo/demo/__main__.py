"""The program behind `make demo`; see `--help`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

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

    console = Console(stderr=as_json)
    try:
        figures = run(
            console, out, variant, system, duration_s, rate, slo_ms, wait_ms, replicas, seed, quick
        )
    except (ValueError, ConnectionError) as error:
        console.print(f"[red]Error:[/] {error}", highlight=False)
        raise typer.Exit(2) from None
    if as_json:
        from ray_slo.cli._output import print_json

        print_json(figures)


def run(
    console: Any,
    out: Path,
    variant: str | None,
    keys: list[str] | None,
    duration_s: float,
    rate: float | None,
    slo_ms: float | None,
    wait_ms: float | None,
    replicas: int,
    seed: int,
    quick: bool,
) -> dict[str, Any]:
    """All steps; returns the figures that `--json` prints.

    Raises:
        ValueError: options that do not fit together.
    """
    if rate is not None and (slo_ms is None or wait_ms is None):
        raise ValueError("--rate goes with --slo-ms and --wait-ms: nothing is calibrated then")
    from deployments.digits.data import test_pngs
    from deployments.digits.train import accuracies
    from ray_slo.cli._output import number, percent, table
    from ray_slo.core.profiles import save_profiles
    from ray_slo.demo import report
    from ray_slo.demo.calibrate import Calibration, calibrate, poisson
    from ray_slo.demo.systems import Settings, choose, local_serve, running
    from ray_slo.load.drive import run_http_process
    from ray_slo.load.workload import Payloads
    from ray_slo.models.profiling import Target, metadata, profile_class, to_profile

    systems = choose(keys)
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    if quick:
        duration_s = min(duration_s, 6.0)

    with console.status("training the digits networks (kept for the next time)"):
        family = accuracies([variant] if variant else None)
    rows = [(name, percent(accuracy)) for name, accuracy in family.items()]
    console.print(table("digits networks", ("network", "accuracy on unseen writers"), rows))
    variant = variant or list(family)[-1]

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > 0.5 * (os.cpu_count() or 1):
        console.print(
            f"[yellow]warning:[/] the machine is busy (load average {load:.1f}): "
            "what follows is measured beside other work"
        )
    with console.status(f"measuring {variant}: batches of 1 to 32"):
        target = Target("deployments.digits:Digits", {"variant": variant})
        samples = profile_class(target, max_batch_size=32, budget_s=3 if quick else 8)
    profile = to_profile(samples, max_batch_size=32)
    machine = metadata(quantile=0.95, threads=1)
    save_profiles(out / "profile.json", {variant: profile}, **machine)
    console.print(
        f"{variant}: one image {number(1e3 * profile.latency(1))} ms, "
        f"8 together {number(1e3 * profile.latency(8))} ms, "
        f"32 together {number(1e3 * profile.latency(32))} ms"
    )

    images, labels = test_pngs()
    payloads = Payloads(images, [str(label) for label in labels], "image/png")
    settings = Settings(variant, replicas, 32, (slo_ms or 1e3) / 1e3, (wait_ms or 0.0) / 1e3)
    for system in systems:
        system.app(settings)  # what cannot be built is better said now than after minutes
    results = {}
    with console.status("starting Ray on this machine") as status, local_serve() as url:
        if rate is None:
            status.update("calibrating rate, SLO and wait on plain Serve")
            calibration = calibrate(
                url,
                payloads,
                profile,
                settings,
                probe_s=3.0 if quick else 8.0,
                say=lambda text: console.print(f"  {text}", highlight=False),
            )
        else:
            calibration = Calibration(settings, rate, rate, [])
        settings = calibration.settings
        workload = poisson(
            payloads,
            calibration.rate,
            duration_s,
            warmup_s=min(3.0, duration_s / 3),
            seed=seed,
        )
        workload.save(out / "workload.npz")
        console.print(
            f"every system now gets the same {len(workload)} requests in {duration_s:.0f} s; "
            f"SLO {1e3 * settings.slo_s:.0f} ms"
        )
        for system in systems:
            status.update(f"{system.name}: starting")
            with running(system.app(settings)):
                status.update(f"{system.name}: serving {len(workload)} requests")
                future = run_http_process(
                    url, workload, payloads, slo_s=settings.slo_s, timeout_s=20
                )
                results[system] = future.result()
            summary = results[system].summary
            console.print(
                f"  {system.name}: {number(summary['goodput'])} of "
                f"{number(summary['offered_rate'])} req/s in time",
                highlight=False,
            )
            for text, count in results[system].sample_errors.items():
                console.print(f"    [red]{count} ×[/] {text}", highlight=False)
        status.update("stopping Ray")

    title = f"{variant}, SLO {1e3 * settings.slo_s:.0f} ms, {replicas} replicas"
    console.print(report.screen_table(results, title))
    for system, result in results.items():
        result.save(out / system.key)
    next_steps = (
        "make serve                     # leave the application running, with a curl line\n"
        "ray-slo bench http://127.0.0.1:8000/ --payload deployments.digits.data:test_pngs "
        f"--rate {calibration.rate:.0f} --slo-ms {1e3 * settings.slo_s:.0f}\n"
        f"ray-slo profile deployments.digits:Digits --variant {variant}\n"
        "ray-slo simulate               # the same policies in virtual time\n"
    )
    path = report.write(
        out / REPORT,
        results,
        calibration,
        {variant: profile},
        family,
        machine,
        next_steps,
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


if __name__ == "__main__":
    if "" not in sys.path:
        sys.path.insert(0, "")
    typer.run(demo)
