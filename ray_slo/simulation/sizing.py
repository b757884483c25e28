"""How many workers, of which kinds, with which variants: `size(question) -> list[Answer]`.

Each answer is the smallest that *passes*: in a simulated run at the load, no model's share of late
or dropped requests is above `bad_rate` (and the mean accuracy is at least `accuracy_floor`). What
is searched is a number, more of which is taken for better: it grows or shrinks from a guess (the
fluid limit) in doubling steps, then is bisected, then has to pass with the other seeds, too, or one
more is tried. The figures of an answer are the worst over the seeds.

* *Workers*: how many of one kind, for each policy and kind.
* *Pools*: configurations of instance types by rising cost and upper bound on their throughput
  (`kairos.fluid_bounds`, or the full batches' where requests have no sizes), cheaper than the
  cheapest of one type: the first whose run passes, by bisection. One that costs less although its
  bound is lower is not looked at. With a budget also the pool with the most throughput under it.
* *Pipelines*: workers for `loki.plan`, with any variants and with the most accurate alone.

Worked example: ℓ(b) = b + 5 ms, an SLO of 25 ms, 3600 requests/s. A batch of 20 takes 25 ms, so a
worker serves at most 800 per second: the fluid limit is 4.5, 5 workers. Those would have to run
batches of 20 with no gaps, of requests that just came; `deferred` needs 6.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from ray_slo.core.cluster import Cluster, DispatchDelay, Model, Worker
from ray_slo.core.documents import ProfileSpec, Strict
from ray_slo.planning import fluid, kairos, loki
from ray_slo.planning.catalogue import CATALOGUE, InstanceType, load_catalogue
from ray_slo.planning.result import Infeasible
from ray_slo.policies.registry import make_policy, refuse_sizes
from ray_slo.simulation.pipelines import simulate_pipeline
from ray_slo.simulation.report import Report
from ray_slo.simulation.search import goodput_search
from ray_slo.simulation.simulator import simulate
from ray_slo.simulation.spec import ClusterSpec, PolicySpec
from ray_slo.simulation.workloads import Workload

Named = tuple[str, Mapping[str, Any]]
"""A policy's name and its arguments."""

_KIND = "default"  # of workers, where no pool names some
_SIZES = 2000  # quantiles of the sizes that a pool is planned for
_CONFIGURATIONS = 300_000  # of a pool, that are compared
_EVALUATIONS = 8  # of pools for a budget
_ATTAINED = 0.9  # of its bound, by a good policy: where the search begins


@dataclass(frozen=True)
class Question:
    """What is to be served, and how well.

    Args:
        models: with profiles for each kind of worker; none for a pipeline.
        workload: arrivals, for every model or at the pipeline's root.
        policies: name and arguments.
        duration_s, warmup_s, latency_noise: of each run, as in `simulate`.
        bad_rate: share of late or dropped requests that is allowed, of any model.
        accuracy_floor: mean over the requests in time, percent.
        seeds: the first searches, the others confirm.
        guess: where the search for a number of workers begins; by default the fluid limit.
        most: workers, or pools that are tried.
        types: of instances, each a kind of worker; none where all workers are alike.
        budget_per_hour: of a pool.
        pipeline: its `demand` and `workers` are filled in.
    """

    models: tuple[Model, ...]
    workload: Workload
    policies: tuple[Named, ...]
    duration_s: float
    warmup_s: float = 0.0
    latency_noise: float = 0.0
    delay: DispatchDelay = field(default_factory=DispatchDelay)
    bad_rate: float = 0.01
    accuracy_floor: float = 0.0
    seeds: tuple[int, ...] = (0, 1)
    guess: int | None = None
    most: int = 1000
    types: tuple[InstanceType, ...] = ()
    budget_per_hour: float | None = None
    pipeline: loki.Problem | None = None


