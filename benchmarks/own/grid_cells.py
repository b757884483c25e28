"""Random cells of `policy-grid`. Cell k of seed s depends on s and k alone.

The following is drawn, independently:

* The shape. One in eight cells is a pipeline: a tree of 2 or 3 tasks. One request makes 1 to 3
  requests of each task below. In one in eight of the others, requests have sizes (log-normal, 1 to
  8 items). In two in five cells, models have 2 to 5 variants, and slower ones are more accurate.
* 1 to 40 models, all alike or not, and 1 to 64 workers. In 3 of 10 cells there are two kinds of
  workers; the slow kind is 1.5 to 3.5 times slower. For unlike models this factor varies by model.
* Latency profiles: linear with β/α of 0.3 to 20, or a table with plateaus or irregular steps.
* The SLO: 1.3 to 4 times ℓ(8) on the fast kind. With variants, ℓ(8) is their geometric mean.
* Popularity: equal or Zipf(0.9). Arrivals of each model are independent: Poisson, Γ(0.3), Γ(0.1) or
  MMPP. Their rate is steady, or changes in steps or ramps by ±30 to ±70 %.
* The load: 0.3 to 2.5 of the bound, uniform on a logarithmic scale.
* Execution times: exact, or with 10 % noise.
* Preemption: allowed or not. A batch stops 5 % of ℓ(8) after the order to stop.

The *bound* is the largest rate that the fluid limit (`shared/fluid.py`) can serve of this
mix of models. It uses the quickest variants. All workers are busy, with the most efficient batches
within the SLO. No policy reaches it where SLOs are tight.

With noise, policies get what a live host learns: the 95th percentile of every profile. They also
get the margins that a live host gives them (`live_arguments`).

Latencies are chosen so that 100 to 2,500 requests arrive per second and a run lasts several
seconds. This is no restriction, as policies have only one absolute time: windows of one second in
which they measure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.core.cluster import Worker
from ray_slo.core.trees import Tree, TreeTask
from ray_slo.planning import auto
from ray_slo.policies.shared import fluid
from ray_slo.simulation import Gamma, LogNormal, Mmpp, Poisson, Trace, Workload
from ray_slo.simulation.arrivals import ArrivalProcess, Burst

SIGMA = 0.1
"""Standard deviation of the logarithm of the noise."""
LEARNED = math.exp(1.6449 * SIGMA)
"""The 95th percentile of a noisy latency, divided by its median."""
SIZES = LogNormal(median=2, sigma=0.6, max_size=8)
PIPELINE = "pipe"
WARMUP_SLOS, MEASURED_SLOS = 12, 30
"""Lengths of a run in SLOs. In only a few SLOs, chance and a policy's first guess would decide."""
Rng = np.random.Generator


class Kind(NamedTuple):
    """A kind of workers, and their number."""

    name: str
    count: int


class Arriving(NamedTuple):
    """How requests arrive, at any rate.

    Attributes:
        shape: shape of the Gamma gaps; 1 is Poisson.
        burst: the bursts, if arrivals are an MMPP.
        levels: rate divided by its mean, in equal parts of the run.
    """

    name: str
    shape: float
    burst: Burst | None
    levels: Sequence[float]

    def process(self, rate: float, duration_s: float) -> ArrivalProcess:
        """Return the process with this mean rate (requests per second) over this duration."""
        if len(self.levels) > 1:
            return Trace(
                rates=[rate * level for level in self.levels],
                interval_s=duration_s / len(self.levels),
                shape=self.shape,
                burst=self.burst,
            )
        if self.burst is not None:
            return Mmpp(rate=rate, burst=self.burst)
        if self.shape == 1:
            return Poisson(rate=rate)
        return Gamma(rate=rate, shape=self.shape)


