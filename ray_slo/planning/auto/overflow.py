"""Share of the requests that a plan leaves late or refused, when workers do what they can.

A plan is made for batches that leave requests time to wait, and for accurate variants. While more
comes than that serves, batches grow, and workers turn to the quickest variants that they have
loaded: to those of the plan, or to their reserve where there is memory for one and no accuracy
floor. So the capacity of a burst is larger, and what does not fit into that is lost.

Take a model whose requests have T for it, its part of the SLO by the latencies of the planned
batches. Batches that take the part u of T leave W = T − ℓ(b) to wait; n workers serve n·b/ℓ(b), and
K = n·W is the work that may wait. The loss is that of a reflected Brownian motion with these
(`headroom.bad_rate`), at the u that loses least, as a policy takes larger batches when more waits.
It goes to 1 − capacity/demand in overload.

Workers may serve several models. So there are two bounds: a model can have all workers that host
it; and models that share workers, directly or by way of others, have together all of theirs. Of a
request that makes m at a task, one that is lost is enough; as bursts hit all of them together, √m
count. A request is lost where one of its tasks is, by the first bound, or with the share of work
that is lost by the second one, whichever is more.

Batches that grow with the backlog take it off faster than at the constant speed of the formula.
That is as if the work varied less. `_VARIANCE`, like the root of m, was chosen on simulated random
problems; `python -m benchmarks expected-bad` compares with others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ray_slo.core.profiles import LatencyProfile
from ray_slo.core.trees import Tree
from ray_slo.planning.auto.headroom import bad_rate
from ray_slo.planning.auto.plan import Plan, Slot
from ray_slo.planning.auto.problem import Demand, Model, Problem
from ray_slo.planning.milp import Floats

_PARTS = np.linspace(0.1, 1.0, 19)
_VARIANCE = 0.5


@dataclass
class _Work:
    """What is asked of a model, and who does it.

    Attributes:
        rate: requests per second; the other means are over these.
        dispersion: of their counts.
        time_s: that they have.
        parts: of workers' time that are the model's as planned; hosts: workers that serve it.
        speed: requests per second of these parts together, by u.
        latency_s, half_s: of a batch, and of half of its other requests, by u.
    """

    rate: float = 0.0
    dispersion: float = 0.0
    time_s: float = 0.0
    parts: float = 0.0
    hosts: int = 0
    speed: Floats = field(default_factory=lambda: np.zeros(len(_PARTS)))
    latency_s: Floats = field(default_factory=lambda: np.zeros(len(_PARTS)))
    half_s: Floats = field(default_factory=lambda: np.zeros(len(_PARTS)))

    def asked(self, rate: float, dispersion: float, time_s: float) -> None:
        total = self.rate + rate
        self.dispersion += (dispersion - self.dispersion) * rate / total
        self.time_s += (time_s - self.time_s) * rate / total
        self.rate = total

    def has(self, part: float, latencies_s: Floats) -> None:
        """A part of a worker that runs batches of b requests in `latencies_s[b - 1]`."""
        fits = np.searchsorted(latencies_s, _PARTS * self.time_s * (1 + 1e-9), side="right")
        batch = np.maximum(fits, 1)
        latency_s = latencies_s[batch - 1]
        total = self.parts + part
        self.latency_s += (latency_s - self.latency_s) * part / total
        self.half_s += ((latency_s - latency_s / batch) / 2 - self.half_s) * part / total
        self.speed += part * batch / latency_s
        self.parts = total


def late_by_stream(problem: Problem, plan: Plan, demand: Mapping[str, Demand]) -> dict[str, float]:
    """By stream with a demand.

    Args:
        demand: as it is; the plan may have been made for more.
    """
    planned_s = _planned_s(problem, plan)
    work = {model.name: _Work() for model in problem.models}
    asked = [stream for stream, of in demand.items() if of.rate > 0]
    arrivals = {tree.name: _arrivals(problem, plan, tree) for tree in problem.trees}
    for stream in asked:
        tree, of = problem.tree_of(stream), demand[stream]
        for task, made in arrivals[tree.name].items():
            time_s = problem.slo_s(stream) * _share(tree, task, planned_s)
            work[tree[task].model].asked(of.rate * made, of.dispersion * max(made, 1.0), time_s)
    for slot in plan.slots:
        _hosts(problem, slot, work)
    alone = {model: _lost([one], one.hosts) for model, one in work.items()}
    together = _together(problem, plan, work)
    late = {}
    for stream in asked:
        tree = problem.tree_of(stream)
        counted = {t: math.sqrt(max(m, 1.0)) for t, m in arrivals[tree.name].items()}
        in_time = math.prod((1 - alone[tree[t].model]) ** m for t, m in counted.items())
        rest = 1 - max(together[task.model] for task in tree.tasks)
        late[stream] = 1 - min(in_time, rest ** max(counted.values()))
    return late


def _planned_s(problem: Problem, plan: Plan) -> dict[str, float]:
    """Mean latency of the planned batches, over their time, by model."""
    sums: dict[str, tuple[float, float]] = {}
    for slot in plan.slots:
        for model, time, latency_s in _busy(problem, slot):
            busy, product = sums.get(model.name, (0.0, 0.0))
            sums[model.name] = busy + time, product + time * latency_s
    return {model: product / busy for model, (busy, product) in sums.items() if busy > 0}


def _busy(problem: Problem, slot: Slot) -> list[tuple[Model, float, float]]:
    """Of each part: its model, the share of the worker's time that it takes, a batch's latency."""
    found = []
    for part in slot.parts:
        model = next(m for m in problem.models if problem.variant[part.variant] in m.variants)
        latencies_s = _latencies_s(model, problem.variant[part.variant].profiles[slot.kind])
        size = min(part.batch_size, len(latencies_s))
        latency_s = float(latencies_s[size - 1])
        found.append((model, (part.load or 0.0) * latency_s / size, latency_s))
    return found


def _latencies_s(model: Model, profile: LatencyProfile) -> Floats:
    """Of batches of 1, 2, … requests."""
    table = np.asarray(profile.table)
    if model.items == 1:
        return table
    most = max(int(len(table) / model.items + 1e-9), 1)
    items = np.ceil(np.arange(1, most + 1) * model.items - 1e-9).astype(int)
    return np.asarray(table[np.minimum(items, len(table)) - 1])


def _share(tree: Tree, task: str, planned_s: Mapping[str, float]) -> float:
    """Of the SLO, by the latencies on the longest path through a task."""
    mine = planned_s.get(tree[task].model, 0.0)
    ends = [t.name for t in tree.order if task in tree.path(t.name)]
    longest = max(sum(planned_s.get(tree[t].model, 0.0) for t in tree.path(e)) for e in ends)
    return mine / longest if longest else 1.0


def _arrivals(problem: Problem, plan: Plan, tree: Tree) -> dict[str, float]:
    """Requests at each task per request at the root, by the variants that the plan uses."""
    loads: dict[str, float] = {}
    for slot in plan.slots:
        for part in slot.parts:
            loads[part.variant] = loads.get(part.variant, 0.0) + (part.load or 0.0)
    found = {tree.root: 1.0}
    for task in tree.order:
        names = [v.name for v in problem.variants_of(task)]
        weights = [loads.get(name, 0.0) for name in names]
        weights = weights if sum(weights) else [1.0] * len(names)
        for child in tree.children(task.name):
            made = sum(w * task.factor(v, child) for w, v in zip(weights, names, strict=True))
            found[child] = found[task.name] * made / sum(weights)
    return found


def _hosts(problem: Problem, slot: Slot, work: Mapping[str, _Work]) -> None:
    """Add a worker to what its models have: as planned, its time being filled up."""
    busy = _busy(problem, slot)
    total = sum(time for _, time, _ in busy)
    of_model: dict[str, float] = {}
    for (model, time, _), part in zip(busy, slot.parts, strict=True):
        share = time / total if total else 1 / len(busy)
        variant = _in_bursts(problem, slot, model, part.variant)
        profile = problem.variant[variant].profiles[slot.kind]
        if share > 0:
            work[model.name].has(share, _latencies_s(model, profile))
        of_model[model.name] = of_model.get(model.name, 0.0) + share
    for name, share in of_model.items():
        work[name].hosts += share > 0


def _in_bursts(problem: Problem, slot: Slot, model: Model, variant: str) -> str:
    """What a worker turns to: the quickest variant that it has, or has memory for."""
    if problem.accuracy_floor:
        return variant

    def fits(name: str) -> bool:
        loaded = {*slot.variants, name}
        needs_mb = sum(problem.variant[v].memory_mb.get(slot.kind, 0.0) for v in loaded)
        return name in slot.variants or needs_mb <= problem.kind[slot.kind].memory_mb

    able = [v for v in model.variants if slot.kind in v.profiles and fits(v.name)]
    return min(able, key=lambda v: v.profiles[slot.kind].latency(1)).name


def _together(problem: Problem, plan: Plan, work: Mapping[str, _Work]) -> dict[str, float]:
    """Share of the work that is lost where models share workers, by model."""
    model_of = {v.name: model.name for model in problem.models for v in model.variants}
    groups = {name: frozenset([name]) for name in work}
    for slot in plan.slots:
        merged = frozenset().union(*(groups[model_of[part.variant]] for part in slot.parts))
        groups |= dict.fromkeys(merged, merged)
    lost: dict[str, float] = {}
    for group in set(groups.values()):
        members = [work[name] for name in group if work[name].rate and work[name].parts]
        workers = sum(one.parts for one in members)
        lost |= dict.fromkeys(group, _lost(members, workers) if len(members) > 1 else 0.0)
    return lost


def _lost(members: Sequence[_Work], workers: float) -> float:
    """Share of some models' work that this number of workers loses, with the best batches."""
    if not any(one.rate for one in members):
        return 0.0
    if not workers:
        return 1.0
    lost = 1.0
    for i in range(len(_PARTS)):
        busy = waits = variance = half = 0.0
        for one in members:
            request_s = one.parts / float(one.speed[i])
            its = one.rate * request_s
            busy += its
            waits += its * max(one.time_s - float(one.latency_s[i]), 0.0)
            half += its * float(one.half_s[i])
            variance += one.rate * one.dispersion * request_s**2
        if waits > 0:
            room = max((workers * waits - half) / busy, variance / busy / 2)
            lost = min(lost, bad_rate(busy, workers, room, _VARIANCE * variance))
    return lost
