"""Pools of strong and weak workers, and requests of sizes."""

from __future__ import annotations

from ray_slo.core import (
    Cluster,
    DispatchDelay,
    LatencyProfile,
    Model,
    Request,
    Variant,
    Worker,
)

SLO = 8.0


def pool(kinds, *, alphas=(0.5, 1.0), beta=0.0, slo=SLO, delay=0.0, largest=20):
    """Workers "strong0", "weak1", … in the order of `kinds` ("s" or "w")."""
    names = {"s": "strong", "w": "weak"}
    profiles = {
        hardware: LatencyProfile.linear(alpha, beta, largest)
        for hardware, alpha in zip(names.values(), alphas, strict=True)
    }
    model = Model("m", slo, (Variant("v", profiles),))
    workers = [Worker(f"{names[k]}{i}", names[k], frozenset({"v"})) for i, k in enumerate(kinds)]
    return Cluster.of([model], workers, DispatchDelay(delay))


def request(id, size, arrival=0.0, slo=SLO):
    return Request(id, "m", arrival, arrival + slo, size)
