"""An application of any shape in virtual time: `simulate_application(problem, workloads, …)`.

It adds three things to the host of `engine`:

* *Requests make requests.* When a batch ends, each of its requests makes a random number of
  requests for every child task. These arrive `communication_s` later, with the deadline of the
  client's request (here: a *frame*). A frame is answered when all its requests are. If the policy
  drops one of them, the others are cancelled.
* *The planner runs.* Its brain is the live planner's. It gets counts, decides when to plan, and
  gives orders to workers. A plan takes effect `solve_s` after its start.
* *Workers take time* to start (`start_s`), and to load a variant (`load_s`).

The number of workers of a kind follows the brain's target at once. New workers start; workers that
the brain does not need finish their batches and stop. A worker with new orders serves its old
variants until the new ones are loaded (make before break), or the new ones that it has. If the
planner raises, the last plan stays in force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ray_slo.core.cluster import Cluster, Model, Variant
from ray_slo.core.demand import LEAST_RATE
from ray_slo.core.explain import Misplaced
from ray_slo.core.names import listed, nearest
from ray_slo.core.policy import Policy, unwrapped
from ray_slo.planning import auto
from ray_slo.planning.auto.groups import in_groups
from ray_slo.planning.brains.asking import Asking
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.auto_jobs import AutoSetting
from ray_slo.planning.brains.brain import Brain
from ray_slo.planning.result import Infeasible
from ray_slo.policies.registry import (
    DEFAULT,
    follows_assignments,
    make_policy,
    name_of,
    recipe_for,
)
from ray_slo.simulation.application_report import ApplicationReport
from ray_slo.simulation.application_run import ApplicationRun, Shape
from ray_slo.simulation.engine import noise_factors, non_negative
from ray_slo.simulation.fleet import Timing
from ray_slo.simulation.grouped import Grouped
from ray_slo.simulation.learning import Learner
from ray_slo.simulation.run_log import RunLog
from ray_slo.simulation.samplers import Items, samplers
from ray_slo.simulation.workloads import Requests, Workload

Policies = str | Policy | Callable[..., Policy]


def simulate_application(
    problem: auto.Problem,
    workloads: Mapping[str, Workload],
    *,
    policy: Policies = DEFAULT,
    policy_kwargs: Mapping[str, Any] | None = None,
    group_policies: Mapping[str, tuple[str, Mapping[str, Any]]] | None = None,
    planner: Brain | Callable[[auto.Problem], Brain] | str | None = "auto",
    duration_s: float | None = None,
    seed: int = 0,
    interval_s: float = 10.0,
    check_s: float = 1.0,
    solve_s: float = 0.0,
    load_s: float = 0.0,
    start_s: float = 0.0,
    make_before_break: bool = True,
    preempt_delay_s: float = 0.0,
    items: Items = "poisson",
    latency_noise: float = 0.0,
    first_profile: float | None = None,
    truth: Sequence[auto.Model] | None = None,
    tells_sizes: bool = True,
    log: str | Path | None = None,
) -> ApplicationReport:
    """Run an application until every request has been answered.

    Args:
        problem: models, trees, kinds of workers with their bounds, budget and floor. The first plan
            uses its `demand`. A stream without one has the demand of the first interval.
        workloads: when clients' requests arrive, by stream ("root" or "root@class"), and their
            sizes. Each has one process.
        policy: an object (used up by the run), or a name or class with `policy_kwargs`.
        group_policies: name and arguments of the policy of each group that has its own.
        planner: "auto", a brain (used up by the run), or a function from the problem with its first
            demand to a brain. A brain of `auto` begins with its `first_workers`, others with the
            largest number. None: `problem.present` workers of each kind, by default the largest
            number, run all the time with every variant that fits.
        duration_s: requests arrive in [0, duration_s); default: the length of the workloads.
        seed: of arrivals, numbers of items and noise (independent streams).
        interval_s: time between plans.
        check_s: time between looks at the demand for a significant change.
        solve_s: time from the start of planning until the plan takes effect.
        load_s: time in which a worker loads a variant.
        start_s: time in which a worker starts, before it can load.
        make_before_break: whether a worker serves its old variants while it loads new ones.
        preempt_delay_s: time from a `Preempt` until the batch stops.
        items: distribution of the requests made per request around the factor: "fixed" is the
            nearest whole numbers whose running mean is the factor.
        latency_noise, first_profile: as in `simulate`. The planner knows the problem's profiles.
        truth: the real models, if their profiles differ from the problem's.
        tells_sizes: whether the policy and the planner know the requests' sizes. Otherwise they
            count each request as one item, and the problem's profiles should be by requests.
        log: folder for the decision logs of every group and of the planner. `ray-slo report` and
            `ray-slo replay` read them like live ones.

    Raises:
        ValueError: an argument is not valid.
        PolicyError: the policy broke its contract.
    """
    timing = Timing(interval_s, check_s, solve_s, load_s, start_s, make_before_break)
    timing.check()
    non_negative("preempt_delay_s", preempt_delay_s)
    arrivals_rng, noise_rng, items_rng = np.random.default_rng(seed).spawn(3)
    clients, duration_s = _clients(problem, workloads, duration_s, arrivals_rng)
    first_s = min(interval_s, max(duration_s, check_s))
    problem = replace(problem, demand=_first_demand(problem, clients, first_s))
    if planner != "auto":
        problem = in_groups(problem)
    written = None if log is None else RunLog(log, problem.trees[0].name, list(problem.model))
    recipes = {"": (policy, policy_kwargs or {}), **(group_policies or {})}
    chosen = _policy(problem, recipes, first_profile, written)
    if clients.size is not None and tells_sizes:
        _check_sizes(clients, problem, unwrapped(chosen))
    brain = _brain(planner, problem, interval_s, _assigns(chosen, problem), make_before_break)
    kinds = {kind.name: kind.max_workers for kind in problem.kinds}
    if brain is None and problem.present is not None:
        kinds |= problem.present
    real = {model.name: model for model in truth or problem.models}
    if set(real) != set(problem.model):
        raise ValueError(f"truth must have the models {', '.join(problem.model)}")
    shape = Shape(
        problem.trees,
        cluster_of(problem, list(problem.models)),
        cluster_of(problem, [real[model.name] for model in problem.models]),
        kinds,
        problem.communication_s,
        samplers(
            problem.trees,
            {m.name: [v.name for v in m.variants] for m in problem.models},
            items,
            items_rng,
        ),
        noise_factors(latency_noise, noise_rng),
        _fits(problem) if brain is None else {},
        preempt_delay_s,
        brain.first_workers if isinstance(brain, AutoBrain) else None,
    )
    name = "none" if brain is None else type(brain).__name__
    plans = None if written is None or brain is None else written.plans(name)
    asking = None if brain is None else Asking(brain, kinds, interval_s, plans)
    profiles = {(v.name, k): p for v in problem.variant.values() for k, p in v.profiles.items()}
    run = ApplicationRun(
        chosen, shape, clients, timing, asking, duration_s, profiles, tells_sizes=tells_sizes
    )
    run.loop()
    if written is not None:
        written.close()
    prices = {kind.name: kind.price_per_hour for kind in problem.kinds}
    meta = {"duration_s": duration_s, "seed": seed, "planner": name, "prices": prices}
    return ApplicationReport(**run.results(meta))


def cluster_of(problem: auto.Problem, models: Sequence[auto.Model]) -> Cluster:
    """Return the models for a policy. The SLO of each is the shortest of the trees that use it."""
    slos: dict[str, float] = {}
    for tree in problem.trees:
        for name in tree.models:
            slos[name] = min(slos.get(name, math.inf), *tree.slos_s.values())
    made = []
    for model in models:
        variants = (Variant(v.name, v.profiles, v.accuracy) for v in model.variants)
        made.append(Model(model.name, slos.get(model.name, 1.0), tuple(variants)))
    return Cluster.of(made, [])


def check_streams(named: Iterable[str], streams: Sequence[str]) -> None:
    """Check that workloads are for known streams.

    Raises:
        ValueError: a stream is unknown. The message names it.
    """
    for unknown in [name for name in named if name not in streams]:
        raise Misplaced(
            f"workloads.{unknown}",
            f"no such stream; they are {listed(streams)}{nearest(unknown, streams)}",
        )


def _clients(
    problem: auto.Problem,
    workloads: Mapping[str, Workload],
    duration_s: float | None,
    rng: np.random.Generator,
) -> tuple[Requests, float]:
    """Return the requests of clients in all streams, and the time for which they arrive, in
    seconds."""
    streams = list(problem.streams)
    check_streams(workloads, streams)
    if not workloads:
        raise ValueError("workloads must name at least one stream")
    duration_s = max(workload.duration_s(duration_s) for workload in workloads.values())
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"duration_s must be positive, got {duration_s}")
    drawn: list[Requests] = []
    for stream, its_rng in zip(streams, rng.spawn(len(streams)), strict=True):
        if stream in workloads:
            model = Model(stream, problem.slo_s(stream), (Variant("any", {}),))
            drawn.append(workloads[stream].generate(Cluster.of([model], []), duration_s, its_rng))
    arrival = np.concatenate([r.arrival for r in drawn])
    order = np.argsort(arrival, kind="stable")
    codes = [np.full(len(r), streams.index(r.models[0])) for r in drawn]
    size = None
    if any(r.size is not None for r in drawn):
        sizes = [np.ones(len(r), np.int64) if r.size is None else r.size for r in drawn]
        size = np.concatenate(sizes)[order]
    deadline = np.concatenate([r.deadline for r in drawn])[order]
    return Requests(
        streams, np.concatenate(codes)[order], arrival[order], deadline, size
    ), duration_s


def _first_demand(
    problem: auto.Problem, clients: Requests, first_s: float
) -> dict[str, auto.Demand]:
    """Return the demand of the first plan: the problem's, or that of the first interval."""
    early = clients.model[: np.searchsorted(clients.arrival, first_s)]
    counts = np.bincount(early, minlength=len(clients.models)) / first_s
    begins = dict(zip(clients.models, counts.tolist(), strict=True))
    return {
        stream: problem.demand.get(stream) or auto.Demand(max(rate, LEAST_RATE))
        for stream, rate in begins.items()
    }


