"""A pipeline under Loki's planner in virtual time: `simulate_pipeline(problem, workload, …)`.

It is a run of `application` with one tree and one kind of workers. The brain of the live planner
`loki` gets counts, decides when to plan, and gives orders to workers. `planner` solves its problem,
so that other planners of pipelines can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ray_slo.core.cluster import Cluster, Model, Variant
from ray_slo.core.demand import LEAST_RATE, Rate
from ray_slo.core.policy import Policy
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import loki
from ray_slo.planning.brains.loki import Job, LokiBrain, LokiSetting
from ray_slo.planning.meanwhile import Made, Plans, best, plan_both
from ray_slo.policies.registry import make_policy
from ray_slo.simulation.application_run import ApplicationRun, Shape
from ray_slo.simulation.engine import noise_factors
from ray_slo.simulation.fleet import KIND, Timing
from ray_slo.simulation.pipeline_report import PipelineReport
from ray_slo.simulation.planner_host import PlannerHost
from ray_slo.simulation.run_log import RunLog
from ray_slo.simulation.samplers import Items, check_items, samplers
from ray_slo.simulation.workloads import Requests, Workload


class Planner(Protocol):
    """A function like `loki.plan`. If it has a method `observe(now, rates)`, it gets the requests
    per second at each task before each call."""

    def __call__(self, problem: loki.Problem, last: loki.Plan | None) -> Made: ...


def simulate_pipeline(
    problem: loki.Problem,
    workload: Workload,
    *,
    planner: Planner = loki.plan,
    policy: str | Policy | Callable[..., Policy] = "pipeline",
    policy_kwargs: Mapping[str, Any] | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    interval_s: float = 10.0,
    check_s: float = 1.0,
    demand: Callable[[], Rate] = Rate,
    initial_demand: float | None = None,
    learn_factors: bool = True,
    solve_s: float = 0.0,
    load_s: float = 0.0,
    start_s: float = 0.0,
    make_before_break: bool = True,
    items: Items = "poisson",
    latency_noise: float = 0.0,
    truth: Sequence[loki.Task] | None = None,
    log: str | Path | None = None,
) -> PipelineReport:
    """Run a pipeline until every request has been answered.

    Args:
        problem: profiled tasks, the largest number of workers, the SLO and the planner's other
            limits. `demand`, `current` and the factors are filled in for each plan.
        workload: when clients' requests arrive.
        planner: see `Planner`. What it raises for its first plan is raised.
        policy: an object (used up by the run), or a name or class that gets the arguments parents,
            factors and communication_s of the problem, then `policy_kwargs`.
        duration_s: requests arrive in [0, duration_s); default: the workload's length.
        seed: of arrivals, numbers of items and noise (independent streams).
        interval_s: time between plans.
        check_s: time between looks at the demand for a significant change.
        demand: makes the objects that measure demand, at the root and for `observe` at each task.
        initial_demand: demand of the first plan, which is in force at time 0, requests per second;
            default: that of the first interval.
        learn_factors: whether to plan with the observed factors, instead of those of `problem`.
        solve_s: time from the start of planning until the plan takes effect.
        load_s: time in which a worker loads a variant.
        start_s: time in which a worker starts, before it can load.
        make_before_break: whether a worker serves its old variant while it loads the new one.
        items: distribution of the requests made per request around the factor: "fixed" is the
            nearest whole numbers whose running mean is the factor.
        latency_noise: as in `simulate`.
        truth: the real tasks, if their profiles or factors differ from the problem's.
        log: folder for the decision log of the run with its planner. `ray-slo report` and `ray-slo
            replay` read it like a live one.

    Raises:
        ValueError: an argument is not valid.
        PolicyError: the policy broke its contract.
    """
    timing = Timing(interval_s, check_s, solve_s, load_s, start_s, make_before_break)
    real = tuple(truth or problem.tasks)
    _check(problem, real, timing, items)
    arrivals_rng, noise_rng, items_rng = np.random.default_rng(seed).spawn(3)
    clients, duration_s = _clients(problem, workload, duration_s, arrivals_rng)
    if initial_demand is None:
        first_s = min(interval_s, max(duration_s, check_s))
        initial_demand = float(np.searchsorted(clients.arrival, first_s)) / first_s
    problem = _with_all_factors(problem, max(float(initial_demand), LEAST_RATE))
    target: Any = policy
    if isinstance(policy, str) or callable(policy):
        policy_kwargs = {**_told(problem), **(policy_kwargs or {})}
    chosen = make_policy(target, policy_kwargs)
    name = getattr(planner, "__name__", type(planner).__name__)
    written = plans = None
    if log is not None:
        written = RunLog(log, problem.order[0].name, [t.name for t in problem.order])
        chosen = written.recorded(chosen, policy, policy_kwargs or {})
        plans = written.plans(name)
    profiles = {v.name: v.profile for t in problem.tasks for v in t.variants}
    setting = LokiSetting(problem, KIND, make_before_break=make_before_break, profiles=profiles)
    solver = _Solver(planner, problem, demand)
    host = PlannerHost(LokiBrain(setting, demand()), [KIND], interval_s, solver, plans)
    tree = _tree_of(problem, real)
    shape = Shape(
        (tree,),
        Cluster.of([_model_of(t, problem.slo_s) for t in problem.order], []),
        Cluster.of([_model_of(t, problem.slo_s) for t in _like(problem, real)], []),
        {KIND: problem.workers},
        problem.communication_s,
        samplers([tree], {t.name: [v.name for v in t.variants] for t in real}, items, items_rng),
        noise_factors(latency_noise, noise_rng),
    )
    run = ApplicationRun(
        chosen, shape, clients, timing, host, duration_s, learn_factors, solver.heard, _row_of
    )
    run.loop()
    if written is not None:
        written.close()
    meta = {"duration_s": duration_s, "seed": seed, "planner": name, "slo_s": problem.slo_s}
    return PipelineReport(**run.results(meta))


def _check(
    problem: loki.Problem,
    real: Sequence[loki.Task],
    timing: Timing,
    items: Items,
) -> None:
    """Check the arguments.

    Raises:
        ValueError: one is not valid.
    """
    timing.check()
    check_items(items)
    names = [{t.name: [v.name for v in t.variants] for t in ts} for ts in (real, problem.tasks)]
    if names[0] != names[1]:
        raise ValueError("truth must have the tasks and variants of the problem")


def _clients(
    problem: loki.Problem, workload: Workload, duration_s: float | None, rng: np.random.Generator
) -> tuple[Requests, float]:
    """Return the requests of clients, and the time for which they arrive, in seconds."""
    duration_s = workload.duration_s(duration_s)
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"duration_s must be positive, got {duration_s}")
    cluster = Cluster.of([_model_of(problem.order[0], problem.slo_s)], [])
    clients = workload.generate(cluster, duration_s, rng)
    if clients.size is not None:
        raise ValueError("sizes have no meaning in a pipeline; leave them out of the workload")
    return clients, duration_s


def _told(problem: loki.Problem) -> dict[str, Any]:
    """Return the arguments of a policy for pipelines."""
    return {
        "parents": {t.name: t.parent for t in problem.order},
        "factors": {v.name: dict(v.factors) for t in problem.order for v in t.variants},
        "communication_s": problem.communication_s,
    }


class _Solver:
    """Solves the brain's problems, and gives a planner the arrivals at tasks if it wants them."""

    def __init__(self, planner: Planner, problem: loki.Problem, demand: Callable[[], Rate]) -> None:
        self._planner = planner
        self._observe = getattr(planner, "observe", None)
        self._rates = {t.name: demand() for t in problem.order}
        self._now = 0.0

    def heard(self, now: float, over_s: float, arrived: Mapping[str, int]) -> None:
        """Count the requests that arrived at each task in the last `over_s` seconds."""
        self._now = now
        for task, rate in self._rates.items():
            rate.counted(now, over_s, arrived[task])

    def __call__(self, job: Job) -> Plans:
        if self._observe is not None:
            rates = {t: r.value(self._now) for t, r in self._rates.items()}
            self._observe(self._now, rates if self._now else _expected(job.problem))
        return plan_both(job.problem, job.present, job.last, self._planner)


