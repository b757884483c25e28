"""`ray-slo simulate`: policy × workload × cluster in virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ray_slo.cli._output import in_document, key_values, positive, read_document, will_fill

# One model on eight workers: ResNet50 of Symphony's Table 2.
_DEFAULTS: dict[str, Any] = {
    "policy": {"name": "deferred"},
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


def simulate(
    spec: Annotated[
        Path | None, typer.Argument(help="YAML spec; flags override it.", show_default=False)
    ] = None,
    policy: Annotated[str | None, typer.Option(help='Name or "module:attr".')] = None,
    policy_arg: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Argument of the policy.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Number of equal workers.")] = None,
    alpha_ms: Annotated[float | None, typer.Option(help="ℓ(b) = α·b + β (without spec).")] = None,
    beta_ms: Annotated[float | None, typer.Option(help="ℓ(b) = α·b + β (without spec).")] = None,
    slo_ms: Annotated[float | None, typer.Option(help="Latency SLO of every model.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second, all models.")] = None,
    arrivals: Annotated[str | None, typer.Option(help="constant, poisson or gamma.")] = None,
    shape: Annotated[float | None, typer.Option(help="Shape of gamma arrivals.")] = None,
    duration_s: Annotated[float | None, typer.Option(help="Requests arrive this long.")] = None,
    warmup_s: Annotated[float | None, typer.Option(help="Start that is not counted.")] = None,
    latency_noise: Annotated[
        float | None, typer.Option(help="σ of log(actual / profiled execution time).")
    ] = None,
    seed: Annotated[int | None, typer.Option()] = None,
    goodput: Annotated[
        bool, typer.Option("--goodput", help="Search the largest rate with ≤ 1 % bad requests.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write frames, summary and plots into this directory.")
    ] = None,
) -> None:
    """Simulate a policy on a workload; print what it would achieve."""
    from rich.console import Console

    from ray_slo.simulation.search import goodput_search
    from ray_slo.simulation.spec import SimulationSpec

    positive(rate=rate)
    will_fill(report)
    data = read_document(spec, _EXAMPLE) if spec else json.loads(json.dumps(_DEFAULTS))
    _override(
        data,
        {
            ("policy", "name"): policy,
            ("cluster", "workers"): workers,
            ("duration_s",): duration_s,
            ("warmup_s",): warmup_s,
            ("latency_noise",): latency_noise,
            ("seed",): seed,
        },
    )
    if spec is None and warmup_s is None:
        data["warmup_s"] = min(2.0, data["duration_s"] / 10)
    if policy is not None:
        data["policy"].pop("kwargs", None)  # they are another policy's
    for key, value in key_values("--policy-arg", policy_arg).items():
        _override(data, {("policy", "kwargs", key): value})
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
    if arrivals is not None:
        if arrivals not in ("constant", "poisson", "gamma"):
            raise ValueError(
                f"--arrivals must be constant, poisson or gamma, got {arrivals!r}; "
                "traces and explicit times go into a spec"
            )
        if arrivals == "gamma" and shape is None:
            raise ValueError("--arrivals gamma needs --shape (1 is Poisson, smaller is burstier)")
        known = in_document(spec, SimulationSpec, data).workload.rate
        data["workload"]["arrivals"] = {"kind": arrivals, "rate": known}
    if shape is not None:
        if arrivals is None and spec is None:
            raise ValueError("--shape goes with --arrivals gamma")
        _override(data, {("workload", "arrivals", "shape"): shape})
    chosen = in_document(spec, SimulationSpec, data)
    if rate is not None:
        chosen = chosen.model_copy(update={"workload": chosen.workload.at_rate(rate)})

    base = spec.parent if spec else Path()
    console = Console()
    extra: dict[str, Any] = {}
    if goodput:
        cluster = chosen.cluster.build(base)
        options = chosen.options(cluster)
        if options["duration_s"] is None:
            raise ValueError("duration_s is needed to search for the goodput")
        found = goodput_search(chosen.make_policy, cluster, chosen.workload, **options)
        if found.report is None:
            raise ValueError("no rate keeps the bad rate at 1 %: the SLO cannot be met")
        result, extra = found.report, {"goodput_search_rate": found.rate}
    else:
        result = chosen.run(base)
    written = result.write(report) if report else []
    if as_json:
        typer.echo(json.dumps({**result.summary(), **extra}, indent=1))
        return
    console.print(result.table())
    if goodput:
        console.print(f"largest rate with at most 1 % bad requests: {found.rate:.1f}/s")
    if written:
        console.print(f"wrote {len(written)} files into {report}")


def _models(data: dict[str, Any]) -> list[str]:
    cluster = data.get("cluster")
    models = cluster.get("models") if isinstance(cluster, dict) else None
    return list(models) if isinstance(models, dict) else []


def _override(data: dict[str, Any], values: dict[tuple[str, ...], Any]) -> None:
    """Set paths in place, where a value was given."""
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