def _brain(
    planner: Brain | Callable[[auto.Problem], Brain] | str | None,
    problem: auto.Problem,
    interval_s: float,
    assigns: bool,
    make_before_break: bool,
) -> Brain | None:
    if planner is None or isinstance(planner, Brain):
        return planner
    if callable(planner):
        return planner(problem)
    if planner != "auto":
        raise ValueError(f"planner must be 'auto', a brain, or None, got {planner!r}")
    return auto_brain(
        problem,
        interval_s=interval_s,
        choosing=frozenset(() if assigns else problem.kind),
        make_before_break=make_before_break,
    )


def auto_brain(
    problem: auto.Problem, brain: type[AutoBrain] = AutoBrain, **setting: Any
) -> AutoBrain:
    """Return a brain that knows the problem's profiles.

    Args:
        brain: `AutoBrain`, or a class derived from it.
        setting: further fields of `AutoSetting`.
    """
    made = {
        "first_workers": _first_workers(problem),
        "scales": frozenset(k.name for k in problem.kinds if k.min_workers < k.max_workers),
        "profiles": {
            (v.name, k): p for v in problem.variant.values() for k, p in v.profiles.items()
        },
    }
    return brain(AutoSetting(problem, **{**made, **setting}))


def _check_sizes(clients: Requests, problem: auto.Problem, policy: Policy) -> None:
    """Check that the policy takes account of sizes, and that some worker can serve each request."""
    if isinstance(policy, Grouped):
        for one in policy.policies.values():
            _check_sizes(clients, problem, unwrapped(one))
        return
    if getattr(policy, "counts_requests", False):
        raise ValueError(
            f"policy {name_of(policy)!r} counts requests, not the items in them; these have sizes"
        )
    assert clients.size is not None
    for i, stream in enumerate(clients.models):
        tree = problem.tree_of(stream)
        largest = int(clients.size[clients.model == i].max(initial=1))
        variants = problem.variants_of(tree[tree.root])
        most = max(p.max_batch_size for v in variants for p in v.profiles.values())
        if largest > most:
            raise ValueError(
                f"workloads: a request of {stream!r} has {largest} items, and the profiles of "
                f"{tree.root!r} end at {most}"
            )