def _expected(problem: loki.Problem) -> dict[str, float]:
    """Return the requests per second by task, if all tasks run their most accurate variants."""
    rates = {problem.order[0].name: problem.demand}
    for task in problem.order:
        best = max(task.variants, key=lambda v: v.accuracy)
        for child in problem.children(task):
            rates[child.name] = rates[task.name] * best.factors.get(child.name, 1.0)
    return rates


def _with_all_factors(problem: loki.Problem, demand: float) -> loki.Problem:
    """Return the problem with an expected demand, and with the factors of all child tasks. In the
    problem, a missing factor means 1."""
    tasks = []
    for task in problem.tasks:
        factors = _factors(problem, task)
        variants = (replace(v, factors=factors[v.name]) for v in task.variants)
        tasks.append(replace(task, variants=tuple(variants)))
    return replace(problem, tasks=tuple(tasks), demand=demand)


def _factors(problem: loki.Problem, task: loki.Task) -> dict[str, dict[str, float]]:
    """Return the factors of a task's variants for all child tasks."""
    children = [c.name for c in problem.children(task)]
    return {v.name: {c: v.factors.get(c, 1.0) for c in children} for v in task.variants}


def _tree_of(problem: loki.Problem, real: Sequence[loki.Task]) -> Tree:
    """Return the tree with the real factors."""
    by_name = {task.name: task for task in real}
    tasks = tuple(
        TreeTask(t.name, t.name, t.parent, _factors(problem, by_name[t.name]))
        for t in problem.order
    )
    accuracies = problem.path_accuracies
    return Tree(problem.order[0].name, tasks, {"": problem.slo_s}, accuracies)


def _like(problem: loki.Problem, real: Sequence[loki.Task]) -> list[loki.Task]:
    """Return the real tasks, in the problem's order."""
    by_name = {task.name: task for task in real}
    return [by_name[task.name] for task in problem.order]


def _model_of(task: loki.Task, slo_s: float) -> Model:
    """Return a task as a model for policies."""
    variants = (Variant(v.name, {KIND: v.profile}, v.accuracy) for v in task.variants)
    return Model(task.name, slo_s, tuple(variants))


def _row_of(plans: Plans) -> dict[str, Any]:
    """Return the row of the report about two plans."""
    plan = best(plans.now)
    variants: dict[str, int] = {}
    for (_, variant), n in plan.loaded.items():
        variants[variant] = variants.get(variant, 0) + n
    return {
        "planned_demand": plan.planned_demand,
        "step": plan.step,
        "feasible": plans.shortfall is None,
        "accuracy": plan.accuracy,
        "shed_share": plan.shed_share,
        "swaps": plan.swaps,
        "variants": variants,
        "explanation": plans.shortfall or plans.why,
    }