@dataclass(frozen=True)
class Cell:
    """A cell, with the actual latencies.

    Attributes:
        seed, number: the seed and number that it was drawn with.
        models: the models, each with its variants, the most accurate first. A pipeline has one
            model per task, with the task's part of the SLO.
        kinds: the kinds of workers, the fast one first.
        shares: share of each model in the requests. In a pipeline, in the requests of all tasks.
        tree: the tree of the pipeline, if it is one.
        sized: whether requests have sizes.
        arriving: how requests arrive.
        load: rate of clients' requests, as a share of the bound.
        bound: the bound in requests per second; for a pipeline in requests of clients.
        noise: standard deviation of log(actual / profiled execution time).
        preemption: whether batches may be stopped.
        preempt_delay_s: time from the order to stop until a batch stops.
        says: the cell in words.
    """

    seed: int
    number: int
    models: tuple[Model, ...]
    kinds: tuple[Kind, ...]
    shares: Mapping[str, float]
    tree: Tree | None
    sized: bool
    arriving: Arriving
    load: float
    bound: float
    noise: float
    preemption: bool
    preempt_delay_s: float
    says: str

    @property
    def command(self) -> str:
        """Return the options of `policy-grid` that run this cell alone."""
        return f"--seed {self.seed} --cell {self.number}"

    @property
    def variants(self) -> int:
        """The largest number of variants of any model."""
        return max(len(model.variants) for model in self.models)

    @property
    def rate(self) -> float:
        """Requests of clients per second."""
        return self.load * self.bound

    @property
    def slos_s(self) -> list[float]:
        """End-to-end SLOs, in seconds."""
        if self.tree is not None:
            return [self.tree.slo_s]
        return [model.latency_slo_s for model in self.models]

    @property
    def warmup_s(self) -> float:
        """Duration of the warm-up, in which policies can learn the load."""
        return max(WARMUP_SLOS * max(self.slos_s), min(2.0, 4000 / self.rate))

    def measured_s(self, requests: float) -> float:
        """Return the measured duration of a run, enough for this number of requests.

        It is up to 1.6 times as long if it would be below 10 s. It is up to 5 times as long if it
        would be below `MEASURED_SLOS`.
        """
        least_s = requests / self.rate
        slos_s = min(MEASURED_SLOS * max(self.slos_s), 5 * least_s)
        return max(least_s, min(10.0, 1.6 * least_s), slos_s)

    # -- what policies see -----------------------------------------------------------------------

    def quickest(self) -> Cell:
        """Return the cell with only the quickest variant of each model."""
        models = tuple(replace(m, variants=m.variants[-1:]) for m in self.models)
        if self.tree is None:
            return replace(self, models=models)
        kept = {variant.name for model in models for variant in model.variants}
        tasks = tuple(
            replace(task, factors={v: made for v, made in task.factors.items() if v in kept})
            for task in self.tree.tasks
        )
        return replace(self, models=models, tree=replace(self.tree, tasks=tasks))

    def cluster(self, slower: float = 1.0) -> Cluster:
        """Return the cluster, with all latencies multiplied by a factor."""
        models = [_slowed(model, slower) for model in self.models]
        loaded = frozenset(v.name for m in models for v in m.variants)
        workers = [
            Worker(f"{kind.name}-{i}", kind.name, loaded)
            for kind in self.kinds
            for i in range(kind.count)
        ]
        return Cluster.of(models, workers, preempt_delay_s=self.preempt_delay_s)

    @property
    def learned(self) -> float:
        """The latency that a policy is told, divided by the median latency."""
        return LEARNED if self.noise else 1.0

    def workload(self, duration_s: float) -> Workload:
        return Workload(
            arrivals=self.arriving.process(self.rate, duration_s),
            popularity=None if self.tree else dict(self.shares),
            sizes=SIZES if self.sized else None,
        )

    def problem(self, slower: float = 1.0) -> auto.Problem:
        """Return the problem of a pipeline for planners."""
        assert self.tree is not None
        models = tuple(
            auto.Model(
                m.name,
                tuple(
                    auto.Variant(v.name, v.accuracy or 0.0, dict(v.profiles)) for v in m.variants
                ),
            )
            for m in (_slowed(model, slower) for model in self.models)
        )
        kinds = tuple(auto.Kind(kind.name, kind.count, kind.count) for kind in self.kinds)
        return auto.Problem(tuple(models), (self.tree,), {}, kinds)