def _first_workers(problem: auto.Problem) -> Mapping[str, int]:
    """Return the number of workers of the first plan, which is in force at time 0, by kind."""
    made = auto.plan(problem)
    return (made.best_effort if isinstance(made, Infeasible) else made).workers


def _policy(
    problem: auto.Problem,
    recipes: Mapping[str, tuple[Policies, Mapping[str, Any]]],
    first_profile: float | None,
    log: RunLog | None,
) -> Policy:
    """Return the policy of the application. With groups of workers, it has one policy for each. If
    there is a log, the policy writes to it. With a first profile, its profiles are learned.

    Args:
        recipes: policy and its arguments, by group; "" has those of all other groups.
    """
    variants = {model.name: len(model.variants) for model in problem.models}

    def make(group: str = "") -> Policy:
        policy, kwargs = recipes.get(group, recipes[""])
        name, given = recipe_for(
            policy,  # type: ignore[arg-type]
            kwargs,
            problem.trees,
            variants,
            communication_s=problem.communication_s,
        )
        made = make_policy(name, given)
        made = made if log is None else log.recorded(made, name, given, group)
        if first_profile is None:
            return made
        models = cluster_of(problem, list(problem.models))
        return Learner(made, models, first_profile, problem.trees)

    groups = {kind.name: kind.group for kind in problem.kinds if kind.group is not None}
    if not groups:
        return make()
    if not (isinstance(recipes[""][0], str) or callable(recipes[""][0])):
        raise ValueError("policy must be a name or a class, as each group has its own")
    return Grouped(make, groups, in_groups(problem).group_of)


def _assigns(policy: Policy, problem: auto.Problem) -> bool:
    """Return whether the policy follows the plan's assignment of variants to workers."""
    if isinstance(policy, Grouped):
        return any(_assigns(one, problem) for one in policy.policies.values())
    if getattr(policy, "for_pipelines", False):
        return True
    return follows_assignments(policy) and any(len(m.variants) > 1 for m in problem.models)


def _fits(problem: auto.Problem) -> dict[str, list[str]]:
    """Return the variants that every worker of a kind has loaded: all of them.

    Raises:
        ValueError: they do not fit into the memory of a worker.
    """
    fits: dict[str, list[str]] = {}
    for kind in problem.kinds:
        variants = [v for v in problem.variant.values() if kind.name in v.profiles]
        needed = sum(v.memory_mb.get(kind.name, 0.0) for v in variants)
        if needed > kind.memory_mb:
            raise ValueError(
                f"planner: without one, every variant is on every worker, and a worker of kind "
                f"{kind.name!r} has {kind.memory_mb:g} MB for {needed:g} MB"
            )
        fits[kind.name] = [v.name for v in variants]
    return fits
