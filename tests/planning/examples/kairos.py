"""Problems of `papers.kairos` that several tests solve."""

from __future__ import annotations

import numpy as np

from ray_slo.core import LatencyProfile
from ray_slo.papers.kairos import (
    Market,
)
from ray_slo.planning.catalogue import InstanceType


def kind(name, price):
    return InstanceType(name=name, price_per_hour=price)


def random_problem(seed, types=3, sizes=12):
    rng = np.random.default_rng(seed)
    kinds = [kind(f"t{k}", float(p)) for k, p in enumerate(rng.uniform(0.2, 1.0, types))]
    kinds[0] = kind("t0", 0.9)
    profiles = {"t0": LatencyProfile.linear(0.01, 0.3, 40)}
    for k in range(1, types):
        profiles[f"t{k}"] = LatencyProfile.linear(rng.uniform(0.03, 0.09), 0.05, 40)
    drawn = np.sort(rng.integers(1, 41, sizes))
    return Market(kinds, profiles, 1.0, np.repeat(drawn, rng.integers(1, 20, sizes)), 4.0)
