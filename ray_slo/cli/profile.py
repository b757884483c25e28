"""`ray-slo profile`: measure the latency profiles of a deployment's variants on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_slo.cli._output import (
    PICTURES,
    key_values,
    mistakes_in,
    number,
    positive,
    print_json,
    table,
    will_write,
)
from ray_slo.cli.check import applications
from ray_slo.core.files import whole
from ray_slo.core.names import listed
from ray_slo.core.text import quoted

if TYPE_CHECKING:
    from ray_slo.core.profiles import LatencyProfile
    from ray_slo.models.preemption_profile import PreemptionProfile
    from ray_slo.models.profiling import Target


_Target = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:CLASS|CONFIG.YAML",
        help="A deployment class, a deployment with variants, or a `serve run` config.",
    ),
]
_Variant = Annotated[
    list[str] | None,
    typer.Option(
        help="Measure only this variant; repeatable. For a class without variants, the value of "
        "its argument `variant`."
    ),
]
_Arg = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="Argument of the class's constructor; repeatable."),
]
_Input = Annotated[
    Path | None,
    typer.Option(help="File with one item to measure with, instead of example_input()."),
]
_Quantile = Annotated[
    float, typer.Option(help="Quantile of the measured durations that plans use.")
]
_BoundMs = Annotated[
    float | None,
    typer.Option(help="Measure no larger batches after one took this time, in milliseconds."),
]
_Preemption = Annotated[
    bool,
    typer.Option(
        "--preemption",
        help="Also measure preemption at exit points, and choose their number (torch only).",
    ),
]
_ExitPoints = Annotated[
    list[int] | None,
    typer.Option(help="Number of exit points to try; repeatable. Default: 0, 1, 2, 4, … 64."),
]
_Plot = Annotated[Path | None, typer.Option(help="Draw the profiles (.svg, .png or .pdf).")]


def profile(
    target: _Target,
    variant: _Variant = None,
    arg: _Arg = None,
    input: _Input = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Largest batch size to measure.")] = 32,
    quantile: _Quantile = 0.95,
    seconds: Annotated[float, typer.Option(help="Seconds to spend on each variant.")] = 10.0,
    bound_ms: _BoundMs = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Number of CPU threads, as for the worker.")
    ] = 1,
    preemption: _Preemption = False,
    exit_points: _ExitPoints = None,
    out: Annotated[Path | None, typer.Option(help="Path of the profile file to write.")] = None,
    plot: _Plot = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Measure the time of batches by their size, in a new process. Print and save the profile.

    Example: ray-slo profile configs/digits-variants.yaml --out digits.json
    """
    if exit_points and not preemption:
        raise ValueError("--exit-points is for --preemption only")
    if not 0 < quantile < 1:
        raise ValueError(f"--quantile must lie between 0 and 1, got {quantile:g}")
    if any(points < 0 for points in exit_points or ()):
        raise ValueError(f"--exit-points must be at least 0, got {min(exit_points or ())}")
    positive(seconds=seconds, bound_ms=bound_ms)
    will_write("--out", out)
    will_write("--plot", plot, PICTURES)
    from ray_slo.core.profiles import save_profiles
    from ray_slo.models.profiling import metadata, profile_class, profile_class_preemption

    measuring: dict[str, Any] = {
        "budget_s": seconds,
        "threads": threads,
        "example": None if input is None else _read(input),
    }
    bound_s = None if bound_ms is None else bound_ms / 1e3
    sweep = partial(profile_class, max_batch_size=max_batch, bound_s=bound_s, **measuring)
    stop = partial(profile_class_preemption, candidates=exit_points or None, **measuring)
    targets = _targets(target, key_values("--arg", arg), variant)
    found = measure(targets, quantile, sweep, stop if preemption else None)
    about = metadata(quantile=quantile, threads=threads) | {"target": target}
    about["variants"] = found.about
    if found.stops:
        about["preemption"] = {name: stop.to_json() for name, stop in found.stops.items()}
    written = [out] if out else []
    if out:
        save_profiles(out, found.profiles, **about)
    if plot:
        written += _plot(found, plot)
    if as_json:
        shown = {n: _figures(p, found.samples[n]) for n, p in found.profiles.items()}
        print_json({**about, "profiles": shown})
        return
    _print(found, quantile, written)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"--input: cannot read {str(path)!r}: {error.strerror}") from None


