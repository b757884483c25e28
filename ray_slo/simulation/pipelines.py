"""A pipeline in virtual time, its planner in the loop: `simulate_pipeline(problem, workload, …)`.

The host of `engine` with three things on top. *Requests make requests*: when a batch ends, each of
its requests makes a random number for every child task, which arrive there `communication_s` later
with the deadline of the client's request (here: a *frame*); a frame is answered when nothing of it
is left. When the policy drops one of its requests, the rest is cancelled. *The planner runs*: the
brain of the live planner `loki` hears counts, says when a plan is due and what workers should do
(`planner_host`); its problem is solved by `planner`, and the answer takes effect `solve_s` later.
*Workers take time*: to start (`start_s`) and to load a variant (`load_s`).

The number of workers follows the brain's target at once: workers start, and those that the brain
has no use for end their batches and are off. A worker that gets another variant serves the old one
until the new one is there (make before break), or nothing. A planner that raises changes nothing:
the last plan holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import numpy as np

from ray_slo.core.cluster import Cluster
from ray_slo.core.demand import LEAST_RATE, Rate
from ray_slo.core.policy import Policy
from ray_slo.planning import loki
from ray_slo.planning.brains.loki import Job, LokiBrain, LokiSetting
from ray_slo.planning.meanwhile import Made, Plans, plan_both
from ray_slo.policies.registry import make_policy
from ray_slo.record.encode import Lines
from ray_slo.record.plans import PlanLines
from ray_slo.record.rows import Recording, Start
from ray_slo.simulation.engine import noise_factors, non_negative
from ray_slo.simulation.fleet import KIND, Timing
from ray_slo.simulation.pipeline_report import PipelineReport
from ray_slo.simulation.pipeline_run import PipelineRun, Sampler, Truth, model_of
from ray_slo.simulation.planner_host import PlannerHost
from ray_slo.simulation.workloads import Requests, Workload

Items = Literal["poisson", "geometric", "fixed"]


class Planner(Protocol):
    """What `loki.plan` is. An object that has a method `observe(now, rates)` is told before each
    call how many requests per second arrive at each task."""

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
        problem: tasks as profiled, the largest number of workers, the SLO and what else the planner
            is to respect. `demand` and `current` are filled in for each plan, and the factors.
        workload: when clients' requests arrive.
        planner: see `Planner`. What it raises for its first plan is raised.
        policy: an object (used up by the run), or a name or class that gets the arguments parents,
            factors, communication_s and waiting_factor of the problem, then `policy_kwargs`.
        duration_s: requests arrive in [0, duration_s); by default as long as the workload lasts.
        seed: of arrivals, numbers of items and noise (independent streams).
        interval_s: between plans.
        check_s: time between looks at the demand for a significant change.
        demand: makes what measures demand, at the root and for `observe` at each task.
        initial_demand: of the first plan, which is in place at time 0, requests per second; by
            default what arrives in the first interval.
        learn_factors: plan with the factors observed so far, else with those of `problem`.
        solve_s: from the question for a plan until it takes effect.
        load_s: a worker needs to load a variant.
        start_s: a worker needs to start, before it can load.
        make_before_break: a worker serves its old variant while it loads the new one.
        items: distribution of the requests made per request around the factor: "fixed" is the
            nearest whole numbers whose running mean is the factor.
        latency_noise: as in `simulate`.
        truth: the tasks as they are, where profiles or factors differ from the problem's.
        log: folder for the decision log of the run, planner included, as of a live one: for
            `ray-slo report` and `ray-slo replay`.

    Raises:
        ValueError: bad arguments.
        PolicyError: the policy broke its contract.
    """
    timing = Timing(interval_s, check_s, solve_s, load_s, start_s, make_before_break)
    real = tuple(truth or problem.tasks)
    _check(problem, real, timing, items, latency_noise)
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
    plan_lines: PlanLines | None = None
    if log is not None:
        about = {"application": problem.order[0].name, "models": [t.name for t in problem.order]}
        about["clock"] = clock = f"simulated-{problem.order[0].name}"
        lines = Lines(log, clock, Start.of(policy, policy_kwargs or {}, **about))
        plan_lines = PlanLines(log, clock, Start.of(name, {}, **about))
        chosen = Recording(chosen, lines)
    profiles = {v.name: v.profile for t in problem.tasks for v in t.variants}
    setting = LokiSetting(problem, KIND, make_before_break=make_before_break, profiles=profiles)
    solver = _Solver(planner, problem, demand)
    host = PlannerHost(LokiBrain(setting, demand()), KIND, interval_s, solver, plan_lines)
    real_run = Truth(
        real, _samplers(problem, real, items, items_rng), noise_factors(latency_noise, noise_rng)
    )
    run = PipelineRun(chosen, problem, host, clients, timing, real_run, learn_factors, solver.heard)
    run.loop()
    if plan_lines is not None:
        lines.close()
        plan_lines.close()
    return run.pipeline_report({"duration_s": duration_s, "seed": seed, "planner": name})


