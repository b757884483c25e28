"""10 models × 2 variants on 16 workers: the default and deferral on the fast variant alone.

Every model has a fast variant (6 + b ms, 70 %) and a good one (15 + 3·b ms, 80 %). All 16 workers
have all variants. The SLO is 100 ms. Loads are shares of the fast variants' capacity (all workers
busy in the most efficient batches within the SLO). The *fluid limit* is the most accurate mix at a
load that leaves no request unserved, as far as that is possible. No policy can do better.

A choice of variants should never be worse than the fast variant alone. It should have no more bad
requests, and as much more accuracy as the load leaves time for.

`deferred` with both variants is `deferred` composed with a choice of variants
(`policies/composed.py`). The summary has the differences that should be zero or less. *Bad beyond
deferral's*: bad requests, minus those of deferral on the fast variant, in points. *Value behind*:
the value in time of deferral on the fast variant, or of the fluid limit at loads up to 0.9, minus
ours. The value in time is the mean accuracy over all requests; bad ones count 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness.rows import Row, series
from ray_slo.core import Cluster, LatencyProfile, Model, Variant
from ray_slo.policies.registry import policy_for
from ray_slo.policies.shared import fluid
from ray_slo.simulation import Gamma, Workload, simulate

SOURCE = "ray-slo"
MODELS, WORKERS, SLO_S = 10, 16, 0.1
FAST = Variant("fast", {"default": LatencyProfile.linear(0.001, 0.006)}, 70.0)
GOOD = Variant("good", {"default": LatencyProfile.linear(0.003, 0.015)}, 80.0)
LOADS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.2, 1.4)
REASONABLE = 0.9
SHAPES = {"Poisson": 1.0, "Γ(0.3)": 0.3}
ALONE = "deferred, fast variant"
SUBJECT = "auto"
ASKED = [
    (
        "summary*",
        "most bad beyond deferral's on the fast variant",
        "≤",
        0.1,
        "from load 1 on, all use the fast network; two seeds differ in both directions",
    ),
    (
        "summary*",
        "most value behind deferral on the fast variant",
        "≤",
        0.1,
        "from load 1 on, all use the fast network; two seeds differ in both directions",
    ),
]
SYSTEMS: dict[str, tuple[str, dict[str, Any], bool]] = {
    SUBJECT: (SUBJECT, {}, True),
    "price": ("price", {}, True),
    "deferred, both variants": ("deferred", {}, True),
    ALONE: ("deferred", {}, False),
}


@dataclass(frozen=True)
class Point:
    """Figures of a system at a load: `bad` is a share of 1, `accuracy` in percent."""

    bad: float
    accuracy: float

    @property
    def value(self) -> float:
        """Mean accuracy over all requests, percent."""
        return self.accuracy * (1 - self.bad)


def models(both: bool = True) -> list[Model]:
    """Return ten equal models, with both variants or only the fast one; accurate variants first."""
    return [
        Model(
            f"m{i}",
            SLO_S,
            tuple(replace(v, name=f"{v.name}{i}") for v in ((GOOD, FAST) if both else (FAST,))),
        )
        for i in range(MODELS)
    ]


def capacity() -> float:
    """Return the requests per second that the fast variants can serve."""
    profile = FAST.profiles["default"]
    return WORKERS * max(b / profile(b) for b in range(1, profile.max_batch_within(SLO_S) + 1))


def limit(rate: float) -> Point:
    """Return the figures of the fluid limit at this rate, in requests per second."""
    rates = {model.name: rate / MODELS for model in models()}
    found = fluid.solve(fluid.Problem(models(), rates, {"default": WORKERS}))
    return Point(sum(found.unserved.values()) / rate, found.accuracy)


def measure(name: str, rate: float, shape: float, requests: float, seed: int) -> Point:
    policy, kwargs, both = SYSTEMS[name]
    served = models(both)
    warmup_s = 2.0
    report = simulate(
        policy_for(policy, kwargs, variants={m.name: len(m.variants) for m in served}),
        Cluster.uniform(served, WORKERS),
        Workload(arrivals=Gamma(rate=rate, shape=shape)),
        warmup_s=warmup_s,
        duration_s=warmup_s + requests / rate,
        seed=seed,
    )
    return Point(report.bad_rate(), report.accuracy or 0.0)


def run(quick: bool, seed: int) -> list[Row]:
    loads = (0.4, 0.8, 1.2) if quick else LOADS
    requests = 4_000 if quick else 20_000
    rows: list[Row] = []
    for arrivals, shape in SHAPES.items():
        points = {
            name: {load: measure(name, load * capacity(), shape, requests, seed) for load in loads}
            for name in SYSTEMS
        }
        rows += summary(f"summary, {arrivals} · {SUBJECT}", points)
        points["fluid limit"] = {load: limit(load * capacity()) for load in loads}
        for what, unit in (("bad", "%"), ("accuracy", "%")):
            values = {
                name: {load: 100 * p.bad if what == "bad" else p.accuracy for load, p in of.items()}
                for name, of in points.items()
            }
            rows += series(f"{what}, {arrivals}", values, f"{what} at {{:g}}", unit)
    return rows


def summary(case: str, points: dict[str, dict[float, Point]]) -> list[Row]:
    """Return the differences that should be zero or less; see the module's docstring."""
    ours, alone = points[SUBJECT], points[ALONE]
    calm = [load for load in ours if load <= REASONABLE]
    behind = max(limit(load * capacity()).value - ours[load].value for load in calm)
    return [
        Row(
            case,
            "most bad beyond deferral's on the fast variant",
            "points",
            100 * max(ours[load].bad - alone[load].bad for load in ours),
        ),
        Row(
            case,
            "most value behind deferral on the fast variant",
            "points",
            max(alone[load].value - ours[load].value for load in ours),
        ),
        Row(case, f"most value behind the fluid limit, to load {REASONABLE:g}", "points", behind),
    ]