@dataclass(frozen=True)
class Figures:
    """What the simulator predicts: the worst of the runs.

    Attributes:
        bad_rate: of the worst model.
        p99_s: latency of those that were answered; NaN if none was.
        busy: mean share of the time in which a worker runs a batch.
        accuracy: percent, of the requests in time; None where it is not known.
        models: bad rate and p99_s by model.
        variants: shares of the requests that were answered, of the first run.
    """

    bad_rate: float
    p99_s: float
    busy: float
    accuracy: float | None = None
    models: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    variants: Mapping[str, float] = field(default_factory=dict)

    def or_worse(self, other: Figures) -> Figures:
        """The worst of both."""
        known = [a for a in (self.accuracy, other.accuracy) if a is not None]
        return Figures(
            max(self.bad_rate, other.bad_rate),
            float(np.fmax(self.p99_s, other.p99_s)),
            max(self.busy, other.busy),
            min(known, default=None),
            {
                m: (max(a, other.models[m][0]), float(np.fmax(b, other.models[m][1])))
                for m, (a, b) in self.models.items()
            },
            self.variants,
        )


@dataclass(frozen=True)
class Answer:
    """One way to serve the load.

    Attributes:
        name: of the policy, or what kind of answer it is.
        counts: workers by kind, or by variant in a pipeline; None where nothing passed.
        figures: predicted for it; None where nothing was run.
        why: in words: limits, reasons, where it comes from.
        least: workers in the fluid limit: no policy does with fewer for long.
        cost_per_hour: of a pool.
        carries: requests per second that it sustains at the bad rate, where that was searched.
        probes: (number, bad rate) of every run, in order.
    """

    name: str
    counts: Mapping[str, int] | None
    figures: Figures | None
    why: str = ""
    least: int | None = None
    cost_per_hour: float | None = None
    carries: float | None = None
    probes: tuple[tuple[int, float], ...] = ()

    @property
    def workers(self) -> int | None:
        return None if self.counts is None else sum(self.counts.values())

    def to_json(self) -> dict[str, Any]:
        """Times in ms; NaN is null."""
        f = self.figures
        return {
            "name": self.name,
            "workers": self.workers,
            "counts": None if self.counts is None else dict(self.counts),
            "cost_per_hour": self.cost_per_hour,
            "bad_rate": f and f.bad_rate,
            "p99_ms": f and _ms(f.p99_s),
            "busy": f and f.busy,
            "accuracy": f and f.accuracy,
            "variants": dict(f.variants) if f else {},
            "models": {
                m: {"bad_rate": bad, "p99_ms": _ms(p99)}
                for m, (bad, p99) in (f.models if f else {}).items()
            },
            "fluid_limit": self.least,
            "carries_per_s": self.carries,
            "why": self.why,
            "probes": [list(p) for p in self.probes],
        }


def size(question: Question) -> list[Answer]:
    """Answers, in an order that depends on the question's form alone.

    Raises:
        ValueError: the question has no meaning, naming the field.
    """
    if question.pipeline is not None:
        return list(_pipeline(question, question.pipeline))
    answers = []
    for policy in question.policies:
        kinds = [t.name for t in question.types] or [_KIND]
        alone = [_workers(question, policy, kind) for kind in kinds]
        answers += alone
        if question.types:
            answers += _pools(question, policy, alone)
    return answers


# -- the search --------------------------------------------------------------------------------


class _Search:
    """Runs by (number, seed), each at most once."""

    def __init__(self, question: Question, run: Callable[[int, int], Figures | None]) -> None:
        self._question, self._run = question, run
        self._known: dict[tuple[int, int], Figures | None] = {}
        self.probes: list[tuple[int, float]] = []

    def figures(self, n: int, seed: int) -> Figures | None:
        """None: it cannot be run at all."""
        if (n, seed) not in self._known:
            found = self._known[n, seed] = self._run(n, seed)
            self.probes.append((n, 1.0 if found is None else found.bad_rate))
        return self._known[n, seed]

    def passes(self, n: int, seed: int) -> bool:
        found = self.figures(n, seed)
        if found is None or not found.bad_rate <= self._question.bad_rate:
            return False
        floor = self._question.accuracy_floor
        return not floor or (found.accuracy is not None and found.accuracy >= floor)

    def smallest(self, guess: int, most: int) -> int | None:
        """The smallest number from 1 to `most` that passes with every seed, as far as more is
        better."""
        first, *others = self._question.seeds
        low, high, step = 0, min(max(guess, 1), most), 1  # `low` does not pass
        if self.passes(high, first):
            while high - low > 1:
                n = max(high - step, 1)
                if not self.passes(n, first):
                    low = n
                    break
                high, step = n, 2 * step
        else:
            while not self.passes(high, first):
                if high == most:
                    return None
                low, high, step = high, min(high + step, most), 2 * step
        while high - low > 1:
            n = (low + high) // 2
            low, high = (low, n) if self.passes(n, first) else (n, high)
        for n in range(high, most + 1):
            if all(self.passes(n, seed) for seed in (first, *others)):
                return n
        return None

    def worst(self, n: int) -> Figures | None:
        """Over all seeds."""
        found: Figures | None = None
        for seed in self._question.seeds:
            if (one := self.figures(n, seed)) is None:
                return None
            found = one if found is None else found.or_worse(one)
        return found


