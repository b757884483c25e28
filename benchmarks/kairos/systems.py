"""Code that the Kairos programs share: models, pools, sizes, throughput of a pool, ORACLE.

Latencies are those of `zoos/kairos_ec2.csv`, a synthetic set with the paper's structure (see the
README there). So ratios between pools depend on that set as well as on the systems. Sizes are
log-normal with mean 144, near the 165 of DeepRecSys' default, or Gaussian with the same mean. They
are at most 1000.

*Allowable throughput*: the largest Poisson rate at which at most 1 % of the requests are late or
dropped (99th percentile within the SLO).
"""

from __future__ import annotations

import csv
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.deeprecsys import climb
from ray_slo.core import Cluster, LatencyProfile, Model, Variant, Worker
from ray_slo.core.trees import Tree
from ray_slo.papers import kairos
from ray_slo.papers.kairos import Configuration
from ray_slo.planning import auto
from ray_slo.planning.auto.sizes import classes_of, ends_of
from ray_slo.planning.catalogue import CATALOGUE, InstanceType
from ray_slo.planning.result import Infeasible
from ray_slo.policies import make_policy
from ray_slo.simulation import Gaussian, LogNormal, Report, Workload, goodput_search, simulate

MODELS = ("NCF", "RM2", "WND", "MT-WND", "DIEN")
TYPES: tuple[InstanceType, ...] = tuple(CATALOGUE.values())
BASE = "g4dn.xlarge"
BUDGET = 2.5
LOG_NORMAL = LogNormal(median=90, sigma=1.1)
GAUSSIAN = Gaussian(mean=144, std=72)
Distribution = LogNormal | Gaussian

Policy = tuple[str, dict[str, Any]]
KAIROS: Policy = ("kairos", {})
PRINTED: Policy = ("kairos", {"exact": True})
RIBBON: Policy = ("benchmarks.peers.ribbon:Ribbon", {"base": BASE})
CLKWRK: Policy = ("benchmarks.peers.clkwrk:Clkwrk", {})


def drs(threshold: int) -> Policy:
    return "benchmarks.peers.deeprecsys:DeepRecSys", {"base": BASE, "threshold": threshold}


@dataclass(frozen=True)
class Case:
    """A model with its sizes, its budget in dollars per hour, and a factor on its SLO."""

    model: str
    sizes: Distribution = LOG_NORMAL
    budget: float = BUDGET
    slo_factor: float = 1.0

    @property
    def slo_s(self) -> float:
        return zoo()[self.model][0] * self.slo_factor

    def profiles(self) -> dict[str, LatencyProfile]:
        return zoo()[self.model][1]

    def problem(self, **kwargs: Any) -> kairos.Market:
        """Return the planner's problem, with 2000 quantiles as recent sizes."""
        quantiles = (np.arange(2000) + 0.5) / 2000
        return kairos.Market(
            TYPES,
            self.profiles(),
            self.slo_s,
            self.sizes.quantiles(quantiles),
            self.budget,
            **kwargs,
        )

    def cluster(self, counts: Configuration, guess: float = 1.0) -> Cluster:
        """Return the pool, base instances first, with latencies multiplied by `guess`."""
        profiles = self.profiles()
        if guess != 1:
            profiles = {name: p.scaled(guess) for name, p in profiles.items()}
        model = Model(self.model, self.slo_s, (Variant(self.model, profiles),))
        loaded = frozenset({self.model})
        workers = [
            Worker(f"{t.name}-{i}", t.name, loaded)
            for t in TYPES
            for i in range(counts.get(t.name, 0))
        ]
        return Cluster.of([model], workers)

    def workload(self, rate: float) -> Workload:
        return Workload.poisson(rate, sizes=self.sizes)


@cache
def zoo() -> Mapping[str, tuple[float, dict[str, LatencyProfile]]]:
    """Return (SLO in seconds, profile by instance type) for each model."""
    read: dict[str, tuple[float, dict[str, LatencyProfile]]] = {}
    path = Path(__file__).parents[1] / "zoos" / "kairos_ec2.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            alpha, beta = float(row["alpha_ms"]) / 1e3, float(row["beta_ms"]) / 1e3
            _, profiles = read.setdefault(row["model"], (float(row["slo_ms"]) / 1e3, {}))
            profiles[row["instance"]] = LatencyProfile.linear(alpha, beta, 1000)
    return read


def planned(problem: kairos.Market, *how: Any) -> kairos.Rented:
    """Return the planner's choice; fails if there is none."""
    plan = kairos.plan(problem, *how)
    assert isinstance(plan, kairos.Rented)
    return plan