def _slowed(model: Model, slower: float) -> Model:
    variants = tuple(
        replace(v, profiles={k: _times(p, slower) for k, p in v.profiles.items()})
        for v in model.variants
    )
    return replace(model, variants=variants)


def _times(profile: LatencyProfile, factor: float) -> LatencyProfile:
    if factor == 1:
        return profile
    sizes = range(1, profile.max_batch_size + 1)
    return LatencyProfile([factor * profile.latency(b) for b in sizes])


# -- drawing ---------------------------------------------------------------------------------------


def cell(seed: int, number: int) -> Cell:
    """Draw cell `number` of `seed`."""
    rng = np.random.default_rng([seed, number])
    piped = rng.random() < 1 / 8
    sized = rng.random() < 1 / 8 and not piped
    several = rng.random() < 0.4
    count = int(rng.integers(2, 4)) if piped else _log_int(rng, 1, 40)
    workers = _log_int(rng, 1, 64)
    alike = bool(rng.random() < 0.5) and not piped
    load = _log(rng, 0.3, 2.5)
    # ℓ(8) is such that about this number of requests arrives per second.
    wanted = _log(rng, 100, 2500)
    typical_s = min(max(8 * workers * load / wanted, 0.003), 0.4)
    if piped:
        typical_s /= 2
    slower = _log(rng, 1.5, 3.5) if rng.random() < 0.3 and workers > 1 else None
    kinds = _kinds(rng, workers, slower is not None)
    drawn = [_Drawn.of(rng, typical_s, several, slower) for _ in range(count)]
    if alike:
        drawn = drawn[:1] * count
    else:  # networks of different sizes
        drawn = [d.scaled(_log(rng, 0.5, 2.0), _log(rng, 0.8, 1.25)) for d in drawn]
    zipf = bool(rng.random() < 0.5)
    weights = np.arange(1, count + 1) ** -(0.9 if zipf else 0.0)
    shares = {f"m{i}": float(w) for i, w in enumerate(weights / weights.sum())}
    models = tuple(d.model(f"m{i}", kinds) for i, d in enumerate(drawn))
    tree = None
    if piped:
        tree = _tree(rng, models)
        models, shares = _as_tasks(tree, models)
    slo_s = max(m.latency_slo_s for m in models)
    arriving = _arriving(rng, slo_s if tree is None else tree.slo_s)
    noise = SIGMA if rng.random() < 0.4 else 0.0
    preemption = bool(rng.random() < 0.35)
    per_client = sum(_factors(tree).values()) if tree else 1.0
    if sized:
        per_client = float(np.mean(SIZES.draw(20_000, np.random.default_rng(0))))
    bound = _bound(models, kinds, shares) / per_client
    found = Cell(
        *(seed, number, models, kinds, shares, tree, sized, arriving, load, bound, noise),
        *(preemption, 0.05 * typical_s, ""),
    )
    return replace(found, says=_words(found, drawn[0].shape, alike, zipf))


def _log(rng: Rng, low: float, high: float) -> float:
    return float(math.exp(rng.uniform(math.log(low), math.log(high))))


def _log_int(rng: Rng, low: int, high: int) -> int:
    return min(int(_log(rng, low, high + 1)), high)


def _kinds(rng: Rng, workers: int, unlike: bool) -> tuple[Kind, ...]:
    slow = int(rng.integers(1, workers)) if unlike else 0
    return (Kind("fast", workers - slow), *([Kind("slow", slow)] if slow else []))


