"""The systems and workloads of SHEPHERD §7.1, and code that the programs of this folder share.

Models. Table 4 has 17, of which the experiments used 13 without naming them. Here they are the 16
vision models. The 17th is BERT, with 41 ms per request in any batch. With streams dealt out round
robin, it would take more than half of the GPUs. Then 12 V100 could not even serve 3,000 requests/s,
at which, in the paper, all systems meet most deadlines.

Workloads. The paper used the Azure Functions trace, which is public (requests per minute of 46,000
streams). This repository has no copy. It uses as many synthetic streams with heavy-tailed rates
(`Population`), dealt out to the models round robin. "MAF-stable" is Poisson at the rates of each
interval. "MAF-bursty" is an MMPP per model: four times its mean rate for 0.5 s on average, then a
quarter of it for 2 s. The paper does not print its MMPP. Bursts of single streams would average
out, as a model has 3,000 of them. The minute of the trace, which is also the period of Nexus, is
shortened to `interval_s`. So runs of seconds have several intervals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.harness.rows import Row, series
from benchmarks.zoos import ZooModel, load
from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.policies import make_policy
from ray_slo.simulation import Burst, Population, Report, Trace, Workload, simulate

System = tuple[str, dict[str, Any]]

SHEPHERD: System = ("flex", {"exact": True})
WORKERS, SLO_MS = 12, 250.0
BURST = Burst(peak=4.0, burst_s=0.5, calm_s=2.0)
WORKLOADS: dict[str, Burst | None] = {"MAF-stable": None, "MAF-bursty": BURST}

# The paper's upper bounds (Figure 12): exit points slow execution down by 5 %, and a preemption
# takes 5 % of a batch, which is typically 80 ms here.
OVERHEAD, PREEMPT_DELAY_MS = 0.05, 4.0
OVERHEADS = "SHEPHERD, with overheads"


def systems(interval_s: float) -> dict[str, System]:
    """Return the policy and arguments of each system, by name.

    "SHEPHERD" is Algorithms 1 and 2 as printed. `flex`, not in the paper, gathers the largest
    feasible batch. Nexus "as planned" never grows a batch beyond its plan, as the papers describe
    it; "Nexus" does. Clockwork keeps no distance from the deadlines: SHEPHERD, which reimplemented
    it, has none either. `deferred` is not in the paper.
    """
    return {
        "SHEPHERD": SHEPHERD,
        OVERHEADS: ("flex", {"exact": True, "preempt_delay_ms": PREEMPT_DELAY_MS}),
        "flex": ("flex", {}),
        "Clockwork": ("benchmarks.peers:Clockwork", {"slo_buffer_ms": 0.0}),
        "Nexus": ("benchmarks.peers:Nexus", {"period_s": interval_s}),
        "Nexus, as planned": (
            "benchmarks.peers:Nexus",
            {"period_s": interval_s, "grow": False},
        ),
        "deferred": ("deferred", {}),
    }


def zoo(slo_ms: float = SLO_MS) -> list[ZooModel]:
    """Return the 16 vision models of Table 4."""
    return [replace(m, slo_ms=slo_ms) for m in load("shepherd_v100").values() if m.name != "BERT"]


def traces(
    models: Sequence[str],
    rate: float,
    intervals: int,
    interval_s: float,
    burst: Burst | None,
    population_seed: int = 0,
) -> dict[str, Trace]:
    """Return the arrivals of each model: in each interval, the sum of its streams' rates.

    Args:
        rate: mean rate of all streams together, in requests per second.
    """
    population = Population(rate=rate, population_seed=population_seed)
    stream_of = population.model_of(len(models))
    rates = np.array(
        [
            np.bincount(stream_of, population.interval_rates(i), len(models))
            for i in range(intervals)
        ]
    )
    rates *= rate / rates.sum(axis=1).mean()
    return {
        name: Trace(rates=rates[:, k].tolist(), interval_s=interval_s, burst=burst)
        for k, name in enumerate(models)
    }


def run_system(
    name: str,
    models: Sequence[ZooModel],
    workers: int,
    arrivals: Mapping[str, Trace],
    *,
    interval_s: float,
    seed: int,
) -> Report:
    """Run all intervals. The first is warm-up, because Nexus has not measured any rates in it."""
    policy, kwargs = systems(interval_s)[name]
    return simulate(
        make_policy(policy, kwargs),
        Cluster.uniform([_slower(m) if name == OVERHEADS else m.model() for m in models], workers),
        Workload(arrivals=dict(arrivals)),
        warmup_s=interval_s,
        seed=seed,
        preempt_delay_s=PREEMPT_DELAY_MS / 1e3 if name == OVERHEADS else 0.0,
    )


def _slower(zoo_model: ZooModel) -> Model:
    model = zoo_model.model()
    profile: LatencyProfile = model.variants[0].profiles["default"].scaled(1 + OVERHEAD)
    return replace(model, variants=(Variant(model.name, {"default": profile}),))


def compared(
    title: str,
    goodputs: Mapping[str, Mapping[float, float]],
    at: str,
    paper: Mapping[tuple[str, float], float],
) -> list[Row]:
    """Return the rows of the goodput of every system at every x, and of SHEPHERD over the others.

    Args:
        at: a format of x, such as "{}/s".
        paper: the paper's factors, by peer and x.
    """
    ours = goodputs["SHEPHERD"]
    factors = {
        name: {x: ours[x] / y if y else None for x, y in of_x.items()}
        for name, of_x in goodputs.items()
        if name != "SHEPHERD"
    }
    rows = series(title, goodputs, f"goodput at {at}", "req/s")
    return rows + series(f"{title}, SHEPHERD over", factors, f"factor at {at}", "×", paper)
