"""Problems of `planning.tiers` that several tests solve."""

from __future__ import annotations

import numpy as np

from ray_slo.core import LatencyProfile, Variant
from ray_slo.planning.catalogue import InstanceType
from ray_slo.planning.tiers import Problem


def kind(name, price):
    return InstanceType(name=name, price_per_hour=price)


def problem(seed=0, **changes):
    """A fast type and a cheap one; three variants, each twice as fast as the one before, and the
    cheap type in time for small sizes only."""
    rng = np.random.default_rng(seed)
    slow = rng.uniform(2.5, 4.5)
    variants = [
        Variant(
            name,
            {
                "gpu": LatencyProfile.linear(0.04 * part, 0.2, 20),
                "cpu": LatencyProfile.linear(0.04 * slow * part, 0.05, 20),
            },
            accuracy,
        )
        for name, part, accuracy in (("l", 1.0, 80.0), ("m", 0.5, 76.0), ("s", 0.25, 70.0))
    ]
    fields = {
        "types": [kind("gpu", 1.0), kind("cpu", round(float(rng.uniform(0.25, 0.4)), 2))],
        "variants": variants,
        "demand": float(rng.uniform(4, 14)),
        "latency_slo_s": 1.2,
        "sizes": rng.integers(1, 21, 12),
        "budget_per_hour": 3.0,
    }
    return Problem(**{**fields, **changes})
