"""Choice of the group of workers for each model that no group lists.

The models of one tree are a *unit*, together with those of trees that share a model with it. A unit
goes to one group, because a group's scheduler knows only the latencies of its own workers. For a
unit u and a group j,

    full(u, j) = Σ rate / Σ_k n(k)·q(k)    over the unit's tasks; k: the group's kinds

is the share of the group's time that u takes with the most accurate variant that is in time. The
group has at most n(k) workers of kind k. q(k) is the throughput of such a worker with its largest
batch in time. For a group of a given size, 1/full is the burst tolerance of HERD (SHEPHERD §4).
Σ_u full is the load that `partition` balances (Symphony Appendix A), here for groups that differ. A
small mixed-integer program chooses the groups:

    minimise   Σ_j [10·(full(j) − 0.7)⁺ + 20·(full(j) − 1)⁺] + 0.2·max_j full(j), over the average
               + accuracy that is lost + 10·cost, as a share of the highest
               + move_cost per model that moves + 100 per unit that is not in time
               + 100·(memory beyond the group's)⁺, as a share of it
               + 20·(cost beyond the budget)⁺, as a share of it

in points of accuracy. So loads are balanced if a group would be full. Otherwise a model goes to the
cheapest group that loses no accuracy. A model moves only if the gain is larger than the cost of the
move.

Worked example: three models that need half a worker each, on a group of two workers and a group of
one worker.

    >>> from ray_slo.core.profiles import LatencyProfile
    >>> from ray_slo.core.trees import Tree
    >>> from ray_slo.planning.auto.problem import Demand, Kind, Model, Problem, Variant
    >>> profiles = dict.fromkeys(("a", "b"), LatencyProfile([0.01]))
    >>> problem = Problem(
    ...     tuple(Model(m, (Variant(m, 90.0, profiles),)) for m in "lmn"),
    ...     tuple(Tree.of_model(m, {"": 0.1}) for m in "lmn"),
    ...     dict.fromkeys("lmn", Demand(50.0)),
    ...     (Kind("a", 1, 2, group="large"), Kind("b", 1, 1, group="small")),
    ... )
    >>> sorted(choose(problem).values())
    ['large', 'large', 'small']
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning.auto.problem import Kind, Problem, Variant
from ray_slo.planning.milp import Floats, Milp

COMFORTABLE = 0.7
"""Share of a group's time from which its load counts in the objective. The rest is for bursts."""

OVER, FULL, EVEN, COST, LOST = 10.0, 20.0, 0.2, 10.0, 100.0
"""Weights of the objective (see the module), in points of accuracy."""

_TIME_LIMIT_S = 5.0
_GAP = 1e-6  # small, because the costs of an overload are much larger than those of a move

Unit = tuple[str, ...]


def in_groups(problem: Problem) -> Problem:
    """Return the problem with a group for every model, if workers are in groups.

    Raises:
        ValueError: no group may have all models of a unit.
    """
    if not problem.groups or problem.group_of.keys() == problem.model.keys():
        return problem
    return replace(problem, group_of=choose(problem))


def units(problem: Problem) -> tuple[Unit, ...]:
    """Return the units: the sets of models that must be in one group. They are in the order of the
    problem's models."""
    unit_of = {model: {model} for model in problem.model}
    for tree in problem.trees:
        together = set[str]().union(*(unit_of[model] for model in tree.models))
        unit_of |= dict.fromkeys(together, together)
    found = dict.fromkeys(tuple(m for m in problem.model if m in unit_of[n]) for n in problem.model)
    return tuple(found)


def choose(problem: Problem) -> dict[str, str]:
    """Return the group of every model.

    Raises:
        ValueError: as in `in_groups`.
    """
    free: list[Unit] = []
    fixed: list[Unit] = []
    chosen = dict(problem.group_of)
    for unit in units(problem):
        named = {problem.group_of[m] for m in unit if m in problem.group_of}
        if missing := [m for m in unit if m not in problem.group_of]:
            if len(named) > 1:
                raise ValueError(
                    f"group_of: {missing[0]!r} is used together with models of the groups "
                    f"{', '.join(sorted(named))}; name its group, too"
                )
            if not named:
                free.append(unit)
                continue
            chosen |= dict.fromkeys(unit, named.pop())
        fixed.append(unit)
    allowed = {unit: _allowed(problem, unit) for unit in free}
    if free:
        found = _solved(problem, free, fixed, chosen, allowed)
        for unit, group in found.items():
            chosen |= dict.fromkeys(unit, group)
    return {model: chosen[model] for model in problem.model}