def _check(
    problem: loki.Problem,
    real: Sequence[loki.Task],
    timing: Timing,
    items: Items,
    latency_noise: float,
) -> None:
    """Raises ValueError for arguments that have no meaning."""
    for name in ("interval_s", "check_s"):
        if not (math.isfinite(value := getattr(timing, name)) and value > 0):
            raise ValueError(f"{name} must be positive, got {value}")
    for name in ("solve_s", "load_s", "start_s"):
        non_negative(name, getattr(timing, name))
    non_negative("latency_noise", latency_noise)
    if items not in get_args(Items):
        raise ValueError(f"items must be one of {', '.join(get_args(Items))}, got {items!r}")
    names = [{t.name: [v.name for v in t.variants] for t in ts} for ts in (real, problem.tasks)]
    if names[0] != names[1]:
        raise ValueError("truth must have the tasks and variants of the problem")


def _clients(
    problem: loki.Problem, workload: Workload, duration_s: float | None, rng: np.random.Generator
) -> tuple[Requests, float]:
    """What clients send, and for how long."""
    duration_s = workload.duration_s(duration_s)
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise ValueError(f"duration_s must be positive, got {duration_s}")
    cluster = Cluster.of([model_of(problem.order[0], problem.slo_s)], [])
    clients = workload.generate(cluster, duration_s, rng)
    if clients.size is not None:
        raise ValueError("sizes have no meaning in a pipeline; leave them out of the workload")
    return clients, duration_s


def _told(problem: loki.Problem) -> dict[str, Any]:
    """Arguments of a policy for pipelines."""
    return {
        "parents": {t.name: t.parent for t in problem.order},
        "factors": {v.name: dict(v.factors) for t in problem.order for v in t.variants},
        "communication_s": problem.communication_s,
        "waiting_factor": problem.waiting_factor,
    }


class _Solver:
    """Solves the brain's problems, and tells a planner that wants to know what arrives at tasks."""

    def __init__(self, planner: Planner, problem: loki.Problem, demand: Callable[[], Rate]) -> None:
        self._planner = planner
        self._observe = getattr(planner, "observe", None)
        self._rates = {t.name: demand() for t in problem.order}
        self._now = 0.0

    def heard(self, now: float, over_s: float, arrived: Mapping[str, int]) -> None:
        """So many requests arrived at each task in the last `over_s` seconds."""
        self._now = now
        for task, rate in self._rates.items():
            rate.counted(now, over_s, arrived[task])

    def __call__(self, job: Job) -> Plans:
        if self._observe is not None:
            rates = {t: r.value(self._now) for t, r in self._rates.items()}
            self._observe(self._now, rates if self._now else _expected(job.problem))
        return plan_both(job.problem, job.present, job.last, self._planner)


def _expected(problem: loki.Problem) -> dict[str, float]:
    """Requests per second by task, if all run the most accurate variants."""
    rates = {problem.order[0].name: problem.demand}
    for task in problem.order:
        best = max(task.variants, key=lambda v: v.accuracy)
        for child in problem.children(task):
            rates[child.name] = rates[task.name] * best.factors.get(child.name, 1.0)
    return rates


def _with_all_factors(problem: loki.Problem, demand: float) -> loki.Problem:
    """With the factors of all child tasks, where 1 is left unsaid, and an expected demand."""
    tasks = []
    for task in problem.tasks:
        factors = _factors(problem, task)
        variants = (replace(v, factors=factors[v.name]) for v in task.variants)
        tasks.append(replace(task, variants=tuple(variants)))
    return replace(problem, tasks=tuple(tasks), demand=demand)


def _factors(problem: loki.Problem, task: loki.Task) -> dict[str, dict[str, float]]:
    """By variant, for all child tasks."""
    children = [c.name for c in problem.children(task)]
    return {v.name: {c: v.factors.get(c, 1.0) for c in children} for v in task.variants}


def _samplers(
    problem: loki.Problem, tasks: Sequence[loki.Task], items: Items, rng: np.random.Generator
) -> dict[str, list[tuple[str, Sampler]]]:
    """By variant: child tasks, and what draws for them."""
    return {
        variant: [(child, _sampler(items, mean, rng)) for child, mean in factors.items()]
        for task in tasks
        for variant, factors in _factors(problem, task).items()
    }


def _sampler(items: Items, mean: float, rng: np.random.Generator) -> Sampler:
    if items == "poisson":
        return lambda n: rng.poisson(mean, n).tolist()
    if items == "geometric":
        return lambda n: (rng.geometric(1 / (1 + mean), n) - 1).tolist()

    def fixed() -> Iterator[int]:
        for i in count():
            yield math.floor((i + 1) * mean + 1e-9) - math.floor(i * mean + 1e-9)

    numbers = fixed()
    return lambda n: [next(numbers) for _ in range(n)]
