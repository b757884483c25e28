"""Find how many workers a load needs, and of which kinds: `size(question) -> list[Answer]`.

A number of workers *passes* if, in a simulated run at the load, no model's share of late or dropped
requests is above `bad_rate`, and the mean accuracy is at least `accuracy_floor`. Each answer is the
smallest number that passes. The search assumes that more workers are better. From a guess (the
fluid limit), the number grows or shrinks in doubling steps, and is then bisected. The result must
pass with the other seeds, too; otherwise one worker is added. The figures of an answer are the
worst over the seeds.

* *Workers*: the number of workers of one kind, for each policy and kind.
* *Pools*: a mix of instance types that is cheaper than the cheapest answer with one type. Each mix
  has an upper bound on its throughput: that of full batches, or `kairos.fluid_bounds` if requests
  have sizes and the policy serves each alone. A mix is a candidate only if its bound is higher than
  that of every cheaper one. The candidates are ordered by cost, and bisection finds the first that
  passes. With a budget, there is a second answer: the pool with the highest throughput within the
  budget.
* *Pipelines*: the number of workers for Loki's plan, with all variants and with only the most
  accurate ones.

Worked example: ℓ(b) = b + 5 ms, an SLO of 25 ms, 3600 requests/s. A batch of 20 takes 25 ms, so a
worker serves at most 800 requests/s. The fluid limit is 3600 / 800 = 4.5, so 5 workers. These would
have to run batches of 20 without a gap, of requests that have just arrived; `deferred` needs 6.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ray_slo.core.cluster import Cluster, Worker
from ray_slo.core.policy import Policy
from ray_slo.papers import kairos
from ray_slo.planning import auto
from ray_slo.planning.brains.auto import AutoBrain
from ray_slo.planning.brains.brain import Seen
from ray_slo.planning.result import Infeasible
from ray_slo.policies.registry import policy_for
from ray_slo.policies.shared import fluid
from ray_slo.simulation.application import auto_brain, simulate_application
from ray_slo.simulation.report import Report
from ray_slo.simulation.search import goodput_search
from ray_slo.simulation.simulator import simulate
from ray_slo.simulation.sizing.question import KIND, Answer, Figures, Named, Question

_SIZES = 2000  # number of quantiles of the request sizes in a pool's problem
_CONFIGURATIONS = 300_000  # largest number of configurations of a pool that are compared
_EVALUATIONS = 8  # largest number of pools that are simulated for a budget
_ATTAINED = 0.9  # the search begins at this share of a pool's bound


def size(question: Question) -> list[Answer]:
    """Return the answers to the question. Their order does not depend on the results of the runs.

    Raises:
        ValueError: the question is not valid. The message names the field.
    """
    if question.pipeline is not None:
        return list(_pipeline(question, question.pipeline))
    answers = []
    for policy in question.policies:
        kinds = [t.name for t in question.types] or [KIND]
        alone = [_workers(question, policy, kind) for kind in kinds]
        answers += alone
        if question.types:
            answers += _pools(question, policy, alone)
    return answers


# -- the search --------------------------------------------------------------------------------


class Search:
    """Search for the smallest number that passes. Each (number, seed) runs at most once."""

    def __init__(self, question: Question, run: Callable[[int, int], Figures | None]) -> None:
        self._question, self._run = question, run
        self._known: dict[tuple[int, int], Figures | None] = {}
        self.probes: list[tuple[int, float]] = []

    def figures(self, n: int, seed: int) -> Figures | None:
        """Return the figures of one run, or None if no run with this number is possible."""
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
        """Return the smallest number from 1 to `most` that passes with every seed, or None. This
        assumes that a larger number is never worse."""
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
        """The worst figures over all seeds."""
        found: Figures | None = None
        for seed in self._question.seeds:
            if (one := self.figures(n, seed)) is None:
                return None
            found = one if found is None else found.or_worse(one)
        return found


# -- workers of one kind, and pools ------------------------------------------------------------


def _workers(question: Question, policy: Named, kind: str) -> Answer:
    """The fewest workers of one kind."""
    name = policy[0] if kind == KIND else f"{policy[0]}, {kind} only"
    if why := _too_slow(question, kind):
        return Answer(name, None, None, why)
    least = _fluid_limit(question, kind)
    search = Search(question, lambda n, seed: predicted(question, policy, {kind: n}, seed))
    n = search.smallest(question.guess or least or _one_by_one(question, kind), question.most)
    probes = tuple(search.probes)
    if n is None:
        bad = min(bad for _, bad in probes)
        why = f"no number up to {question.most} passes; {bad:.2%} are bad at best"
        return Answer(name, None, None, why, least, probes=probes)
    cost = _cost(question, {kind: n})
    return Answer(name, {kind: n}, search.worst(n), "", least, cost, probes=probes)


def _pools(question: Question, policy: Named, alone: Sequence[Answer]) -> Iterator[Answer]:
    """The cheapest pool of several types, and the pool with the most throughput for the budget."""
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
    """Return the cheapest pool that passes. If no pool is cheaper than `alone`, which costs `most`,
    return `alone`."""
    names = [t.name for t in question.types]
    prices = np.array([t.price_per_hour for t in question.types])
    try:
        counts = kairos.configurations(prices, most, _CONFIGURATIONS)
    except ValueError:
        why = f"{alone.name}: more than {_CONFIGURATIONS:,} mixed pools cost at most {most:.4g}"
        return replace(alone, why=f"{why}; size a part of the load to compare them")
    counts = counts[counts.sum(axis=1) > 0]
    cost, bounds = counts @ prices, _bounds(question, policy, counts, most)
    may = (bounds >= (1 - question.bad_rate) * question.workload.rate) & (cost < most - 1e-9)
    counts, cost, bounds = counts[may], cost[may], bounds[may]
    order = np.lexsort((-bounds, cost))
    rising = np.maximum.accumulate(bounds[order])
    # A pool whose bound is no higher than a cheaper one's is left out.
    order = order[np.diff(rising, prepend=-math.inf) > 0]
    pools = [{k: int(n) for k, n in zip(names, row, strict=True) if n} for row in counts[order]]
    search = Search(question, lambda i, seed: predicted(question, policy, pools[i - 1], seed))
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
    """The pool with the most throughput for the budget, that throughput, and its figures at the
    load."""
    name = f"{policy[0]}, most for the budget"

    def carries(counts: Mapping[str, int]) -> float:
        found = goodput_search(
            lambda: _policy(question, policy),
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
    if _is_alone(question, policy):
        # As the planner `kairos_plus` does.
        best = kairos.search(
            _market(question, budget), carries, margin=0.01, max_evaluations=_EVALUATIONS
        )
        if isinstance(best, Infeasible):
            return Answer(name, None, None, best.reason)
        counts, most = best.counts, best.throughput
        why = f"the most of the pools that were simulated, {len(best.evaluated)} of {best.space}"
    else:
        prices = np.array([t.price_per_hour for t in question.types])
        rows = kairos.configurations(prices, budget)
        bounds = _bounds(question, policy, rows, budget)
        if bounds.max() <= 0:
            return Answer(name, None, None, "nothing within the budget meets the SLO")
        row = rows[int(np.lexsort((rows @ prices, -bounds))[0])]
        counts = {t.name: int(n) for t, n in zip(question.types, row, strict=True) if n}
        most, why = carries(counts), f"the highest upper bound, {bounds.max():.4g}/s"
    search = Search(question, lambda _, seed: predicted(question, policy, counts, seed))
    figures, cost = search.worst(1), _cost(question, counts)
    why = f"budget {budget:g} per hour; {why}"
    return Answer(name, counts, figures, why, None, cost, most)


def _sizes(question: Question) -> kairos.Ints:
    """Quantiles of the sizes of requests."""
    if question.workload.sizes is None:
        return np.ones(1, dtype=np.int64)
    return question.workload.sizes.quantiles((np.arange(_SIZES) + 0.5) / _SIZES)


def _market(question: Question, budget: float) -> kairos.Market:
    (model,) = question.models
    profiles = model.variants[0].profiles
    if missing := [t.name for t in question.types if t.name not in profiles]:
        raise ValueError(f"cluster.models: {model.name} has no profile for {', '.join(missing)}")
    return kairos.Market(question.types, profiles, model.latency_slo_s, _sizes(question), budget)


def _is_alone(question: Question, policy: Named) -> bool:
    """Return whether the policy makes no batches of several requests, as in the Kairos paper."""
    name, kwargs = policy
    return question.workload.sizes is not None and name == "kairos" and not kwargs.get("batch")


def _bounds(question: Question, policy: Named, counts: kairos.Ints, budget: float) -> kairos.Floats:
    """Return an upper bound on the requests per second that each configuration can serve, shape
    (configurations,).

    If requests share batches, it is the bound of full batches: items per second of all workers, by
    the mean size of the requests that must be served. It is 0 where too many are too large.
    """
    if _is_alone(question, policy):
        return kairos.fluid_bounds(_market(question, budget), counts)
    (model,) = question.models
    sizes = np.sort(_sizes(question))
    items_per_s, most = [], []
    for kind in question.types:
        known = [v.profiles[kind.name] for v in model.variants if kind.name in v.profiles]
        within = [profile.max_batch_within(model.latency_slo_s) for profile in known]
        rates = [
            p.throughput(b) for p, m in zip(known, within, strict=True) for b in range(1, m + 1)
        ]
        items_per_s.append(max(rates, default=0.0))
        most.append(max(within, default=0))
    served = sizes[: math.ceil((1 - question.bad_rate) * len(sizes))]
    bounds = counts @ np.array(items_per_s) / served.mean()
    largest = np.where(counts > 0, most, 0).max(axis=1, initial=0)
    return np.asarray(np.where(largest >= served[-1], bounds, 0.0))


def _cost(question: Question, counts: Mapping[str, int]) -> float | None:
    prices = {t.name: t.price_per_hour for t in question.types}
    return sum(prices[k] * n for k, n in counts.items()) if prices else None


def _too_slow(question: Question, kind: str) -> str:
    """Return the reason why no number of workers of a kind can pass, or "" if there is none."""
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
    """Return the least number of workers that can serve the load in the fluid limit. None if
    requests have sizes, or if even `most` workers are too few."""
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
    """Return a guess: the number of workers if each served one request at a time."""
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


def _policy(question: Question, policy: Named) -> Policy:
    return policy_for(*policy, variants={m.name: len(m.variants) for m in question.models})


def predicted(question: Question, policy: Named, counts: Mapping[str, int], seed: int) -> Figures:
    """Simulate one run with `counts` workers of each kind."""
    report = simulate(
        _policy(question, policy),
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
    """Each variant's share of the answered requests."""
    batches = report.batches
    done = batches[batches.status == "finished"]
    requests = done.groupby("variant", observed=True)["size"].sum().sort_values(ascending=False)
    return {str(v): float(n) for v, n in (requests / requests.sum()).items()}


