"""Deferred batching with preemption where it gains, beside `deferred` and `flex`.

The policy is `deferred_flex`. Two models of SHEPHERD's Table 4 on 4 GPUs, no delays, without
overheads of preemption. Load 1 would keep half of the GPUs busy with each model, in batches that
take half its SLO. Goodput counts every request alike, so in overload all three but `deferred` gain
it at the cost of the dearer model: its bad rate stands beside.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.harness.rows import Row
from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.simulation import Gamma, Poisson, Workload, simulate

SOURCE = "ray-slo"
GPUS = 4
LOADS = (0.6, 0.9, 1.5)


class Stream(NamedTuple):
    model: str
    alpha_ms: float
    beta_ms: float
    slo_ms: float

    @property
    def profile(self) -> LatencyProfile:
        return LatencyProfile.linear(self.alpha_ms / 1e3, self.beta_ms / 1e3)

    @property
    def rate(self) -> float:
        """At load 1, requests per second."""
        batch = self.profile.max_batch_within(self.slo_ms / 2e3)
        return GPUS / 2 * self.profile.throughput(batch)


CASES = (
    (Stream("ResNet18", 0.22, 3.74, 90), Stream("ResNet269", 4.37, 74.20, 250)),
    (Stream("ResNet18", 0.22, 3.74, 25), Stream("ResNet269", 4.37, 74.20, 250)),
    (Stream("ResNet18", 0.22, 3.74, 50), Stream("ResNet50", 0.75, 7.96, 50)),
)


def run(quick: bool, seed: int) -> list[Row]:
    rows = []
    for streams in CASES:
        names = " + ".join(f"{s.model} ({s.slo_ms:g} ms)" for s in streams)
        models = [
            Model(s.model, s.slo_ms / 1e3, (Variant(s.model, {"default": s.profile}),))
            for s in streams
        ]
        cluster = Cluster.uniform(models, GPUS)
        for arrivals, shape in (("Poisson", None), ("Gamma(0.1)", 0.1)):
            for policy in ("deferred", "deferred_flex", "flex"):
                case = f"{names}, {arrivals} · {policy}"
                for load in LOADS:
                    processes = {
                        s.model: Gamma(rate=load * s.rate, shape=shape)
                        if shape
                        else Poisson(rate=load * s.rate)
                        for s in streams
                    }
                    report = simulate(
                        policy,
                        cluster,
                        Workload(arrivals=processes),
                        duration_s=4 if quick else 32,
                        warmup_s=2,
                        seed=seed,
                    )
                    label = f"at load {load:g}"
                    rows.append(Row(case, f"goodput {label}", "req/s", report.goodput))
                dear = streams[1].model
                bad = 100 * report.bad_rate(dear)
                rows.append(Row(case, f"bad {dear} {label}", "%", bad))
    return rows