# -- workers of one kind, and pools ------------------------------------------------------------


def _workers(question: Question, policy: Named, kind: str) -> Answer:
    """The fewest of one kind."""
    name = policy[0] if kind == _KIND else f"{policy[0]}, {kind} only"
    if why := _too_slow(question, kind):
        return Answer(name, None, None, why)
    least = _fluid_limit(question, kind)
    search = _Search(question, lambda n, seed: _run(question, policy, {kind: n}, seed))
    n = search.smallest(question.guess or least or _one_by_one(question, kind), question.most)
    probes = tuple(search.probes)
    if n is None:
        bad = min(bad for _, bad in probes)
        why = f"no number up to {question.most} passes; {bad:.2%} are bad at best"
        return Answer(name, None, None, why, least, probes=probes)
    cost = _cost(question, {kind: n})
    return Answer(name, {kind: n}, search.worst(n), "", least, cost, probes=probes)


def _pools(question: Question, policy: Named, alone: Sequence[Answer]) -> Iterator[Answer]:
    """The cheapest of several types, and the one for the budget."""
    if len(question.models) != 1:
        raise ValueError(
            f"cluster.models: a pool is planned for one model, got {len(question.models)}"
        )
    if question.workload.sizes is not None and len(question.models[0].variants) != 1:
        raise ValueError("cluster.models: with request sizes, a pool is planned for one variant")
    budget = question.budget_per_hour
    name = f"{policy[0]}, cheapest pool"
    costs = [(a.cost_per_hour, a) for a in alone if a.cost_per_hour is not None]
    if not costs:
        yield Answer(name, None, None, "no type carries the load alone, so none serves all sizes")
    else:
        most, best = min(costs, key=lambda pair: pair[0])
        found = replace(_cheapest(question, policy, best, most), name=name)
        if budget is not None and (found.cost_per_hour or 0.0) > budget + 1e-9:
            found = replace(found, why=f"above the budget of {budget:g} per hour; {found.why}")
        yield found
    if budget is not None:
        yield _for_budget(question, policy, budget)


def _cheapest(question: Question, policy: Named, alone: Answer, most: float) -> Answer:
    """The cheapest pool that passes; `alone`, which costs `most`, where none is cheaper."""
    names = [t.name for t in question.types]
    prices = np.array([t.price_per_hour for t in question.types])
    try:
        counts = kairos.configurations(prices, most, _CONFIGURATIONS)
    except ValueError:
        why = f"{alone.name}: more than {_CONFIGURATIONS:,} mixed pools cost at most {most:.4g}"
        return replace(alone, why=f"{why}; size a part of the load to compare them")
    counts = counts[counts.sum(axis=1) > 0]
    cost, bounds = counts @ prices, _bounds(question, counts, most)
    may = (bounds >= (1 - question.bad_rate) * question.workload.rate) & (cost < most - 1e-9)
    counts, cost, bounds = counts[may], cost[may], bounds[may]
    order = np.lexsort((-bounds, cost))
    rising = np.maximum.accumulate(bounds[order])
    # A pool whose bound is no higher than a cheaper one's is left out.
    order = order[np.diff(rising, prepend=-math.inf) > 0]
    pools = [{k: int(n) for k, n in zip(names, row, strict=True) if n} for row in counts[order]]
    search = _Search(question, lambda i, seed: _run(question, policy, pools[i - 1], seed))
    guess = int(np.searchsorted(bounds[order] * _ATTAINED, question.workload.rate)) + 1
    found = search.smallest(guess, min(len(pools), question.most)) if pools else None
    if found is None:
        return replace(alone, why=f"{alone.name}: no mixed pool that was tried is cheaper")
    at = order[found - 1]
    return Answer(
        "",
        pools[found - 1],
        search.worst(found),
        f"{1 - cost[at] / most:.1%} less than {alone.name}; {len(counts)} pools cost less and may "
        f"carry the load by their bounds, this one at most {bounds[at]:.4g}/s",
        cost_per_hour=float(cost[at]),
        probes=tuple(search.probes),
    )