# -- pipelines ---------------------------------------------------------------------------------


def _pipeline(question: Question, problem: auto.Problem) -> Iterator[Answer]:
    """The fewest workers with any variants, and with the most accurate alone."""
    best = auto.most_accurate(problem)
    for policy in question.policies:
        yield _stages(question, policy, problem, f"{policy[0]}, any variants")
        if best != problem:
            yield _stages(question, policy, best, f"{policy[0]}, most accurate variants")


class _Still(AutoBrain):
    """Keeps its first plan."""

    def due(self, now: float, seen: Seen) -> str:
        return super().due(now, seen) if self._solved is None else ""


def _stages(question: Question, policy: Named, problem: auto.Problem, name: str) -> Answer:
    rate, begin = question.workload.rate, question.warmup_s
    (root,) = problem.streams
    problem = replace(
        problem, demand={root: auto.Demand(rate)}, accuracy_floor=question.accuracy_floor
    )
    plans: dict[int, auto.Plan | Infeasible[auto.Plan]] = {}
    # Where the load changes, plan every period, as the application does.
    stays = question.workload.length_s is None

    def run(n: int, seed: int) -> Figures | None:
        asked = replace(problem, kinds=(auto.Kind(KIND, 1, n),))
        if n not in plans:
            plans[n] = auto.plan(asked)
        if isinstance(plans[n], Infeasible):
            return None
        report = simulate_application(
            asked,
            {root: question.workload},
            planner=partial(auto_brain, brain=_Still if stays else AutoBrain),
            policy=policy[0],
            policy_kwargs=policy[1],
            duration_s=question.duration_s,
            interval_s=2 * question.duration_s if stays else 10.0,
            latency_noise=question.latency_noise,
            seed=seed,
        )
        frames = report.requests
        taken = frames.latency_s[
            (frames.arrival_s >= begin) & frames.outcome.isin(["ok", "late"])
        ].to_numpy()
        return Figures(
            report.bad_rate(begin),
            float(np.percentile(taken, 99)) if len(taken) else math.nan,
            report.busy(begin) / n,
            report.accuracy(begin),
        )

    search = Search(question, run)
    n = search.smallest(question.guess or len(problem.models), question.most)
    probes = tuple(search.probes)
    if n is None:
        made = plans[question.most]
        why = f"no number up to {question.most} passes"
        if isinstance(made, Infeasible):
            why = made.reason
        return Answer(name, None, None, why, probes=probes)
    made = plans[n]
    assert isinstance(made, auto.Plan)
    counts = Counter(part.variant for slot in made.slots for part in slot.parts)
    return Answer(name, dict(counts), search.worst(n), made.explanation, probes=probes)