@dataclass(frozen=True)
class _Drawn:
    """A model without a name.

    Attributes:
        table: ℓ(1), ℓ(2), … of its quickest variant on the fast kind, in seconds.
        speeds: latencies of its variants, divided by that of the quickest; rising.
        accuracies: accuracies of its variants, in percent.
        slack: SLO divided by ℓ(8).
        slower: factor on its latencies on the slow kind.
        shape: name of the shape of its profile.
    """

    table: tuple[float, ...]
    speeds: tuple[float, ...]
    accuracies: tuple[float, ...]
    slack: float
    slower: float
    shape: str

    @classmethod
    def of(cls, rng: Rng, typical_s: float, several: bool, slower: float | None) -> _Drawn:
        largest = int(rng.choice([8, 16, 32, 64, 128]))
        shape, table = _table(rng, largest)
        speeds, accuracies = [1.0], [float(rng.uniform(60, 78))]
        for _ in range(int(rng.integers(2, 6)) - 1 if several else 0):
            speeds.append(speeds[-1] * float(rng.uniform(1.3, 2.2)))
            accuracies.append(
                accuracies[-1] + float(rng.uniform(0.08, 0.35)) * (96 - accuracies[-1])
            )
        # The geometric mean of the variants takes `typical_s` for a batch of 8.
        scale = typical_s / table[7] / float(np.exp(np.mean(np.log(speeds))))
        slack = float(rng.uniform(1.3, 4))
        return cls(
            tuple(scale * t for t in table),
            tuple(speeds),
            tuple(accuracies),
            slack,
            slower or 1.0,
            shape,
        )

    def scaled(self, size: float, slower: float) -> _Drawn:
        """Return another network: latencies × `size`, factor on the slow kind × `slower`."""
        table = tuple(size * t for t in self.table)
        return replace(self, table=table, slower=max(self.slower * slower, 1.0))

    def model(self, name: str, kinds: Sequence[Kind]) -> Model:
        slo_s = self.slack * self.table[7] * float(np.exp(np.mean(np.log(self.speeds))))
        variants = [
            Variant(
                f"{name}.{i}",
                {
                    kind.name: LatencyProfile(
                        [speed * (self.slower if j else 1.0) * t for t in self.table]
                    )
                    for j, kind in enumerate(kinds)
                },
                accuracy,
            )
            for i, (speed, accuracy) in enumerate(zip(self.speeds, self.accuracies, strict=True))
        ]
        return Model(name, slo_s, tuple(reversed(variants)))