def _for_budget(question: Question, policy: Named, budget: float) -> Answer:
    """What carries most under the budget: how much that is, and what it does at the load."""
    name = f"{policy[0]}, most for the budget"

    def carries(counts: Mapping[str, int]) -> float:
        found = goodput_search(
            lambda: make_policy(*policy),
            _cluster(question, counts),
            question.workload,
            duration_s=question.duration_s,
            warmup_s=question.warmup_s,
            bad_rate=question.bad_rate,
            tolerance=0.02,
            growth=1.25,
            seed=question.seeds[0],
            latency_noise=question.latency_noise,
        )
        return found.rate

    counts: dict[str, int]
    if question.workload.sizes is not None:
        # As the planner `kairos_plus` does.
        best = kairos.search(
            _problem(question, budget), carries, margin=0.01, max_evaluations=_EVALUATIONS
        )
        if isinstance(best, Infeasible):
            return Answer(name, None, None, best.reason)
        counts, most = best.counts, best.throughput
        why = f"the most of the pools that were simulated, {len(best.evaluated)} of {best.space}"
    else:
        prices = np.array([t.price_per_hour for t in question.types])
        rows = kairos.configurations(prices, budget)
        bounds = _bounds(question, rows, budget)
        if bounds.max() <= 0:
            return Answer(name, None, None, "nothing within the budget meets the SLO")
        row = rows[int(np.lexsort((rows @ prices, -bounds))[0])]
        counts = {t.name: int(n) for t, n in zip(question.types, row, strict=True) if n}
        most, why = carries(counts), f"the highest upper bound, {bounds.max():.4g}/s"
    search = _Search(question, lambda _, seed: _run(question, policy, counts, seed))
    figures, cost = search.worst(1), _cost(question, counts)
    why = f"budget {budget:g} per hour; {why}"
    return Answer(name, counts, figures, why, None, cost, most)


def _sizes(question: Question) -> kairos.Ints:
    """A sample of the requests' sizes, quantiles."""
    if question.workload.sizes is None:
        return np.ones(1, dtype=np.int64)
    return question.workload.sizes.quantiles((np.arange(_SIZES) + 0.5) / _SIZES)


def _problem(question: Question, budget: float) -> kairos.Problem:
    (model,) = question.models
    profiles = model.variants[0].profiles
    if missing := [t.name for t in question.types if t.name not in profiles]:
        raise ValueError(f"cluster.models: {model.name} has no profile for {', '.join(missing)}")
    return kairos.Problem(question.types, profiles, model.latency_slo_s, _sizes(question), budget)


def _bounds(question: Question, counts: kairos.Ints, budget: float) -> kairos.Floats:
    """Requests per second that each row can serve at most."""
    if question.workload.sizes is not None:
        return kairos.fluid_bounds(_problem(question, budget), counts)
    (model,) = question.models
    each = []
    for kind in question.types:
        rates = [0.0]
        for variant in model.variants:
            if profile := variant.profiles.get(kind.name):
                most = profile.max_batch_within(model.latency_slo_s)
                rates += [profile.throughput(b) for b in range(1, most + 1)]
        each.append(max(rates))
    return np.asarray(counts @ np.array(each))


def _cost(question: Question, counts: Mapping[str, int]) -> float | None:
    prices = {t.name: t.price_per_hour for t in question.types}
    return sum(prices[k] * n for k, n in counts.items()) if prices else None


def _too_slow(question: Question, kind: str) -> str:
    """Why no number of workers of a kind passes; "" if there is no such reason."""
    sizes = _sizes(question)
    for model in question.models:
        known = [v.profiles[kind] for v in model.variants if kind in v.profiles]
        if not known:
            return f"{model.name} has no profile for {kind}"
        left_s = model.latency_slo_s - question.delay(1)
        most = max(profile.max_batch_within(left_s) for profile in known)
        lost = float(np.mean(sizes > most))
        if lost > question.bad_rate and not question.workload.slo_mix:
            limit = f"longer than the SLO of {1e3 * model.latency_slo_s:.4g} ms allows"
            if question.workload.sizes is not None:
                return f"{model.name}: {lost:.1%} of the requests take {kind} {limit}"
            least = min(profile.latency(1) for profile in known)
            return f"{model.name}: a batch of one takes {1e3 * least:.4g} ms, {limit}"
    return ""


