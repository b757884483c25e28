"""Choose the variant of a request when it comes, for policies that do not choose variants.

Every variant of a model is a *lane*. A lane gets tokens at its planned rate. A request
takes a token of the most accurate lane that has one and can be in time. If there is none, it takes
the lane whose next token comes first. So lanes are loaded as planned and evenly, without random
numbers. At less than the planned load, the accurate lanes take all requests.

The plan is what a planner assigns to workers (`Assigned.load`). A lane is *full* when its waiting
requests keep its workers busy for half of the time that a request may wait. Then, in a burst,
requests go to other lanes. If all lanes are full, they go to the *reserve*: the fastest variant
that workers have loaded without an assignment. Without a planner, the plan is the fluid limit
(`shared/fluid.py`) of the measured rates, with batches as large as come within the SLO. It uses a
share of the workers that falls when requests miss their deadlines, and rises when none do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ray_slo.core.cluster import Cluster, Model, Variant, Worker
from ray_slo.core.profiles import LatencyProfile
from ray_slo.policies.shared import fluid

_FIRST_S, _EVERY_S = 0.02, 1.0  # until the first plan, if no rates are known; between plans
_SOON_S, _CAREFUL = 0.1, 0.7  # the same, and the utilisation, if it takes over from another policy
_UTILISATION = 0.9  # initial share of the workers that is planned with
_MOST, _LEAST = 1.2, 0.4  # above 1, as batches may be larger than planned
_UP, _DOWN = 0.01, 0.9  # added if there are no misses; factor if there are
_MISSES = 0.01  # share of the requests that a lane could not serve
_FULL = 0.5  # of the time that a lane's requests may wait; the rest is for new ones
_SPARE = 20.0  # times the measured rate: the most that a lane gets if workers are idle


@dataclass(eq=False, repr=False, slots=True)
class ModelLanes:
    """A model's lanes, the most accurate first.

    Attributes:
        slo_s: share of the SLO that the model's requests have for it.
        rate: requests per second, as measured.
    """

    model: Model
    slo_s: float
    lanes: list[Lane] = field(default_factory=list)
    planned: bool = False
    arrived: int = 0
    rate: float = 0.0

    def choose(self, now: float, slack_s: float, cost: int) -> Lane:
        """The lane for a request that has `slack_s` seconds left."""
        self.arrived += cost
        best = self._best(now, slack_s, cost)
        best.tokens -= cost
        return best

    def _best(self, now: float, slack_s: float, cost: int) -> Lane:
        able = [lane for lane in self.lanes if lane.alone_s <= slack_s]
        open_ = [lane for lane in able if not lane.is_full(slack_s)]
        for lane in open_:
            if lane.earned(now) >= cost or lane.waiting < lane.room * lane.idle:
                return lane
        if not open_ and any(lane.reserve for lane in able):
            return min((lane for lane in able if lane.reserve), key=_alone_s)
        if not able:
            return min(self.lanes, key=_alone_s)
        return min(open_ or able, key=lambda lane: lane.next_s(now, cost))


@dataclass(eq=False, repr=False, slots=True)
class Lane:
    """A variant, as a model of the inner policy.

    Attributes:
        alone_s: time of a single request on the fastest worker; inf without a worker.
        rate: planned requests per second; inf before there is a plan.
        speed: requests per second that its workers serve from its queue; inf without a planner.
        batch_s: time of a planned batch.
        reserve: whether it is only loaded on its workers, and not assigned to them.
        depth: the largest number of its tokens.
        room: requests that one of its own idle workers takes in a batch; 0 if workers are shared.
        idle: idle workers; waiting: requests that were handed to the inner policy.
    """

    name: str
    bit: int
    accuracy: float
    alone_s: float = math.inf
    rate: float = math.inf
    depth: float = math.inf
    tokens: float = math.inf
    at: float = -math.inf
    speed: float = math.inf
    batch_s: float = 0.0
    reserve: bool = False
    room: int = 0
    idle: int = 0
    waiting: int = 0

    def is_full(self, slack_s: float) -> bool:
        """Whether one more request would wait for too long behind the others."""
        return self.speed <= 0 or self.waiting > _FULL * self.speed * (slack_s - self.batch_s)

    def next_s(self, now: float, cost: int) -> float:
        """Time until it has `cost` tokens, seconds."""
        return (cost - self.earned(now)) / self.rate if self.rate > 0 else math.inf

    def earned(self, now: float) -> float:
        """Its current number of tokens."""
        if now > self.at:
            if self.rate < math.inf:
                self.tokens = min(self.tokens + (now - self.at) * self.rate, self.depth)
            self.at = now
        return self.tokens

    def give(self, now: float, rate: float, depth: float) -> None:
        """Change the rate at which it gets tokens."""
        self.earned(now)
        self.rate, self.depth = rate, depth
        self.tokens = min(max(self.tokens, -depth), depth)


def _alone_s(lane: Lane) -> float:
    return lane.alone_s


def serving(cluster: Cluster) -> dict[str, Worker]:
    """The workers, with `loaded` as the variants that they must serve. If a planner assigns
    variants, these are the assigned ones, and in reserve the fastest loaded variants of the same
    models. A model without an assigned worker is served by all workers that have loaded it."""
    assigned: dict[str, frozenset[str]] = {}
    for worker in cluster.workers.values():
        parts = frozenset(a.variant for a in worker.assigned) & worker.loaded
        if parts:
            assigned[worker.id] = parts
    if not assigned:
        return dict(cluster.workers)
    covered = frozenset().union(*assigned.values())
    others = frozenset(
        v.name
        for model in cluster.models.values()
        if not any(v.name in covered for v in model.variants)
        for v in model.variants
    )
    shown = {}
    for name, worker in cluster.workers.items():
        loaded = assigned.get(name)
        if loaded is None:
            loaded = worker.loaded
        else:
            loaded |= (worker.loaded & others) | _reserve(cluster, worker, loaded)
        shown[name] = worker if loaded == worker.loaded else replace(worker, loaded=loaded)
    return shown


def _reserve(cluster: Cluster, worker: Worker, serves: frozenset[str]) -> frozenset[str]:
    """The fastest variants that a worker has loaded, of the models that it serves."""
    found = set()
    for model in cluster.models.values():
        runs = {v.name: p for v, p in model.runnable(worker.hardware, worker.loaded)}
        if serves & runs.keys():
            found.add(min(runs, key=lambda name: runs[name].latency(1)))
    return frozenset(found)


class Choice:
    """The lanes of all models, and the plan for them.

    Attributes:
        models: by name.
        missed: number of requests since the last plan that a lane could not serve in time.
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelLanes] = {}
        self.lanes: dict[str, Lane] = {}
        self.missed = 0
        self._utilisation = _UTILISATION
        self._plan_at = math.inf
        self._planned_at = -math.inf
        self._period_s = _FIRST_S
        self._of_worker: dict[str, list[Lane]] = {}

    def change(self, now: float, cluster: Cluster, slos_s: Mapping[str, float]) -> None:
        """
        Args:
            cluster: the cluster; `loaded` of its workers is what they must serve (see `serving`).
            slos_s: time that requests have for the model, by model.
        """
        self._cluster = cluster
        old, self.lanes, known = self.lanes, {}, self.models
        self.models = {}
        for model in cluster.models.values():
            mine = self.models[model.name] = ModelLanes(model, slos_s[model.name])
            if (before := known.get(model.name)) is not None:
                mine.rate, mine.arrived = before.rate, before.arrived
            for i, variant in enumerate(model.variants):
                accuracy = -float(i) if variant.accuracy is None else variant.accuracy
                lane = old.get(variant.name) or Lane(variant.name, 1 << i, accuracy)
                lane.bit, lane.accuracy, lane.alone_s = 1 << i, accuracy, math.inf
                lane.room = lane.idle = 0
                lane.speed, lane.batch_s, lane.reserve = math.inf, 0.0, False
                self.lanes[variant.name] = lane
                mine.lanes.append(lane)
            mine.lanes.sort(key=lambda lane: -lane.accuracy)
        delay_s = cluster.delay(1)
        for worker in cluster.workers.values():
            for name in worker.loaded & self.lanes.keys():
                profile = cluster.variants[name].profiles.get(worker.hardware)
                if profile is not None:
                    lane = self.lanes[name]
                    lane.alone_s = min(lane.alone_s, delay_s + profile.latency(1))
        self._follow(now, cluster)
        if math.isinf(self._plan_at):
            self._plan_at = now + self._period_s
        elif self._planned_at > -math.inf:
            self._plan(now)

    def _follow(self, now: float, cluster: Cluster) -> None:
        """Use the planner's assignments as the plan."""
        self._of_worker = {}
        rates: dict[str, float] = {}
        speeds: dict[str, float] = {}
        for worker in cluster.workers.values():
            mine = self._of_worker[worker.id] = []
            parts = []
            for name in worker.loaded - {part.variant for part in worker.assigned}:
                if worker.assigned and name in self.lanes:
                    self.lanes[name].reserve = True
            for part in worker.assigned:
                lane = self.lanes.get(part.variant)
                if lane is None or part.variant not in worker.loaded:
                    continue
                profile = cluster.variants[part.variant].profiles.get(worker.hardware)
                if profile is None:
                    continue
                size = max(min(part.batch_size, profile.max_batch_size), 1)
                most = profile.throughput(size) / len(worker.assigned)
                load = most if part.load is None else part.load
                rates[lane.name] = rates.get(lane.name, 0.0) + load
                parts.append((lane, load, load / profile.throughput(size)))
                lane.batch_s = max(lane.batch_s, profile.latency(size))
                if len(worker.assigned) == 1:
                    lane.idle += 1
                    lane.room = max(lane.room, size)
                    mine.append(lane)
            busy = min(sum(share for _, _, share in parts), 1.0)
            for lane, load, _ in parts:
                speeds[lane.name] = speeds.get(lane.name, 0.0) + load / max(busy, 1e-9)
        for model in self.models.values():
            model.planned = any(lane.name in rates for lane in model.lanes)
            if model.planned:
                for lane in model.lanes:
                    rate = rates.get(lane.name, 0.0)
                    lane.give(now, rate, max(1.0, rate * model.slo_s / 2) if rate else 0.0)
                    lane.speed = speeds.get(lane.name, 0.0)

    def busy(self, worker: str, by: int) -> None:
        """A worker was given its first batch (1), or has ended its last one (-1)."""
        for lane in self._of_worker.get(worker, ()):
            lane.idle -= by

    # -- without a planner ---------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Plan anew if it is time."""
        if now >= self._plan_at:
            self._plan(now)

    def expect(self, now: float, rates: Mapping[str, float]) -> None:
        """Plan for these rates of models whose rate is not known yet, because another policy has
        served them so far."""
        for name, model in self.models.items():
            if model.rate == 0:
                model.rate = rates.get(name, 0.0)
        self._utilisation = min(self._utilisation, _CAREFUL)  # it falls quickly and rises slowly
        self._planned_at, self._period_s = now, _SOON_S
        self._plan_at = now + _SOON_S
        several = [m for m in self.models.values() if len(self._served(m.lanes)) > 1]
        self._solve(now, [m for m in several if not m.planned and m.rate > 0])

    def learn(self, former: Choice) -> None:
        """Take over the utilisation that another `Choice` has learned."""
        self._utilisation = former._utilisation

    def expected(self) -> dict[str, float]:
        """Requests per second by lane, as far as models' rates are known."""
        found = {}
        for model in self.models.values():
            left = model.rate
            for lane in model.lanes:
                found[lane.name] = min(lane.rate, left)
                left -= found[lane.name]
        return found

    def _plan(self, now: float) -> None:
        models = [
            m for m in self.models.values() if not m.planned and len(self._served(m.lanes)) > 1
        ]
        elapsed_s = max(now - self._planned_at, 1e-3)
        first = self._planned_at == -math.inf
        if first:
            elapsed_s = self._period_s
        arrived = sum(m.arrived for m in models)
        if not first and elapsed_s < self._period_s / 2:
            pass  # the cluster changed: plan with the known rates
        else:
            for m in models:
                seen = m.arrived / elapsed_s
                m.rate = seen if m.rate == 0 else 0.5 * (m.rate + seen)
                m.arrived = 0
            if arrived:
                self._adapt(self.missed / arrived)
            self.missed = 0
            self._planned_at = now
            self._period_s = min(2 * self._period_s, _EVERY_S)
        self._plan_at = now + self._period_s
        self._solve(now, [m for m in models if m.rate > 0])

    def _adapt(self, missed: float) -> None:
        if missed > _MISSES:
            self._utilisation = max(self._utilisation * _DOWN, _LEAST)
        else:
            self._utilisation = min(self._utilisation + _UP, _MOST)

    @staticmethod
    def _served(lanes: Iterable[Lane]) -> list[Lane]:
        return [lane for lane in lanes if lane.alone_s < math.inf]

    def _solve(self, now: float, models: Sequence[ModelLanes]) -> None:
        if not models:
            return
        counts: dict[str, float] = {}
        loaded: dict[str, frozenset[str]] = {}
        hardware: dict[str, str] = {}
        for worker in self._cluster.workers.values():
            kind = f"{worker.hardware} {sorted(worker.loaded)}"
            counts[kind] = counts.get(kind, 0.0) + self._utilisation
            loaded[kind], hardware[kind] = worker.loaded, worker.hardware
        single = [
            m for m in self.models.values() if not m.planned and m not in models and m.rate > 0
        ]
        bounded = [_bounded(m) for m in (*models, *single)]
        found = fluid.solve(
            fluid.Problem(
                bounded,
                {m.model.name: m.rate for m in (*models, *single)},
                counts,
                loaded,
                hardware,
            )
        )
        rates: dict[str, float] = {}
        for part in found.mix:
            rates[part.variant] = rates.get(part.variant, 0.0) + part.rate
        # Requests beyond the plan go to the variants with the largest throughput.
        for m, model in zip(models, bounded, strict=False):
            if (unserved := found.unserved[m.model.name]) > 0:
                served = {lane.name for lane in self._served(m.lanes)}
                of = [v for v in model.variants if v.name in served]
                best = max(of, key=_throughput).name
                rates[best] = rates.get(best, 0.0) + unserved
        busy = sum(part.busy for part in found.mix)
        spare = min(max(sum(counts.values()) / max(busy, 1e-9), 1.0), _SPARE)
        for m in models:
            for lane in m.lanes:
                rate = rates.get(lane.name, 0.0) * spare
                lane.give(now, rate, max(1.0, rate * m.slo_s / 2))


def _throughput(variant: Variant) -> float:
    """Requests per second, of the largest batches on the quickest hardware."""
    return max(p.throughput(p.max_batch_size) for p in variant.profiles.values())


def _bounded(m: ModelLanes) -> Model:
    """The model with batches limited to the requests that come while the first one can wait."""

    def bounded(profile: LatencyProfile) -> LatencyProfile:
        most = max(profile.max_batch_within(m.slo_s), 1)
        table = profile.table
        while most > 1 and table[most - 1] + (most - 1) / m.rate > m.slo_s:
            most -= 1
        return profile.truncated(most)

    variants = []
    for lane in m.lanes:
        variant = next(v for v in m.model.variants if v.name == lane.name)
        profiles = {kind: bounded(p) for kind, p in variant.profiles.items()}
        variants.append(replace(variant, profiles=profiles, accuracy=lane.accuracy))
    return Model(m.model.name, m.slo_s, tuple(variants))
