"""Goodput over SLO, popularity and burstiness, every system.

20 models with the ResNet50 profile of Table 2 share 32 GPUs, all with the same SLO. They are
equally popular or Zipf 0.9. Arrivals are Poisson, or have Gamma gaps of shape 0.05. There are no
delays. Goodput is the largest total rate at which no model has more than 1 % of bad requests. The
paper prints no figures. It finds that deferral gains most where SLOs are tight, in all four setups.
It also finds that Nexus is bad with bursts, and that all systems do well with loose SLOs.

"Staggered bound" is that of one model on all 32 GPUs. With bursts, or with 20 models that share, no
system comes near it. Nexus plans with the rates of the previous period, and a period ends when the
measured window begins. For the first period, its rates are equal. `--quick` has one SLO and the
first and last setup, and leaves out Nexus with 8 frontends.
"""

from __future__ import annotations

from functools import partial

from benchmarks.harness.plots import plot_series
from benchmarks.harness.rows import Row, series
from benchmarks.own.deferred_objectives import RESNET, staggered_bound
from benchmarks.symphony.systems import SYSTEMS, System, alike, goodput
from ray_slo.core import Cluster
from ray_slo.simulation import Gamma, Poisson, Workload
from ray_slo.simulation.workloads import Zipf

SOURCE = "Symphony Figure 11"
GPUS, MODELS = 32, 20

SETUPS = {
    "equal, Poisson": (0.0, 1.0),
    "Zipf 0.9, Poisson": (0.9, 1.0),
    "equal, Gamma 0.05": (0.0, 0.05),
    "Zipf 0.9, Gamma 0.05": (0.9, 0.05),
}
"""By name: Zipf exponent of the popularity, and shape of the gaps."""


def cluster(slo_ms: float, gpus: int = GPUS) -> Cluster:
    """Return 20 ResNet50 with the same SLO on a number of GPUs."""
    return alike(RESNET.profile, slo_ms / 1e3, MODELS, gpus)


def systems(period_s: float) -> dict[str, System]:
    """Return the systems of every program, with a period for Nexus, and the paper's deferral."""
    chosen = {
        name: (policy, {**kwargs, "period_s": period_s} if name.startswith("Nexus") else kwargs)
        for name, (policy, kwargs) in SYSTEMS.items()
    }
    algorithm_1 = {"exact": True}
    return {**chosen, "deferred, as Algorithm 1": ("deferred", algorithm_1)}


def run(quick: bool, seed: int) -> list[Row]:
    rows: list[Row] = []
    slos = (20,) if quick else (15, 20, 30, 50, 100)
    period_s, measured_s = (0.4, 0.4) if quick else (1.5, 4.0)
    setups = list(SETUPS.items())[:: 3 if quick else 1]
    for setup, (zipf, shape) in setups:
        found: dict[str, dict[int, float]] = {}
        for slo in slos:
            _, bound = staggered_bound(RESNET.profile, slo / 1e3, GPUS)
            found.setdefault("staggered bound", {})[slo] = bound
            warmup_s = period_s + slo / 1e3
            workload = Workload(
                arrivals=Poisson(rate=bound) if shape == 1 else Gamma(rate=bound, shape=shape),
                popularity=Zipf(zipf=zipf),
            )
            for name, system in systems(period_s).items():
                if quick and name == "Nexus, 8 frontends":
                    continue
                found.setdefault(name, {})[slo] = goodput(
                    system,
                    cluster(slo),
                    workload,
                    start_rate=bound / (2 if slo < 50 else 1.3),
                    growth=1.5,
                    tolerance=0.05 if quick else 0.01,
                    warmup_s=warmup_s,
                    duration_s=warmup_s + measured_s,
                    seed=seed,
                ).rate
        title = f"{MODELS} ResNet50, {GPUS} GPUs, {setup}"
        rows += series(title, found, "goodput at {} ms", "req/s")
        peers = [rates for name, rates in found.items() if name in SYSTEMS and name != "deferred"]
        factors = {x: found["deferred"][x] / max(rates[x] for rates in peers) for x in slos}
        rows += series("deferred over best peer", {setup: factors}, "factor at {} ms", "×")
    return sorted(rows, key=lambda row: row.case.startswith("deferred over"))


plot = partial(plot_series, x_label="SLO (ms)")