def _fluid_limit(question: Question, kind: str) -> int | None:
    """Workers without which no policy serves the load for long; None with sizes."""
    if question.workload.sizes is not None:
        return None
    rng = np.random.default_rng(question.seeds[0])
    cluster = _cluster(question, {kind: 1})
    requests = question.workload.generate(cluster, question.duration_s, rng)
    counts = np.bincount(requests.model, minlength=len(question.models))
    share = (1 - question.bad_rate) / question.duration_s
    rates = {m.name: share * int(n) for m, n in zip(question.models, counts, strict=True)}
    models = [
        replace(m, variants=tuple(replace(v, accuracy=v.accuracy or 0.0) for v in m.variants))
        for m in question.models
    ]

    def enough(n: int) -> bool:
        found = fluid.solve(fluid.Problem(models, rates, {kind: n}))
        return found.feasible and not found.accuracy < question.accuracy_floor

    low, high = 0, 1
    while not enough(high):
        if high > question.most:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        n = (low + high) // 2
        low, high = (low, n) if enough(n) else (n, high)
    return high


def _one_by_one(question: Question, kind: str) -> int:
    """Workers that serve requests of all sizes one at a time, a guess."""
    model = question.models[0]
    profile = next(v.profiles[kind] for v in model.variants if kind in v.profiles)
    times = [profile.latency(min(s, profile.max_batch_size)) for s in _sizes(question).tolist()]
    return math.ceil(question.workload.rate * sum(times) / len(times))


def _cluster(question: Question, counts: Mapping[str, int]) -> Cluster:
    loaded = {
        kind: frozenset(v.name for m in question.models for v in m.variants if kind in v.profiles)
        for kind in counts
    }
    workers = [
        Worker(f"{kind}-{i}", kind, loaded[kind]) for kind, n in counts.items() for i in range(n)
    ]
    return Cluster.of(question.models, workers, question.delay)


def _run(question: Question, policy: Named, counts: Mapping[str, int], seed: int) -> Figures:
    report = simulate(
        make_policy(*policy),
        _cluster(question, counts),
        question.workload,
        duration_s=question.duration_s,
        warmup_s=question.warmup_s,
        latency_noise=question.latency_noise,
        seed=seed,
    )
    if not report.count():
        raise ValueError(
            f"workload: no request arrives in the {report.window_s:g} s that are measured; "
            "raise duration_s or the rate"
        )
    return Figures(
        report.worst_bad_rate,
        report.latency_s(99),
        1 - report.idle_fraction,
        report.accuracy,
        {m.name: (report.bad_rate(m.name), report.latency_s(99, m.name)) for m in question.models},
        _shares(report) if any(len(m.variants) > 1 for m in question.models) else {},
    )


def _shares(report: Report) -> dict[str, float]:
    """Of the requests that were answered, by variant."""
    batches = report.batches
    done = batches[batches.status == "finished"]
    requests = done.groupby("variant", observed=True)["size"].sum().sort_values(ascending=False)
    return {str(v): float(n) for v, n in (requests / requests.sum()).items()}


# -- pipelines ---------------------------------------------------------------------------------


def _pipeline(question: Question, problem: loki.Problem) -> Iterator[Answer]:
    """The fewest workers with any variants, and with the most accurate alone."""
    best = tuple(
        replace(t, variants=tuple(v for v in t.variants if v.accuracy == _top(t)))
        for t in problem.tasks
    )
    for policy in question.policies:
        yield _stages(question, policy, problem, f"{policy[0]}, any variants")
        if best != problem.tasks:
            accurate = replace(problem, tasks=best)
            yield _stages(question, policy, accurate, f"{policy[0]}, most accurate variants")


def _top(task: loki.Task) -> float:
    return max(v.accuracy for v in task.variants)