def _table(rng: Rng, largest: int) -> tuple[str, list[float]]:
    """Draw ℓ(1), …, ℓ(largest), which never fall, in an arbitrary unit; with the shape's name."""
    ratio = _log(rng, 0.3, 20)
    linear = [b + ratio for b in range(1, largest + 1)]
    kind = str(rng.choice(["linear", "linear", "plateaus", "powers", "steps"]))
    if kind == "plateaus":  # batches are padded to a multiple of `every`
        every = int(rng.choice([2, 4, 8]))
        return f"plateaus of {every}", [
            linear[min(-(-b // every) * every, largest) - 1] for b in range(1, largest + 1)
        ]
    if kind == "powers":  # batches are padded to a power of two
        return "powers of two", [
            linear[2 ** math.ceil(math.log2(b)) - 1] for b in range(1, largest + 1)
        ]
    if kind == "steps":  # a few increases are large, most are small
        rises = rng.exponential(size=largest) * (rng.random(largest) < 0.3)
        rises *= largest / max(float(rises.sum()), 1e-9)
        return "steps", (1 + ratio + np.cumsum(rises)).tolist()
    return "linear", linear


def _arriving(rng: Rng, slo_s: float) -> Arriving:
    name = str(rng.choice(["Poisson", "Γ(0.3)", "Γ(0.1)", "MMPP"]))
    shape = {"Γ(0.3)": 0.3, "Γ(0.1)": 0.1}.get(name, 1.0)
    share, burst_s = _log(rng, 0.1, 0.3), slo_s * _log(rng, 0.5, 5)
    peak = min(float(rng.uniform(1.5, 4)), 0.95 / share)
    burst = Burst(peak=peak, burst_s=burst_s, calm_s=burst_s * (1 - share) / share)
    course = str(rng.choice(["steady", "steady", "steady", "steps", "ramps"]))
    swing, turns = float(rng.uniform(0.3, 0.7)), int(rng.integers(1, 4))
    levels = [1.0]
    if course == "steps":
        levels = [1 - swing, 1 + swing] * turns
    elif course == "ramps":
        up = np.linspace(1 - swing, 1 + swing, 12)
        levels = np.concatenate([up, up[::-1]] * turns).tolist()
    return Arriving(
        f"{name}{'' if course == 'steady' else f', {course} of ±{swing:.0%}'}",
        shape,
        burst if name == "MMPP" else None,
        levels,
    )


# -- pipelines -------------------------------------------------------------------------------------


def _tree(rng: Rng, models: Sequence[Model]) -> Tree:
    """Draw a chain of tasks, or a root with two tasks below it."""
    names = [m.name for m in models]
    chain = len(names) == 2 or rng.random() < 0.5
    parents = [None, *(names[:-1] if chain else [names[0]] * (len(names) - 1))]
    tasks = []
    for model, parent in zip(models, parents, strict=True):
        below = [n for n, p in zip(names, parents, strict=True) if p == model.name]
        made = {child: float(rng.uniform(1, 3)) for child in below}
        factors = {v.name: made for v in model.variants} if made else {}
        tasks.append(TreeTask(model.name, model.name, parent, factors))
    tree = Tree(PIPELINE, tuple(tasks), {"": 1.0})
    slack = float(rng.uniform(1.5, 4))
    longest = max(sum(_typical_s(m) for m in models if m.name in tree.path(n)) for n in names)
    return replace(tree, slos_s={"": slack * longest})


def _typical_s(model: Model) -> float:
    """Return ℓ(8) on the fast kind, as the geometric mean over the variants."""
    return float(np.exp(np.mean([math.log(v.profiles["fast"].latency(8)) for v in model.variants])))


def _factors(tree: Tree) -> dict[str, float]:
    """Return the number of requests of each task that one request of a client makes."""
    made = {tree.root: 1.0}
    for task in tree.order:
        variant = next(iter(task.factors), "")
        for child in tree.children(task.name):
            made[child] = made[task.name] * task.factor(variant, child)
    return made


def _as_tasks(tree: Tree, models: Sequence[Model]) -> tuple[tuple[Model, ...], dict[str, float]]:
    """Give each model its part of the SLO; return the models and their shares of all requests."""
    typical = {m.name: _typical_s(m) for m in models}
    below = {m.name: [t for t in tree.parents if m.name in tree.path(t)] for m in models}
    parts = {
        name: typical[name] / max(sum(typical[t] for t in tree.path(last)) for last in lasts)
        for name, lasts in below.items()
    }
    made = _factors(tree)
    total = sum(made.values())
    return (
        tuple(replace(m, latency_slo_s=tree.slo_s * parts[m.name]) for m in models),
        {name: n / total for name, n in made.items()},
    )


# -- the bound -------------------------------------------------------------------------------------


def _bound(models: Sequence[Model], kinds: Sequence[Kind], shares: Mapping[str, float]) -> float:
    """Return the items per second, of all models together, that the fluid limit can serve."""

    def feasible(rate: float) -> bool:
        rates = {name: rate * share for name, share in shares.items()}
        workers = {kind.name: float(kind.count) for kind in kinds}
        found = fluid.solve(fluid.Problem(models, rates, workers))
        return sum(found.unserved.values()) <= 1e-6 * rate

    low, high = 0.0, 1.0
    while feasible(high):
        low, high = high, 4 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if feasible(middle) else (low, middle)
    return low


def _words(c: Cell, profile: str, alike: bool, zipf: bool) -> str:
    many = len(c.models)
    if c.tree is not None:
        what = f"pipeline of {many} tasks"
    else:
        what = f"{many} {'model' if many == 1 else 'alike models' if alike else 'unlike models'}"
    slack = c.slos_s[0] / _typical_s(c.models[0])
    parts: list[Any] = [
        what + (f" × {c.variants} variants" if c.variants > 1 else ""),
        " + ".join(f"{k.count} {k.name}" for k in c.kinds),
        f"SLO {1e3 * c.slos_s[0]:.3g} ms" + ("" if c.tree else f" ({slack:.2f} ℓ(8))"),
        profile,
        "Zipf" if zipf and many > 1 and c.tree is None else "",
        "sizes" if c.sized else "",
        c.arriving.name,
        f"load {c.load:.2f}",
        "noise" if c.noise else "",
        "preemption" if c.preemption else "",
    ]
    return ", ".join(filter(None, parts))
