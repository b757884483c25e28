"""A plan for the case that Loki's program (`loki.plan`) would serve no request at all.

A plan that refuses every request is useless: workers are running, and some requests could be
answered in time. There are four reasons why the program finds nothing, each with another solution:

* *Fewer workers than tasks.* Every worker serves all tasks, with one variant for each. A local
  search finds the variants and batch sizes. It starts from the fastest ones. It looks for the
  largest share of the demand first, then for the highest accuracy.
* *Too many requests at once.* The requests that one request makes of a task do not fit into the
  task's time (`fits_alone`). The same program is solved without this constraint.
* *No time to wait.* No path is fast enough if requests wait at every task as long as they run
  (`waiting_factor`). The same program is solved without the waiting time; a single request is then
  in time.
* *Too slow.* No path is fast enough even without waiting. The fastest variants run in batches of
  one, for clients that bring a longer SLO. Other requests are refused.

Worked example: one worker for two tasks.

    >>> from ray_slo.core.profiles import LatencyProfile
    >>> fixed = lambda ms: LatencyProfile([ms / 1e3])
    >>> detect = loki.Task("detect", (loki.Variant("d", 90.0, fixed(20)),))
    >>> both = loki.Variant("large", 90.0, fixed(60)), loki.Variant("small", 80.0, fixed(10))
    >>> tasks = detect, loki.Task("name", both, parent="detect")
    >>> made = plan(loki.Problem(tasks, demand=20, workers=1, slo_s=0.2, batch_sizes=(1,)))
    >>> made.reason
    '1 worker for 2 tasks: it serves all of them'
    >>> best = made.best_effort
    >>> best.shared, [a.variant for a in best.assignments], best.shed_share
    (True, ['d', 'small'], 0.0)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ray_slo.planning import loki
from ray_slo.planning.result import Infeasible

_NOTHING = 1 - 1e-9  # from this share of shed demand on, a plan serves nothing


def plan(problem: loki.Problem, last: loki.Plan | None = None) -> loki.Plan | Infeasible[loki.Plan]:
    """Return the plan of `loki.plan`. If its best effort serves nothing, return the best plan that
    serves something.

    Args:
        last: the plan in force, as for `loki.plan`.

    Returns:
        The plan, or `Infeasible` with the reason and a best effort.
    """
    made = loki.plan(problem, last)
    if not isinstance(made, Infeasible) or made.best_effort.shed_share < _NOTHING:
        return made
    if problem.accuracy_floor and not _sheds_all(replace(problem, accuracy_floor=0.0)):
        return made  # the user wants requests shed rather than served below the accuracy floor
    if (workers := problem.workers) < (tasks := len(problem.tasks)):
        they = "it serves" if workers == 1 else "each serves"
        reason = f"{workers} worker{'s' * (workers > 1)} for {tasks} tasks: {they} all of them"
        shared = _time_shared(problem)
        if shared is None:
            hurried = replace(problem, waiting_factor=1.0)
            shared = _time_shared(hurried) or _time_shared(hurried, in_turns=False)
            reason += ", and there is no time to wait"
        if shared is not None:
            if shared.shed_share:
                reason += f"; {100 * (1 - shared.shed_share):.3g} % of the demand can be served"
            return Infeasible(reason, shared, made.proven)
    freed = loki.plan(replace(problem, fits_alone=False), last) if problem.fits_alone else made
    freed_plan = freed.best_effort if isinstance(freed, Infeasible) else freed
    if freed_plan.shed_share < _NOTHING:
        reason = (
            f"what one request makes is more than {problem.workers} workers take in the time that "
            "the SLO leaves its tasks"
        )
        return Infeasible(reason, freed_plan, made.proven)
    alone = replace(problem, waiting_factor=1.0, fits_alone=False)
    without_wait = loki.plan(alone, last)
    hurried_plan = (
        without_wait.best_effort if isinstance(without_wait, Infeasible) else without_wait
    )
    slo_ms, fastest_ms = 1e3 * problem.slo_s, 1e3 * loki.fastest(alone)
    if hurried_plan.shed_share < _NOTHING:
        reason = (
            f"the SLO leaves no time to wait: {slo_ms:.4g} ms, and the fastest path takes "
            f"{fastest_ms:.4g} ms in execution alone"
        )
        return Infeasible(reason, hurried_plan, made.proven)
    reason = (
        f"no variants are fast enough: the fastest path takes {fastest_ms:.4g} ms in execution "
        f"alone, and the SLO leaves {slo_ms:.4g} ms"
    )
    return Infeasible(reason, _fastest(problem), made.proven)


def _sheds_all(problem: loki.Problem) -> bool:
    made = loki.plan(problem)
    return isinstance(made, Infeasible) and made.best_effort.shed_share >= _NOTHING


class _Choice(NamedTuple):
    """A variant with a batch size."""

    variant: loki.Variant
    batch_size: int

    @property
    def latency_s(self) -> float:
        return self.variant.profile.latency(self.batch_size)


_Chosen = Mapping[str, _Choice]  # by task


def _fastest_choices(problem: loki.Problem) -> dict[str, _Choice]:
    return {
        t.name: _Choice(min(t.variants, key=lambda v: v.profile.latency(1)), 1)
        for t in problem.order
    }


def _fastest(problem: loki.Problem) -> loki.Plan:
    """Return a plan with the fastest variants in batches of one, on all workers."""
    chosen = _fastest_choices(problem)
    workers, tasks = problem.workers, problem.order
    if workers < len(tasks):
        return _shared_plan(problem, chosen, served=0.0)
    each, more = divmod(workers, len(tasks))
    counts = [each + (i < more) for i in range(len(tasks))]
    assignments = _assignments(problem, chosen, dict(zip(chosen, counts, strict=True)), 0.0)
    return replace(_shared_plan(problem, chosen, 0.0), assignments=assignments, shared=False)


def _time_shared(problem: loki.Problem, in_turns: bool = True) -> loki.Plan | None:
    """Return a plan in which every worker serves all tasks, with one variant for each. None if no
    path is fast enough.

    Args:
        in_turns: see `_in_time`.
    """
    chosen = _fastest_choices(problem)
    if not _in_time(problem, chosen, in_turns):
        return None
    chosen = _batched(problem, chosen, in_turns)
    best = _worth(problem, chosen)
    improved = True
    while improved:
        improved = False
        for task in problem.order:
            for variant in task.variants:
                other = {name: _Choice(c.variant, 1) for name, c in chosen.items()}
                other[task.name] = _Choice(variant, 1)
                if not _in_time(problem, other, in_turns):
                    continue
                other = _batched(problem, other, in_turns)
                if (worth := _worth(problem, other)) > best:
                    chosen, best, improved = other, worth, True
    return _shared_plan(problem, chosen, min(_capacity(problem, chosen), 1.0))


def _batched(
    problem: loki.Problem, chosen: dict[str, _Choice], in_turns: bool
) -> dict[str, _Choice]:
    """Return the same variants with larger batches, as long as these raise the capacity and all
    paths are in time."""
    while True:
        options = []
        for task, choice in chosen.items():
            most = choice.variant.profile.max_batch_size
            larger = [b for b in problem.batch_sizes if choice.batch_size < b <= most]
            if larger:
                other = {**chosen, task: _Choice(choice.variant, min(larger))}
                if _in_time(problem, other, in_turns):
                    options.append(other)
        best = max(options, key=lambda o: _capacity(problem, o), default=chosen)
        if _capacity(problem, best) <= _capacity(problem, chosen):
            return chosen
        chosen = best


def _rates(problem: loki.Problem, chosen: _Chosen) -> dict[str, float]:
    """Return the number of requests of each task per request at the root."""
    rates: dict[str, float] = {}
    for task in problem.order:
        rates.setdefault(task.name, 1.0)
        for child in problem.children(task):
            factor = chosen[task.name].variant.factors.get(child.name, 1.0)
            rates[child.name] = rates[task.name] * factor
    return rates


def _capacity(problem: loki.Problem, chosen: _Chosen) -> float:
    """Return the demand that all workers together can serve, as a share of the planned demand."""
    rates = _rates(problem, chosen)
    work_s = sum(rates[t] * c.latency_s / c.batch_size for t, c in chosen.items())
    return problem.workers / max(problem.planned_demand * work_s, 1e-12)


def _in_time(problem: loki.Problem, chosen: _Chosen, in_turns: bool) -> bool:
    """Return whether a single request is in time at all tasks.

    Args:
        in_turns: whether siblings may run one after the other, because there are fewer workers than
            tasks.
    """
    own = {
        t: problem.waiting_factor * c.latency_s + problem.communication_s for t, c in chosen.items()
    }

    def path_s(task: loki.Task) -> float:
        return own[task.name] + max(map(path_s, problem.children(task)), default=0.0)

    longest_s = path_s(problem.order[0])
    if in_turns:  # Graham's bound for any order of work on these workers
        share = 1 / problem.workers
        longest_s = share * sum(own.values()) + (1 - share) * longest_s
    return longest_s <= problem.slo_s + 1e-12


def _paths(problem: loki.Problem, chosen: _Chosen) -> list[loki.PathShare]:
    """Return the paths from the root to the last tasks, each with a share of 1."""
    found: list[loki.PathShare] = []

    def walk(task: loki.Task, names: tuple[str, ...], product: float, latency_s: float) -> None:
        choice = chosen[task.name]
        names = (*names, choice.variant.name)
        product *= choice.variant.accuracy / 100
        latency_s += choice.latency_s
        below = problem.children(task)
        if not below:
            accuracy = problem.path_accuracies.get(names, 100 * product)
            found.append(loki.PathShare(names, 1.0, accuracy, latency_s))
        for child in below:
            walk(child, names, product, latency_s)

    walk(problem.order[0], (), 1.0, 0.0)
    return found


def _accuracy(problem: loki.Problem, chosen: _Chosen) -> float:
    accuracies = [path.accuracy for path in _paths(problem, chosen)]
    return sum(accuracies) / len(accuracies)


def _worth(problem: loki.Problem, chosen: _Chosen) -> tuple[float, float]:
    """Return the objective of the search: first the served share, then the accuracy. Both are
    rounded, so that the search ends."""
    share = min(_capacity(problem, chosen), 1.0)
    return round(share, 9), round(_accuracy(problem, chosen), 9)


def _assignments(
    problem: loki.Problem, chosen: _Chosen, workers: Mapping[str, int], served: float
) -> tuple[loki.Assignment, ...]:
    rates = _rates(problem, chosen)
    return tuple(
        loki.Assignment(
            task,
            choice.variant.name,
            choice.batch_size,
            workers[task],
            served * problem.planned_demand * rates[task],
            choice.variant.profile.throughput(choice.batch_size),
            choice.latency_s,
        )
        for task, choice in chosen.items()
    )


def _shared_plan(problem: loki.Problem, chosen: _Chosen, served: float) -> loki.Plan:
    workers, accuracy = problem.workers, _accuracy(problem, chosen)
    return loki.Plan(
        "share",
        _assignments(problem, chosen, dict.fromkeys(chosen, workers), served),
        tuple(replace(path, share=served) for path in _paths(problem, chosen)),
        accuracy if served else 0.0,
        problem.planned_demand,
        0.0 if math.isclose(served, 1.0) else 1.0 - served,
        0,
        0.0,
        f"{problem.planned_demand:.5g} req/s on {workers} "
        f"worker{'s' * (workers > 1)}, accuracy {accuracy:.4g} %.",
        shared=True,
    )
