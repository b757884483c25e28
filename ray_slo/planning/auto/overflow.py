"""The share of the requests that are late or refused under a plan, with bursts.

A plan is for batches that leave requests time to wait, and for accurate variants. In a burst,
batches grow, and workers use the fastest variants that they have loaded: those of the plan, or
their reserve. There is a reserve if there is memory for it and no accuracy floor. So the capacity
in a burst is larger than planned, and only requests beyond it are lost.

The requests of a model have a part T of the SLO, in proportion to the latencies of the planned
batches. Let batches take the share u of T, which leaves W = T − ℓ(b) to wait. Then n workers serve
n·b/ℓ(b) requests per second, and K = n·W is the work that may wait. The loss is that of a reflected
Brownian motion with these figures (`headroom.bad_rate`). The u with the least loss is taken,
because a policy takes larger batches when more requests wait. In overload, the loss goes to
1 − capacity/demand.

Workers may serve several models. So there are two bounds. A model has at most all workers that have
loaded it, planned or not: in a burst they serve it. Models that share workers, directly or
indirectly, have at most all their workers together. A request is lost if one of its tasks is lost
by the first bound. By the second bound, a path loses what its worst task loses, and the branches of
a tree lose independently.

A request at the root makes M requests at a task. If one of these is lost, the others are lost with
it. So the lost requests have E[M²]/E[M] each, and a share x of lost work is a share x·E[M]²/E[M²]
of lost requests (`_per_root`). Most of them have many; those without any are never lost there.

Batches grow with the backlog, so workers reduce it faster than at the formula's constant speed. The
effect is that of a smaller variance (`_VARIANCE`). This factor was chosen on simulated random
problems; `python -m benchmarks expected-bad` compares the predictions with others.
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
    """The load of a model, and the workers that serve it. Arrays have one value per u.

    Attributes:
        rate: requests per second.
        dispersion: index of dispersion of their counts: the mean over the requests.
        time_s: their part of the SLO, in seconds: the mean over the requests.
        parts: number of workers that the plan gives the model, as the sum of shares of their time.
        hosts: number of workers that serve the model.
        speed: requests per second of all parts together.
        latency_s: latency of a batch, in seconds.
        half_s: work of half of a batch without its first request, in seconds.
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
        """Add a share of a worker's time. Its batches of b requests take `latencies_s[b - 1]`."""
        fits = np.searchsorted(latencies_s, _PARTS * self.time_s * (1 + 1e-9), side="right")
        batch = np.maximum(fits, 1)
        latency_s = latencies_s[batch - 1]
        total = self.parts + part
        self.latency_s += (latency_s - self.latency_s) * part / total
        self.half_s += ((latency_s - latency_s / batch) / 2 - self.half_s) * part / total
        self.speed += part * batch / latency_s
        self.parts = total


def late_by_stream(problem: Problem, plan: Plan, demand: Mapping[str, Demand]) -> dict[str, float]:
    """Return the share of late or refused requests, for each stream with a demand.

    Args:
        demand: the actual demand. The plan may be for more.
    """
    if not any(slot.parts for slot in plan.slots):  # every worker serves all requests
        return {s: 1 - plan.served.get(s, 0.0) for s, of in demand.items() if of.rate > 0}
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
        lost = _per_root(tree, arrivals[tree.name])
        in_time = math.prod(1 - alone[tree[t].model] * share for t, share in lost.items())
        rest = {name: 1 - together[tree[name].model] * share for name, share in lost.items()}
        for node in reversed(tree.order):
            below = [rest[child] for child in tree.children(node.name)]
            rest[node.name] = min(rest[node.name], math.prod(below))
        late[stream] = 1 - min(in_time, rest[tree.root])
    return late