def _stages(question: Question, policy: Named, problem: loki.Problem, name: str) -> Answer:
    demand, begin = question.workload.rate, question.warmup_s
    problem = replace(problem, demand=demand, accuracy_floor=question.accuracy_floor)
    plans: dict[int, loki.Plan | Infeasible[loki.Plan]] = {}

    def run(n: int, seed: int) -> Figures | None:
        if n not in plans:
            plans[n] = loki.plan(replace(problem, workers=n))
        made = plans[n]
        if isinstance(made, Infeasible):
            return None
        # A load that changes is planned for again and again, as it is in the application.
        stays = question.workload.length_s is None
        report = simulate_pipeline(
            replace(problem, workers=n),
            question.workload,
            planner=(lambda problem, last: made) if stays else loki.plan,
            policy=policy[0],
            policy_kwargs=policy[1],
            duration_s=question.duration_s,
            initial_demand=demand,
            latency_noise=question.latency_noise,
            seed=seed,
        )
        frames = report.requests
        taken = frames.latency_s[
            (frames.arrival_s >= begin) & frames.outcome.isin(["ok", "late"])
        ].to_numpy()
        return Figures(
            report.violation_ratio(begin),
            float(np.percentile(taken, 99)) if len(taken) else math.nan,
            report.busy(begin) / n,
            report.accuracy(begin),
        )

    search = _Search(question, run)
    n = search.smallest(question.guess or len(problem.tasks), question.most)
    probes = tuple(search.probes)
    if n is None:
        made = plans[question.most]
        why = f"no number up to {question.most} passes"
        if isinstance(made, Infeasible):
            why = made.reason
        return Answer(name, None, None, why, probes=probes)
    made = plans[n]
    assert isinstance(made, loki.Plan)
    counts: dict[str, int] = {}
    for a in made.assignments:
        counts[a.variant] = counts.get(a.variant, 0) + a.workers
    return Answer(name, counts, search.worst(n), made.explanation, probes=probes)


# -- what if -----------------------------------------------------------------------------------

_CHANGES = {"load": "4800/s", "slo": "80ms", "latency": "1.2x", "budget": "3"}
_UNITS = {"load": "/s", "slo": "ms", "latency": "x", "budget": ""}
_VALUE = re.compile(r"(?P<sign>[+-]?)(?P<number>\d+(\.\d+)?)(?P<unit>%|x|ms|/s|)")


def what_if(question: Question, change: str) -> Question:
    """The question after a change: "load=+20%", "load=4800/s", "slo=80ms", "slo=-10%",
    "latency=1.2x" (of every profile), "budget=3"; several with commas.

    Raises:
        ValueError: it is no such change, naming it and the valid ones.
    """
    for part in change.split(","):
        key, _, text = (s.strip() for s in part.partition("="))
        if key not in _CHANGES:
            raise ValueError(
                f"what-if {part.strip()!r}: {key!r} must be one of {', '.join(_CHANGES)}, "
                "as in load=+20%"
            )
        question = _changed(question, key, text)
    return question


def _changed(question: Question, key: str, text: str) -> Question:
    found = _VALUE.fullmatch(text)
    unit = found["unit"] if found else None
    if found is None or unit not in ("%", "x", _UNITS[key]) or (unit == "%") != bool(found["sign"]):
        raise ValueError(
            f"what-if {key}={text}: wants a value like +20%, -10%, 1.5x or {_CHANGES[key]}"
        )
    number = float(found["number"])
    factor = None
    if unit == "%":
        factor = 1 + float(found["sign"] + found["number"]) / 100
    elif unit == "x":
        factor = number
    if not (factor if factor is not None else number) > 0:
        raise ValueError(f"what-if {key}={text}: nothing is left")
    if key == "load":
        rate = number if factor is None else factor * question.workload.rate
        return replace(question, workload=question.workload.at_rate(rate))
    if key == "budget":
        if question.budget_per_hour is None:
            raise ValueError(f"what-if {key}={text}: the spec has no pool.budget_per_hour")
        budget = number if factor is None else factor * question.budget_per_hour
        return replace(question, budget_per_hour=budget)
    if key == "latency":
        assert factor is not None
        return _slower(question, factor)
    return _other_slo(question, factor, number / 1e3, text)


