"""The price of a floor per model: `auto` in overload with `fairness` from 0 to 0.9.

Three models with the same rate and SLO (100 ms) share 8 workers. Their batches take 4 + b ms,
10 + 2·b ms and 20 + 6·b ms. In overload, a policy that maximises the number of answers in time
serves the heavy model least. Loads are shares of the workers' capacity at equal rates (workers
always busy with the largest batches within the SLO). *In time*: share of all requests. *Worst
model*: its share of requests in time, divided by the mean share of the models. `fairness` excludes
settings with a lower figure, if others reach it. *Price*: requests in time that the floor costs.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.policies import make_policy
from ray_slo.simulation import Workload, simulate

SOURCE = "ray-slo"
SLO_S, WORKERS = 0.1, 8
PROFILES = {
    "light": LatencyProfile.linear(0.001, 0.004),
    "medium": LatencyProfile.linear(0.002, 0.010),
    "heavy": LatencyProfile.linear(0.006, 0.020),
}
FLOORS = (0.0, 0.5, 0.7, 0.9)
LOADS = (0.8, 1.2, 1.6, 2.4)
SETTINGS = {
    **{f"auto, fairness {floor:g}": ("auto", {"fairness": floor}) for floor in FLOORS},
    "deferred": ("deferred", {}),
    "eager": ("eager", {}),
}


def capacity() -> float:
    """Return the capacity in requests per second, of all models together, at equal rates."""
    needs_s = 0.0
    for profile in PROFILES.values():
        batch = profile.max_batch_within(SLO_S)
        needs_s += profile(batch) / batch
    return WORKERS * len(PROFILES) / needs_s


def shares(name: str, load: float, seed: int, quick: bool) -> dict[str, float]:
    """Return the share of requests in time of each model."""
    policy, kwargs = SETTINGS[name]
    cluster = Cluster.uniform(
        [Model(m, SLO_S, (Variant(m, {"default": p}),)) for m, p in PROFILES.items()], WORKERS
    )
    warmup_s, measured_s = (2.0, 4.0) if quick else (5.0, 30.0)
    report = simulate(
        make_policy(policy, kwargs),
        cluster,
        Workload.poisson(load * capacity()),
        warmup_s=warmup_s,
        duration_s=warmup_s + measured_s,
        seed=seed,
    )
    return {m: 1 - report.bad_rate(m) for m in PROFILES}


def run(quick: bool, seed: int) -> list[Row]:
    rows = []
    for load in (1.6,) if quick else LOADS:
        found = {name: shares(name, load, seed, quick) for name in SETTINGS}
        free = sum(found["auto, fairness 0"].values())
        for name, share in found.items():
            case, mean = f"load {load:g} · {name}", sum(share.values()) / len(share)
            rows += [
                Row(case, "in time", "%", 100 * mean),
                Row(case, "worst model", "of mean", min(share.values()) / mean),
                Row(case, "price", "%", 100 * (1 - sum(share.values()) / free)),
                *(Row(case, m, "% in time", 100 * share[m]) for m in PROFILES),
            ]
    return rows
