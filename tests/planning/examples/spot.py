"""Problems of `planning.spot` that several tests solve."""

from __future__ import annotations

from ray_slo.core import LatencyProfile
from ray_slo.planning.catalogue import InstanceType
from ray_slo.planning.kairos import Problem


def kind(name, price, spot_price=None, per_hour=0.0):
    return InstanceType(
        name=name,
        price_per_hour=price,
        spot_price_per_hour=spot_price,
        interruptions_per_hour=per_hour,
    )


def problem(per_hour=20 / 9, budget=2.0, spot_price=0.1):
    """Small requests take 0.1 s anywhere, large ones 0.1 s on "base" and too long on "aux"; there
    are 1 in 10 of them. 20/9 interruptions an hour and 3 minutes: there 90 % of the time."""
    types = [kind("base", 1.0), kind("aux", 0.25, spot_price, per_hour)]
    profiles = {"base": LatencyProfile([0.1, 0.1]), "aux": LatencyProfile([0.1, 9.0])}
    return Problem(types, profiles, 1.0, [1] * 9 + [2], budget)
