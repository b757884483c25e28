"""`ray-slo simulate`: run a policy on a workload and a cluster, in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ray_slo.cli._output import (
    in_document,
    key_values,
    mistakes_in,
    number,
    percent,
    positive,
    print_json,
    read_document,
    say_read,
    table,
    will_fill,
)
from ray_slo.core.names import nearest
from ray_slo.core.text import quoted

if TYPE_CHECKING:
    from ray_slo.simulation.application_report import ApplicationReport
    from ray_slo.simulation.report import Report
    from ray_slo.simulation.spec import SimulationSpec

# One model on eight workers: ResNet50 of Symphony's Table 2.
_DEFAULTS: dict[str, Any] = {
    "cluster": {
        "workers": 8,
        "models": {
            "resnet50": {"latency_slo_ms": 25, "profile": {"alpha_ms": 1.053, "beta_ms": 5.072}}
        },
    },
    "workload": {"arrivals": {"kind": "poisson", "rate": 4000}},
    "duration_s": 20,
}
_EXAMPLE = "configs/simulate-resnet50.yaml"
_KINDS = ("simulation", "application")
_SERVED = ("serve", "manifest", "args")


_Spec = Annotated[
    Path | None,
    typer.Argument(
        help="YAML spec, or a config of `serve run`; options override it.", show_default=False
    ),
]
_PolicyArg = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Argument of the policy.")
]
_LatencyNoise = Annotated[
    float | None,
    typer.Option(help="Standard deviation of log(actual / profiled execution time)."),
]
_Goodput = Annotated[
    bool,
    typer.Option("--goodput", help="Search for the largest rate with at most 1 % bad requests."),
]
_Report = Annotated[
    Path | None, typer.Option(help="Write tables, summary and plots into this folder.")
]
_Log = Annotated[
    Path | None,
    typer.Option(help="For an application: write the decision log into this folder."),
]
_Profiles = Annotated[
    Path | None,
    typer.Option(help="For a `serve run` config: a file of `ray-slo profile`."),
]


def simulate(
    spec: _Spec = None,
    policy: Annotated[str | None, typer.Option(help='Name or "module:attr".')] = None,
    policy_arg: _PolicyArg = None,
    workers: Annotated[int | None, typer.Option(help="Number of equal workers.")] = None,
    alpha_ms: Annotated[
        float | None, typer.Option(help="Without a spec: α of the latency α·b + β, milliseconds.")
    ] = None,
    beta_ms: Annotated[
        float | None, typer.Option(help="Without a spec: β of the latency α·b + β, milliseconds.")
    ] = None,
    slo_ms: Annotated[
        float | None, typer.Option(help="Latency SLO of every model, milliseconds.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, all models together.")
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option(help="constant, poisson, gamma, or a file of times or rates.")
    ] = None,
    shape: Annotated[float | None, typer.Option(help="Shape of gamma arrivals.")] = None,
    duration_s: Annotated[
        float | None, typer.Option(help="Time during which requests arrive, seconds.")
    ] = None,
    warmup_s: Annotated[
        float | None, typer.Option(help="Seconds at the start that are not counted.")
    ] = None,
    latency_noise: _LatencyNoise = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the arrivals and of the noise.")] = None,
    goodput: _Goodput = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    report: _Report = None,
    log: _Log = None,
    profiles: _Profiles = None,
) -> None:
    """Simulate a policy on a workload, and print the goodput, latencies and other figures.

    Example: ray-slo simulate configs/digits.yaml --rate 50
    """
    from rich.console import Console

    from ray_slo.core.documents import what_it_is
    from ray_slo.simulation.spec import SimulationSpec

    positive(rate=rate, duration_s=duration_s)
    will_fill("--report", report)
    kinds = (*_KINDS, *_SERVED)
    data = read_document(spec, _EXAMPLE, *kinds) if spec else json.loads(json.dumps(_DEFAULTS))
    run: dict[str, Any] = {"duration_s": duration_s, "latency_noise": latency_noise, "seed": seed}
    cluster: dict[str, Any] = {"workers": workers, "slo_ms": slo_ms, "warmup_s": warmup_s}
    cluster |= {"alpha_ms": alpha_ms, "beta_ms": beta_ms, "report": report}
    cluster |= {"goodput": goodput or None}
    load = {"rate": rate, "arrivals": arrivals, "shape": shape}
    if spec is not None and what_it_is(data)[0] in _SERVED:
        _refuse("a `serve run` config", cluster)
        told = run | {"policy": _named(policy, policy_arg), "profiles": profiles, "log": log}
        _say(_served(spec, load, told), as_json)
        return
    if profiles is not None:
        raise ValueError("--profiles is for a `serve run` config; a spec has its own profiles")
    if "workloads" in data:
        _refuse("an application", cluster | load)
        _override(data, {(name,): value for name, value in run.items()})
        _set_policy(data, policy, policy_arg)
        _application(spec, data, as_json, log)
        return
    if log is not None:
        raise ValueError("--log needs an application (a spec with `workloads`)")
    _override(data, {(name,): value for name, value in {**run, "warmup_s": warmup_s}.items()})
    _override(data, {("cluster", "workers"): workers})
    if spec is None and warmup_s is None:
        data["warmup_s"] = min(2.0, data["duration_s"] / 10)
    _set_policy(data, policy, policy_arg)
    _set_models(data, spec, slo_ms, alpha_ms, beta_ms)
    _set_arrivals(data, spec, arrivals, shape)
    chosen = in_document(spec, SimulationSpec, data)
    if rate is not None:
        chosen = chosen.model_copy(update={"workload": chosen.workload.at_rate(rate)})

    say_read([chosen.workload], chosen.duration_s)
    base, extra = spec.parent if spec else Path(), {}
    with mistakes_in(spec, SimulationSpec):
        if goodput:
            result, largest = _searched(chosen, base)
            extra = {"goodput_search_rate": largest}
        else:
            result = chosen.run(base)
    written = result.write(report) if report else []
    if as_json:
        print_json({**result.summary(), **extra})
        return
    console = Console()
    console.print(result.table())
    if goodput:
        console.print(f"largest rate with at most 1 % bad requests: {largest:.1f}/s")
    if written:
        console.print(f"wrote {len(written)} files into {report}")


def _application(spec: Path | None, data: dict[str, Any], as_json: bool, log: Path | None) -> None:
    """Simulate an application with its planner, and print the results."""
    from ray_slo.simulation.application_spec import ApplicationSpec

    chosen = in_document(spec, ApplicationSpec, data)
    say_read(chosen.workloads.values(), chosen.duration_s)
    will_fill("--log", log)
    with mistakes_in(spec, ApplicationSpec):
        result = chosen.run(spec.parent if spec else Path(), log)
    _say(result, as_json)


def _served(config: Path, load: dict[str, Any], told: dict[str, Any]) -> ApplicationReport:
    """Simulate the application of a `serve run` config."""
    from ray_slo.cli.served import simulate_served

    will_fill("--log", told["log"])
    process = _process(load["arrivals"], load["shape"]) or {"kind": "poisson"}
    given = {name: value for name, value in told.items() if value is not None}
    return simulate_served(config, process, rate=load["rate"], **given)


def _say(result: ApplicationReport, as_json: bool) -> None:
    from rich.console import Console

    streams = result.streams().to_dict("records")
    if as_json:
        print_json({**result.summary(), "streams": streams})
        return
    columns = ("stream", "requests/s", "bad", "accuracy", "value", "p50", "p99")
    rows = [
        (
            r["stream"],
            number(r["rate"]),
            percent(r["bad_rate"]),
            number(r["accuracy"], 4, " %"),
            number(r["value"]),
            number(1e3 * r["p50_s"], 3, " ms"),
            number(1e3 * r["p99_s"], 3, " ms"),
        )
        for r in streams
    ]
    summary = result.summary()
    title = f"{summary['policy']} under {summary['planner']}, {summary['duration_s']:g} s"
    console = Console()
    console.print(table(title, columns, rows))
    console.print(
        f"{number(summary['workers'])} workers on average, "
        f"{number(summary['worker_hours'])} worker-hours, cost {number(summary['cost'])}; "
        f"{summary['plans']} plans"
    )


def _named(policy: str | None, arguments: list[str] | None) -> dict[str, Any] | None:
    """Return the policy that a config has instead of its own, if one is named."""
    kwargs = key_values("--policy-arg", arguments)
    if policy is None and kwargs:
        raise ValueError("--policy-arg needs --policy with a `serve run` config")
    return None if policy is None else {"name": policy, "kwargs": kwargs}


def _set_policy(data: dict[str, Any], policy: str | None, arguments: list[str] | None) -> None:
    _override(data, {("policy", "name"): policy})
    if policy is not None:
        data["policy"].pop("kwargs", None)  # the spec's arguments are for another policy
    for key, value in key_values("--policy-arg", arguments).items():
        _override(data, {("policy", "kwargs", key): value})


def _set_models(
    data: dict[str, Any],
    spec: Path | None,
    slo_ms: float | None,
    alpha_ms: float | None,
    beta_ms: float | None,
) -> None:
    if spec and (alpha_ms is not None or beta_ms is not None):
        raise ValueError("--alpha-ms and --beta-ms go without a spec, which has its own profiles")
    for name in _models(data):
        model = ("cluster", "models", name)
        _override(
            data,
            {
                (*model, "latency_slo_ms"): slo_ms,
                (*model, "profile", "alpha_ms"): alpha_ms,
                (*model, "profile", "beta_ms"): beta_ms,
            },
        )


def _set_arrivals(
    data: dict[str, Any], spec: Path | None, arrivals: str | None, shape: float | None
) -> None:
    from ray_slo.simulation.spec import SimulationSpec

    if (process := _process(arrivals, shape)) is not None:
        if "file" not in process:
            process["rate"] = in_document(spec, SimulationSpec, data).workload.rate
        data.setdefault("workload", {})["arrivals"] = process
    elif shape is not None:
        if spec is None:
            raise ValueError("--shape goes with --arrivals gamma")
        _override(data, {("workload", "arrivals", "shape"): shape})


def _process(arrivals: str | None, shape: float | None) -> dict[str, Any] | None:
    """Return the fields of the process of `--arrivals`, without its rate. None without one."""
    from ray_slo.simulation.arrivals import of_file

    if arrivals is None:
        return None
    given = {} if shape is None else {"shape": shape}
    if (path := Path(arrivals)).is_file():
        return {"kind": of_file(path).kind, "file": path.absolute(), **given}
    if arrivals not in ("constant", "poisson", "gamma"):
        raise ValueError(
            f"--arrivals must be constant, poisson, gamma or a file, got {quoted(arrivals)}"
            f"{nearest(arrivals, ('constant', 'poisson', 'gamma'))}"
        )
    if arrivals == "gamma" and shape is None:
        raise ValueError("--arrivals gamma needs --shape (1 is Poisson, smaller is burstier)")
    return {"kind": arrivals, **given}


def _refuse(what: str, options: dict[str, Any]) -> None:
    """Check that options without a meaning are not given. The argument `rate_x` is --rate-x.

    Raises:
        ValueError: one is given.
    """
    if given := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"--{given[0].replace('_', '-')} cannot be used with {what}")


def _searched(chosen: SimulationSpec, base: Path) -> tuple[Report, float]:
    """Return the run at the largest rate with a bad rate of at most 1 %, and this rate in requests
    per second."""
    from ray_slo.simulation.search import goodput_search

    cluster = chosen.cluster.build(base)
    options = chosen.options(cluster)
    if options["duration_s"] is None:
        raise ValueError("duration_s is needed to search for the goodput")
    shortest_s = min(model.latency_slo_s for model in cluster.models.values())
    if shortest_s >= options["duration_s"]:
        raise ValueError(
            f"duration_s must be longer than the shortest SLO, {shortest_s:g} s, got "
            f"{options['duration_s']:g}: in a shorter run, no queue makes requests late"
        )
    found = goodput_search(chosen.make_policy, cluster, chosen.workload, **options)
    if found.report is None:
        raise ValueError("the bad rate is above 1 % at any rate: the SLO cannot be met")
    return found.report, found.rate


def _models(data: dict[str, Any]) -> list[str]:
    cluster = data.get("cluster")
    models = cluster.get("models") if isinstance(cluster, dict) else None
    return list(models) if isinstance(models, dict) else []


def _override(data: dict[str, Any], values: dict[tuple[str, ...], Any]) -> None:
    """Set the values at these paths in `data`, in place. Values of None are skipped."""
    for path, value in values.items():
        if value is None:
            continue
        *parents, last = path
        at = data
        for parent in parents:
            at = at.setdefault(parent, {})
            if not isinstance(at, dict):
                raise ValueError(f"{'.'.join(path)} cannot be set: {parent} is no mapping")
        at[last] = value


def register(app: typer.Typer) -> None:
    app.command()(simulate)