def planned_by_auto(
    case: Case, demand: float, variants: Sequence[Variant], kinds: Sequence[auto.Kind], **how: Any
) -> auto.Plan:
    """Return the plan of `auto` for a demand in requests/s, or its best effort. A worker has one
    variant. By default it runs one request at a time."""
    named = [auto.Variant(v.name, v.accuracy or 100.0, v.profiles) for v in variants]
    problem = auto.Problem(
        (auto.Model(case.model, tuple(named)),),
        (Tree.of_model(case.model, {"": case.problem().xi * case.slo_s}),),
        {case.model: auto.Demand(demand)},
        tuple(kinds),
        **{"sharing": False, "batch_sizes": (1,), "waiting_factor": 1.0, **how},
    )
    (model,) = problem.models
    counts = Counter(np.asarray(case.problem().sizes).tolist())
    sizes = classes_of(counts, ends_of(problem, model))
    made = auto.plan(replace(problem, models=(replace(model, sizes=sizes),)))
    return made.best_effort if isinstance(made, Infeasible) else made


def report_of(
    case: Case,
    demand: float,
    variants: Sequence[Variant],
    plan: auto.Plan,
    policy: Policy = KAIROS,
    *,
    requests: int,
    **simulate_kwargs: Any,
) -> Report:
    """Simulate the workers of a plan. Their ids are those of their kinds, with numbers."""
    numbers: Counter[str] = Counter()
    workers = []
    for slot in plan.slots:
        workers.append(
            Worker(f"{slot.kind}-{numbers[slot.kind]}", slot.kind, frozenset(slot.variants))
        )
        numbers[slot.kind] += 1
    duration = requests / demand
    return simulate(
        make_policy(*policy),
        Cluster.of([Model(case.model, case.slo_s, tuple(variants))], workers),
        case.workload(demand),
        duration_s=duration,
        warmup_s=0.05 * duration,
        **simulate_kwargs,
    )


def searched(
    problem: kairos.Market, evaluate: Callable[[Configuration], float], **how: Any
) -> kairos.Found:
    """Return the configuration that Kairos+ finds; fails if there is none."""
    found = kairos.search(problem, evaluate, **how)
    assert isinstance(found, kairos.Found)
    return found


def cost(counts: Configuration) -> float:
    return sum(CATALOGUE[name].price_per_hour * n for name, n in counts.items())


def bound(case: Case, counts: Configuration) -> float:
    """Return the fluid upper bound on the throughput of a pool, in requests per second."""
    row = np.array([[counts.get(t.name, 0) for t in TYPES]])
    return float(kairos.fluid_bounds(case.problem(), row)[0])


def throughput(
    case: Case,
    counts: Configuration,
    policy: Policy = KAIROS,
    *,
    requests: int = 4000,
    seed: int = 0,
    tolerance: float = 0.01,
    start: float = 0.8,
    guess: float = 1.0,
    **simulate_kwargs: Any,
) -> float:
    """Return the allowable throughput of a pool in requests/s; 0 if it cannot serve all sizes.

    Args:
        requests: approximate number of requests in a run.
        start: first rate that is tried, as a share of the fluid bound.
        guess: factor on the latencies that the policy is told; 1 is correct.
    """
    most = bound(case, counts)
    if most <= 0:
        return 0.0
    duration = requests / most
    found = goodput_search(
        lambda: make_policy(*policy),
        case.cluster(counts, guess),
        case.workload,
        duration_s=duration,
        warmup_s=0.05 * duration,
        start_rate=start * most,
        growth=1.2,
        tolerance=tolerance,
        max_probes=25,
        seed=seed,
        truth=case.cluster(counts),
        **simulate_kwargs,
    )
    return found.rate


def once_each(case: Case, **how: Any) -> Callable[[Configuration], float]:
    """Return a function for the throughput of a pool that remembers its results."""
    known: dict[str, float] = {}

    def found(counts: Configuration) -> float:
        key = repr(sorted(counts.items()))
        if key not in known:
            known[key] = throughput(case, counts, **how)
        return known[key]

    return found


def sustains(
    case: Case,
    counts: Configuration,
    rate: float,
    policy: Policy = KAIROS,
    *,
    requests: int = 4000,
    seed: int = 0,
) -> bool:
    """Tell whether a pool passes a run at `rate`.

    A short run comes first: with 5 % bad requests in it, as too small pools have, the pool fails.
    """
    for part, most_bad in ((1 / 8, 0.05), (1.0, 0.01)):
        duration = part * requests / rate
        report = simulate(
            make_policy(*policy),
            case.cluster(counts),
            case.workload(rate),
            duration_s=duration,
            warmup_s=0.05 * duration,
            seed=seed,
        )
        if report.bad_rate() > most_bad:
            return False
    return True


def homogeneous(
    case: Case, policies: Sequence[Policy] = (KAIROS, RIBBON), **kwargs: Any
) -> tuple[float, int]:
    """Return the throughput of the base instances that the budget pays for, and their number.

    The throughput is scaled up to the whole budget (§8.1), and is that of the best of `policies`.
    On equal instances, no order is better than first come, first served. But Kairos' policy drops
    early, so it is tried, too.
    """
    price = CATALOGUE[BASE].price_per_hour
    count = int(case.budget / price)
    pool = {BASE: count}
    best = max(throughput(case, pool, p, **kwargs) for p in policies)
    return best * case.budget / (count * price), count


