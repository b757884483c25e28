"""Kairos on latencies measured here: two recommenders and a text network, one and two threads.

Unlike those of `zoos/kairos_ec2.csv`, these latencies are measured. `kairos/latencies.py` says how.
A kind of worker has one or two threads of torch. A thread costs $0.108/h, a quarter of c5n.2xlarge,
which has four cores. The budget is $2.5/h. Pools are (two threads, one thread). Requests of
BERT-tiny are a quarter as large as those of the recommenders, at most 250 texts of 16 tokens. The
SLO is 1.25 or 2 times the latency of the largest request on two threads. So one thread serves all
but the largest requests, or all of them.

*Median* and *p95* are CPU times of the busiest thread. *Least elapsed* also contains the time that
other programs took. Throughputs are simulated with the medians. They are relative to the best pool
of one kind, scaled up to the budget. *Kairos* has the planner's choice without trying it. Peers
have the best of the pools to which the budget allows no addition, and DRS the best of three
thresholds. *Kairos, best* is the best of these pools for Kairos' policy. *Rank* is its place in the
order of a bound among all pools, and the rank correlation (Spearman) is over those tried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.harness.rows import Row
from benchmarks.kairos import systems
from benchmarks.kairos.latencies import LARGEST, Samples, measure, sizes
from benchmarks.kairos.systems import KAIROS, PRINTED, Policy
from ray_slo.core import Cluster, LatencyProfile, Model, Variant, Worker
from ray_slo.papers import kairos
from ray_slo.papers.kairos import Configuration
from ray_slo.planning.catalogue import CATALOGUE, InstanceType
from ray_slo.simulation import LogNormal

SOURCE = "Kairos Figures 8, 9 and 13"
ASKED = [
    (
        "throughput,* · Kairos (*",
        "over homogeneous",
        "≥",
        1.25,
        "a thread costs the same in both kinds, so a mix saves only what a second one loses",
    ),
    (
        "ranking*",
        "rank of the best by Eq. 15",
        "≤",
        10,
        "with an SLO that one thread always meets, the best pool has no base worker",
    ),
]
_CORE = CATALOGUE["c5n.2xlarge"].price_per_hour / 4
BASE = "2 threads"
TYPES = (
    InstanceType(name=BASE, price_per_hour=2 * _CORE),
    InstanceType(name="1 thread", price_per_hour=_CORE),
)
FACTORS = (1.25, 2.0)
ROUNDS = 12
Floats = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case(systems.Case):
    """A measured network; `slo_factor` is relative to its largest request on two threads."""

    latencies: Mapping[str, LatencyProfile] = field(default_factory=dict)

    @property
    def slo_s(self) -> float:
        return self.slo_factor * self.latencies[BASE].latency(LARGEST[self.model])

    def profiles(self) -> dict[str, LatencyProfile]:
        return dict(self.latencies)

    def problem(self, **kwargs: Any) -> kairos.Market:
        recent = self.sizes.quantiles((np.arange(2000) + 0.5) / 2000)
        return kairos.Market(
            TYPES, self.profiles(), self.slo_s, recent, self.budget, base=BASE, **kwargs
        )

    def cluster(self, counts: Configuration, guess: float = 1.0) -> Cluster:
        model = Model(self.model, self.slo_s, (Variant(self.model, self.profiles()),))
        loaded = frozenset({self.model})
        kinds = [t.name for t in TYPES for _ in range(counts.get(t.name, 0))]
        return Cluster.of([model], [Worker(f"{k}-{i}", k, loaded) for i, k in enumerate(kinds)])


def run(quick: bool, seed: int) -> list[Row]:
    networks = ["Wide & Deep"] if quick else list(LARGEST)
    samples = measure(networks, 2 if quick else ROUNDS)
    rows = latency_rows(samples)
    how = {"requests": 500 if quick else 2000, "tolerance": 0.05 if quick else 0.01, "seed": seed}
    for network, factor in product(networks, FACTORS[:1] if quick else FACTORS):
        rows += compared(case_of(network, factor, samples), how)
    return rows


def latency_rows(samples: Mapping[tuple[str, int, int], Samples]) -> list[Row]:
    rows = []
    for network, threads in dict.fromkeys((n, t) for n, t, _ in samples):
        of = {size: samples[network, threads, size] for size in sizes(network)}
        for name, value in (
            ("median", lambda s: s.ms(0.5)),
            ("p95", lambda s: s.ms(0.95)),
            ("least elapsed", lambda s: 1e3 * min(s.wall_s)),
        ):
            label = f"latency by size, {network} · {threads} thread{'s'[: threads - 1]}, {name}"
            rows += [Row(label, str(size), "ms", value(s)) for size, s in of.items()]
    return rows


def case_of(network: str, factor: float, samples: Mapping[tuple[str, int, int], Samples]) -> Case:
    """Return the case of a network with the median latencies and an SLO."""
    largest = LARGEST[network]
    profiles = {
        kind.name: LatencyProfile.from_points(
            {size: samples[network, n, size].ms(0.5) / 1e3 for size in sizes(network)}
        )
        for n, kind in ((2, TYPES[0]), (1, TYPES[1]))
    }
    median = systems.LOG_NORMAL.median * largest / systems.LOG_NORMAL.max_size
    spread = LogNormal(median=median, sigma=systems.LOG_NORMAL.sigma, max_size=largest)
    return Case(network, spread, slo_factor=factor, latencies=profiles)


def compared(case: Case, how: dict[str, Any]) -> list[Row]:
    """Return the throughputs of every scheme, and the ranks of the best pool by both bounds."""
    of = f"SLO {case.slo_factor:g} ×, {case.model}"
    reach = case.latencies["1 thread"].max_batch_within(case.slo_s)
    named, bounds = space(case)
    whole = [c for c in named if cost(c) + TYPES[1].price_per_hour > case.budget]
    rows = [
        Row(f"setting · {of}", "SLO", "ms", 1e3 * case.slo_s),
        Row(f"setting · {of}", "one thread serves up to", "items", float(reach)),
        Row(f"setting · {of}", "pools", "", float(len(named))),
    ]
    reached = [throughput(case, c, KAIROS, **how) for c in whole]
    best = int(np.argmax(reached))
    plan, paper = systems.planned(case.problem()), systems.planned(case.problem(), "paper")
    base, homogeneous = best_homogeneous(case, how)
    found = {
        "homogeneous, scaled": (base, homogeneous),
        "Ribbon": best_of(case, whole, peer("ribbon:Ribbon"), how),
        "CLKWRK": best_of(case, whole, peer("clkwrk:Clkwrk"), how),
        "DRS": max(
            (
                best_of(case, whole, peer("deeprecsys:DeepRecSys", threshold=t), how)
                for t in sorted({reach, reach * 3 // 4, reach // 2})
            ),
            key=lambda tried: tried[0],
        ),
        "Kairos, as in the paper": (throughput(case, paper.counts, PRINTED, **how), paper.counts),
        "Kairos": (throughput(case, plan.counts, KAIROS, **how), plan.counts),
        "Kairos, best": (reached[best], whole[best]),
        "largest fluid bound": (float(bounds["fluid"][0]), named[0]),
    }
    for name, (value, counts) in found.items():
        label = f"throughput, {of} · {name} {text(counts)}"
        rows += [
            Row(label, "throughput", "req/s", value),
            Row(label, "over homogeneous", "×", value / base),
        ]
    tried = [named.index(c) for c in whole]
    label = f"ranking · {of}, best {text(whole[best])} of {len(whole)}"
    for name, bound in bounds.items():
        rank = 1 + int(np.sum(bound > bound[tried[best]]))
        agreement = float(spearmanr(bound[tried], reached).statistic)
        rows += [
            Row(label, f"rank of the best by {name}", "", float(rank)),
            Row(label, f"correlation, {name}", "", agreement),
        ]
    return rows


def space(case: Case) -> tuple[list[Configuration], dict[str, Floats]]:
    """Return the pools in the budget with a bound, by falling fluid bound, and both bounds."""
    counts = kairos.configurations([t.price_per_hour for t in TYPES], case.budget)
    fluid = kairos.fluid_bounds(case.problem(), counts)
    counts = counts[np.argsort(-fluid, kind="stable")]
    counts = counts[: int(np.sum(fluid > 0))]
    named = [{t.name: int(n) for t, n in zip(TYPES, row, strict=True) if n} for row in counts]
    fluid, (printed, _) = (
        kairos.fluid_bounds(case.problem(), counts),
        kairos.paper_bounds(case.problem(), counts),
    )
    return named, {"fluid": fluid, "Eq. 15": printed}


def throughput(
    case: Case,
    counts: Configuration,
    policy: Policy,
    *,
    requests: int,
    tolerance: float,
    seed: int,
    above: float = 0.0,
) -> float:
    """Return the allowable throughput of a pool in requests/s by bisection; 0 if below `above`."""
    row = np.array([[counts.get(t.name, 0) for t in TYPES]])
    low, high = above, 1.02 * float(kairos.fluid_bounds(case.problem(), row)[0])
    if high <= low:
        return 0.0
    if above and not systems.sustains(case, counts, above, policy, requests=requests, seed=seed):
        return 0.0
    while high - low > tolerance * high:
        middle = (low + high) / 2
        if systems.sustains(case, counts, middle, policy, requests=requests, seed=seed):
            low = middle
        else:
            high = middle
    return low


def best_of(
    case: Case, pools: Sequence[Configuration], policy: Policy, how: dict[str, Any]
) -> tuple[float, Configuration]:
    """Return the best throughput of `policy` on any of the pools, and that pool."""
    best, chosen = 0.0, pools[0]
    for counts in pools:
        if value := throughput(case, counts, policy, **how, above=1.01 * best):
            best, chosen = value, counts
    return best, chosen


def best_homogeneous(case: Case, how: dict[str, Any]) -> tuple[float, Configuration]:
    """Return the throughput of the best pool of one kind, scaled up to the budget, and the pool."""
    best, chosen = 0.0, {BASE: 0}
    for kind in TYPES:
        counts = {kind.name: int(case.budget / kind.price_per_hour)}
        for policy in (KAIROS, peer("ribbon:Ribbon")):
            value = throughput(case, counts, policy, **how) * case.budget / cost(counts)
            if value > best:
                best, chosen = value, counts
    return best, chosen


def peer(name: str, **kwargs: Any) -> Policy:
    return f"benchmarks.peers.{name}", {"base": BASE, **kwargs}


def cost(counts: Configuration) -> float:
    return sum(t.price_per_hour * counts.get(t.name, 0) for t in TYPES)


def text(counts: Configuration) -> str:
    """Return the numbers of workers with two threads and with one."""
    return "(" + ", ".join(str(counts.get(t.name, 0)) for t in TYPES) + ")"
