"""A first profile that is wrong: the model was four times slower while it was measured."""

import contextlib
import time

from apps import Warming
from waiting import status_of

import ray_slo
from ray_slo.errors import SLOError

SLO_MS = 300
App = ray_slo.deployment(
    latency_slo_ms=SLO_MS,
    ray_actor_options={"num_cpus": 0.1},
    profile_seconds=2.0,
    policy="deferred",
    name="warming",
)(Warming)


def answered(handle, count, every_s):
    """Send requests at a steady rate; the share that is answered."""
    calls = []
    for item in range(count):
        calls.append(handle.remote(item))
        time.sleep(every_s)
    found = 0
    for call in calls:
        with contextlib.suppress(SLOError):
            found += call.result() is not None
    return found / count


def test_a_first_profile_that_is_wrong_by_four_costs_a_few_requests(ray_cluster):
    with ray_cluster.running(App.bind(), "warming", "/warming") as handle:
        first_ms = believed_ms(handle)
        assert first_ms > 3.5 * Warming.TIME_S * 1e3
        answered(handle, 20, 0.05)
        assert answered(handle, 60, 0.05) > 0.8  # 4 × the time: at most a third, one at a time
        assert believed_ms(handle) < 0.6 * first_ms


def believed_ms(handle):
    (profile,) = status_of(handle)["profiles"].values()
    return profile["latency_1_ms"]