def _allowed(problem: Problem, unit: Unit) -> list[str]:
    may = [problem.allowed_groups.get(model, problem.groups) for model in unit]
    both = [group for group in problem.groups if all(group in groups for groups in may)]
    if not both:
        raise ValueError(f"allowed_groups: no group may have all of {', '.join(unit)}")
    return both


def _solved(
    problem: Problem,
    free: list[Unit],
    fixed: list[Unit],
    chosen: Mapping[str, str],
    allowed: Mapping[Unit, list[str]],
) -> dict[Unit, str]:
    groups = problem.groups
    demands = [Takes(problem, group) for group in groups]
    told = np.zeros((3, len(groups)))  # time, memory and cost of listed models in each group
    for unit in fixed:
        for model in unit:
            j = groups.index(chosen[model])
            time, memory, _, cost = demands[j].of_unit((model,))
            told[:, j] += time if math.isfinite(time) else 0.0, memory, cost
    made = np.array([[takes.of_unit(unit) for takes in demands] for unit in free])
    full, needs, lost, costs = np.moveaxis(made, 2, 0)
    late = ~np.isfinite(full)
    full, lost, costs = (np.where(late, 0.0, part) for part in (full, lost, costs))
    dearest = costs.max(axis=1).sum()
    penalty = LOST * late + lost - lost.min(axis=1, keepdims=True, initial=math.inf)
    penalty = penalty + COST * costs / dearest if dearest else penalty
    for u, unit in enumerate(free):
        now = [problem.group_now.get(model) for model in unit]
        moved = [sum(n is not None and n != group for n in now) for group in groups]
        penalty[u] += problem.move_cost * np.array(moved)
    may = np.array([[group in allowed[unit] for group in groups] for unit in free], float)
    values = _program(problem, full, needs, costs, penalty, may, told)
    if values is None:  # the time limit ended the search before any plan
        worth = np.where(may > 0, penalty + OVER * full, math.inf)
        return {unit: groups[j] for unit, j in zip(free, worth.argmin(axis=1), strict=True)}
    return {unit: groups[j] for unit, j in zip(free, values.argmax(axis=1), strict=True)}


def _program(
    problem: Problem,
    full: Floats,
    memory: Floats,
    costs: Floats,
    penalty: Floats,
    may: Floats,
    told: Floats,
) -> Floats | None:
    """Return whether each unit is in each group, 0 or 1, shape (units, groups)."""
    m = Milp("min")
    count = full.shape[1]
    y = m.variables("y: unit in group", full.shape, upper=may, integer=True)
    over = m.variables("beyond what is comfortable", count)
    beyond = m.variables("beyond all of its time", count)
    short = m.variables("memory that is missing", count)
    top = m.variables("the fullest, over the average", 1)
    m.block("one group", (1, y), lower=1, upper=1)
    unpaid = m.variables("cost beyond the budget, as a share of it", 1)
    time, space, paid = told
    m.block("comfortable", (full.T, y.T), (-1, over[:, None]), upper=COMFORTABLE - time)
    m.block("all of its time", (full.T, y.T), (-1, beyond[:, None]), upper=1 - time)
    m.block("memory", (memory.T, y.T), (-1, short[:, None]), upper=1 - space)
    budget = None if problem.present is not None else problem.budget_per_hour
    if budget:
        share = costs.ravel() / budget
        m.block("budget", (share, y.ravel()), (-1, unpaid), upper=1 - paid.sum() / budget)
    average = (float(time.sum()) + float(full.mean(axis=1).sum())) / count
    if average > 0:
        each = np.broadcast_to(top, (count, 1))
        m.block("the fullest", (full.T / average, y.T), (-1, each), upper=-time / average)
    m.objective(
        (OVER, over), (FULL, beyond), (LOST, short), (EVEN, top), (FULL, unpaid), (penalty, y)
    )
    limit_s = min(problem.time_limit_s, _TIME_LIMIT_S)
    solution = m.solve(problem.backend, limit_s, _GAP, problem.seed)
    return solution[y] if solution.found else None