@dataclass
class _Measured:
    """The measurements, by variant."""

    profiles: dict[str, LatencyProfile] = field(default_factory=dict)
    samples: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    stops: dict[str, PreemptionProfile] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)


def measure(
    targets: Mapping[str, Target],
    quantile: float,
    sweep: Callable[..., Any],
    stop: Callable[..., Any] | None,
) -> _Measured:
    """Measure the targets with `sweep`, and with `stop`, if any, their preemption."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ray_slo.models.profiling import to_profile

    found = _Measured()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for name, chosen in targets.items():
            task = progress.add_task(f"measuring {name}", total=1.0)
            samples = found.samples[name] = sweep(
                chosen,
                progress=lambda share, of=task: progress.update(of, completed=share),
                about=partial(found.about.__setitem__, name),
            )
            # The profile ends at the largest measured size: beyond it, a time would be a guess.
            profile = found.profiles[name] = to_profile(samples, quantile=quantile)
            if stop is not None:
                task = progress.add_task(f"stopping {name}", total=1.0)
                found.stops[name] = stop(
                    chosen,
                    batch_sizes={1, min(8, profile.max_batch_size)},
                    progress=lambda share, of=task: progress.update(of, completed=share),
                )
    return found


def _plot(found: _Measured, path: Path) -> list[Path]:
    """Draw the profiles to `path`, and the preemption measurements to a file beside it. Return the
    files."""
    with whole(path) as half:
        plot_profiles(found.profiles, found.samples).savefig(half, format=path.suffix[1:])
    if not found.stops:
        return [path]
    from ray_slo.models.preemption_profile import plot_preemption

    beside = path.with_stem(f"{path.stem}-preemption")
    with whole(beside) as half:
        plot_preemption(found.stops).savefig(half, format=path.suffix[1:])
    return [path, beside]


def _print(found: _Measured, quantile: float, written: Sequence[Path]) -> None:
    from rich.console import Console

    console = Console()
    for name, measured in found.profiles.items():
        console.print(_table(name, measured, found.samples[name], quantile))
        alpha, beta = measured.fit_linear()
        console.print(
            f"  ℓ(b) ≈ {number(1e3 * alpha)}·b + {number(1e3 * beta)} ms: a batch of "
            f"{measured.max_batch_size} does {number(measured.throughput(measured.max_batch_size))}"
            f" items/s, one by one {number(measured.throughput(1))}"
        )
        about = found.about.get(name, {})
        if "memory_mb" in about:
            console.print(f"  loaded: {number(about['memory_mb'])} MB of the {about['memory_of']}")
        if "runs" in about:
            console.print(f"  runs in {about['runs']}")
        console.print()
        if (stop := found.stops.get(name)) is not None:
            console.print(_preemption_table(name, stop))
            console.print(f"  {stop.chosen} exit points: {stop.reason}\n")
    for path in written:
        console.print(f"wrote {path}")


def _targets(name: str, kwargs: dict[str, Any], chosen: list[str] | None) -> dict[str, Target]:
    """Return the targets to measure, by the name of the variant."""
    import sys

    from ray_slo.core.names import import_attr
    from ray_slo.models.profiling import Target

    if "" not in sys.path:
        sys.path.insert(0, "")  # as in the measuring process
    if name.endswith((".yaml", ".yml")) or Path(name).is_file():
        found = config_targets(Path(name), kwargs)
    else:
        # A `Deployment` has `model.variants`. A plain class may have another attribute `model`.
        variants = getattr(getattr(import_attr(name), "model", None), "variants", None)
        named = variants if isinstance(variants, dict) else {}
        found = {v: Target(name, kwargs, variant=spec) for v, spec in named.items()}
        if not found:
            chosen = chosen or [str(kwargs.get("variant", ""))]
            return {v or name.rpartition(":")[2]: Target(name, kwargs | _named(v)) for v in chosen}
    if unknown := sorted(set(chosen or ()) - set(found)):
        raise ValueError(
            f"--variant: {name} has no {', '.join(unknown)}; it has {', '.join(sorted(found))}"
        )
    return {v: target for v, target in found.items() if not chosen or v in chosen}


def _named(variant: str) -> dict[str, Any]:
    return {"variant": variant} if variant else {}


def config_targets(
    path: Path, kwargs: dict[str, Any], *, args_too: bool = False
) -> dict[str, Target]:
    """Return the variants to measure of the applications in a config. `kwargs` override arguments
    of their constructors."""
    from ray_slo.core.documents import what_it_is
    from ray_slo.models.profiling import Target
    from ray_slo.serve.config.app import AppConfig
    from ray_slo.serve.config.resolve import parse_spec

    found: dict[str, Target] = {}
    others: list[str] = []
    for application in applications(path, args_too=args_too):
        given = application.get("args")
        if not isinstance(given, dict) or what_it_is(given)[0] != "args":
            what = quoted(application.get("import_path")).strip("'")
            others.append(f"application {quoted(application.get('name', 'default'))} ({what})")
            continue
        with mistakes_in(path, AppConfig):
            spec = parse_spec(given)
        environment = _environment(path, application.get("runtime_env"))
        for key, ref in spec.variants().items():
            model = spec.models[ref.model]
            found[key] = Target(
                str(model.callable),
                {**model.kwargs, **kwargs},
                model.args,
                ref.spec,
                environment,
            )
    said = (
        f"{path}: {listed(others)}: not of import_path ray_slo.serve:build_app with `models` or a "
        "`pipeline` in its args; to measure its class, give MODULE:CLASS"
    )
    if not found:
        raise ValueError(said)
    if others:
        typer.echo(f"left out: {said}", err=True)
    return found


def _environment(path: Path, runtime_env: Any) -> dict[str, str]:
    """Return the environment variables that Ray would set for the application's workers."""
    given = runtime_env.get("env_vars") if isinstance(runtime_env, dict) else runtime_env
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(
        isinstance(x, str) for kv in given.items() for x in kv
    ):
        raise ValueError(
            f"{path}: runtime_env: got {quoted(given)}, wanted env_vars: {{NAME: text, …}}"
        )
    return given