def _slower(question: Question, factor: float) -> Question:
    models = tuple(
        replace(
            m,
            variants=tuple(
                replace(v, profiles={k: p.scaled(factor) for k, p in v.profiles.items()})
                for v in m.variants
            ),
        )
        for m in question.models
    )
    pipeline = question.pipeline
    if pipeline is not None:
        tasks = tuple(
            replace(
                t,
                variants=tuple(replace(v, profile=v.profile.scaled(factor)) for v in t.variants),
            )
            for t in pipeline.tasks
        )
        pipeline = replace(pipeline, tasks=tasks)
    return replace(question, models=models, pipeline=pipeline)


def _other_slo(question: Question, factor: float | None, slo_s: float, text: str) -> Question:
    def other(now_s: float) -> float:
        return slo_s if factor is None else factor * now_s

    workload = question.workload
    if workload.slo_mix:
        if factor is None:
            raise ValueError(f"what-if slo={text}: the workload has an slo_mix; give a percentage")
        mix = [s.model_copy(update={"slo_ms": factor * s.slo_ms}) for s in workload.slo_mix]
        workload = workload.model_copy(update={"slo_mix": mix})
    pipeline = question.pipeline
    return replace(
        question,
        workload=workload,
        models=tuple(replace(m, latency_slo_s=other(m.latency_slo_s)) for m in question.models),
        pipeline=pipeline and replace(pipeline, slo_s=other(pipeline.slo_s)),
    )


# -- the question as a document ------------------------------------------------------------------


class _Document(Strict):
    model_config = ConfigDict(frozen=True)


class PoolSpec(_Document):
    """Instance types to choose from, by name: of the built-in catalogue, or of a file of types.

    Attributes:
        types: their names.
        catalogue: file of further types, relative to the document's folder.
        budget_per_hour: also show what carries most under it.
    """

    types: list[str] = Field(min_length=1)
    catalogue: Path | None = None
    budget_per_hour: PositiveFloat | None = None

    def build(self, base: Path) -> tuple[InstanceType, ...]:
        """Raises ValueError where the catalogue has no such type."""
        known = dict(CATALOGUE)
        if self.catalogue is not None:
            known |= load_catalogue(base / self.catalogue)
        for name in self.types:
            if name not in known:
                raise ValueError(f"pool.types: {name!r} must be one of {', '.join(known)}")
        if len(set(self.types)) < len(self.types):
            raise ValueError(f"pool.types must be different, got {', '.join(self.types)}")
        return tuple(known[name] for name in self.types)


class StageVariantSpec(_Document):
    """A network of a task.

    Attributes:
        accuracy: percent.
        profile: its latency profile.
        factors: requests that it makes per request, by child task.
    """

    accuracy: float = Field(ge=0, le=100)
    profile: ProfileSpec
    factors: dict[str, NonNegativeFloat] = Field(default_factory=dict)


class StageSpec(_Document):
    """A task of a pipeline; the root has no parent.

    Attributes:
        variants: by name.
        parent: the task that makes its requests.
    """

    variants: dict[str, StageVariantSpec] = Field(min_length=1)
    parent: str | None = None


class PipelineSpec(_Document):
    """A tree of tasks under one SLO, as `loki.Problem` has it.

    Attributes:
        latency_slo_ms: end to end.
        tasks: by name.
        batch_sizes: that may be configured.
        communication_ms: between two tasks.
        waiting_factor: time at a task, in executions of a batch, waiting included.
        headroom_quantile: of Poisson arrivals at the rate, planned for.
    """

    latency_slo_ms: PositiveFloat
    tasks: dict[str, StageSpec] = Field(min_length=1)
    batch_sizes: list[PositiveInt] = Field([1, 2, 4, 8, 16, 32])
    communication_ms: NonNegativeFloat = 0.0
    waiting_factor: float = Field(2.0, ge=1)
    headroom_quantile: float | None = Field(0.95, gt=0, lt=1)

    def build(self, base: Path) -> loki.Problem:
        """With a demand and a number of workers still to be filled in."""
        tasks = tuple(
            loki.Task(
                name,
                tuple(
                    loki.Variant(v, s.accuracy, s.profile.build(v, base), s.factors)
                    for v, s in task.variants.items()
                ),
                task.parent,
            )
            for name, task in self.tasks.items()
        )
        return loki.Problem(
            tasks,
            demand=0.0,
            workers=1,
            slo_s=self.latency_slo_ms / 1e3,
            batch_sizes=tuple(self.batch_sizes),
            waiting_factor=self.waiting_factor,
            communication_s=self.communication_ms / 1e3,
            headroom_quantile=self.headroom_quantile,
        )