class Takes:
    """Computes the resources of a group that serving a unit takes."""

    def __init__(self, problem: Problem, group: str) -> None:
        self._problem = problem
        self._kinds = [kind for kind in problem.kinds if kind.group == group]
        room = [problem.most(kind) * kind.memory_mb for kind in self._kinds]
        self._room_mb = sum(room) if room and all(room) else 0.0

    def of_unit(self, unit: Unit) -> tuple[float, float, float, float]:
        """Return four figures for a unit in this group: the share of the group's time, the share of
        its memory, the lost points of accuracy, and the cost per hour.

        The lost points are weighted by the demand. They are relative to perfect answers, or to the
        accuracy floor if cost comes first. The time is `inf` if the unit cannot be in time, or fits
        on no worker.
        """
        time = lost = cost = 0.0
        memory_mb: dict[str, float] = {}
        problem = self._problem
        total = sum(problem.rate(s) for s in problem.streams) or 1.0
        for stream in problem.streams:
            tree, rate = problem.tree_of(stream), problem.rate(stream)
            if not any(model in unit for model in tree.models):
                continue
            budgets = self._budgets_s(tree, problem.slo_s(stream))
            if budgets is None:
                return math.inf, 0.0, 0.0, 0.0
            arriving: dict[str, float] = {}
            accuracy = 1.0
            for task in tree.order:
                found = self._served(task, budgets[task.name])
                if found is None:
                    return math.inf, 0.0, 0.0, 0.0
                variant, capacity, price = found
                arriving.setdefault(task.name, rate)
                for child in tree.children(task.name):
                    made = tree[task.name].factor(variant.name, child)
                    arriving[child] = arriving[task.name] * made
                accuracy *= variant.accuracy / 100
                if task.model in unit:
                    time += arriving[task.name] / capacity
                    cost += arriving[task.name] * price
                    need = max(memory_mb.get(task.model, 0.0), self._needs_mb(variant))
                    memory_mb[task.model] = need
            enough = problem.accuracy_floor / 100 if problem.objective == "cost" else 1.0
            lost += 100 * max(enough - accuracy, 0.0) * rate / total
        room_mb, needed_mb = self._room_mb, sum(memory_mb.values())
        share = needed_mb / room_mb if room_mb else float(needed_mb > 0)
        return time, share, lost, cost

    def _needs_mb(self, variant: Variant) -> float:
        return min(
            variant.memory_mb.get(k.name, 0.0) for k in self._kinds if self._runs(variant, k)
        )

    def _runs(self, variant: Variant, kind: Kind) -> bool:
        fits = variant.memory_mb.get(kind.name, 0.0) <= kind.memory_mb
        return kind.name in variant.profiles and fits and self._problem.most(kind) > 0

    def _time_s(self, latency_s: float) -> float:
        problem = self._problem
        return problem.waiting_factor * latency_s + problem.communication_s

    def _budgets_s(self, tree: Tree, slo_s: float) -> dict[str, float] | None:
        """Return the part of the SLO for each task, in seconds. It is proportional to the time of
        the fastest variants on its path. None if the SLO is too short for these."""
        least: dict[str, float] = {}
        for task in tree.order:
            one = math.ceil(self._problem.model[task.model].items - 1e-9)
            profiles = [
                variant.profiles[kind.name]
                for variant in self._problem.variants_of(task)
                for kind in self._kinds
                if self._runs(variant, kind)
            ]
            times = [self._time_s(p.latency(min(one, p.max_batch_size))) for p in profiles]
            if not times:
                return None
            least[task.name] = min(times)
        longest: dict[str, float] = dict.fromkeys(least, 0.0)
        for task in tree.order:
            if not tree.children(task.name):
                path = tree.path(task.name)
                takes = sum(least[name] for name in path)
                longest |= {name: max(longest[name], takes) for name in path}
        if max(longest.values()) > slo_s * (1 + 1e-9):
            return None
        return {name: slo_s * least_s / longest[name] for name, least_s in least.items()}

    def _served(self, task: TreeTask, budget_s: float) -> tuple[Variant, float, float] | None:
        """Return the variant of a task, the requests per second that the group can serve with it,
        and the price per hour for each request per second."""
        problem = self._problem
        found = []
        for variant in problem.variants_of(task):
            speeds = {
                kind: self._throughput(variant, kind, task.model, budget_s)
                for kind in self._kinds
                if self._runs(variant, kind)
            }
            capacity = sum(problem.most(k) * speed for k, speed in speeds.items())
            if capacity > 0:
                prices = [k.price_per_hour / speed for k, speed in speeds.items() if speed]
                found.append((variant, capacity, min(prices)))
        enough = [one for one in found if one[0].accuracy >= problem.accuracy_floor] or found
        if problem.objective == "cost":
            return min(enough, key=lambda one: (one[2], -one[1]), default=None)
        return max(enough, key=lambda one: (one[0].accuracy, one[1]), default=None)

    def _throughput(self, variant: Variant, kind: Kind, model: str, budget_s: float) -> float:
        """Return the requests per second of one worker. It is 0 if no batch is in time."""
        profile, items = variant.profiles[kind.name], self._problem.model[model].items
        most = max(int(profile.max_batch_size / items + 1e-12), 1)
        best = 0.0
        for b in sorted({min(b, most) for b in self._problem.batch_sizes}):
            latency_s = profile.latency(min(math.ceil(b * items - 1e-9), profile.max_batch_size))
            if self._time_s(latency_s) <= budget_s * (1 + 1e-9):
                best = max(best, b / latency_s)
        return best