def _table(
    name: str, measured: LatencyProfile, samples: dict[int, list[float]], quantile: float
) -> Any:
    import numpy as np

    rows = [
        (
            str(size),
            number(1e3 * float(np.median(values))),
            number(1e3 * measured.latency(size)),
            number(measured.throughput(size)),
            str(len(values)),
        )
        for size, values in samples.items()
    ]
    columns = ("batch", "median ms", f"p{100 * quantile:g} ms", "items/s", "samples")
    return table(name, columns, rows)


def _preemption_table(name: str, stop: PreemptionProfile) -> Any:
    rows = [
        (
            str(p.exit_points),
            str(p.batch_size),
            number(1e3 * p.batch_s),
            f"{p.delay_p50_s / p.batch_s:.1%}",
            f"{p.delay:.1%}",
            f"{p.slowdown:.1%}",
            str(p.preemptions),
        )
        for p in stop.points
    ]
    columns = ("exit points", "batch", "ms", "delay p50", "delay p95", "slowdown", "preemptions")
    return table(f"{name}, preempted", columns, rows)


def _figures(measured: LatencyProfile, samples: dict[int, list[float]]) -> dict[str, Any]:
    alpha, beta = measured.fit_linear()
    return {
        "alpha_ms": 1e3 * alpha,
        "beta_ms": 1e3 * beta,
        **measured.to_json(),
        "samples_ms": {size: [1e3 * t for t in values] for size, values in samples.items()},
    }


def plot_profiles(
    profiles: dict[str, LatencyProfile], samples: dict[str, dict[int, list[float]]]
) -> Any:
    """Plot latency (with a dot for every sample) and throughput over the batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, measured in profiles.items():
        sizes = range(1, measured.max_batch_size + 1)
        (line,) = left.plot(sizes, [1e3 * t for t in measured.table], label=name, linewidth=1.4)
        for size, values in samples[name].items():
            ms = [1e3 * t for t in values]
            left.plot([size] * len(ms), ms, ".", color=line.get_color(), markersize=2, alpha=0.4)
        right.plot(sizes, [measured.throughput(b) for b in sizes], linewidth=1.4)
    left.set(xlabel="batch size", ylabel="latency (ms)", ylim=(0, None))
    right.set(xlabel="batch size", ylabel="items/s, one worker", ylim=(0, None))
    left.legend(fontsize=7, frameon=False)
    return figure


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(profile)