class PlanSpec(_Document):
    """A question in YAML. What it shares with `SimulationSpec` is written as there.

    Attributes:
        cluster: models and delay; `workers`, if given, is where the search begins.
        pipeline: instead of a cluster.
        workload: what arrives when.
        policies: to compare; by default `policy`: deferred, for models with variants price,
            for a pool kairos, for a pipeline pipeline.
        policy: the only one.
        pool: instance types, where the cheapest mix of them is wanted.
        bad_rate: share of bad requests that each model may have.
        accuracy_floor: percent; of the requests in time, on average.
        duration_s, warmup_s, seed, latency_noise: of each simulation.
        confirm_seeds: have to pass, too.
        max_workers: the search ends there.
    """

    cluster: ClusterSpec | None = None
    pipeline: PipelineSpec | None = None
    workload: Workload
    policy: PolicySpec | None = None
    policies: list[PolicySpec | str] = Field(default_factory=list)
    pool: PoolSpec | None = None
    bad_rate: float = Field(0.01, ge=0, lt=1)
    accuracy_floor: float = Field(0.0, ge=0, le=100)
    duration_s: PositiveFloat | None = None
    warmup_s: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    confirm_seeds: list[NonNegativeInt] = Field([1])
    latency_noise: NonNegativeFloat = 0.0
    max_workers: PositiveInt = 1000

    @model_validator(mode="after")
    def _check(self) -> PlanSpec:
        if (self.cluster is None) == (self.pipeline is None):
            raise ValueError("give either cluster or pipeline")
        if self.pipeline is not None and self.pool is not None:
            raise ValueError("pool: a pipeline's workers are of one kind; leave pool out")
        if self.policy is not None and self.policies:
            raise ValueError("give either policy or policies")
        if self.duration_s is None and self.workload.length_s is None:
            raise ValueError("duration_s is needed: the workload's arrivals go on for ever")
        if self.cluster is not None and not isinstance(self.cluster.workers, int):
            raise ValueError("cluster.workers: give one number; unlike machines go into pool.types")
        return self

    def build(self, base: str | Path = ".") -> Question:
        """The question; files are relative to `base`.

        Raises:
            ValueError, OSError: naming the field or the file.
        """
        base = Path(base)
        types = self.pool.build(base) if self.pool else ()
        usual = "pipeline" if self.pipeline else "kairos" if self.pool else "deferred"
        if self.cluster is not None and usual == "deferred":
            usual = self.cluster.usual_policy
        given = self.policies or [self.policy or usual]
        specs = [PolicySpec(name=p) if isinstance(p, str) else p for p in given]
        policies = [(p.name or usual, p.kwargs) for p in specs]
        if self.pipeline is None:  # else it is told of the pipeline, too
            assert self.cluster is not None
            for name, kwargs in policies:
                make_policy(name, kwargs)
                if self.workload.sizes is not None:
                    refuse_sizes(name, kwargs)
                self.cluster.refuse_variants(name, kwargs)
        cluster = self.cluster
        kinds = [t.name for t in types] or [_KIND]
        duration_s = self.duration_s or self.workload.length_s
        assert duration_s is not None
        guess = None
        if cluster is not None and "workers" in cluster.model_fields_set and not types:
            assert isinstance(cluster.workers, int)
            guess = cluster.workers
        return Question(
            models=tuple(m.build(n, kinds, base) for n, m in cluster.models.items())
            if cluster
            else (),
            workload=self.workload,
            policies=tuple(policies),
            duration_s=duration_s,
            warmup_s=self.warmup_s,
            latency_noise=self.latency_noise,
            delay=cluster.delay.build() if cluster else DispatchDelay(),
            bad_rate=self.bad_rate,
            accuracy_floor=self.accuracy_floor,
            seeds=(self.seed, *(s for s in self.confirm_seeds if s != self.seed)),
            guess=guess,
            most=self.max_workers,
            types=types,
            budget_per_hour=self.pool.budget_per_hour if self.pool else None,
            pipeline=self.pipeline.build(base) if self.pipeline else None,
        )


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else 1e3 * seconds
