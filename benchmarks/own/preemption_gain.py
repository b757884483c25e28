"""Deferred batching with preemption where it gains, compared with `deferred` and `flex`.

Deferred batching with preemption is `deferred_flex`. Two models of SHEPHERD's Table 4 share 4 GPUs.
There are no delays, and preemption itself costs nothing. At load 1, each model would keep half of
the GPUs busy in batches that take half its SLO. Goodput counts every request alike. So in overload,
all policies except `deferred` gain goodput at the cost of the more expensive model. A row therefore
has the bad rate of that model, too.
"""

from __future__ import annotations

from benchmarks.harness.rows import Row
from benchmarks.zoos import ZooModel
from ray_slo.core import Cluster
from ray_slo.simulation import Gamma, Poisson, Workload, simulate

SOURCE = "ray-slo"
GPUS = 4
LOADS = (0.6, 0.9, 1.5)


def rate_of(stream: ZooModel) -> float:
    """Return the requests per second of a stream at load 1."""
    model = stream.model()
    profile = model.variants[0].profiles["default"]
    return GPUS / 2 * profile.throughput(profile.max_batch_within(model.latency_slo_s / 2))


CASES = (
    (ZooModel("ResNet18", 0.22, 3.74, 90), ZooModel("ResNet269", 4.37, 74.20, 250)),
    (ZooModel("ResNet18", 0.22, 3.74, 25), ZooModel("ResNet269", 4.37, 74.20, 250)),
    (ZooModel("ResNet18", 0.22, 3.74, 50), ZooModel("ResNet50", 0.75, 7.96, 50)),
)


def run(quick: bool, seed: int) -> list[Row]:
    rows = []
    for streams in CASES:
        names = " + ".join(f"{s.name} ({s.slo_ms:g} ms)" for s in streams)
        cluster = Cluster.uniform([s.model() for s in streams], GPUS)
        for arrivals, shape in (("Poisson", None), ("Gamma(0.1)", 0.1)):
            for policy in ("deferred", "deferred_flex", "flex"):
                case = f"{names}, {arrivals} · {policy}"
                for load in LOADS:
                    processes = {
                        s.name: Gamma(rate=load * rate_of(s), shape=shape)
                        if shape
                        else Poisson(rate=load * rate_of(s))
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
                dear = streams[1].name
                bad = 100 * report.bad_rate(dear)
                rows.append(Row(case, f"bad {dear} {label}", "%", bad))
    return rows