def oracle(case: Case, counts: Configuration, requests: int = 2000) -> float:
    """Return ORACLE's throughput (§7) in requests per second.

    All requests are there from the start. A free base instance takes the largest request that is
    left. A free auxiliary one takes the smallest, if it can serve it in time.
    """
    sizes = np.sort(case.sizes.quantiles((np.arange(requests) + 0.5) / requests)).tolist()
    profiles, slo = case.profiles(), case.slo_s
    free = [(0.0, i, t.name) for t in TYPES for i in range(counts.get(t.name, 0))]
    heapify(free)
    low, high, end = 0, requests - 1, 0.0
    while low <= high and free:
        now, i, kind = free[0]
        size = sizes[high] if kind == BASE else sizes[low]
        time = profiles[kind].latency(size)
        if time > slo:  # an auxiliary instance has nothing left to do
            free[0] = free[-1]
            free.pop()
            heapify(free)
            continue
        high, low = (high - 1, low) if kind == BASE else (high, low + 1)
        end = max(end, now + time)
        heapreplace(free, (now + time, i, kind))
    return requests / end if low > high else 0.0


def best_oracle(case: Case, requests: int = 2000) -> tuple[float, Configuration]:
    """Return the best ORACLE throughput of any configuration in the budget, and that one."""
    problem = case.problem(xi=1.0)
    counts = kairos.configurations([t.price_per_hour for t in TYPES], case.budget)
    bounds = kairos.fluid_bounds(problem, counts)
    best, chosen = 0.0, {}
    for i in np.argsort(-bounds).tolist():
        # ORACLE exceeds the bound only by rounding in a finite sequence.
        if bounds[i] * 1.02 <= best:
            break
        named = {t.name: int(n) for t, n in zip(TYPES, counts[i], strict=True) if n}
        value = oracle(case, named, requests)
        if value > best:
            best, chosen = value, named
    return best, chosen


def space(case: Case) -> tuple[list[Configuration], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the configurations with a base instance in the budget, by falling fluid bound.

    Returns them as mappings and as rows of counts, and their bounds.
    """
    counts = kairos.configurations([t.price_per_hour for t in TYPES], case.budget)
    bounds = kairos.fluid_bounds(case.problem(), counts)
    order = np.argsort(-bounds, kind="stable")
    order = order[bounds[order] > 0]
    named = [
        {t.name: int(n) for t, n in zip(TYPES, row, strict=True) if n} for row in counts[order]
    ]
    return named, counts[order], bounds[order]


def maximal(case: Case) -> list[Configuration]:
    """Return those of `space` to which the budget allows no addition, as others serve less."""
    cheapest = min(t.price_per_hour for t in TYPES)
    return [c for c in space(case)[0] if cost(c) + cheapest > case.budget]


def best_of(
    case: Case, candidates: Sequence[Configuration], policy: Policy, **kwargs: Any
) -> tuple[float, Configuration]:
    """Return the best throughput of `policy` on any of `candidates`, and that candidate.

    A candidate is only searched if it passes a run at 1 % above the best so far.
    """
    best, chosen = 0.0, candidates[0]
    limits = {k: v for k, v in kwargs.items() if k in ("requests", "seed")}
    for counts in candidates:
        if best and not sustains(case, counts, 1.01 * best, policy, **limits):
            continue
        value = throughput(case, counts, policy, **kwargs)
        if value > best:
            best, chosen = value, counts
    return best, chosen


def drs_best(
    case: Case, candidates: Sequence[Configuration], **kwargs: Any
) -> tuple[float, Configuration, int]:
    """Return DeepRecSys' best result: a coarse choice of thresholds, then hill climbing."""
    slo, profiles = case.slo_s, case.profiles()
    reaches = [profiles[t.name].max_batch_within(slo) for t in TYPES[1:]]
    starts = sorted({*reaches, min(reaches) // 2, min(reaches) * 3 // 4})
    tried = [(*best_of(case, candidates, drs(t), **kwargs), t) for t in starts]
    value, chosen, threshold = max(tried, key=lambda found: found[0])
    threshold, value, _ = climb(
        lambda t: throughput(case, chosen, drs(t), **kwargs), 1000, threshold, 32
    )
    return value, chosen, threshold


def quickest_ms(
    repeats: int, act: Callable[..., Any], prepare: Callable[[], tuple[Any, ...]] = tuple
) -> float:
    """Return the shortest time of `act(*prepare())` in ms, without the preparation."""
    best_s = float("inf")
    for _ in range(repeats):
        prepared = prepare()
        began = time.perf_counter()
        act(*prepared)
        best_s = min(best_s, time.perf_counter() - began)
    return best_s * 1e3


def text(counts: Configuration) -> str:
    """Return a configuration as the paper writes it: (g4dn, c5n, r5n, t3)."""
    return "(" + ", ".join(str(counts.get(t.name, 0)) for t in TYPES) + ")"
