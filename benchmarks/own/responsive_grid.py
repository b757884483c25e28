"""`responsive` compared with consolidate's goodput and eager's latency, over the grid.

The cases are a sample over the dimensions of Symphony's Table 1, which is the grid of
`symphony-fig7`. Its dimensions are the model, the number of models that share the workers, GPUs per
model, SLO, and burstiness (shape of Gamma gaps). One model on 8 workers comes first, three pools
with a strong batching effect last.

Goodput is the largest rate at which at most 1 % of the requests of any model are bad. It is found
for both objectives on the same arrivals. Latency is that of served requests, at a share of *eager's
own* goodput, on the same arrivals. A ratio of at most 1 is no worse than eager's. The rows have the
worst ratios over all loads. Quantiles of these short runs vary by a few percent.

The three pools with a strong batching effect were chosen because `responsive`, the default, loses
there. The first is that of Symphony's Figure 6 (a) at β = 15 ms. Their second table has the bad
requests of the worst model, in percent of its arrivals, at shares of a bound. The bound has all
GPUs busy in the largest batch with ℓ(b) ≤ SLO; no policy can exceed it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.rows import Row
from benchmarks.symphony.fig7 import MIXED, MODELS, Case, grid
from benchmarks.symphony.fig9 import upper_bound
from benchmarks.symphony.systems import run_at, search
from benchmarks.zoos import ZooModel
from ray_slo.core import Cluster
from ray_slo.policies import make_policy
from ray_slo.simulation import Gamma, Report, Workload, simulate

SOURCE = "Symphony Table 1"
ASKED = [
    (
        "responsive · *",
        "goodput over consolidate's",
        "≥",
        0.99,
        "where batching pays most, and in bursts, batches that do not wait cost capacity",
    )
]
LOADS = (0.1, 0.3, 0.5, 0.7)
SHARES = (0.60, 0.64, 0.68, 0.72, 0.76)
"""Loads of the second table, as shares of the bound."""
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "eager": ("eager", {}),
    "consolidate": ("deferred", {"objective": "consolidate"}),
    "responsive": ("deferred", {}),
}
# One model alone, at the extremes of Table 1 (batching effect, SLO, burstiness).
ALONE = [
    Case(model, 1, 8, slo, shape)
    for model, slo in (("DenseNet121", 30), ("ResNet50V2", 25), ("BERT", 40), ("VGG16", 50))
    for shape in (1.0, 0.1)
]


class Synthetic(NamedTuple):
    """Models with ℓ(b) = alpha_ms · b + beta_ms on a shared pool. Shape 1 is Poisson arrivals."""

    copies: int
    alpha_ms: float
    beta_ms: float
    slo_ms: float
    gpus: int
    shape: float = 1.0

    def __str__(self) -> str:
        return (
            f"{self.copies} models, α {self.alpha_ms:g} β {self.beta_ms:g} ms, "
            f"SLO {self.slo_ms:g} ms, {self.gpus} GPUs, Γ({self.shape:g})"
        )

    @property
    def models(self) -> list[ZooModel]:
        """The models, which differ only in their names."""
        return [
            ZooModel(f"m{i}", self.alpha_ms, self.beta_ms, self.slo_ms) for i in range(self.copies)
        ]


STRONG = [Synthetic(10, 1, 15, 46, 32), Synthetic(8, 1, 15, 46, 16), Synthetic(4, 2, 20, 80, 8)]


def measure(case: Case | Synthetic, quick: bool, seed: int) -> dict[str, float]:
    """Return the goodput ratios, and the worst latency ratios of `responsive` over eager."""
    models = case.models
    cluster = Cluster.uniform([m.model() for m in models], case.gpus)
    bound = upper_bound(models, case.gpus)
    longest_s = max(m.model().latency_slo_s for m in models)
    warmup_s = max(0.5 if quick else 1.5, 3 * longest_s)
    requests = max(20_000, 1000 * len(models)) * (0.25 if quick else 1)

    def report(policy: str, rate: float) -> Report:
        return simulate(
            make_policy(*POLICIES[policy]),
            cluster,
            Workload(arrivals=Gamma(rate=rate, shape=case.shape)),
            warmup_s=warmup_s,
            duration_s=warmup_s + requests / rate,
            seed=seed,
        )

    goodput = {
        name: search(
            lambda policy=policy: make_policy(*policy),  # type: ignore[misc]
            cluster,
            Workload(arrivals=Gamma(rate=bound, shape=case.shape)),
            start_rate=0.6 * bound,
            growth=1.4,
            tolerance=0.02 if quick else 0.005,
            warmup_s=warmup_s,
            duration_s=warmup_s + requests / bound,
            seed=seed,
        ).rate
        for name, policy in POLICIES.items()
    }
    found = {"goodput": goodput["responsive"] / (goodput["consolidate"] or np.nan)}
    found["over eager"] = goodput["responsive"] / (goodput["eager"] or np.nan)
    for p in (50, 99):
        found[f"p{p}"] = np.nan
    if goodput["eager"]:
        pairs = [
            [report(name, load * goodput["eager"]) for name in ("responsive", "eager")]
            for load in LOADS
        ]
        for p in (50, 99):
            found[f"p{p}"] = max(a.latency_s(p) / b.latency_s(p) for a, b in pairs)
    return found


def worst_bad(case: Case | Synthetic, quick: bool, seed: int) -> list[Row]:
    """Return the bad requests of the worst model under every policy, at shares of the bound."""
    models = case.models
    bound = upper_bound(models, case.gpus)
    warmup_s = 2.0
    requests = 15_000 if quick else 100_000
    return [
        Row(
            f"bad requests of the worst model, {case} · {name}",
            f"bad at {share:.0%} of the bound",
            "%",
            100
            * run_at(
                policy,
                Cluster.uniform([m.model() for m in models], case.gpus),
                Workload(arrivals=Gamma(rate=share * bound, shape=case.shape)),
                warmup_s=warmup_s,
                duration_s=warmup_s + requests / bound,
                seed=seed,
            ).worst_bad_rate,
        )
        for name, policy in POLICIES.items()
        for share in SHARES
    ]


def run(quick: bool, seed: int) -> list[Row]:
    rng = np.random.default_rng(seed)
    cases = grid()
    chosen: list[Case | Synthetic] = list(ALONE[:3] if quick else ALONE)
    for model in (MODELS[0],) if quick else (*MODELS, MIXED):
        of = [c for c in cases if c.model == model and c.gpus <= (16 if quick else 64)]
        chosen += [of[i] for i in rng.choice(len(of), 1 if quick else 3, replace=False)]
    strong = STRONG[:1] if quick else STRONG
    chosen += strong
    rows: list[Row] = []
    results = []
    for case in chosen:
        results.append(found := measure(case, quick, seed))
        label = f"responsive · {case}"
        rows += [
            Row(label, "goodput over consolidate's", "×", found["goodput"]),
            Row(label, "goodput over eager's", "×", found["over eager"]),
            Row(label, "worst p50 over eager's", "×", found["p50"]),
            Row(label, "worst p99 over eager's", "×", found["p99"]),
        ]
    for key, name, holds in (
        ("goodput", "goodput at least 0.99 of consolidate's", lambda v: v >= 0.99),
        ("p50", "p50 at most 1.01 of eager's", lambda v: v <= 1.01),
        ("p99", "p99 at most 1.01 of eager's", lambda v: v <= 1.01),
    ):
        values = np.array([found[key] for found in results])
        values = values[np.isfinite(values)]
        share = 100 * float(np.mean(holds(values))) if values.size else None
        rows.append(Row(f"{len(values)} cases · {name}", "holds", "% of cases", share))
    for synthetic in strong:
        rows += worst_bad(synthetic, quick, seed)
    return rows
