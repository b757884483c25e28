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
    from ray_slo.demo.calibrate import Calibration
    from ray_slo.demo.client import Client
    from ray_slo.demo.machine import Watch
    from ray_slo.demo.progress import Shown
    from ray_slo.demo.report import Found
    from ray_slo.demo.systems import Settings, System
    from ray_slo.load.workload import Payloads, Recorded

# In order of cost. digits-m is left out: digits-l is as accurate, and is trained together with
# digits-xl.
NETWORKS = ("digits-xs", "digits-s", "digits-l", "digits-xl")
NEEDED = {"torch": "torch", "sklearn": "scikit-learn", "PIL": "Pillow"}
"""Packages that the demo needs, by the name of their module."""
QUICK_S = 8.0  # length of the stream with --quick
MAX_BATCH_SIZE = 32


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and the figures.")] = Path(
        "out/demo"
    ),
    variant: Annotated[
        str,
        typer.Option(help="Network to serve. @ray_slo.deployment also gets the smaller networks."),
    ] = NETWORKS[-1],
    system: Annotated[
        list[str] | None,
        typer.Option(help="System to run: tuned, batch or deployment; repeatable. Default: all."),
    ] = None,
    duration_s: Annotated[
        float | None,
        typer.Option(min=2, help="Length of the stream in seconds (default: 46; 8 with --quick)."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Capacity of tuned plain Serve, requests per second, instead of a calibration. "
            "Needs --slo-ms and --wait-ms.",
        ),
    ] = None,
    slo_ms: Annotated[
        float | None, typer.Option(help="Latency SLO in milliseconds, with --rate.")
    ] = None,
    wait_ms: Annotated[
        float | None,
        typer.Option(help="Wait of tuned plain Serve in milliseconds, with --rate."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Number of replicas of each system.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the recorded stream.")] = 0,
    extras: Annotated[
        bool,
        typer.Option(help="Also show two models on one pool, and replicas that follow the load."),
    ] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Take about a minute: short measurements, no extras.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Send the same rising and falling load to plain Ray Serve and to ray-slo, and compare."""
    from rich.console import Console

    if missing := [package for name, package in NEEDED.items() if find_spec(name) is None]:
        names = " and ".join(", ".join(missing).rsplit(", ", 1))
        are = "are" if len(missing) > 1 else "is"
        typer.secho(
            f"Error: {names} {are} not installed. The demo trains and serves small "
            "networks; install what they need with pip install 'ray-slo[digits]'",
            fg="red",
            err=True,
        )
        raise typer.Exit(2)

    console = Console(stderr=as_json)
    try:
        options = Options(
            *(out, variant, system, duration_s, rate, slo_ms, wait_ms),
            *(replicas, seed, extras and not quick, quick),
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
    """The options of the command."""

    out: Path
    variant: str
    systems: list[str] | None
    duration_s: float | None
    rate: float | None
    slo_ms: float | None
    wait_ms: float | None
    replicas: int
    seed: int
    extras: bool
    quick: bool

    @property
    def networks(self) -> tuple[str, ...]:
        """The chosen network, after the smaller networks in `NETWORKS`.

        Raises:
            ValueError: the network is unknown. The message has the valid ones.
        """
        from ray_slo.demo.digits.family import FAMILY, spec

        order = list(FAMILY)
        last = order.index(spec(self.variant).name)
        return (*(name for name in NETWORKS if order.index(name) < last), self.variant)

    @property
    def stream_s(self) -> float:
        """Length of the stream after its warm-up, in seconds."""
        from ray_slo.demo.stream import STORY

        usual = QUICK_S if self.quick else sum(stretch.length_s for stretch in STORY)
        return self.duration_s or usual

    @property
    def warm_up_s(self) -> float:
        from ray_slo.demo.stream import WARM_UP_S

        return WARM_UP_S if self.stream_s > 3 * WARM_UP_S else self.stream_s / 6

    def steps(self, systems: list[System]) -> dict[str, float]:
        """Return every step, and its time on two quiet cores, in seconds."""
        stream_s, start_s = self.stream_s + self.warm_up_s, 4 if self.quick else 8
        return {
            "train": 3.0,
            "start": 12.0,
            "calibrate": 0.0 if self.rate is not None else 20.0 if self.quick else 85.0,
            **{system.key: stream_s + (2 if system.ours else 1) * start_s for system in systems},
            **({"two models": 40.0, "following": 65.0} if self.extras else {}),
            "report": 6.0,
        }


def run(console: Any, options: Options) -> dict[str, Any]:
    """Run all steps. Return the figures that `--json` prints.

    Raises:
        ValueError: options do not fit together.
    """
    if options.rate is not None and (options.slo_ms is None or options.wait_ms is None):
        raise ValueError("--rate needs --slo-ms and --wait-ms, as nothing is calibrated then")
    from ray_slo.demo.systems import choose, enter_fast_mode

    mode = enter_fast_mode()  # before Ray Serve is imported
    from ray_slo.demo import conclusions, machine, progress, report
    from ray_slo.models.profiling import metadata

    systems, networks = choose(options.systems), options.networks
    started = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    with machine.Watch() as watch, progress.shown(console, options.steps(systems)) as shown:
        family = _train(shown, networks)
        about = metadata(quantile=0.95, threads=1)
        about |= {"mode": mode, "load_average": os.getloadavg()[0]}
        found = _serve(shown, watch, systems, family, about, options)
        shown.step("report", "writing the report")
        for system, result in found.results.items():
            result.save(options.out / system.key)
        found.seconds = time.monotonic() - started
        next_steps = _next_steps(found.calibration)
        path = report.write(options.out, found, next_steps)

    settings = found.calibration.settings
    title = f"{settings.variant}, SLO {1e3 * settings.slo_s:.0f} ms, {options.replicas} replicas"
    console.print(report.screen_table(found.sums, title))
    figures = report.figures(found)
    for sentence in figures["conclusions"]:
        console.print(f"* {sentence}", highlight=False)
    disturbed, sentence = conclusions.machine(found.uses)
    console.print(f"[yellow]{sentence}[/]" if disturbed else sentence, highlight=False)
    console.print(f"\nreport: {path}   (done in {found.seconds:.0f} s)\n\nnext:")
    console.print(next_steps, highlight=False, soft_wrap=True)
    return figures


def _train(shown: Shown, networks: tuple[str, ...]) -> dict[str, float]:
    """Train the networks, unless they are cached. Return the accuracy of each."""
    from ray_slo.cli._output import percent
    from ray_slo.demo.digits.train import accuracies

    shown.step("train", "training the networks (once; kept for the next time)")
    family: dict[str, float] = accuracies(networks)
    each = ", ".join(f"{name} {percent(accuracy)}" for name, accuracy in family.items())
    shown.print(f"right on unseen writers: {each}", highlight=False)
    return family


def _serve(
    shown: Shown,
    watch: Watch,
    systems: list[System],
    family: dict[str, float],
    about: dict[str, Any],
    options: Options,
) -> Found:
    """Calibrate, send every system the same requests, and run the extras."""
    from ray_slo.demo import extras, stream
    from ray_slo.demo.client import Client
    from ray_slo.demo.digits.data import test_pngs
    from ray_slo.demo.report import Found
    from ray_slo.demo.systems import Settings, Way, local_serve
    from ray_slo.load.workload import Payloads

    images, labels = test_pngs()
    payloads = Payloads(images, [str(label) for label in labels], "image/png")
    slo_ms, wait_ms = options.slo_ms or 1e3, options.wait_ms or 0.0
    settings = Settings(
        *(options.networks, options.replicas, MAX_BATCH_SIZE, slo_ms / 1e3, Way(wait_ms / 1e3)),
        profile_s=1.0 if options.quick else 3.0,
    )
    for system in systems:
        system.app(settings)  # fail now, not after minutes, if an application cannot be built
    story = stream.shortened(stream.STORY, options.stream_s)
    shown.step("start", "starting Ray on this machine")
    with local_serve() as url, Client() as client:
        bench = _Bench(shown, watch, client, url, payloads)
        began_s = time.monotonic()
        calibration = bench.calibrate(settings, options)
        found = Found(calibration, family, about, story)
        if options.rate is None:
            found.uses["calibration"] = watch.use(began_s, time.monotonic())
        workload = stream.record(
            story,
            calibration.held,
            payloads,
            warm_up_s=options.warm_up_s,
            seed=options.seed,
        )
        workload.save(options.out / "stream.npz")
        shown.print(
            f"every system now gets the same {len(workload)} requests in "
            f"{workload.duration_s:.0f} s; SLO {1e3 * calibration.settings.slo_s:.0f} ms"
        )
        for system in systems:
            bench.stream(system, workload, found)
        if options.extras:
            tuned, seed = calibration.settings, options.seed
            began_s = time.monotonic()
            shown.step("two models", "two models with unlike SLOs on the same replicas")
            found.models = extras.two_models(client, url, payloads, tuned, calibration.held, seed)
            shown.step("following", "replicas that follow the load")
            found.following = extras.following(client, url, payloads, tuned, calibration.held, seed)
            found.uses["extras"] = watch.use(began_s, time.monotonic())
    return found


@dataclass(frozen=True)
class _Bench:
    """The environment of the systems: URL, client, watch of the machine, and console."""

    shown: Shown
    watch: Watch
    client: Client
    url: str
    payloads: Payloads

    def calibrate(self, settings: Settings, options: Options) -> Calibration:
        """Return SLO, rate and wait: measured, or from the options."""
        from ray_slo.demo.calibrate import FULL, QUICK, Calibration, calibrate
        from ray_slo.demo.systems import plain, running

        if options.rate is not None:
            return Calibration(settings, options.rate, options.rate)
        self.shown.step("calibrate", "finding the best wait for plain Serve, and what it holds")
        with running(plain(settings, tunable=True)):
            self.client.wait_until_answered(self.url, self.payloads)
            found = calibrate(
                *(self.client, self.url, self.payloads, settings),
                QUICK if options.quick else FULL,
                say=lambda text: self.shown.print(f"  {text}", highlight=False),
            )
        self.shown.print(
            f"tuned plain Serve holds {found.held:.0f} req/s with {found.settings.way.name}",
            highlight=False,
        )
        return found

    def stream(self, system: System, workload: Recorded, found: Found) -> None:
        """Send the stream to a system, and store the result in `found`."""
        from ray_slo.cli._output import number
        from ray_slo.demo.stream import GIVEN_UP_S
        from ray_slo.demo.systems import running

        settings = found.calibration.settings
        self.shown.step(system.key, f"{system.name}: {len(workload)} requests")
        with running(system.app(settings)):
            self.client.wait_until_answered(self.url, self.payloads)
            result, began_s = self.client.send(
                self.url, workload, self.payloads, settings.slo_s, GIVEN_UP_S
            )
        late_s = 1e-3 * result.summary["generator"]["late_p99_ms"]
        found.results[system] = result
        found.uses[system.name] = self.watch.use(began_s, began_s + workload.duration_s, late_s)
        summary = result.summary
        self.shown.print(
            f"  {system.name}: {number(summary['goodput'])} of "
            f"{number(summary['offered_rate'])} req/s in time",
            highlight=False,
        )
        for text, count in result.sample_errors.items():
            self.shown.print(f"    [red]{count} ×[/] {text}", highlight=False)


def _next_steps(calibration: Calibration) -> str:
    from ray_slo.demo.digits.serve import CONFIG

    slo_ms = 1e3 * calibration.settings.slo_s
    if not CONFIG.is_file():
        return "ray-slo new my-model            # a small application of your own, to start from\n"
    return (
        "make serve                     # leave the application running, with a curl line\n"
        "ray-slo bench http://127.0.0.1:8000/ --payload ray_slo.demo.digits.data:test_pngs "
        f"--rate {calibration.held:.0f} --slo-ms {slo_ms:.0f}\n"
        f"ray-slo profile ray_slo.demo.digits:Digits --variant {calibration.settings.variant}\n"
        "ray-slo simulate               # the same policies in virtual time\n"
    )


if __name__ == "__main__":
    if "" not in sys.path:
        sys.path.insert(0, "")
    typer.run(demo)