def _per_root(tree: Tree, arrivals: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the requests at the root that are lost if all work at a task is lost, and
    each takes what it made: E[M]²/E[M²], by task. The numbers of requests made are taken for
    Poisson. Then E[M²]/E[M] is 1 + f times that of the task before, where f is the mean number of
    requests that one request there makes."""
    size = {tree.root: 1.0}
    for task in tree.order:
        for child in tree.children(task.name):
            made = arrivals[child] / arrivals[task.name] if arrivals[task.name] else 0.0
            size[child] = 1 + made * size[task.name]
    return {name: arrivals[name] / n for name, n in size.items()}


def _planned_s(problem: Problem, plan: Plan) -> dict[str, float]:
    """Return the mean latency of the planned batches by model, in seconds, weighted by their
    time."""
    sums: dict[str, tuple[float, float]] = {}
    for slot in plan.slots:
        for model, time, latency_s in _busy(problem, slot):
            busy, product = sums.get(model.name, (0.0, 0.0))
            sums[model.name] = busy + time, product + time * latency_s
    return {model: product / busy for model, (busy, product) in sums.items() if busy > 0}


def _busy(problem: Problem, slot: Slot) -> list[tuple[Model, float, float]]:
    """Return, for each part of a slot, its model, the share of the worker's time that it takes, and
    the latency of its batch in seconds."""
    found = []
    for part in slot.parts:
        model = next(m for m in problem.models if problem.variant[part.variant] in m.variants)
        latencies_s = _latencies_s(model, problem.variant[part.variant].profiles[slot.kind])
        size = min(part.batch_size, len(latencies_s))
        latency_s = float(latencies_s[size - 1])
        found.append((model, (part.load or 0.0) * latency_s / size, latency_s))
    return found


def _latencies_s(model: Model, profile: LatencyProfile) -> Floats:
    """Return the latencies of batches of 1, 2, … requests, in seconds, shape (batch sizes,)."""
    table = np.asarray(profile.table)
    if model.items == 1:
        return table
    most = max(int(len(table) / model.items + 1e-9), 1)
    items = np.ceil(np.arange(1, most + 1) * model.items - 1e-9).astype(int)
    return np.asarray(table[np.minimum(items, len(table)) - 1])


def _share(tree: Tree, task: str, planned_s: Mapping[str, float]) -> float:
    """Return a task's share of the SLO, in proportion to the latencies on the longest path through
    the task."""
    mine = planned_s.get(tree[task].model, 0.0)
    ends = [t.name for t in tree.order if task in tree.path(t.name)]
    longest = max(sum(planned_s.get(tree[t].model, 0.0) for t in tree.path(e)) for e in ends)
    return mine / longest if longest else 1.0


def _arrivals(problem: Problem, plan: Plan, tree: Tree) -> dict[str, float]:
    """Return the number of requests at each task per request at the root, with the variants of the
    plan."""
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
    """Add a worker to its models. They divide all of its time in proportion to their planned
    times."""
    busy = _busy(problem, slot)
    total = sum(time for _, time, _ in busy)
    for (model, time, _), part in zip(busy, slot.parts, strict=True):
        share = time / total if total else 1 / len(busy)
        variant = _in_bursts(problem, slot, model, part.variant)
        profile = problem.variant[variant].profiles[slot.kind]
        if share > 0:
            work[model.name].has(share, _latencies_s(model, profile))
    for model in problem.models:
        work[model.name].hosts += any(v.name in slot.variants for v in model.variants)


def _in_bursts(problem: Problem, slot: Slot, model: Model, variant: str) -> str:
    """Return the variant that a worker uses in a burst: the fastest one that it has, or has memory
    for."""
    if problem.accuracy_floor:
        return variant

    def fits(name: str) -> bool:
        loaded = problem.variant.keys() & {*slot.variants, name}
        needs_mb = sum(problem.variant[v].memory_mb.get(slot.kind, 0.0) for v in loaded)
        return name in slot.variants or needs_mb <= problem.kind[slot.kind].memory_mb

    able = [v for v in model.variants if slot.kind in v.profiles and fits(v.name)]
    return min(able, key=lambda v: v.profiles[slot.kind].latency(1)).name


def _together(problem: Problem, plan: Plan, work: Mapping[str, _Work]) -> dict[str, float]:
    """Return the share of the work that is lost by models that share workers, by model."""
    model_of = {v.name: model.name for model in problem.models for v in model.variants}
    groups = {name: frozenset([name]) for name in work}
    for slot in plan.slots:
        known = model_of.keys() & slot.variants  # others are loaded, and not measured
        merged = frozenset().union(*(groups[model_of[name]] for name in known))
        groups |= dict.fromkeys(merged, merged)
    lost: dict[str, float] = {}
    for group in set(groups.values()):
        members = [work[name] for name in group if work[name].rate and work[name].parts]
        workers = sum(one.parts for one in members)
        lost |= dict.fromkeys(group, _lost(members, workers) if len(members) > 1 else 0.0)
    return lost


def _lost(members: Sequence[_Work], workers: float) -> float:
    """Return the share of these models' work that is lost on this number of workers, with the best
    batch sizes."""
    if not any(one.rate for one in members):
        return 0.0
    if not workers or not any(one.parts for one in members):  # loaded, but not planned
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
