"""Simulation of an application as its `serve run` config has it (`ray-slo simulate CONFIG`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ray_slo.cli._output import mistakes_in, say_read
from ray_slo.cli.check import BUILDER, applications
from ray_slo.cli.profile import config_targets, measure
from ray_slo.core.text import quoted

if TYPE_CHECKING:
    from ray_slo.core.profiles import LatencyProfile
    from ray_slo.planning.auto import Problem
    from ray_slo.planning.brains.brain import Key
    from ray_slo.serve.config.spec import AppSpec
    from ray_slo.simulation.application_report import ApplicationReport
    from ray_slo.simulation.workloads import Workload

_DURATION_S = 60.0


def _args(path: Path) -> dict[str, Any]:
    """Return the args of the application in a config."""
    found = [a for a in applications(path, args_too=True) if a["import_path"] == BUILDER]
    if len(found) != 1:
        names = ", ".join(quoted(str(a.get("name", "default"))) for a in found) or "none"
        raise ValueError(
            f"{path}: one application with import_path {BUILDER} can be simulated, got {names}"
        )
    if found[0].get("deployments"):
        raise ValueError(
            f"{path}: deployments: what they change is not simulated; write it into args"
        )
    return dict(found[0].get("args") or {})


def simulate_served(
    path: Path,
    arrivals: dict[str, Any],
    *,
    rate: float | None = None,
    policy: dict[str, Any] | None = None,
    profiles: Path | None = None,
    duration_s: float | None = None,
    log: Path | None = None,
    **options: Any,
) -> ApplicationReport:
    """Simulate the application of a config.

    Args:
        path: a config of `serve run`, a RayService of KubeRay, or the args of an application.
        arrivals: fields of the process by which requests arrive. All streams share it, in the
            proportion that a planner begins with: `planner.rates`, and 1 for other models and
            pipelines.
        rate: requests per second, all together. None: those of a file of arrivals.
        policy: name and arguments of a policy that the application has instead of its own.
        profiles: file of `ray-slo profile`. Variants without a profile are measured on this
            machine.
        duration_s: requests arrive for this time, seconds. Default: as long as a file of arrivals,
            otherwise a minute.
        log: folder for the decision log.
        options: further arguments of `simulate_application`.

    Raises:
        ValueError: the file has not one application of ray-slo, it cannot be simulated, or the load
            is not known.
    """
    from ray_slo.serve.config.app import AppConfig
    from ray_slo.serve.config.resolve import parse_spec
    from ray_slo.serve.planner.auto import problem_of
    from ray_slo.serve.planner.plugin import make_brain
    from ray_slo.simulation.application import simulate_application

    args = _args(path) | ({} if policy is None else {"policy": policy})
    if rate is None and "file" not in arrivals:
        raise ValueError("--rate is required: a `serve run` config does not say the load")
    with mistakes_in(path, AppConfig):
        spec = parse_spec(args)
        if spec.planner is not None and spec.planner.makes_groups:
            raise ValueError(
                f"planner.name: {spec.planner.name!r} makes groups, and is not simulated; give the "
                "groups, or choose 'auto'"
            )
        largest = {v: spec.models[ref.model].max_batch_size for v, ref in spec.variants().items()}
        measured = {
            (variant, kind): profile.truncated(largest[variant])
            for (variant, kind), profile in _profiles(path, spec, profiles).items()
        }
        problem = problem_of(spec)
        workloads = _workloads(problem, arrivals, rate)
        problem = _with(problem, measured)
        length_s = max(workload.length_s or 0.0 for workload in workloads.values())
        duration_s = duration_s or length_s or _DURATION_S
        say_read(list(workloads.values())[:1], duration_s)
        if (planner := spec.planner) is not None:
            options |= {
                "planner": make_brain(spec),
                "interval_s": planner.interval_s,
                "make_before_break": planner.make_before_break,
            }
        return simulate_application(
            problem,
            workloads,
            policy=str(spec.policy.name),
            policy_kwargs=spec.policy.kwargs,
            group_policies={g: (str(p.name), p.kwargs) for g, p in spec.group_policies.items()},
            duration_s=duration_s,
            log=log,
            **{"planner": None, **options},
        )


def _profiles(path: Path, spec: AppSpec, file: Path | None) -> dict[Key, LatencyProfile]:
    """Return the profiles by variant and kind: those of files, or measured now."""
    from ray_slo.core.profiles import load_profiles
    from ray_slo.models.profiling import profile_class
    from ray_slo.serve.config.files import profiles_of_files

    known = dict(profiles_of_files(spec))
    if file is not None:
        try:
            known |= load_profiles(file)
        except OSError as error:
            raise ValueError(f"--profiles: cannot read {file}: {error.strerror}") from None
    found = {(v, kind): known[v] for v in spec.variants() if v in known for kind in spec.workers}
    missing = sorted(spec.variants().keys() - known.keys())
    if not missing:
        return found
    targets = {
        v: target for v, target in config_targets(path, {}, args_too=True).items() if v in missing
    }
    threads = {kind: _threads(worker.ray_actor_options) for kind, worker in spec.workers.items()}
    numbers = sorted(set(threads.values()))
    for number in numbers:
        sweep = partial(
            profile_class,
            max_batch_size=max(model.max_batch_size for model in spec.models.values()),
            budget_s=spec.profile_seconds or 2.0,
            threads=number,
        )
        for variant, profile in measure(targets, 0.95, sweep, None).profiles.items():
            found |= {(variant, kind): profile for kind, n in threads.items() if n == number}
    plural = "s" * (numbers != [1])
    typer.echo(
        f"measured here, with {' and '.join(map(str, numbers))} thread{plural}: "
        f"{', '.join(missing)} (--profiles takes a file of `ray-slo profile`)",
        err=True,
    )
    return found


def _threads(options: Mapping[str, Any]) -> int:
    return max(1, math.ceil(options.get("num_cpus") or 1))


def _with(problem: Problem, profiles: Mapping[Key, LatencyProfile]) -> Problem:
    """Return the problem with the profiles of its variants."""
    of_variant: dict[str, dict[str, LatencyProfile]] = {}
    for (variant, kind), profile in profiles.items():
        of_variant.setdefault(variant, {})[kind] = profile
    models = tuple(
        replace(m, variants=tuple(replace(v, profiles=of_variant[v.name]) for v in m.variants))
        for m in problem.models
    )
    return replace(problem, models=models, demand={})


def _workloads(
    problem: Problem, arrivals: dict[str, Any], rate: float | None
) -> dict[str, Workload]:
    """Return the arrivals of each stream."""
    from ray_slo.core.explain import validated
    from ray_slo.simulation.workloads import Workload

    given = {} if "file" in arrivals else {"rate": rate}
    whole = validated(Workload, {"arrivals": arrivals | given})
    rates = {stream: demand.rate for stream, demand in problem.demand.items() if demand.rate}
    each = (rate or whole.rate) / sum(rates.values())
    return {stream: whole.at_rate(each * r) for stream, r in rates.items()}
