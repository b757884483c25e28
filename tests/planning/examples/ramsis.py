"""Problems of `papers.ramsis` that several tests solve."""

from ray_slo.core.profiles import LatencyProfile
from ray_slo.papers.ramsis import Problem

FAST = ("fast", 60.0, LatencyProfile.linear(0.006, 0.012, 16))


MIDDLE = ("middle", 72.0, LatencyProfile.linear(0.014, 0.020, 16))


SLOW = ("slow", 81.0, LatencyProfile.linear(0.030, 0.050, 16))


VARIANTS = (FAST, MIDDLE, SLOW)


def problem(**fields):
    return Problem(**{"variants": VARIANTS, "slo_s": 0.15, "rate": 120, "num_workers": 3, **fields})
